"""A batch on the device: floats, erasing, mixup, cutmix and mixed targets, for any number of workers.

A worker holds some rows of the global batch (`BatchRows`). All draws are made for the whole global batch from a
generator keyed by (seed, step), and rows 2i and 2i + 1 are partners; the last row of an odd batch takes the row before
it. The result for a row is therefore a function of (seed, step, place), and a worker that holds whole pairs needs no
other rows. timm pairs rows by reversing each worker's batch; in a shuffled order both pairings are random.
Shapes: B rows, H x W pixels, C colours, K classes, G rows of the global batch.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitray.config.augmentation import Augment, Mix, Normalise
from vitray.data.augment.keyed_random import step_generator

Box = tuple[int, int, int, int]  # top, bottom, left, right

# The defaults of timm: share of the area, and height / width, of an erased rectangle.
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)


class DeviceBatch(NamedTuple):
    """One worker's part of one step; images, labels and weights are on the device."""

    images: Tensor
    """uint8, BHWC."""
    labels: Tensor
    weights: Tensor
    positions: np.ndarray
    rows: np.ndarray


class BatchSettings(NamedTuple):
    """The settings that turn uint8 images into a training batch."""

    augment: Augment
    mix: Mix
    normalise: Normalise
    num_classes: int


class BatchRows(NamedTuple):
    """The rows of the global batch that a tensor holds: their places, ascending, of `total`."""

    places: np.ndarray
    total: int


class Mixing(NamedTuple):
    """How a batch is mixed: the share of each image that remains, and the pasted box, or None for a blend."""

    share: float
    box: Box | None = None


def prepare_batch(
    images_BHWC: Tensor, labels_B: Tensor, settings: BatchSettings, seed: int, step: int, rows: BatchRows | None = None
) -> tuple[Tensor, Tensor]:
    """Return training images (BCHW, float32) and their mixed targets (BK); without `rows`, of the whole batch."""
    augment, mix, normalise, num_classes = settings
    rows = rows or BatchRows(np.arange(len(images_BHWC)), len(images_BHWC))
    images_BCHW = normalised(images_BHWC, normalise)
    targets_BK = one_hot(labels_B, num_classes)
    if augment.erase:
        erase_rectangles(images_BCHW, augment.erase, rows, step_generator(seed, step, "erase"))
    if mix.is_mixing:
        partner_B = partners(rows).to(images_BHWC.device, non_blocking=True)
        height, width = images_BCHW.shape[2:]
        mixing = draw_mixing(mix, height, width, step_generator(seed, step, "mix"))
        images_BCHW = mix_images(images_BCHW, mixing, partner_B)
        targets_BK = torch.lerp(targets_BK[partner_B], targets_BK, mixing.share)
    return images_BCHW, targets_BK


def normalised(images_BHWC: Tensor, normalise: Normalise) -> Tensor:
    """Return uint8 images as normalised floats (BCHW, channels last in memory)."""
    images_BCHW = images_BHWC.permute(0, 3, 1, 2)
    mean, std = (torch.tensor(values).mul(255).view(3, 1, 1) for values in (normalise.mean, normalise.std))
    floats_BCHW = images_BCHW.to(torch.float32, memory_format=torch.channels_last)
    return floats_BCHW.sub_(mean.to(images_BHWC.device)).div_(std.to(images_BHWC.device))


def one_hot(labels_B: Tensor, num_classes: int) -> Tensor:
    """Return one-hot rows (BK) without the device synchronisation of torch's own `one_hot`."""
    targets_BK = torch.zeros((len(labels_B), num_classes), device=labels_B.device)
    return targets_BK.scatter_(1, labels_B.long()[:, None], 1.0)


# ---- mixup and cutmix ------------------------------------------------------------------------------------------------


def partners(rows: BatchRows) -> Tensor:
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
    return torch.from_numpy(index_B)


