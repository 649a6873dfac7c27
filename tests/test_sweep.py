"""Sweeps end to end on Ray Tune and MLflow: failed and stopped trials, an interrupted and a killed driver."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlflow
import psutil
import pytest
import ray
from ray import tune
from ray.util.placement_group import placement_group_table
from ray.util.state import list_tasks

import vitray
from vitray.cluster import session
from vitray.config import Model, Run, load_run
from vitray.data.shards import open_dataset, read_request, write_dataset
from vitray.data.stream.cache import forget_decoded
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.runs.train import train
from vitray.sweeps.plan import Recipe, dry_run
from vitray.sweeps.space import read_space
from vitray.sweeps.sweep import retry_failed, sweep
from vitray.sweeps.trial import INTERRUPTED, TrialTrainable
from vitray.sweeps.trial_store import TrialRecord, TrialStore, read_entries, read_record, write_record
from vitray.system import storage
from vitray.system.lease import own_folder
from vitray.weights import save_model

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent

RECIPE = """
model: {name: vit_u2x1_8, image_size: 32, num_classes: 10}
optim: {batch: 16, duration: 6 steps, warmup: 0 steps, rule: sgd, clip: null}
evaluate: {every: 2 steps}
checkpoint: {every: 2 steps}
tracking: {every: 1 step}
compute: {workers: 1}
"""
SPACE = """
space:
  optim.lr: {grid: [1.0e-2, 1.0e+30]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, ray_cluster):
    """A folder with a dataset, a recipe, a tracking store and a spool."""
    folder = tmp_path_factory.mktemp("sweep")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=32"]))
    (folder / "tiny.yaml").write_text(f"{RECIPE}data: {{url: {folder / 'demo'}}}\n")
    (folder / "lr.yaml").write_text(SPACE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def begin(folder, name, space="lr.yaml", **settings):
    base = load_run(folder / "tiny.yaml", [f"{key}={value}" for key, value in settings.items()])
    command = f"vitray sweep tiny {space} --name {name}"
    out = str(folder / "sweeps")
    return sweep(Recipe(base, ["tiny", "seed=0"]), read_space(folder / space), name, out, command)


def is_idle(seconds=30):
    """Whether all CPUs become free and no placement group is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        if ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"] and not groups:
            return True
        time.sleep(0.5)
    return False


@pytest.fixture(scope="module")
def finished_sweep(folder):
    return begin(folder, "rates")


def test_a_failed_trial_does_not_fail_the_sweep(folder, finished_sweep):
    assert (finished_sweep.trials, finished_sweep.finished, finished_sweep.failed) == (2, 1, 1)
    assert finished_sweep.best == "lr=0.01"
    record = json.loads((Path(finished_sweep.home) / "lr=1e30" / "trial.json").read_text())
    assert record["state"] == "failed"
    for part in ("loss nan at step", "learning rate ", "images ", "last good checkpoint: "):
        assert part in record["reason"]
    assert is_idle()


def test_a_sweep_opens_as_a_table_with_the_best_trial_first(folder, finished_sweep):
    sweep = vitray.open_sweep("rates", folder / "sweeps")
    assert sweep.trials["trial"].tolist() == ["lr=0.01", "lr=1e30"]
    assert sweep.trials["state"].tolist() == ["finished", "failed"]
    assert sweep.trials["optim.lr"].tolist() == [0.01, 1e30]
    assert sweep.best == finished_sweep.best
    assert sweep.trials["val/top1"][0] == finished_sweep.best_goal
    assert sweep.trial(sweep.best).curves["val/top1"].iloc[-1] == finished_sweep.best_goal
    assert vitray.load(sweep.model).classes
    assert Path(sweep.report).is_file()
    assert "<iframe sandbox" in sweep._repr_html_()
    with pytest.raises(ConfigError, match=r"no trial 'lr=0[.]1'; did you mean lr=0[.]01"):
        sweep.trial("lr=0.1")


def test_a_trial_is_bit_equal_to_the_run_of_its_settings(folder, finished_sweep):
    cpus = int(ray.cluster_resources()["CPU"])
    run = load_run(folder / "tiny.yaml", ["optim.lr=0.01", f"compute.cpus={cpus}"])
    outcome = train(run, "alone", str(folder / "runs"), here=True)
    trial = Path(finished_sweep.home) / "lr=0.01"
    for name in ("model.safetensors", "classes.json"):
        assert (Path(outcome.model) / name).read_bytes() == (trial / "model" / name).read_bytes()
    of_trial = json.loads((trial / "outcome.json").read_text())
    assert (of_trial["val_loss"], of_trial["steps"]) == (outcome.val_loss, 6)


def test_mlflow_shows_the_trials_below_the_sweep(folder, finished_sweep):
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    parent = client.get_run(finished_sweep.mlflow_run)
    assert parent.info.status == "FINISHED"
    children = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{finished_sweep.mlflow_run}'")
    assert {child.info.run_name: child.info.status for child in children} == {
        "lr=0.01": "FINISHED",
        "lr=1e30": "FAILED",
    }
    assert parent.data.metrics["best/val_top1"] == finished_sweep.best_goal
    # The table of the description lists only the settings that vary.
    assert "| trial | val/top1 | state | optim.lr |" in parent.data.tags["mlflow.note.content"]
    assert "| lr=1e30 |  | failed | 1e+30 |" in parent.data.tags["mlflow.note.content"]
    page = Path(client.download_artifacts(finished_sweep.mlflow_run, "report/index.html")).read_text()
    assert "lr=0.01" in page
    assert "loss nan at step" in page
    assert "vitray train tiny seed=0 optim.lr=0.01" in page
    names = {Path(item.path).name for item in client.list_artifacts(finished_sweep.mlflow_run, "report")}
    assert {"index.html", "results.csv", "curve_goal.png"} <= names
    assert not any("dark" in name for name in names)


def test_repeating_the_command_of_a_finished_sweep_trains_nothing(folder, finished_sweep):
    written = {
        path: path.stat().st_mtime_ns for path in Path(finished_sweep.home).glob("*/checkpoints/*/checkpoint.json")
    }
    repeated = begin(folder, "rates")
    assert repeated == finished_sweep
    assert written == {
        path: path.stat().st_mtime_ns for path in Path(finished_sweep.home).glob("*/checkpoints/*/checkpoint.json")
    }


def test_failed_trials_wait_again_on_demand(tmp_path, capsys):
    home = tmp_path / "kept"
    for path, names in {home: ("a", "b", "c"), home / "before" / "base": ("base=once",)}.items():
        entries = {
            name: {"point": {"settings": {}, "drawn": {}, "shown": {}, "before": {}}, "asked": None} for name in names
        }
        storage.write_bytes(str(path / "points.json"), json.dumps(entries).encode())
        storage.write_bytes(str(path / "sweep.json"), b"{}")
    failed = TrialRecord("failed", ((2, 0.5),), "out of memory", began=1.0, ended=2.0, steps=6)
    records = {"a": failed, "b": failed._replace(state="finished"), "before/base/base=once": failed}
    for name, record in records.items():
        write_record(str(home / name), record)
    space = "space: {seed: {seeds: 3}, task.weights: '{base}'}\nbefore: {base: {recipe: demo}}\n"
    (tmp_path / "space.yaml").write_text(space)
    retry_failed(read_space(tmp_path / "space.yaml"), "kept", str(tmp_path))
    waiting = failed._replace(state="waiting", reason=None, ended=None)
    assert {name: read_record(str(home / name)) for name in ("a", "b", "c")} == {
        "a": waiting,
        "b": records["b"],
        "c": TrialRecord(),
    }
    assert read_record(str(home / "before/base/base=once")) == waiting
    assert capsys.readouterr().err.splitlines() == [
        "  kept/before/base: base=once to be tried again",
        "  kept: a to be tried again",
    ]


def test_only_an_earlier_sweep_of_independent_trials_is_tried_again(tmp_path):
    (tmp_path / "one.yaml").write_text("space: {seed: {seeds: 1}}\n")
    with pytest.raises(ConfigError, match=r"--retry-failed: no sweep new in .*; expected --name of an earlier one"):
        retry_failed(read_space(tmp_path / "one.yaml"), "new", str(tmp_path))
    write_populations(tmp_path)
    with pytest.raises(ConfigError, match="--retry-failed: got a population"):
        retry_failed(read_space(tmp_path / "two.yaml"), "new", str(tmp_path))
    assert not (tmp_path / "new").exists()


def test_another_sweep_under_the_same_name_is_refused(folder, finished_sweep):
    with pytest.raises(ConfigError, match="rates: a sweep of this name differs in seed: 0 -> 7"):
        begin(folder, "rates", seed=7)


def test_a_sweep_that_another_process_runs_is_refused_before_ray_starts(folder, monkeypatch):
    monkeypatch.setattr(session, "ray_session", lambda: pytest.fail("Ray starts"))
    with own_folder(str(folder / "sweeps" / "busy"), "busy"):
        with pytest.raises(ConfigError, match=f"busy is in use by process {os.getpid()} on .*another --name"):
            begin(folder, "busy")


def test_invalid_sweeps_are_refused_before_they_start(folder):
    with pytest.raises(ConfigError, match="not one trial fits"):
        begin(folder, "large", **{"compute.workers": 9, "compute.cpus": 1})
    (folder / "top3.yaml").write_text("space:\n  seed: {seeds: 2}\ngoal: {metric: val/top3}\n")
    with pytest.raises(ConfigError, match=r"goal.metric: got 'val/top3', expected one of .*did you mean val/top"):
        begin(folder, "goal", space="top3.yaml")
    (folder / "asha.yaml").write_text("space:\n  seed: {seeds: 2}\nscheduler: asha\n")
    with pytest.raises(ConfigError, match=r"evaluate.where: got cpu, expected workers: scheduler asha"):
        begin(folder, "apart", space="asha.yaml", **{"evaluate.where": "cpu"})
    (folder / "wrong.yaml").write_text("space:\n  optim.lrr: {grid: [1]}\n")
    with pytest.raises(ConfigError, match=r"optim.lrr.*did you mean optim.lr"):
        begin(folder, "wrong", space="wrong.yaml")


def test_a_dry_run_prints_the_plan(folder, capsys):
    plan = dry_run(load_run(folder / "tiny.yaml"), read_space(folder / "lr.yaml"), {})
    assert plan["trials"] == 2
    assert plan["concurrent"] * plan["waves"] >= 2
    assert plan["points"][0] == {"optim.lr": 0.01}
    assert "2 trials" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trials_share_decoded_images_with_separate_evaluations(folder, ray_cluster):
    def decoding():
        conditions = [("name", "=", "_decode_block")]
        return {task.task_id for task in list_tasks(address=ray_cluster, filters=conditions, limit=9999)}

    (folder / "seeds.yaml").write_text("space: {seed: {seeds: 2}}\n")
    before = decoding()  # by other tests in the same Ray
    outcome = begin(folder, "decoded", space="seeds.yaml", **{"data.cache": "decoded", "evaluate.where": "cpu"})
    assert outcome.finished == 2
    assert len(decoding() - before) == 2  # one block of train and one of val
    dataset = open_dataset(str(folder / "demo"))
    for split in dataset.splits:
        forget_decoded(dataset, split)
    assert is_idle()


def test_fine_tunings_take_the_network_from_their_weights(folder):
    model = Model(name="vit_u2x1_8", image_size=32, num_classes=10, class_token=False, pool="mean")
    classes = open_dataset(str(folder / "demo")).classes
    save_model(str(folder / "start"), Run().replace({"model": model.model_dump(mode="json")}), ViT(model), classes)
    overrides = [
        "task.kind=finetune",
        f"task.weights={folder / 'start'}",
        f"data.url={folder / 'demo'}",
        "optim.batch=16",
    ]
    (folder / "modes.yaml").write_text("space: {task.mode: {grid: [full, attn]}}\n")
    overrides += ["optim.duration=6 steps", "optim.warmup=0 steps"]
    assert dry_run(load_run(None, overrides), read_space(folder / "modes.yaml"), {})["trials"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_learns_from_its_trials(folder):
    (folder / "tpe.yaml").write_text(
        "space:\n  depth: {grid: [1, 2]}\n  branches: {grid: [1, 2]}\n  model.name: vit_u{depth}x{branches}_8\n"
        "  optim.lr: {loguniform: [1.0e-3, 0.1]}\nwhere: [depth * branches == 2]\n"
        "search: {kind: nsga2, trials: 5, population: 2, second_goal: latency_ms}\n"
    )
    outcome = begin(folder, "learned", space="tpe.yaml")
    assert (outcome.trials, outcome.finished) == (5, 5)
    entries = read_entries(outcome.home)
    assert [len(entry.asked["params"]) for entry in entries.values()] == [2] * 5
    assert {entry.asked["notes"].get("NSGAIISampler:generation") for entry in entries.values()} >= {0, 1}
    row = next(csv.DictReader((Path(outcome.home) / "report" / "results.csv").read_text().splitlines()))
    assert float(row["latency_ms"]) > 0
    assert float(row["peak_memory_bytes"]) > 1e8
    assert begin(folder, "learned", space="tpe.yaml") == outcome


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stages_run_once_before_the_trials(folder):
    (folder / "before.yaml").write_text(
        "space:\n  route: {cases: {plain: {}, masked: {task: {kind: finetune, weights: '{pretrained}'}}}}\n"
        "  seed: {seeds: 2}\n"
        f"before:\n  pretrained: {{recipe: {folder / 'tiny.yaml'}, settings: {{task: {{kind: masked,"
        " objective: mean_color}, model.num_classes: null}}\n"
    )
    space, base = read_space(folder / "before.yaml"), load_run(folder / "tiny.yaml")
    before = {"pretrained": Recipe(load_run(folder / "tiny.yaml", ["seed=5"]), ["tiny", "seed=5"])}
    plan = dry_run(base, space, before)
    assert plan["before"] == {"pretrained": ["once"]}
    assert plan["points"][-1] == {"task": {"kind": "finetune", "weights": "{pretrained}"}, "seed": 1}
    arguments = Recipe(base, ["tiny"]), space, "stages", str(folder / "sweeps"), "vitray sweep tiny before", before
    outcome = sweep(*arguments)
    assert (outcome.trials, outcome.finished) == (4, 4)
    home = Path(outcome.home)
    weights = home / "before" / "pretrained" / "pretrained=once" / "model"
    assert load_run(weights / "run.yaml").seed == 5
    rows = list(csv.DictReader((home / "report" / "results.csv").read_text().splitlines()))
    assert [str(weights) in row["command"] for row in rows] == ["masked" in row["name"] for row in rows]
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    (pretrained,) = client.search_runs(["1"], "attributes.run_name = 'stages/before/pretrained'")
    assert pretrained.info.status == "FINISHED"
    (child,) = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{pretrained.info.run_id}'")
    assert float(child.data.tags["best/val_loss"]) == pretrained.data.metrics["best/val_loss"]
    assert sweep(*arguments) == outcome


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 2])  # one trains in the process of its trial
def test_a_stopped_trial_releases_its_resources(folder, workers):
    (folder / "asha.yaml").write_text(
        "space: {optim.lr: {grid: [1.0e-12, 0.01, 0.02, 0.03]}}\n"  # the higher rates are worse after so few steps
        "scheduler: {kind: asha, grace: 2 steps, reduction: 2}\n"
        "goal: {metric: val/loss, mode: min}\n"
    )
    outcome = begin(folder, f"stopped-{workers}", space="asha.yaml", **{"compute.workers": workers})
    assert outcome.stopped_early > 0
    assert outcome.finished + outcome.stopped_early == 4
    assert is_idle()
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    children = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{outcome.mlflow_run}'")
    states = [child.info.status for child in children]
    assert states.count("KILLED") == outcome.stopped_early
    assert states.count("FINISHED") == outcome.finished
    rows = list(csv.DictReader((Path(outcome.home) / "report" / "results.csv").read_text().splitlines()))
    assert sorted(row["state"] for row in rows) == ["finished"] * outcome.finished + ["stopped early"] * (
        outcome.stopped_early
    )


def launch(folder, ray_cluster, name):
    """Start `vitray sweep` as a process and wait for its first checkpoint; return it, its command and environment."""
    command = [sys.executable, "-m", "pipelines.sweep", str(folder / "tiny.yaml"), str(folder / "lr.yaml")]
    command += ["--name", name, "--out", str(folder / "sweeps"), "--json"]
    environment = os.environ | {"RAY_ADDRESS": ray_cluster}
    driver = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not any((folder / "sweeps" / name).glob("*/checkpoints/*/checkpoint.json")):
        assert driver.poll() is None
        time.sleep(0.05)
    return driver, command, environment


def same_table(command, environment, finished_sweep):
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    outcome = json.loads(done.stdout.splitlines()[-1])
    keys = ("trials", "finished", "failed", "best", "best_goal")
    return [outcome[key] for key in keys] == [getattr(finished_sweep, key) for key in keys]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupted_sweep_resumes(folder, finished_sweep, ray_cluster):
    driver, command, environment = launch(folder, ray_cluster, "stopped-driver")
    driver.send_signal(signal.SIGTERM)
    _, stderr = driver.communicate(timeout=120)
    assert driver.returncode == 128 + signal.SIGTERM
    assert "the same command resumes it: vitray sweep" in stderr
    # Ray's processes may print tracebacks, with a prefix.
    assert not any(line.startswith("Traceback") for line in stderr.splitlines())
    assert is_idle()
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    (parent,) = client.search_runs(["1"], "attributes.run_name = 'stopped-driver'")
    children = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert parent.info.status == "KILLED"
    assert "RUNNING" not in {child.info.status for child in children}
    assert same_table(command, environment, finished_sweep)
    assert client.get_run(parent.info.run_id).info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_sweep_resumes_to_the_same_table(folder, finished_sweep, ray_cluster):
    driver, command, environment = launch(folder, ray_cluster, "killed")
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    assert same_table(command, environment, finished_sweep)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trial_whose_process_is_killed_runs_again(folder, finished_sweep, ray_cluster):
    driver, _, _ = launch(folder, ray_cluster, "lost-trial")
    trials = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and "Trainable" in " ".join(process.cmdline())
    ]
    assert trials
    for process in trials:
        process.kill()
    driver.communicate(timeout=600)
    assert driver.returncode == 0
    records = {
        path.parent.name: json.loads(path.read_text())
        for path in (folder / "sweeps" / "lost-trial").glob("*/trial.json")
    }
    assert {name: record["state"] for name, record in records.items()} == {"lr=0.01": "finished", "lr=1e30": "failed"}
    assert max(score for _, score in records["lr=0.01"]["scores"]) == finished_sweep.best_goal
    assert is_idle()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trial_whose_process_dies_at_every_start_fails(folder, monkeypatch):
    """Each process dies before its run starts: the trial is retried, then marked as failed with the reason."""
    (folder / "one.yaml").write_text("space: {seed: {seeds: 1}}\n")

    class Dying(tune.Trainable):  # local, so that Ray sends it by value
        def setup(self, config, context=None):
            os._exit(1)

    monkeypatch.setattr("vitray.sweeps.tuning.TrialTrainable", Dying)
    outcome = begin(folder, "never", space="one.yaml", **{"compute.max_failures": 1})
    assert (outcome.trials, outcome.finished, outcome.failed) == (1, 0, 1)
    (record,) = [json.loads(path.read_text()) for path in Path(outcome.home).glob("*/trial.json")]
    assert record["state"] == "failed"
    assert "its process failed, at last with" in record["reason"]

    monkeypatch.setattr("vitray.sweeps.tuning.TrialTrainable", TrialTrainable)
    assert begin(folder, "never", space="one.yaml", **{"compute.max_failures": 1}).failed == 1
    retry_failed(read_space(folder / "one.yaml"), "never", str(folder / "sweeps"))
    retried = begin(folder, "never", space="one.yaml", **{"compute.max_failures": 1})
    assert (retried.trials, retried.finished, retried.failed) == (1, 1, 0)


def stand_in(is_reusable=True):
    """A trainable that keeps its trial's record as a training run does, and trains nothing.

    Without `is_reusable` its process takes no second trial. A local class, so that Ray sends it by value.
    """

    class StandIn(tune.Trainable):
        def setup(self, config, context=None):
            self.context = context
            self.reset_config(config)

        def reset_config(self, new_config):
            if hasattr(self, "run_dir") and not is_reusable:
                storage.write_bytes(f"{self.context.sweep_dir}/refused", b"")
                raise RuntimeError("the previous trial did not stop in time")
            self.run_dir = f"{self.context.sweep_dir}/{new_config['name']}"
            self.score = -abs(new_config["optim.lr"] - 0.01)
            self.record = TrialRecord("running", began=time.time(), steps=3)
            return True

        def step(self):
            time.sleep(0.2)  # so that the driver's other threads have work while the loop runs
            step = len(self.record.scores) + 1
            result = {"step": step, "steps": 3, "share": step, "goal": self.score, "done": step == 3}
            self.record = self.record._replace(scores=(*self.record.scores, (step, self.score)))
            if step == 3:
                outcome = {"device_seconds": 1.0, "curves": {}, "state": "finished"}
                storage.write_bytes(f"{self.run_dir}/outcome.json", json.dumps(outcome).encode())
                self.record = self.record._replace(state="finished")
                result |= {"state": "finished", "device_seconds": 1.0}
            write_record(self.run_dir, self.record)
            return result

    return StandIn


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trial_that_a_process_does_not_take_fails_and_the_others_run(folder, monkeypatch):
    """Tune does not start such a trial in another process, but its place is free for the next one."""
    monkeypatch.setattr("vitray.sweeps.tuning.TrialTrainable", stand_in(is_reusable=False))
    (folder / "six.yaml").write_text("space: {optim.lr: {grid: [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]}}\n")
    outcome = begin(folder, "fresh", space="six.yaml", **{"compute.max_failures": 1})
    assert (outcome.trials, outcome.finished + outcome.failed) == (6, 6)
    assert outcome.finished >= 3
    assert (Path(outcome.home) / "refused").exists()
    assert is_idle()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tunes_loop_never_waits_for_storage(folder, monkeypatch):
    """Each result of a trial waits for the loop: requests, drawing and uploads belong to other threads."""
    requests, is_looping = [], []

    def filesystem(url, called=storage.filesystem):
        if is_looping:
            requests.append((threading.current_thread() is threading.main_thread(), url))
        return called(url)

    def start(store, name, called=TrialStore.start):
        is_looping.append(True)
        called(store, name)

    def close(store, called=TrialStore.close):
        is_looping.clear()
        called(store)

    monkeypatch.setattr("vitray.sweeps.tuning.TrialTrainable", stand_in())
    monkeypatch.setattr("vitray.sweeps.sweep_logger.REPORT_INTERVAL", 1.0)
    monkeypatch.setattr(storage, "filesystem", filesystem)
    monkeypatch.setattr(TrialStore, "start", start)
    monkeypatch.setattr(TrialStore, "close", close)
    (folder / "drawn.yaml").write_text(
        "space: {optim.lr: {loguniform: [1.0e-3, 0.1]}}\nsearch: {kind: tpe, trials: 12, first: 4}\n"
        "budget: {device_hours: 1}\ngoal: {metric: val/loss, mode: max}\n"
    )
    outcome = begin(folder, "requests", space="drawn.yaml")
    assert (outcome.trials, outcome.finished) == (12, 12)
    # After the loop the marker of an interruption is removed.
    assert [url for is_main, url in requests if is_main] == [f"{outcome.home}/{INTERRUPTED}"]
    others = [url for is_main, url in requests if not is_main]
    assert sum(url.endswith("points.json") for url in others) <= 12
    assert any(url.endswith("outcome.json") for url in others)
    for name in {url for url in others if url.endswith(("trial.json", "outcome.json"))}:
        assert others.count(name) <= 2  # once to look for it, once to read it
    entries = read_entries(outcome.home)
    assert len(entries) == 12
    assert outcome.best == min(entries, key=lambda name: abs(entries[name].point.settings["optim.lr"] - 0.01))


def write_populations(folder):
    (folder / "four.yaml").write_text(
        "space: {optim.lr: {grid: [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3]}}\nscheduler: {kind: population, every: 2 steps}\n"
    )
    (folder / "two.yaml").write_text(
        "space: {optim.lr: {grid: [1.0e-12, 0.01]}}\n"
        "scheduler: {kind: population, every: 2 steps, share: 0.5, resample: 0}\n"
        "goal: {metric: val/loss, mode: min}\n"
    )


def test_checkpoints_of_a_population_belong_to_evaluations(folder):
    write_populations(folder)
    with pytest.raises(
        ConfigError, match=r"checkpoint.every: got 3 steps, expected minutes, or 2 steps as in evaluate.every"
    ):
        begin(folder, "apart", space="two.yaml", **{"checkpoint.every": "3 steps", "compute.cpus": 0.25})
    with pytest.raises(ConfigError, match=r"scheduler: got a population of 4, expected at most 1"):
        begin(folder, "crowd", space="four.yaml", **{"compute.cpus": 1})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_worst_trial_continues_from_the_best_one(folder):
    write_populations(folder)
    settings = {"optim.duration": "60 steps", "compute.cpus": 0.25}
    outcome = begin(folder, "population", space="two.yaml", **settings)
    entries = read_entries(outcome.home)
    continued = {name: entry for name, entry in entries.items() if entry.continues}
    assert continued
    assert (outcome.trials, outcome.failed) == (len(entries), 0)
    records = {name: read_record(str(Path(outcome.home) / name)) for name in entries}
    # Two trials are trained to the end; each of the others has been replaced.
    assert sorted(record.state for record in records.values()) == ["finished"] * 2 + ["stopped early"] * len(continued)
    for name in continued:
        assert re.search(r"^lr=\S+ continuation=\d+$", name)
        first, _ = records[name].scores[0]
        steps_of_source = [step for step, _ in records[continued[name].continues].scores]
        assert first - 2 in steps_of_source  # the score after the one that it continues from
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    children = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{outcome.mlflow_run}'")
    assert {child.info.run_name for child in children} == set(entries)
    assert "RUNNING" not in {child.info.status for child in children}
    assert is_idle()
    assert not (Path(outcome.home) / "population").exists()
    assert begin(folder, "population", space="two.yaml", **settings) == outcome
