"""Facts about this process's code, packages and hardware, and samples of its node's load."""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

MEGABYTE = 1e6
COMMIT, DIRTY = "VITRAY_GIT_COMMIT", "VITRAY_GIT_DIRTY"


class SystemSampler:
    """Samples of this process's node, with the names and meanings of MLflow's own system metrics."""

    def __init__(self, node: int | None = None) -> None:
        """`node` is its number among several nodes, which becomes a part of the names; None for a single one."""
        self._prefix = "system/" if node is None else f"system/node_{node}/"
        self._received, self._sent = _network_megabytes()

    def sample(self) -> dict[str, float]:
        """Return the load by name.

        CPU is the mean since the previous call, network traffic is counted from the sampler's start, and GPU values
        are of the GPU that this process uses.
        """
        memory, disk = psutil.virtual_memory(), shutil.disk_usage(".")
        received, sent = _network_megabytes()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "disk_usage_percentage": 100 * disk.used / disk.total,
            "disk_usage_megabytes": disk.used / MEGABYTE,
            "disk_available_megabytes": disk.free / MEGABYTE,
            "network_receive_megabytes": received - self._received,
            "network_transmit_megabytes": sent - self._sent,
            **_gpu_sample(),
        }
        return {f"{self._prefix}{name}": value for name, value in values.items()}


def _network_megabytes() -> tuple[float, float]:
    """Return the traffic since the boot; zeros on a machine without network."""
    network = psutil.net_io_counters()
    return (network.bytes_recv / MEGABYTE, network.bytes_sent / MEGABYTE) if network else (0.0, 0.0)


def _gpu_sample() -> dict[str, float]:
    torch = sys.modules.get("torch")
    # On a GPU that this process does not use, the query would create a context of half a gigabyte.
    if torch is None or not torch.cuda.is_initialized():
        return {}
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    values = {
        f"gpu_{device}_memory_usage_megabytes": (total - free) / MEGABYTE,
        f"gpu_{device}_memory_usage_percentage": 100 * (total - free) / total,
    }
    with contextlib.suppress(ImportError, RuntimeError):  # torch needs nvidia-ml-py here, which is optional
        values[f"gpu_{device}_utilization_percentage"] = float(torch.cuda.utilization(device))
    return values


def source_name() -> str:
    """Return the program that runs here: the address of its script, or `vitray` with a verb."""
    program, verb = sys.argv[0] or "python", next(iter(sys.argv[1:]), "")
    return f"vitray {verb}" if Path(program).name in ("vitray", "__main__.py") else program


def facts() -> dict[str, str]:
    """Return the commit, the versions and the hardware behind a measurement, without unknown ones."""
    result = commit_facts()
    result |= versions() | {
        "hardware.cpu": _cpu_model(),
        "hardware.cores": str(os.cpu_count()),
        "hardware.memory_gigabytes": f"{psutil.virtual_memory().total / 1e9:.1f}",
    }
    if shutil.which("nvidia-smi") and (
        names := command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    ):
        result["hardware.gpus"] = ", ".join(names.splitlines())
    return result


def commit_facts() -> dict[str, str]:
    """Return the commit of the repository around this process, or of the one that its job was submitted from.

    Without what is unknown; `git.dirty` ignores untracked files.
    """
    if commit := os.environ.get(COMMIT):  # a job's files have no repository around them
        facts = {"git.commit": commit, "git.dirty": os.environ.get(DIRTY, "")}
        return {name: value for name, value in facts.items() if value}
    commit = command_output("git", "rev-parse", "HEAD")
    if not commit:
        return {}
    changes = command_output("git", "status", "--porcelain", "--untracked-files=no")
    # It is unknown after a timeout in a large tree.
    return {"git.commit": commit} | ({} if changes is None else {"git.dirty": str(bool(changes)).lower()})


def commit_variables() -> dict[str, str]:
    """Return the environment in which `commit_facts` gives the same answer."""
    facts, names = commit_facts(), {COMMIT: "git.commit", DIRTY: "git.dirty"}
    return {variable: facts[name] for variable, name in names.items() if name in facts}


def command_output(*command: str) -> str | None:
    """Return a command's output; None if it is missing, fails or takes longer than three seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the main packages."""
    result = {"version.python": platform.python_version()}
    for package in ("torch", "ray", "mlflow", "vitray"):
        with contextlib.suppress(PackageNotFoundError):
            result[f"version.{package}"] = version(package)
    return result


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
