"""Hosts on this machine: each with its own network, processes, disk and name, on one segment that reaches nothing else.

A host is a set of Linux namespaces, held by a process that sleeps. When that process is killed the kernel kills all
that ran there, as when a machine loses its power. Needs root, and iproute2 and util-linux.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Of a host: bytes of its disk, and of its shared memory.
DISK, SHARED_MEMORY = "1g", "1200m"


class Host:
    """One machine: `10.55.0.N` on the segment, and a disk of its own at `own`."""

    def __init__(self, name: str, number: int, site: "Site") -> None:
        self.name, self.address, self.site = name, f"10.55.0.{number}", site
        self.own = site.folder / "own"
        self._started: list[subprocess.Popen[bytes]] = []
        names = site.folder / f"hosts-{name}"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")  # as Debian sets a machine up
        # Children that nobody waits for vanish by themselves: what holds the host is its process number 1.
        script = (
            f"hostname {name} && mount --bind {names} /etc/hosts && ip link set lo up"
            f" && mount -t tmpfs -o size={DISK},mode=1777 none {self.own}"
            f" && mount -t tmpfs -o size={SHARED_MEMORY},mode=1777 none /dev/shm"
            " && trap '' CHLD && echo up && exec sleep infinity"
        )
        spaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(["unshare", *spaces, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
        with self._holder.stdout as said:
            assert said.readline() == "up\n", f"{name}: no host; root, iproute2 and util-linux are needed"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def command(self, words: Sequence[object]) -> list[str]:
        """The words of a command that runs on this host."""
        spaces = ["--net", "--mount", "--uts", "--pid"]
        return ["nsenter", f"--target={self.pid}", *spaces, f"--wd={self.site.root}", *map(str, words)]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Of a command that runs here: a machine of its own knows nothing of what this process was set to."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "vitray_"))}
        return own | self.site.environment | {"TMPDIR": str(self.own)} | (more or {})

    def start(
        self, words: Sequence[object], log: Path, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Begin a command here; what it says is in a file."""
        with log.open("a") as told:
            began = subprocess.Popen(self.command(words), env=self.environment(more), stdout=told, stderr=told)
        self._started.append(began)
        return began

    def call(self, words: Sequence[object], more: Mapping[str, str] | None = None, given: str | None = None) -> str:
        """Run a command here to its end; what it printed."""
        words, environment = self.command(words), self.environment(more)
        done = subprocess.run(words, env=environment, input=given, capture_output=True, text=True)
        assert done.returncode == 0, f"{self.name}: {words}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
        return done.stdout

    def seen(self, path: Path) -> Path:
        """A path of this host, as it is reached from outside."""
        return Path(f"/proc/{self.pid}/root{path}")

    def processes(self, text: str = "") -> list[int]:
        """The processes of this host with this in their command line."""
        found: list[int] = []
        if self._holder.poll() is not None:
            return found
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if os.readlink(folder / "ns" / "pid") == space and text in (folder / "cmdline").read_text():
                    found.append(int(folder.name))
        return found

    def signal(self, text: str, number: int) -> None:
        """Send a signal to those processes, of which there must be one."""
        found = self.processes(text)
        assert found, f"{self.name}: no process with {text}"
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def fill(self, spare: int = 0) -> None:
        """Write to its disk until so many bytes are left."""
        fill(self.seen(self.own), spare)

    def empty(self) -> None:
        """Take that away again."""
        (self.seen(self.own) / "ballast").unlink()

    def end(self) -> None:
        """Take its power away, if it has any."""
        self._holder.kill()
        for process in [self._holder, *self._started]:
            process.send_signal(RESUME)  # nsenter pauses with its child, and does not hear that it is gone
            process.wait()


class Site:
    """Hosts on one segment, and what they share: the project, and `shared`, as a network disk would be."""

    def __init__(self, root: Path, folder: Path, environment: Mapping[str, str]) -> None:
        """`folder` must have a short name: sockets lie below it."""
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
        """A host more on the segment; one of this name that lost its power is replaced."""
        host = self.hosts[name] = Host(name, number, self)
        port = ["netns", self.switch.pid]
        # The network of a host without power goes when the last of it is forgotten, which may take a while.
        self.switch.call(["sh", "-c", f"ip link delete to-{name} 2>/dev/null || true"])
        words = ["ip", "link", "add", "eth0", "netns", host.pid, "type", "veth", "peer", "name", f"to-{name}", *port]
        subprocess.run([str(word) for word in words], check=True)
        self.switch.call(["ip", "link", "set", f"to-{name}", "master", "segment", "up"])
        host.call(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
        host.call(["ip", "link", "set", "eth0", "up"])
        return host

    def cut(self, name: str) -> None:
        """Let nothing through to a host, as when its cable is pulled: nobody is told."""
        self.switch.call(["ip", "link", "set", f"to-{name}", "nomaster"])

    def mend(self, name: str) -> None:
        """Let everything through again."""
        self.switch.call(["ip", "link", "set", f"to-{name}", "master", "segment"])

    def end(self) -> None:
        """End all hosts with all that runs there."""
        for host in [*self.hosts.values(), self.switch]:
            host.end()
        subprocess.run(["umount", "--lazy", self.shared], check=True)


def fill(folder: Path, spare: int = 0) -> None:
    """Write to a disk until so many bytes are left."""
    with suppress(OSError), (folder / "ballast").open("ab", buffering=0) as ballast:
        while shutil.disk_usage(folder).free > spare:
            ballast.write(bytes(2**20))


def until(found: Callable[[], object], seconds: float, what: str, log: Path | None = None) -> None:
    """Wait for something, for so long at most; the log's last lines say why it did not come."""
    end = time.monotonic() + seconds
    while not found():
        if time.monotonic() > end:
            said = f"\n{log.read_text()[-3000:]}" if log else ""
            raise AssertionError(f"not within {seconds:g} seconds: {what}{said}")
        time.sleep(0.1)


PAUSE, RESUME, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL
