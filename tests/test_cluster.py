"""The Ray session: waiting for a cluster to grow, and releasing unused resources."""

import contextlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from image_sets import write_dataset

from vitray.cluster import session
from vitray.config import load_run
from vitray.errors import ConfigError, RunError
from vitray.runs.placement import await_nodes, place_workers, start_attempts

ROOT = Path(__file__).parent.parent
MIXING = "data.mix={mixup: 0.8}"


@pytest.fixture
def growing(monkeypatch, ray_cluster):
    monkeypatch.setenv("VITRAY_GROWS_WITHIN", "3")


def groups():
    """Return the existing placement groups."""
    import ray

    return {name for name, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"}


def test_a_start_that_times_out_is_reported(monkeypatch):
    import ray

    text = "timed out during startup"
    assert text in inspect.getsource(ray._private.node.Node.__init__).replace('" "', "")

    def init(*_, **__):
        raise Exception(f"The current node {text}. This could happen because some of the raylet failed")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(RunError, match="try the same command again"),
        session.ray_session(),
    ):
        pass


@pytest.mark.ray
def test_a_run_that_fits_does_not_wait(growing, capsys):
    await_nodes(load_run(None, ["compute.workers=2", "compute.device=cpu"]))
    assert groups() == set()
    assert capsys.readouterr().err == ""


@pytest.mark.ray
def test_waiting_for_nodes_times_out_and_withdraws_the_request(growing, capsys):
    began = time.monotonic()
    with pytest.raises(RunError, match=r"no room for 2 x \(1 CPU \+ 1 GPU\), 1 x \(1 CPU\) within 3 seconds"):
        await_nodes(load_run(None, ["compute.workers=2..4", "compute.device=gpu"]))
    assert 3 < time.monotonic() - began < 60
    assert groups() == set()
    assert capsys.readouterr().err.count("waiting for nodes with 2 x (1 CPU + 1 GPU), 1 x (1 CPU)") == 1
    share = ["compute.workers=2", "compute.device=gpu", "evaluate.where=gpu", "evaluate.gpus=0.5"]
    with pytest.raises(RunError, match=r"no room for 2 x \(1 CPU \+ 1 GPU\), 1 x \(1 CPU\), 1 x \(1 CPU \+ 0.5 GPU"):
        await_nodes(load_run(None, share))


@pytest.mark.ray
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["compute.workers=2"], "compute.device: got auto on an autoscaling cluster without a GPU now"),
        (["compute.device=gpu"], "compute.workers: got auto on an autoscaling cluster; expected a number"),
    ],
)
def test_a_growing_cluster_rejects_settings_that_depend_on_present_nodes(growing, overrides, message):
    with pytest.raises(ConfigError, match=message):
        await_nodes(load_run(None, overrides))


@pytest.mark.ray
def test_auto_is_the_device_that_the_cluster_file_names_while_no_gpu_is_up(growing, monkeypatch):
    run = load_run(None, ["compute.workers=2"])
    monkeypatch.setenv("VITRAY_GROWS_DEVICE", "cpu")
    await_nodes(run)
    monkeypatch.setenv("VITRAY_GROWS_DEVICE", "gpu")
    with pytest.raises(RunError, match=r"no room for 2 x \(1 CPU \+ 1 GPU\), 1 x \(1 CPU\) within 3 seconds"):
        await_nodes(run)
    monkeypatch.setenv("VITRAY_GROWS_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="VITRAY_GROWS_DEVICE: got 'tpu', expected gpu or cpu"):
        await_nodes(run)


@pytest.mark.parametrize(
    ("nodes", "overrides", "cpus"),
    [
        ([4], ["compute.workers=2"], 1),
        ([2], ["compute.workers=2"], 0.5),
        ([2, 2], ["compute.workers=2"], 1),
        ([2, 2], ["compute.workers=2", "compute.cpus=1.5"], None),  # half a CPU left on each node: none to decode
        ([1, 2, 2], ["compute.workers=2", "compute.cpus=1.5"], 1.5),
        ([1, 1, 1], ["compute.workers=5"], 0.2),  # 0.4 would leave 0.2 on two nodes and 0.6 on one
        ([], ["compute.workers=1"], None),
    ],
)
def test_workers_leave_one_cpu_of_a_node_free(nodes, overrides, cpus, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(sum(nodes))})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": float(cpu)}} for cpu in nodes])
    run = load_run(None, overrides)
    if cpus is None:
        with pytest.raises(ConfigError, match=r"workers.* with one CPU to decode images do not fit"):
            place_workers(run)
    else:
        assert place_workers(run).cpus == pytest.approx(cpus)


