"""`Run`, the settings of an experiment as one frozen value, read from YAML recipes and `a.b=c` overrides.

`run.replace({"model.pool": "mean"})` returns another run. The dotted path names a setting on the command line, in a
sweep and in MLflow. This package imports neither torch nor ray, so that a recipe loads at once.
"""

from vitray.config.model import Learned as Learned
from vitray.config.model import Learned2d as Learned2d
from vitray.config.model import Model as Model
from vitray.config.model import NoPositions as NoPositions
from vitray.config.model import Positions as Positions
from vitray.config.model import Relative as Relative
from vitray.config.model import Rope as Rope
from vitray.config.model import SinCos2d as SinCos2d
from vitray.config.parsing import split_words as split_words
from vitray.config.run import Run as Run
from vitray.config.run import load_run as load_run
