"""`vitray slurm`: its scripts, and a real Slurm of two hosts that preempts a job and ends its time."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, Site, until

from pipelines.__main__ import main
from vitray.cluster.slurm import Allocation, job_words, script
from vitray.cluster.slurm_node import Node

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable

# ---- the script ------------------------------------------------------------------------------------------------------


def options_of(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_script_asks_for_whole_nodes_and_queues_again(tmp_path):
    allocation = Allocation(4, 8, None, "1-00:00:00", ["--partition=a100", "--qos=high"])
    text = script(allocation, "s16", ["train", "a2_s16_imagenet", "--name", "s16", "data.url=a b"], tmp_path)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    asked = {"--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=1", "--exclusive", "--mem=0", "--time=1-00:00:00"}
    again = {"--requeue", "--signal=USR1@60", "--open-mode=append", "--partition=a100", "--qos=high"}
    assert asked | again <= set(options_of(text))
    assert text.endswith("vitray.cluster.slurm_node train a2_s16_imagenet --name s16 'data.url=a b'\n")


def test_one_node_is_shared_and_has_no_token(tmp_path):
    text = script(Allocation(gpus=1, cpus=8), "demo", ["train", "demo", "--name", "demo"], tmp_path)
    assert "RAY_AUTH_TOKEN" not in text
    assert not {"--exclusive", "--mem=0"} & set(options_of(text))
    # A step does not inherit the CPUs of its job.
    assert "--cpus-per-task=8" in options_of(text)
    assert "exec srun --cpus-per-task=8 " in text


def test_the_jobs_of_an_array_share_a_sweep(capsys):
    assert main(["slurm", "--array", "8", "--gpus", "1", "sweep", "demo", "demo_lr", "--name", "rates"]) == 0
    text = capsys.readouterr().out
    assert {"--array=1-8", "--output=%x-%A_%a.log", "--gpus-per-node=1", "--requeue"} <= set(options_of(text))
    assert text.endswith(" sweep demo demo_lr --name rates --here\n")


def test_the_token_is_new_in_each_job(tmp_path):
    text = script(Allocation(2), "demo", ["train", "demo", "--name", "demo"], tmp_path)
    line = next(line for line in text.splitlines() if "RAY_AUTH_TOKEN" in line)
    tokens = {
        subprocess.run(["bash", "-c", f"{line}; echo $RAY_AUTH_TOKEN"], capture_output=True, text=True).stdout.strip()
        for _ in range(2)
    }
    assert len(tokens) == 2
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def test_an_element_of_an_array_is_named_alone(monkeypatch):
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    node = Node("17", 0, 1, "127.0.0.1")
    assert node.element == "17"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert node.element == "17_3"


def test_a_verb_that_would_begin_anew_does_not_queue_again(tmp_path):
    text = script(Allocation(), "evaluate", ["evaluate", "runs/s16/model", "data"], tmp_path)
    assert not {"--requeue", "--signal=USR1@60"} & set(options_of(text))


@pytest.mark.parametrize(
    ("words", "name", "added"),
    [
        ("train demo --name s16 optim.lr=1e-3", "s16", []),
        ("train demo --name=s16", "s16", []),
        ("train --resume s16", "s16", []),
        ("train demo --name team/s16", "team-s16", []),
        ("sweep demo rates", "demo-20[0-9]+-[0-9]+", ["--name"]),
        ("train recipes/own.yaml", "own-20[0-9]+-[0-9]+", ["--name"]),
        ("predict runs/s16/model photos out", "predict-model", []),
    ],
)
def test_a_job_has_a_name_by_which_it_goes_on(words, name, added):
    found, command = job_words(words.split())
    assert re.fullmatch(name, found)
    assert command == [*words.split(), *added, *([found] if added else [])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes: got 0, expected at least 1"),
        (["--gpus", "-1"], "--gpus: got -1, expected at least 0"),
        (["--time", "soon"], "--time: got soon, expected as in 90"),
        (["--sbatch", "qos=high"], "--sbatch: got 'qos=high', expected an option of sbatch"),
        (["--sbatch=--qos=a\nrm x"], "--sbatch: got "),
        (["--array", "8"], "--array: expected verb sweep and --nodes 1"),
    ],
)
def test_bad_input_is_one_message(capsys, options, message):
    assert main(["slurm", *options, "train", "demo"]) == 2
    assert message in capsys.readouterr().err


def test_a_name_that_a_run_would_not_take_is_one_message(capsys):
    assert main(["slurm", "train", "demo", "--name", "a b\nrm x"]) == 2
    assert "--name: got " in capsys.readouterr().err


def test_a_verb_that_is_none_of_a_job_is_one_message(capsys):
    assert main(["slurm", "trian", "demo"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_a_machine_without_slurm_prints_the_script(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["slurm", "--submit", "train", "demo"]) == 2
    assert "sbatch: not found" in capsys.readouterr().err
    assert main(["slurm", "--json", "train", "demo", "--name", "first"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["name"] == "first"
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=first\n")


def test_outside_a_job_a_node_says_so(monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    done = subprocess.run([PYTHON, "-m", "vitray.cluster.slurm_node", "train"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "vitray: SLURM_PROCID: not set, expected to be started by srun in a job of Slurm\n"


# ---- a real Slurm ----------------------------------------------------------------------------------------------------

CONF = """
ClusterName=test
SlurmctldHost=one(10.55.0.1)
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MinJobAge=3600
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=one NodeAddr=10.55.0.1 CPUs=2 State=UNKNOWN
NodeName=two NodeAddr=10.55.0.2 CPUs=2 State=UNKNOWN
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
SETTINGS = ["model.name=vit_u2x2_8", "model.image_size=32", "optim.warmup=4 steps", "optim.batch=16"]
SETTINGS += ["checkpoint.every=10000 steps", "evaluate.every=10000 steps", "compute.workers=2", "compute.device=cpu"]
SETTINGS += ["tracking.register_as=null", "optim.duration=2000 steps"]


