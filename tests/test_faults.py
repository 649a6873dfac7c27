"""Fault injection on a cluster of several machines: no fault loses a step or a record.

A head and two nodes train over their own network, with data and results on Ceph's S3 and MLflow on PostgreSQL. After
each fault the run must equal an undisturbed one: the same losses, each step once. The lost time is printed.
"""

import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hosts import FREE_MEMORY, KILL, MEMORY, PAUSE, RESUME, Host, Site, fill, until
from servers import SECRET, dump_mlflow, set_mlflow_password, start_ceph, start_mlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
# The node settings as shipped.
NODE_SETTINGS = re.compile(r"(RAY_(?:health_check|grpc_client|preload)_\w+)=(\S+)")
SHIPPED = dict(NODE_SETTINGS.findall((ROOT / "cluster.yaml").read_text()))
STEPS, SAVE_EVERY = 400, 20
SETTINGS = [
    "model.name=vit_u2x2_8",
    "model.image_size=32",
    "data.url=s3://bucket/demo",
    f"optim.duration={STEPS} steps",
    "optim.warmup=4 steps",
    "optim.batch=16",
    f"checkpoint.every={SAVE_EVERY} steps",
    f"evaluate.every={STEPS // 2} steps",
    "tracking.every=1 step",
    "tracking.register_as=null",
    "compute.cpus=1.5",  # no node has room for both workers
]

# Prints the MLflow record of a run.
QUERY = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs(["0", "1", "2"], f"attributes.run_name = '{sys.argv[1]}'")
points = client.get_metric_history(run.info.run_id, "train/loss")
points = [[point.step, point.timestamp, point.value] for point in points]
print(json.dumps({"status": run.info.status, "points": points, "metrics": run.data.metrics}))
"""
# Records one metric as another MLflow user, and prints the result of the upload.
VISIT = """
import sys
from vitray.tracking.tracker import TrackedRun, Tracker
with Tracker(TrackedRun(sys.argv[1], "visit", "vitray"), {}, {}, "") as tracker:
    tracker.metrics(1, {"val/loss": 1.0})
    print(tracker.flush(10))
"""
# Reads the runs of jobs, and tries to change one and to make a user.
OTHER_USER = """
import os
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.server import get_app_client
client, users = MlflowClient(), get_app_client("basic-auth", os.environ["MLFLOW_TRACKING_URI"])
run = client.search_runs(["0", "1", "2"])[0].info.run_id
print("seen", client.get_run(run).info.run_name, len(client.list_artifacts(run)))
for request in (
    lambda: client.delete_run(run),
    lambda: client.log_metric(run, "val/loss", 0.0),
    lambda: users.create_user("third", "a long password"),
):
    try:
        print("done", request())
    except MlflowException as error:
        print(error)
"""
# Lists the S3 objects that contain a secret of this host's environment, or the cluster token.
LEAKS = """
import os
from pathlib import Path
import boto3
secrets = [os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["MLFLOW_TRACKING_PASSWORD"]]
secrets += [Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()]
client, seen = boto3.client("s3"), 0
for bucket in ("bucket", "mlflow"):
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for listed in page.get("Contents", []):
            content = client.get_object(Bucket=bucket, Key=listed["Key"])["Body"].read()
            seen += 1
            if any(secret.encode() in content for secret in secrets):
                print("leak", bucket, listed["Key"])
print("seen", seen)
"""
# A data task that waits in its first try only.
MEMORY_TASK = """
import sys, time
from pathlib import Path
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
tries = Path(sys.argv[1], "tries")
def eat(row):
    with tries.open("a") as log:
        log.write("x")
    if len(tries.read_text()) == 1:
        time.sleep(600)
    return {"tries": len(tries.read_text())}
rows = ray.data.range(1).map(eat, num_cpus=0, resources={"two": 1}).take_all()
print("tries:", rows[0]["tries"])
"""
WAIT = """
import sys, time
from vitray.system import storage
while not storage.exists(sys.argv[1]):
    time.sleep(0.1)
