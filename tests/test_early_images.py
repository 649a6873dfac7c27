"""`data.early`: smaller images in the first steps of a run."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitray.config import load_run
from vitray.data.augment.mixing import DeviceBatch
from vitray.errors import ConfigError
from vitray.models.network import training_gflops
from vitray.models.sizes import sizes_of
from vitray.tasks.build import task_costs
from vitray.training.schedule import Length
from vitray.training.step import prepare_micro_batch

TINY = ["model={name: vit_u1x1_4_pooled, image_size: 32, num_classes: 5, class_token: false, pool: mean}"]
EARLY = [*TINY, "data.early={size: 24, share: 0.4}", "optim.batch=4"]
PLAIN = "data.normalize={mean: [0, 0, 0], std: [1, 1, 1]}"


def batch(height=32, width=32) -> DeviceBatch:
    pixels = np.random.default_rng(0).integers(256, size=(4, height, width, 3), dtype=np.uint8)
    return DeviceBatch(torch.from_numpy(pixels), torch.tensor([0, 1, 2, 3]), np.arange(4), np.arange(4))


@pytest.mark.parametrize(("size", "shape"), [("24", (24, 24)), ("[12, 28]", (12, 28)), ("null", (24, 24))])
def test_the_first_steps_see_what_pillow_makes_of_the_images(size, shape):
    run = load_run(None, [*EARLY, PLAIN, f"data.early.size={size}"])
    made = batch()
    small, _ = prepare_micro_batch(made, slice(0, 4), run, 3, Length(5, 0, 10))
    full, _ = prepare_micro_batch(made, slice(0, 4), run, 4, Length(5, 0, 10))
    assert small.shape[2:] == shape
    assert full.shape[2:] == (32, 32)
    for image_CHW, pixels_HWC in zip(small, made.images.numpy(), strict=True):
        for color in range(3):
            floats = Image.fromarray(pixels_HWC[..., color].astype(np.float32))
            expected = np.asarray(floats.resize(shape[::-1], Image.Resampling.BILINEAR)) / 255
            np.testing.assert_allclose(image_CHW[color].numpy(), expected, atol=1e-5)


def test_mixing_pairs_and_labels_do_not_depend_on_the_size():
    mixed = ["data.mix={mixup: 0.8, per: pair}"]
    labels = [
        prepare_micro_batch(batch(), slice(0, 4), load_run(None, [*base, *mixed]), 1, Length(5, 0, 10))[1]
        for base in (EARLY, [*TINY, "optim.batch=4"])
    ]
    assert torch.equal(*labels)


def test_the_cost_of_a_step_is_the_mean_over_the_steps():
    run = load_run(None, EARLY)
    full = run.replace({"data.early": None})
    small = full.replace({"model.image_size": 24})
    assert task_costs(run).step_gflops == pytest.approx(
        0.4 * task_costs(small).step_gflops + 0.6 * task_costs(full).step_gflops
    )
    assert training_gflops(run) == pytest.approx(0.4 * sizes_of(small.model).gflops + 0.6 * sizes_of(full.model).gflops)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["data.early.size=32"],
            "got 32 x 32, expected multiples of the patch, 4, less than model.image_size, 32 x 32",
        ),
        (
            ["data.early.size=[24, 48]"],
            "data.early.size: got 24 x 48, expected multiples of the patch, 4, less than model.image_size",
        ),
        (
            ["data.early.size=30"],
            "data.early.size: got 30 x 30, expected multiples of the patch, 4, less than model.image_size",
        ),
        (["data.early.share=1"], "data.early.share"),
        (["model.name=vit_u1x1_4", "model.positions=relative"], "relative positions are those of one"),
        (["model.name=vit_u1x1_4", "model.patches=[4, 8]"], "data.early and model.patches cannot be combined"),
        (
            ["model.name=vit_u1x1_4", "task=masked", "model.num_classes=null"],
            "data.early does not apply to task masked, expected one that learns classes",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(changes, message):
    with pytest.raises(ConfigError) as error:
        load_run(None, [*EARLY, *changes])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_other_networks_have_one_size():
    with pytest.raises(ConfigError, match=r"data.early needs a Vision Transformer: got torchvision/resnet18"):
        load_run(None, ["model={name: torchvision/resnet18, image_size: 32}", "data.early.size=24"])
