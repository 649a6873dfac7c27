"""Augmentation of one image on the CPU: crop, resize, flip, policy and jitter, uint8 in and out.

Crops are views and the resize works on uint8, channels last: half the time of crop, resize and float by Pillow, within
one level of its pixels. Callers in many processes set `torch.set_num_threads(1)`.
Shapes: H rows, W columns, C colors.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, assert_never

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from vitray.config.augmentation import (
    Augment,
    CenterCrop,
    Crop,
    Interpolation,
    RandomResizedCrop,
    SimpleRandomCrop,
)
from vitray.data.augment.decode import DecodedImage, decode_scaled
from vitray.data.augment.draws import Operation, draw_operations, fill_color

ImageSize = tuple[int, int]


class CroppedView(NamedTuple):
    """A view that is only cropped, and the draws of the rest of its augmentation."""

    image: np.ndarray
    is_flipped: bool
    operations: list[Operation]


def decode_for_views(
    data: bytes, views: Iterable[tuple[Augment | CenterCrop, ImageSize, np.random.Generator]]
) -> DecodedImage:
    """Return the pixels that all views of an image need, by `decode` of their settings.

    The generators are further ones with the keys of the views: this call advances them.
    """

    def reduction(whole: ImageSize) -> float:
        return min(
            _reduction(whole, settings.crop, size, rng)
            if isinstance(settings, Augment) and settings.decode == "scaled"
            else 1.0
            for settings, size, rng in views
        )

    return decode_scaled(data, reduction)


def crop_and_draw(
    image_HWC: np.ndarray,
    settings: Augment,
    size: ImageSize,
    rng: np.random.Generator,
    whole: ImageSize | None = None,
    view: int = 0,
) -> CroppedView:
    """Return a crop of `size` (height, width) and the draws after it; `rng` is `generator(seed, epoch, key, copy)`.

    `whole` is the size of the image if its pixels are those of a smaller scale, `view` the number of the view among
    those of the image.
    """
    view_HWC = _crop(image_HWC, settings.crop, size, rng, whole or (image_HWC.shape[0], image_HWC.shape[1]))
    is_flipped = rng.random() < settings.flip
    return CroppedView(view_HWC, is_flipped, draw_operations(settings, (size[1], size[0]), rng, view))


def augment_image(
    image_HWC: np.ndarray,
    settings: Augment,
    size: ImageSize,
    rng: np.random.Generator,
    whole: ImageSize | None = None,
    view: int = 0,
) -> np.ndarray:
    """Return a training view; the arguments are those of `crop_and_draw`."""
    view_HWC, is_flipped, operations = crop_and_draw(image_HWC, settings, size, rng, whole, view)
    if is_flipped:
        # torch reverses columns 20 times faster than numpy.
        view_HWC = torch.from_numpy(view_HWC).flip(1).numpy()
    if not operations:
        return view_HWC
    # Imported here: torchvision takes seconds, and most workers only crop and flip.
    from vitray.data.augment.ops_pillow import apply_operations

    fill, image = fill_color(settings.policy), Image.fromarray(view_HWC)
    return np.array(apply_operations(image, operations, settings.crop.interpolation, fill))


def crop_center(image_HWC: np.ndarray, crop: CenterCrop, size: ImageSize, whole: ImageSize | None = None) -> np.ndarray:
    """Return the evaluation view of `size` (height, width); the resize rounds down, as in DeiT's code and timm.

    `whole` is as of `crop_and_draw`.
    """
    whole = whole or (image_HWC.shape[0], image_HWC.shape[1])
    if crop.crop_ratio is None:
        return resize(_without_padding(image_HWC, whole), size, crop.interpolation)
    height, width = size
    least = int(height / crop.crop_ratio), int(width / crop.crop_ratio)
    cover_HWC = _cover(image_HWC, least, crop.interpolation, whole)
    top, left = round((cover_HWC.shape[0] - height) / 2), round((cover_HWC.shape[1] - width) / 2)
    return np.ascontiguousarray(cover_HWC[top : top + height, left : left + width])


def _reduction(whole: ImageSize, crop: Crop, size: ImageSize, rng: np.random.Generator) -> float:
    """Return the factor by which a crop reduces the part of an image that it shows."""
    match crop:
        case RandomResizedCrop():
            _, _, height, width = draw_box(whole, crop, rng)
            return min(height / size[0], width / size[1])
        case SimpleRandomCrop():
            return min(whole[0] / size[0], whole[1] / size[1])
        case CenterCrop():
            return (crop.crop_ratio or 1.0) * min(whole[0] / size[0], whole[1] / size[1])
        case _:
            assert_never(crop)


def _crop(image_HWC: np.ndarray, crop: Crop, size: ImageSize, rng: np.random.Generator, whole: ImageSize) -> np.ndarray:
    match crop:
        case RandomResizedCrop():
            top, left, height, width = draw_box(whole, crop, rng)
            rows = _scaled(top, height, image_HWC.shape[0], whole[0])
            columns = _scaled(left, width, image_HWC.shape[1], whole[1])
            return resize(image_HWC[rows, columns], size, crop.interpolation)
        case SimpleRandomCrop():
            cover_HWC = _cover(image_HWC, size, crop.interpolation, whole)
            rows, columns = (_padded(pixels, crop.padding) for pixels in cover_HWC.shape[:2])
            top, left = int(rng.integers(len(rows) - size[0] + 1)), int(rng.integers(len(columns) - size[1] + 1))
            # A tenth of the time of numpy's `pad`, at 32 px.
            return cover_HWC[rows[top : top + size[0], None], columns[left : left + size[1]]]
        case CenterCrop():
            return crop_center(image_HWC, crop, size, whole)
        case _:
            assert_never(crop)


@lru_cache
def _padded(pixels: int, padding: int) -> np.ndarray:
    """Return the numbers of the rows or columns of an image with reflected edges."""
    return np.pad(np.arange(pixels), padding, mode="reflect")


def _scaled(start: int, length: int, pixels: int, whole: int) -> slice:
    """Return one side of a box as a slice of an image that was decoded to `pixels` of its `whole` pixels."""
    divisor = round(whole / pixels)  # the last pixel may cover fewer
    return slice(round(start / divisor), round((start + length) / divisor))


def draw_box(image: ImageSize, crop: RandomResizedCrop, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a crop, by torchvision's rule: ten tries, then the center."""
    rows, columns = image
    for _ in range(10):
        area = rows * columns * rng.uniform(*crop.scale)
        ratio = math.exp(rng.uniform(math.log(crop.ratio[0]), math.log(crop.ratio[1])))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= rows and 0 < width <= columns:
            return int(rng.integers(rows - height + 1)), int(rng.integers(columns - width + 1)), height, width
    height = max(1, min(rows, round(columns / crop.ratio[0])))
    width = max(1, min(columns, round(rows * crop.ratio[1])))
    return (rows - height) // 2, (columns - width) // 2, height, width


