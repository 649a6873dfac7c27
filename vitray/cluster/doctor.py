"""A cluster looked at before a long run: every node is asked, and what would end the run later is said now.

A witness on each node tells what that node has and reaches, and all of them add a number up, as training does.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitray.cluster.storage_check import preflight
from vitray.errors import ConfigError, one_line, redact_uri
from vitray.tracking.mlflow_client import import_mlflow, open_client, tracking_uri

PACKAGES = ("vitray", "ray", "torch", "torchvision", "pyarrow", "mlflow", "boto3")
# Seconds for a node to start a process of ours, which loads torch and MLflow, and for what it is then asked.
PATIENCE = 180
# Seconds between two clocks: metrics of a run are ordered by time; S3 refuses what is 15 minutes off.
SKEW = 2.0
# Ray stops writing objects where a disk is 95 % full; checkpoints and spilled images need room before that.
FULLEST = 0.9
SMALLEST_STORE = 1e9
# Files and connections of a raylet: Ray asks for so many in its own guide.
FEWEST_FILES = 4096


class Seen(NamedTuple):
    """What a node says of itself."""

    name: str
    address: str
    cpus: float
    gpus: float
    """Of these two, what Ray gives out."""
    store: float
    """Bytes of the object store."""
    versions: dict[str, str]
    devices: int
    """GPUs that the driver lists."""
    usable: int
    """GPUs that torch can compute on."""
    disk: float
    """Share of the disk below Ray's folder that is used."""
    files: int
    """Files that a process may open."""
    clock: float
    """Seconds ahead of the clock here."""
    listens: str
    """The address at which gloo would be reached."""
    interface: str | None
    """The network interface that has the node's address."""
    storage: str | None
    """What keeps results from lying where they should; None where nothing does."""
    tracking: str | None
    """What keeps records from MLflow."""


class Fault(NamedTuple):
    """What is wrong on a node, and what to do."""

    node: str
    what: str
    wanted: str


class Health(NamedTuple):
    """What a cluster has, and what is wrong with it."""

    nodes: list[Seen]
    faults: list[Fault]


