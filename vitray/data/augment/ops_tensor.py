"""The operations of an augmentation on whole batches, on any device: bit-equal to those of `ops_pillow.py` on images.

Draws and row numbers are on the host, so nothing waits for the device. Pillow's own arithmetic is repeated, in integers
or one rounding at a time, because torchvision's kernels for tensors differ from Pillow, as in grayscale, blur, rotation
and auto-contrast (shown in the tests); its `equalize` is equal, and is used. A product and a sum stay two kernels:
fused, as in `lerp` or `addcmul`, they would round once on some devices.
Shapes: B images, H x W pixels, C colors, L levels of a color.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitray.config.augmentation import Color, Interpolation
from vitray.data.augment.draws import OPERATIONS, Draws, Operation
from vitray.data.augment.mixing import to_device

# Operations that share their kernels. `levels` maps each level to another one, whatever the image.
KINDS = {
    **dict.fromkeys(("invert", "posterize", "solarize", "solarize_add", "brightness"), "levels"),
    **dict.fromkeys(("translate_x", "shear_x"), "rows"),
    **dict.fromkeys(("translate_y", "shear_y"), "columns"),
}
# Pixels at a time: the largest temporary is 100 MB.
PIXELS_AT_ONCE = 2**22


def apply_draws(images_BHWC: Tensor, draws: Draws) -> None:
    """Flip the images and apply their operations, in place; the pixels of a row depend on its draws alone."""
    _replace(images_BHWC, np.flatnonzero(draws.is_flipped), lambda images_BHWC, _: images_BHWC.flip(2))
    for codes_B, amounts_B in zip(draws.codes.T, draws.amounts.T, strict=True):
        names_B = np.array(OPERATIONS)[codes_B]
        kinds_B = np.array([KINDS.get(name, name) for name in names_B.tolist()])
        for kind in np.unique(kinds_B[kinds_B != "identity"]).tolist():
            operate = partial(_operate, kind, names_B, amounts_B, draws)
            _replace(images_BHWC, np.flatnonzero(kinds_B == kind), operate)


def _replace(images_BHWC: Tensor, rows: np.ndarray, change: Callable[[Tensor, np.ndarray], Tensor]) -> None:
    """Replace some rows of a batch by what `change` returns for them, a part at a time."""
    at_once = max(1, PIXELS_AT_ONCE // (images_BHWC.shape[1] * images_BHWC.shape[2]))
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        index = to_device(torch.from_numpy(part), images_BHWC.device)
        images_BHWC.index_copy_(0, index, change(images_BHWC.index_select(0, index), part))


def _operate(
    kind: str, names_B: np.ndarray, amounts_B: np.ndarray, draws: Draws, images_BHWC: Tensor, rows: np.ndarray
) -> Tensor:
    """Return some rows of a batch after one operation each, all of a kind."""
    device, amounts = images_BHWC.device, amounts_B[rows].tolist()
    operations = [Operation(*each) for each in zip(names_B[rows].tolist(), amounts, strict=True)]
    match kind:
        case "levels":
            tables_BL = np.stack([level_table(*each) for each in operations])
            return look_up(images_BHWC, to_device(torch.from_numpy(tables_BL), device)[:, None])
        case "auto_contrast":
            return auto_contrast(images_BHWC)
        case "equalize":
            from torchvision.transforms.v2 import functional  # imports torch.compile, which takes a second

            planes: Any = functional.equalize(images_BHWC.permute(0, 3, 1, 2))
            return planes.permute(0, 2, 3, 1)
        case "gray":
            return gray(images_BHWC).to(torch.uint8)[..., None].expand_as(images_BHWC)
        case "blur":
            return blur(images_BHWC, amounts)
        case "hue":
            return turn_hues(images_BHWC, amounts)
        case "color" | "contrast" | "sharpness":
            factor_B = to_device(torch.from_numpy(np.array(amounts, np.float32)), device)
            if kind == "contrast":
                return contrast(images_BHWC, factor_B)
            other_BHWC = gray(images_BHWC)[..., None] if kind == "color" else smooth(images_BHWC)
            return blend(other_BHWC, images_BHWC, factor_B)
        case "rotate":
            return rotate(images_BHWC, amounts, draws.interpolation, draws.fill)
        case "rows":
            return shift_rows(images_BHWC, operations, draws.interpolation, draws.fill)
        case "columns":
            turned_BWHC = shift_rows(images_BHWC.transpose(1, 2), operations, draws.interpolation, draws.fill)
            return turned_BWHC.transpose(1, 2)
        case _:
            raise AssertionError(f"no kind {kind}")


# ---- levels ----------------------------------------------------------------------------------------------------------


def level_table(operation: str, amount: float) -> np.ndarray:
    """Return the new level of each of 256 levels."""
    level_L = np.arange(256)
    match operation:
        case "invert":
            table_L = 255 - level_L
        case "posterize":
            table_L = level_L & ~(2 ** (8 - min(8, int(amount))) - 1) if amount > 0 else 0 * level_L
        case "solarize":
            table_L = np.where(level_L < amount, level_L, 255 - level_L)
        case "solarize_add":
            table_L = np.where(level_L < 128, np.minimum(255, level_L + int(amount)), level_L)
        case "brightness":
            table_L = np.clip(np.float32(amount) * level_L.astype(np.float32), 0, 255)
        case _:
            raise AssertionError(f"no table of {operation}")
    return table_L.astype(np.uint8)


def look_up(images_BHWC: Tensor, tables_BCL: Tensor) -> Tensor:
    """Return each level's entry in the table of its image and color; one table may serve all colors."""
    images, colors, levels = tables_BCL.shape
    first_BC = torch.arange(images * colors, dtype=torch.int32, device=images_BHWC.device).view(images, colors)
    return tables_BCL.reshape(-1)[images_BHWC + (first_BC * levels)[:, None, None]]


