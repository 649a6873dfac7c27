"""Simulated hosts: each with its own network, processes, disk and name, on one isolated network segment.

A host is a set of Linux namespaces, held by a sleeping process. When that process is killed, the kernel kills every
process of the host, like a power loss. Needs root, iproute2 and util-linux.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Sizes of a host's disk and of its shared memory.
DISK, SHARED_MEMORY = "1g", "1200m"
# Memory of a host in KiB, as its kernel reports it: in all, and free while no test takes it. Ray takes the machine's if
# that is less, and subtracts what all processes of the machine use.
MEMORY = int(Path("/proc/meminfo").read_text().split()[1]) * 7 // 8
FREE_MEMORY = MEMORY * 3 // 4
# The other lines of /proc/meminfo that programs read.
NO_MEMORY = ("Buffers", "Cached", "Active", "Inactive", "Shmem", "Slab", "SReclaimable", "SwapTotal", "SwapFree")


class Host:
    """One machine: `10.55.0.N` on the segment, and a disk of its own at `own`."""

    def __init__(self, name: str, number: int, site: "Site") -> None:
        self.name, self.address, self.site = name, f"10.55.0.{number}", site
        self.own = site.folder / "own"
        self._started: list[subprocess.Popen[bytes]] = []
        names = site.folder / f"hosts-{name}"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")  # as on Debian
        self._memory = site.folder / f"memory-{name}"
        self._memory.touch()
        self.report_memory(FREE_MEMORY)
        # The holder is the host's init process, so it must reap orphans.
        script = (
            f"hostname {name} && mount --bind {names} /etc/hosts && ip link set lo up"
            f" && mount --bind {self._memory} /proc/meminfo"
            f" && mount -t tmpfs -o size={DISK},mode=1777 none {self.own}"
            f" && mount -t tmpfs -o size={SHARED_MEMORY},mode=1777 none /dev/shm"
            " && trap '' CHLD && echo up && exec sleep infinity"
        )
        spaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(["unshare", *spaces, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        with self._holder.stdout as output:
            assert output.readline() == "up\n", f"{name}: no host; root, iproute2 and util-linux are needed"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def command(self, args: Sequence[object]) -> list[str]:
        """Return the arguments that run a command on this host."""
        spaces = ["--net", "--mount", "--uts", "--pid"]
        return ["nsenter", f"--target={self.pid}", *spaces, f"--wd={self.site.root}", *map(str, args)]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a command on this host, without this process's Ray settings."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "vitray_"))}
        return own | self.site.environment | {"TMPDIR": str(self.own)} | (extra or {})

    def start(
        self, args: Sequence[object], log: Path, extra: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host; its output goes to a file."""
        with log.open("a") as output:
            process = subprocess.Popen(self.command(args), env=self.environment(extra), stdout=output, stderr=output)
        self._started.append(process)
        return process

    def call(self, args: Sequence[object], extra: Mapping[str, str] | None = None, given: str | None = None) -> str:
        """Run a command on this host and return its output."""
        command, environment = self.command(args), self.environment(extra)
        done = subprocess.run(command, env=environment, input=given, capture_output=True, text=True)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
        return done.stdout

    def seen(self, path: Path) -> Path:
        """Return the path of a file of this host on the real machine."""
        return Path(f"/proc/{self.pid}/root{path}")

    def processes(self, text: str = "") -> list[int]:
        """Return the processes of this host with `text` in their command line."""
        pids: list[int] = []
        if self._holder.poll() is not None:
            return pids
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if os.readlink(folder / "ns" / "pid") == space and text in (folder / "cmdline").read_text():
                    pids.append(int(folder.name))
        return pids

    def signal(self, text: str, number: int) -> None:
        """Send a signal to the processes with `text` in their command line; there must be one."""
        pids = self.processes(text)
        assert pids, f"{self.name}: no process with {text}"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def report_memory(self, free: int) -> None:
        """Set the free memory, in KiB, that this host's kernel reports.

        All hosts share one machine, whose own memory depends on its other processes.
        """
        sizes = {"MemTotal": MEMORY, "MemFree": free, "MemAvailable": free} | dict.fromkeys(NO_MEMORY, 0)
        text = "".join(f"{name + ':':<15} {size:>9} kB\n" for name, size in sizes.items())
        with self._memory.open("r+") as file:  # one write of equal length, so that no reader sees a part of it
            file.write(text)

    def fill(self, spare: int = 0) -> None:
        """Fill this host's disk and leave `spare` bytes free."""
        fill(self.seen(self.own), spare)

    def empty(self) -> None:
        """Free the disk again."""
        (self.seen(self.own) / "ballast").unlink()

    def end(self) -> None:
        """Kill the host."""
        self._holder.kill()
        for process in [self._holder, *self._started]:
            process.send_signal(RESUME)  # a paused nsenter does not notice the end of its child
            process.wait()


class Site:
    """Hosts on one segment that share the project and a folder, like a network disk."""

    def __init__(self, root: Path, folder: Path, environment: Mapping[str, str]) -> None:
        """`folder` needs a short name, because it holds sockets."""
        self.root, self.folder, self.environment = root, folder, dict(environment)
        self.hosts: dict[str, Host] = {}
        (folder / "own").mkdir()
        self.shared = folder / "shared"
        self.shared.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", self.shared], check=True)
        self.switch = Host("switch", 0, self)
        self.switch.call(["ip", "link", "add", "segment", "type", "bridge"])
        self.switch.call(["ip", "link", "set", "segment", "up"])

    def add(self, name: str, number: int) -> Host:
        """Add a host, in place of a killed host of this name."""
        host = self.hosts[name] = Host(name, number, self)
        port = ["netns", self.switch.pid]
        # The network of a killed host may remain for a while.
        self.switch.call(["sh", "-c", f"ip link delete to-{name} 2>/dev/null || true"])
        command = ["ip", "link", "add", "eth0", "netns", host.pid, "type", "veth", "peer", "name", f"to-{name}", *port]
        subprocess.run([str(arg) for arg in command], check=True)
        self.switch.call(["ip", "link", "set", f"to-{name}", "master", "segment", "up"])
        host.call(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
        host.call(["ip", "link", "set", "eth0", "up"])
        return host

    def cut(self, name: str) -> None:
        """Disconnect a host silently, like a pulled cable."""
        self.switch.call(["ip", "link", "set", f"to-{name}", "nomaster"])

    def mend(self, name: str) -> None:
        """Reconnect a host."""
        self.switch.call(["ip", "link", "set", f"to-{name}", "master", "segment"])

    def end(self) -> None:
        """Kill all hosts."""
        for host in [*self.hosts.values(), self.switch]:
            host.end()
        subprocess.run(["umount", "--lazy", self.shared], check=True)


def fill(folder: Path, spare: int = 0) -> None:
    """Fill a disk and leave `spare` bytes free."""
    with suppress(OSError), (folder / "ballast").open("ab", buffering=0) as ballast:
        while shutil.disk_usage(folder).free > spare:
            ballast.write(bytes(2**20))


def until(condition: Callable[[], object], seconds: float, name: str, log: Path | None = None) -> None:
    """Wait for a condition; on a timeout, raise an error with the last lines of the log."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            lines = f"\n{log.read_text()[-3000:]}" if log else ""
            raise AssertionError(f"not within {seconds:g} seconds: {name}{lines}")
        time.sleep(0.1)


PAUSE, RESUME, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL
