"""A check of every node of a cluster before a long run.

An actor on each node reports hardware, versions and connections; all of them run an all-reduce, as training does.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitray.cluster.storage_check import check_writable
from vitray.errors import ConfigError, one_line, redact_uri
from vitray.system import storage
from vitray.system.mlflow_client import import_mlflow, in_time, open_client, tracking_uri

PACKAGES = ("vitray", "ray", "torch", "torchvision", "pyarrow", "mlflow", "boto3")
# Seconds for a node to start an actor, which imports torch and MLflow, and to answer.
PROBE_TIMEOUT = 180
# Seconds between two clocks: metrics of a run are ordered by time; S3 refuses requests that are 15 minutes off.
MAX_CLOCK_SKEW = 2.0
# Ray stops writing objects where a disk is 95 % full; checkpoints and spilled images need space before that.
MAX_DISK_SHARE = 0.9
MIN_OBJECT_STORE = 1e9
# Files and connections of a raylet, as Ray's own guide recommends.
MIN_OPEN_FILES = 4096
# Part of the error of MLflow's client where a server asks for a password.
UNAUTHORIZED = "error code 401"


class NodeProbe(NamedTuple):
    """The facts about one node."""

    name: str
    address: str
    cpus: float
    gpus: float  # GPUs that Ray assigns
    store: float  # bytes of the object store
    versions: dict[str, str]
    devices: int  # GPUs that NVIDIA's driver lists
    usable: int  # GPUs that torch can compute on
    disk: float  # the used share of the disk with Ray's folder
    files: int  # files that a process may open
    clock: float  # seconds ahead of the local clock
    listens: str  # the address that gloo listens on
    interface: str | None  # the network interface that has the node's address
    storage: str | None  # the error of writing results, or None
    tracking: str | None  # the error of reaching MLflow, or None


class Finding(NamedTuple):
    """A problem on a node, and its remedy."""

    node: str
    problem: str
    remedy: str


class ProbeActor:
    """The process that inspects one node."""

    def probe(self, node: dict[str, Any], results_url: str, marker: str, uri: str) -> NodeProbe:
        """Return the facts about this node, an entry of ray.nodes(); its clock is left to the driver.

        `marker` is a file that the driver has written below `results_url`, if that is a path.
        """
        import psutil
        import torch

        address, resources = node["NodeManagerAddress"], node["Resources"]
        disk = shutil.disk_usage(Path(node["ObjectStoreSocketName"]).parent)
        return NodeProbe(
            name=socket.gethostname(),
            address=address,
            cpus=resources.get("CPU", 0.0),
            gpus=resources.get("GPU", 0.0),
            store=resources.get("object_store_memory", 0.0),
            versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
            devices=_driver_gpus(),
            usable=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            disk=1 - disk.free / disk.total,
            files=psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0],
            clock=0.0,
            listens=_gloo_address(),
            interface=next((name for name, at in _interfaces().items() if at == address), None),
            storage=_error_of(lambda: check_results(results_url, marker)),
            tracking=None if uri.startswith("sqlite:") else _error_of(lambda: _check_tracking(uri)),
        )

    def clock(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def free_port(self) -> int:
        """Return a free port."""
        with socket.socket() as free:
            free.bind(("", 0))
            return free.getsockname()[1]

    def all_reduce(self, rank: int, world: int, rendezvous: str, backend: str) -> str | None:
        """Sum a number over the nodes, by gloo or by nccl on the first GPU; return the error, or None."""
        from datetime import timedelta

        import torch
        from torch import distributed

        try:
            distributed.init_process_group(
                backend, init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=30)
            )
            total = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
            distributed.all_reduce(total)
            distributed.destroy_process_group()
        except Exception as error:
            return one_line(error)[:300]
        return None if int(total) == world else f"the sum of {world} ones is {int(total)}"


def check_cluster(results_url: str) -> tuple[list[NodeProbe], list[Finding]]:
    """Return the nodes of the running Ray and their problems; `results_url` is the destination of results."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    uri, marker = tracking_uri(), storage.join(results_url, f".vitray-doctor-{uuid.uuid4().hex[:12]}")
    if not storage.is_remote(results_url):
        _error_of(lambda: storage.write_bytes(marker, b"written by the driver of vitray doctor\n"))
    nodes = [node for node in ray.nodes() if node["Alive"]]
    actors = []
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actors.append(ray.remote(ProbeActor).options(num_cpus=0, scheduling_strategy=strategy).remote())
    pending = [actor.probe.remote(node, results_url, marker, uri) for actor, node in zip(actors, nodes, strict=True)]
    ray.wait(pending, num_returns=len(pending), timeout=PROBE_TIMEOUT)
    answers: list[tuple[NodeProbe, Any]] = []
    findings: list[Finding] = []
    for node, actor, answer in zip(nodes, actors, pending, strict=True):
        try:
            probe: NodeProbe = ray.get(answer, timeout=0)
            answers.append((probe._replace(clock=_clock_offset(actor)), actor))
        except Exception as error:  # any error of a node is a finding
            problem = f"does not answer: {one_line(error)[:300]}"
            findings.append(Finding(node["NodeManagerHostname"], problem, "the same vitray installed there as here"))
    if len(nodes) > 1 and uri.startswith("sqlite:"):
        problem = f"MLflow's store is a file, {redact_uri(uri)}, and the trials of a sweep run on all nodes"
        findings.append(Finding("the cluster", problem, "a server: MLFLOW_TRACKING_URI=http://..."))
    probes = [probe for probe, _ in answers]
    findings += find_problems(probes)
    findings += _check_all_reduce([(probe, actor) for probe, actor in answers if probe.cpus or probe.gpus])
    for actor in actors:
        ray.kill(actor)
    if not storage.is_remote(results_url):
        _error_of(lambda: storage.remove(marker))
    return probes, findings


def find_problems(nodes: Sequence[NodeProbe]) -> list[Finding]:
    """Return the problems of each node, by itself and compared with the others."""
    if not nodes:
        return []
    common = {
        name: Counter(node.versions.get(name, "none") for node in nodes).most_common(1)[0][0]
        for name in ("python", *PACKAGES)
    }
    clock = statistics.median([node.clock for node in nodes])
    is_cluster = len(nodes) > 1
    same_versions = "the same on all nodes: `make up`, or pip install -c constraints.txt"
    findings = []
    for node in nodes:
        problems = [
            (f"{name} {own}, and the others have {version}", same_versions)
            for name, version in common.items()
            if (own := node.versions.get(name, "none")) != version
        ]
        problems += _own_problems(node)
        if abs(node.clock - clock) > MAX_CLOCK_SKEW:
            skew = f"{abs(node.clock - clock):.0f} s {'ahead of' if node.clock > clock else 'behind'} the others"
            problems.append((f"its clock is {skew}", "synchronized clocks (timedatectl set-ntp true)"))
        if is_cluster and node.listens != node.address:
            interface = node.interface or "the interface of the private network"
            problem = f"gloo would listen on {node.listens} instead of {node.address}, so other nodes cannot connect"
            remedy = f"GLOO_SOCKET_IFNAME={interface} and NCCL_SOCKET_IFNAME={interface} at ray start"
            problems.append((problem, remedy))
        findings += [Finding(node.name, problem, remedy) for problem, remedy in problems]
    if is_cluster and os.environ.get("RAY_AUTH_MODE", "disabled") != "token":
        problem = "Ray asks for no token: anyone who reaches one of its ports can run code"
        findings.append(Finding("the cluster", problem, "RAY_AUTH_MODE=token at ray start and here"))
    return findings


