"""Links in MLflow, read back from a real store: datasets, step-keyed images, checkpoints and evaluated models."""

import io
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from image_sets import write_dataset, write_network
from PIL import Image

from vitray.evaluation.evaluate import Request, evaluate
from vitray.inspection.report import inspect_networks as inspection_verb
from vitray.system import host_facts
from vitray.system.mlflow_client import open_client, tracking_uri
from vitray.tracking.lineage import ModelScores, TrackedDataset
from vitray.tracking.model_registry import VersionScore
from vitray.tracking.spool import RECORDS, Spool
from vitray.tracking.tracker import TrackedRun, Tracker
from vitray.tracking.upload import Uploader
from vitray.weights import load_model, save_model
from vitray.weights.addresses import FOLDER_TAG, resolve_uri

EXPERIMENT = "linked"
DIGEST = "0123456789abcdef" * 4
TRAIN = TrackedDataset("demo/train", DIGEST, "/data/demo", "training", 4000, 10)
VAL = TrackedDataset("demo/val", DIGEST[::-1], "s3://bucket/demo", "validation", 500, 10)


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch, migrated):
    """A working folder with an embedded store and its own spools."""
    shutil.copy(migrated, tmp_path / "mlruns.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def logged(monkeypatch):
    """Replace `log_model` with one that logs no files."""

    def log_model(run_id, folder):
        from mlflow.entities import LoggedModelOutput

        client = open_client(tracking_uri())
        experiment = client.get_run(run_id).info.experiment_id
        model = client.create_logged_model(experiment, "vit", run_id, {FOLDER_TAG: folder})
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        return client.finalize_logged_model(model.model_id, "READY").model_uri

    monkeypatch.setitem(sys.modules, "vitray.serving.flavor", SimpleNamespace(log_model=log_model))


def begin(uid="u1", name="run", tags=None):
    return Tracker(TrackedRun(uid, name, EXPERIMENT), {"optim.lr": 1e-3}, tags or {}, "# a run")


def the_run(uid="u1"):
    client = open_client(tracking_uri())
    experiment = client.get_experiment_by_name(EXPERIMENT)
    [run] = client.search_runs([experiment.experiment_id], f"tags.`vitray.uid` = '{uid}'")
    return client.get_run(run.info.run_id)  # with the models that it read and made


def models():
    client = open_client(tracking_uri())
    return list(client.search_logged_models([client.get_experiment_by_name(EXPERIMENT).experiment_id]))


def points(run, key):
    history = open_client(tracking_uri()).get_metric_history(run.info.run_id, key)
    return [(point.step, point.value) for point in history]


def send_again(tracker):
    """Upload all records a second time, as after a kill before the cursor was written.

    From a copy without a cursor: the tracker's own thread may still write its own.
    """
    assert tracker.flush(60) is None
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(tracker._spool.folder / RECORDS, name)
        spool = Spool(Path(name))
        uploader = Uploader(spool, tracking_uri())
        uploader.send_next()
        while uploader.remaining:
            uploader.send_next()
        spool.close()


def png(color):
    content = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(content, "PNG")
    return content.getvalue()


def test_datasets_are_inputs_with_digests_and_contexts():
    with begin() as tracker:
        tracker.datasets([TRAIN, VAL])
        send_again(tracker)
    inputs = {each.dataset.name: each for each in the_run().inputs.dataset_inputs}
    assert inputs.keys() == {"demo/train", "demo/val"}
    assert inputs["demo/train"].dataset.digest == DIGEST[:36]
    assert [tag.value for tag in inputs["demo/train"].tags] == ["training"]
    assert [tag.value for tag in inputs["demo/val"].tags] == ["validation"]
    assert inputs["demo/val"].dataset.source_type == "s3"
    assert json.loads(inputs["demo/val"].dataset.source) == {"uri": "s3://bucket/demo"}
    assert json.loads(inputs["demo/val"].dataset.profile) == {"num_rows": 500, "num_classes": 10}


def test_a_run_has_its_source_its_commit_and_its_kind_of_experiment(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/vitray", "train", "recipe.yaml"])
    with begin(tags={"git.commit": "abc", "git.dirty": "true"}):
        pass
    tags = the_run().data.tags
    assert (tags["mlflow.source.name"], tags["mlflow.source.type"]) == ("vitray train", "LOCAL")
    assert (tags["mlflow.source.git.commit"], tags["mlflow.source.git.dirty"]) == ("abc", "true")
    experiment = open_client(tracking_uri()).get_experiment_by_name(EXPERIMENT)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_an_experiment_keeps_the_kind_that_its_user_has_set():
    client = open_client(tracking_uri())
    client.create_experiment(EXPERIMENT, tags={"mlflow.experimentKind": "finetuning"})
    with begin():
        pass
    assert client.get_experiment_by_name(EXPERIMENT).tags["mlflow.experimentKind"] == "finetuning"


def test_images_of_steps_arrive_once_and_under_mlflows_names():
    with begin() as tracker:
        tracker.image("examples/predictions", 10, png("red"))
        tracker.image("examples/predictions", 20, png("blue"))
        assert tracker.flush(60) is None
        assert not list(tracker._spool.folder.rglob("*.png")), "sent files are removed"
        send_again(tracker)
    run = the_run()
    names = [file.path for file in open_client(tracking_uri()).list_artifacts(run.info.run_id, "images")]
    full = sorted(name for name in names if name.endswith(".png"))
    assert [name.partition("+timestamp")[0] for name in full] == [
        "images/examples~predictions+step+10",
        "images/examples~predictions+step+20",
    ]
    assert len(names) == 4  # each with MLflow's thumbnail
    with Image.open(Path(run.info.artifact_uri) / full[1]) as image:
        assert (image.size, image.getpixel((0, 0))) == ((40, 30), (0, 0, 255))
    assert run.data.tags["mlflow.loggedImages"] == "True"


def test_an_image_half_sent_is_sent_again(monkeypatch):
    from mlflow import MlflowClient

    original, calls = MlflowClient.log_artifact, []

    def log_artifact(self, run_id, path, artifact_path=None):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("the bucket is offline")
        original(self, run_id, path, artifact_path)

    monkeypatch.setattr(MlflowClient, "log_artifact", log_artifact)
    with begin() as tracker:
        tracker.image("a", 1, png("red"))
        tracker.metrics(1, {"loss": 1})
        assert tracker.flush(60) is None
    names = [file.path for file in open_client(tracking_uri()).list_artifacts(the_run().info.run_id, "images")]
    assert sum(name.endswith("+compressed.webp") for name in names) == 1
    assert points(the_run(), "loss") == [(1, 1)]


def test_the_best_checkpoint_is_one_logged_model_with_the_scores_of_its_step():
    with begin() as tracker:
        tracker.datasets([TRAIN, VAL])
        for step, top1 in ((10, 0.5), (20, 0.75)):
            values = {"val/top1": top1, "val/loss": 1 - top1}
            tracker.metrics(step, values | {"train/lr": 0.1})
            tracker.checkpoint(f"/runs/a/checkpoints/{step}", "vit-best", ModelScores(step, values, VAL))
        send_again(tracker)
    run, [model] = the_run(), models()
    assert (model.name, str(model.status)) == ("vit-best", "READY")
    assert model.source_run_id == run.info.run_id
    assert model.tags["vitray.checkpoint"] == "/runs/a/checkpoints/20"
    assert resolve_uri(f"models:/{model.model_id}") == "/runs/a/checkpoints/20"
    assert model.params["optim.lr"] == "0.001"
    linked = {(each.key, each.value, each.step, each.dataset_name, each.dataset_digest) for each in model.metrics}
    digest = VAL.digest[:36]
    assert linked == {("val/top1", 0.75, 20, "demo/val", digest), ("val/loss", 0.25, 20, "demo/val", digest)}
    assert (model.model_id, 20) in [(each.model_id, each.step) for each in run.outputs.model_outputs]
    assert points(run, "val/top1") == [(10, 0.5), (20, 0.75)], "no point is doubled"


def test_a_score_that_is_no_number_is_not_linked_as_zero():
    with begin() as tracker:
        tracker.checkpoint("/a", "vit-best", ModelScores(1, {"val/loss": math.nan, "val/top1": 0.1}, VAL))
    assert [each.key for each in models()[0].metrics] == ["val/top1"]


def test_the_final_models_scores_are_linked_to_it(logged):
    with begin() as tracker:
        tracker.metrics(30, {"val/top1": 0.5})
        tracker.model("/runs/a/model")
        tracker.scores("/runs/a/model", ModelScores(30, {"val/top1": 0.5}, VAL))
        send_again(tracker)
    run, [model] = the_run(), models()
    assert [(each.key, each.value, each.dataset_name) for each in model.metrics] == [("val/top1", 0.5, "demo/val")]
    assert points(run, "val/top1") == [(30, 0.5)]
    assert run.data.tags["mlflow.note.content"] == "# a run"
    assert "vitray.training_run" not in run.data.tags


def test_a_run_scores_its_own_model_of_a_folder_that_another_run_logs_too(logged):
    with begin("u1", "trial") as tracker:
        tracker.model("/runs/a/model")
        assert tracker.flush(60) is None
        with begin("u2", "sweep") as sweep:
            sweep.model("/runs/a/model")
        tracker.scores("/runs/a/model", ModelScores(30, {"val/top1": 0.5}, VAL))
    [own] = [model for model in models() if model.source_run_id == the_run("u1").info.run_id]
    assert [each.key for each in own.metrics] == ["val/top1"]
    assert the_run("u1").data.tags["mlflow.note.content"] == "# a run"


@pytest.mark.parametrize("address", ["/runs/a/model", "models:/vit/1", "runs:/{run}/vit", "models:/{model}"])
def test_an_evaluation_is_linked_to_the_training_run_and_to_the_registered_version(logged, address):
    with begin("u1", "trained") as tracker:
        tracker.model("/runs/a/model", register_as="vit", score=VersionScore("val/top1", 0.5), scored_on="val")
    training, [model] = the_run("u1"), models()
    url = address.format(run=training.info.run_id, model=model.model_id)
    evaluated = VAL._replace(context="evaluation")
    with begin("u2", "evaluated") as tracker:
        tracker.datasets([evaluated])
        tracker.scores(url, ModelScores(0, {"top1": 0.625, "ece": 0.1}, evaluated), "# scores")
        send_again(tracker)
    run, [model] = the_run("u2"), models()
    assert run.data.tags["mlflow.parentRunId"] == run.data.tags["vitray.training_run"] == training.info.run_id
    assert run.data.tags["vitray.model_version"] == "models:/vit/1"
    note = run.data.tags["mlflow.note.content"]
    experiment = training.info.experiment_id
    page = f"#/experiments/{experiment}/runs/{training.info.run_id}?workflowType=machine_learning"
    assert note.startswith("# scores\n\n")
    assert f"[trained]({page})" in note
    assert "[vit, version 1](#/models/vit/versions/1)" in note
    assert [each.model_id for each in run.inputs.model_inputs] == [model.model_id]
    assert run.data.metrics == {"top1": 0.625, "ece": 0.1}
    assert points(run, "top1") == [(0, 0.625)]
    assert {(each.key, each.value, each.run_id) for each in model.metrics} == {
        ("top1", 0.625, run.info.run_id),
        ("ece", 0.1, run.info.run_id),
    }


@pytest.mark.parametrize("address", ["/weights/deit.pth", "models:/other/3", "/it's/model"])
def test_scores_of_a_model_that_mlflow_does_not_have_are_metrics_of_the_run(address):
    with begin() as tracker:
        tracker.scores(address, ModelScores(0, {"top1": 0.5}, VAL))
    run = the_run()
    assert run.data.metrics == {"top1": 0.5}
    assert "mlflow.parentRunId" not in run.data.tags
    assert "vitray.refused" not in run.data.tags


def test_system_metrics_are_named_as_mlflows_own():
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    theirs = {}
    for monitor in (CPUMonitor(), DiskMonitor(), NetworkMonitor()):
        monitor.collect_metrics()
        theirs |= monitor.aggregate_metrics()
    ours = host_facts.SystemSampler().sample()
    assert {name for name in ours if "gpu" not in name} == {f"system/{name}" for name in theirs}
    for name in ("system_memory_usage_megabytes", "system_memory_usage_percentage"):
        assert ours[f"system/{name}"] == pytest.approx(theirs[name], rel=0.2), name
    assert ours["system/network_receive_megabytes"] < 1000, "since the sampler's start, not since the boot"
    numbered = host_facts.SystemSampler(node=1).sample()
    assert {name.replace("system/node_1/", "system/") for name in numbered} == set(ours)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/usr/bin/vitray", "train", "a.yaml"], "vitray train"),
        (["/repo/pipelines/__main__.py", "sweep"], "vitray sweep"),
        (["/repo/pipelines/train.py", "a.yaml"], "/repo/pipelines/train.py"),
        ([""], "python"),
    ],
)
def test_a_source_is_a_script_or_a_verb(monkeypatch, argv, name):
    monkeypatch.setattr(sys, "argv", argv)
    assert host_facts.source_name() == name


