"""A local Ray: only its owner reaches it, and SIGTERM ends each verb that starts one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import psutil
import pytest
from hosts import Site
from image_sets import write_dataset, write_network

from vitray.cluster import local_ray

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parent.parent
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def tree(process):
    """The descendants of a process that run."""
    return [each for each in process.children(recursive=True) if is_alive(each)]


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def gcs_status(address, token):
    """The gRPC status of a first call to the GCS, with a token or without one."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId", None, None)
        try:
            call(b"", metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def job_status(dashboard, token):
    """The HTTP status of a request that would run a command."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = json.dumps({"entrypoint": "true"}).encode()
    request = urllib.request.Request(
        f"http://{dashboard}/api/jobs/", data, headers | {"Content-Type": "application/json"}
    )
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code


def test_gcs_and_dashboard_refuse_requests_without_the_token(ray_cluster):
    import ray

    dashboard = ray.init(ignore_reinit_error=True).dashboard_url
    token = os.environ["RAY_AUTH_TOKEN"]
    assert [gcs_status(ray_cluster, each) for each in (None, "f" * 64, token)] == [
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.OK,
    ]
    assert [job_status(dashboard, each) for each in (None, "f" * 64)] == [401, 403]


def test_a_local_ray_listens_on_loopback_alone(ray_cluster):
    listening = {
        (process.name(), connection.laddr.ip)
        for process in tree(psutil.Process())
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert [each for each in listening if each[1] not in LOOPBACK] == []


def test_the_token_is_in_no_command_line_and_no_file(ray_cluster):
    token = os.environ["RAY_AUTH_TOKEN"].encode()
    commands = [" ".join(process.cmdline()) for process in tree(psutil.Process())]
    (logs,) = {re.search(r"--log_dir=(\S+)", command)[1] for command in commands if "gcs_server --" in command}
    assert [command for command in commands if token.decode() in command] == []
    files = [path for path in Path(logs).parent.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if token in path.read_bytes()] == []


# A caller that has imported Ray before, as notebooks do: Ray has read its settings then.
IMPORTED_BEFORE = """
import os, sys
import ray
from vitray.cluster.session import ray_session
with ray_session():
    print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "disabled"])
def test_a_ray_that_was_imported_before_has_a_token_too(tmp_path, mode):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"HOME": str(tmp_path)} | ({"RAY_AUTH_MODE": mode} if mode else {})
    command = [sys.executable, "-c", IMPORTED_BEFORE]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        address, token = process.stdout.readline().split()
        assert gcs_status(address, None) == gcs_status(address, "f" * 64) == grpc.StatusCode.UNAUTHENTICATED
        assert gcs_status(address, token) == grpc.StatusCode.OK
        process.stdin.close()
        assert process.wait(60) == 0
    assert not (tmp_path / ".ray").exists()


KEPT = """
import os, signal
import psutil, ray
from vitray.cluster.session import ray_session

def address():
    return ray.get_runtime_context().gcs_address

def raylet():
    return next(child for child in psutil.Process().children() if child.name() == "raylet")

with ray_session(keep=True):
    first = address()
before = signal.getsignal(signal.SIGTERM)
with ray_session():
    assert address() == first
    assert signal.getsignal(signal.SIGTERM) != before
assert ray.is_initialized()
raylet().kill()
raylet().wait()
with ray_session(keep=True):
    second = address()
try:
    with ray_session():
        raise KeyError
except KeyError:
    assert not ray.is_initialized()
with ray_session(keep=True):
    print(first, second, address(), *[child.pid for child in psutil.Process().children(recursive=True)])
"""


def test_a_port_that_ray_draws_for_two_of_its_servers_is_drawn_again():
    """Ray refuses a free port that is its agent's default: about one start in 28,000."""
    errors = [
        ValueError("Ray component dashboard_agent_http is trying to use a port number 52365 that is used by"),
        None,
    ]

    def init():
        if error := errors.pop(0):
            raise error

    local_ray._call(init)
    assert not errors
    errors = [ValueError("num_cpus"), ValueError("num_cpus")]
    with pytest.raises(ValueError, match="num_cpus"):
        local_ray._call(init)


