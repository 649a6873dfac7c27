"""A run as a value: `Run` and its sections, read from YAML and `a.b=c` words, bad input refused with one message each.

Nothing mutates a `Run`; `run.replace({"model.pool": "mean"})` makes another. The dotted path is the one way to name a
setting: on the command line, in a sweep and in MLflow. Knows neither torch nor ray, so that a recipe loads at once.
"""

from vitray.config.run import Run as Run
from vitray.config.run import load_run as load_run
from vitray.config.sections import Learned as Learned
from vitray.config.sections import Model as Model
from vitray.config.sections import NoPositions as NoPositions
from vitray.config.sections import SinCos2d as SinCos2d
