"""A batch on the device: floats, erasing, mixup, cutmix and mixed targets, for any number of workers.

A worker holds some rows of the global batch (`BatchRows`). All draws are made for the whole global batch from a
generator keyed by (seed, step), and rows 2i and 2i + 1 are partners; the last row of an odd batch takes the row before
it. The result for a row is therefore a function of (seed, step, place), and a worker that holds whole pairs needs no
other rows. timm pairs rows by reversing each worker's batch; here the order of the epoch makes the pairs random, of
different row groups. Pair i takes draw i modulo D, so that neighboring pairs, such as the copies of one pair, differ
in their draws.
Shapes: B rows, H x W pixels, C colors, K classes, G rows of the global batch, E erased ones, D draws of mixing.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.config.augmentation import Augment, Mix, Normalize
from vitray.config.sections import Need
from vitray.data.augment.keyed_random import step_generator

# The defaults of timm: share of the area, and height / width, of an erased rectangle.
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)


class DeviceBatch(NamedTuple):
    """One worker's part of one step; its tensors are on the device."""

    images: Tensor
    """uint8, BHWC; BVHWC, the global views, for tasks that take several."""
    labels: Tensor
    positions: np.ndarray
    rows: np.ndarray
    masks: Tensor | None = None
    """The mask of each image (BN) or global view (BVN), for tasks that need one."""
    views: Tensor | None = None
    """uint8, BVHWC: the local views, for tasks that take several."""

    hidden: np.ndarray | None = None
    """The number of hidden patches of all views of an image: on the host, which would wait for the device to count."""

    def inputs(self, needs: Sequence[Need], normalize: Normalize, part: slice = slice(None)) -> list[Any]:
        """Return the normalized images, and what else a task without labels needs, of a part of the batch."""
        found: list[Any] = [normalized(self.images[part], normalize)]
        for need in needs:
            match need:
                case "labels" | "masks":
                    found.append(getattr(self, need)[part])
                case "views":
                    none = self.images.new_empty((len(self.images), 0, 0, 0, 3))
                    found.append(normalized((none if self.views is None else self.views)[part], normalize))
                case "hidden":
                    assert self.hidden is not None
                    found.append(int(self.hidden[part].sum()))
        return found


class BatchSettings(NamedTuple):
    """The settings that turn uint8 images into a training batch."""

    augment: Augment
    mix: Mix
    normalize: Normalize
    num_classes: int
    shape: tuple[int, int] | None = None
    """Height and width to which the images are shrunk; None for their own."""


class BatchRows(NamedTuple):
    """The rows of the global batch that a tensor holds: their places, ascending, of `total`."""

    places: np.ndarray
    total: int


class Mixing(NamedTuple):
    """Draws of mixing: inside its box, an image keeps a share of itself, and takes the rest from its partner."""

    boxes: np.ndarray
    """Top, bottom, left and right of each draw (D4): the whole image for mixup."""
    inside: np.ndarray
    """The share that remains inside the box (D): 0 for cutmix."""
    shares: np.ndarray
    """The share that remains of the whole image, and so of its label (D)."""


def prepare_batch(
    images_BHWC: Tensor, labels_B: Tensor, settings: BatchSettings, seed: int, step: int, rows: BatchRows | None = None
) -> tuple[Tensor, Tensor]:
    """Return training images (BCHW, float32) and their mixed targets (BK); without `rows`, of the whole batch.

    Labels are classes, or the states of all classes (BK); the target of an unknown class is NaN.
    """
    augment, mix, normalize, num_classes, shape = settings
    rows = rows or BatchRows(np.arange(len(images_BHWC)), len(images_BHWC))
    images_BCHW = normalized(images_BHWC, normalize)
    if shape is not None:
        images_BCHW = F.interpolate(images_BCHW, size=shape, mode="bilinear", antialias=True)
    targets_BK = targets_of(labels_B, num_classes)
    if augment.erase:
        erase_rectangles(images_BCHW, augment.erase, rows, step_generator(seed, step, "erase"))
    if mix.is_mixing:
        partner_B = partners(rows)
        height, width = images_BCHW.shape[2:]
        mixing = draw_mixing(mix, mix.draws(rows.total), (height, width), step_generator(seed, step, "mix"))
        drawn_B = rows.places // 2 % len(mixing.shares)
        return mix_rows(images_BCHW, targets_BK, Mixing(*(values[drawn_B] for values in mixing)), partner_B)
    return images_BCHW, targets_BK


def normalized(images_BHWC: Tensor, normalize: Normalize) -> Tensor:
    """Return uint8 images as normalized floats (BCHW, channels last in memory); of views (BVHWC), as BVCHW."""
    if images_BHWC.ndim == 5:
        return normalized(images_BHWC.flatten(0, 1), normalize).unflatten(0, images_BHWC.shape[:2])
    mean_C11, std_C11 = (_per_channel(values, images_BHWC.device) for values in (normalize.mean, normalize.std))
    floats_BCHW = images_BHWC.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.channels_last)
    return floats_BCHW.sub_(mean_C11).div_(std_C11)