class Witness:
    """On a node, for as long as it is asked."""

    def look(self, address: str, place: str, uri: str) -> dict[str, Any]:
        """What this node has and reaches."""
        import psutil
        import torch
        from ray._private.accelerators import NvidiaGPUAcceleratorManager

        listens = _gloo_address()
        return {
            "name": socket.gethostname(),
            "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
            "devices": NvidiaGPUAcceleratorManager.get_current_node_num_accelerators(),
            "usable": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "disk": _used(_ray_folder()),
            "files": psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0],
            "listens": listens,
            "interface": next((name for name, at in _interfaces().items() if at == address), None),
            "storage": _said(lambda: preflight(place)),
            "tracking": None if uri.startswith("sqlite:") else _said(lambda: _ask_tracking(uri)),
        }

    def clock(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def free_port(self) -> int:
        """A port that nobody listens on."""
        with socket.socket() as free:
            free.bind(("", 0))
            return free.getsockname()[1]

    def meet(self, rank: int, world: int, rendezvous: str, backend: str) -> str | None:
        """Add a number up with the other nodes, by gloo or on the first GPU by nccl; what keeps them apart, or None."""
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


def examine(place: str) -> Health:
    """The nodes of the running Ray, results lying at `place`, and what is wrong with them."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    uri = tracking_uri()
    witnesses: dict[str, Any] = {}
    for node in nodes:
        at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        witnesses[node["NodeID"]] = ray.remote(Witness).options(num_cpus=0, scheduling_strategy=at).remote()
    looks = {
        node["NodeID"]: witnesses[node["NodeID"]].look.remote(node["NodeManagerAddress"], place, uri) for node in nodes
    }
    ray.wait(list(looks.values()), num_returns=len(looks), timeout=PATIENCE)
    seen: dict[str, Seen] = {}
    faults: list[Fault] = []
    for node in nodes:
        name, has = node["NodeManagerHostname"], node["Resources"]
        try:
            told: Any = ray.get(looks[node["NodeID"]], timeout=0)
            clock = _ahead(witnesses[node["NodeID"]])
        except Exception as error:  # whatever keeps a node from answering is what is looked for
            faults.append(Fault(name, f"does not answer: {one_line(error)[:300]}", "vitray installed there as here"))
            continue
        given = {"cpus": has.get("CPU", 0.0), "gpus": has.get("GPU", 0.0), "store": has.get("object_store_memory", 0.0)}
        seen[node["NodeID"]] = Seen(address=node["NodeManagerAddress"], clock=clock, **given, **told)
    works = [node for node, what in seen.items() if what.cpus or what.gpus]
    if len(nodes) > 1 and uri.startswith("sqlite:"):
        said = f"MLflow's store is a file, {redact_uri(uri)}, and the trials of a sweep run on all nodes"
        faults.append(Fault("the cluster", said, "a server: MLFLOW_TRACKING_URI=http://..."))
    faults += judge(list(seen.values())) + _meeting({node: (seen[node], witnesses[node]) for node in works})
    for witness in witnesses.values():
        ray.kill(witness)
    return Health(list(seen.values()), faults)


def judge(nodes: Sequence[Seen]) -> list[Fault]:
    """What is wrong with what nodes say, each for itself and beside the others."""
    if not nodes:
        return []
    faults = []
    usual = {
        name: Counter(node.versions.get(name, "none") for node in nodes).most_common(1)[0][0]
        for name in ("python", *PACKAGES)
    }
    median = statistics.median([node.clock for node in nodes])
    is_cluster = len(nodes) > 1
    for node in nodes:
        found = [
            (
                f"{name} {node.versions.get(name, 'none')}, and the others have {version}",
                "the same on all nodes: `make up`, or pip install -c constraints.txt",
            )
            for name, version in usual.items()
            if node.versions.get(name, "none") != version
        ]
        if node.devices < node.gpus or node.usable < node.gpus:
            seen = f"the driver lists {node.devices} and torch can use {node.usable}"
            found.append((f"Ray gives out {node.gpus:g} GPUs, {seen}", "NVIDIA's driver (nvidia-smi lists the GPUs)"))
        elif node.devices > node.gpus:
            said = f"the driver lists {node.devices} GPUs, and Ray gives out {node.gpus:g}"
            found.append((said, "ray start without --num-gpus, or with all of them"))
        if node.disk > FULLEST:
            said = f"the disk of Ray's folder is {node.disk:.0%} full; at 95 % Ray stops"
            found.append((said, "room there, or `ray start --temp-dir` on another disk"))
        if node.store < SMALLEST_STORE and (node.cpus or node.gpus):
            said = f"an object store of {node.store / 1e9:.1f} GB, which decoded images soon fill"
            found.append((said, "ray start --object-store-memory, and as large a /dev/shm"))
        if node.files < FEWEST_FILES:
            found.append((f"{node.files} open files are allowed", f"ulimit -n 65536 before ray start ({FEWEST_FILES})"))
        if abs(node.clock - median) > SKEW:
            off = f"{abs(node.clock - median):.0f} s {'ahead of' if node.clock > median else 'behind'} the others"
            found.append((f"its clock is {off}", "synchronised clocks (timedatectl set-ntp true)"))
        if is_cluster and node.listens != node.address:
            interface = node.interface or "the interface of the private network"
            said = f"gloo would listen on {node.listens}, where no other node looks, instead of {node.address}"
            found.append((said, f"GLOO_SOCKET_IFNAME={interface} and NCCL_SOCKET_IFNAME={interface} at ray start"))
        found += [(f"results: {node.storage}", "what it says")] if node.storage else []
        if node.tracking:
            is_unknown = "401" in node.tracking
            wanted = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD there, or ~/.mlflow/credentials"
            found.append((f"MLflow: {node.tracking}", wanted if is_unknown else "what it says"))
        faults += [Fault(node.name, *each) for each in found]
    if is_cluster and os.environ.get("RAY_AUTH_MODE", "disabled") != "token":
        said = "Ray asks for no token: whoever reaches a port of it runs code"
        faults.append(Fault("the cluster", said, "RAY_AUTH_MODE=token at ray start and here (`ray get-auth-token`)"))
    return faults


def _meeting(witnesses: dict[str, tuple[Seen, Any]]) -> list[Fault]:
    """Let all nodes meet as workers do: on CPUs by gloo, and those with GPUs by nccl too."""
    import ray

    faults = []
    everybody = list(witnesses.values())
    for backend, pairs in {"gloo": everybody, "nccl": [pair for pair in everybody if pair[0].usable]}.items():
        if len(pairs) < 2:
            continue
        first, host = pairs[0]
        rendezvous = f"tcp://{first.address}:{ray.get(host.free_port.remote())}"
        asked = [each.meet.remote(rank, len(pairs), rendezvous, backend) for rank, (_, each) in enumerate(pairs)]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=90)
        for (node, _), answer in zip(pairs, asked, strict=True):
            said = ray.get(answer) if answer in answered else "no answer within 90 seconds"
            if said:
                interface = f"{backend.upper()}_SOCKET_IFNAME"
                wanted = f"all ports open among the nodes, and {interface} set to their network's interface"
                faults.append(Fault(node.name, f"does not meet the other nodes by {backend}: {said}", wanted))
    return faults


# ---- on a node -------------------------------------------------------------------------------------------------------


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _ray_folder() -> Path:
    import ray

    return Path(ray._private.worker._global_node.get_session_dir_path())  # type: ignore[attr-defined]


def _used(folder: Path) -> float:
    usage = shutil.disk_usage(folder)
    return 1 - usage.free / usage.total


def _interfaces() -> dict[str, str]:
    """{interface: its address}."""
    import psutil

    found = psutil.net_if_addrs().items()
    return {name: at.address for name, held in found for at in held if at.family == socket.AF_INET}


def _gloo_address() -> str:
    """Where gloo listens: at the interface that it is told, or at what the host's name stands for."""
    if told := os.environ.get("GLOO_SOCKET_IFNAME"):
        return next((at for name, at in _interfaces().items() if name == told), f"{told}, which is not there")
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "a name that stands for nothing"


def _ask_tracking(uri: str) -> None:
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "20"
    import_mlflow()
    try:
        open_client(uri).search_experiments(max_results=1)
    except Exception as error:
        raise ConfigError(f"{redact_uri(uri)} does not answer: {one_line(error)[:200]}") from None


def _said(check: Any) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def _ahead(witness: Any) -> float:
    """Seconds that a node's clock is ahead of ours: of several answers, by the fastest."""
    import ray

    asked = []
    for _ in range(3):
        before = time.time()
        told: Any = ray.get(witness.clock.remote(), timeout=PATIENCE)
        asked.append((time.time() - before, told - (before + time.time()) / 2))
    return min(asked)[1]