"""


class Cluster:
    """A Ray cluster on the hosts of a site."""

    def __init__(self, site: Site, logs: Path) -> None:
        self.site, self.logs = site, logs
        self.head = site.hosts["head"]

    def start(self, host: Host, more: dict[str, str] | None = None, resources: str = "{}") -> None:
        """Start Ray on a host and wait until it runs."""
        options = [f"--node-ip-address={host.address}", "--object-store-memory=1000000000", "--disable-usage-stats"]
        options += ["--memory=4000000000"]  # else Ray subtracts the memory that other tests use
        if host is self.head:
            options += ["--head", "--port=6379", "--num-cpus=1", "--dashboard-host=127.0.0.1"]
            options += [f"--temp-dir={host.own}/ray"]
        else:
            options += [f"--address={self.head.address}:6379", "--num-cpus=2", f"--resources={resources}"]
        log = self.logs / f"ray-{host.name}.log"
        before = log.stat().st_size if log.exists() else 0
        command = [Path(PYTHON).with_name("ray"), "start", "--block", *options]
        process = host.start(command, log, more)

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()[before:]

        until(is_up, 240, f"Ray on {host.name}", log)

    def alive(self) -> int:
        """Return the number of nodes that the head believes to be alive."""
        connect = "import ray; ray.init(log_to_driver=False, logging_level='ERROR')"
        code = f"{connect}; print('alive:', sum(node['Alive'] for node in ray.nodes()))"
        return int(re.search(r"alive: (\d+)", self.head.call([PYTHON, "-c", code]))[1])  # Ray may log more lines

    def announce(self, host: Host, seconds: float) -> None:
        """Have a stand-in for EC2's metadata service announce the end of a host, and the poller hear of it."""
        log = self.logs / f"metadata-{host.name}.log"
        host.start([PYTHON, ROOT / "tests" / "ec2_metadata.py", "8123", seconds], log)
        until(lambda: log.exists() and "up" in log.read_text(), 30, "the metadata service", log)
        host.call([PYTHON, "-m", "vitray.cluster.spot"], {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:8123"})

    def train(
        self, name: str, workers: str = "2", out: str = "s3://bucket/runs", settings: Sequence[str] = ()
    ) -> "Training":
        """Start a run, with the driver on the head."""
        changed = {setting.partition("=")[0] for setting in settings}
        kept = [setting for setting in SETTINGS if setting.partition("=")[0] not in changed]
        args = ["-m", "pipelines.train", "demo", *kept, *settings, f"compute.workers={workers}", "--name", name]
        log = self.logs / f"{name}.log"
        return Training(self, name, out, log, self.head.start([PYTHON, *args, "--out", out, "--json"], log))

    def record(self, name: str) -> dict[str, Any]:
        """Return the MLflow record of a run."""
        return json.loads(self.head.call([PYTHON, "-c", QUERY, name]))


class Training(NamedTuple):
    """A run on such a cluster."""

    cluster: Cluster
    name: str
    out: str
    log: Path
    process: subprocess.Popen

    def await_checkpoint(self, step: int = 2 * SAVE_EVERY) -> None:
        """Wait for the checkpoint of a step."""
        url = f"{self.out}/{self.name}/checkpoints/step-{step:08}/checkpoint.json"
        waiting = self.cluster.head.start([PYTHON, "-c", WAIT, url], self.log.with_suffix(".wait"))

        def is_there() -> bool:
            assert self.process.poll() is None or waiting.wait(60) == 0, self.output
            return waiting.poll() == 0

        until(is_there, 400, url)

    @property
    def output(self) -> str:
        """The log so far."""
        return self.log.read_text()

    def finish(self, expected: dict[str, Any], faults: dict[str, float] | None = None, *, exact: bool = True) -> None:
        """Compare the finished run with the undisturbed one, and print how long each fault stopped it."""
        assert self.process.wait(600) == 0, self.output
        record = self.cluster.record(self.name)
        assert record["status"] == "FINISHED"
        points = sorted(record["points"])
        assert [step for step, _, _ in points] == list(range(1, STEPS + 1))
        share = 0 if exact else 1e-2
        assert [loss for _, _, loss in points] == pytest.approx(
            [loss for *_, loss in sorted(expected["points"])], rel=share
        )
        for key in ("val/loss", "val/top1"):
            assert record["metrics"][key] == pytest.approx(expected["metrics"][key], rel=share, abs=0)
        times, resumed = sorted(at / 1000 for _, at, _ in points), self.output.count("resumed at step")
        print(f"{self.name}: no step for {longest_between(times):.1f} s; resumed {resumed} times")
        for (fault, since), (_, before) in itertools.pairwise([*(faults or {}).items(), ("the end", 1e10)]):
            print(f"  {fault}: no step for {longest_between(times, since, before):.1f} s")

    def worker_hosts(self) -> list[Host]:
        """Wait for two workers and return their hosts."""
        until(lambda: len(self._worker_hosts()) == 2, 120, "two hosts with a worker")
        return self._worker_hosts()

    def _worker_hosts(self) -> list[Host]:
        hosts = self.cluster.site.hosts.values()
        return [host for host in hosts if host.processes("ray::RayTrainWorker")]

    def await_resume(self, times: int) -> int:
        """Wait until the run has been resumed `times` times, and return the step that it resumed from."""

        def steps() -> list[str]:
            assert self.process.poll() is None, self.output
            return re.findall(r"resumed at step ([\d,]+)", self.output)

        until(lambda: len(steps()) == times, 240, f"resumed {times} times")
        return int(steps()[-1].replace(",", ""))


def longest_between(times: list[float], since: float = 0, before: float = 1e10) -> float:
    """Return the longest gap between consecutive times, of those with the middle from `since` to `before`."""
    return max(after - at for at, after in itertools.pairwise(times) if since <= (at + after) / 2 < before)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    assert os.geteuid() == 0, "simulated hosts need root: run `make test-full` as root, or in a container"
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
            "RAY_worker_niceness": "0",  # other tests run at the same time
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
            code = "import boto3; s3 = boto3.client('s3'); [s3.create_bucket(Bucket=b) for b in ('bucket', 'mlflow')]"
            store.call([PYTHON, "-c", code])
            site.environment |= start_mlflow(store, logs, PYTHON, "s3://mlflow/artifacts")
            ray_cluster = Cluster(site, logs)
            for host in ("head", "one", "two"):
                ray_cluster.start(site.hosts[host])
            ray_cluster.head.call(
                [PYTHON, "-m", "pipelines.shard", "demo", "s3://bucket/demo", "images=400", "image_size=32"]
            )
            yield ray_cluster
        finally:
            site.end()


@pytest.fixture(scope="module")
def undisturbed(cluster) -> dict[str, Any]:
    run = cluster.train("undisturbed")
    assert run.process.wait(600) == 0, run.output
    return cluster.record("undisturbed")


@pytest.fixture(autouse=True)
def restore_nodes(cluster) -> Iterator[None]:
    """Restore the original nodes after each test."""
    yield
    hosts = cluster.site.hosts
    for name in hosts.keys() - {"head", "one", "two", "store"}:
        hosts.pop(name).end()
    for number, name in enumerate(("one", "two"), 2):
        if not hosts[name].processes("raylet/raylet"):
            hosts[name].end()
            cluster.start(cluster.site.add(name, number))
    until(lambda: cluster.alive() == 3, 120, "three nodes")


def test_the_doctor_finds_no_problems(cluster):
    report = cluster.head.call([PYTHON, "-m", "pipelines.doctor", "s3://bucket/runs"])
    assert "no problems found" in report


def test_temporary_outages_cause_no_restart(cluster, undisturbed):
    """A network outage, unresponsive storage, a full disk of a node, and unresponsive tracking."""
    run, store, one = cluster.train("patient"), cluster.site.hosts["store"], cluster.site.hosts["one"]
    faults = {}
    run.await_checkpoint(40)
    faults["a cable loose for 6 s"] = time.time()
    cluster.site.cut("one")
    time.sleep(6)
    cluster.site.mend("one")
    run.await_checkpoint(100)
    faults["storage hangs for 25 s"] = time.time()
    store.signal("radosgw", PAUSE)
    time.sleep(25)
    store.signal("radosgw", RESUME)
    run.await_checkpoint(160)
    faults["a node's disk is full"] = time.time()
    one.fill(spare=2**25)  # 3 %, because Ray's warning needs a log on this disk
    until(lambda: "is over 95% full" in run.output, 120, "Ray's warning")
    one.fill()
    one.empty()
    run.await_checkpoint(STEPS - 100)
    faults["tracking hangs to the end"] = time.time()
    store.signal("mlflow", PAUSE)
    run.await_checkpoint(STEPS)
    store.signal("mlflow", RESUME)
    run.finish(undisturbed, faults)
    assert "resumed at step" not in run.output


def test_lost_nodes_are_replaced(cluster, undisturbed):
    """One node is preempted after a notice, one is cut off, and one loses its raylet."""
    cluster.start(cluster.site.add("spare", 4))
    run, faults = cluster.train("replaced"), {}
    run.await_checkpoint(40)
    preempted = run.worker_hosts()[0]
    faults["a node is preempted"] = time.time()
    cluster.announce(preempted, 8)
    until(lambda: "is about to be preempted" in run.output, 60, "the checkpoint of the notice")
    time.sleep(8)
    preempted.end()
    step = run.await_resume(1)
    assert f"preempted: step {step:,} is saved" in run.output
    run.await_checkpoint(step // SAVE_EVERY * SAVE_EVERY + 2 * SAVE_EVERY)
    lost = run.worker_hosts()[0]
    faults["a cable is cut, another node comes"] = time.time()
    cluster.site.cut(lost.name)
    cluster.start(cluster.site.add("another", 5))
    step = run.await_resume(2)
    lost.end()
    run.await_checkpoint(step // SAVE_EVERY * SAVE_EVERY + 2 * SAVE_EVERY)
    killed = run.worker_hosts()[0]
    faults["a raylet is killed, and started again"] = time.time()
    killed.signal("raylet/raylet", KILL)
    until(lambda: not killed.processes("/bin/ray"), 60, "`ray start` ends by itself")
    cluster.start(killed)
    run.finish(undisturbed, faults)
    assert run.output.count("resumed at step") == 3


def test_workers_leave_a_node_before_it_is_preempted(cluster):
    """The notice comes between two records. The workers move while the node still runs, and no step is lost."""
    cluster.start(cluster.site.add("spare", 4))
    rare = [f"{name}.every=100000 steps" for name in ("tracking", "evaluate", "checkpoint")]
    run = cluster.train("drained", settings=["optim.duration=100000 steps", *rare])
    until(lambda: "images/s" in run.output, 240, "the first steps")
    preempted = run.worker_hosts()[0]
    cluster.announce(preempted, 12)
    try:
        step = run.await_resume(1)
        assert preempted not in run.worker_hosts()
    finally:
        preempted.end()  # a draining node takes no workers
    assert f"preempted: step {step:,} is saved" in run.output
    until(lambda: "images/s" in run.output.partition("resumed at step")[2], 240, "steps on the other node")
    cluster.head.signal("pipelines.train", signal.SIGTERM)
    assert run.process.wait(60) == 128 + signal.SIGTERM, run.output
    last = int(re.findall(r"  step ([\d,]+) is saved", run.output)[-1].replace(",", ""))
    assert last > step


def test_training_continues_on_the_remaining_nodes(cluster, undisturbed):
    """Two silent power losses: first of a node that only decodes images, then of one with a worker."""
    cluster.start(cluster.site.add("spare", 4))
    run, faults = cluster.train("lost", "1..2"), {}
    run.await_checkpoint(40)
    worker_hosts = run.worker_hosts()
    (idle,) = (
        host for name, host in cluster.site.hosts.items() if name not in ("head", "store") and host not in worker_hosts
    )
    faults["a node without a worker"] = time.time()
    cluster.site.cut(idle.name)
    idle.end()
    run.await_checkpoint(200)
    assert "resumed at step" not in run.output
    faults["a node with a worker"] = time.time()
    cluster.site.cut(worker_hosts[1].name)
    worker_hosts[1].end()
    run.finish(undisturbed, faults, exact=False)
    assert run.output.count("resumed at step") == 1


def test_a_full_disk_of_results_is_logged_retried_and_resumed_from(cluster, undisturbed):
    """Free space at the third try, then none for all tries, then the same command again."""
    out, ballast = f"{cluster.site.shared}/runs", cluster.site.shared / "ballast"
    run = cluster.train("packed", out=out)
    run.await_checkpoint()
    fill(cluster.site.shared)
    until(lambda: "is tried again in 20 s: " in run.output, 120, "the retry message")
    assert "No space left on device" in run.output
    ballast.unlink()
    run.await_checkpoint(STEPS // 2)
    assert "resumed at step" not in run.output
    fill(cluster.site.shared)
    assert run.process.wait(400) == 1, run.output
    assert "is tried again in 120 s" in run.output
    assert "No space left on device" in run.output.splitlines()[-1]
    ballast.unlink()
    cluster.train("packed", out=out).finish(undisturbed)


def test_an_out_of_memory_kill_causes_a_backoff_and_a_killed_data_task_is_retried(cluster, undisturbed):
    cluster.site.hosts["two"].end()
    two = cluster.site.add("two", 3)
    cluster.start(two, resources='{"two": 1}')
    until(lambda: cluster.alive() == 3, 120, "three nodes")
    run, log, tries = cluster.train("hungry"), cluster.logs / "data.log", cluster.site.shared / "tries"
    low = MEMORY // 25  # Ray kills workers of a node that has less than 5 % free
    run.worker_hosts()
    two.report_memory(low)
    kill = rf"node {two.address} ran out of memory, [\d.]+GB of {MEMORY / 2**20:.2f}GB taken"
    until(lambda: re.search(kill, run.output), 120, "the kill")
    two.report_memory(FREE_MEMORY)
    run.await_checkpoint()
    cluster.head.start([PYTHON, "-c", MEMORY_TASK, tries.parent], log)
    until(tries.exists, 120, "the data task", log)
    two.report_memory(low)
    until(lambda: tries.stat().st_size == 2 or not two.processes("ray::Map(eat)"), 60, "the kill of the data task")
    two.report_memory(FREE_MEMORY)
    until(lambda: "tries: 2" in log.read_text(), 120, "the retry of the data task", log)
    run.finish(undisturbed)
    two.end()


def test_a_node_that_gloo_cannot_reach_is_named(cluster):
    two = cluster.site.hosts["two"]
    two.end()
    until(lambda: cluster.alive() == 2, 120, "two nodes")
    two = cluster.site.add("two", 3)
    cluster.start(two, {"GLOO_SOCKET_IFNAME": ""})
    command = cluster.head.command([PYTHON, "-m", "pipelines.doctor", "s3://bucket/runs"])
    environment = cluster.head.environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "gloo would listen on 127.0.1.1" in done.stdout
    assert "GLOO_SOCKET_IFNAME=eth0" in done.stdout
    two.end()


def test_mlflow_rejects_unknown_users(cluster, undisturbed):
    anonymous = {"MLFLOW_TRACKING_USERNAME": "", "MLFLOW_TRACKING_PASSWORD": ""}
    for uid, environment in (("nobody", anonymous), ("stranger", {"MLFLOW_TRACKING_PASSWORD": "not the password"})):
        output = cluster.head.call([PYTHON, "-c", VISIT, uid], environment)
        assert "401" in output
        assert "not authenticated" in output
    # A person sees the runs of jobs and changes none; neither a person nor a job may make users.
    store, tracking = (
        cluster.site.hosts["store"],
        {"MLFLOW_TRACKING_URI": cluster.site.environment["MLFLOW_TRACKING_URI"]},
    )
    password = set_mlflow_password(store, PYTHON, tracking, "other")
    person = {"MLFLOW_TRACKING_USERNAME": "other", "MLFLOW_TRACKING_PASSWORD": password}
    output = cluster.head.call([PYTHON, "-c", OTHER_USER], person)
    assert "seen" in output
    assert "done" not in output
    assert output.count("403") == 3
    renewed = set_mlflow_password(store, PYTHON, tracking, "other")
    assert renewed != password
    make_user = "from mlflow.server import get_app_client as client; import os"
    make_user += "; client('basic-auth', os.environ['MLFLOW_TRACKING_URI']).create_user('third', 'a long password')"
    with pytest.raises(AssertionError, match="403"):
        cluster.head.call([PYTHON, "-c", make_user])
    # Records that were delayed by a wrong password are uploaded with the right one.
    cluster.head.call([PYTHON, "-m", "pipelines.sync"])
    assert cluster.head.call([PYTHON, "-c", VISIT, "owner"]).strip() == "None"
    visits = "from mlflow import MlflowClient; runs = MlflowClient().search_runs(['0', '1', '2'])"
    visits += "; print(sum(run.info.run_name == 'visit' for run in runs))"
    assert cluster.head.call([PYTHON, "-c", visits]).strip() == "3"


def test_no_secret_is_written_or_listed(cluster, undisturbed):
    """Keys of storage, cluster and tracking, which every process above has used."""
    environment = cluster.site.environment
    planted = [SECRET, environment["MLFLOW_TRACKING_PASSWORD"], Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text()]
    assert "leak" not in (output := cluster.head.call([PYTHON, "-c", LEAKS]))
    assert int(output.split()[-1]) > 20
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
