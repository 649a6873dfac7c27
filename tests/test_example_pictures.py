"""The same few images at every evaluation, and the best checkpoint: what a run sends to MLflow between evaluations."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset
from PIL import Image, ImageFilter

from vitray.config import Run
from vitray.data.augment.contact_sheets import ATTENTION, Prediction, attention_overlay, prediction_sheet
from vitray.data.augment.crops import crop_center
from vitray.data.augment.decode import decode_image
from vitray.data.augment.mixing import normalized
from vitray.data.shards import held_out, open_dataset
from vitray.inference.images import open_images
from vitray.inspection import attention_maps
from vitray.models.vit import ViT
from vitray.runs.resolve import resolve
from vitray.runs.run_logger import BestCheckpoint
from vitray.runs.run_summary import run_datasets
from vitray.training import messages
from vitray.training.examples import ExampleImages


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("pictures") / "demo", {"train": 90, "val": 50}, corrupt=1)


def settings(dataset, **changes):
    model = {"model.name": "vit_u2x2_8", "model.image_size": 32, "model.num_classes": len(SHAPES)}
    return Run().replace(model | {"data.url": dataset.url, "optim.batch": 16} | changes)


def examples_of(run, dataset, mask=None):
    return ExampleImages(SimpleNamespace(run=run, dataset=dataset, holdout_mask=mask), torch.device("cpu"))


def test_examples_are_spread_over_the_split_and_are_the_same_at_every_evaluation(dataset):
    run = settings(dataset, **{"evaluate.examples": 8})
    torch.manual_seed(0)
    vit = ViT(run.model).train()
    first = examples_of(run, dataset).look(vit)
    assert vit.training, "the mode of the network is kept"
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    second = examples_of(run, dataset).look(vit)
    assert (first.images == second.images).all()
    assert (first.labels == second.labels).all()
    assert (first.probabilities != second.probabilities).any()
    # Row 0 of the split is corrupt, and left out.
    assert first.images.shape == (7, 32, 32, 3)
    stored = open_images(dataset.url, "val")
    wanted = stored.read_labeled([7, 14, 21, 28, 35, 42, 49])
    assert first.labels.tolist() == [each.label for each in wanted]


def test_an_examples_numbers_are_those_of_the_network(dataset):
    run = settings(dataset)
    torch.manual_seed(0)
    vit = ViT(run.model).eval()
    seen = examples_of(run, dataset).look(vit)
    images_BCHW = normalized(torch.from_numpy(seen.images), run.data.normalize)
    with torch.no_grad():
        probabilities_BK = vit(images_BCHW).softmax(1)
        maps = attention_maps(vit, images_BCHW)
    assert seen.predicted.tolist() == probabilities_BK.argmax(1).tolist()
    assert seen.probabilities == pytest.approx(probabilities_BK.max(1).values.numpy(), abs=1e-6)
    assert seen.attention == pytest.approx(maps.rollout.numpy(), abs=1e-6)
    assert seen.attention.shape == (len(seen.images), 4, 4)


def test_examples_of_a_hold_out_are_held_out_images(dataset):
    run = settings(dataset, **{"data.holdout": 0.3, "evaluate.examples": 5})
    mask = held_out(dataset, run.data)
    seen = examples_of(run, dataset, mask)
    stored = np.flatnonzero(mask)
    images = open_images(dataset.url, "train")
    contents = [each.content for each in images.read_labeled(stored.tolist()) if each.content != b"none"]
    shown = seen.look(ViT(run.model)).images
    assert len(shown) >= 4
    views = {crop_center(decode_image(content), run.data.eval_crop, (32, 32)).tobytes() for content in contents}
    assert {image.tobytes() for image in shown} <= views


def test_an_overlay_has_the_colors_of_the_attention():
    image_HWC = np.full((8, 12, 3), 200, np.uint8)
    shown = attention_overlay(image_HWC, np.array([[0.1, 0.1, 0.1], [0.1, 0.5, 0.3]]))
    for part, color, opacity in (
        (shown[4:, 4:8], ATTENTION[-1], 0.7),  # the most
        (shown[:4], ATTENTION[0], 0.3),  # the least
        (shown[4:, 8:], ATTENTION[2], 0.5),  # half-way
    ):
        expected = 200 * (1 - opacity) + np.array(color) * opacity
        assert np.abs(part - expected).max() <= 1
    dark = attention_overlay(np.zeros_like(image_HWC), np.array([[0.0, 1.0]]))
    assert np.abs(dark[:, :6].astype(int) - dark[:, 6:]).max() > 100
    assert (attention_overlay(image_HWC, np.ones((2, 3))) == image_HWC).all()


def test_a_blurred_overlay_follows_the_code_of_the_papers_authors():
    rng = np.random.default_rng(1)
    image, weights = np.full((24, 32, 3), 90, np.uint8), rng.random((3, 4)) + 0.2
    mask = Image.fromarray((255 * weights / weights.max()).astype(np.uint8)).resize((32, 24), Image.LANCZOS)
    mask = np.asarray(mask.filter(ImageFilter.GaussianBlur(8))).astype(float)
    mask = (mask - mask.min()) / (mask - mask.min()).max()
    shown = attention_overlay(image, weights, 8)
    for row, column in ((0, 0), (12, 17), np.unravel_index(mask.argmax(), mask.shape)):
        share = mask[row, column]
        color = [np.interp(share, np.linspace(0, 1, 5), channel) for channel in zip(*ATTENTION, strict=True)]
        expected = 90 * (0.7 - 0.4 * share) + np.array(color) * (0.3 + 0.4 * share)
        assert np.abs(shown[row, column] - expected).max() <= 1
    assert np.array_equal(attention_overlay(image, np.zeros((2, 2)), 8), image)


@pytest.mark.parametrize("number", [1, 8, 9])
def test_the_sheet_of_examples_is_drawn(number):
    image_HWC = np.zeros((16, 24, 3), np.uint8)
    example = Prediction(image_HWC, "a class with a name that is too long for it", "狗 <b>", 0.5, np.ones((2, 3)))
    with Image.open(io.BytesIO(prediction_sheet([example] * number, "step 1"))) as sheet:
        rows, columns = -(-number // 8), min(8, number)
        assert sheet.size == (40 + 152 * columns, 48 + 352 * rows)


def test_the_best_checkpoint_is_named_once_its_scores_and_its_files_are_known():
    best = BestCheckpoint()
    assert best.evaluated(10, {"val/top1": 0.5, "val/top1_ema": 0.6, "best/val_top1": 0.6, "train/lr": 1}) is None
    assert best.saved(10) == (10, {"val/top1": 0.5, "val/top1_ema": 0.6})
    assert best.saved(15) is None, "a checkpoint without an evaluation"
    # Worse, and equal: the earlier one stays.
    assert best.evaluated(15, {"val/top1": 0.9, "val/top1_ema": 0.55, "best/val_top1": 0.6}) is None
    assert best.evaluated(15, {"val/top1": 0.9, "val/top1_ema": 0.6, "best/val_top1": 0.6}) is None
    # A separate evaluation ends after its checkpoint.
    assert best.saved(20) is None
    assert best.evaluated(20, {"val/top1": 0.7, "val/top1_ema": 0.7, "best/val_top1": 0.7}) == (
        20,
        {"val/top1": 0.7, "val/top1_ema": 0.7},
    )
    assert best.evaluated(20, {"train/loss": 1.0}) is None


def test_the_best_scores_may_have_no_checkpoint():
    best = BestCheckpoint()
    assert best.without_checkpoint is None
    best.saved(10)
    best.evaluated(10, {"val/top1": 0.5, "best/val_top1": 0.5})
    assert best.without_checkpoint is None
    best.evaluated(15, {"val/top1": 0.6, "best/val_top1": 0.6})
    assert best.without_checkpoint == (15, {"val/top1": 0.6})
    best.saved(20)
    assert best.without_checkpoint == (15, {"val/top1": 0.6}), "another step's"
    best.saved(15)
    assert best.without_checkpoint is None


def logged_by(dataset, monkeypatch, *received):
    """What a run logger sends for these messages: images by (key, step), and notes."""
    from vitray.runs import run_logger

    logger = object.__new__(run_logger.RunLogger)
    images, tags = [], {}
    tracker = SimpleNamespace(
        image=lambda key, step, png: images.append((key, step, Image.open(io.BytesIO(png)).size)),
        figure=lambda *_: None,
        tag=tags.__setitem__,
    )
    for name, value in {
        "_resolved": SimpleNamespace(dataset=open_dataset(dataset.url)),
        "_run": Run(),
        "_tracker": tracker,
        "_has_pictures": False,
        "_notes": [],
        "console": SimpleNamespace(line=lambda _: None),
    }.items():
        setattr(logger, name, value)
    for message in received:
        logger._log(message)
    return images, tags


def test_the_image_grid_has_a_picture_at_step_0_where_mlflow_opens_it(dataset, monkeypatch):
    run = settings(dataset, **{"evaluate.examples": 3})
    seen = examples_of(run, dataset).look(ViT(run.model))
    received = [messages.ExamplePictures(step, seen) for step in (10, 20)]
    images, _ = logged_by(dataset, monkeypatch, *received)
    assert [each[:2] for each in images] == [("examples/predictions", step) for step in (0, 10, 20)]
    assert len({size for _, _, size in images}) == 1
    pictures = np.random.default_rng(0).normal(size=(3, 2, 3, 16, 16))
    images, _ = logged_by(dataset, monkeypatch, *(messages.Pictures(step, pictures) for step in (5, 9)))
    assert [each[:2] for each in images] == [("examples/reconstructed", step) for step in (0, 5, 9)]


def test_a_sheet_without_predictions_shows_the_images_alone():
    image_HWC = np.full((16, 16, 3), 90, np.uint8)
    known = Prediction(image_HWC, "one", None, 0.5, np.ones((2, 2)))
    sheets = [
        Image.open(io.BytesIO(prediction_sheet([each], "x"))) for each in (known, known._replace(predicted="two"))
    ]
    above, below = (40, 50, 160, 150), (40, 210, 160, 340)
    assert sheets[0].size == sheets[1].size
    assert sheets[0].crop(above).tobytes() == sheets[1].crop(above).tobytes()
    assert sheets[0].getpixel((96, 260)) != sheets[1].getpixel((96, 260))
    assert len(sheets[0].crop(below).getcolors()) == 1


def test_the_best_checkpoint_without_labels_has_the_lowest_loss():
    best = BestCheckpoint()
    best.saved(1)
    assert best.evaluated(1, {"val/loss": 0.5, "best/val_loss": 0.5}) == (1, {"val/loss": 0.5})
    assert best.evaluated(2, {"val/loss": 0.6, "best/val_loss": 0.5}) is None


def test_a_runs_datasets_have_the_digests_of_an_evaluation_of_the_same_images(dataset):
    train, val = run_datasets(resolve(settings(dataset)))
    assert (train.name, train.context, train.images) == ("demo/train", "training", 90)
    assert (val.name, val.context, val.images) == ("demo/val", "validation", 50)
    assert [train.digest, val.digest] == [open_images(dataset.url, split).identity for split in ("train", "val")]


def test_the_parts_of_a_hold_out_are_different_datasets(dataset):
    held = run_datasets(resolve(settings(dataset, **{"data.holdout": 0.3})))
    assert [each.name for each in held] == ["demo/train, without 30%", "demo/train, 30%"]
    whole = open_images(dataset.url, "train").identity
    assert len({whole, *(each.digest for each in held)}) == 3
    assert sum(each.images for each in held) == 90
    assert len(run_datasets(resolve(settings(dataset, **{"data.val": None})))) == 1
