"""A sweep as a value: what is drawn and how, what goes together, and every point of it a run before one is trained."""

from vitray.sweep.space.checks import check_space as check_space
from vitray.sweep.space.checks import check_words as check_words
from vitray.sweep.space.checks import extended as extended
from vitray.sweep.space.checks import read_space as read_space
from vitray.sweep.space.checks import words_apart as words_apart
from vitray.sweep.space.points import BEFORE as BEFORE
from vitray.sweep.space.points import Point as Point
from vitray.sweep.space.points import Space as Space
from vitray.sweep.space.points import draw_point as draw_point
from vitray.sweep.space.points import grid_points as grid_points
from vitray.sweep.space.points import name_of as name_of
from vitray.sweep.space.points import random_points as random_points
from vitray.sweep.space.points import run_of as run_of
from vitray.sweep.space.points import settled as settled
from vitray.sweep.space.points import stage_space as stage_space
