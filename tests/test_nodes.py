"""Loss of the cluster's head during a sweep, and nodes that join a run; tests/test_faults.py loses other nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parent.parent

# Kills the head and repeats the command on a new head; in its own process, since other tests use another Ray.
HEADS = """
import os, subprocess, sys, time
from pathlib import Path
from vitray.cluster import session
session.prepare_environment()
from ray.cluster_utils import Cluster

folder = Path(sys.argv[1])
python = [sys.executable, "-m"]
settings = ["model.name=vit_u2x2_8", "model.image_size=32", f"data.url={folder}/demo", "optim.duration=60 steps"]
settings += ["optim.warmup=4 steps", "checkpoint.every=10 steps", "evaluate.every=20 steps", "optim.batch=16"]
settings += ["compute.workers=1", "tracking.register_as=null"]
(folder / "rates.yaml").write_text("space: {optim.lr: {grid: [1.0e-3, 0.01]}}")
command = [*python, "pipelines.sweep", "demo", str(folder / "rates.yaml"), *settings]


def sweep(nodes):
    environment = os.environ | {"RAY_ADDRESS": nodes.address}
    where = ["--name", "parted", "--out", str(folder / "sweeps"), "--json"]
    return subprocess.Popen([*command, *where], env=environment, stdout=subprocess.PIPE, text=True)


subprocess.run([*python, "pipelines.shard", "demo", f"{folder}/demo", "images=400", "image_size=32"], check=True)
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
first = sweep(nodes)
while not (folder / "sweeps" / "parted" / "lr=0.01" / "checkpoints" / "step-00000020" / "checkpoint.json").exists():
    assert first.poll() is None
    time.sleep(0.02)
nodes.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
assert first.wait(180) != 0
began = (folder / "sweeps" / "parted" / "lr=1e-3" / "outcome.json").stat().st_mtime_ns
again = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
print(sweep(again).communicate()[0].splitlines()[-1], flush=True)
assert (folder / "sweeps" / "parted" / "lr=1e-3" / "outcome.json").stat().st_mtime_ns == began
alone = [*python, "pipelines.train", "demo", *settings, "optim.lr=0.01", "--name", "alone", "--out", str(folder)]
subprocess.run(alone, env=os.environ | {"RAY_ADDRESS": again.address}, stdout=sys.stderr, check=True)
"""


@pytest.mark.timeout(900)
def test_a_sweep_survives_the_loss_of_the_head(tmp_path):
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlruns.db'}",
        "VITRAY_HOME": str(tmp_path / "home"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    }
    command = [sys.executable, "-c", HEADS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    places = [*(tmp_path / "sweeps" / "parted" / name for name in ("lr=1e-3", "lr=0.01")), tmp_path / "alone"]
    completed, resumed, undisturbed = (json.loads((place / "outcome.json").read_text()) for place in places)
    assert (resumed["val_top1"], resumed["val_loss"]) == (undisturbed["val_top1"], undisturbed["val_loss"])
    assert result["finished"] == 2
    best = max(completed, resumed, key=lambda run: run["val_top1"])
    assert result["best_goal"] == best["val_top1"]
    assert {"lr=1e-3": completed, "lr=0.01": resumed}[result["best"]]["val_top1"] == best["val_top1"]


# Adds a node to the cluster of an elastic run, and trains the rest of it once more on two workers from its checkpoint.
GROWTH = """
import json, os, shutil, subprocess, sys, time
from pathlib import Path
from vitray.cluster import session
session.prepare_environment()
from ray.cluster_utils import Cluster

folder = Path(sys.argv[1])
python = [sys.executable, "-m"]
settings = ["model.name=vit_u2x2_8", "model.image_size=32", f"data.url={folder}/demo", "optim.duration=3000 steps"]
settings += ["optim.warmup=4 steps", "checkpoint.every=10000 steps", "evaluate.every=10000 steps", "optim.batch=16"]
settings += ["compute.workers=1..2", "compute.device=cpu", "compute.cpus=1", "checkpoint.keep=9"]
settings += ["tracking.register_as=null"]


def train(*words):
    command = [*python, "pipelines.train", *words, "--out", str(folder / "runs"), "--json"]
    environment = os.environ | {"RAY_ADDRESS": nodes.address}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


subprocess.run([*python, "pipelines.shard", "demo", f"{folder}/demo", "images=400", "image_size=32"], check=True)
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
run, lines = train("demo", *settings, "--name", "grown"), []
for line in run.stderr:
    lines.append(line)
    if "images/s" in line and len(nodes.worker_nodes) == 0:
        nodes.add_node(num_cpus=2)
assert run.wait() == 0, lines
grown, copied = folder / "runs" / "grown", folder / "runs" / "copied"
shutil.copytree(grown, copied, ignore=lambda _, names: {"model", "outcome.json"} & set(names))
first, *later = sorted((copied / "checkpoints").iterdir())
for each in later:
    shutil.rmtree(each)
again = train("--resume", "copied", "compute.workers=2")
told = again.stderr.read()
assert again.wait() == 0, told
print(json.dumps({"first": first.name, "lines": lines}))
"""


@pytest.mark.timeout(900)
def test_a_run_grows_with_its_cluster_and_loses_no_step(tmp_path):
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlruns.db'}",
        "VITRAY_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    told = "".join(result["lines"])
    step = int(result["first"].removeprefix("step-"))
    assert f"nodes have joined: step {step:,} is saved" in told
    # No step was taken twice: the larger group goes on at the step that was saved.
    assert f"resumed at step {step:,}" in told
    assert "saved by 1 worker" in told
    assert told.count("resumed at step") == 1
    grown, copied = (tmp_path / "runs" / name / "model" / "model.safetensors" for name in ("grown", "copied"))
    assert grown.read_bytes() == copied.read_bytes()
