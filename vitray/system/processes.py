"""The tags that identify this process, and the proof that another has died."""

import functools
import os
import socket
from pathlib import Path

# The PID namespace of a Linux host; containers have others.
HOST_PID_NAMESPACE = "pid:[4026531836]"


def process_tags() -> dict[str, str]:
    """Return the tags that identify this process and its machine."""
    pid = os.getpid()
    started = " ".join([*_kernel(), _start_time(pid)])
    return {"vitray.host": socket.gethostname(), "vitray.pid": str(pid), "vitray.pid_started": started}


def is_dead(tags: dict[str, str]) -> bool:
    """Whether the process of these tags ran on this machine and has provably ended."""
    return is_alive(tags) is False


def is_alive(tags: dict[str, str]) -> bool | None:
    """Whether the process of these tags lives; None for one on another machine, or without proof."""
    fields, pid = tags.get("vitray.pid_started", "").split(), tags.get("vitray.pid", "")
    if tags.get("vitray.host") != socket.gethostname() or not pid.isdigit() or len(fields) != 4:
        return None
    machine, boot, namespace, start_time = fields
    machine_here, boot_here, namespace_here = _kernel()
    if "?" in fields or machine != machine_here:
        return None
    if boot != boot_here:
        # The machine has rebooted. A container may share host name and machine id with a live one elsewhere.
        return False if machine != "none" and namespace == namespace_here == HOST_PID_NAMESPACE else None
    # A process id is only valid in its own namespace.
    return start_time == _start_time(int(pid)) if namespace == namespace_here else None


@functools.cache
def _kernel() -> tuple[str, str, str]:
    """Return the machine id, the boot id and the PID namespace; `?` is unknown."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = "?"
    return _first_word("/etc/machine-id"), _first_word("/proc/sys/kernel/random/boot_id"), namespace


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
