"""A sweep without Ray, whose trials several processes share."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import mlflow
import pytest

import vitray
from pipelines.__main__ import main
from vitray.config import load_run
from vitray.data.shards import read_request, write_dataset
from vitray.errors import ConfigError
from vitray.runs.train import train
from vitray.sweeps.plan import Recipe
from vitray.sweeps.space import read_space
from vitray.sweeps.sweep_here import sweep_here
from vitray.system import lease

RECIPE = """
model: {name: vit_u2x1_8, image_size: 32, num_classes: 10}
optim: {batch: 16, duration: 6 steps, warmup: 0 steps, rule: sgd, clip: null}
evaluate: {every: 2 steps}
checkpoint: {every: 2 steps}
tracking: {every: 1 step}
compute: {workers: 1}
"""
GRID = "space: {optim.lr: {grid: [1.0e-2, 1.0e+30]}}\n"
# Owns a folder until its input ends.
OWNER = (
    "import sys; from vitray.system.lease import own_folder\nwith own_folder(sys.argv[1], 'other'): print(); input()"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=32"]))
    (folder / "tiny.yaml").write_text(f"{RECIPE}data: {{url: {folder / 'demo'}}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def swept(folder, space=GRID, name="rates", **settings):
    (folder / "space.yaml").write_text(space)
    recipe = Recipe(load_run(folder / "tiny.yaml", settings), ["tiny"])
    return sweep_here(recipe, read_space(folder / "space.yaml"), name, str(folder / "sweeps"), "vitray sweep --here")


def test_processes_share_the_trials(folder, capsys):
    """One is left to another process; once that has ended, the next process trains it and writes the report."""
    other = [sys.executable, "-c", OWNER, str(folder / "sweeps" / "rates" / "lr=0.01")]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert swept(folder) is None
        assert "other processes train lr=0.01; the last writes the report" in capsys.readouterr().err
        client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
        [parent] = client.search_runs(["1"], "tags.`vitray.kind` = 'sweep'")
        assert parent.info.status == "RUNNING"
        process.kill()
    outcome = swept(folder)
    assert outcome is not None
    assert (outcome.trials, outcome.finished, outcome.failed, outcome.best) == (2, 1, 1, "lr=0.01")
    told = capsys.readouterr().err
    assert "lr=0.01 is finished: val/top1 " in told
    sweep = vitray.open_sweep("rates", folder / "sweeps")
    assert sweep.trials["state"].tolist() == ["finished", "failed"]
    assert Path(sweep.report).is_file()
    assert client.get_run(outcome.mlflow_run).info.status == "FINISHED"
    children = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{outcome.mlflow_run}'")
    assert {child.info.run_name: child.info.status for child in children} == {
        "lr=0.01": "FINISHED",
        "lr=1e30": "FAILED",
    }


def test_an_error_of_a_trial_leaves_the_others(folder, monkeypatch, capsys):
    begun = []

    def fail_once(run, name, *arguments, **options):
        begun.append(name)
        if len(begun) == 1:
            raise ArithmeticError("a mistake in my network")
        return train(run, name, *arguments, **options)

    monkeypatch.setattr("vitray.sweeps.sweep_here.train", fail_once)
    space = "space: {optim.lr: {grid: [1.0e-2, 2.0e-2]}}\n"
    outcome = swept(folder, space, "mistaken")
    assert outcome is not None
    assert (outcome.finished, outcome.failed) == (1, 1)
    record = json.loads((folder / "sweeps" / "mistaken" / begun[0] / "trial.json").read_text())
    assert record["reason"] == "ArithmeticError: a mistake in my network"
    assert "Traceback" in capsys.readouterr().err


def test_a_trial_goes_on_whose_machine_was_lost(folder, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 3.0)
    claims = folder / "sweeps" / "lost" / "lr=0.01" / ".owner"
    claims.mkdir(parents=True)
    process = {"vitray.host": "elsewhere", "vitray.pid": "1", "vitray.pid_started": ""}
    (claims / "a.json").write_text(json.dumps({"process": process, "since": ""}))
    (claims / "a.beat").write_text("1")
    assert swept(folder, name="lost").finished == 1


def test_a_trial_is_the_run_of_its_settings(folder):
    run = load_run(folder / "tiny.yaml", ["optim.lr=0.01"])
    model = Path(train(run, "alone", str(folder / "runs"), here=True).model)
    trial = folder / "sweeps" / "rates" / "lr=0.01"
    assert (model / "model.safetensors").read_bytes() == (trial / "model" / "model.safetensors").read_bytes()
    scores = json.loads((trial / "trial.json").read_text())["scores"]
    assert [step for step, _ in scores] == [2, 4, 6]


def test_the_command_of_a_finished_sweep_trains_nothing(folder, capsys):
    before = (folder / "sweeps" / "rates" / "lr=0.01" / "trial.json").stat().st_mtime_ns
    assert swept(folder).finished == 1
    assert (folder / "sweeps" / "rates" / "lr=0.01" / "trial.json").stat().st_mtime_ns == before
    assert "steps" not in capsys.readouterr().err


def test_trials_wait_for_a_stage_that_another_process_trains(folder, capsys):
    """The other one is killed, so this process trains the stage itself, and then the trials."""
    (folder / "staged.yaml").write_text(
        'space: {route: {cases: {plain: {}, tuned: {task: {kind: finetune, weights: "{start}"}}}}}\n'
        f"before: {{start: {{recipe: {folder / 'tiny.yaml'}, settings: {{optim.lr: 0.02}}}}}}\n"
    )
    sweeps = folder / "sweeps"
    stage = sweeps / "staged" / "before" / "start" / "start=once"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(stage)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        threading.Timer(5, other.kill).start()
        args = [str(folder / "tiny.yaml"), str(folder / "staged.yaml"), "--here", "--name", "staged", "--json"]
        assert main(["sweep", *args, "--out", str(sweeps)]) == 0
    outcome = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (outcome["trials"], outcome["finished"]) == (2, 2)
    tuned = load_run(sweeps / "staged" / "route=tuned" / "run.yaml")
    assert tuned.task.weights == str(stage / "model")
    assert load_run(stage / "run.yaml").optim.lr == 0.02


def test_no_trial_starts_after_the_budget_is_spent(folder):
    outcome = swept(folder, f"{GRID}budget: {{minutes: 1.0e-9}}\n", "spent")
    assert (outcome.trials, outcome.finished) == (2, 0)


def test_what_each_trial_would_refuse_is_refused_before_them(folder, capsys):
    with pytest.raises(ConfigError, match=r"evaluate[.]where: got gpu with --here on CPUs"):
        swept(folder, name="refused", **{"evaluate.where": "gpu"})
    assert not (folder / "sweeps" / "refused" / "points.json").exists()
    arguments = [str(folder / "tiny.yaml"), str(folder / "space.yaml"), "evaluate.where=gpu", "--here", "--dry-run"]
    assert main(["sweep", *arguments]) == 2
    assert "evaluate.where: got gpu with --here" in capsys.readouterr().err


def test_a_trial_of_several_processes_is_refused(folder):
    with pytest.raises(ConfigError, match=r"compute[.]workers: got 2 with --here, expected 1"):
        swept(folder, name="refused", **{"compute.workers": 2})


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            "space: {optim.lr: {loguniform: [1.0e-3, 0.1]}}\nsearch: {kind: tpe, trials: 4}\n",
            "search.kind: got tpe, expected grid or random with --here",
        ),
        (f"{GRID}scheduler: {{kind: asha}}\n", "scheduler.kind: got asha, expected none with --here"),
    ],
    ids=["search", "scheduler"],
)
def test_what_needs_one_process_for_all_trials_is_refused(folder, space, message):
    with pytest.raises(ConfigError) as refused:
        swept(folder, space, "refused")
    assert message in str(refused.value)
    assert not (folder / "sweeps" / "refused" / "points.json").exists()
