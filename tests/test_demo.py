"""The demo data: deterministic, balanced, and too hard for a linear model."""

import hashlib
import io
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from test_layers import ROOT

from vitray.data.shards.demo import CLASSES, demo_item

PAIRS = len(CLASSES["shape"]) * len(CLASSES["texture"])


def pixels(image: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image)))


def digest(indices: range) -> str:
    """Return a hash of the images in index order, drawn in the given order."""
    images = {index: demo_item(index, 3, 64, "shape")[0] for index in indices}
    return hashlib.sha256(b"".join(images[index] for index in sorted(images))).hexdigest()


def test_another_process_and_order_draw_the_same_bytes():
    code = "import test_demo; print(test_demo.digest(range(90)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(range(89, -1, -1))


def test_the_task_changes_the_label_and_not_the_image():
    items = [[demo_item(index, 0, 32, task) for task in ("shape", "texture")] for index in range(PAIRS)]
    assert all(shape[0] == texture[0] for shape, texture in items)
    assert len({(shape[1], texture[1]) for shape, texture in items}) == PAIRS


def test_index_and_seed_change_the_image():
    images = {demo_item(index, seed, 32, "shape")[0] for index in range(20) for seed in range(5)}
    assert len(images) == 100


@pytest.mark.parametrize(("task", "at_least"), [("shape", 10), ("texture", 8)])
def test_classes_are_named_once(task, at_least):
    assert len(set(CLASSES[task])) == len(CLASSES[task]) >= at_least


@pytest.mark.parametrize("task", ["shape", "texture"])
def test_classes_are_balanced(task):
    classes = len(CLASSES[task])
    counts = Counter(demo_item(index, 1, 8, task)[1] for index in range(5 * PAIRS))
    assert counts == dict.fromkeys(range(classes), 5 * PAIRS // classes)


@pytest.mark.parametrize("stride", [6, 8, 10])
def test_no_stride_of_the_index_favors_a_class(stride):
    for task in ("shape", "texture"):
        labels = [demo_item(index, 0, 8, task)[1] for index in range(0, 100 * stride, stride)]
        assert len(set(labels)) == len(CLASSES[task])
        assert max(Counter(labels).values()) < 30


@pytest.mark.parametrize("size", [1, 8, 33, 64, 224])
def test_images_are_color_jpegs_of_the_requested_size(size):
    for index in range(8):
        image = Image.open(io.BytesIO(demo_item(index, 0, size, "shape")[0]))
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (size, size))
        image.load()


@pytest.mark.parametrize("task", ["shape", "texture"])
def test_the_nearest_class_mean_is_a_poor_classifier(task):
    items = [demo_item(index, 0, 32, task) for index in range(1000)]
    images = np.stack([pixels(image).ravel() for image, _ in items]).astype(np.float32)
    labels = np.array([label for _, label in items])
    means = np.stack([images[:800][labels[:800] == label].mean(axis=0) for label in range(len(CLASSES[task]))])
    # |x - m|^2 without |x|^2, which is equal for every class: a linear classifier.
    guesses = (images[800:] @ means.T - (means**2).sum(axis=1) / 2).argmax(axis=1)
    assert (guesses == labels[800:]).mean() < 0.45
