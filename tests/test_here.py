"""Training without Ray, in the process that was called or in several: the same run on Ray, bit for bit."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from operator import truediv
from pathlib import Path

import mlflow
import psutil
import pytest
from test_layers import ROOT
from test_loop import interrupted, losses, recipe, same, weights

import pipelines.train
from pipelines.__main__ import run_verb
from vitray.config import load_run
from vitray.data.shards import read_request, write_dataset
from vitray.errors import ConfigError
from vitray.runs.callback import Callback
from vitray.runs.train import train
from vitray.system.child import Child
from vitray.training import checkpoints, loop
from vitray.weights import open_weights

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--no-python", "--nproc-per-node", "2"]
VITRAY = [sys.executable, "-m", "pipelines"]
# On both platforms as many compute threads, which change the last digits.
ONE = ("compute.workers=1", "compute.cpus=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory, ray_cluster):
    """A folder with a small dataset, and a tracking store of its own."""
    folder = tmp_path_factory.mktemp("here")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=32"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        yield folder


def words(place, *overrides):
    """A recipe as a file, and the arguments that train it here."""
    path = place / "recipe.yaml"
    path.write_text(recipe(place, *overrides).to_yaml())
    return ["train", str(path), "--here", "--out", str(place / "runs")]


def without_ray():
    """The environment of a user, without what the tests' Ray has set in this one."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONBREAKPOINT"))}


def call(command, **options):
    """Run a command of the project without Ray, and return its output."""
    done = subprocess.run(command, cwd=ROOT, env=without_ray(), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done


def noting(told):
    """A callback that notes what it is told: steps with their loss, scored steps, checkpoints that exist."""
    return Callback(
        lambda step, values: told.append(("loss", step, values["train/loss"])),
        lambda step, values: told.append(("score", step, values["val/loss"])),
        lambda step, folder: told.append(("saved", step, (Path(folder) / checkpoints.META).is_file())),
    )


@pytest.fixture(scope="module")
def on_ray(place):
    """A run of one worker on Ray."""
    told = []
    outcome = train(recipe(place, *ONE), "on-ray", str(place / "runs"), callback=noting(told))
    return outcome, weights(outcome.home), losses(outcome.mlflow_run), told


@pytest.mark.ray
def test_a_run_without_ray_is_bit_equal(place, on_ray):
    """In a process that could not import Ray, nor what else only clusters and sweeps need."""
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in ("ray", "optuna", "boto3", "botocore"))
    code = f"import sys; {blocked}from pipelines.__main__ import main; sys.exit(main())"
    done = call([sys.executable, "-c", code, *words(place, *ONE), "--name", "here", "--json"])
    outcome = json.loads(done.stdout)
    page = ["--out", str(place / "page")]
    scored = call([sys.executable, "-c", code, "evaluate", outcome["model"], str(place / "demo"), *page, "--json"])
    assert json.loads(scored.stdout.splitlines()[-1])["top1"] == outcome["val_top1"]
    assert same(weights(outcome["home"]), on_ray[1])
    assert losses(outcome["mlflow_run"]) == on_ray[2]
    ours, theirs = (
        mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(run).data
        for run in (outcome["mlflow_run"], on_ray[0].mlflow_run)
    )
    assert ours.metrics.keys() == theirs.metrics.keys()
    assert {name: value for name, value in ours.metrics.items() if name.startswith("val/")} == {
        name: value for name, value in theirs.metrics.items() if name.startswith("val/")
    }
    tags = [
        {name for name in each.tags if not name.startswith(("vitray.model.", "vitray.note"))} for each in (ours, theirs)
    ]
    assert tags[1] - tags[0] == {"start/ray_seconds"}
    assert theirs.params.keys() == ours.params.keys()
    assert (ours.params["compute.precision"], ours.params["plan.precision"]) == ("auto", "fp32")
    assert open_weights(outcome["model"]).run.compute.precision == "fp32"


