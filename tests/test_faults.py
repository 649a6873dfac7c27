"""What breaks on several machines, and that nothing is lost by it.

A head and two nodes train over a network of their own, from and to Ceph's S3, tracked by MLflow on PostgreSQL. Each
fault is to end in what an undisturbed run ends in: the same losses, each step once. What it cost is printed.
"""

import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hosts import KILL, PAUSE, RESUME, Host, Site, fill, until
from servers import SECRET, dump_mlflow, start_ceph, start_mlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
# As shipped.
OF_NODES = re.compile(r"(RAY_(?:health_check|grpc_client|preload)_\w+)=(\S+)")
SHIPPED = dict(OF_NODES.findall((ROOT / "cluster.yaml").read_text()))
STEPS, OFTEN = 400, 20
SETTINGS = [
    "model.name=vit_u2x2_8",
    "model.image_size=32",
    "data.url=s3://bucket/demo",
    f"optim.duration={STEPS} steps",
    "optim.warmup=4 steps",
    "optim.batch=16",
    f"checkpoint.every={OFTEN} steps",
    f"evaluate.every={STEPS // 2} steps",
    "tracking.every=1 step",
    "tracking.register_as=null",
    "compute.cpus=1.5",  # so that no node has room for both workers
]

# What MLflow knows of a run, as its own client says it.
ASK = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
(found,) = client.search_runs(["0", "1", "2"], f"attributes.run_name = '{sys.argv[1]}'")
points = client.get_metric_history(found.info.run_id, "train/loss")
told = [[point.step, point.timestamp, point.value] for point in points]
print(json.dumps({"status": found.info.status, "points": told, "metrics": found.data.metrics}))
"""
# A visitor's record, and what becomes of it.
VISIT = """
import sys
from vitray.tracking import Tracker
with Tracker.begin(sys.argv[1], "visit", "vitray", {}, {}, "") as tracker:
    tracker.metrics(1, {"val/loss": 1.0})
    print(tracker.flush(10))
"""
# Another user, whom the owner has let in, at the owner's runs.
OTHER = """
import os, sys
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.server import get_app_client
client, password = MlflowClient(), "another password"
runs = client.search_runs(["0", "1", "2"])
get_app_client("basic-auth", os.environ["MLFLOW_TRACKING_URI"]).create_user("other", password)
os.environ |= {"MLFLOW_TRACKING_USERNAME": "other", "MLFLOW_TRACKING_PASSWORD": password}
for look in (client.get_run, client.list_artifacts, client.delete_run):
    try:
        print("seen", look(runs[0].info.run_id))
    except MlflowException as error:
        print(error)
print("runs", len(client.search_runs(["0", "1", "2"])))
"""
# What lies on S3 and holds a secret of this host's environment, or the token.
LEAKS = """
import os
from pathlib import Path
import boto3
secrets = [os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["MLFLOW_TRACKING_PASSWORD"]]
secrets += [Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()]
client, seen = boto3.client("s3"), 0
for bucket in ("bucket", "mlflow"):
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for found in page.get("Contents", []):
            content = client.get_object(Bucket=bucket, Key=found["Key"])["Body"].read()
            seen += 1
            if any(secret.encode() in content for secret in secrets):
                print("leak", bucket, found["Key"])
print("seen", seen)
"""
# What a provider says of a node that it is about to take back.
NOTICE = """
import subprocess, sys
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
(node,) = (each["NodeID"] for each in ray.nodes() if each["Alive"] and each["NodeManagerAddress"] == sys.argv[1])
words = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "8"]
subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node, *words], check=True)
"""
# A data task that takes 8 GiB when it is told to, but not when it is run again.
HUNGRY = """
import sys, time
from pathlib import Path
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
tries = Path(sys.argv[1], "tries")
def eat(row):
    with tries.open("a") as told:
        told.write("x")
    if len(tries.read_text()) == 1:
        held = b"x" * (8 * 2**30)
        time.sleep(60)
    return {"tries": len(tries.read_text())}
while not tries.with_name("now").exists():
    time.sleep(0.1)
