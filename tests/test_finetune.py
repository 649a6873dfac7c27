"""Fine-tuning end to end with a real MLflow: from a model to its delta, at another size, interrupted, and on Ray."""

import json
import os
import shutil
from pathlib import Path

import mlflow
import pytest
import torch
from safetensors.torch import load_file

from vitray.config import Model, Run, load_run
from vitray.data.shards import open_dataset, read_request, write_dataset
from vitray.errors import ConfigError
from vitray.evaluation.evaluate import Request, compute_evaluation
from vitray.models.vit import ViT
from vitray.runs.resolve import resolve
from vitray.runs.train import train
from vitray.training import checkpoints
from vitray.weights import load_model, save_model
from vitray.weights.freezing import part_of

SETTINGS = [
    "task.kind=finetune",
    "task.mode=attn",
    "optim.batch=16",
    "optim.duration=12 steps",
    "optim.warmup=0 steps",
    "optim.rule=sgd",
    "optim.lr=0.03",
    "optim.weight_decay=0",
    "optim.ema.decay=0.9",
    "compute.workers=1",
    "checkpoint={every: 5 steps, keep: 9}",
    "evaluate.every=12 steps",
    "tracking.every=1 step",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a dataset, a model of its classes at 32 px, a tracking store and a spool of its own."""
    folder = tmp_path_factory.mktemp("finetune")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=48"]))
    torch.manual_seed(0)
    model = Model(name="vit_u2x2_8_hmlp_bn", image_size=32, num_classes=10, layerscale=0.1, pool="mean")
    run = Run().replace({"model": model.model_dump(mode="json"), "data.normalize.mean": [0.4, 0.5, 0.6]})
    save_model(str(folder / "base"), run, ViT(model), open_dataset(str(folder / "demo")).classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def recipe(place, *overrides):
    changed = {override.partition("=")[0] for override in overrides}
    settings = [*SETTINGS, f"data.url={place / 'demo'}", f"task.weights={place / 'base'}"]
    return load_run(None, [*(setting for setting in settings if setting.partition("=")[0] not in changed), *overrides])


@pytest.fixture(scope="module")
def tuned(place):
    run = recipe(place, "model.image_size=48", "tracking.register_as=tuned")
    return train(run, "tuned", str(place / "runs"), here=True)


def test_omitted_settings_come_from_the_weights(place):
    run = resolve(recipe(place)).run
    assert (run.model.name, run.model.image_size, run.model.pool) == ("vit_u2x2_8_hmlp_bn", 32, "mean")
    assert run.model.layerscale == 0.1
    assert run.data.normalize.mean == (0.4, 0.5, 0.6)
    assert resolve(recipe(place, "model.image_size=48", "model.drop_path=0.1")).run.model.drop_path == 0.1
    assert resolve(recipe(place, "data.normalize.mean=[0.5, 0.5, 0.5]")).run.data.normalize.mean == (0.5, 0.5, 0.5)
    planned_again = resolve(run).run
    assert planned_again == run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=vit_ti2x2_8"], "task.weights .*base: not the network of this run: model.name: got"),
        (["model.num_classes=7"], "model.num_classes: got 7, expected the 10 classes of"),
        (["task.weights=nowhere"], "nowhere"),
        (["task.weights=models:/nothing@champion"], "models:/nothing@champion"),
    ],
)
def test_weights_that_do_not_fit_get_one_message(place, overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve(recipe(place, *overrides))


def test_other_classes_get_a_new_head_and_the_same_classes_keep_the_old_one(place, tmp_path):
    start = resolve(recipe(place)).initial
    assert start.adaptation == "as it is"
    base = load_model(str(place / "base"))
    save_model(str(tmp_path / "other"), base.run, base.vit, [f"other {index}" for index in range(10)])
    start = resolve(recipe(place, f"task.weights={tmp_path / 'other'}")).initial
    assert start.adaptation == "a new head of zeros for 10 classes"
    assert not start.state["head.weight"].any()


def test_a_finished_run_is_evaluated_with_its_own_score(place, tuned, tmp_path):
    """`vitray evaluate` prepares images as the run's evaluation does, here for a delta at another image size."""
    request = Request([tuned.model], str(place / "demo"), out=str(tmp_path), workers=1)
    scores = compute_evaluation(request)[0].flat()
    assert scores["images"] == 17
    assert scores["top1"] == tuned.val_top1
    assert scores["loss"] == pytest.approx(tuned.val_loss, abs=1e-5)


def test_a_fine_tuning_changes_only_its_parts_and_ends_as_a_delta(place, tuned):
    base, fine_tuned = load_model(str(place / "base")).vit, load_model(tuned.model).vit
    assert fine_tuned.model.image_size == 48
    for name, tensor in fine_tuned.state_dict().items():
        before = base.state_dict()[name]
        if before.shape != tensor.shape:
            assert name == "positions.table"
        elif part_of(name) in ("attn", "head"):
            assert not torch.equal(tensor, before), name
        else:  # the batch norm's statistics too
            assert torch.equal(tensor, before), name
    stored = load_file(Path(tuned.model) / "model.safetensors")
    assert {part_of(name) for name in stored} == {"attn", "positions", "head"}
    assert tuned.model_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_the_optimizer_has_no_state_of_frozen_weights(tuned):
    last = checkpoints.read_checkpoint(tuned.home, 12)
    trained = {
        name for name in last.parts["model"] if part_of(name.removeprefix("vit.")) in ("attn", "positions", "head")
    }
    assert len(last.parts["optimizer"]) == len(trained)
    statistics = {name for name in last.parts["model"] if "running" in name or "tracked" in name}
    assert set(last.parts["average"]) == trained | statistics


def test_mlflow_has_the_audit_the_delta_and_its_base(place, tuned):
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    run = client.get_run(tuned.mlflow_run)
    assert run.data.tags["vitray.base"] == str(place / "base")
    assert run.data.params["task.mode"] == "attn"
    assert 0 < float(run.data.params["plan.trainable_share"]) < 0.5
    assert int(float(run.data.params["model/bytes"])) == tuned.model_bytes
    assert float(run.data.params["model/share"]) < 0.5
    audit = Path(client.download_artifacts(tuned.mlflow_run, "audit.md")).read_text()
    assert "| attn " in audit
    assert "| total " in audit
    version = client.get_model_version_by_alias("tuned", "champion")
    assert version.tags["vitray.base"] == str(place / "base")
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(load_model("models:/tuned@champion").vit(images), load_model(tuned.model).vit(images))


@pytest.mark.slow
def test_an_interrupted_fine_tuning_ends_bit_equal(place, tuned):
    run_dir = place / "runs" / "again"
    shutil.copytree(tuned.home, run_dir)
    shutil.rmtree(run_dir / "model")
    (run_dir / "outcome.json").unlink()
    for step in (10, 12):
        shutil.rmtree(checkpoints.folder_of(str(run_dir), step))
    content = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(content | {"uid": "again"}))
    run = recipe(place, "model.image_size=48", "tracking.register_as=null")
    outcome = train(run, "again", str(place / "runs"), here=True)
    one, other = (load_file(Path(each.model) / "model.safetensors") for each in (outcome, tuned))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.ray
