"""Images decoded at the scale that their crop needs: the same draws, fewer pixels, nearly the same views."""

import math

import numpy as np
import pytest
from PIL import Image
from test_augment import encoded, photo
from test_stream import finished, train_stream, write

from vitray.config import load_run
from vitray.config.augmentation import Augment
from vitray.data.augment.crops import augment_image, crop_and_draw, decode_for_views, draw_box
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.draws import read_draws
from vitray.data.augment.keyed_random import generator
from vitray.data.stream.decoding import decode_positions
from vitray.errors import ConfigError

SIZE = (48, 64)
CROPS = {
    "random_resized": {},
    "simple_random": {"kind": "simple_random"},
    "center": {"kind": "center"},
}
KEYS = [f"{number}.jpg" for number in range(40)]


def settings(crop: str, **changes) -> Augment:
    policy = {"kind": "randaugment", "chance": 0.8}
    return Augment.model_validate({"crop": CROPS[crop], "policy": policy, "decode": "scaled"} | changes)


def random_of(key: str) -> np.random.Generator:
    return generator(5, 1, key)


def jpeg(width=1001, height=803, seed=0) -> bytes:
    return encoded(photo(width, height, seed), "JPEG", quality=90)


@pytest.mark.parametrize("crop", CROPS)
def test_the_pixels_are_the_fewest_that_cover_the_view(crop):
    augment, divisors = settings(crop), set()
    for key in KEYS:
        image = decode_for_views(jpeg(), [(augment, SIZE, random_of(key))])
        assert image.whole == (803, 1001)
        box = draw_box(image.whole, augment.crop, random_of(key))[2:] if crop == "random_resized" else (803, 1001)
        ratio = 0.875 if crop == "center" else 1
        divisor = max(
            each for each in (1, 2, 4, 8) if all(b * ratio >= each * s for b, s in zip(box, SIZE, strict=True))
        )
        assert image.pixels.shape == (math.ceil(803 / divisor), math.ceil(1001 / divisor), 3)
        divisors.add(divisor)
    assert divisors == ({4, 8} if crop == "random_resized" else {8})


@pytest.mark.parametrize("crop", CROPS)
def test_the_draws_are_those_of_a_full_image_and_the_views_alike(crop):
    augment, data = settings(crop), jpeg()
    plain, full = augment.model_copy(update={"policy": Augment().policy}), decode_image(data)
    views = {}
    for key in KEYS:
        image, ours, theirs = decode_for_views(data, [(augment, SIZE, random_of(key))]), random_of(key), random_of(key)
        scaled = crop_and_draw(image.pixels, augment, SIZE, ours, image.whole)
        whole = crop_and_draw(full, augment, SIZE, theirs)
        assert scaled[1:] == whole[1:]
        assert ours.random(4).tolist() == theirs.random(4).tolist()
        pair = (
            augment_image(image.pixels, plain, SIZE, random_of(key), image.whole),
            augment_image(full, plain, SIZE, random_of(key)),
        )
        views[key] = [view.astype(int) for view in pair]
    differences = [np.abs(ours - theirs).mean() for ours, theirs in views.values()]
    assert max(differences) < 4
    assert np.median(differences) < 1.5
    if crop == "random_resized":  # the measure tells views of other boxes
        others = [np.abs(views[a][0] - views[b][1]).mean() for a, b in zip(KEYS[::2], KEYS[1::2], strict=True)]
        assert np.median(others) > 10


@pytest.mark.parametrize("crop", CROPS)
def test_other_images_are_decoded_in_full(crop):
    turned = Image.Exif()
    turned[0x0112] = 6
    small, png = jpeg(90, 70), encoded(photo(1001, 803))
    for data in (small, png, encoded(photo(1001, 803), "JPEG", exif=turned)):
        image = decode_for_views(data, [(settings(crop), SIZE, random_of("a"))])
        assert np.array_equal(image.pixels, decode_image(data))
        assert image.whole == image.pixels.shape[:2]


def test_a_damaged_image_is_refused_as_in_full():
    data = jpeg()[:9000]
    with pytest.raises(UndecodableImage) as full:
        decode_image(data)
    with pytest.raises(UndecodableImage) as scaled:
        decode_for_views(data, [(settings("center"), SIZE, random_of("a"))])
    assert str(full.value) == str(scaled.value)


def test_a_task_that_sends_draws_gives_the_same_views(tmp_path):
    images = [jpeg(400 + 10 * number, 300, number) for number in range(12)]
    augment = settings("random_resized", jitter=0.3)
    stream = train_stream(write(tmp_path / "data", images), crop=augment)
    sending, in_full = (
        stream.view(0)._replace(kinds=(stream.spec.kinds[0]._replace(crop=augment.model_copy(update=changes)),))
        for changes in ({"on": "device"}, {"decode": "full"})
    )
    [tasks], [device], [full] = (
        decode_positions([np.arange(12)], stream.rows, stream.order(0), view)
        for view in (stream.view(0), sending, in_full)
    )
    assert np.array_equal(finished(device["image"], read_draws(device, augment)), tasks["image"])
    assert not np.array_equal(full["image"], tasks["image"])


def test_decoded_images_are_cached_with_all_pixels():
    with pytest.raises(ConfigError, match=r"cache=decoded keeps all pixels of an image, expected augment.decode=full"):
        load_run().replace({"data.cache": "decoded", "data.augment.decode": "scaled"})
