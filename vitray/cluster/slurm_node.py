"""One node of a Slurm job, started by srun on each: it starts Ray, the first runs the command, and all end with it.

`ray symmetric-run` does the same in parts: it refuses a node that has another Ray, ends all of the user's Rays on it
with its own, waits 30 seconds for the nodes, and hands Slurm's signals to Ray's processes, which then end before a run
has saved. Here they block them.
"""

import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from vitray.cluster.session import usable_cpus
from vitray.errors import RunError

# Slurm sends SIGTERM when a job is canceled or preempted, and what the script asks for before the time limit.
NOTICE = signal.SIGUSR1
SIGNALS = {signal.SIGTERM, NOTICE}
# Seconds in which all nodes start Ray; a large job may start its nodes one after another.
START_SECONDS = 600.0
# The status of a command that SIGTERM has ended, after it has saved.
ENDED = 128 + signal.SIGTERM


class Node(NamedTuple):
    """This node's place in its job."""

    job: str
    rank: int
    nodes: int
    head: str
    """The address of the first node."""

    @staticmethod
    def told() -> "Node":
        """Return what Slurm tells this process."""
        told = os.environ
        try:
            rank, nodes = int(told["SLURM_PROCID"]), int(told["SLURM_NNODES"])
            # That of the node from which srun was called: a batch script runs on the first.
            return Node(told["SLURM_JOB_ID"], rank, nodes, told["SLURM_LAUNCH_NODE_IPADDR"])
        except KeyError as error:
            raise RunError(f"{error.args[0]}: not set, expected to be started by srun in a job of Slurm") from None

    @property
    def element(self) -> str:
        """The name of the job; of an array, that of this element alone, whose number may be that of the whole array."""
        array, task = (os.environ.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
        return f"{array}_{task}" if array and task else self.job

    @property
    def port(self) -> int:
        """The port of Ray's head, below those that Linux gives to connections and above those of Ray's workers."""
        return 20_000 + int(self.job) % 10_000


def main(words: list[str]) -> int:
    """Run `vitray WORDS...` on the first node of this process's job, and return its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # also for all processes that this one starts
    node = Node.told()
    if node.nodes == 1:
        return run(words, node, {})
    with ray_of(node):
        if node.rank:
            wait_for_end(node)
            return 0
        wait_for_nodes(node)
        return run(words, node, {"RAY_ADDRESS": f"{node.head}:{node.port}"})


def run(words: list[str], node: Node, extra: dict[str, str]) -> int:
    """Run a command, pass Slurm's signals to it, and have the job queue again if one has ended it."""

    def unblock() -> None:
        # Slurm sends NOTICE to all processes of a step, and most would end by it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    command = [sys.executable, "-m", "pipelines", *words]
    process = subprocess.Popen(command, env=os.environ | extra, preexec_fn=unblock)
    is_told = False
    while process.poll() is None:
        if signal.sigtimedwait(SIGNALS, 0.2):
            is_told = True
            process.send_signal(signal.SIGTERM)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if is_told and code == ENDED:
        queue_again(node.element)
    return code


def queue_again(job: str) -> None:
    """Have Slurm run the script of this job again, unless the job was canceled.

    Slurm itself does so after a preemption only if it has to kill the job.
    """
    listed = subprocess.run(["squeue", "--noheader", "--format=%T", "--jobs", job], capture_output=True, text=True)
    if listed.stdout.strip() != "RUNNING":
        return
    print("vitray: the job queues again, and goes on from what is saved", file=sys.stderr, flush=True)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split())[:200]
        print(f"vitray: it could not queue again ({reason}): submit its script again", file=sys.stderr)


@contextmanager
def ray_of(node: Node) -> Iterator[None]:
    """Run Ray on this node for the length of the block."""
    if node.rank and not answers(node, START_SECONDS):
        raise RunError(f"the first node, {node.head}, has started no Ray within {START_SECONDS:.0f} s")
    folder = Path(tempfile.gettempdir()) / f"vitray-slurm-{node.job}"  # the same on all nodes
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise RunError(f"{folder}: is another user's, expected to make it")
    command = ["ray", "start", "--block", f"--num-cpus={usable_cpus()}", "--disable-usage-stats"]
    if node.rank:
        command += [f"--address={node.head}:{node.port}"]
    else:
        command += ["--head", f"--node-ip-address={node.head}", f"--port={node.port}", f"--temp-dir={folder}"]
        command += ["--dashboard-host=127.0.0.1"]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # Ray has a file for each connection
    log = folder / "start.log"
    with log.open("w") as output:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        env = os.environ | {"PATH": path}
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        if not node.rank and not answers(node, START_SECONDS, process):
            raise RunError(f"{socket.gethostname()}: Ray does not start: {log.read_text()[-2000:]}")
        yield
    finally:
        end(process)
        shutil.rmtree(folder, ignore_errors=True)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End `ray start` and all that it has started."""
    tree = []
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in tree:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def answers(node: Node, seconds: float, process: "subprocess.Popen[bytes] | None" = None) -> bool:
    """Whether Ray's head accepts connections within some seconds, unless its process ends before."""
    until = time.monotonic() + seconds
    while process is None or process.poll() is None:
        with suppress(OSError), socket.create_connection((node.head, node.port), 5):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.5)
    return False


def wait_for_end(node: Node) -> None:
    """Return once the first node's Ray has ended."""
    while answers(node, 10):
        time.sleep(1)


def wait_for_nodes(node: Node) -> None:
    """Return once all nodes of the job have joined its Ray."""
    import ray

    ray.init(f"{node.head}:{node.port}", log_to_driver=False, logging_level=logging.ERROR)
    try:
        until, shown = time.monotonic() + START_SECONDS, 0
        while (there := sum(each["Alive"] for each in ray.nodes())) < node.nodes:
            if time.monotonic() > until:
                raise RunError(f"{there} of {node.nodes} nodes have started Ray within {START_SECONDS:.0f} s")
            if there != shown:
                print(f"vitray: {there} of {node.nodes} nodes are up", file=sys.stderr)
                shown = there
            time.sleep(0.5)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except RunError as error:
        raise SystemExit(f"vitray: {error}") from None
