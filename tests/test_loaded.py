"""`vitray.load`: what a network answers in Python is what its commands write."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from image_sets import SHAPES, write_folder, write_network
from PIL import Image

import vitray
from pipelines.__main__ import main
from vitray import ConfigError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A network and a folder of 23 images."""
    folder = tmp_path_factory.mktemp("loaded")
    write_network(folder / "model")
    write_folder(folder / "photos", 23)
    return folder


@pytest.fixture(scope="module")
def network(place):
    return vitray.load(place / "model")


@pytest.fixture(scope="module")
def photos(place):
    return sorted((place / "photos").rglob("*.jpg"))


def test_it_answers_as_predict_writes(place, network, photos):
    words = ["predict", str(place / "model"), str(place / "photos"), str(place / "out"), "--logits", "--embedding"]
    assert main(words) == 0
    rows = {row["key"].rpartition("/")[2]: row for row in pq.read_table(place / "out" / "parts").to_pylist()}
    for path, answer, features in zip(photos, network.predict(photos), network.features(photos), strict=True):
        row = rows[path.name]
        assert answer.name == SHAPES[answer.label] == row["classes"][0]
        assert answer.probability == answer.probabilities[answer.label] == pytest.approx(row["probabilities"][0])
        np.testing.assert_allclose(answer.probabilities, torch.tensor(row["logits"]).softmax(0), atol=1e-6)
        np.testing.assert_allclose(features, row["embedding"], atol=1e-5)


def test_an_image_of_any_form_is_the_same_image(network, photos):
    content = photos[0].read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        forms = [photos[0], str(photos[0]), content, image, np.asarray(image.convert("RGB"))]
    alone = [network.predict(form) for form in forms]
    assert {len(each) for each in alone} == {1}
    for [answer] in alone[:3]:
        assert np.array_equal(answer.probabilities, alone[0][0].probabilities)
    for [answer] in alone[3:]:  # Pillow and libjpeg may differ by a level
        np.testing.assert_allclose(answer.probabilities, alone[0][0].probabilities, atol=0.02)
    assert len(network.predict(forms)) == 5
    assert len(network.predict(path for path in photos)) == 23


def test_its_parts_are_those_of_the_module(network, photos):
    images = network.preprocess(photos[:3])
    assert images.shape == (3, 3, 32, 32)
    with torch.inference_mode():
        logits = network.module(images)
    np.testing.assert_allclose(
        logits.softmax(-1), np.stack([each.probabilities for each in network.predict(photos[:3])]), atol=1e-6
    )
    attention = network.attention(photos[:3])
    assert attention.shape == (3, *network.module.model.grid)
    assert network.classes == list(SHAPES)


def test_rotated_and_transparent_images_are_shown_upright_on_white(network):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", exif=exif)
    with Image.open(io.BytesIO(out.getvalue())) as image:
        assert torch.equal(network.preprocess(image), network.preprocess(out.getvalue()))
        assert torch.equal(network.preprocess(image), network.preprocess(np.rot90(pixels, -1).copy()))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("missing.jpg", r"image 0 \('missing.jpg'\): no such file"),
        ([b"no image"], r"image 0 \(in memory\): not an image"),
        (np.zeros((4, 4, 3)), r"got an array of float64 \(4, 4, 3\), expected uint8 \(height, width, 3\)"),
        ([3], "image 0 .*: got int, expected an image of Pillow, an array, bytes or a path"),
        ([], "got no image"),
    ],
)
def test_what_is_no_image_is_refused(network, images, message):
    with pytest.raises(ConfigError, match=message):
        network.predict(images)


def test_a_network_without_classes_has_features_only(tmp_path, photos):
    network = vitray.load(write_network(tmp_path / "features", classes=None))
    assert network.classes is None
    assert network.features(photos[:2]).shape == (2, 64)
    with pytest.raises(ConfigError, match="a network without classes"):
        network.predict(photos[0])