def auto_contrast(images_BHWC: Tensor) -> Tensor:
    """Return images whose colors reach from 0 to 255 each."""
    low_BC1, high_BC1 = (edge[..., None].double() for edge in (images_BHWC.amin((1, 2)), images_BHWC.amax((1, 2))))
    range_BC1 = (high_BC1 - low_BC1).clamp(min=1)
    scale_BC1 = torch.full_like(range_BC1, 255) / range_BC1  # a number / tensor would round its reciprocal first
    level_L = torch.arange(256, dtype=torch.float64, device=images_BHWC.device)
    stretched_BCL = (level_L * scale_BC1 + -low_BC1 * scale_BC1).clamp(0, 255)
    return look_up(images_BHWC, torch.where(high_BC1 > low_BC1, stretched_BCL, level_L).to(torch.uint8))


def contrast(images_BHWC: Tensor, factor_B: Tensor) -> Tensor:
    """Return a blend of each image with its mean gray."""
    gray_BHW = gray(images_BHWC)
    pixels = gray_BHW.shape[1] * gray_BHW.shape[2]
    mean_B = (2 * gray_BHW.sum((1, 2), dtype=torch.int64) + pixels).div(2 * pixels, rounding_mode="floor")
    level_L = torch.arange(256, dtype=torch.int32, device=images_BHWC.device)
    offset_BL = (level_L - mean_B[:, None]).to(torch.float32)
    tables_BL = (offset_BL * factor_B[:, None] + mean_B[:, None]).clamp(0, 255).to(torch.uint8)
    return look_up(images_BHWC, tables_BL[:, None])


# ---- colors ---------------------------------------------------------------------------------------------------------


def gray(images_BHWC: Tensor) -> Tensor:
    """Return the luma of each pixel (BHW, int32)."""
    red, green, blue = images_BHWC.to(torch.int32).unbind(3)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def blend(other_BHWC: Tensor, images_BHWC: Tensor, factor_B: Tensor) -> Tensor:
    """Return other + factor * (images - other) of integers, cut off to a level."""
    step_BHWC = (images_BHWC - other_BHWC).to(torch.float32) * factor_B[:, None, None, None]
    return (step_BHWC + other_BHWC).clamp(0, 255).to(torch.uint8)


def smooth(images_BHWC: Tensor) -> Tensor:
    """Return the weighted means of 3 x 3 pixels, 5 for the middle and 1 for the others; the border stays (int16)."""
    smooth_BHWC = images_BHWC.to(torch.int16)
    if min(images_BHWC.shape[1:3]) < 3:
        return smooth_BHWC
    lines = smooth_BHWC[:, :-2] + smooth_BHWC[:, 1:-1] + smooth_BHWC[:, 2:]
    inner = (slice(None), slice(1, -1), slice(1, -1))
    total = lines[:, :, :-2] + lines[:, :, 1:-1] + lines[:, :, 2:] + 4 * smooth_BHWC[inner]
    # Thirteenths are never halfway between two levels.
    smooth_BHWC[inner] = (2 * total + 13).div(26, rounding_mode="floor")
    return smooth_BHWC


# Of value, p, q and t, which are the red, green and blue of each sixth of the hues.
SIXTHS = ((0, 3, 1), (2, 0, 1), (1, 0, 3), (1, 2, 0), (3, 1, 0), (0, 1, 2))


