"""Which patches of an image are predicted, and what is seen of them: a function of (seed, epoch, position).

Shapes: B images, N patches (row by row), M of them predicted, K kinds of draws, T tries at a rectangle.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

import numpy as np

from vitray.config.pretraining import BlockMask, Mask, RandomMask, predicted_patches
from vitray.data.augment.keyed_random import raw_draws

Grid = tuple[int, int]

# What stands in place of the number of a patch.
VISIBLE, HIDDEN = -2, -1

# Tries at a rectangle whose draws are made at once.
TRIES = 8


def draw_sources(mask: Mask, grid: Grid, seed: int, epoch: int | None, positions: Iterable[int]) -> np.ndarray:
    """For each patch of each image (BN), what the network sees there and whether it predicts it.

    VISIBLE is seen and not predicted, HIDDEN predicted and not seen; a number is the patch that is seen in place of one
    that is predicted, which may be itself. An image is known by its position in the epoch. Epoch None is that of the
    evaluations, which all hide the same.
    """
    keys = [f"mask {seed} {epoch} {position}" for position in positions]
    patches = grid[0] * grid[1]
    match mask:
        case RandomMask():
            return _draw_patches(keys, mask, patches, predicted_patches(mask, patches))
        case BlockMask():
            return np.where(_draw_blocks(keys, mask, grid, predicted_patches(mask, patches)), HIDDEN, VISIBLE)
        case _:
            assert_never(mask)


def _drawn(keys: Sequence[str], numbers: int) -> np.ndarray:
    return np.stack([raw_draws(key, numbers) for key in keys])


def _shares(draws: np.ndarray) -> np.ndarray:
    """64-bit numbers as floats from 0 to 1, 1 left out."""
    return (draws >> np.uint64(11)) * 2.0**-53


# ---- one by one ------------------------------------------------------------------------------------------------------


def _draw_patches(keys: Sequence[str], mask: RandomMask, patches: int, predicted: int) -> np.ndarray:
    kinds = 3 if mask.other + mask.kept else 1
    draws_KBN = _drawn(keys, kinds * patches).reshape(len(keys), kinds, patches).swapaxes(0, 1)
    source_BN = np.full((len(keys), patches), VISIBLE)
    own_BM = np.argsort(draws_KBN[0], axis=1, kind="stable")[:, :predicted]
    if kinds == 1:
        np.put_along_axis(source_BN, own_BM, HIDDEN, axis=1)
        return source_BN
    fate_BM = _shares(np.take_along_axis(draws_KBN[1], own_BM, axis=1))
    other_BM = (np.take_along_axis(draws_KBN[2], own_BM, axis=1) % np.uint64(patches - 1)).astype(np.int64)
    other_BM += other_BM >= own_BM  # any patch but itself
    seen_BM = np.select([fate_BM < mask.other, fate_BM < mask.other + mask.kept], [other_BM, own_BM], HIDDEN)
    np.put_along_axis(source_BN, own_BM, seen_BM, axis=1)
    return source_BN


# ---- rectangles ------------------------------------------------------------------------------------------------------


def _draw_blocks(keys: Sequence[str], mask: BlockMask, grid: Grid, predicted: int) -> np.ndarray:
    """Whether each patch is hidden (BN). All images take their next rectangle at the same time, by their own draws."""
    hidden_BN = np.zeros((len(keys), grid[0] * grid[1]), bool)
    missing_B = np.full(len(keys), predicted)
    turn = 0
    while len(rows := np.flatnonzero(missing_B)):
        turn += 1
        # Longer draws of a key begin with its shorter ones.
        draws_BT4 = _drawn([keys[row] for row in rows.tolist()], 4 * TRIES * turn).reshape(len(rows), -1, 4)[:, -TRIES:]
        for draws_B4 in _shares(draws_BT4).swapaxes(0, 1):
            new_BN = draw_rectangles(draws_B4, missing_B[rows], mask, grid) & ~hidden_BN[rows]
            # The end of the last rectangle is cut off; of an image that has enough nothing more is hidden.
            new_BN &= new_BN.cumsum(axis=1) <= missing_B[rows, None]
            hidden_BN[rows] |= new_BN
            missing_B[rows] -= new_BN.sum(axis=1)
    return hidden_BN


def draw_rectangles(draws_B4: np.ndarray, missing_B: np.ndarray, mask: BlockMask, grid: Grid) -> np.ndarray:
    """A rectangle of each image as the patches in it (BN), none where it does not fit: area, aspect, and then a place.

    The area is drawn from the least to what is missing, or is the least where less is missing.
    """
    low, high = np.log(mask.aspect)
    area_B = mask.least + draws_B4[:, 0] * np.maximum(missing_B - mask.least, 0)
    aspect_B = np.exp(low + draws_B4[:, 1] * (high - low))
    sides_B2 = np.rint(np.sqrt(np.stack([area_B * aspect_B, area_B / aspect_B], axis=1)))
    free_B2 = np.array(grid) - sides_B2 + 1
    start_B2 = np.floor(draws_B4[:, 2:] * free_B2)
    end_B2 = np.where((free_B2 > 0).all(axis=1, keepdims=True), start_B2 + sides_B2, start_B2)
    within_BR, within_BC = (
        (np.arange(side) >= start_B2[:, axis, None]) & (np.arange(side) < end_B2[:, axis, None])
        for axis, side in enumerate(grid)
    )
    return (within_BR[:, :, None] & within_BC[:, None, :]).reshape(len(draws_B4), -1)