@functools.cache
def _per_channel(values: tuple[float, float, float], device: torch.device) -> Tensor:
    """Return one value per channel on the scale of bytes. A device gets one copy, because the host waits for it."""
    return torch.tensor(values).mul(255).view(3, 1, 1).to(device)


def targets_of(labels_B: Tensor, num_classes: int) -> Tensor:
    """Return the targets (BK) of classes, or of the states of all classes (BK): NaN where a class is unknown."""
    return one_hot(labels_B, num_classes) if labels_B.ndim == 1 else known_or_nan(labels_B)


def known_or_nan(states_BK: Tensor) -> Tensor:
    """Return states of classes as floats: 1 for a present class, 0 for an absent one, NaN for an unknown one."""
    return torch.where(states_BK < 0, torch.nan, states_BK.float())


def one_hot(labels_B: Tensor, num_classes: int) -> Tensor:
    """Return one-hot rows (BK) without the device synchronization of torch's own `one_hot`."""
    targets_BK = torch.zeros((len(labels_B), num_classes), device=labels_B.device)
    return targets_BK.scatter_(1, labels_B.long()[:, None], 1.0)


# ---- mixup and cutmix ------------------------------------------------------------------------------------------------


def partners(rows: BatchRows) -> np.ndarray:
    """Return the index, among these rows, of each row's partner."""
    partner_B = rows.places ^ 1
    partner_B = np.where(partner_B < rows.total, partner_B, np.maximum(rows.places - 1, 0))
    index_B = np.searchsorted(rows.places, partner_B)
    is_alone_B = np.append(rows.places, -1)[index_B] != partner_B
    if is_alone_B.any():
        raise ValueError(
            f"mixup and cutmix pair rows 2i and 2i + 1 of the global batch of {rows.total}; row"
            f" {rows.places[is_alone_B][0]} is separated from its partner: choose a batch size that gives"
            " every worker and every accumulation step an even number of rows"
        )
    return index_B


def draw_mixing(mix: Mix, draws: int, size: tuple[int, int], rng: np.random.Generator) -> Mixing:
    """Return D draws, made as in timm: mixup or cutmix, the share (1 mixes nothing), and the box of a cutmix."""
    is_cut_D = rng.random(draws) < (mix.switch if mix.mixup and mix.cutmix else float(mix.cutmix > 0))
    alpha_D = np.where(is_cut_D, mix.cutmix, mix.mixup)
    share_D = rng.beta(alpha_D, alpha_D)
    share_D[rng.random(draws) >= mix.chance] = 1.0
    boxes_D4 = cut_boxes(share_D, rng.integers(size, size=(draws, 2)), size)
    boxes_D4[~is_cut_D] = 0, size[0], 0, size[1]
    top_D, bottom_D, left_D, right_D = boxes_D4.T
    # The border may clip the box, so the share of a cut is counted in pixels.
    uncut_D = 1 - (bottom_D - top_D) * (right_D - left_D) / (size[0] * size[1])
    return Mixing(boxes_D4, np.where(is_cut_D, 0.0, share_D), np.where(is_cut_D, uncut_D, share_D))