@pytest.fixture
def first() -> Iterator[Host]:
    """The first of two hosts of a Slurm cluster, whose controller it has."""
    assert os.geteuid() == 0, "simulated hosts need root: run `make test-full` as root, or in a container"
    with tempfile.TemporaryDirectory(prefix="vs", dir="/tmp") as name:
        folder = Path(name)
        (folder / "state").mkdir()
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        environment = {
            "SLURM_CONF": str(conf),
            "GLOO_SOCKET_IFNAME": "eth0",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlruns.db",
            "RAY_raylet_start_wait_time_s": "180",
            "VITRAY_HOME": str(folder / "own" / "home"),
        }
        site = Site(ROOT, folder, environment)
        try:
            one, two = site.add("one", 1), site.add("two", 2)
            one.start(["slurmctld", "-D", "-f", conf], folder / "slurmctld.log")
            for host in (one, two):
                host.start(["slurmd", "-D", "-N", host.name, "-f", conf], folder / f"{host.name}.log")
            until(lambda: one.call(["sinfo", "--noheader", "-o", "%D %t"]).split()[:2] == ["2", "idle"], 60, "nodes")
            yield one
        finally:
            site.end()


def steps(log: Path) -> int:
    """The last step that a run's output names."""
    found = re.findall(r"step +([\d,]+)", log.read_text() if log.exists() else "")
    return int(found[-1].replace(",", "")) if found else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_disturbed_job_has_the_weights_of_an_undisturbed_one(first, tmp_path):
    """It runs out of time, and is preempted; one that is canceled stays so."""
    first.call([PYTHON, "-m", "pipelines.shard", "demo", tmp_path / "images", "images=400", "image_size=32"])
    train = ["train", "demo", f"data.url={tmp_path / 'images'}", *SETTINGS, "--out", tmp_path / "runs", "--name"]
    slurm = [PYTHON, "-m", "pipelines", "slurm", "--nodes", "2", f"--sbatch=--chdir={tmp_path}", "--submit", "--json"]

    def submit(name: str) -> tuple[str, Path]:
        job = json.loads(first.call([*slurm, *train, name]).splitlines()[-1])["job"]
        return job, tmp_path / f"{name}-{job}.log"

    def state(job: str) -> str:
        return first.call(["squeue", "--noheader", "--states=all", "-o", "%T", "--jobs", job]).strip()

    job, log = submit("disturbed")
    # The signal of the time limit: the job saves, and queues again by itself.
    until(lambda: steps(log) > 20, 240, "the first steps", log)
    first.call(["scancel", "--signal=USR1", job])
    until(lambda: "resumed at step" in log.read_text(), 240, "the second start", log)
    # An urgent job takes its nodes for some seconds.
    began = steps(log)
    until(lambda: steps(log) > began + 20, 240, "further steps", log)
    urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"]
    first.call(urgent)
    until(lambda: state(job) == "COMPLETED", 400, "its end", log)
    told = log.read_text()
    assert [len(re.findall(text, told)) for text in (r"\d is saved", "queues again", "resumed at step")] == [2, 2, 2]

    job, log = submit("canceled")
    until(lambda: steps(log) > 20, 240, "the first steps", log)
    first.call(["scancel", job])
    until(lambda: state(job) == "CANCELLED", 120, "its end", log)
    time.sleep(10)
    assert state(job) == "CANCELLED"
    assert "is saved" in log.read_text()

    job, log = submit("alone")
    until(lambda: state(job) == "COMPLETED", 300, "the undisturbed run", log)
    names = [path.name for path in (tmp_path / "runs" / "alone" / "model").iterdir()]
    assert "model.safetensors" in names
    contents = {
        (tmp_path / "runs" / name / "model" / "model.safetensors").read_bytes() for name in ("alone", "disturbed")
    }
    assert len(contents) == 1
    (tmp_path / "rates.yaml").write_text("space: {optim.lr: {grid: [1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3]}}")
    own = ["compute.workers=1", "optim.duration=200 steps"]
    shared = [setting for setting in train[2:-3] if str(setting).partition("=")[0] not in " ".join(own)]
    sweep = ["sweep", "demo", tmp_path / "rates.yaml", *shared, *own]
    array = [PYTHON, "-m", "pipelines", "slurm", "--array", "2", "--cpus", "2", *slurm[6:]]
    job = json.loads(first.call([*array, *sweep, "--out", tmp_path, "--name", "rates"]).splitlines()[-1])["job"]
    until(lambda: state(job).split() == ["COMPLETED"] * 2, 300, "the array", tmp_path / f"rates-{job}_1.log")
    logs = [(tmp_path / f"rates-{job}_{number}.log").read_text() for number in (1, 2)]
    trained = [set(re.findall(r"^  (lr=\S+) is finished", log, re.M)) for log in logs]
    assert all(trained)
    assert (len(trained[0] | trained[1]), trained[0] & trained[1]) == (4, set())
    assert any("4 finished" in log for log in logs), "of two that end at the same moment, each writes the report"
    # Nothing of a job is left: no Ray, no folder.
    assert not [name for host in first.site.hosts.values() for name in host.processes("ray")]
    assert not list(first.seen(first.own).glob("vitray-slurm-*"))
