"""The hidden and predicted patches of each image, as a function of (seed, epoch, position).

Shapes: B images, N patches (row by row), M predicted patches, K kinds of draws, T tries at a rectangle.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

import numpy as np

from vitray.config.pretraining import BlockMask, Mask, RandomMask, predicted_patches
from vitray.config.self_supervised import PatchMask
from vitray.data.augment.keyed_random import raw_draws

Grid = tuple[int, int]

# Codes in place of a patch number.
VISIBLE, HIDDEN = -2, -1

# Rectangles drawn at a time.
TRIES = 8


def draw_sources(mask: Mask, grid: Grid, seed: int, epoch: int | None, positions: Iterable[int]) -> np.ndarray:
    """Return the source of each patch of each image (BN): VISIBLE, HIDDEN, or the number of a patch.

    VISIBLE patches are seen and not predicted, HIDDEN ones predicted and not seen. A number means that the patch is
    predicted while the network sees the patch of that number, which may be the same one. `positions` are those in the
    epoch; all evaluations use epoch None, so they hide the same patches.
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


def draw_view_masks(
    mask: PatchMask, grid: Grid, seed: int, epoch: int | None, positions: Sequence[int], views: int
) -> np.ndarray:
    """Return whether each patch of each global view is hidden (BVN), as a function of (seed, epoch, position, view)."""
    keys = [f"mask {seed} {epoch} {position} {view}" for position in positions for view in range(views)]
    hidden = np.zeros((len(keys), grid[0] * grid[1]), bool)
    if keys:
        share_K2 = _shares(_draws([f"{key} ratio" for key in keys], 2))
        low, high = mask.ratio
        ratio_K = np.where(share_K2[:, 0] < mask.chance, low + (high - low) * share_K2[:, 1], 0.0)
        rectangles = BlockMask(min_patches=mask.min_patches)
        hidden = _draw_blocks(keys, rectangles, grid, np.floor(ratio_K * hidden.shape[1]).astype(np.int64))
    return hidden.reshape(len(positions), views, grid[0] * grid[1])


def _draws(keys: Sequence[str], numbers: int) -> np.ndarray:
    return np.stack([raw_draws(key, numbers) for key in keys])


def _shares(draws: np.ndarray) -> np.ndarray:
    """Return 64-bit numbers as floats in [0, 1)."""
    return (draws >> np.uint64(11)) * 2.0**-53


# ---- single patches --------------------------------------------------------------------------------------------------


def _draw_patches(keys: Sequence[str], mask: RandomMask, patches: int, predicted: int) -> np.ndarray:
    kinds = 3 if mask.other + mask.kept else 1
    draws_KBN = _draws(keys, kinds * patches).reshape(len(keys), kinds, patches).swapaxes(0, 1)
    mask_BN = np.full((len(keys), patches), VISIBLE)
    own_BM = np.argsort(draws_KBN[0], axis=1, kind="stable")[:, :predicted]
    if kinds == 1:
        np.put_along_axis(mask_BN, own_BM, HIDDEN, axis=1)
        return mask_BN
    fate_BM = _shares(np.take_along_axis(draws_KBN[1], own_BM, axis=1))
    other_BM = (np.take_along_axis(draws_KBN[2], own_BM, axis=1) % np.uint64(patches - 1)).astype(np.int64)
    other_BM += other_BM >= own_BM  # any patch but itself
    seen_BM = np.select([fate_BM < mask.other, fate_BM < mask.other + mask.kept], [other_BM, own_BM], HIDDEN)
    np.put_along_axis(mask_BN, own_BM, seen_BM, axis=1)
    return mask_BN


# ---- rectangles ------------------------------------------------------------------------------------------------------


def _draw_blocks(keys: Sequence[str], mask: BlockMask, grid: Grid, predicted: int | np.ndarray) -> np.ndarray:
    """Return whether each patch is hidden (BN); all images draw their next rectangle at the same time.

    `predicted` is the number of hidden patches, of all images or of each.
    """
    hidden_BN = np.zeros((len(keys), grid[0] * grid[1]), bool)
    missing_B = np.full(len(keys), predicted)
    order_8N = cutting_orders(grid)
    turn = 0
    while len(rows := np.flatnonzero(missing_B)):
        turn += 1
        # A longer series of draws begins with the shorter ones of the same key.
        draws_BT4 = _draws([keys[row] for row in rows.tolist()], 4 * TRIES * turn).reshape(len(rows), -1, 4)[:, -TRIES:]
        for draws_B4 in draws_BT4.swapaxes(0, 1):
            new_BN = draw_rectangles(_shares(draws_B4), missing_B[rows], mask, grid) & ~hidden_BN[rows]
            # The last rectangle is cut to the number of missing patches, in one of eight orders: a cut that always
            # began at one corner would hide the opposite one less often. The lowest bits of a draw, which its share
            # does not contain, choose the order.
            new_BN = _cut(new_BN, missing_B[rows], order_8N[draws_B4[:, 0] & np.uint64(7)])
            hidden_BN[rows] |= new_BN
            missing_B[rows] -= new_BN.sum(axis=1)
    return hidden_BN


def _cut(new_BN: np.ndarray, missing_B: np.ndarray, order_BN: np.ndarray) -> np.ndarray:
    """Return the first missing patches of each rectangle, in the image's order."""
    ordered_BN = np.take_along_axis(new_BN, order_BN, axis=1)
    cut_BN = np.zeros_like(new_BN)
    np.put_along_axis(cut_BN, order_BN, ordered_BN & (ordered_BN.cumsum(axis=1) <= missing_B[:, None]), axis=1)
    return cut_BN


def cutting_orders(grid: Grid) -> np.ndarray:
    """Return the eight orders of the patches (8N) that go by rows or by columns from one of the corners."""
    patch_RC = np.arange(grid[0] * grid[1]).reshape(grid)
    corners = (patch_RC, patch_RC[::-1], patch_RC[:, ::-1], patch_RC[::-1, ::-1])
    return np.stack([corner_RC.ravel(order) for corner_RC in corners for order in ("C", "F")])


def draw_rectangles(draws_B4: np.ndarray, missing_B: np.ndarray, mask: BlockMask, grid: Grid) -> np.ndarray:
    """Return a rectangle of each image as its patches (BN), empty where it does not fit.

    The draws are area, aspect and place. The area is between `mask.min_patches` and the missing number of patches.
    """
    low, high = np.log(mask.aspect)
    area_B = mask.min_patches + draws_B4[:, 0] * np.maximum(missing_B - mask.min_patches, 0)
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
