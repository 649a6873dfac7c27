"""Search spaces: distributions, constraints and stages, and the points that follow from them."""

from vitray.sweep.space.checks import check_overrides as check_overrides
from vitray.sweep.space.checks import check_set_once as check_set_once
from vitray.sweep.space.checks import check_space as check_space
from vitray.sweep.space.checks import extend_space as extend_space
from vitray.sweep.space.checks import read_space as read_space
from vitray.sweep.space.checks import split_overrides as split_overrides
from vitray.sweep.space.points import STAGES_DIR as STAGES_DIR
from vitray.sweep.space.points import Space as Space
from vitray.sweep.space.points import SweepPoint as SweepPoint
from vitray.sweep.space.points import draw_point as draw_point
from vitray.sweep.space.points import grid_points as grid_points
from vitray.sweep.space.points import name_of as name_of
from vitray.sweep.space.points import placeholders as placeholders
from vitray.sweep.space.points import random_points as random_points
from vitray.sweep.space.points import resolve_stages as resolve_stages
from vitray.sweep.space.points import run_of as run_of
from vitray.sweep.space.points import shape_of as shape_of
from vitray.sweep.space.points import stage_models as stage_models
from vitray.sweep.space.points import stage_space as stage_space
