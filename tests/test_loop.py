"""Training end to end on a real Ray with a real MLflow: exact resume after any kill, and no lost metric."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import mlflow
import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file

from vitray.cluster import session
from vitray.config import load_run
from vitray.data.shards import read_request, write_dataset
from vitray.errors import ConfigError, RunError
from vitray.metrics.scores import Mistake, Score
from vitray.runs import worker_mailbox
from vitray.runs.train import train
from vitray.runs.train_on_ray import RayMailbox
from vitray.system import storage
from vitray.system.lease import own_folder
from vitray.training import checkpoints, host
from vitray.training.evaluator import evaluation_message
from vitray.weights import load_model

pytestmark = pytest.mark.ray

# All random parts are on: drop path, dropout, mixing, erasing, repeated augmentation.
RECIPE = [
    "model.name=vit_u2x2_8",
    "model.image_size=32",
    "model.num_classes=10",
    "model.drop_path=0.1",
    "model.dropout=0.1",
    "data.augment.erase=0.25",
    "data.mix={mixup: 0.8, cutmix: 1.0, per: 4}",
    "data.repeats=2",
    "task={loss: bce}",
    "optim.batch=16",
    "optim.duration=20 steps",
    "optim.warmup=4 steps",
    "optim.rule=lamb",
    "optim.ema.decay=0.9",
    "compute.workers=2",
    "checkpoint={every: 6 steps, keep: 9}",
    "evaluate.every=10 steps",
    "tracking.every=1 step",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, ray_cluster):
    """A folder with a small dataset, a tracking store and a spool of its own."""
    folder = tmp_path_factory.mktemp("loop")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=32"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def recipe(place, *overrides):
    changed = [override.partition("=")[0] for override in overrides]
    settings = [setting for setting in RECIPE if setting.partition("=")[0] not in changed]
    return load_run(None, [*settings, f"data.url={place / 'demo'}", *overrides])


def losses(run_id):
    """{step: loss} from MLflow."""
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    points = client.get_metric_history(run_id, "train/loss")
    assert len({point.step for point in points}) == len(points), "a step arrived twice"
    return {point.step: point.value for point in sorted(points, key=lambda point: point.step)}


def weights(run_dir):
    """All tensors of the last checkpoint: weights, their average, optimizer state."""
    last = checkpoints.read_checkpoint(str(run_dir), checkpoints.complete_steps(str(run_dir))[-1])
    return {f"{part}.{name}": tensor for part, tensors in last.parts.items() for name, tensor in tensors.items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(place):
    """An undisturbed run."""
    outcome = train(recipe(place), "whole", str(place / "runs"))
    return outcome, weights(outcome.home), losses(outcome.mlflow_run)


def test_a_run_ends_with_its_model_and_its_metrics(place, undisturbed):
    outcome, _, by_step = undisturbed
    assert outcome.steps == 20
    assert list(by_step) == list(range(1, 21))
    assert checkpoints.complete_steps(outcome.home) == [6, 12, 18, 20]
    run = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(outcome.mlflow_run)
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.rule.kind"] == "lamb"
    assert run.data.params["plan.dataset_identity"]
    assert "git.commit" in run.data.tags
    assert run.data.metrics["val/top1_ema"] == outcome.val_top1
    batch = int(run.data.params["plan.global_batch"])
    assert float(run.data.params["cost/step_ms"]) == pytest.approx(1000 * batch / outcome.images_per_second)
    assert {
        "train/lr",
        "train/images_per_second",
        "train/data_wait_share",
        "train/grad_norm",
    } <= run.data.metrics.keys()
    # What holds for the run as a whole is no chart.
    assert {name.partition("/")[0] for name in run.data.metrics} == {"train", "val", "data", "system"}
    assert float(run.data.tags["best/val_top1"]) >= run.data.metrics["val/top1_ema"]
    assert {"cost/device_seconds", "cost/flops"} <= run.data.params.keys()
    assert "system/cpu_utilization_percentage" in run.data.metrics
    names = {
        item.path for item in mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).list_artifacts(outcome.mlflow_run)
    }
    inputs = {each.dataset.name: each.tags[0].value for each in run.inputs.dataset_inputs}
    assert inputs == {"demo/train": "training", "demo/val": "validation"}
    assert run.data.tags["mlflow.source.name"]
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    pictures = {item.path.partition("+timestamp")[0] for item in client.list_artifacts(outcome.mlflow_run, "images")}
    assert pictures == {f"images/examples~predictions+step+{step}" for step in (0, 10, 20)}
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{outcome.mlflow_run}'")
    [final] = [model for model in models if "vitray.folder" in model.tags]
    linked = {(each.key, each.value, each.dataset_name) for each in final.metrics}
    assert ("val/top1_ema", outcome.val_top1, "demo/val") in linked
    assert all(key != "val/top1" for key, _, _ in linked), "those of weights that the folder does not hold"
    assert {"augmented.png", "curves.png", "confusion.png", "mistakes.png", "run.yaml"} <= names
    assert load_model(outcome.model).vit.model.name == "vit_u2x2_8"


def test_a_finished_run_is_not_trained_again(place, undisturbed, capsys):
    assert train(recipe(place), "whole", str(place / "runs")) == undisturbed[0]
    assert "whole is finished" in capsys.readouterr().err


def test_the_model_folder_holds_the_averaged_weights(undisturbed):
    outcome, tensors, _ = undisturbed
    for name, tensor in load_file(Path(outcome.model) / "model.safetensors").items():
        assert torch.equal(tensor, tensors[f"average.vit.{name}"])


def interrupted(place, undisturbed, name, step):
    """Return the folder of a run that was interrupted right after the checkpoint of a step."""
    run_dir = place / "runs" / name
    shutil.copytree(undisturbed[0].home, run_dir)
    shutil.rmtree(run_dir / "model")
    (run_dir / "outcome.json").unlink()
    for saved in checkpoints.complete_steps(str(run_dir)):
        if saved > step:
            shutil.rmtree(checkpoints.folder_of(str(run_dir), saved))
    # A later checkpoint, half-written when the power failed.
    (run_dir / "checkpoints" / "step-00000019").mkdir()
    (run_dir / "checkpoints" / "step-00000019" / "model.safetensors").write_bytes(b"half")
    (run_dir / "run.json").write_text((run_dir / "run.json").read_text().replace(uid_of(run_dir), f"{name:0<32}"))
    return run_dir


def uid_of(run_dir):
    return json.loads((run_dir / "run.json").read_text())["uid"]


def test_a_resumed_run_is_bit_equal(place, undisturbed):
    interrupted(place, undisturbed, "resumed", 6)
    outcome = train(recipe(place), "resumed", str(place / "runs"))
    assert same(weights(outcome.home), undisturbed[1])
    # MLflow sees a new run, so all records of the checkpoint are uploaded again.
    assert losses(outcome.mlflow_run) == undisturbed[2]


@pytest.mark.slow
def test_another_number_of_workers_agrees_up_to_rounding(place):
    # Dropout is drawn per worker; everything else is a function of the step.
    deterministic = ["model.drop_path=0", "model.dropout=0", "optim.duration=8 steps"]
    results = {}
    for workers in (1, 2):
        outcome = train(
            recipe(place, *deterministic, f"compute.workers={workers}"), f"workers{workers}", str(place / "runs")
        )
        results[workers] = losses(outcome.mlflow_run), weights(outcome.home)
    assert results[1][0] == pytest.approx(results[2][0], rel=1e-5)
    for name, tensor in results[1][1].items():
        torch.testing.assert_close(results[2][1][name], tensor, rtol=1e-3, atol=1e-5)
    # Gradient accumulation over passes of four images.
    run = recipe(place, *deterministic, "compute.workers=1", "compute.local_batch=4")
    outcome = train(run, "accumulated", str(place / "runs"))
    assert losses(outcome.mlflow_run) == pytest.approx(results[1][0], rel=1e-5)


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(place, undisturbed):
    killed = []

    def kill(run_dir):
        while not killed:
            if checkpoints.complete_steps(str(run_dir)):
                workers = [each for each in psutil.process_iter(["cmdline"]) if is_worker(each)]
                for each in workers[:1]:
                    each.kill()
                    killed.append(each.pid)
            time.sleep(0.01)

    threading.Thread(target=kill, args=(place / "runs" / "killed",), daemon=True).start()
    outcome = train(recipe(place), "killed", str(place / "runs"))
    assert killed
    note = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(outcome.mlflow_run).data.tags["vitray.note"]
    assert re.search(r"^worker [01] \(node \S+\) died: its process was killed .*; the workers start again", note, re.M)
    assert same(weights(outcome.home), undisturbed[1])
    assert losses(outcome.mlflow_run) == undisturbed[2]


@pytest.mark.slow
def test_a_killed_mailbox_changes_nothing(place, undisturbed):
    killed = []

    def kill(run_dir):
        while not checkpoints.complete_steps(str(run_dir)):
            time.sleep(0.01)
        for each in psutil.Process().children(recursive=True):
            if "Mailbox" in each.name() + "".join(each.cmdline()):
                each.kill()
                killed.append(each.pid)

    threading.Thread(target=kill, args=(place / "runs" / "unheard",), daemon=True).start()
    outcome = train(recipe(place), "unheard", str(place / "runs"))
    assert killed
    note = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(outcome.mlflow_run).data.tags["vitray.note"]
    assert f"{worker_mailbox.LOST}; the workers start again" in note.splitlines()
    assert same(weights(outcome.home), undisturbed[1])
    assert losses(outcome.mlflow_run) == undisturbed[2]
    assert scores(outcome.mlflow_run, "val/loss") == scores(undisturbed[0].mlflow_run, "val/loss")


def scores(run_id, key):
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    return {point.step: point.value for point in client.get_metric_history(run_id, key)}


@pytest.mark.slow
def test_a_worker_that_the_others_wait_for_is_named(place, monkeypatch):
    monkeypatch.setattr(host, "COLLECTIVE_SECONDS", 15)
    stopped = []

    def stop_one(run_dir):
        while not checkpoints.complete_steps(str(run_dir)):
            time.sleep(0.01)
        each = next(each for each in psutil.process_iter(["cmdline"]) if is_worker(each))
        each.suspend()
        stopped.append(each)

    threading.Thread(target=stop_one, args=(place / "runs" / "hung",), daemon=True).start()
    run = recipe(place, "optim.duration=10000 steps", "checkpoint={every: 1 step, keep: 1}", "compute.max_failures=0")
    with pytest.raises(RunError) as error:
        train(run, "hung", str(place / "runs"))
    with suppress(psutil.NoSuchProcess):
        stopped[0].kill()
    message = str(error.value)
    assert re.search(r"failed once: worker [01] \(node \S+\) has been .* of step \d+", message), message
    assert "; the others waited at the " in message
    runs = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).search_runs(["1"], "attributes.run_name = 'hung'")
    assert runs[0].info.status == "FAILED"
    assert "the others waited at the" in runs[0].data.tags["vitray.reason"]


@pytest.mark.slow
def test_separate_evaluations_agree_and_survive_an_interruption(place, undisturbed):
    run_dir = interrupted(place, undisturbed, "apart", 6)
    saved = Path(checkpoints.folder_of(str(run_dir), 6)) / "checkpoint.json"
    content = json.loads(saved.read_text())
    content["state"]["train_state"]["pending"] = [6]  # an evaluation was running when the power failed
    saved.write_text(json.dumps(content))
    outcome = train(recipe(place, "evaluate.where=cpu", "compute.cpus=0.5"), "apart", str(place / "runs"))
    assert same(weights(outcome.home), undisturbed[1])
    for key in ("val/top1", "val/top5", "val/top1_ema", "val/loss"):
        separate, expected = scores(outcome.mlflow_run, key), scores(undisturbed[0].mlflow_run, key)
        assert separate.keys() == {6, 10, 20}
        assert {step: separate[step] for step in expected} == pytest.approx(expected, rel=1e-5)
    assert outcome.val_top1 == undisturbed[0].val_top1


def is_worker(process):
    """Whether a process is a Ray Train worker of this test run."""
    command = " ".join(process.info["cmdline"] or ())
    return "RayTrainWorker" in command and psutil.Process().pid in {each.pid for each in process.parents()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "status"),
    [("interrupted", signal.SIGINT, 130), ("shot", signal.SIGKILL, -9)],  # SIGTERM: test_jobs, test_sweep
)
def test_a_run_whose_driver_was_stopped_resumes(place, undisturbed, ray_cluster, name, number, status):
    run = recipe(place, "evaluate.every=2 steps")  # slow enough to be stopped
    (place / f"{name}.yaml").write_text(run.to_yaml())
    command = [sys.executable, "-m", "pipelines.train", str(place / f"{name}.yaml"), "--name", name]
    run_dir = place / "runs" / name
    driver = subprocess.Popen(
        [*command, "--out", str(place / "runs")], env=os.environ | {"RAY_ADDRESS": ray_cluster}, stderr=subprocess.PIPE
    )
    while not checkpoints.complete_steps(str(run_dir)):
        assert driver.poll() is None, driver.communicate()[1].decode()
        time.sleep(0.01)
    driver.send_signal(number)
    log = driver.communicate()[1].decode()
    assert driver.returncode == status, log
    while any(is_worker(each) for each in psutil.process_iter(["cmdline"])):
        time.sleep(0.1)
    steps = checkpoints.complete_steps(str(run_dir))
    assert steps[-1] < 20
    resume = f"`vitray train --resume {name} --out {place / 'runs'}` continues"
    assert number == signal.SIGKILL or (f"step {steps[-1]} is saved" in log and resume in log)
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    runs = client.search_runs(["1"], f"attributes.run_name = '{name}'")
    assert [each.info.status for each in runs] == ["RUNNING" if number == signal.SIGKILL else "KILLED"]
    outcome = train(run, name, str(place / "runs"))
    assert same(weights(outcome.home), undisturbed[1])
    assert losses(outcome.mlflow_run) == undisturbed[2]
    if runs:
        assert outcome.mlflow_run == runs[0].info.run_id


@pytest.mark.slow
def test_a_stop_request_is_heard_between_two_records(place, monkeypatch):
    monkeypatch.setattr("vitray.runs.shutdown.SAVE_SECONDS", 240.0)  # a busy machine takes long to the first step
    rare = [f"{name}.every=100000 steps" for name in ("tracking", "evaluate")]
    run = recipe(place, "optim.duration=100000 steps", "checkpoint={every: 100000 steps}", *rare)

    def interrupt():
        while not any(is_worker(each) for each in psutil.process_iter(["cmdline"])):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        train(run, "rare", str(place / "runs"))
    (step,) = checkpoints.complete_steps(str(place / "runs" / "rare"))
    assert 0 < step < 100000


@pytest.mark.slow
def test_a_local_run_survives_the_loss_of_a_worker(place, undisturbed):
    run, run_dir = recipe(place, "evaluate.every=2 steps"), place / "runs" / "alone"
    (place / "alone.yaml").write_text(run.to_yaml())
    command = [sys.executable, "-m", "pipelines.train", str(place / "alone.yaml"), "--out", str(place / "runs")]
    with (place / "alone.txt").open("w") as log:
        driver = subprocess.Popen([*command, "--name", "alone"], stderr=log)
    while 6 not in checkpoints.complete_steps(str(run_dir)):
        assert driver.poll() is None, (place / "alone.txt").read_text()
        time.sleep(0.01)
    started = {each.name(): each for each in psutil.Process(driver.pid).children(recursive=True)}
    next(each for name, each in started.items() if "RayTrainWorker" in name).kill()
    assert driver.wait() == 0, (place / "alone.txt").read_text()
    log = (place / "alone.txt").read_text()
    assert "resumed at step" in log
    assert re.search(r"worker [01] \(node \S+\) died: its process was killed", log)
    # The survivor's error, and lines of Ray without a meaning for the user.
    assert [text for text in ("Traceback", "gloo", "Graceful shutdown", "exclude_resources") if text in log] == []
    outcome = train(run, "alone", str(place / "runs"))  # finished already
    assert same(weights(outcome.home), undisturbed[1])
    assert losses(outcome.mlflow_run) == undisturbed[2]


@pytest.mark.slow
def test_the_loss_of_the_local_ray_is_one_message_and_the_run_has_failed(place):
    (place / "lost.yaml").write_text(recipe(place, "optim.duration=10000 steps").to_yaml())
    command = [sys.executable, "-m", "pipelines.train", str(place / "lost.yaml"), "--out", str(place / "runs")]
    with (place / "lost.txt").open("w") as log:
        driver = subprocess.Popen([*command, "--name", "lost"], stderr=log)
    while not checkpoints.complete_steps(str(place / "runs" / "lost")):
        assert driver.poll() is None, (place / "lost.txt").read_text()
        time.sleep(0.01)
    next(each for each in psutil.Process(driver.pid).children(recursive=True) if each.name() == "raylet").kill()
    assert driver.wait(120) == 1, (place / "lost.txt").read_text()
    log = (place / "lost.txt").read_text()
    assert log.splitlines()[-1].startswith("vitray: Ray's raylet on this machine was killed")
    assert "Traceback" not in log
    runs = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).search_runs(["1"], "attributes.run_name = 'lost'")
    assert [run.info.status for run in runs] == ["FAILED"]


def test_the_mailbox_imports_nothing_heavy(ray_cluster):
    mailbox, mistake = RayMailbox().actor, Mistake(1, 2, 3, 0.5)
    mailbox.put.remote(evaluation_message(Score(3, 0.5, confusion=np.eye(2), mistakes=[mistake])))
    (evaluation,) = ray.get(mailbox.take.remote())
    assert np.array_equal(evaluation.confusion, np.eye(2))
    assert [Mistake(*values) for values in evaluation.mistakes] == [mistake]
    loaded = ray.get(mailbox.__ray_call__.remote(lambda _: set(sys.modules)))
    assert "numpy" in loaded
    assert not {"torch", "vitray.metrics.scores"} & loaded


def test_a_run_too_large_for_the_cluster_is_refused_at_once(place):
    with pytest.raises(
        ConfigError, match="2 workers of 1 CPUs with one CPU to decode images and one for evaluations do not"
    ):
        train(recipe(place, "evaluate.where=cpu", "compute.cpus=1"), "large", str(place / "runs"))


def test_the_same_name_for_another_experiment_is_refused(place, undisturbed):
    with pytest.raises(ConfigError) as error:
        train(recipe(place, "optim.lr=0.5"), "whole", str(place / "runs"))
    assert "optim.lr: 0.001 -> 0.5" in str(error.value)
    assert "--fork whole" in str(error.value)


def test_a_run_that_another_process_trains_is_refused_before_ray_starts(place, monkeypatch):
    monkeypatch.setattr(session, "ray_session", lambda: pytest.fail("Ray starts"))
    with own_folder(str(place / "runs" / "busy"), "busy"):
        with pytest.raises(ConfigError, match=f"busy is in use by process {os.getpid()} on .*another --name"):
            train(recipe(place), "busy", str(place / "runs"))
    assert list((place / "runs" / "busy").iterdir()) == []


@pytest.mark.slow
def test_compilation_bf16_and_recomputation_give_the_same_losses(place):
    deterministic = ["model.drop_path=0", "model.dropout=0", "optim.duration=6 steps", "compute.workers=1"]
    plain = train(recipe(place, *deterministic), "plain", str(place / "runs"))
    for recompute in ("feedforward", "blocks"):
        options = ["compute.compile=true", "compute.precision=bf16", f"compute.activation_checkpointing={recompute}"]
        outcome = train(recipe(place, *deterministic, *options), f"compiled-{recompute}", str(place / "runs"))
        assert losses(outcome.mlflow_run) == pytest.approx(losses(plain.mlflow_run), rel=0.02)
        names = {name for name in weights(outcome.home) if name.startswith("model.")}
        assert names == {name for name in weights(plain.home) if name.startswith("model.")}  # no wrapper's prefix


@pytest.mark.slow
def test_a_run_on_s3_equals_a_run_on_a_local_path(place, undisturbed, s3_server):
    outcome = train(recipe(place), "remote", "s3://bucket/runs")
    assert same(weights(outcome.home), undisturbed[1])
    assert load_model("s3://bucket/runs/remote/model").vit.model.name == "vit_u2x2_8"
    assert {name.partition("/")[0] for name in storage.list_files(outcome.home)} == {
        "checkpoints",
        "model",
        "outcome.json",
        "run.json",
        "run.yaml",
    }


@pytest.mark.slow
def test_a_fork_starts_from_the_last_weights(place, undisturbed):
    run = recipe(
        place,
        "optim.lr=1e-30",
        "optim.rule=sgd",
        "optim.weight_decay=0",
        "optim.duration=1 step",
        "optim.warmup=0 steps",
    )
    outcome = train(run, "forked", str(place / "runs"), fork="whole")
    forked = weights(outcome.home)
    assert all(
        torch.equal(forked[f"model.{name.removeprefix('average.')}"], tensor)
        for name, tensor in undisturbed[1].items()
        if name.startswith("average.")
    )
    tags = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(outcome.mlflow_run).data.tags
    assert tags["vitray.forked_from"] == "whole"


@pytest.mark.slow
def test_a_rewound_run_skips_the_broken_step(place):
    # Any loss above the median of the earlier ones counts as a spike; the rate is too low for the losses to fall.
    settings = ["optim.duration=100 steps", "optim.lr=1e-6", "optim.ema=null", "checkpoint={every: 5 steps, keep: 1}"]
    guard = "guard={on_nan: rewind, spike: 1.0001, max_rewinds: 2}"
    with pytest.raises(RunError, match=r"rewound: loss .* at step"):
        train(recipe(place, *settings, guard, "evaluate.every=100 steps"), "rewound", str(place / "runs"))
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    (logged,) = client.search_runs(["1"], "attributes.run_name = 'rewound'")
    note = re.search(
        r"at step (\d+), .*; training continues from step (\d+) and skips step (\d+)", logged.data.tags["vitray.note"]
    )
    assert note, logged.data.tags["vitray.note"]
    broken, resumed, left_out = map(int, note.groups())
    assert broken == left_out >= 50
    assert resumed % 5 == 0
    assert resumed < broken