def turn_hues(images_BHWC: Tensor, turns: list[float]) -> Tensor:
    """Return the images with their hues turned, by way of Pillow's HSV in bytes."""
    red, green, blue = images_BHWC.to(torch.int32).unbind(3)
    value, lowest = images_BHWC.amax(3).to(torch.int32), images_BHWC.amin(3).to(torch.int32)
    # Single and double precision where Pillow has them. A gray pixel has saturation 0, so that its hue has no effect.
    span = (value - lowest).float()
    far_red, far_green, far_blue = ((value - color).float() / span.clamp(min=1) for color in (red, green, blue))
    sixths = torch.where(
        red == value,
        far_blue - far_green,
        torch.where(
            green == value,
            (2.0 + far_red.double() - far_blue.double()).float(),
            (4.0 + far_green.double() - far_red.double()).float(),
        ),
    )
    hue = ((sixths.double() / 6.0 + 1.0).fmod(1.0).float().double() * 255.0).to(torch.int32)
    saturation = ((span / value.clamp(min=1).float()).double() * 255.0).to(torch.int32)
    turns_B = np.array([int(turn * 255) for turn in turns], np.int32)
    hue = (hue + to_device(torch.from_numpy(turns_B), hue.device)[:, None, None]) & 255
    place = hue.double() * 6.0 / 255.0
    sixth = place.floor()
    part, share, value = (place - sixth).float(), (saturation.double() / 255.0).float(), value.double()
    p = value * (1.0 - share.double())
    q = value * (1.0 - (share * part).double())
    t = value * (1.0 - share.double() * (1.0 - part.double()))
    rounded = (torch.stack([value, p, q, t], 3) + 0.5).floor().to(torch.uint8)
    sources = to_device(torch.tensor(SIXTHS), hue.device)
    return rounded.gather(3, sources[sixth.long() % 6])


# ---- blur ------------------------------------------------------------------------------------------------------------


def blur(images_BHWC: Tensor, sigmas: list[float]) -> Tensor:
    """Return the images after Pillow's approximation of a Gaussian blur: three box blurs of each direction."""
    weights_4B = np.array([box_weights(sigma) for sigma in sigmas], np.int32).T
    weights_4B111 = to_device(torch.from_numpy(np.ascontiguousarray(weights_4B)), images_BHWC.device)
    weights_4B111 = weights_4B111[:, :, None, None, None]
    # Levels less 128 are signed bytes, and no sum of theirs overflows 32 bits.
    signed_BHWC = images_BHWC.bitwise_xor(128).view(torch.int8)
    for axis in (2, 1):
        for _ in range(3):
            signed_BHWC = _box_blur(signed_BHWC, weights_4B111, axis)
    return signed_BHWC.view(torch.uint8).bitwise_xor(128)


def box_weights(sigma: float) -> tuple[int, int, int, int]:
    """Return a box blur's weights of a pixel and of those 1 and 2 away, in 2^-24, and the term that rounds the sum."""
    single = np.float32
    # The box of Gwosdek et al., with Pillow's roundings.
    variance = single(sigma) * single(sigma) / single(3)
    length = single(math.sqrt(12.0 * float(variance) + 1.0))
    whole = single(math.floor((float(length) - 1.0) / 2.0))
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    part = single(part / (6 * (variance - (whole + 1) * (whole + 1))))
    radius = single(whole + part)
    assert radius < 2, f"got a blur of sigma {sigma:g}, expected at most 2"
    reach = int(radius)
    inner = int(single(1 << 24) / (radius * 2 + 1))
    edge = ((1 << 24) - (2 * reach + 1) * inner) // 2
    total = (2 * reach + 1) * inner + 2 * edge
    rounding = (1 << 23) - 128 * ((1 << 24) - total)
    return (inner, inner, edge, rounding) if reach else (inner, edge, 0, rounding)


def _box_blur(signed_BHWC: Tensor, weights_4B111: Tensor, axis: int) -> Tensor:
    """Return one box blur along an axis; the border repeats."""
    side = signed_BHWC.shape[axis]
    index = torch.arange(-2, side + 2, device=signed_BHWC.device).clamp(0, side - 1)
    padded = signed_BHWC.index_select(axis, index)
    far, near, middle, near_too, far_too = (padded.narrow(axis, at, side) for at in range(5))
    center_B, near_B, far_B, rounding_B = weights_4B111
    total = middle * center_B
    total += (near.to(torch.int16) + near_too) * near_B
    total += (far.to(torch.int16) + far_too) * far_B
    return ((total + rounding_B) >> 24).to(torch.int8)


# ---- rotation, shear and translation ---------------------------------------------------------------------------------