@pytest.mark.parametrize(
    ("address", "has_token", "mode", "expected"),
    [
        ("10.0.0.1:6379", True, None, "token"),
        ("10.0.0.1:6379", True, "disabled", "disabled"),  # the user's choice stays
        ("10.0.0.1:6379", False, None, None),
        (None, True, None, "token"),
        (None, False, "disabled", "token"),  # a local Ray is never open
    ],
)
def test_the_token_is_sent_to_a_cluster(address, has_token, mode, expected, tmp_path, monkeypatch):
    given = {"HOME": str(tmp_path), "RAY_ADDRESS": address, "RAY_AUTH_MODE": mode}
    monkeypatch.setattr(os, "environ", environment := {name: value for name, value in given.items() if value})
    monkeypatch.setitem(sys.modules, "ray", None)  # not connected
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("token")
    session.prepare_environment()
    assert environment.get("RAY_AUTH_MODE") == expected
    assert ("RAY_AUTH_TOKEN" in environment) == (address is None)  # a local Ray has a token of its own


def test_a_run_starts_where_the_dashboard_admits_the_head_alone(monkeypatch):
    import ray
    from ray.util.state.exception import RayStateApiException

    def refused():
        raise RayStateApiException("127.0.0.1:8265 does not answer")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(session, "check_reachable", lambda *_: None)
    monkeypatch.setattr(session, "remove_abandoned_groups", refused)
    monkeypatch.setattr(ray, "init", lambda **_: SimpleNamespace(dashboard_url="127.0.0.1:8265"))
    assert session._connect_or_start(None, None, Path()) is True


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"])
def test_a_cluster_that_is_away_is_one_message(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=re.escape(f"RAY_ADDRESS: {address}: cannot be reached")):
        session._connect_or_start(None, None, Path())
    assert time.monotonic() - began < 6


@pytest.mark.parametrize(
    ("cpus", "trials", "overrides", "shared"),
    [
        (16, 1, ["compute.workers=2"], None),  # a run alone decodes on all CPUs
        (3, 2, ["compute.workers=1", "compute.cpus=0.45"], 1),
        (16, 3, ["compute.workers=2", "compute.cpus=1"], 3),  # 3 x (2 + 3) of 16
        (16, 3, ["compute.workers=2", "compute.cpus=1", "evaluate.where=cpu"], 2),  # one evaluates
        (8, 4, ["compute.workers=1", "compute.cpus=1.5"], 1),
    ],
)
def test_trials_share_the_cpus_that_decode(cpus, trials, overrides, shared, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(cpus)})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": float(cpus)}}])
    assert place_workers(load_run(None, overrides), trials).data_cpus == shared


@pytest.mark.parametrize(
    ("cpus", "trials", "overrides", "has_cpus", "threads"),
    [
        (16, 1, ["compute.workers=2"], True, 8),
        (16, 1, ["compute.workers=2", "compute.cpus=3"], True, 3),
        (4, 2, ["compute.workers=1", "compute.cpus=0.45"], True, 1),
        (16, 4, ["compute.workers=1", "compute.cpus=1"], False, 4),  # of the plan of a sweep, not of the user
    ],
)
def test_the_threads_of_a_worker_are_its_cpus_or_a_share_of_the_node(
    cpus, trials, overrides, has_cpus, threads, monkeypatch
):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(cpus)})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": float(cpus)}}])
    assert place_workers(load_run(None, overrides), trials, has_cpus).threads == threads


@pytest.mark.parametrize(
    ("gpus", "overrides", "workers"),
    [
        (4, ["compute.workers=auto"], 4),
        (4, ["evaluate.where=gpu"], 3),
        (4, ["evaluate.where=gpu", "evaluate.gpus=0.5"], 3),  # a worker takes a whole GPU
        (1, ["evaluate.where=gpu", "compute.device=gpu"], None),
        (1, ["evaluate.where=gpu"], None),  # and not the CPU
        (1, ["evaluate.where=gpu", "data.val=null"], 1),
        (1, ["evaluate.where=gpu", "evaluate.gpus=0.5", "compute.workers=1", "compute.gpus=0.5"], 1),
        (
            1,
            ["evaluate.where=gpu", "evaluate.gpus=0.6", "compute.workers=1", "compute.gpus=0.5", "compute.device=gpu"],
            None,
        ),
        (1, ["evaluate.where=gpu", "evaluate.gpus=0.1", "compute.workers=1", "compute.gpus=0.9"], 1),
        (1, ["evaluate.where=gpu", "compute.workers=1", "compute.gpus=0.5", "compute.device=gpu"], None),
        (1, ["evaluate.where=gpu", "compute.device=cpu", "compute.workers=1"], 1),
    ],
)
def test_separate_evaluations_take_their_share_of_a_gpu(gpus, overrides, workers, monkeypatch):
    import ray

    node = {"CPU": 16.0, "GPU": float(gpus)}
    monkeypatch.setattr(ray, "cluster_resources", lambda: node)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node}])
    run = load_run(None, overrides)
    if workers is None:
        with pytest.raises(ConfigError, match=r"GPU workers, the cluster has 0 GPUs besides the one for evaluations"):
            place_workers(run)
    else:
        assert place_workers(run).workers == (workers, workers)


