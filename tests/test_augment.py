"""Decoding, augmentation and mixing: equal to Pillow, torchvision and timm, and a function of their keys alone."""

import io
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import timm.data.auto_augment as timm_auto
import timm.data.mixup as timm_mixup
import torch
import torchvision.transforms as T
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter, ImageOps
from pydantic import ValidationError
from timm.data.random_erasing import RandomErasing
from timm.loss import BinaryCrossEntropy
from torchvision.transforms import autoaugment as torchvision_auto

from vitray.config.augmentation import (
    Augment,
    CenterCrop,
    Mix,
    Normalize,
    RandAugment,
    RandomResizedCrop,
    SimpleRandomCrop,
    ThreeAugment,
    TorchvisionRandAugment,
)
from vitray.config.classification import Supervised
from vitray.config.parsing import apply_changes, parse_overrides, parse_yaml
from vitray.config.sections import Section
from vitray.config.validation import explain_error
from vitray.data.augment import draws, ops_pillow
from vitray.data.augment.contact_sheets import Sample, contact_sheet
from vitray.data.augment.crops import augment_image, crop_center, draw_box, resize
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.keyed_random import generator, raw_draws, step_generator
from vitray.data.augment.mixing import (
    BatchRows,
    BatchSettings,
    Mixing,
    cut_boxes,
    draw_erased_boxes,
    draw_mixing,
    fill_boxes,
    mix_rows,
    normalized,
    one_hot,
    partners,
    prepare_batch,
)
from vitray.data.augment.views import ViewKind
from vitray.data.stream.epoch_order import EpochOrder, positions_of
from vitray.errors import ConfigError
from vitray.tasks.supervised import binary_cross_entropy

PIL_MODES = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
POLICIES = {
    "plain": Augment(),
    "three": Augment(policy=ThreeAugment(), jitter=0.3),
    "rand": Augment(policy=RandAugment(chance=1.0, ops=4)),
    "rand_original": Augment(policy=RandAugment(chance=1.0, ops=4, increasing=False, std=3.0)),
    "torchvision": Augment(policy=TorchvisionRandAugment(ops=4), crop=SimpleRandomCrop(interpolation="bilinear")),
    "center": Augment(crop=CenterCrop(), flip=0.0),
}


