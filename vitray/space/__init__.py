"""A sweep as a value: what is drawn and how, what goes together, and every point of it a run before one is trained."""

from vitray.space.checks import check_space as check_space
from vitray.space.checks import check_words as check_words
from vitray.space.checks import extended as extended
from vitray.space.checks import read_space as read_space
from vitray.space.checks import words_apart as words_apart
from vitray.space.points import BEFORE as BEFORE
from vitray.space.points import Point as Point
from vitray.space.points import Space as Space
from vitray.space.points import draw_point as draw_point
from vitray.space.points import grid_points as grid_points
from vitray.space.points import name_of as name_of
from vitray.space.points import random_points as random_points
from vitray.space.points import run_of as run_of
from vitray.space.points import settled as settled
from vitray.space.points import stage_space as stage_space