def test_an_evaluation_becomes_a_run_of_the_trainings_experiment(tmp_path, logged):
    data = write_dataset(tmp_path / "demo", {"val": 40})
    write_network(tmp_path / "runs" / "a" / "model")
    run, vit, classes = load_model(str(tmp_path / "runs" / "a" / "model"))
    save_model(str(tmp_path / "model"), run.replace({"tracking.experiment": EXPERIMENT}), vit, classes)
    with begin("u1", "trained") as tracker:
        tracker.model(str(tmp_path / "model"), register_as="vit", score=VersionScore("val/top1", 0.5), scored_on="val")
    request = Request(["model"], data.url, out=str(tmp_path / "out"), workers=1)
    evaluated, _ = evaluate(request)
    evaluate(request)
    client = open_client(tracking_uri())
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    [run] = client.search_runs([experiment], "tags.`vitray.kind` = 'evaluation'")  # continued, not repeated
    assert (run.info.run_name, run.info.status) == ("model on demo/val", "FINISHED")
    assert run.data.tags["mlflow.parentRunId"] == the_run("u1").info.run_id
    assert run.data.tags["vitray.model_version"] == "models:/vit/1"
    assert run.data.metrics["val/top1"] == evaluated.flat()["top1"]
    assert run.data.metrics["val/top1_low"] == evaluated.flat()["top1_low"]
    assert run.data.params["data_identity"] == evaluated.images.identity
    assert "with its 95 % interval" in run.data.tags["mlflow.note.content"]
    [dataset] = client.get_run(run.info.run_id).inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("demo/val", evaluated.images.identity[:36])
    page = Path(run.info.artifact_uri) / "evaluation" / "index.html"
    assert page.read_text() == (tmp_path / "out" / "index.html").read_text()
    assert "val/top1" in {each.key for each in models()[0].metrics}