found = ray.data.range(1).map(eat, num_cpus=0, resources={"two": 1}).take_all()
print("tries:", found[0]["tries"])
"""
WAIT = """
import sys, time
from vitray import storage
while not storage.exists(sys.argv[1]):
    time.sleep(0.1)
"""


class Cluster:
    """A Ray on the hosts of a site."""

    def __init__(self, site: Site, logs: Path) -> None:
        self.site, self.logs = site, logs
        self.head = site.hosts["head"]

    def start(self, host: Host, more: dict[str, str] | None = None, resources: str = "{}") -> None:
        """Begin Ray on a host, and wait until it is up."""
        where = [f"--node-ip-address={host.address}", "--object-store-memory=1000000000", "--disable-usage-stats"]
        if host is self.head:
            where += ["--head", "--port=6379", "--num-cpus=1", "--dashboard-host=127.0.0.1"]
            where += [f"--temp-dir={host.own}/ray"]
        else:
            where += [f"--address={self.head.address}:6379", "--num-cpus=2", f"--resources={resources}"]
        log = self.logs / f"ray-{host.name}.log"
        before = log.stat().st_size if log.exists() else 0
        words = [Path(PYTHON).with_name("ray"), "start", "--block", *where]
        began = host.start(words, log, more)

        def is_up() -> bool:
            assert began.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()[before:]

        until(is_up, 240, f"Ray on {host.name}", log)

    def alive(self) -> int:
        """Nodes that the head believes to be there."""
        begin = "import ray; ray.init(log_to_driver=False, logging_level='ERROR')"
        ask = f"{begin}; print('alive:', sum(node['Alive'] for node in ray.nodes()))"
        return int(re.search(r"alive: (\d+)", self.head.call([PYTHON, "-c", ask]))[1])  # Ray may say more after it

    def train(self, name: str, workers: str = "2", out: str = "s3://bucket/runs") -> "Training":
        """Begin a run, driven from the head."""
        words = ["-m", "pipelines.train", "demo", *SETTINGS, f"compute.workers={workers}", "--name", name]
        log = self.logs / f"{name}.log"
        return Training(self, name, out, log, self.head.start([PYTHON, *words, "--out", out, "--json"], log))

    def told(self, name: str) -> dict[str, Any]:
        """What MLflow knows of a run."""
        return json.loads(self.head.call([PYTHON, "-c", ASK, name]))


class Training(NamedTuple):
    """A run on such a cluster."""

    cluster: Cluster
    name: str
    out: str
    log: Path
    process: subprocess.Popen

    def saved(self, step: int = 2 * OFTEN) -> None:
        """Wait until a checkpoint is there."""
        where = f"{self.out}/{self.name}/checkpoints/step-{step:08}/checkpoint.json"
        asked = self.cluster.head.start([PYTHON, "-c", WAIT, where], self.log.with_suffix(".wait"))

        def is_there() -> bool:
            assert self.process.poll() is None or asked.wait(60) == 0, self.said
            return asked.poll() == 0

        until(is_there, 400, where)

    @property
    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    def finish(self, whole: dict[str, Any], faults: dict[str, float] | None = None, *, exact: bool = True) -> None:
        """It came to what the undisturbed run came to; how long it stood still for each fault's time is printed."""
        assert self.process.wait(600) == 0, self.said
        told = self.cluster.told(self.name)
        assert told["status"] == "FINISHED"
        points = sorted(told["points"])
        assert [step for step, _, _ in points] == list(range(1, STEPS + 1))
        share = 0 if exact else 1e-2
        assert [loss for _, _, loss in points] == pytest.approx(
            [loss for *_, loss in sorted(whole["points"])], rel=share
        )
        for key in ("val/loss", "val/top1"):
            assert told["metrics"][key] == pytest.approx(whole["metrics"][key], rel=share, abs=0)
        times, resumed = sorted(at / 1000 for _, at, _ in points), self.said.count("resumed at step")
        print(f"{self.name}: no step for {longest_between(times):.1f} s; resumed {resumed} times")
        for (what, since), (_, before) in itertools.pairwise([*(faults or {}).items(), ("the end", 1e10)]):
            print(f"  {what}: no step for {longest_between(times, since, before):.1f} s")

    def at_work(self) -> list[Host]:
        """The hosts of its workers, once they have begun."""
        until(lambda: len(found := self._found()) == 2 and found, 120, "two hosts with a worker")
        return self._found()

    def _found(self) -> list[Host]:
        hosts = self.cluster.site.hosts.values()
        return [host for host in hosts if host.processes("ray::RayTrainWorker")]

    def resumed(self, times: int) -> int:
        """Wait until it has been resumed so often; the step it went on from."""

        def steps() -> list[str]:
            assert self.process.poll() is None, self.said
            return re.findall(r"resumed at step ([\d,]+)", self.said)

        until(lambda: len(steps()) == times, 240, f"resumed {times} times")
        return int(steps()[-1].replace(",", ""))