@pytest.mark.ray
def test_a_run_crosses_from_ray_to_this_process(place, on_ray):
    interrupted(place, on_ray, "crossed", 6)
    before, children = set(threading.enumerate()), psutil.Process().children(recursive=True)
    told = []
    outcome = train(recipe(place, *ONE), "crossed", str(place / "runs"), here=True, callback=noting(told))
    assert same(weights(outcome.home), on_ray[1])
    assert losses(outcome.mlflow_run) == on_ray[2]
    assert {kind for kind, *_ in told} == {"loss", "score", "saved"}
    # A checkpoint is written beside the steps after it.
    assert sorted(told) == sorted(each for each in on_ray[3] if each[1] > 6)
    for thread in set(threading.enumerate()) - before:
        if not thread.name.lower().startswith("mlflow"):  # its pools end when they are collected
            thread.join(30)  # one may be ending
            assert not thread.is_alive(), thread.name
    assert not [each for each in psutil.Process().children(recursive=True) if each not in children]


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_crosses_from_this_process_to_ray(place, on_ray, monkeypatch):
    taken = []

    def stop(*arguments):
        taken.append(arguments)
        if len(taken) == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(*arguments)

    take_step = loop.take_step
    monkeypatch.setattr(loop, "take_step", stop)
    with pytest.raises(SystemExit) as ended:
        train(recipe(place, *ONE), "back", str(place / "runs"), here=True)
    assert ended.value.code == 128 + signal.SIGTERM
    [step] = {*checkpoints.complete_steps(str(place / "runs" / "back"))} - {6}
    assert 9 <= step < 20
    outcome = train(recipe(place, *ONE), "back", str(place / "runs"))
    assert same(weights(outcome.home), on_ray[1])
    assert losses(outcome.mlflow_run) == on_ray[2]


@pytest.mark.ray
def test_an_error_is_the_caller_s_own_and_leaves_nothing(place, monkeypatch):
    def fail(*_):
        raise ArithmeticError("a mistake in my loss")

    monkeypatch.setattr(loop, "take_step", fail)
    before, children = threading.active_count(), psutil.Process().children(recursive=True)
    with pytest.raises(ArithmeticError, match="a mistake in my loss"):
        train(recipe(place, *ONE), "broken", str(place / "runs"), here=True)
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {each.name for each in threading.enumerate()}.isdisjoint({"prefetch", "checkpoints", "run-logger"})
    assert not [each for each in psutil.Process().children(recursive=True) if each not in children]
    [run] = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).search_runs(["1"], "attributes.run_name = 'broken'")
    assert run.info.status == "FAILED"


@pytest.mark.ray
@pytest.mark.slow
def test_torchrun_is_bit_equal_to_two_workers_of_ray(place):
    threads = "compute.cpus=1"
    outcome = train(recipe(place, threads), "two-on-ray", str(place / "runs"))
    done = call([*TORCHRUN, *VITRAY, *words(place, threads), "--name", "two-here", "--json"])
    [result] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert same(weights(result["home"]), weights(outcome.home))
    assert losses(result["mlflow_run"]) == losses(outcome.mlflow_run)
    assert "2 workers on CPU" in done.stderr
    # A finished run ends at once, in all processes.
    again = call([*TORCHRUN, *VITRAY, *words(place, threads), "--name", "two-here", "--json"], timeout=120)
    assert again.stderr.count("two-here is finished") == 1


@pytest.mark.ray
@pytest.mark.slow
def test_a_stopped_torchrun_saves_and_goes_on(place):
    """Its signal reaches the processes at different times."""
    threads = "compute.cpus=1"
    whole = train(recipe(place, threads), "two-undisturbed", str(place / "runs"))
    command = [*TORCHRUN, *VITRAY, *words(place, threads), "--name", "two-stopped"]
    environment = without_ray()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "step 1/" in line:
                process.send_signal(signal.SIGTERM)
            if "is saved" in line:
                break
        assert "is saved" in line
        process.stderr.read()
    outcome = json.loads(call([*command, "--json"]).stdout.splitlines()[-1])
    assert same(weights(outcome["home"]), weights(whole.home))


@pytest.mark.ray
@pytest.mark.slow
def test_probes_and_figures_are_those_of_ray(place):
    extra = [*ONE, "evaluate.probes=[knn, rank]", "evaluate.figures=[rollout]", "optim.duration=10 steps"]
    values = []
    for here in (False, True):
        outcome = train(recipe(place, *extra), f"probed-{here}", str(place / "runs"), here=here)
        metrics = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(outcome.mlflow_run).data.metrics
        values.append({name: value for name, value in metrics.items() if name.startswith("probe/")})
    assert values[0] == values[1]
    assert values[0]