@pytest.mark.slow
def test_two_workers_train_the_same_factors_and_their_delta_is_evaluated_merged(place, ray_cluster, tmp_path):
    """LoRA beside frozen weights in DDP: interrupted and resumed, the factors alone in its delta."""
    settings = ["task.mode=lora", "task.lora.rank=2", "tracking.register_as=null", "compute.workers=2"]
    outcome = train(recipe(place, *settings), "lora", str(place / "runs"))
    last = checkpoints.read_checkpoint(outcome.home, 12)
    trained = {name for name in last.parts["model"] if ".lora." in name or name.startswith("vit.head.")}
    assert len(trained) == 4 * 2 * 2 + 2  # four attentions, queries and values, two factors; the head
    assert len(last.parts["optimizer"]) == len(trained)
    base = load_model(str(place / "base")).vit.state_dict()
    for name, tensor in last.parts["model"].items():
        if name in trained:
            assert name.startswith("vit.head.") or tensor.any(), name
        elif "lora_scale" not in name:
            assert torch.equal(tensor, base[name.removeprefix("vit.")]), name
    stored = load_file(Path(outcome.model) / "model.safetensors")
    assert {part_of(name) for name in stored} == {"lora", "head"}
    averaged = {name.removeprefix("vit."): tensor for name, tensor in last.parts["average"].items()}
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in stored.items())

    request = Request([outcome.model], str(place / "demo"), out=str(tmp_path), workers=1)
    scores = compute_evaluation(request)[0].flat()
    assert scores["loss"] == pytest.approx(outcome.val_loss, abs=1e-5)

    for step in (10, 12):
        shutil.rmtree(checkpoints.folder_of(outcome.home, step))
    again = place / "runs" / "lora_again"
    shutil.copytree(outcome.home, again)
    shutil.rmtree(again / "model")
    (again / "outcome.json").unlink()
    content = json.loads((again / "run.json").read_text())
    (again / "run.json").write_text(json.dumps(content | {"uid": "lora_again"}))
    resumed = train(recipe(place, *settings), "lora_again", str(place / "runs"))
    other = load_file(Path(resumed.model) / "model.safetensors")
    assert stored.keys() == other.keys()
    assert all(torch.equal(stored[name], other[name]) for name in stored)


def test_other_weights_under_the_same_name_are_refused(place, tuned):
    torch.manual_seed(1)
    base = load_model(str(place / "base"))
    save_model(str(place / "changed"), base.run, ViT(base.vit.model), base.classes)
    run = recipe(place, "model.image_size=48", f"task.weights={place / 'changed'}")
    with pytest.raises(ConfigError, match="changed: the weights have changed since the run started"):
        train(run, "tuned", str(place / "runs"), here=True)
