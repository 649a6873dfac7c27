"""A network of the user's own code goes through training, model folders, fine-tuning and evaluation."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from image_sets import write_folder
from torch import nn

import vitray
from vitray import ConfigError, load_run
from vitray.config import Model
from vitray.config.classification import Finetune
from vitray.models.network import build_network, network_sizes
from vitray.models.own_networks import require_declared

ROOT = Path(__file__).parent.parent
TINY = {
    "model.name": "own/small",
    "model.image_size": 32,
    "optim.batch": 16,
    "optim.duration": "4 steps",
    "optim.warmup": "0 steps",
    "evaluate.every": "2 steps",
    "checkpoint.every": "2 steps",
    "compute.workers": 1,
    "compute.cpus": 1,
}
DECLARE = "[vitray.networks]\nsmall = declared_networks:build\n"


def small(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 8, 8),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


@pytest.fixture(autouse=True)
def added():
    vitray.add_network("small", small)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a dataset and a run of four steps."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        write_folder(folder / "photos", 48)
        data = vitray.shard(folder / "photos", folder / "data", splits=["val=0.25"]).path
        vitray.add_network("small", small)
        vitray.train(load_run("demo_torchvision", TINY | {"data.url": data}), "first", str(folder / "runs"), here=True)
        yield folder


def test_its_counts_are_those_of_torch():
    sizes = network_sizes(Model(name="own/small", image_size=32, num_classes=5))
    assert sizes.params == sum(parameter.numel() for parameter in small(5).parameters())
    # 16 patches, each a product of 8 x 192, and the head.
    assert sizes.gflops == pytest.approx((16 * 8 * 192 + 8 * 5) / 1e9)
    assert set(sizes.parts) == {"body", "norms", "head"}


def test_a_run_is_saved_loaded_and_evaluated(place):
    model = place / "runs" / "first" / "model"
    loaded, images = vitray.load(str(model)), torch.rand(3, 3, 32, 32)
    alone = small(len(loaded.classes)).eval()
    alone.load_state_dict({name.removeprefix("body."): each for name, each in loaded.module.state_dict().items()})
    assert torch.equal(loaded.module(images), alone(images))
    recorded = vitray.open_run("first", place / "runs").outcome["val_top1"]
    assert vitray.evaluate(str(model), str(place / "data"), out=place / "scores")["top1"] == recorded


def test_a_process_that_is_connected_to_ray_computes_itself(place, ray_cluster, tmp_path):
    model, data = str(place / "runs" / "first" / "model"), str(place / "data")
    recorded = vitray.open_run("first", place / "runs").outcome["val_top1"]
    assert vitray.evaluate(model, data, out=tmp_path / "scores")["top1"] == recorded
    for number, workers in enumerate((None, 1)):
        assert vitray.predict(model, place / "photos", tmp_path / f"answers{number}", workers=workers)["written"] == 48
    with pytest.raises(ConfigError, match="own/small is known in this process alone, and not to workers on Ray"):
        vitray.evaluate(model, data, out=tmp_path / "refused", workers=2)


def test_it_is_fine_tuned_by_its_head(place):
    settings = TINY | {"data.url": str(place / "data"), "task.weights": str(place / "runs" / "first" / "model")}
    run = load_run("demo_finetune", settings | {"task.mode": "head"})
    assert isinstance(run.task, Finetune)
    vitray.train(run, "tuned", str(place / "runs"), here=True)
    before, after = (
        vitray.load(str(place / "runs" / name / "model")).module.state_dict() for name in ("first", "tuned")
    )
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"body.5.weight", "body.5.bias"}


@pytest.mark.slow
def test_a_declared_network_is_found_by_the_command_line(place, tmp_path):
    """By a real installed distribution: a module, and its metadata with the entry point."""
    (tmp_path / "declared_networks.py").write_text("from test_own_networks import small as build\n")
    metadata = tmp_path / "declared_networks-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: declared-networks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(DECLARE)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), str(ROOT)])
    command = [sys.executable, "-m", "pipelines", "predict", str(place / "runs" / "first" / "model")]
    command += [str(place / "photos"), str(tmp_path / "out"), "--json"]
    run = partial(subprocess.run, command, cwd=ROOT, capture_output=True, text=True)
    assert run(env=os.environ | {"PYTHONPATH": paths}).returncode == 0
    (tmp_path / "declared_networks.py").write_text("import absent_module\n")
    broken = run(env=os.environ | {"PYTHONPATH": paths})
    assert (broken.returncode, "No module named 'absent_module'" in broken.stderr) == (2, True)
    unknown = run(env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (unknown.returncode, "own/small is not known in this process" in unknown.stderr) == (2, True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda _: nn.Flatten(), r"its last nn.Linear or nn.Conv2d is none, expected a head of 10 classes"),
        (lambda _: nn.Sequential(nn.Linear(3, 7)), r"is '0' with 7 outputs, expected a head of 10 classes"),
        (lambda classes: nn.Sequential(nn.Linear(3, classes)), "own/wrong: failed on 32 x 32 pixels: "),
        (
            lambda classes: nn.Sequential(nn.Conv2d(3, classes, 1)),
            r"got \[1, 10, 32, 32\] of 1 image, expected logits of the shape",
        ),
        (lambda _: "network", "own/wrong: its function returned str, expected a torch.nn.Module"),
    ],
)
def test_a_network_that_is_none_is_refused(build, message):
    vitray.add_network("wrong", build)
    with pytest.raises(ConfigError, match=message):
        network_sizes(Model(name="own/wrong", image_size=32, num_classes=10))


def test_unknown_and_unusable_names_are_refused():
    with pytest.raises(ConfigError, match=r"own/smal is not known in this process; expected a .*; did you mean small"):
        build_network(Model(name="own/smal"))
    with pytest.raises(ConfigError, match=r"'own/os:system': expected own/ and at most 80 letters"):
        Model(name="own/os:system")
    with pytest.raises(ConfigError, match="add_network: model name 'own/a b'"):
        vitray.add_network("a b", small)
    with pytest.raises(ConfigError, match="own/small is known in this process alone, and not to workers on Ray"):
        require_declared("own/small")
    with pytest.raises(ConfigError, match="own/small has no pool"):
        Model(name="own/small", pool="mean")
