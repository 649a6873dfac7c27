"""This process as the host of the training loop, without Ray: the one called, one of torchrun's, or a trial's."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitray.data.decode_processes import DecodeProcesses
from vitray.data.stream.batches import StreamSpec
from vitray.data.stream.local_reader import LocalReader
from vitray.data.stream.stream import Stream
from vitray.runs.worker_mailbox import Mailbox
from vitray.system.child import Child
from vitray.system.host_facts import SystemSampler
from vitray.system.lease import check_owner
from vitray.tasks.supervised import Teacher
from vitray.training.data import evaluation_spec
from vitray.training.evaluator import score_networks
from vitray.training.host import PROGRESS_SECONDS, Job, Notice
from vitray.training.messages import Activity, Message, Metrics, StepDone
from vitray.training.prober import Probed, ProbeProcess
from vitray.training.resolved import ResolvedRun


class LocalHost:
    """This process as a worker; `training.host.Host` says what its methods do."""

    def __init__(
        self,
        resolved: ResolvedRun,
        run_dir: str,
        owner: str,
        *,
        place: tuple[int, int],
        device: torch.device,
        threads: int,
        decoders: DecodeProcesses,
        initial: dict[str, Tensor] | None,
        is_stop_requested: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
        mailbox: Mailbox | None = None,
        waits_for_decision: bool = False,
    ) -> None:
        """`place` is the rank among a number of workers. `check` is called after each step, and may raise.

        The first worker has the mailbox. Only a trial waits for decisions of its sweep.
        """
        self.rank, self.workers = place
        self.node = ""
        self.device, self.threads, self.stop_requested = device, threads, is_stop_requested
        self._resolved, self._run_dir, self._owner = resolved, run_dir, owner
        self._decoders, self._check, self._mailbox = decoders, check, mailbox
        self._waits_for_decision = waits_for_decision
        teacher = resolved.teacher and Teacher.of(resolved.teacher)
        tokenizer = resolved.tokenizer and resolved.tokenizer.tokenizer
        self._given = {"initial": initial, "tokenizer": tokenizer, "teacher": teacher}
        self._sampler = SystemSampler() if mailbox else None
        self._progress_sent = 0.0
        self._prober: Child | None = None
        self._val: Stream | None = None

    def close(self) -> None:
        """End the process of the probes."""
        if self._prober is not None:
            self._prober.close()

    def load(self, name: Literal["initial", "tokenizer", "teacher"]) -> Any:
        return self._given[name]

    def open_stream(self, spec: StreamSpec) -> Stream:
        return Stream(self._resolved.dataset, spec, lambda stream: LocalReader(stream, self._decoders, self.workers))

    def check_owner(self) -> None:
        check_owner(self._run_dir, self._owner)

    # ---- messages to the driver, which is the process of the first worker --------------------------------------------

    def at(self, step: int, activity: Activity) -> None:
        """Nobody asks: a debugger shows what this process is doing."""

    def progress(self, step: int) -> None:
        self._check()
        if time.monotonic() - self._progress_sent > PROGRESS_SECONDS:
            self._progress_sent = time.monotonic()
            self.send(StepDone(step))

    def send(self, message: Message) -> None:
        if self._mailbox is not None:
            self._mailbox.put(message)

    def sample(self, step: int) -> None:
        if self._sampler is not None:
            self.send(Metrics(step, self._sampler.sample()))

    def report(self, step: int, values: Mapping[str, float], checkpoint: str | None) -> None:
        """There is no page but MLflow's."""

    # ---- decisions of the driver -------------------------------------------------------------------------------------

    def should_stop(self, step: int) -> bool:
        if not self._waits_for_decision or self._mailbox is None:
            return False
        while (answer := self._mailbox.decision(step)) is None:
            time.sleep(0.01)
        return answer

    def notice(self) -> Notice | None:
        return None

    # ---- work beside training ----------------------------------------------------------------------------------------

    def start_scores(self, networks: Sequence[Mapping[str, Tensor]], after: Job | None) -> Job:
        """Score in this process: training waits, and gives the same."""
        del after
        evaluate, tokenizer = self._resolved.run.evaluate, copy.deepcopy(self.load("tokenizer"))
        device = self.device if evaluate.where == "gpu" else torch.device("cpu")
        if self._val is None:  # one for all, as the decoders keep few
            self._val = self.open_stream(evaluation_spec(self._resolved))
        future = Future[Any]()
        future.set_result(score_networks(self._resolved, self._val, tokenizer, networks, device))
        return future

    def start_probes(self, step: int, weights: Mapping[str, np.ndarray]) -> Job:
        if self._prober is None:  # one process for all, which keeps the images
            light = self._resolved.without_networks()
            self._prober = Child(
                partial(_prober, light, self._run_dir), "computes evaluate.probes and evaluate.figures"
            )
        return self._prober.submit(step, weights)

    def unfinished(self, jobs: Sequence[Job], seconds: float) -> list[Job]:
        futures: Any = jobs
        running = wait(futures, timeout=seconds).not_done
        return [job for job in futures if job in running]


def _prober(resolved: ResolvedRun, run_dir: str) -> Callable[[int, Mapping[str, np.ndarray]], Probed]:
    return ProbeProcess(resolved, run_dir, "cpu").probe
