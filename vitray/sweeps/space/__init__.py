"""Search spaces: distributions, constraints and stages, and the points that follow from them."""

from vitray.sweeps.space.checks import check_overrides as check_overrides
from vitray.sweeps.space.checks import check_set_once as check_set_once
from vitray.sweeps.space.checks import check_space as check_space
from vitray.sweeps.space.checks import extend_space as extend_space
from vitray.sweeps.space.checks import read_space as read_space
from vitray.sweeps.space.checks import split_overrides as split_overrides
from vitray.sweeps.space.points import FOLD as FOLD
from vitray.sweeps.space.points import REPEATS as REPEATS
from vitray.sweeps.space.points import SEED as SEED
from vitray.sweeps.space.points import STAGES_DIR as STAGES_DIR
from vitray.sweeps.space.points import Space as Space
from vitray.sweeps.space.points import SweepPoint as SweepPoint
from vitray.sweeps.space.points import draw_point as draw_point
from vitray.sweeps.space.points import grid_points as grid_points
from vitray.sweeps.space.points import name_of as name_of
from vitray.sweeps.space.points import placeholders as placeholders
from vitray.sweeps.space.points import random_points as random_points
from vitray.sweeps.space.points import resolve_stages as resolve_stages
from vitray.sweeps.space.points import run_of as run_of
from vitray.sweeps.space.points import shape_of as shape_of
from vitray.sweeps.space.points import stage_models as stage_models
from vitray.sweeps.space.points import stage_space as stage_space