@pytest.mark.slow
def test_a_kept_ray_serves_later_sessions_and_ends_with_the_process():
    done = subprocess.run([sys.executable, "-c", KEPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *addresses, last = done.stdout.splitlines()[-1].split(maxsplit=3)
    assert len(set(addresses)) == 3
    for pid in map(int, last.split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, pid


SESSION = """
import sys
from vitray.cluster.session import ray_session
with ray_session():
    import ray
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_another_host_reaches_no_process(tmp_path):
    with tempfile.TemporaryDirectory(prefix="vr", dir="/tmp") as name:
        site = Site(ROOT, Path(name), {"VITRAY_HOME": str(tmp_path / "home")})
        try:
            one, two = site.add("one", 1), site.add("two", 2)
            log = tmp_path / "log"
            command = one.command([sys.executable, "-c", SESSION])
            with (
                log.open("w") as output,
                subprocess.Popen(
                    command, env=one.environment(), stdin=subprocess.PIPE, stdout=output, stderr=output
                ) as process,
            ):
                deadline = time.monotonic() + 180
                while "127.0.0.1:" not in log.read_text():
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.1)
                ports = {line.split()[3].rpartition(":")[2] for line in one.call(["ss", "-ltnH"]).splitlines()}
                assert len(ports) > 5
                code = (
                    "import socket, sys\n"
                    "print([port for port in sys.argv[2:]"
                    " if socket.socket().connect_ex((sys.argv[1], int(port))) == 0])"
                )
                assert len(json.loads(one.call([sys.executable, "-c", code, "127.0.0.1", *ports]).replace("'", '"')))
                assert two.call([sys.executable, "-c", code, one.address, *ports]).strip() == "[]"
                process.stdin.close()
                process.wait(60)
        finally:
            site.end()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a dataset and a model folder."""
    place = tmp_path_factory.mktemp("local")
    write_dataset(place / "demo", {"train": 2000, "val": 100})
    write_network(place / "model")
    return place


def environment_of(place):
    """The environment of a command with a Ray, a token, a store and a spool of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    return own | {"MLFLOW_TRACKING_URI": f"sqlite:///{place / 'mlruns.db'}", "VITRAY_HOME": str(place / "home")}


def stopped(command, is_ready, place, sends):
    """Send SIGTERM once a function of output and processes is true; return status, output and remaining processes."""
    log = place / "log"
    with log.open("w") as output:
        options = {"cwd": ROOT, "env": environment_of(place), "stdout": output, "stderr": output}
        process = subprocess.Popen(command, process_group=0, **options)
    try:
        while not is_ready(log.read_text(), processes := tree(psutil.Process(process.pid))):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        sends(process, processes)
        status = process.wait(120)
    finally:
        process.kill()  # of a test that gives up
        process.wait()
    _, remaining = psutil.wait_procs(processes, timeout=10)
    return status, log.read_text(), [each for each in remaining if is_alive(each)]


def prints(text):
    return lambda output, _processes: text in output


def works(output, processes):
    """Whether a worker of Ray runs something, or a child of a verb that starts no Ray here, or images are served."""
    alive = [each for each in processes if is_alive(each)]
    return "serving http" in output or any(
        (each.name().startswith("ray::") and not each.name().startswith(("ray::IDLE", "ray::Dash", "ray::Runt")))
        or ("child.serve" in " ".join(each.cmdline()) and each.cpu_times().user > 3)
        for each in alive
    )


def to_the_process(process, _processes):
    process.send_signal(signal.SIGTERM)


def to_the_group(process, _processes):
    """As schedulers do, and `timeout`, which signals the process beside."""
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)


def to_all(process, processes):
    """As service managers do, whatever the groups of the processes."""
    for each in (process, *processes):
        each.send_signal(signal.SIGTERM)


VITRAY = [sys.executable, "-m"]
TINY = ["model.name=vit_u2x1_8", "model.image_size=32", "model.num_classes=10", "optim.batch=16", "compute.workers=1"]


@pytest.mark.parametrize(
    "sends",
    [pytest.param(to_the_process, marks=pytest.mark.slow), pytest.param(to_the_group, marks=pytest.mark.slow), to_all],
)
def test_sigterm_ends_a_session_and_all_its_processes(place, sends):
    script = SESSION.replace("sys.stdin.read()", "import time; time.sleep(600)")
    status, output, remaining = stopped([sys.executable, "-c", script], prints("127.0.0.1:"), place, sends)
    assert (status, remaining) == (128 + signal.SIGTERM, []), output
    assert "SIGTERM received" not in output  # Ray's own handler prints a C++ stack and aborts


@pytest.mark.slow
@pytest.mark.parametrize("sends", [to_the_group, to_all])
def test_sigterm_to_all_processes_of_a_run_leaves_a_checkpoint(place, sends):
    import mlflow

    name = sends.__name__
    settings = [*TINY, f"data.url={place / 'demo'}", "optim.duration=100000 steps", "optim.warmup=0 steps"]
    command = [*VITRAY, "pipelines.train", "demo", *settings, "tracking.register_as=null", "tracking.every=1 step"]
    command += ["--name", name, "--out", str(place / "runs")]
    status, output, remaining = stopped(command, prints("step 1/"), place, sends)
    assert (status, remaining) == (128 + signal.SIGTERM, []), output
    assert "is saved" in output
    assert list((place / "runs" / name / "checkpoints").iterdir())
    runs = mlflow.MlflowClient(f"sqlite:///{place / 'mlruns.db'}").search_runs(["1"], f"attributes.run_name = '{name}'")
    assert [run.info.status for run in runs] == ["KILLED"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("serve", ["{place}/model", "--port", "{port}"]),
        ("predict", ["{place}/model", "{place}/demo", "{place}/out", "--workers", "2", "--batch", "1"]),
        (
            "evaluate",
            ["{place}/model", "{place}/demo", "--split", "train", "--workers", "2", "--out", "{place}/scores"],
        ),
        (
            "inspection",
            [
                "{place}/model",
                "{place}/demo",
                "--split",
                "train",
                "--workers",
                "2",
                "--images",
                "1500",
                "--out",
                "{place}/inspected",
            ],
        ),
        ("shard", ["demo", "{place}/more", "images=200000", "image_size=64"]),
        ("sweep", ["demo", "demo_lr", *TINY, "data.url={place}/demo", "--name", "rates", "--out", "{place}/sweeps"]),
    ],
)
def test_sigterm_ends_each_verb_that_starts_processes(place, verb, args):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*VITRAY, f"pipelines.{verb}", *(arg.format(place=place, port=port) for arg in args)]
    status, output, remaining = stopped(command, works, place, to_the_group)
    assert (status, remaining) == (128 + signal.SIGTERM, []), output
    assert "SIGTERM received" not in output  # of Ray's own handler, which aborts
    assert "Traceback" not in output


@pytest.mark.slow
def test_two_runs_side_by_side_have_tokens_of_their_own(place):
    settings = [*TINY, f"data.url={place / 'demo'}", "optim.duration=4 steps", "optim.warmup=0 steps"]
    command = [*VITRAY, "pipelines.train", "demo", *settings, "tracking.register_as=null", "--out", str(place / "runs")]
    runs = [
        subprocess.Popen(
            [*command, "--name", name], cwd=ROOT, env=environment_of(place), stderr=subprocess.PIPE, text=True
        )
        for name in ("left", "right")
    ]
    for run in runs:
        _, errors = run.communicate(timeout=400)
        assert run.returncode == 0, errors
