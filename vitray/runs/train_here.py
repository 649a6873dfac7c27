"""A run in the process that was called, without Ray, or in the processes that torchrun has started.

The first process leads: it owns the run folder and keeps the records. The others follow: they learn the folder from it,
and everything else from the same command. A trial of a sweep may train so, too, in a process of Ray Tune.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vitray.cluster import session
from vitray.config import Run
from vitray.data.decode_processes import DecodeProcesses
from vitray.errors import ConfigError
from vitray.runs.local_host import LocalHost
from vitray.runs.local_start import Place
from vitray.runs.model_output import initial_weights
from vitray.runs.placement import Placement, check_batch
from vitray.runs.resolve import resolve
from vitray.runs.run_dir import Outcome, RunFolder
from vitray.runs.shutdown import GracefulShutdown
from vitray.runs.trial_hook import TrialHook
from vitray.runs.worker_mailbox import Mailbox
from vitray.training.host import COLLECTIVE_SECONDS
from vitray.training.loop import train_loop
from vitray.training.messages import WorkerResult
from vitray.training.profiling import forget_peak_memory
from vitray.training.resolved import ResolvedRun

LAUNCH = "torchrun --standalone --nproc-per-node {workers} --no-python vitray train ... --here"


class Start(NamedTuple):
    """What the leader tells the others when training begins."""

    folder: RunFolder
    source: str | None
    """The run folder whose last weights a fork starts from."""
    waits_for_decision: bool
    """Whether a sweep decides after each evaluation whether training goes on."""


class Group(NamedTuple):
    """This process among those that train together, and the processes that decode its images."""

    rank: int
    workers: int
    device: torch.device
    threads: int
    """Compute threads of this process on a CPU."""
    decoders: DecodeProcesses

    def broadcast(self, value: Any) -> Any:
        """Return the leader's value in each process."""
        if self.workers == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0, device=self.device)
        return values[0]

    def fit(
        self, resolved: ResolvedRun, start: Start, shutdown: GracefulShutdown, mailbox: Mailbox | None = None
    ) -> WorkerResult:
        """Run the training loop in this process; the leader has the mailbox."""
        host = LocalHost(
            resolved,
            start.folder.url,
            start.folder.owner,
            place=(self.rank, self.workers),
            device=self.device,
            threads=self.threads,
            decoders=self.decoders,
            initial=initial_weights(resolved, start.source),
            is_stop_requested=shutdown.is_requested,
            check=shutdown.check,
            mailbox=mailbox,
            waits_for_decision=start.waits_for_decision,
        )
        forget_peak_memory(self.device)
        with closing(host), shutdown.postponed(), torch_settings_kept():
            return train_loop(resolved, start.folder.url, host)


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Restore torch's settings after a block: the caller may go on to use it."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


@contextmanager
def joined_group(run: Run, place: Place, own_cpus: int | None, decoders: DecodeProcesses) -> Iterator[Group]:
    """Join the processes of torchrun, if it has started this one.

    The process of a trial has CPUs of its own, and is alone.
    """
    rank, workers, _, local_workers = place
    device = torch.device("cpu") if own_cpus else check_settings(run, place)
    threads = max(1, int(run.compute.cpus or own_cpus or session.local_cpus() // local_workers))  # as on Ray
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_new = workers > 1 and not dist.is_initialized()
    if is_new:
        if local_workers == workers:  # as on a local Ray, nothing listens beyond this machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    yield Group(rank, workers, device, threads, decoders)
    if is_new:  # after an error, torchrun ends all
        dist.destroy_process_group()


def check_settings(run: Run, place: Place) -> torch.device:
    """Return the device of this process; refuse what only Ray can do."""
    _, workers, local_rank, local_workers = place
    if dist.is_initialized() and dist.get_world_size() != workers:
        group, told = dist.get_world_size(), ", ".join(map(str.upper, Place._fields))
        got = f"got a process group of {group} and WORLD_SIZE {workers}"
        raise ConfigError(f"--here: {got}, expected {told} as torchrun sets them")
    compute, wanted = run.compute, run.compute.worker_range
    if address := os.environ.get("RAY_ADDRESS"):
        raise ConfigError(f"--here: RAY_ADDRESS is {address}; expected one of the two: --here trains without Ray")
    if wanted and wanted[0] != wanted[1]:
        raise ConfigError(f"compute.workers: got {compute.workers} with --here, expected a number: only Ray changes it")
    if wanted and wanted[0] != workers:
        processes = f"{workers} process{'es' * (workers != 1)}"
        other = f"the processes of `{LAUNCH.format(workers=wanted[0])}`" if wanted[0] > 1 else "auto"
        raise ConfigError(
            f"compute.workers: got {wanted[0]} with --here in {processes}, expected {workers}, or {other}"
        )
    if workers > 1 and run.data.evaluated and run.evaluate.where != "workers":
        raise ConfigError(
            f"evaluate.where: got {run.evaluate.where} with --here in {workers} processes, expected workers: the others"
            " would wait for one that evaluates alone"
        )
    gpus = torch.cuda.device_count()
    if compute.device == "cpu" or (compute.device == "auto" and not gpus):
        if run.evaluate.where == "gpu" and run.data.evaluated:
            raise ConfigError("evaluate.where: got gpu with --here on CPUs; expected workers or cpu")
        return torch.device("cpu")
    if not gpus:
        raise ConfigError("compute.device: got gpu, expected cpu or auto: torch finds no GPU on this machine")
    if local_workers > gpus:
        raise ConfigError(f"torchrun --nproc-per-node: got {local_workers}, expected at most the {gpus} GPUs")
    return torch.device("cuda", local_rank)


class LocalPlatform:
    """The processes of a group as the platform of a run, seen from the leader."""

    def __init__(self, resolved: ResolvedRun, hook: TrialHook | None, shutdown: GracefulShutdown, group: Group) -> None:
        workers, has_gpu = group.workers, group.device.type == "cuda"
        check_batch(resolved.run, workers, workers)
        self.placement = Placement((workers, workers), has_gpu, group.threads, group.threads, is_here=True)
        self.mailbox = Mailbox()
        self._resolved, self._hook, self._shutdown, self._group = resolved, hook, shutdown, group

    def fit(self, folder: RunFolder, source: str | None) -> WorkerResult:
        """Run the training loop in all processes."""
        waits = self._hook is not None and self._hook.waits_for_decision
        start = self._group.broadcast(Start(folder, source, waits))
        return self._group.fit(self._resolved, start, self._shutdown, self.mailbox)


@contextmanager
def started_here(
    resolved: ResolvedRun, hook: TrialHook | None, shutdown: GracefulShutdown, group: Group
) -> Iterator[LocalPlatform]:
    """Handle signals for a block."""
    with shutdown.handle_signals():
        yield LocalPlatform(resolved, hook, shutdown, group)


def follow(run: Run, group: Group) -> Outcome:
    """Train with the leader, and return its outcome."""
    word = _heard(group)
    if isinstance(word, Outcome):  # of a run that was finished before
        return word
    shutdown = GracefulShutdown()
    with shutdown.handle_signals():
        result = group.fit(resolve(run), word, shutdown)
        if result.ending == "interrupted":
            raise shutdown.error
        return _heard(group)


def _heard(group: Group) -> Any:
    try:
        return group.broadcast(None)
    except RuntimeError:  # the leader has ended, and has said why
        raise SystemExit(1) from None