@pytest.mark.parametrize(
    ("gpus", "overrides", "message"),
    [
        (8, ["optim.batch=4"], "optim.batch: got 4, expected at least an image for each of 8"),
        (
            8,
            ["optim.batch=12", MIXING],
            "optim.batch: got 12, expected at least two images, which mixup and cutmix pair",
        ),
        (4, ["optim.batch=16", "evaluate.batch=1"], "evaluate.batch: got 1, expected at least an image for each of 4"),
        (4, ["optim.batch=16", "evaluate.batch=1", "data.val=null"], None),
        (4, ["optim.batch=16", "evaluate.batch=1", "evaluate.where=cpu"], None),
        (2, ["optim.batch=6", MIXING], "optim.batch: got 6, which gives each of 2 workers 3 images, expected an even"),
        (2, ["optim.batch=6"], None),
        (8, ["optim.batch=1000", MIXING], "optim.batch: got 1000, which gives each of 8 workers 125 images"),
        (8, ["optim.batch=48", MIXING, "compute.workers=2..8"], None),
        (8, ["optim.batch=20", MIXING, "compute.workers=2..8"], "gives each of 4 workers 5 images"),
        (8, ["optim.batch=20", MIXING, "compute.workers=8"], None),  # some have a pair more
        (1, ["optim.batch=6", MIXING, "compute.workers=1"], None),
    ],
)
def test_a_batch_that_the_workers_cannot_divide_is_refused(gpus, overrides, message, monkeypatch):
    import ray

    node = {"CPU": 32.0, "GPU": float(gpus)}
    monkeypatch.setattr(ray, "cluster_resources", lambda: node)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node}])
    workers = [] if any(override.startswith("compute.workers") for override in overrides) else ["compute.workers=auto"]
    run = load_run(None, [*overrides, *workers])
    if message is None:
        place_workers(run)
    else:
        with pytest.raises(ConfigError, match=message):
            place_workers(run)


def test_evaluations_on_a_gpu_need_one(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0})
    with pytest.raises(ConfigError, match=r"evaluate.where: got gpu, the cluster has no GPU"):
        place_workers(load_run(None, ["evaluate.where=gpu"]))


def test_a_share_of_a_gpu_needs_evaluations_on_a_gpu():
    with pytest.raises(ConfigError, match=r"evaluate.*gpus 0.5 needs where: gpu, got workers"):
        load_run(None, ["evaluate.gpus=0.5"])


