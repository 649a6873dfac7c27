"""What this process runs on: its load as metrics, its make as facts, and whether another process of it still lives."""

import contextlib
import functools
import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil

MEGABYTE = 1e6

# The one process space that Linux numbers itself: not a container's.
NO_CONTAINER = "pid:[4026531836]"


def sample() -> dict[str, float]:
    """How busy this process's node is, under the names that MLflow's page of system metrics shows.

    CPU and network count since the call before; GPUs are those that this process computes on.
    """
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(".")
    network = psutil.net_io_counters()
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": (memory.total - memory.available) / MEGABYTE,
        "system/system_memory_usage_percentage": memory.percent,
        "system/disk_usage_percentage": 100 * disk.used / disk.total,
        "system/disk_available_megabytes": disk.free / MEGABYTE,
        "system/network_receive_megabytes": network.bytes_recv / MEGABYTE if network else 0.0,
        "system/network_transmit_megabytes": network.bytes_sent / MEGABYTE if network else 0.0,
        **_gpu_sample(),
    }


def _gpu_sample() -> dict[str, float]:
    torch = sys.modules.get("torch")
    # Asking a GPU that this process does not use would take half a gigabyte of it for a context.
    if torch is None or not torch.cuda.is_initialized():
        return {}
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    found = {
        f"system/gpu_{device}_memory_usage_megabytes": (total - free) / MEGABYTE,
        f"system/gpu_{device}_memory_usage_percentage": 100 * (total - free) / total,
    }
    with contextlib.suppress(ImportError, RuntimeError):  # torch asks nvidia-ml-py, which need not be there
        found[f"system/gpu_{device}_utilization_percentage"] = float(torch.cuda.utilization(device))
    return found


def facts() -> dict[str, str]:
    """What a number belongs with: the code's commit, versions and hardware; what cannot be found is left out."""
    return {**_git(), **versions(), **_hardware()}


def _git() -> dict[str, str]:
    commit = _said("git", "rev-parse", "HEAD")
    if not commit:
        return {}
    # None, where git took too long over a large tree, is neither clean nor dirty.
    changes = _said("git", "status", "--porcelain", "--untracked-files=no")
    return {"git.commit": commit} | ({} if changes is None else {"git.dirty": str(bool(changes)).lower()})


def versions() -> dict[str, str]:
    """Of Python and of the packages that numbers depend on."""
    found = {"version.python": platform.python_version()}
    for package in ("torch", "ray", "mlflow", "vitray"):
        try:
            found[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, str]:
    found = {
        "hardware.cpu": _cpu_model(),
        "hardware.cores": str(os.cpu_count()),
        "hardware.memory_gigabytes": f"{psutil.virtual_memory().total / 1e9:.1f}",
    }
    if shutil.which("nvidia-smi") and (names := _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")):
        found["hardware.gpus"] = ", ".join(names.splitlines())
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _said(*command: str) -> str | None:
    """What a command printed; None where it failed, is not there or took three seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def identity() -> dict[str, str]:
    """The tags that say which process of which machine drives a run."""
    pid = os.getpid()
    started = f"{' '.join(_kernel())} {_born(pid)}"
    return {"vitray.host": socket.gethostname(), "vitray.pid": str(pid), "vitray.pid_started": started}


def has_died(tags: dict[str, str]) -> bool:
    """Whether the process of these tags was of this machine and provably is no more; what cannot be proved lives."""
    words = tags.get("vitray.pid_started", "").split()
    if tags.get("vitray.host") != socket.gethostname() or not tags.get("vitray.pid", "").isdigit() or len(words) != 4:
        return False
    kernel, born = _Kernel(*words[:3]), words[3]
    if "?" in words or kernel.machine != _kernel().machine:
        return False
    if kernel.boot != _kernel().boot:
        # The machine was started anew since. A container may share name and machine id with one that lives elsewhere.
        return kernel.machine != "none" and kernel.space == _kernel().space == NO_CONTAINER
    # A process number means nothing in another container.
    return kernel.space == _kernel().space and born != _born(int(tags["vitray.pid"]))


class _Kernel(NamedTuple):
    """The installation, its latest start, and the space that process numbers count in; `?` is not known."""

    machine: str
    boot: str
    space: str


@functools.cache
def _kernel() -> _Kernel:
    return _Kernel(
        _first_word("/etc/machine-id"), _first_word("/proc/sys/kernel/random/boot_id"), _target("/proc/self/ns/pid")
    )


def _first_word(path: str) -> str:
    try:
        return (Path(path).read_text().split() or ["none"])[0]
    except OSError:
        return "none"


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return "?"


def _born(pid: int) -> str:
    """When a process started, in the kernel's ticks; `gone` where there is none, `?` where the system does not say."""
    if not Path("/proc/self/stat").exists():
        return "?"
    try:
        # The name in the second field may hold spaces and brackets; the start is the 20th field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    # A zombie has died; only its parent has not yet heard of it.
    return "gone" if fields[0] in "ZX" else fields[19]
