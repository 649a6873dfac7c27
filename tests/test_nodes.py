"""A node that is lost, or the head, on a real cluster of several nodes on this machine; elastic workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parent.parent

# In a process of its own: the other tests have another Ray.
SCRIPT = """
import os, subprocess, sys, time
from vitray import cluster
cluster.prepare_environment()
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster

folder, workers, comes_back = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True})
others = [nodes.add_node(num_cpus=2), nodes.add_node(num_cpus=2)]
environment = os.environ | {"RAY_ADDRESS": nodes.address}
python = [sys.executable, "-m"]
words = [*python, "pipelines.shard", "demo", f"{folder}/demo", "images=400", "image_size=32"]
subprocess.run(words, env=environment, check=True)
settings = ["model.name=vit_u2x2_8", "model.image_size=32", f"data.url={folder}/demo", "optim.duration=400 steps"]
settings += ["optim.warmup=4 steps", "checkpoint.every=20 steps", "evaluate.every=200 steps", "tracking.every=1 step"]
# So that neither the head nor one other node has room for both.
settings += ["compute.cpus=1.5", f"compute.workers={workers}", "tracking.register_as=null", "optim.batch=16"]
words = [*python, "pipelines.train", "demo", *settings, "--name", "lost", "--out", f"{folder}/runs", "--json"]
driver = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
while driver.poll() is None:
    time.sleep(0.02)
    if others and os.path.exists(f"{folder}/runs/lost/checkpoints/step-00000020/checkpoint.json"):
        nodes.remove_node(others.pop(), allow_graceful=False)
        if comes_back:
            nodes.add_node(num_cpus=2)
        others = []
print(driver.stdout.read().splitlines()[-1])
sys.exit(driver.wait())
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("workers", "comes_back"), [("2", True), ("1..2", False)])
def test_a_run_survives_the_loss_of_a_node(tmp_path, workers, comes_back):
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlruns.db'}",
        "VITRAY_HOME": str(tmp_path / "home"),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
    }
    words = [sys.executable, "-c", SCRIPT, str(tmp_path), workers, str(comes_back)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["steps"] == 400
    assert "resumed at step" in done.stderr

    import mlflow

    points = mlflow.MlflowClient(environment["MLFLOW_TRACKING_URI"]).get_metric_history(
        outcome["mlflow_run"], "train/loss"
    )
    assert sorted(point.step for point in points) == list(range(1, 401))


# A sweep on a cluster whose head dies with all that it held, and the same command on the head that comes after it.
HEADS = """
import os, subprocess, sys, time
from pathlib import Path
from vitray import cluster
cluster.prepare_environment()
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster

folder = Path(sys.argv[1])
python = [sys.executable, "-m"]
settings = ["model.name=vit_u2x2_8", "model.image_size=32", f"data.url={folder}/demo", "optim.duration=60 steps"]
settings += ["optim.warmup=4 steps", "checkpoint.every=10 steps", "evaluate.every=20 steps", "optim.batch=16"]
settings += ["compute.workers=1", "tracking.register_as=null"]
(folder / "rates.yaml").write_text("space: {optim.lr: {grid: [1.0e-3, 0.01, 0.02]}}")
words = [*python, "pipelines.sweep", "demo", str(folder / "rates.yaml"), *settings]


def sweep(nodes, name):
    environment = os.environ | {"RAY_ADDRESS": nodes.address}
    where = ["--name", name, "--out", str(folder / "sweeps"), "--json"]
    return subprocess.Popen([*words, *where], env=environment, stdout=subprocess.PIPE, text=True)


subprocess.run([*python, "pipelines.shard", "demo", f"{folder}/demo", "images=400", "image_size=32"], check=True)
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
first = sweep(nodes, "parted")
while not (folder / "sweeps" / "parted" / "lr=0.01" / "checkpoints" / "step-00000020" / "checkpoint.json").exists():
    assert first.poll() is None
    time.sleep(0.02)
nodes.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
assert first.wait(180) != 0
began = (folder / "sweeps" / "parted" / "lr=1e-3" / "outcome.json").stat().st_mtime_ns
again = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
for name in ("parted", "whole"):
    print(sweep(again, name).communicate()[0].splitlines()[-1])
assert (folder / "sweeps" / "parted" / "lr=1e-3" / "outcome.json").stat().st_mtime_ns == began
"""


@pytest.mark.timeout(900)
def test_a_sweep_survives_the_loss_of_the_head(tmp_path):
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlruns.db'}",
        "VITRAY_HOME": str(tmp_path / "home"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    }
    words = [sys.executable, "-c", HEADS, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parted, whole = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert (parted["finished"], parted["best"], parted["best_goal"]) == (3, whole["best"], whole["best_goal"])
