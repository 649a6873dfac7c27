"""A running Ray: one that grows is waited for, and what nobody uses any longer is given back."""

import inspect
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitray.cluster import session
from vitray.config import load_run
from vitray.errors import ConfigError, RunError
from vitray.runs.driver import _patience, await_nodes, lay_out

ROOT = Path(__file__).parent.parent


@pytest.fixture
def growing(monkeypatch, ray_cluster):
    monkeypatch.setenv("VITRAY_GROWS_WITHIN", "3")


def groups():
    """The placement groups that are there."""
    import ray

    return {name for name, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"}


def test_a_ray_that_does_not_start_in_time_is_said(monkeypatch):
    import ray

    said = "timed out during startup"
    assert said in inspect.getsource(ray._private.node.Node.__init__).replace('" "', "")

    def init(*_, **__):
        raise Exception(f"The current node {said}. This could happen because some of the raylet failed")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(RunError, match="calmer moment and the same command"), session.running():
        pass


def test_actors_that_would_be_waited_for_are_begun_where_ray_has_them(monkeypatch):
    begun = []
    scaling = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
    monkeypatch.setattr(f"{scaling}.get_or_create_autoscaling_coordinator", lambda: begun.append("room"))
    monkeypatch.setattr("ray.data._internal.stats.get_or_create_stats_actor", lambda: begun.append("numbers"))
    session.begin_helpers()
    assert begun == ["room", "numbers"]
    monkeypatch.setitem(sys.modules, scaling, None)
    session.begin_helpers()
    assert begun == ["room", "numbers"]


@pytest.mark.ray
def test_room_that_is_there_is_not_waited_for(growing, capsys):
    await_nodes(load_run(None, ["compute.workers=2", "compute.device=cpu"]))
    assert groups() == set()
    assert capsys.readouterr().err == ""


@pytest.mark.ray
def test_room_that_does_not_come_is_given_up_and_nothing_stays_asked_for(growing, capsys):
    began = time.monotonic()
    with pytest.raises(RunError, match=r"no room for 2 x \(1 CPU \+ 1 GPU\), 1 x \(1 CPU\) within 3 seconds"):
        await_nodes(load_run(None, ["compute.workers=2..4", "compute.device=gpu"]))
    assert 3 < time.monotonic() - began < 60
    assert groups() == set()
    assert capsys.readouterr().err.count("waiting for nodes with 2 x (1 CPU + 1 GPU), 1 x (1 CPU)") == 1


@pytest.mark.ray
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compute.workers=2"], "compute.device: got auto on a cluster that grows and has no GPU now"),
        (["compute.device=gpu"], "compute.workers: got auto on a cluster that grows; wanted a number"),
    ],
)
def test_what_only_nodes_that_are_there_could_decide_is_refused(growing, words, message):
    with pytest.raises(ConfigError, match=message):
        await_nodes(load_run(None, words))


@pytest.mark.parametrize(
    ("nodes", "words", "cpus"),
    [
        ([4], ["compute.workers=2"], 1),
        ([2], ["compute.workers=2"], 0.5),
        ([2, 2], ["compute.workers=2"], 1),
        ([2, 2], ["compute.workers=2", "compute.cpus=1.5"], None),  # half a CPU left of each: nothing would decode
        ([1, 2, 2], ["compute.workers=2", "compute.cpus=1.5"], 1.5),
        ([1, 1, 1], ["compute.workers=5"], 0.2),  # 0.4 would leave 0.2 of two nodes, and 0.6 of one
        ([], ["compute.workers=1"], None),
    ],
)
def test_workers_leave_a_whole_cpu_of_some_node(nodes, words, cpus, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(sum(nodes))})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": float(cpu)}} for cpu in nodes])
    run = load_run(None, words)
    if cpus is None:
        with pytest.raises(ConfigError, match=r"workers.* beside one CPU to decode images do not fit"):
            lay_out(run)
    else:
        assert lay_out(run).cpus == pytest.approx(cpus)