@pytest.mark.ray
@pytest.mark.slow
def test_a_breakpoint_stops_in_the_step(place, tmp_path):
    """Driven through a terminal: a variable of the step is printed, and the run goes on to its end."""
    (tmp_path / "debugged.py").write_text(
        "import sys\nfrom vitray.training import loop\n"
        "take_step = loop.take_step\n"
        "def stopping(run, step, batch, *rest):\n"
        "    if step == 3: breakpoint()\n"
        "    return take_step(run, step, batch, *rest)\n"
        "loop.take_step = stopping\n"
        "from pipelines.__main__ import main\nsys.exit(main())\n"
    )
    command = [sys.executable, str(tmp_path / "debugged.py"), *words(place, *ONE), "--name", "debugged"]
    environment = without_ray()
    own, other = pty.openpty()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    seen = ""

    def read_until(pattern):
        nonlocal seen
        deadline = time.monotonic() + 120
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, seen
            if select.select([own], [], [], 1)[0]:
                try:
                    seen += os.read(own, 4096).decode()
                except OSError:  # the process has closed its terminal
                    break
        assert re.search(pattern, seen), seen

    read_until(r"\(Pdb\)")
    seen = ""
    os.write(own, b"p batch.images.shape\n")
    read_until(r"torch\.Size\(\[16, 32, 32, 3\]\)")
    os.write(own, b"c\n")
    read_until(r"val top-1  ")
    process.wait(60)
    os.close(own)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("settings", "environment", "message"),
    [
        (
            ["compute.workers=2"],
            {},
            r"compute.workers: got 2 with --here in 1 process, .* `torchrun --standalone --nproc-per-node 2",
        ),
        (["compute.workers=1"], {"WORLD_SIZE": "2"}, r"compute.workers: got 1 with --here in 2 processes, expected 2,"),
        (["compute.workers=1..2"], {}, r"compute.workers: got 1..2 with --here, expected a number"),
        ([], {"RAY_ADDRESS": "127.0.0.1:6379"}, r"--here: RAY_ADDRESS is 127.0.0.1:6379; expected one of the two"),
        (["compute.device=gpu"], {}, r"compute.device: got gpu, expected cpu or auto: torch finds no GPU"),
        (["evaluate.where=gpu"], {}, r"evaluate.where: got gpu with --here on CPUs"),
        (
            ["compute.workers=2", "evaluate.where=cpu"],
            {"WORLD_SIZE": "2"},
            r"evaluate.where: got cpu with --here in 2 processes, expected workers",
        ),
        ([], {"LOCAL_RANK": "first"}, r"LOCAL_RANK: got 'first', expected a number, as torchrun sets it"),
    ],
)
def test_what_only_ray_can_do_is_refused_at_once(tmp_path, monkeypatch, settings, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    run = load_run(None, ["model.name=vit_u1x1_8", "data.url=nowhere", *settings])
    with pytest.raises(ConfigError, match=message):
        train(run, "refused", str(tmp_path), here=True)
    assert not [each for each in psutil.Process().children() if "vitray.system" in " ".join(each.cmdline())]


@pytest.mark.parametrize("setting", ["compute.workers=2", "evaluate.where=gpu"])
def test_a_dry_run_refuses_it_too(tmp_path, capsys, setting):
    args = ["demo", "data.url=nowhere", setting, "--here", "--dry-run", "--out", str(tmp_path)]
    assert run_verb(pipelines.train.main, args) == 2
    assert " with --here" in capsys.readouterr().err


def test_a_process_group_of_the_caller_needs_what_torchrun_sets(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    run = load_run(None, ["model.name=vit_u1x1_8", "data.url=nowhere"])
    with pytest.raises(ConfigError, match="--here: got a process group of 4 and WORLD_SIZE 1, expected RANK, WORLD_S"):
        train(run, "refused", str(tmp_path), here=True)


def test_a_child_that_cannot_be_made_says_why_at_each_call():
    child = Child(partial(truediv, 1, 0), "is broken")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            child.submit(1).result(60)
    child.close()