def _own_problems(node: NodeProbe) -> Iterator[tuple[str, str]]:
    """Yield each problem of a node by itself, and its remedy."""
    if node.devices < node.gpus or node.usable < node.gpus:
        problem = f"Ray assigns {node.gpus:g} GPUs, the driver lists {node.devices} and torch can use {node.usable}"
        yield problem, "NVIDIA's driver (nvidia-smi lists the GPUs), and a torch with CUDA that it supports"
    elif node.devices > node.gpus:
        problem = f"the driver lists {node.devices} GPUs, and Ray assigns {node.gpus:g}"
        yield problem, "ray start without --num-gpus, or with all of them"
    if node.disk > MAX_DISK_SHARE:
        problem = f"the disk with Ray's folder is {node.disk:.0%} full; at 95 % Ray stops"
        yield problem, "free space there, or `ray start --temp-dir` on another disk"
    if node.store < MIN_OBJECT_STORE and (node.cpus or node.gpus):
        problem = f"an object store of {node.store / 1e9:.1f} GB, which decoded images soon fill"
        yield problem, "ray start --object-store-memory, and as large a /dev/shm"
    if node.files < MIN_OPEN_FILES:
        yield f"{node.files} open files are allowed", f"ulimit -n 65536 before ray start (at least {MIN_OPEN_FILES})"
    if node.storage:
        yield f"results: {node.storage}", "a destination that this node can write to, and that all nodes share"
    if node.tracking:
        credentials = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD there, or ~/.mlflow/credentials"
        yield f"MLflow: {node.tracking}", credentials if UNAUTHORIZED in node.tracking else "a reachable MLflow"


def _check_all_reduce(nodes: Sequence[tuple[NodeProbe, Any]]) -> list[Finding]:
    """Run an all-reduce over all nodes by gloo, and over those with GPUs by nccl; return the problems."""
    import ray

    findings = []
    for backend, members in {"gloo": nodes, "nccl": [member for member in nodes if member[0].usable]}.items():
        if len(members) < 2:
            continue
        first, host = members[0]
        rendezvous = f"tcp://{first.address}:{ray.get(host.free_port.remote())}"
        pending = [
            actor.all_reduce.remote(rank, len(members), rendezvous, backend) for rank, (_, actor) in enumerate(members)
        ]
        done, _ = ray.wait(pending, num_returns=len(pending), timeout=90)
        for (node, _), result in zip(members, pending, strict=True):
            error = ray.get(result) if result in done else "no answer within 90 seconds"
            if error:
                remedy = f"all ports open among the nodes, and {backend.upper()}_SOCKET_IFNAME set to their interface"
                findings.append(Finding(node.name, f"cannot reach the other nodes by {backend}: {error}", remedy))
    return findings


# ---- on a node -------------------------------------------------------------------------------------------------------


def _driver_gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver lists on this node."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _interfaces() -> dict[str, str]:
    """Return {interface: its IPv4 address}."""
    import psutil

    addresses = psutil.net_if_addrs().items()
    return {name: at.address for name, held in addresses for at in held if at.family == socket.AF_INET}


def _gloo_address() -> str:
    """Return the address that gloo listens on: that of GLOO_SOCKET_IFNAME, or of the host's name."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return _interfaces().get(interface, f"{interface} (no such interface)")
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "a host name without an address"


def check_results(results_url: str, marker: str) -> None:
    """Refuse a destination of results that is not writable here, or a path without the driver's `marker`."""
    check_writable(results_url)
    if not storage.is_remote(results_url) and not storage.exists(marker):
        raise ConfigError(
            f"{results_url}: is another folder here than for the driver; expected s3://bucket/key, or a path that all"
            " nodes share"
        )


def _check_tracking(uri: str) -> None:
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "20"
    import_mlflow()
    try:
        in_time(lambda: open_client(uri).search_experiments(max_results=1))
    except Exception as error:
        raise ConfigError(f"{redact_uri(uri)} does not answer: {one_line(error)[:200]}") from None


def _error_of(check: Callable[[], None]) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def _clock_offset(actor: Any) -> float:
    """Return the seconds that a node's clock is ahead of the local one, from the fastest of three answers."""
    import ray

    answers = []
    for _ in range(3):
        before = time.time()
        remote: float = ray.get(actor.clock.remote(), timeout=PROBE_TIMEOUT)
        answers.append((time.time() - before, remote - (before + time.time()) / 2))
    return min(answers)[1]