def rotate(images_BHWC: Tensor, degrees: list[float], interpolation: Interpolation, fill: Color) -> Tensor:
    """Return the images turned about their center."""
    _, height, width, _ = images_BHWC.shape
    matrices_B6 = np.array([rotation(angle, (width, height)) for angle in degrees])
    numbers_6B11 = to_device(torch.from_numpy(matrices_B6.T.copy()), images_BHWC.device)[:, :, None, None]
    y_H1, x_W = _centers(height, images_BHWC.device)[:, None], _centers(width, images_BHWC.device)
    x_BHW = numbers_6B11[0] * x_W + numbers_6B11[1] * y_H1 + numbers_6B11[2]
    y_BHW = numbers_6B11[3] * x_W + numbers_6B11[4] * y_H1 + numbers_6B11[5]
    column_BHW, column_share_BHW1 = _split(x_BHW)
    row_BHW, row_share_BHW1 = _split(y_BHW)
    reach = _reach(interpolation)
    lines = [
        _interpolate(_taps(images_BHWC, (row_BHW + at).clamp(0, height - 1), column_BHW, reach), column_share_BHW1)
        for at in reach
    ]
    is_inside_BHW = (x_BHW >= 0) & (x_BHW < width) & (y_BHW >= 0) & (y_BHW < height)
    return _finish(_interpolate(lines, row_share_BHW1), is_inside_BHW, fill)


def shift_rows(images_BHWC: Tensor, operations: list[Operation], interpolation: Interpolation, fill: Color) -> Tensor:
    """Return the images with each row shifted, by the same number of pixels or in proportion to its height."""
    _, height, width, _ = images_BHWC.shape
    slopes = [shear_slope(*each) if each.name.startswith("shear") else 0.0 for each in operations]
    shifts = [0.0 if each.name.startswith("shear") else -each.amount for each in operations]
    numbers_2B11 = to_device(torch.from_numpy(np.array([slopes, shifts])), images_BHWC.device)[:, :, None, None]
    y_H1, x_W = _centers(height, images_BHWC.device)[:, None], _centers(width, images_BHWC.device)
    x_BHW = x_W + numbers_2B11[0] * y_H1 + numbers_2B11[1]
    column_BHW, share_BHW1 = _split(x_BHW)
    row_H1 = torch.arange(height, device=images_BHWC.device)[:, None]
    values = _interpolate(_taps(images_BHWC, row_H1, column_BHW, _reach(interpolation)), share_BHW1)
    return _finish(values, (x_BHW >= 0) & (x_BHW < width), fill)


def rotation(degrees: float, size: tuple[int, int]) -> list[float]:
    """Return Pillow's matrix from the places of a rotated image to those of the image; `size` is (width, height)."""
    angle = -math.radians(degrees % 360.0)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = size[0] / 2, size[1] / 2
    return [cosine, sine, cosine * -x + sine * -y + x, -sine, cosine, -sine * -x + cosine * -y + y]


def shear_slope(operation: str, amount: float) -> float:
    """Return torchvision's factor of a shear, which it computes from an angle."""
    angle = math.radians(math.degrees(math.atan(amount)))
    return math.tan(angle) if operation == "shear_x" else math.sin(angle) / math.cos(angle)


def _centers(side: int, device: torch.device) -> Tensor:
    return torch.arange(side, dtype=torch.float64, device=device) + 0.5


def _split(place_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of the pixel before each place, and the place's distance from its center."""
    before_BHW = (place_BHW - 0.5).floor()
    return before_BHW.long(), (place_BHW - 0.5 - before_BHW)[..., None]


def _reach(interpolation: Interpolation) -> tuple[int, ...]:
    """Return the neighbors of a place, counted from the pixel before it."""
    return (-1, 0, 1, 2) if interpolation == "bicubic" else (0, 1)


def _taps(images_BHWC: Tensor, row_BHW: Tensor, column_BHW: Tensor, reach: tuple[int, ...]) -> list[Tensor]:
    """Return the neighbors of each place in a row, as float64; the border repeats."""
    images, height, width, colors = images_BHWC.shape
    flat = images_BHWC.reshape(-1, colors)
    first_B11 = torch.arange(images, device=images_BHWC.device)[:, None, None] * height
    start_BHW = (first_B11 + row_BHW) * width
    return [flat[start_BHW + (column_BHW + at).clamp(0, width - 1)].double() for at in reach]


def _interpolate(values: list[Tensor], share: Tensor) -> Tensor:
    """Return the value at a share of the way from one middle neighbor to the other, in Pillow's order of sums."""
    if len(values) == 2:
        return values[0] + (values[1] - values[0]) * share
    first, second, third, fourth = values
    square = 2 * (first - second) + third - fourth
    cube = -first + second - third + fourth
    return second + share * (-first + third + share * (square + share * cube))


def _finish(values_BHWC: Tensor, is_inside_BHW: Tensor, fill: Color) -> Tensor:
    """Return levels, cut off as in Pillow, and the fill outside of the image."""
    fill_C = to_device(torch.from_numpy(np.array(fill, np.uint8)), values_BHWC.device)
    return torch.where(is_inside_BHW[..., None], values_BHWC.clamp(0, 255).to(torch.uint8), fill_C)