def cut_boxes(share_D: np.ndarray, center_D2: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return cutmix boxes (D4) about some centers; each covers 1 - share of the image before it is clipped to it.

    As in timm from 1.0.31 on. Earlier versions cut a pixel less of an odd side.
    """
    cut_D2 = (np.array(size) * np.sqrt(1 - share_D)[:, np.newaxis]).astype(np.int64)
    start_D2 = center_D2 - cut_D2 // 2
    start_D2, end_D2 = np.maximum(start_D2, 0), np.minimum(start_D2 + cut_D2, size)
    return np.stack([start_D2, end_D2], axis=-1).reshape(-1, 4)


def mix_rows(images_BCHW: Tensor, targets_BK: Tensor, mixing: Mixing, partner_B: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return each image and target mixed with its partner's, by one draw for each row."""
    boxes_B4, inside_B, share_B = mixing
    if (share_B == 1).all():
        return images_BCHW, targets_BK
    device = images_BCHW.device
    index_B = to_device(torch.from_numpy(partner_B), device)
    # `share` and `1 - share` are rounded to float32 separately, as in timm. Subtracted in float32, a partner's share
    # below the epsilon would become 0, and its class would drop out of the target.
    numbers_B7 = np.column_stack([boxes_B4, inside_B, share_B, 1 - share_B]).astype(np.float32)
    numbers_7B1 = to_device(torch.from_numpy(numbers_B7), device).T[:, :, None]
    top_B1, bottom_B1, left_B1, right_B1, inside_B1, share_B1, partner_share_B1 = numbers_7B1
    height, width = (torch.arange(side, device=device) for side in images_BCHW.shape[2:])
    is_high_BH = (height >= top_B1) & (height < bottom_B1)
    is_wide_BW = (width >= left_B1) & (width < right_B1)
    is_inside_BHW = is_high_BH[:, :, None] & is_wide_BW[:, None]
    kept_BHW = torch.where(is_inside_BHW, inside_B1[:, :, None], 1.0)
    mixed_BCHW = torch.lerp(images_BCHW[index_B], images_BCHW, kept_BHW[:, None])
    own_BK = torch.where(share_B1 == 0, 0.0, targets_BK * share_B1)
    other_BK = torch.where(partner_share_B1 == 0, 0.0, targets_BK[index_B] * partner_share_B1)
    mixed_BK = own_BK.nan_to_num(0.0) + other_BK.nan_to_num(0.0)
    # A class is unknown where neither image is known to show it, and one may.
    is_unknown_BK = (own_BK.isnan() | other_BK.isnan()) & (mixed_BK == 0)
    return mixed_BCHW, torch.where(is_unknown_BK, torch.nan, mixed_BK)


# ---- erasing ---------------------------------------------------------------------------------------------------------


def erase_rectangles(images_BCHW: Tensor, chance: float, rows: BatchRows, rng: np.random.Generator) -> None:
    """Fill a rectangle of some images with normal noise, in place, like timm's `pixel` mode.

    All rectangles of a step take their noise from one sheet, each at its own place.
    """
    _, colors, height, width = images_BCHW.shape
    boxes_B6 = draw_erased_boxes(rows.total, chance, height, width, rng)[rows.places]
    sheet_seed = int(rng.integers(2**63))
    if boxes_B6[:, 2].any():
        # Drawn on the CPU: the noise is the same on every device.
        sheet_CHW = torch.randn(colors, height, width, generator=torch.Generator().manual_seed(sheet_seed))
        fill_boxes(images_BCHW, boxes_B6, sheet_CHW)


def draw_erased_boxes(total: int, chance: float, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return a box for each row of the global batch (G6): top, left, height and width, and the place of its noise.

    The place is top and left on the sheet. Rows that are not erased have height 0.
    """
    chosen_E = np.flatnonzero(rng.random(total) < chance)
    number = len(chosen_E)
    # As in timm, the first of ten tries that fits.
    area_E10 = rng.uniform(*ERASED_AREA, (number, 10)) * height * width
    ratio_E10 = np.exp(rng.uniform(math.log(ERASED_RATIO[0]), math.log(ERASED_RATIO[1]), (number, 10)))
    high_E10, wide_E10 = np.rint(np.sqrt(area_E10 * ratio_E10)), np.rint(np.sqrt(area_E10 / ratio_E10))
    fits_E10 = (high_E10 < height) & (wide_E10 < width)
    first_E = np.arange(number), fits_E10.argmax(1)
    size_E2 = np.stack([high_E10[first_E], wide_E10[first_E]], axis=1)
    places_E4 = rng.random((number, 4)) * np.tile((height + 1, width + 1) - size_E2, 2)
    boxes_G6 = np.zeros((total, 6), dtype=np.int64)
    boxes_E6 = np.column_stack([places_E4[:, :2], size_E2, places_E4[:, 2:]]).astype(np.int64)
    boxes_G6[chosen_E] = np.where(fits_E10.any(axis=1, keepdims=True), boxes_E6, 0)
    return boxes_G6


def fill_boxes(images_BCHW: Tensor, boxes_B6: np.ndarray, sheet_CHW: Tensor) -> None:
    """Fill the box of each image with its part of the sheet, in place; the images are channels last in memory.

    The number of kernels does not depend on the number of boxes. L lines of boxes, P pixels of these lines.
    """
    colors, height, width = sheet_CHW.shape
    high_B = boxes_B6[:, 2]
    row_L = np.repeat(np.arange(len(boxes_B6)), high_B)
    line_L = np.arange(len(row_L)) - np.repeat(high_B.cumsum() - high_B, high_B)  # 0 is the first line of each box
    top_L, left_L, _, wide_L, y_L, x_L = boxes_B6[row_L].T
    pixels_before_L = wide_L.cumsum() - wide_L
    target_L = (row_L * height + top_L + line_L) * width + left_L - pixels_before_L
    source_L = (y_L + line_L) * width + x_L - pixels_before_L
    numbers_3L = to_device(torch.from_numpy(np.stack([target_L, source_L, wide_L])), images_BCHW.device)
    # Without `output_size`, the host would wait for the device to know the number of pixels.
    line_P = torch.repeat_interleave(numbers_3L[2], output_size=int(wide_L.sum()))
    target_P, source_P = numbers_3L[:2, line_P] + torch.arange(len(line_P), device=line_P.device)
    sheet_HWC = to_device(sheet_CHW, images_BCHW.device).to(images_BCHW.dtype).permute(1, 2, 0)
    images_BCHW.permute(0, 2, 3, 1).view(-1, colors)[target_P] = sheet_HWC.reshape(-1, colors)[source_P]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on a device; the host does not wait for the copy."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # only copies from pinned memory are asynchronous
    return tensor.to(device, non_blocking=True)