def draw_mixing(mix: Mix, height: int, width: int, rng: np.random.Generator) -> Mixing:
    """Draw as timm does: whether to mix, cut or blend, the share, and the place of the box."""
    if rng.random() >= mix.chance:
        return Mixing(1.0)
    cutting = mix.cutmix > 0 and (mix.mixup == 0 or rng.random() < mix.switch)
    if not cutting:
        return Mixing(rng.beta(mix.mixup, mix.mixup))
    share = rng.beta(mix.cutmix, mix.cutmix)
    box = cut_box(share, (int(rng.integers(height)), int(rng.integers(width))), height, width)
    # The border may clip the box, so the share is counted in pixels.
    return Mixing(1 - (box[1] - box[0]) * (box[3] - box[2]) / (height * width), box)


def cut_box(share: float, centre: tuple[int, int], height: int, width: int) -> Box:
    """Return the box around `centre` that leaves `share` of the image, clipped to the image."""
    side = math.sqrt(1 - share)
    cut_height, cut_width = int(height * side), int(width * side)
    top, left = centre[0] - cut_height // 2, centre[1] - cut_width // 2
    return max(top, 0), min(top + cut_height, height), max(left, 0), min(left + cut_width, width)


def mix_images(images_BCHW: Tensor, mixing: Mixing, partner_B: Tensor) -> Tensor:
    """Blend each image with its partner, or paste a box of the partner into it, in place."""
    if mixing.share == 1:
        return images_BCHW
    if mixing.box is None:
        return torch.lerp(images_BCHW[partner_B], images_BCHW, mixing.share)
    top, bottom, left, right = mixing.box
    images_BCHW[:, :, top:bottom, left:right] = images_BCHW[:, :, top:bottom, left:right][partner_B]
    return images_BCHW


# ---- erasing ---------------------------------------------------------------------------------------------------------


def erase_rectangles(images_BCHW: Tensor, chance: float, rows: BatchRows, rng: np.random.Generator) -> None:
    """Fill a rectangle of some images with normal noise, in place, like timm's `pixel` mode.

    All rectangles of a step take their noise from one sheet, each at its own place.
    """
    _, colours, height, width = images_BCHW.shape
    drawn = draw_erased_boxes(rows.total, chance, height, width, rng)
    sheet_seed = int(rng.integers(2**63))
    boxes = [drawn[place] for place in rows.places]
    if not any(boxes):
        return
    # Drawn on the CPU: the noise is the same on every device.
    sheet_CHW = torch.randn(colours, height, width, generator=torch.Generator().manual_seed(sheet_seed))
    sheet_CHW = sheet_CHW.to(images_BCHW.device, images_BCHW.dtype, non_blocking=True)
    for image_CHW, box in zip(images_BCHW, boxes, strict=True):
        if box:
            (top, bottom, left, right), (y, x) = box
            noise_CHW = sheet_CHW[:, y : y + bottom - top, x : x + right - left]
            image_CHW[:, top:bottom, left:right] = noise_CHW


def draw_erased_boxes(
    total: int, chance: float, height: int, width: int, rng: np.random.Generator
) -> list[tuple[Box, tuple[int, int]] | None]:
    """Return, for each row of the global batch, a box and the corner of its noise on the sheet, or None."""
    chosen_G = rng.random(total) < chance
    # As in timm, the first of ten tries that fits.
    area_G10 = rng.uniform(*ERASED_AREA, (total, 10)) * height * width
    ratio_G10 = np.exp(rng.uniform(math.log(ERASED_RATIO[0]), math.log(ERASED_RATIO[1]), (total, 10)))
    high_G10, wide_G10 = np.rint(np.sqrt(area_G10 * ratio_G10)), np.rint(np.sqrt(area_G10 / ratio_G10))
    fits_G10 = (high_G10 < height) & (wide_G10 < width)
    first_G = fits_G10.argmax(1)
    places_G4 = rng.random((total, 4))
    boxes: list[tuple[Box, tuple[int, int]] | None] = [None] * total
    for row in np.flatnonzero(chosen_G & fits_G10.any(1)):
        high, wide = int(high_G10[row, first_G[row]]), int(wide_G10[row, first_G[row]])
        free = (height - high + 1, width - wide + 1) * 2
        top, left, y, x = (int(place * room) for place, room in zip(places_G4[row], free, strict=True))
        boxes[row] = (top, top + high, left, left + wide), (y, x)
    return boxes