def test_an_inspection_becomes_a_run_with_its_figures_linked_to_its_model(tmp_path, logged):
    data = write_dataset(tmp_path / "demo", {"val": 20})
    write_network(tmp_path / "model")
    run, vit, classes = load_model(str(tmp_path / "model"))
    save_model(str(tmp_path / "own" / "model"), run.replace({"tracking.experiment": EXPERIMENT}), vit, classes)
    with begin("u1", "trained") as tracker:
        tracker.model(
            str(tmp_path / "own" / "model"), register_as="vit", score=VersionScore("val/top1", 0.5), scored_on="val"
        )
    request = inspection_verb.Request("own/model", [data.url], ["positions"], out=str(tmp_path / "out"))
    inspection, _ = inspection_verb.inspect_networks(request)
    inspection_verb.inspect_networks(request)
    client = open_client(tracking_uri())
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    [run] = client.search_runs([experiment], "tags.`vitray.kind` = 'inspection'")  # continued, not repeated
    assert (run.info.run_name, run.info.status) == ("inside own on demo, val", "FINISHED")
    assert run.data.tags["mlflow.parentRunId"] == the_run("u1").info.run_id
    assert run.data.tags["vitray.model_version"] == "models:/vit/1"
    assert "Similarity of positions" in run.data.tags["mlflow.note.content"]
    [dataset] = client.get_run(run.info.run_id).inputs.dataset_inputs
    assert dataset.dataset.digest == inspection.images.identity[:36]
    logged_files = Path(run.info.artifact_uri) / "inspection"
    files = {path.name for path in logged_files.iterdir()}
    assert files == {"index.html", *(f"positions-own.{ending}" for ending in ("png", "svg", "csv"))}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    for name in files:
        assert (logged_files / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_an_inspection_of_foreign_weights_without_images_is_a_run_without_links(tmp_path):
    write_network(tmp_path / "model")
    inspection_verb.inspect_networks(inspection_verb.Request("model", figures=["positions"]))
    client = open_client(tracking_uri())
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.run_name == "inside model"
    assert "mlflow.parentRunId" not in run.data.tags
    assert "vitray.refused" not in run.data.tags
    assert client.get_run(run.info.run_id).inputs.dataset_inputs == []


def test_an_evaluation_makes_no_store(tmp_path):
    (tmp_path / "mlruns.db").unlink()
    data = write_dataset(tmp_path / "demo", {"val": 20})
    write_network(tmp_path / "model")
    evaluate(Request(["model"], data.url, out=str(tmp_path / "out"), workers=1))
    assert not (tmp_path / "mlruns.db").exists()
    assert not (tmp_path / "home" / "spool").exists()
