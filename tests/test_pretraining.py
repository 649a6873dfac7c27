"""Pretraining without labels, end to end on a real Ray with a real MLflow: tokenizer, masked training, fine-tuning."""

import os
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vitray.config import load_run
from vitray.data.augment.masks import draw_sources
from vitray.data.shards import read_request, write_dataset
from vitray.data.stream.batches import HostBatch
from vitray.errors import ConfigError
from vitray.runs.resolve import resolve
from vitray.runs.train import train
from vitray.tracking.figures import draw_pictures
from vitray.training import checkpoints
from vitray.training.data import with_masks
from vitray.weights import load_model, load_tokenizer

pytestmark = pytest.mark.ray

SETTINGS = [
    "model={name: vit_u2x2_8_hmlp_ln, image_size: 32, num_classes: null, pool: mean_then_norm}",
    "optim.batch=16",
    "optim.duration=6 steps",
    "optim.warmup=0 steps",
    "compute.workers=2",
    "checkpoint={every: 2 steps, keep: 9}",
    "evaluate.every=3 steps",
    "tracking.every=1 step",
    "tracking.register_as=null",
]
TOKENIZER = ["task={kind: tokenizer, levels: [4, 4, 4], decoder_width: 16, decoder_depth: 1, decoder_heads: 2}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, ray_cluster):
    """A folder with a dataset, a tracking store and a spool of its own."""
    folder = tmp_path_factory.mktemp("pretraining")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=32"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def recipe(place, *overrides):
    changed = {override.partition("=")[0] for override in overrides}
    settings = [setting for setting in SETTINGS if setting.partition("=")[0] not in changed]
    return load_run(None, [*settings, f"data.url={place / 'demo'}", *overrides])


def beit(place, *overrides):
    objective = f"{{kind: beit, tokenizer: {place / 'runs' / 'tokenizer' / 'model'}}}"
    task = f"task={{kind: masked, objective: {objective}, mask: {{kind: blocks, min_patches: 2}}}}"
    return recipe(place, task, *overrides)


@pytest.fixture(scope="module")
def tokenizer(place):
    return train(recipe(place, *TOKENIZER, "tracking.register_as=codes"), "tokenizer", str(place / "runs"))


@pytest.mark.slow
def test_a_tokenizer_is_trained_logged_and_saved(place, tokenizer):
    assert tokenizer.val_top1 is None
    assert tokenizer.val_loss > 0
    codes = load_tokenizer(tokenizer.model).encode(torch.randn(2, 3, 32, 32))
    assert codes.shape == (2, 16)
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    run = client.get_run(tokenizer.mlflow_run)
    assert {"train/perplexity", "val/perplexity", "val/loss"} <= run.data.metrics.keys()
    assert "val/top1" not in run.data.metrics
    assert 1 <= run.data.metrics["val/perplexity"] <= 64
    assert "reconstructed.png" in {item.path for item in client.list_artifacts(tokenizer.mlflow_run)}
    # MLflow addresses resolve to the same tokenizer.
    for address in (f"runs:/{tokenizer.mlflow_run}/vit_u2x2_8_hmlp_ln", "models:/codes/1"):
        run = beit(place).replace({"task.objective.tokenizer": address})
        assert resolve(run).tokenizer.identity == resolve(beit(place)).tokenizer.identity


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_masked_training_on_codes_is_equal_on_any_number_of_workers_and_can_be_fine_tuned(place, tokenizer):
    outcome = train(beit(place), "beit", str(place / "runs"))
    run_dir = Path(outcome.home)
    last = checkpoints.read_checkpoint(outcome.home, 6)
    assert last.state["train_state"]["best"].keys() == {"loss"}

    train(beit(place, "compute.workers=1"), "alone", str(place / "runs"))
    one = load_file(run_dir / "model" / "model.safetensors")
    other = load_file(place / "runs" / "alone" / "model" / "model.safetensors")
    # Other masks would change every weight by the learning rate. Adam magnifies the rounding of tiny gradients.
    for name in one:
        difference = (one[name] - other[name]).abs()
        assert difference.mean() < 1e-6, name
        assert difference.max() < 2e-4, name

    assert not any(name.startswith("vit.head.") for name in last.parts["model"])
    assert load_model(outcome.model).vit.model.num_classes is None
    settings = [setting for setting in SETTINGS if not setting.startswith("model=")]
    tuned = train(
        load_run(None, [*settings, f"data.url={place / 'demo'}", f"task={{kind: finetune, weights: {outcome.model}}}"]),
        "tuned",
        str(place / "runs"),
    )
    assert tuned.val_top1 is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("objective", ["mean_color", "mae"])
def test_masked_training_on_pixels_with_separate_evaluations(place, objective):
    settings = objective if objective != "mae" else "{kind: mae, decoder_width: 16, decoder_depth: 1, decoder_heads: 2}"
    run = recipe(place, f"task={{kind: masked, objective: {settings}}}", "evaluate.where=cpu", "compute.workers=1")
    outcome = train(run, objective, str(place / "runs"))
    assert outcome.val_loss > 0


def test_evaluations_always_use_the_same_masks(place):
    run = recipe(place, "task=masked")
    numbers = np.arange(5)
    batch = HostBatch(np.zeros((5, 32, 32, 3), np.uint8), numbers, numbers + 3, numbers, epoch=0)
    mask = run.task.mask
    assert np.array_equal(with_masks(batch, run, None).masks, draw_sources(mask, (4, 4), run.seed, None, range(3, 8)))
    assert not np.array_equal(with_masks(batch, run, 0).masks, with_masks(batch, run, 1).masks)


@pytest.mark.slow
def test_an_unusable_tokenizer_gets_one_message(place, tokenizer):
    with pytest.raises(ConfigError, match=r"task.objective.tokenizer: got .*codes for 4 x 4 patches of 8 pixels"):
        resolve(beit(place, "model.image_size=64"))
    with pytest.raises(ConfigError, match=r"task.objective.tokenizer: .*nowhere"):
        resolve(
            recipe(place, "task={kind: masked, objective: {kind: beit, tokenizer: nowhere}, mask: {min_patches: 2}}")
        )


def test_pictures_are_drawn_in_rows():
    pictures = np.random.default_rng(0).normal(size=(3, 4, 3, 32, 48))
    normalize = load_run().data.normalize
    png = draw_pictures(pictures, normalize)
    assert png[:4] == b"\x89PNG"
    assert png != draw_pictures(pictures[:2], normalize)
