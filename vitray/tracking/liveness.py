"""Tags that identify a run's driver process, and the proof that it has died."""

import functools
import os
import socket
from pathlib import Path
from typing import NamedTuple

# The PID namespace of a Linux host; containers have others.
HOST_PID_NAMESPACE = "pid:[4026531836]"


class _Kernel(NamedTuple):
    """The machine id, the boot id and the PID namespace; `?` is unknown."""

    machine: str
    boot: str
    pid_namespace: str


def process_tags() -> dict[str, str]:
    """Return the tags that identify this process and its machine."""
    pid = os.getpid()
    started = f"{' '.join(_kernel())} {_start_time(pid)}"
    return {"vitray.host": socket.gethostname(), "vitray.pid": str(pid), "vitray.pid_started": started}


def is_dead(tags: dict[str, str]) -> bool:
    """Whether the process of these tags ran on this machine and has provably ended."""
    fields = tags.get("vitray.pid_started", "").split()
    if tags.get("vitray.host") != socket.gethostname() or not tags.get("vitray.pid", "").isdigit() or len(fields) != 4:
        return False
    kernel, start_time, here = _Kernel(*fields[:3]), fields[3], _kernel()
    if "?" in fields or kernel.machine != here.machine:
        return False
    if kernel.boot != here.boot:
        # The machine has rebooted. A container may share host name and machine id with a live one elsewhere.
        return kernel.machine != "none" and kernel.pid_namespace == here.pid_namespace == HOST_PID_NAMESPACE
    # A process id is only valid in its own namespace.
    return kernel.pid_namespace == here.pid_namespace and start_time != _start_time(int(tags["vitray.pid"]))


@functools.cache
def _kernel() -> _Kernel:
    try:
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pid_namespace = "?"
    return _Kernel(_first_word("/etc/machine-id"), _first_word("/proc/sys/kernel/random/boot_id"), pid_namespace)


def _first_word(path: str) -> str:
    try:
        return (Path(path).read_text().split() or ["none"])[0]
    except OSError:
        return "none"


def _start_time(pid: int) -> str:
    """Return a process's start in kernel ticks; `gone` without such a process, `?` on a system without /proc."""
    if not Path("/proc/self/stat").exists():
        return "?"
    try:
        # The second field, the name, may hold spaces and brackets; the start is the 20th field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    # A zombie has ended, but its parent has not collected it yet.
    return "gone" if fields[0] in "ZX" else fields[19]
