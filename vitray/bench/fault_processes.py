"""The processes of one run: started with a command, seen as a tree, ended by process id."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil


class Tree:
    """A command and all processes that it starts."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                start_new_session=True,
            )
        self._root = psutil.Process(self.process.pid)
        self._seen: dict[int, psutil.Process] = {self.process.pid: self._root}

    @property
    def status(self) -> int | None:
        """The exit status of the command; None while it runs."""
        return self.process.poll()

    def note_children(self) -> None:
        """Note the present descendants, to know them after the command has died."""
        with suppress(psutil.NoSuchProcess):
            for child in self._root.children(recursive=True):
                self._seen.setdefault(child.pid, child)

    def alive(self) -> list[psutil.Process]:
        """Return the processes of the tree that run, those of a dead parent included."""
        self.note_children()
        self.process.poll()
        alive = []
        for process in list(self._seen.values()):
            with suppress(psutil.NoSuchProcess):
                # A process id may be in use again: `is_running` compares the times of start.
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def await_end(self, seconds: float) -> int:
        """Wait until no process of the tree runs, and return the number of those that still do."""
        end = time.monotonic() + seconds
        while (left := len(self.alive())) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def kill(self) -> None:
        """Kill every process of the tree."""
        for process in self.alive():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.await_end(10)