def photo(width: int = 120, height: int = 90, seed: int = 0) -> np.ndarray:
    """Return a smooth colored image with some noise, like a photo."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize((width, height), 3)
    return (np.asarray(coarse) + rng.normal(0, 6, (height, width, 3))).clip(0, 255).astype(np.uint8)


def encoded(image: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def difference(ours: np.ndarray, theirs: Image.Image | np.ndarray) -> np.ndarray:
    return np.abs(ours.astype(int) - np.asarray(theirs).astype(int))


# ---- settings --------------------------------------------------------------------------------------------------------


class Data(Section):
    augment: Augment = Augment()
    eval: CenterCrop = CenterCrop()
    normalize: Normalize = Normalize()


class Recipe(Section):
    data: Data = Data()
    mix: Mix = Mix()


def read(text: str) -> Recipe:
    return Recipe.model_validate(parse_yaml(text, "recipe")[0])


def config_error(overrides: list[str]) -> str:
    tree: dict = {}
    apply_changes(parse_overrides(overrides), tree)
    with pytest.raises(ValidationError) as invalid:
        Recipe.model_validate(tree)
    error = explain_error(invalid.value, Recipe, dict.fromkeys(parse_overrides(overrides), "override"), "override")
    assert isinstance(error, ConfigError)
    return str(error)


def test_published_augmentations_can_be_written_as_settings():
    a2 = read("""
        data:
          augment:
            crop: {kind: random_resized, scale: [0.08, 1], interpolation: bicubic}
            flip: 0.5
            policy: {kind: randaugment, magnitude: 7, ops: 2, std: 0.5, increasing: true}
            erase: 0.0
          eval: {crop_ratio: 0.95}
        mix: {mixup: 0.1, cutmix: 1.0}
    """)
    assert a2.data.augment == Augment(policy=RandAugment(magnitude=7.0))
    assert a2.mix.is_mixing
    deit3 = read("""
        data: {augment: {policy: three_augment, jitter: 0.3}, eval: {crop_ratio: 1}}
        mix: {mixup: 0.8, cutmix: 1}
    """)
    assert deit3.data.augment.policy == ThreeAugment()
    deit3_21k = read("data: {augment: {crop: simple_random, policy: three_augment, jitter: 0.3}}")
    assert deit3_21k.data.augment.crop == SimpleRandomCrop()
    plain = read("""
        data:
          augment:
            crop: {scale: [0.05, 1], interpolation: bilinear}
            policy: {kind: randaugment, magnitude: 10, chance: 1, std: 0, increasing: false, fill: [128, 128, 128]}
          eval: {crop_ratio: 0.875, interpolation: bilinear}
          normalize: {mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
        mix: {mixup: 0.2}
    """)
    assert plain.data.augment.crop == RandomResizedCrop(scale=(0.05, 1.0), interpolation="bilinear")
    beit = read("data: {augment: {jitter: 0.4}}\nmix: {}")
    assert not beit.mix.is_mixing


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.augment.flipp=1", "override: data.augment.flipp: unknown setting, expected one of crop, flip, policy"),
        ("data.augment.flipp=1", "; did you mean flip"),
        ("data.augment.flip=1.5", "data.augment.flip: got 1.5, expected less than or equal to 1"),
        ("data.augment.policy=randaugmnt", "data.augment.policy"),
        ("data.augment.policy=randaugmnt", "; did you mean randaugment"),
        ("data.augment.crop.scale=[1, 0.1]", "data.augment.crop.scale: got [1.0, 0.1], expected [lowest, highest]"),
        ("data.augment.crop.scale=[0.1, 1.2]", "data.augment.crop.scale"),
        ("data.augment.crop.interpolation=cubic", "; did you mean bicubic"),
        ("data.augment.policy={kind: randaugment, magnitude: 15}", "magnitude 15.0 is above its limit 10.0"),
        ("data.augment.policy={kind: randaugment_torchvision, magnitude: 31}", "off the scale of 31 bins, 0 to 30"),
        ("mix.mixup=-0.1", "mix.mixup: got -0.1, expected greater than or equal to 0"),
        ("data.normalize.std=[1, 0, 1]", "data.normalize.std"),
        ("data.eval.crop_ration=0.9", "; did you mean crop_ratio"),
    ],
)
def test_bad_settings_are_refused_by_path(override, message):
    assert message in config_error([override])


# ---- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize(("quality", "progressive"), [(50, False), (90, False), (90, True), (100, False)])
@pytest.mark.parametrize("size", [(120, 90), (33, 17), (1, 1)])
def test_a_jpeg_is_decoded_as_pillow_does(subsampling, quality, progressive, size):
    data = encoded(photo(*size), "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
    assert np.array_equal(decode_image(data), Image.open(io.BytesIO(data)))


def test_an_ordinary_jpeg_is_decoded_without_pillow(monkeypatch):
    data = encoded(photo(), "JPEG")
    monkeypatch.setattr(Image, "open", None)
    decode_image(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(40, 24), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decode_image(data), expected)
    assert decode_image(data).shape == ((40, 24, 3) if orientation > 4 else (24, 40, 3))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16"])
def test_converted_images_stay_upright(mode):
    exif = Image.Exif()
    exif[0x0112] = 6
    ramp = Image.fromarray((np.arange(6, dtype=np.uint16) * 9000).reshape(2, 3))
    image = ramp if mode == "I;16" else Image.fromarray(photo(3, 2)).convert(mode)
    turned = decode_image(encoded(image, exif=exif))
    assert np.array_equal(turned, np.rot90(decode_image(encoded(image)), -1))


def test_every_mode_becomes_rgb_as_a_viewer_shows_it():
    colors = Image.fromarray(photo(16, 12))
    gray = colors.convert("L")
    for mode in ("1", "L", "P"):
        assert np.array_equal(decode_image(encoded(colors.convert(mode))), colors.convert(mode).convert("RGB")), mode
    jpeg = encoded(gray, "JPEG")
    assert np.array_equal(decode_image(jpeg), Image.open(io.BytesIO(jpeg)).convert("RGB"))
    for kind in ("BMP", "TIFF", "PPM"):
        assert np.array_equal(decode_image(encoded(colors, kind)), colors), kind
    cmyk = encoded(colors.convert("CMYK"), "JPEG")
    assert np.array_equal(decode_image(cmyk), Image.open(io.BytesIO(cmyk)).convert("RGB"))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_images_are_scaled_not_clipped(kind):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    decoded = decode_image(encoded(Image.fromarray(ramp), kind))
    assert np.array_equal(decoded, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_transparency_is_white():
    image = Image.new("RGBA", (4, 2), (200, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    expected = np.full((2, 4, 3), (200, 0, 0), np.uint8)
    expected[0, 0], expected[0, 1] = 255, 127
    for kind in ("PNG", "TIFF"):
        assert difference(decode_image(encoded(image, kind)), expected).max() <= 1
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    assert decode_image(encoded(palette, transparency=0)).tolist() == [[[255, 255, 255], [40, 50, 60]]]
    gray = encoded(Image.fromarray(np.array([[7, 9]], np.uint8)), transparency=7)
    assert decode_image(gray).tolist() == [[[255] * 3, [9] * 3]]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_is_its_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(decode_image(data), frames[0])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"GIF? no, text", "not an image"),
        (b"\xff\xd8\xff", "not an image"),
        (encoded(photo(8, 8), "EPS"), "not an image"),  # Pillow would start a program for it
        (encoded(photo(), "JPEG")[:-400], "truncated"),
        (encoded(photo())[:-4000], "truncated"),
        (encoded(Image.new("F", (3, 3)), "TIFF"), "unknown brightness scale: floating point"),
    ],
)
def test_an_undecodable_image_is_rejected_with_the_reason(data, reason):
    with pytest.raises(UndecodableImage, match=reason.replace("?", r"\?")):
        decode_image(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_absurd_size_is_refused_before_it_is_decoded(kind):
    with pytest.raises(UndecodableImage, match="too large: 120x90, max_pixels=10799"):
        decode_image(encoded(photo(), kind), max_pixels=120 * 90 - 1)
    decode_image(encoded(photo(), kind), max_pixels=120 * 90)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "TIFF"]), st.data())
def test_corrupt_bytes_give_pixels_or_an_undecodable_image_error(kind, draw):
    data = bytearray(encoded(photo(24, 16), kind))
    for _ in range(draw.draw(st.integers(1, 6))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        image = decode_image(memoryview(data[: draw.draw(st.integers(0, len(data)))]), max_pixels=10**6)
    except UndecodableImage:
        return
    assert image.dtype == np.uint8
    assert image.shape[2:] == (3,)
    assert image.flags.writeable


# ---- one image -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", PIL_MODES)
def test_crop_and_resize_are_as_exact_as_pillows(interpolation):
    image, rng, differences = photo(500, 375), np.random.default_rng(0), []
    for _ in range(14):
        top, left, height, width = draw_box((375, 500), RandomResizedCrop(), rng)
        box_HWC = image[top : top + height, left : left + width]
        ours = resize(box_HWC, (224, 224), interpolation)
        theirs = Image.fromarray(box_HWC).resize((224, 224), PIL_MODES[interpolation])
        differences.append(difference(ours, theirs))
        exact_1CHW = torch.nn.functional.interpolate(
            torch.from_numpy(box_HWC).double().permute(2, 0, 1)[None],
            size=(224, 224),
            mode=interpolation,
            antialias=True,
        )
        exact = exact_1CHW[0].permute(1, 2, 0).numpy().clip(0, 255)
        assert np.abs(ours - exact).mean() <= np.abs(np.asarray(theirs) - exact).mean() + 0.01
    assert np.max(differences) <= 2
    # Pillow resizes rows first if that is cheaper, torch always columns: such boxes differ by a quarter of a level.
    assert np.mean(differences) <= 0.1


@pytest.mark.parametrize("interpolation", PIL_MODES)
@pytest.mark.parametrize("size", [(32, 32), (37, 48)])
def test_a_resize_to_the_same_size_is_a_copy_as_torch_computes_it(size, interpolation):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    image.flags.writeable = False
    image_1CHW = torch.from_numpy(image.copy())[None].permute(0, 3, 1, 2)
    torchs = torch.nn.functional.interpolate(image_1CHW, size=size, mode=interpolation, antialias=True)
    ours = resize(image, size, interpolation)
    assert np.array_equal(ours, torchs[0].permute(1, 2, 0).numpy())
    assert ours.flags.writeable


@pytest.mark.parametrize(("width", "height"), [(500, 375), (1000, 90), (90, 1000)])
def test_boxes_are_distributed_as_torchvision_draws_them(width, height):
    crop, rng = RandomResizedCrop(), np.random.default_rng(0)
    torch.manual_seed(0)
    blank = torch.empty(3, height, width)
    ours = np.array([draw_box((height, width), crop, rng) for _ in range(1500)])
    theirs = np.array([T.RandomResizedCrop.get_params(blank, [*crop.scale], [*crop.ratio]) for _ in range(1500)])
    for column in range(4):
        assert scipy.stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.01, 1), st.floats(0.1, 10), st.integers(0, 2**32))
def test_a_box_lies_in_the_image(rows, columns, area, ratio, seed):
    crop = RandomResizedCrop(scale=(area, area), ratio=(ratio, ratio))
    top, left, height, width = draw_box((rows, columns), crop, np.random.default_rng(seed))
    assert 0 <= top < top + height <= rows
    assert 0 <= left < left + width <= columns


@pytest.mark.parametrize("interpolation", PIL_MODES)
@pytest.mark.parametrize(("ratio", "short"), [(0.875, 256), (0.95, 235), (1.0, 224)])
@pytest.mark.parametrize("shape", [(500, 375), (333, 500), (100, 130)])
def test_the_center_crop_equals_torchvisions(interpolation, ratio, short, shape):
    image = photo(*shape)
    ours = crop_center(image, CenterCrop(crop_ratio=ratio, interpolation=interpolation), (224, 224))
    steps = T.Compose([T.Resize(short, T.InterpolationMode(interpolation)), T.CenterCrop(224)])
    assert difference(ours, steps(Image.fromarray(image))).max() <= 2


@pytest.mark.parametrize("shape", [(500, 375), (60, 130)])
def test_without_a_crop_ratio_the_whole_image_is_squeezed(shape):
    image = photo(*shape)
    ours = crop_center(image, CenterCrop(crop_ratio=None, interpolation="bilinear"), (96, 64))
    assert difference(ours, T.Resize((96, 64))(Image.fromarray(image))).max() <= 2


@pytest.mark.parametrize("shape", [(120, 90), (90, 120), (64, 64)])
def test_the_simple_random_crop_is_a_window_of_torchvisions(shape):
    image, crop = photo(*shape), Augment(crop=SimpleRandomCrop(), flip=0.0)
    padded = T.Pad(4, padding_mode="reflect")(T.Resize(64, T.InterpolationMode.BICUBIC)(Image.fromarray(image)))
    offsets = set()
    for copy in range(20):
        rng = generator(0, 0, "window", copy)
        top, left = int(rng.integers(padded.height - 63)), int(rng.integers(padded.width - 63))
        ours = augment_image(image, crop, (64, 64), generator(0, 0, "window", copy))
        assert difference(ours, padded.crop((left, top, left + 64, top + 64))).max() <= 2
        offsets |= {(top, left)}
    assert len(offsets) > 10


def test_flips_mirror_at_the_stated_rate():
    image = photo()
    original, mirrored = (
        augment_image(image, Augment(crop=CenterCrop(), flip=chance), (32, 32), generator(0, 0, "a"))
        for chance in (0.0, 1.0)
    )
    assert np.array_equal(mirrored, original[:, ::-1])
    often = Augment(crop=CenterCrop(), flip=0.25)
    flipped = sum(
        np.array_equal(augment_image(image, often, (32, 32), generator(0, 0, "a", copy)), mirrored)
        for copy in range(800)
    )
    assert scipy.stats.binomtest(flipped, 800, 0.25).pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.tuples(st.integers(2, 48), st.integers(2, 48)),
    st.integers(0, 99),
)
def test_any_image_gives_a_view_of_the_requested_size(name, shape, size, copy):
    image = photo(*shape)
    image.flags.writeable = False  # like an array from the object store
    view = augment_image(image, POLICIES[name], size, generator(0, 0, "k", copy))
    assert view.shape == (*size, 3)
    assert view.dtype == np.uint8
    assert view.flags.c_contiguous
    assert view.flags.writeable


def test_a_view_shares_no_memory_with_its_image():
    image = photo(32, 32)
    identity = Augment(crop=CenterCrop(crop_ratio=1.0), flip=0.0)
    view = augment_image(image, identity, (32, 32), generator(0, 0, "k"))
    assert np.array_equal(view, image)
    assert not np.shares_memory(view, image)


# ---- reproducibility: a view depends only on its key -----------------------------------------------------------------


VIEWS = """
def views(order):
    import numpy as np
    from hashlib import sha256
    from vitray.data.augment.keyed_random import generator
    from vitray.data.augment.crops import augment_image
    from vitray.config.augmentation import Augment

    hashes = {}
    for number in order:
        image = np.random.default_rng(number).integers(0, 256, (40, 60, 3), dtype=np.uint8)
        for kind in ("none", "three_augment", "randaugment", "randaugment_torchvision"):
            augment = Augment.model_validate({"policy": kind, "jitter": 0.3})
            for epoch, copy in ((0, 0), (0, 1), (1, 0)):
                view = augment_image(image, augment, (32, 32), generator(7, epoch, f"train/{number}.jpg", copy))
                hashes[f"{number} {kind} {epoch} {copy}"] = sha256(view.tobytes()).hexdigest()
    return hashes
"""


def test_pixels_depend_on_neither_process_nor_order():
    namespace: dict = {}
    exec(VIEWS, namespace)
    hashes = namespace["views"]([0, 1, 2, 3])
    code = f"{VIEWS}\nimport json; print(json.dumps(views([2, 0, 3, 1])))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == hashes
    assert len(set(hashes.values())) == len(hashes)


def test_every_part_of_a_key_counts():
    keys = [(0, 0, "a", 0), (1, 0, "a", 0), (0, 1, "a", 0), (0, 0, "b", 0), (0, 0, "a", 1), (0, 0, "0 a", 0)]
    draws = {generator(*key).random() for key in keys} | {step_generator(0, 0, "a").random()}
    assert len(draws) == len(keys) + 1
    # Pinned: the encoding of keys, the cipher and the order of draws stay the same across releases.
    assert generator(0, 0, "a").random() == 0.5090690220371894
    assert raw_draws("rows 0", 2).tolist() == [681267580169654098, 14881082628673115569]


# ---- policies --------------------------------------------------------------------------------------------------------

TIMM_NAMES = {
    "auto_contrast": "AutoContrast", "equalize": "Equalize", "invert": "Invert", "rotate": "Rotate",
    "posterize": "Posterize", "solarize": "Solarize", "solarize_add": "SolarizeAdd", "color": "Color",
    "contrast": "Contrast", "brightness": "Brightness", "sharpness": "Sharpness", "shear_x": "ShearX",
    "shear_y": "ShearY", "translate_x": "TranslateXRel", "translate_y": "TranslateYRel",
}  # fmt: skip
FILL = (124, 116, 104)


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("operation", draws.TIMM)
def test_operations_equal_timms(operation, increasing, monkeypatch):
    image = Image.fromarray(photo(64, 48))
    name = TIMM_NAMES[operation]
    if increasing and f"{name}Increasing" in timm_auto.NAME_TO_OP:
        name += "Increasing"
    assert name in (timm_auto._RAND_INCREASING_TRANSFORMS if increasing else timm_auto._RAND_TRANSFORMS)
    for interpolation, mode in PIL_MODES.items():
        theirs = timm_auto.AugmentOp(name, 1.0, 0, {"img_mean": FILL, "interpolation": mode})
        for magnitude in (0.0, 0.3, 4.7, 7.0, 10.0):
            theirs.magnitude = magnitude
            for sign, uniform in ((1, 0.1), (-1, 0.9)):
                monkeypatch.setattr("random.random", lambda uniform=uniform: uniform)
                # timm translates in the other direction; both directions are equally likely.
                ours = -sign if operation.startswith("translate") else sign
                amount = draws.timm_amount(operation, magnitude, increasing, image.size, ours)
                result = ops_pillow.operate(image, operation, amount, interpolation, FILL)
                if operation == "posterize" and amount == 0:
                    assert not np.any(result)  # timm's posterize fails here on Pillow 13
                else:
                    # torchvision takes the angle of a shear; its tangent is off in the last bits.
                    error = difference(np.asarray(result), theirs(image))
                    assert error.max() <= operation.startswith("shear")
                    assert error.mean() < 0.01
    assert len(draws.TIMM) == len(timm_auto._RAND_TRANSFORMS)


@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
def test_operations_equal_torchvisions(magnitude):
    image = Image.fromarray(photo(64, 48))
    space = torchvision_auto.RandAugment()._augmentation_space(31, (48, 64))
    names = {name.lower(): name for name in space}
    assert len(names) == len(draws.TORCHVISION)
    for operation in draws.TORCHVISION:
        name = names[operation.replace("_", "")]
        magnitudes, signed = space[name]
        strength = float(magnitudes[magnitude]) if magnitudes.ndim else 0.0
        for sign in (1, -1) if signed else (1,):
            mode = T.InterpolationMode.BILINEAR
            theirs = torchvision_auto._apply_op(image, name, sign * strength, mode, [*FILL])
            amount = draws.torchvision_amount(operation, magnitude / 30, image.size, sign)
            ours = ops_pillow.operate(image, operation, amount, "bilinear", FILL)
            # torchvision's scale is float32: a level may round to the other side.
            assert difference(np.asarray(ours), theirs).max() <= 1, (operation, sign)


def drawn_operations(chosen, count: int) -> list[tuple[str, float]]:
    """Return the operations that a policy draws for many images, as (operation, amount)."""
    return [each for copy in range(count) for each in draws.draw_policy(chosen, (64, 48), generator(0, 0, "p", copy))]


@pytest.mark.parametrize(
    ("chosen", "names", "expected"),
    [
        (RandAugment(ops=3), draws.TIMM, 1.5),
        (RandAugment(ops=2, chance=1.0), draws.TIMM, 2),
        (TorchvisionRandAugment(), draws.TORCHVISION, 2),
    ],
)
def test_operations_are_drawn_evenly(chosen, names, expected):
    operations = drawn_operations(chosen, 2000)
    counts = np.array([sum(name == other for other, _ in operations) for name in names])
    assert counts.sum() == pytest.approx(expected * 2000, rel=0.05)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_magnitudes_are_drawn_as_timm_draws_them():
    operations = drawn_operations(RandAugment(magnitude=9.5, std=1.0, ops=8), 1500)
    angles = [abs(amount) / 3 for name, amount in operations if name == "rotate"]
    expected = np.random.default_rng(0).normal(9.5, 1.0, 4000).clip(0, 10)
    assert max(angles) == 10
    assert scipy.stats.ks_2samp(angles, expected).pvalue > 1e-3


def test_three_augment_applies_exactly_one_of_three_operations():
    image = Image.fromarray(photo(32, 24))
    gray, solarized = image.convert("L").convert("RGB"), ImageOps.solarize(image)
    sigmas: list[float] = []
    counts = {"gray": 0, "solarize": 0, "blur": 0}
    for copy in range(1500):
        operations = draws.draw_policy(ThreeAugment(), image.size, generator(0, 0, "t", copy))
        augmented = ops_pillow.apply_operations(image, operations, "bicubic", (0, 0, 0))
        [(name, amount)] = operations
        counts[name] += 1
        sigmas += [amount] if name == "blur" else []
        blurred = image.filter(ImageFilter.GaussianBlur(amount))
        assert np.array_equal(augmented, {"gray": gray, "solarize": solarized, "blur": blurred}[name])
    assert scipy.stats.chisquare(list(counts.values())).pvalue > 1e-3
    assert scipy.stats.kstest(sigmas, "uniform", args=(0.1, 1.9)).pvalue > 1e-3


def test_jitter_draws_as_torchvision_does():
    operations = [each for copy in range(1000) for each in draws.draw_jitter(0.3, generator(0, 0, "j", copy))]
    theirs = T.ColorJitter(0.3, 0.3, 0.3)
    assert theirs.brightness == theirs.contrast == theirs.saturation == (0.7, 1.3)
    for name in ("brightness", "contrast", "color"):
        assert scipy.stats.kstest([a for n, a in operations if n == name], "uniform", args=(0.7, 0.6)).pvalue > 1e-3
    orders = [tuple(name for name, _ in operations[at : at + 3]) for at in range(0, len(operations), 3)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


# ---- a batch ---------------------------------------------------------------------------------------------------------


def batch(count: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(count)
    images = torch.from_numpy(rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8))
    return images, torch.from_numpy(rng.integers(0, 10, count))


def prepared(images, labels, mix: Mix, step: int = 0, rows: BatchRows | None = None, erase: float = 0.0, seed: int = 3):
    settings = BatchSettings(Augment(erase=erase), mix, Normalize(), num_classes=10)
    return prepare_batch(images, labels, settings, seed, step, rows)


def test_normalizing_equals_totensor_and_normalize():
    images, _ = batch(4)
    ours = normalized(images, Normalize())
    theirs = T.Compose([T.ToTensor(), T.Normalize(Normalize().mean, Normalize().std)])
    expected = torch.stack([theirs(Image.fromarray(image.numpy())) for image in images])
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6, check_stride=False)
    assert ours.is_contiguous(memory_format=torch.channels_last)


def test_images_normalized_after_an_inference_are_trained_on():
    images, colors = batch(2)[0], Normalize(mean=(0.1, 0.2, 0.3))
    with torch.inference_mode():
        expected = normalized(images, colors).clone()
    kernel = torch.ones(3, requires_grad=True)
    ours = normalized(images, colors)
    (ours * kernel[:, None, None]).sum().backward()
    assert torch.equal(ours, expected)
    torch.testing.assert_close(kernel.grad, ours.sum((0, 2, 3)))


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1), st.integers(1, 40), st.integers(1, 40), st.data())
def test_the_cutmix_box_equals_timms(share, height, width, draw):
    center = draw.draw(st.integers(0, height - 1)), draw.draw(st.integers(0, width - 1))
    given_center = iter(center)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "randint", lambda *_, **__: next(given_center))
        theirs = timm_mixup.rand_bbox((3, height, width), share)
    ours = cut_boxes(np.array([share]), np.array([center]), (height, width))
    assert ours.tolist() == [[int(edge) for edge in theirs]]


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (1, 7)])
def test_cutmix_draws_the_boxes_and_shares_that_timm_makes_of_the_same_numbers(size, monkeypatch):
    count = 200
    mixing = draw_mixing(Mix(cutmix=1.0), count, size, np.random.default_rng(0))
    rng = np.random.default_rng(0)
    rng.random(count)  # which draws are cuts: all
    shares = rng.beta(np.ones(count), 1.0)
    rng.random(count)  # which draws mix: all
    centers = iter(rng.integers(size, size=(count, 2)).ravel())
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(centers))
    theirs = [timm_mixup.cutmix_bbox_and_lam((3, *size), share) for share in shares]
    assert mixing.boxes.tolist() == [[int(edge) for edge in box] for box, _ in theirs]
    assert mixing.shares == pytest.approx([share for _, share in theirs], rel=1e-12)


def mixed_by_timm(images, labels, mixing: Mixing, draw: int):
    """Return a pair of images and their targets, mixed by timm with one of our draws."""
    share, (top, bottom, left, right) = float(mixing.shares[draw]), mixing.boxes[draw]
    mixup, images = timm_mixup.Mixup(num_classes=10, label_smoothing=0.0), images.clone()
    is_cut = mixing.inside[draw] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixup, "_params_per_batch", lambda: (share, is_cut))
        patch.setattr(timm_mixup, "cutmix_bbox_and_lam", lambda *_, **__: ((top, bottom, left, right), share))
        return mixup(images, labels)


@pytest.mark.parametrize("mix", [Mix(mixup=0.8), Mix(cutmix=1.0), Mix(mixup=0.1, cutmix=1.0, chance=0.8)])
@pytest.mark.parametrize("per", ["pair", 4, 6, "batch"])
def test_mixed_images_and_targets_equal_timms(mix, per):
    mix = mix.model_copy(update={"per": per})
    images, labels = batch(24)
    plain = normalized(images, Normalize())
    for step in range(10):
        ours, targets = prepared(images, labels, mix, step)
        draws = mix.draws(24)
        assert draws == {"pair": 12, 4: 6, 6: 4, "batch": 1}[per]
        mixing = draw_mixing(mix, draws, (32, 32), step_generator(3, step, "mix"))
        for pair in range(12):
            rows = slice(2 * pair, 2 * pair + 2)
            theirs, their_targets = mixed_by_timm(plain[rows], labels[rows], mixing, pair % draws)
            torch.testing.assert_close(ours[rows], theirs, rtol=1e-5, atol=1e-6, check_stride=False)
            assert torch.equal(targets[rows], their_targets)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([Mix(mixup=0.8), Mix(cutmix=1.0), Mix(mixup=0.1, cutmix=1.0, per="pair"), Mix()]),
    st.integers(1, 9),
    st.integers(0, 1000),
)
def test_targets_match_the_mixed_images(mix, count, step):
    # Row i has one color and class i, so the color of a mixed image gives the share of each class.
    images = torch.arange(count, dtype=torch.uint8).mul(20).view(-1, 1, 1, 1).expand(count, 24, 24, 3).contiguous()
    plain = Normalize(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    settings = BatchSettings(Augment(), mix, plain, num_classes=10)
    mixed, targets = prepare_batch(images, torch.arange(count), settings, seed=0, step=step)
    torch.testing.assert_close(targets.sum(1), torch.ones(count))
    colors = torch.arange(10) * 20 / 255
    torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ colors, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mix", [Mix(mixup=0.8), Mix(cutmix=1.0, per="batch"), Mix(mixup=0.8, cutmix=1.0, per=4)])
@pytest.mark.parametrize("workers", [2, 4, 12])
def test_a_row_does_not_depend_on_the_number_of_workers(mix, workers):
    images, labels = batch(24)
    for step in range(3):
        one_worker = prepared(images, labels, mix, step, erase=0.5)
        for rank in range(workers):
            places = positions_of(0, 24, rank, workers)
            for part in np.split(places, [len(places) // 4 * 2]):  # gradient accumulation
                prepared_part = prepared(images[part], labels[part], mix, step, BatchRows(part, 24), erase=0.5)
                for ours, expected in zip(prepared_part, one_worker, strict=True):
                    assert torch.equal(ours, expected[part])
        assert one_worker[0].is_contiguous(memory_format=torch.channels_last)


def test_mixing_and_erasing_depend_on_step_and_seed():
    images, labels = batch(8)
    for mix, erase in ((Mix(mixup=0.8), 0.0), (Mix(), 0.5)):
        results = [
            prepared(images, labels, mix, step, erase=erase, seed=seed)[0] for seed, step in ((0, 0), (0, 1), (1, 0))
        ]
        assert not any(torch.equal(results[one], results[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (2, [1, 0]), (3, [1, 0, 1]), (5, [1, 0, 3, 2, 3])])
def test_the_last_image_of_an_odd_batch_is_mixed_with_the_previous_one(count, expected):
    assert partners(BatchRows(np.arange(count), count)).tolist() == expected
    assert partners(BatchRows(np.array([2, 3]), count + 4)).tolist() == [1, 0]
    assert partners(BatchRows(np.array([0, 1, 6, 7]), 8)).tolist() == [1, 0, 3, 2]


@pytest.mark.parametrize(("places", "total"), [([0, 1, 2], 6), ([3, 4, 5], 6), ([2], 3), ([1, 2], 4), ([0, 2], 4)])
def test_a_share_that_separates_a_pair_is_rejected(places, total):
    rows, count = BatchRows(np.array(places), total), len(places)
    with pytest.raises(ValueError, match="is separated from its partner: choose a batch"):
        partners(rows)
    # Without mixing there are no pairs.
    prepared(*batch(count), Mix(), rows=rows, erase=0.5)


def shares_of(mix: Mix, count: int, step: int = 0) -> np.ndarray:
    """Return the share that each image of a batch keeps of its own label."""
    labels = torch.arange(count)
    settings = BatchSettings(Augment(), mix, Normalize(), num_classes=count)
    _, targets = prepare_batch(torch.zeros(count, 8, 8, 3, dtype=torch.uint8), labels, settings, seed=0, step=step)
    return targets[labels, labels].numpy()


@pytest.mark.parametrize(
    ("count", "per", "draws"),
    [(512, 256, 2), (500, 256, 2), (512, "batch", 1), (200, 256, 1), (200, "pair", 100), (48, 16, 3), (50, 16, 4)],
)
def test_a_batch_has_a_draw_for_each_number_of_images(count, per, draws):
    mix = Mix(mixup=1.0) if per == 256 else Mix(mixup=1.0, per=per)
    shares = shares_of(mix, count)
    _, images = np.unique(shares, return_counts=True)
    assert len(images) == draws
    assert max(images) <= {"pair": 2, "batch": count}.get(per, per)
    assert (shares[0::2] == shares[1::2]).all()
    # Neighboring pairs may be copies of each other.
    assert draws == 1 or (shares[2::2] != shares[:-2:2]).all()


def test_copies_of_an_image_see_different_draws():
    groups, copies, batch = np.full(40, 128), 3, 2048
    order = EpochOrder(groups, None, ("", 0, 0), copies)
    shares = shares_of(Mix(mixup=1.0), batch)
    rows = order.at(np.arange(batch))[0]
    seen = {(row, share) for row, share in zip(rows.tolist(), shares.tolist(), strict=True)}
    assert len(seen) == batch


def test_mixing_draws_are_distributed_as_timms():
    mix = Mix(mixup=0.8, cutmix=1.0, switch=0.3, chance=0.9)
    # Over steps and within a batch.
    mixings = [draw_mixing(mix, 3, (64, 64), step_generator(0, step, "mix")) for step in range(1000)]
    mixings += [draw_mixing(mix, 3000, (64, 64), step_generator(1, 0, "mix"))]
    share, inside = (np.concatenate([mixing[at] for mixing in mixings]) for at in (2, 1))
    for part in (slice(3000), slice(3000, None)):
        is_cut, is_mixed = inside[part] == 0, share[part] < 1
        assert is_mixed.mean() == pytest.approx(0.9, abs=0.02)
        assert (is_cut & is_mixed).mean() == pytest.approx(0.9 * 0.3, abs=0.03)
        blended = share[part][~is_cut & is_mixed]
        assert scipy.stats.kstest(blended, "beta", args=(0.8, 0.8)).pvalue > 1e-3
        np.random.seed(0)
        theirs = timm_mixup.Mixup(0.0, 1.0)
        expected = [timm_mixup.cutmix_bbox_and_lam((3, 64, 64), theirs._params_per_batch()[0])[1] for _ in range(3000)]
        assert scipy.stats.ks_2samp(share[part][is_cut & is_mixed], expected).pvalue > 1e-3


def test_a_class_with_any_share_of_a_mixed_image_is_present():
    # A2 blends with Beta(0.1, 0.1), whose shares are often far below float32's epsilon, on either side.
    mix, count, labels = Mix(mixup=0.1, cutmix=1.0, per="pair"), 40_000, torch.arange(40_000) % 10
    mixing = draw_mixing(mix, mix.draws(count), (4, 4), step_generator(0, 0, "mix"))
    drawn = Mixing(*(values.repeat(2, axis=0) for values in mixing))
    partner = partners(BatchRows(np.arange(count), count))
    _, targets = mix_rows(torch.zeros(count, 1, 4, 4), one_hot(labels, 10), drawn, partner)
    theirs = torch.cat(
        [
            timm_mixup.mixup_target(labels[at : at + 2], 10, share)
            for at, share in zip(range(0, count, 2), mixing[2], strict=True)
        ]
    )
    assert torch.equal(targets, theirs)
    assert torch.equal((targets > 0).sum(1) == 2, torch.from_numpy((drawn.shares > 0) & (drawn.shares < 1)))
    logits = torch.randn(count, 10, generator=torch.Generator().manual_seed(0))
    expected = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)(logits, theirs)
    torch.testing.assert_close(binary_cross_entropy(logits, targets, Supervised()), expected)
    # Targets of one rounded share would miss some classes.
    rounded = torch.lerp(one_hot(labels, 10)[partner], one_hot(labels, 10), torch.tensor(drawn.shares).float()[:, None])
    assert 0.03 < ((rounded > 0) != (theirs > 0)).any(1).float().mean() < 0.05


def test_erased_rectangles_are_distributed_as_timms():
    erasures = draw_erased_boxes(3000, 0.25, 64, 48, step_generator(0, 0, "erase"))
    boxes = [(top, top + high, left, left + wide) for top, left, high, wide, _, _ in erasures.tolist() if high]
    assert len(boxes) / 3000 == pytest.approx(0.25, abs=0.03)
    random.seed(0)
    theirs = RandomErasing(1.0, mode="const", device="cpu")
    their_boxes = []
    for _ in range(800):
        erased = (theirs(torch.ones(1, 64, 48)) == 0)[0]
        rows, columns = erased.any(1).nonzero(), erased.any(0).nonzero()
        their_boxes.append((int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1))
    for edge in range(4):
        ours, expected = [box[edge] for box in boxes], [box[edge] for box in their_boxes]
        assert scipy.stats.ks_2samp(ours, expected).pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(0, 1000),
)
def test_filling_all_boxes_is_filling_one_by_one(count, size, chance, dtype, seed):
    height, width = size
    boxes = draw_erased_boxes(count, chance, height, width, step_generator(seed, 0, "erase"))
    noise = torch.Generator().manual_seed(seed)
    sheet = torch.randn(3, height, width, generator=noise)
    images = torch.randn(count, 3, height, width, generator=noise).to(dtype, memory_format=torch.channels_last)
    expected = images.clone()
    for image, (top, left, high, wide, y, x) in zip(expected, boxes.tolist(), strict=True):
        image[:, top : top + high, left : left + wide] = sheet[:, y : y + high, x : x + wide].to(dtype)
    fill_boxes(images, boxes, sheet)
    assert torch.equal(images, expected)


def test_each_box_has_its_place_on_image_and_sheet():
    drawn = draw_erased_boxes(3000, 0.5, 16, 12, step_generator(0, 0, "erase"))
    top, left, high, wide, y, x = drawn[drawn[:, 2] > 0].T
    assert not drawn[drawn[:, 2] == 0].any()
    for start, length, side in ((top, high, 16), (left, wide, 12), (y, high, 16), (x, wide, 12)):
        assert start.min() == 0
        assert (start + length).max() == side
    assert not np.array_equal(top, y)


def test_erased_boxes_are_noise_and_the_rest_is_untouched():
    images, labels = torch.zeros(16, 64, 64, 3, dtype=torch.uint8), torch.zeros(16)
    black = normalized(images[:1], Normalize())[0]
    noise = []
    for step in range(4):
        for image in prepared(images, labels, Mix(), step, erase=0.5)[0]:
            changed = (image != black).any(0)
            noise.append(image[:, changed])
            assert changed.sum() == changed.any(0).sum() * changed.any(1).sum()
    assert 16 < sum(pixels.numel() > 0 for pixels in noise) < 48
    values = torch.cat([pixels.flatten() for pixels in noise])
    assert values.mean() == pytest.approx(0, abs=0.05)
    assert values.std() == pytest.approx(1, abs=0.05)


@pytest.mark.gpu
def test_a_gpu_prepares_the_same_batch():
    images, labels = batch(24)
    for step in range(6):
        mix = Mix(mixup=0.8, cutmix=1.0)
        ours = prepared(images, labels, mix, step, erase=0.5)
        theirs = prepared(images.cuda(), labels.cuda(), mix, step, erase=0.5)
        for on_cpu, on_gpu in zip(ours, theirs, strict=True):
            torch.testing.assert_close(on_cpu, on_gpu.cpu(), rtol=1e-5, atol=1e-5)


# ---- contact sheets --------------------------------------------------------------------------------------------------


def test_a_contact_sheet_shows_originals_and_views():
    samples = [Sample(photo(48, 32, seed), f"{seed}", f"class {seed}") for seed in range(3)]
    sheet = contact_sheet(samples, [ViewKind((32, 32), Augment(policy=ThreeAugment()))], copies=4)
    image = Image.open(io.BytesIO(sheet))
    assert image.format == "PNG"
    assert image.width > 5 * 144
    assert image.height > 3 * 144
    assert sheet == contact_sheet(samples, [ViewKind((32, 32), Augment(policy=ThreeAugment()))], copies=4)
    assert sheet != contact_sheet(samples, [ViewKind((32, 32), Augment(policy=ThreeAugment()))], copies=4, seed=1)