def _cover(image_HWC: np.ndarray, size: ImageSize, interpolation: Interpolation, whole: ImageSize) -> np.ndarray:
    """Resize to the smallest image of the aspect of `whole` that covers `size`; like torchvision's Resize for
    squares."""
    (rows, columns), (height, width) = whole, size
    if rows * width <= columns * height:
        cover = height, max(width, int(height * columns / rows))
    else:
        cover = max(height, int(width * rows / columns)), width
    return resize(_without_padding(image_HWC, whole), cover, interpolation)


def _without_padding(image_HWC: np.ndarray, whole: ImageSize) -> np.ndarray:
    """Return an image of size `whole`, decoded at a smaller scale, without a last row or column of mostly padding."""
    rows, columns = whole
    return image_HWC[_scaled(0, rows, image_HWC.shape[0], rows), _scaled(0, columns, image_HWC.shape[1], columns)]


def resize(image_HWC: np.ndarray, size: ImageSize, interpolation: Interpolation) -> np.ndarray:
    """Return the image at another size, antialiased."""
    if image_HWC.shape[:2] == size:
        return image_HWC.copy()  # torch would compute the same pixels
    if not image_HWC.flags.writeable:
        image_HWC = image_HWC.copy()  # torch warns about read-only memory, such as the object store's
    # The batch dimension comes before the permutation: only then is the tensor channels last, 1.5 times faster.
    image_1CHW = torch.from_numpy(image_HWC)[None].permute(0, 3, 1, 2)
    resized_1CHW = F.interpolate(image_1CHW, size=size, mode=interpolation, antialias=True)
    return np.ascontiguousarray(resized_1CHW[0].permute(1, 2, 0).numpy())