def longest_between(times: list[float], since: float = 0, before: float = 1e10) -> float:
    """The longest time between two of these, of which most lies within since and before."""
    return max(after - at for at, after in itertools.pairwise(times) if since <= (at + after) / 2 < before)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    assert os.geteuid() == 0, "hosts are made by root: run `make test-full` as root, or in a container"
    logs = tmp_path_factory.mktemp("logs")
    print(f"logs: {logs}")
    with tempfile.TemporaryDirectory(prefix="vr", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        environment = {
            **SHIPPED,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_raylet_start_wait_time_s": "180",
            "RAY_worker_niceness": "0",  # other tests run beside these
            "RAY_ADDRESS": "10.55.0.1:6379",
            "GLOO_SOCKET_IFNAME": "eth0",
            "VITRAY_HOME": str(folder / "own" / "home"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        site = Site(ROOT, folder, environment)
        try:
            for number, host in enumerate(("head", "one", "two"), 1):
                site.add(host, number)
            store = site.add("store", 9)
            site.environment |= start_ceph(store, logs)
            make = "import boto3; s3 = boto3.client('s3'); [s3.create_bucket(Bucket=b) for b in ('bucket', 'mlflow')]"
            store.call([PYTHON, "-c", make])
            site.environment |= start_mlflow(store, logs, PYTHON, "s3://mlflow/artifacts")
            made = Cluster(site, logs)
            for host in ("head", "one", "two"):
                made.start(site.hosts[host])
            made.head.call([PYTHON, "-m", "pipelines.shard", "demo", "s3://bucket/demo", "images=400", "image_size=32"])
            yield made
        finally:
            site.end()


@pytest.fixture(scope="module")
def undisturbed(cluster) -> dict[str, Any]:
    run = cluster.train("undisturbed")
    assert run.process.wait(600) == 0, run.said
    return cluster.told("undisturbed")


@pytest.fixture(autouse=True)
def whole(cluster) -> Iterator[None]:
    """After a fault every node is there again, and no other."""
    yield
    hosts = cluster.site.hosts
    for name in hosts.keys() - {"head", "one", "two", "store"}:
        hosts.pop(name).end()
    for number, name in enumerate(("one", "two"), 2):
        if not hosts[name].processes("raylet/raylet"):
            hosts[name].end()
            cluster.start(cluster.site.add(name, number))
    until(lambda: cluster.alive() == 3, 120, "the head hears of all")


def test_nothing_is_wrong_with_the_cluster(cluster):
    said = cluster.head.call([PYTHON, "-m", "pipelines.doctor", "s3://bucket/runs"])
    assert "nothing is wrong" in said


def test_what_comes_back_is_waited_for(cluster, undisturbed):
    """A loose cable, storage that hangs, a node's full disk, tracking that hangs: no new start for any of them."""
    run, store, one = cluster.train("patient"), cluster.site.hosts["store"], cluster.site.hosts["one"]
    faults = {}
    run.saved(40)
    faults["a cable loose for 6 s"] = time.time()
    cluster.site.cut("one")
    time.sleep(6)
    cluster.site.mend("one")
    run.saved(100)
    faults["storage hangs for 25 s"] = time.time()
    store.signal("radosgw", PAUSE)
    time.sleep(25)
    store.signal("radosgw", RESUME)
    run.saved(160)
    faults["a node's disk is full"] = time.time()
    one.fill(spare=2**25)  # 3 %: what Ray says of it goes through a log on this disk
    until(lambda: "is over 95% full" in run.said, 120, "Ray says so")
    one.fill()
    one.empty()
    run.saved(STEPS - 100)
    faults["tracking hangs to the end"] = time.time()
    store.signal("mlflow", PAUSE)
    run.saved(STEPS)
    store.signal("mlflow", RESUME)
    run.finish(undisturbed, faults)
    assert "resumed at step" not in run.said


def test_nodes_that_go_are_replaced(cluster, undisturbed):
    """One is taken back after a notice, one vanishes behind a cut cable, the raylet of one is killed."""
    cluster.start(cluster.site.add("spare", 4))
    run, faults = cluster.train("replaced"), {}
    run.saved(40)
    taken = run.at_work()[0]
    faults["a node is taken back"] = time.time()
    cluster.head.call([PYTHON, "-c", NOTICE, taken.address])
    until(lambda: "is to be taken away" in run.said, 60, "the checkpoint of the notice")
    time.sleep(8)
    taken.end()
    step = run.resumed(1)
    assert step >= int(re.search(r"taken away: step ([\d,]+) is saved", run.said)[1].replace(",", ""))
    run.saved(step + 2 * OFTEN)
    lost = run.at_work()[0]
    faults["a cable is cut, another node comes"] = time.time()
    cluster.site.cut(lost.name)
    cluster.start(cluster.site.add("another", 5))
    step = run.resumed(2)
    lost.end()
    run.saved(step + 2 * OFTEN)
    killed = run.at_work()[0]
    faults["a raylet is killed, and started again"] = time.time()
    killed.signal("raylet/raylet", KILL)
    until(lambda: not killed.processes("/bin/ray"), 60, "`ray start` ends by itself")
    cluster.start(killed)
    run.finish(undisturbed, faults)
    assert run.said.count("resumed at step") == 3


def test_nodes_that_are_lost_for_good_leave_the_others_at_work(cluster, undisturbed):
    """Nobody is told, as when the power is gone: first where images are decoded alone, then where a worker is."""
    cluster.start(cluster.site.add("spare", 4))
    run, faults = cluster.train("lost", "1..2"), {}
    run.saved(40)
    working = run.at_work()
    (idle,) = (
        host for name, host in cluster.site.hosts.items() if name not in ("head", "store") and host not in working
    )
    faults["a node without a worker"] = time.time()
    cluster.site.cut(idle.name)
    idle.end()
    run.saved(200)
    assert "resumed at step" not in run.said
    faults["a node with a worker"] = time.time()
    cluster.site.cut(working[1].name)
    working[1].end()
    run.finish(undisturbed, faults, exact=False)
    assert run.said.count("resumed at step") == 1


def test_a_full_disk_of_results_is_said_waited_for_and_gone_on_from(cluster, undisturbed):
    """Room again at the third try, then none until all are over, then the same command."""
    out, ballast = f"{cluster.site.shared}/runs", cluster.site.shared / "ballast"
    run = cluster.train("packed", out=out)
    run.saved()
    fill(cluster.site.shared)
    until(lambda: "is tried again in 20 s: " in run.said, 120, "the tries are said")
    assert "No space left on device" in run.said
    ballast.unlink()
    run.saved(STEPS // 2)
    assert "resumed at step" not in run.said
    fill(cluster.site.shared)
    assert run.process.wait(400) == 1, run.said
    assert "is tried again in 120 s" in run.said
    assert "No space left on device" in run.said.splitlines()[-1]
    ballast.unlink()
    cluster.train("packed", out=out).finish(undisturbed)


def test_memory_that_runs_out_is_waited_for_and_a_data_task_that_takes_it_is_run_again(cluster, undisturbed):
    cluster.site.hosts["two"].end()
    two = cluster.site.add("two", 3)
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(memory[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    # All hosts are on one machine: this one gives up when 7 GiB more of it are taken, of which a run takes 3, and what
    # else runs there may take 3 more or less.
    cluster.start(two, {"RAY_memory_usage_threshold": f"{1 - (free - 7 * 2**20) / total:.3f}"}, '{"two": 1}')
    # A stranger's, until a worker has been ended: later Ray would end the tasks that decode, again and again.
    two.start([PYTHON, "-c", "import time; held = b'x' * (9 * 2**30); time.sleep(300)"], cluster.logs / "stranger.log")
    run, log = cluster.train("hungry"), cluster.logs / "data.log"
    until(lambda: f"node {two.address} ran out of memory" in run.said, 240, "the worker is ended")
    two.signal("held = ", KILL)
    cluster.head.start([PYTHON, "-c", HUNGRY, cluster.site.shared], log)
    run.saved()
    (cluster.site.shared / "now").touch()
    run.finish(undisturbed)
    until(lambda: "tries: 2" in log.read_text(), 60, "the data task is run again", log)
    two.end()


def test_a_node_that_gloo_cannot_be_reached_at_is_named(cluster):
    two = cluster.site.hosts["two"]
    two.end()
    until(lambda: cluster.alive() == 2, 120, "the head hears of it")
    two = cluster.site.add("two", 3)
    cluster.start(two, {"GLOO_SOCKET_IFNAME": ""})
    words = cluster.head.command([PYTHON, "-m", "pipelines.doctor", "s3://bucket/runs"])
    environment = cluster.head.environment()
    asked = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert asked.returncode == 1
    assert "gloo would listen on 127.0.1.1" in asked.stdout
    assert "GLOO_SOCKET_IFNAME=eth0" in asked.stdout
    two.end()


def test_mlflow_keeps_out_whom_it_does_not_know(cluster, undisturbed):
    nobody = {"MLFLOW_TRACKING_USERNAME": "", "MLFLOW_TRACKING_PASSWORD": ""}
    for uid, visitor in (("nobody", nobody), ("stranger", {"MLFLOW_TRACKING_PASSWORD": "not the password"})):
        said = cluster.head.call([PYTHON, "-c", VISIT, uid], visitor)
        assert "401" in said
        assert "not authenticated" in said
    said = cluster.head.call([PYTHON, "-c", OTHER])
    assert "seen" not in said
    assert said.count("403") == 3
    assert "runs 0" in said
    # What a wrong password has held up arrives with the right one.
    cluster.head.call([PYTHON, "-m", "pipelines.track", "flush"])
    assert cluster.head.call([PYTHON, "-c", VISIT, "owner"]).strip() == "None"
    visits = "from mlflow import MlflowClient; found = MlflowClient().search_runs(['0', '1', '2'])"
    visits += "; print(sum(run.info.run_name == 'visit' for run in found))"
    assert cluster.head.call([PYTHON, "-c", visits]).strip() == "3"


def test_no_secret_is_written_or_listed(cluster, undisturbed):
    """The keys to storage, cluster and tracking, of which every process above had the use."""
    environment = cluster.site.environment
    planted = [SECRET, environment["MLFLOW_TRACKING_PASSWORD"], Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text()]
    assert "leak" not in (said := cluster.head.call([PYTHON, "-c", LEAKS]))
    assert int(said.split()[-1]) > 20
    nodes = [cluster.site.hosts[name] for name in ("head", "one", "two")]
    files = [path for path in cluster.logs.iterdir() if path.stem not in ("mon", "osd", "gateway")]
    for host in nodes:
        files += [path for path in host.seen(host.own).rglob("*") if path.is_file() and not path.is_symlink()]
        files += [Path(f"/proc/{pid}/cmdline") for pid in host.processes()]
    assert len(files) > 100
    for path in files:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in planted), path
    dump = dump_mlflow(cluster.site.hosts["store"])
    assert "undisturbed" in dump
    assert not any(secret in dump for secret in planted)
