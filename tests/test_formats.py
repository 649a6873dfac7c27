"""docs/formats.md: its Python, without vitray, reads one of each format that we write; its examples have our keys."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset, write_folder, write_network
from test_layers import ROOT
from test_predict import plan_of, write_all

from pipelines.__main__ import main
from vitray.config import Model, Run, load_run
from vitray.data.shards import open_dataset, read_request
from vitray.data.shards import write_dataset as write_shards
from vitray.data.stream.batches import Share
from vitray.inference.plan import Options, check_options
from vitray.inference.predict import Request, predict
from vitray.models.adapters import add_lora
from vitray.models.network import build_network
from vitray.sweeps.trial_store import TrialRecord
from vitray.tasks.build import build_task
from vitray.training import checkpoints
from vitray.training.learner import Learner, checkpoint_of
from vitray.training.optim import Average, build_optimizer
from vitray.training.state import TrainState
from vitray.weights import identity_of, load_model, save_model

PAGE = (ROOT / "docs/formats.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
READERS: dict = {}
for block in BLOCKS:
    exec(compile(block, "docs/formats.md", "exec"), READERS)
DATASET, DELTA, CHECKPOINT, RUN, TRIAL, PREDICTIONS = map(
    json.loads, re.findall(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
)
# Parts of the examples whose keys are names, or that are empty there.
FREE = {
    "settings",
    "within",
    "reasons",
    "files",
    "train_state",
    "rest",
    "groups",
    "run",
    "versions",
    "networks",
    "columns",
}


def assert_same_keys(example, real, name=""):
    """An example has the keys of a real file, also inside, but for mappings of free names."""
    if isinstance(example, Mapping) and name not in FREE:
        names = list(zip(example.values(), real.values(), strict=False)) if name == "splits" else []
        if not names:
            assert set(example) == set(real), name
        for key in example:
            if key in real:
                assert_same_keys(example[key], real[key], key)
        for one, other in names:
            assert_same_keys(one, other)
    elif isinstance(example, list) and example and isinstance(example[0], Mapping) and real:
        assert_same_keys(example[0], real[0])


def content_of(path):
    return json.loads(path.read_text())


def test_the_page_needs_no_vitray():
    imported = {
        line.split()[1].partition(".")[0] for block in BLOCKS for line in block.splitlines() if "import" in line
    }
    assert imported <= {"hashlib", "json", "math", "pathlib", "numpy", "pyarrow", "safetensors", "yaml"}
    assert len(BLOCKS) == 5


def check_dataset(folder):
    dataset, rows = READERS["read_dataset"](folder)
    ours = open_dataset(str(folder))
    assert READERS["dataset_identity"](dataset) == ours.identity
    for name, split in ours.splits.items():
        assert rows[name].num_rows == split.rows
        assert np.bincount(rows[name]["label"], minlength=len(ours.classes)).tolist() == list(split.class_counts)
    assert_same_keys(DATASET, dataset)
    return rows


def test_a_dataset(tmp_path):
    write_dataset(tmp_path / "data", {"train": 50, "val": 20})
    rows = check_dataset(tmp_path / "data")
    assert rows["train"]["key"].to_pylist() == [f"train:{index}" for index in range(50)]


def test_a_dataset_of_vitray_shard_has_the_columns_of_the_page(tmp_path):
    write_shards(read_request("demo", str(tmp_path / "data"), overrides=["images=40", "image_size=32"]))
    rows = check_dataset(tmp_path / "data")
    table = re.search(r"\| column \| type .*?\n\n", PAGE, re.DOTALL)[0]
    columns = [
        (name, kind)
        for names, kind in re.findall(r"^\| (`.*?) \| (\w+) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert [(each.name, str(each.type)) for each in rows["train"].schema] == columns


@pytest.mark.parametrize("settings", [{}, {"layerscale": 0.3, "name": "vit_u2x2_8"}])
def test_a_model_folder_and_its_logits(tmp_path, settings):
    folder = write_network(tmp_path / "model", **settings)
    run, vit, classes = load_model(str(folder))
    read, names, tensors = READERS["read_model"](folder)
    assert (Run.model_validate(read), names) == (run, classes)
    assert READERS["identity"](tensors) == identity_of(vit.state_dict())
    images = np.random.default_rng(0).normal(size=(3, 3, 32, 32))
    with torch.no_grad():
        wanted = vit.double()(torch.from_numpy(images)).numpy()
    got = READERS["logits"](read, tensors, images, vit.model.num_heads)
    np.testing.assert_allclose(got, wanted, atol=1e-9)


VARIANTS = [
    {"name": "vit_u2x2_8", "layerscale": 0.1},
    {
        "distillation_token": True,
        "registers": 2,
        "positions": {"kind": "rope"},
        "qk_norm": True,
        "activation": "swiglu",
    },
    {"positions": {"kind": "learned2d"}, "head": {"kind": "mlp"}},
    {"positions": {"kind": "relative"}, "class_token": False, "pool": "mean"},
    {"name": "vit_u2x1_8", "positions": {"kind": "learned", "where": "levels"}, "adapters": 4},
    {"name": "vit_u1x1_8_hmlp_bn", "norm": "rmsnorm", "bias": False},
]


@pytest.mark.parametrize("settings", VARIANTS)
def test_every_tensor_has_a_row(settings):
    table = re.search(r"\| tensor \| shape .*?\n\n", PAGE, re.DOTALL)[0]
    patterns = set()
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        first, *others = re.findall(r"`(\S+)`", cell)
        stems = first.rpartition(".")[0], first.removesuffix(".weight").rpartition(".")[0]
        names = [first, *(name if name[0] != "." else f"{stems[name.count('.') - 1]}{name}" for name in others)]
        names += [name.removesuffix("weight") + "bias" for name in names if ", ..." in cell]
        patterns |= {re.escape(name).replace(r"\*", ".+").replace(".L", r".\d+").replace("P", r"\d+") for name in names}
    patterns.add(r"head\.[02]\.(weight|bias)")  # named in the row of the linear head
    with torch.device("meta"):
        vit = build_network(Model.model_validate({"name": "vit_u1x1_8", "image_size": 32, "num_classes": 5} | settings))
    assert [name for name in vit.state_dict() if not any(re.fullmatch(each, name) for each in patterns)] == []


def test_a_delta_and_one_of_lora_also_after_a_move(tmp_path):
    place = tmp_path / "models"
    run, vit, classes = load_model(str(write_network(place / "base")))
    vit.head.bias.data += 1
    save_model(str(place / "headed"), run, vit, classes, relative_to=str(place / "base"))
    add_lora(vit, ("q", "v", "down"), rank=3, alpha=5.0)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in vit.state_dict().items():
        if ".lora." in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    save_model(str(place / "factors"), run, vit, classes, relative_to=str(place / "headed"))
    shutil.move(place, tmp_path / "moved")
    for name in ("headed", "factors"):
        tensors = READERS["read_tensors"](tmp_path / "moved" / name)
        assert READERS["identity"](tensors) == identity_of(load_model(str(tmp_path / "moved" / name)).vit.state_dict())
        assert_same_keys(DELTA, content_of(tmp_path / "moved" / name / "delta.json"))


def test_a_checkpoint(tmp_path):
    overrides = ["model.name=vit_u1x1_8", "model.image_size=32", "model.num_classes=5", "optim.ema.decay=0.9"]
    run = load_run(None, overrides)
    task = build_task(run)
    learner = Learner(task, task, build_optimizer(task, run.optim, torch.device("cpu")), Average(task, run.optim.ema))
    task(torch.zeros(2, 3, 32, 32), torch.eye(5)[:2]).backward()
    learner.optimizer.step()
    for step in (2, 1200):
        state = checkpoint_of(run, learner, TrainState(step=step), Share(0, 2))
        checkpoints.write_checkpoint(str(tmp_path), state)
    folder = READERS["last_checkpoint"](tmp_path)
    content, parts = READERS["read_checkpoint"](folder)
    assert (folder.name, content["step"]) == ("step-00001200", 1200)
    assert_same_keys(CHECKPOINT, content)
    assert set(parts) == {name.removesuffix(".safetensors") for name in CHECKPOINT["files"]}
    for name, tensor in task.state_dict().items():
        assert np.array_equal(parts["model"][name], tensor.numpy())
        assert name.startswith("vit.")
    moments = learner.optimizer.state_dict()["state"]
    assert np.array_equal(parts["optimizer"]["0.exp_avg"], moments[0]["exp_avg"].numpy())
    assert content["state"]["optimizer"]["groups"][0]["params"]


def test_predictions(tmp_path):
    write_network(tmp_path / "model")
    (write_folder(tmp_path / "photos", 21) / "broken.jpg").write_bytes(b"none")
    options = Options(logits=True, batch=8, part=8)
    plan = plan_of(tmp_path / "photos", tmp_path / "out", tmp_path / "model", options=options)
    write_all(plan)
    predict(
        Request(
            [str(tmp_path / "model")],
            str(tmp_path / "photos"),
            str(tmp_path / "out"),
            check_options(plan.networks, options),
        )
    )
    result, rows = READERS["read_predictions"](tmp_path / "out")
    assert_same_keys(PREDICTIONS, result)
    assert (rows.num_rows, result["skipped"], rows["error"].null_count) == (22, 1, 21)
    assert set(rows.column_names) == {"key", "error", *result["columns"]}
    good = rows.filter(rows["error"].is_null())
    assert {len(each) for each in good["logits"].to_pylist()} == {result["columns"]["logits"]} == {len(SHAPES)}


def test_the_record_of_a_trial():
    assert_same_keys(TRIAL, TrialRecord()._asdict())


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_folder(ray_cluster, tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", {"train": 64, "val": 32})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    words = ["data.url=data", "model.image_size=32", "model.name=vit_u1x1_8", "optim.duration=2 steps"]
    words += ["optim.warmup=0 steps", "optim.batch=8", "compute.workers=1", "--name", "first"]
    assert main(["train", "demo", *words]) == 0
    run = tmp_path / "runs/first"
    assert_same_keys(RUN, content_of(run / "run.json"))
    assert content_of(run / "run.json")["dataset_identity"] == open_dataset(str(tmp_path / "data")).identity
    outcome = content_of(run / "outcome.json")
    assert outcome["state"] == "finished"
    assert {"curves", "device_seconds", "val_top1"} <= outcome.keys()
    content, parts = READERS["read_checkpoint"](READERS["last_checkpoint"](run))
    assert content["step"] == 2
    _, _, tensors = READERS["read_model"](run / "model")
    part = parts.get("average", parts["model"])
    assert all(np.array_equal(part[f"vit.{name}"], array) for name, array in tensors.items())


def test_the_page_is_read_without_vitray(tmp_path):
    """In a process that cannot import vitray."""
    folder = write_network(tmp_path / "model")
    code = "import sys; sys.modules['vitray'] = sys.modules['torch'] = None\n" + "".join(BLOCKS)
    code += f"\nprint(identity(read_tensors({str(folder)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == identity_of(load_model(str(folder)).vit.state_dict())