def test_a_lost_node_may_come_back_within_half_an_hour_or_as_long_as_the_cluster_says(monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    monkeypatch.delenv("VITRAY_GROWS_WITHIN", raising=False)
    assert _patience() == 90
    monkeypatch.setenv("VITRAY_GROWS_WITHIN", "610")
    assert _patience() == 31


def test_seconds_are_seconds(monkeypatch):
    monkeypatch.delenv("VITRAY_GROWS_WITHIN", raising=False)
    assert session.grows_within() is None
    monkeypatch.setenv("VITRAY_GROWS_WITHIN", "half an hour")
    with pytest.raises(ConfigError, match="VITRAY_GROWS_WITHIN: got 'half an hour', wanted seconds"):
        session.grows_within()


def room(**settings):
    from ray.util.placement_group import placement_group

    group = placement_group([{"CPU": 0.01}], **settings)
    assert group.wait(60)
    return group.id.hex()


@pytest.mark.ray
def test_a_job_gives_back_what_it_asked_for(ray_cluster):
    import ray

    kept, asked = room(lifetime="detached", name="kept"), room()
    assert {kept, asked} <= groups()
    session.reclaim()  # of jobs that are over, not of this one
    assert {kept, asked} <= groups()
    session.give_back("Trial")
    assert groups() & {kept, asked} == {kept}
    ray.util.remove_placement_group(ray.util.get_placement_group("kept"))


@pytest.mark.ray
def test_what_a_job_has_left_is_removed_unless_something_of_it_lives(ray_cluster, monkeypatch):
    """Ray answers that this job is over: the moment in which it would forget a group cannot be hit at will."""
    import ray
    from ray.util import state

    asked, job = room(), ray.get_runtime_context().get_job_id()
    monkeypatch.setattr(state, "list_jobs", lambda **_: [SimpleNamespace(job_id=job, status="SUCCEEDED")])
    living = [SimpleNamespace(job_id=job, class_name="Server")]
    monkeypatch.setattr(state, "list_actors", lambda **_: living)
    session.reclaim()
    assert asked in groups()
    living[:] = [SimpleNamespace(job_id=job, class_name=name) for name in session.HELPERS]
    session.reclaim()
    assert asked not in groups()


def test_what_others_leave_meanwhile_is_removed_too(monkeypatch):
    """Also after a look that failed."""
    ended, looks = threading.Event(), []

    def reclaim():
        looks.append(len(looks))
        if len(looks) == 3:
            ended.set()
        raise ConnectionError("the dashboard is busy")

    monkeypatch.setattr(session, "RECLAIMS_EVERY", 0.01)
    monkeypatch.setattr(session, "reclaim", reclaim)
    session._reclaim_now_and_then(ended)
    assert looks == [0, 1, 2]


# In a process of its own: the other tests have another Ray.
SCRIPT = """
import os, socket, subprocess, sys
from vitray import cluster
session.prepare_environment()
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster

folder = sys.argv[1]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
nodes = Cluster(head_node_args={"num_cpus": 0, "include_dashboard": True, "dashboard_port": port}, initialize_head=True)
environment = os.environ | {"RAY_ADDRESS": nodes.address, "VITRAY_GROWS_WITHIN": "200"}
settings = ["model.name=vit_u2x2_8", "model.image_size=32", f"data.url={folder}/demo", "optim.duration=4 steps"]
settings += ["optim.warmup=0 steps", "optim.batch=16", "compute.device=cpu", "compute.workers=2"]
words = [sys.executable, "-m", "pipelines.train", "demo", *settings, "tracking.register_as=null", "--json"]
words += ["--name", "grown", "--out", f"{folder}/runs"]
driver = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
for line in driver.stderr:
    print(line, end="", file=sys.stderr)
    if "waiting for nodes" in line:
        nodes.add_node(num_cpus=3)
print(driver.stdout.read().splitlines()[-1])
sys.exit(driver.wait())
"""


SETTLED = """
import gc
before = gc.get_threshold()
import pipelines
print(gc.get_threshold()[0])
from vitray.waking import settle
settle()
print(gc.get_threshold() == before, gc.get_freeze_count() > 0)
"""


@pytest.mark.ray
def test_garbage_is_seldom_looked_for_while_modules_are_loaded_and_then_as_ever(ray_cluster):
    import ray

    def look():
        import gc

        return gc.get_threshold()[0]

    assert ray.get(ray.remote(num_cpus=0)(look).remote()) == 50_000
    words = [sys.executable, "-c", SETTLED]
    assert subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout == "50000\nTrue True\n"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_starts_on_the_nodes_that_come_for_it(tmp_path, ray_cluster):
    from vitray.data.shards import read_job, write_dataset

    write_dataset(read_job("demo", str(tmp_path / "demo"), words=["images=100", "image_size=32"]))
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlruns.db'}",
        "VITRAY_HOME": str(tmp_path / "home"),
    }
    words = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "waiting for nodes with 3 x (1 CPU)" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 4