def test_the_time_for_a_lost_node_to_return_depends_on_the_cluster(monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    monkeypatch.delenv("VITRAY_GROWS_WITHIN", raising=False)
    assert start_attempts() == 90
    monkeypatch.setenv("VITRAY_GROWS_WITHIN", "610")
    assert start_attempts() == 31


def test_the_autoscaling_timeout_is_a_number_of_seconds(monkeypatch):
    monkeypatch.delenv("VITRAY_GROWS_WITHIN", raising=False)
    assert session.autoscaling_timeout() is None
    monkeypatch.setenv("VITRAY_GROWS_WITHIN", "half an hour")
    with pytest.raises(ConfigError, match="VITRAY_GROWS_WITHIN: got 'half an hour', expected seconds"):
        session.autoscaling_timeout()


def request_group(bundle=None, **settings):
    """Return the id of a new placement group."""
    from ray.util.placement_group import placement_group

    group = placement_group([bundle or {"CPU": 0.01}], **settings)
    assert group.wait(60)
    return group.id.hex()


@pytest.mark.ray
def test_a_job_releases_its_own_placement_groups(ray_cluster):
    import ray
    from ray.util.state import list_actors

    detached, own = request_group(lifetime="detached", name="kept"), request_group()
    assert {detached, own} <= groups()
    session.remove_abandoned_groups({})  # removes only the groups of ended jobs
    assert {detached, own} <= groups()

    class Trial:  # its name in Ray has this function's, as those of Tune's classes have tune.with_resources
        def ping(self):
            pass

    actor = ray.remote(Trial).options(num_cpus=0).remote()
    ray.get(actor.ping.remote())
    named = [("class_name", "=", Trial.__qualname__)]
    assert [each.state for each in list_actors(filters=named, **session._list_options())] == ["ALIVE"]
    ray.kill(actor)
    session.release_resources(Trial.__qualname__)
    assert [each.state for each in list_actors(filters=named, **session._list_options())] == ["DEAD"]
    assert groups() & {detached, own} == {detached}
    ray.util.remove_placement_group(ray.util.get_placement_group("kept"))


@pytest.mark.ray
def test_an_interrupted_sweep_does_not_wait_for_a_dashboard_that_hangs(ray_cluster, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(session, "_list_options", lambda: {"address": address})
        began = time.monotonic()
        session.release_resources("Trial")
        assert 1 < time.monotonic() - began < 9


@pytest.mark.ray
def test_groups_of_an_ended_job_are_removed_unless_a_detached_actor_lives(ray_cluster, monkeypatch):
    """A faked listing reports this job as ended, since Ray loses a group only in a race."""
    import ray
    from ray.util import state

    group, job = request_group(), ray.get_runtime_context().get_job_id()
    monkeypatch.setattr(state, "list_jobs", lambda **_: [SimpleNamespace(job_id=job, status="SUCCEEDED")])
    actors = [SimpleNamespace(job_id=job, class_name="Server")]
    monkeypatch.setattr(state, "list_actors", lambda **_: actors)
    session.remove_abandoned_groups({})
    assert group in groups()
    actors[:] = [SimpleNamespace(job_id=job, class_name=name) for name in session.RAY_LIBRARY_ACTORS]
    session.remove_abandoned_groups({})
    assert group not in groups()


@pytest.mark.ray
def test_groups_of_failed_starts_are_removed(ray_cluster):
    """A group with a dead worker is removed at the second look, one without an actor after a minute of looks.

    One that waits for its resources stays: a trial of a sweep waits for those of other jobs.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Worker:  # local, so that Ray sends it by value
        pass

    Worker.__qualname__ = session.TRAIN_WORKER  # its name in Ray
    ids, actors = {}, {}
    for name in ("broken", "running", "starting"):
        ids[name] = request_group(name=name)
        strategy = PlacementGroupSchedulingStrategy(ray.util.get_placement_group(name))
        options = {"num_cpus": 0.001, "scheduling_strategy": strategy}
        actors[name] = [ray.remote(Worker).options(**options).remote() for _ in range(2 * (name != "starting"))]
        ray.get([actor.__ray_ready__.remote() for actor in actors[name]])
    ids["waiting"] = (waiting := placement_group([{"CPU": 1000}])).id.hex()
    ray.kill(actors["broken"][0])
    deadline = time.monotonic() + 60
    looks: dict[str, int] = {}
    while ids["broken"] not in looks and time.monotonic() < deadline:
        looks = session.remove_abandoned_groups({}, own_starts=True)
        time.sleep(0.1)
    assert groups() & set(ids.values()) == set(ids.values())
    looks = session.remove_abandoned_groups(looks, own_starts=True)
    assert groups() & set(ids.values()) == {ids["running"], ids["starting"], ids["waiting"]}
    for _ in range(session.CHECKS_WITHOUT_ACTOR - 3):
        looks = session.remove_abandoned_groups(looks, own_starts=True)
    assert groups() & set(ids.values()) == {ids["running"], ids["starting"], ids["waiting"]}
    session.remove_abandoned_groups(looks, own_starts=True)
    assert groups() & set(ids.values()) == {ids["running"], ids["waiting"]}
    ray.util.remove_placement_group(waiting)
    ray.util.remove_placement_group(ray.util.get_placement_group("running"))


def test_cleanup_repeats_after_a_failure(monkeypatch):
    is_third, looks = threading.Event(), []

    def remove(before, *, own_starts):
        assert own_starts
        looks.append(before)
        if len(looks) == 3:
            is_third.set()
        if len(looks) == 1:
            raise ConnectionError("the dashboard is busy")
        return {f"group {len(looks)}": 1}

    monkeypatch.setattr(session, "remove_abandoned_groups", remove)
    with session.abandoned_groups_removed(0.01, own_starts=True):
        assert is_third.wait(60)
    assert looks[:3] == [{}, {}, {"group 2": 1}]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_interrupted_block_does_not_wait_for_its_cleanup(monkeypatch, is_interrupted):
    joined = []
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", lambda thread, _: joined.append(thread.name))
        with session.abandoned_groups_removed(10):
            if is_interrupted:
                raise KeyboardInterrupt
    assert joined == ([] if is_interrupted else ["cleanup"])


def test_a_late_cleanup_starts_no_ray(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("it started a Ray"))
    with pytest.raises(ConnectionError, match="the connection to Ray has ended"):
        session.remove_abandoned_groups({})


@pytest.mark.ray
def test_a_process_connected_to_ray_gets_no_settings_of_a_local_one(ray_cluster, monkeypatch):
    """A trial of a sweep on a cluster has no address in its environment, and hears of preemptions all the same."""
    for name in ("RAY_ADDRESS", *session.LOCAL_RAY_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    session.prepare_environment()
    assert not session.LOCAL_RAY_SETTINGS.keys() & os.environ.keys()


# Kills a worker in the setup of the process group. Its group has two of the three CPUs that the run needs.
FAILED_START = """
import sys, threading, time
import psutil
from vitray.cluster import session
from vitray.config import load_run
from vitray.runs.train import train

killed = []

def kill_one():
    while not killed:
        time.sleep(0.01)
        for process in psutil.Process().children(recursive=True):
            if "_setup_torch_process_group" in process.name() + "".join(process.cmdline()):
                process.kill()
                killed.append(process)
                break

settings = ["model.name=vit_u2x2_8", "model.image_size=32", "model.num_classes=10", f"data.url={sys.argv[1]}/demo"]
settings += ["optim.batch=16", "optim.duration=4 steps", "optim.warmup=0 steps", "compute={workers: 2, cpus: 1}"]
with session.ray_session(cpus=3, object_store_bytes=300 * 10**6):
    threading.Thread(target=kill_one, daemon=True).start()
    train(load_run(None, settings), "late", sys.argv[1])
    assert killed
"""


def run_script(text, folder, **options):
    """Run a text as a Python script in its own process, with a dataset and a tracking store in a folder."""
    write_dataset(folder / "demo", {"train": 100, "val": 17})
    places = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlruns.db'}", "VITRAY_HOME": str(folder / "home")}
    return subprocess.run([sys.executable, "-c", text, str(folder)], cwd=ROOT, env=os.environ | places, **options)


@pytest.mark.ray
@pytest.mark.slow
def test_a_failed_start_of_the_workers_keeps_no_cpus(tmp_path):
    run_script(FAILED_START, tmp_path, check=True, timeout=240)


# Runs in its own process, since the other tests share one Ray.
SCRIPT = """
import os, socket, subprocess, sys
from vitray.cluster import session
session.prepare_environment()
from ray.cluster_utils import Cluster

folder = sys.argv[1]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
nodes = Cluster(head_node_args={"num_cpus": 0, "include_dashboard": True, "dashboard_port": port}, initialize_head=True)
environment = os.environ | {"RAY_ADDRESS": nodes.address, "VITRAY_GROWS_WITHIN": "200"}
settings = ["model.name=vit_u2x2_8", "model.image_size=32", f"data.url={folder}/demo", "optim.duration=4 steps"]
settings += ["optim.warmup=0 steps", "optim.batch=16", "compute.device=cpu", "compute.workers=2"]
command = [sys.executable, "-m", "pipelines.train", "demo", *settings, "tracking.register_as=null", "--json"]
command += ["--name", "grown", "--out", f"{folder}/runs"]
driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
for line in driver.stderr:
    print(line, end="", file=sys.stderr)
    if "waiting for nodes" in line:
        nodes.add_node(num_cpus=3)
print(driver.stdout.read().splitlines()[-1])
sys.exit(driver.wait())
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_starts_on_nodes_that_join_for_it(tmp_path):
    done = run_script(SCRIPT, tmp_path, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "waiting for nodes with 3 x (1 CPU)" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 4


@pytest.mark.ray
def test_a_local_ray_leaves_no_temporary_folder_of_its_processes():
    command = "from vitray.cluster.session import ray_session\nwith ray_session(): pass"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for the paths of Ray's sockets
        subprocess.run([sys.executable, "-c", command], check=True, env=environment | {"TMPDIR": folder})
        assert [path.name for path in Path(folder).iterdir()] == ["ray"]
