"""Ray Train as the host of the training loop: a worker, its link to the driver, and the tasks beside training."""

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor

import vitray.runs.failures  # noqa: F401 (its filter of Ray Train's tracebacks, in the process of the worker)
from vitray.data.stream.batches import StreamSpec
from vitray.data.stream.ray_reader import RayReader
from vitray.data.stream.stream import Stream
from vitray.errors import ConfigError, OwnershipLost
from vitray.metrics.scores import Score
from vitray.system.host_facts import SystemSampler
from vitray.system.lease import check_owner, check_visible
from vitray.training.data import evaluation_spec
from vitray.training.evaluator import score_networks
from vitray.training.host import PROGRESS_SECONDS, Job, Notice
from vitray.training.loop import train_loop
from vitray.training.messages import Activity, Heartbeat, Message, Metrics, StepDone, WorkerResult
from vitray.training.prober import ProbeProcess
from vitray.training.resolved import ResolvedRun

# A worker's environment on any node. Ray Data's usage statistics would start another process, and its counters, which
# die with their node, would log errors.
ENVIRONMENT = {"RAY_DATA_USAGE_DISABLED": "1", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
# Seconds between two heartbeats.
BEAT_SECONDS = 5.0
# Restarts of the process of probes after it or its node was lost.
RESTARTS = 3


class RayStart(NamedTuple):
    """What the driver gives to each worker, and to the tasks beside training."""

    resolved: ResolvedRun
    """Without its weights, which are references below: a process fetches those that it needs."""
    run_dir: str
    owner: str
    """The id of the driver as the owner of the run folder."""
    threads: int
    """Compute threads of a CPU worker."""
    data_cpus: int | None = None
    """Most CPUs of one execution that decodes images; None is all."""
    probe_gpus: int = 0
    """GPUs of the process that computes evaluate.probes and evaluate.figures; 0 is a CPU."""
    mailbox: Any = None
    """The actor handle of the driver's mailbox."""
    waits_for_decision: bool = False
    """Whether training waits after an evaluation for the scheduler's decision."""
    watches_preemption: bool = False
    """Whether Ray reports nodes that are about to be preempted."""
    driver_node: str | None = None
    """The ID of the driver's node."""
    initial: Any = None
    tokenizer: Any = None
    teacher: Any = None
    """Object references; None without one."""

    def load(self, name: Literal["initial", "tokenizer", "teacher"]) -> Any:
        reference = {"initial": self.initial, "tokenizer": self.tokenizer, "teacher": self.teacher}[name]
        return None if reference is None else ray.get(reference)

    def open_stream(self, spec: StreamSpec) -> Stream:
        return Stream(self.resolved.dataset, spec._replace(cpus=self.data_cpus), RayReader)


def worker(config: dict[str, RayStart]) -> WorkerResult:
    """Train on this device, as one of all workers."""
    os.environ.update(ENVIRONMENT)
    logging.disable(logging.INFO)  # Ray Train logs every report; a worker's own messages go to the driver
    start = config["start"]
    host = RayHost(start)
    try:
        check_visible(start.run_dir, start.owner)
        return train_loop(start.resolved, start.run_dir, host)
    except (ConfigError, OwnershipLost) as error:
        ray.get(start.mailbox.record_fatal_error.remote(error))
        raise
    except Exception:
        host.beat(has_failed=True)
        raise
    finally:
        host.close()


class RayHost:
    """A worker of Ray Train; `training.host.Host` says what its methods do. A thread sends its heartbeats."""

    def __init__(self, start: RayStart) -> None:
        session = ray.train.get_context()
        self.rank, self.workers = session.get_world_rank(), session.get_world_size()
        self.node = ray.get_runtime_context().get_node_id()
        self.device, self.threads = ray.train.torch.get_device(), start.threads
        self.load, self.open_stream, self.unfinished = start.load, start.open_stream, unfinished
        self._start, self._mailbox, self._node = start, start.mailbox, socket.gethostname()
        # As in MLflow, nodes are numbered only if there are several.
        node = None if session.get_local_world_size() == self.workers else session.get_node_rank()
        self._sampler = SystemSampler(node) if session.get_local_rank() == 0 else None
        self._progress_sent, self._stop_requested, self._is_preempted = 0.0, None, False
        self._prober: Any = None
        self._position: tuple[int, Activity, float] = 0, "start", time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._beat_on, name="heartbeat", daemon=True).start()

    def check_owner(self) -> None:
        check_owner(self._start.run_dir, self._start.owner)

    # ---- messages to the driver --------------------------------------------------------------------------------------

    def at(self, step: int, activity: Activity) -> None:
        self._position = step, activity, time.monotonic()

    def beat(self, *, has_failed: bool = False) -> None:
        """Send a heartbeat now."""
        step, activity, since = self._position
        seconds = time.monotonic() - since
        beat = Heartbeat(self.rank, self.workers, self._node, step, activity, seconds, has_failed)
        self._mailbox.beat.remote(beat)

    def close(self) -> None:
        """End the heartbeats."""
        self._closed.set()

    def _beat_on(self) -> None:
        self.beat()  # a worker that dies soon is named with its node
        while not self._closed.wait(BEAT_SECONDS):
            self.beat()

    def progress(self, step: int) -> None:
        if self.rank == 0 and time.monotonic() - self._progress_sent > PROGRESS_SECONDS:
            self._progress_sent = time.monotonic()
            self.send(StepDone(step))
            if not self.stop_requested():
                self._stop_requested = self._mailbox.is_stop_requested.remote()

    def send(self, message: Message) -> None:
        if self.rank == 0:
            self._mailbox.put.remote(message)

    def sample(self, step: int) -> None:
        if self._sampler is not None:
            self._mailbox.put.remote(Metrics(step, self._sampler.sample()))

    def report(self, step: int, values: Mapping[str, float], checkpoint: str | None) -> None:
        # Ray Train waits for all workers here, as the exchange of the metrics has done.
        ray.train.report({"step": step, **values} | ({} if checkpoint is None else {"checkpoint": checkpoint}))

    # ---- decisions of the driver -------------------------------------------------------------------------------------

    def stop_requested(self) -> bool:
        answer: Any = self._stop_requested
        return answer is not None and bool(ray.wait([answer], timeout=0)[0]) and ray.get(answer)

    def should_stop(self, step: int) -> bool:
        if not self._start.waits_for_decision:
            return False
        answer: list[bool | None] = [None]
        while self.rank == 0 and answer[0] is None:
            time.sleep(0.05)
            answer = [ray.get(self._mailbox.decision.remote(step))]
        if dist.is_initialized():
            dist.broadcast_object_list(answer, 0)
        return bool(answer[0])

    def notice(self) -> Notice | None:
        if self._is_preempted or not self._start.watches_preemption:
            return None
        preemption = ray.train.get_preemption_info()
        if preemption is None:
            return None
        self._is_preempted = True
        return Notice(restarts=self._start.driver_node not in preemption.preempted_node_ids)

    # ---- work beside training ----------------------------------------------------------------------------------------

    def start_scores(self, networks: Sequence[Mapping[str, Tensor]], after: Job | None) -> Job:
        evaluate = self._start.resolved.run.evaluate
        options = _beside(evaluate.gpus if evaluate.where == "gpu" else 0)
        score = ray.remote(_score).options(**options)
        return RayJob(score.remote(self._start, networks, *([after.reference] if isinstance(after, RayJob) else [])))

    def start_probes(self, step: int, weights: Mapping[str, np.ndarray]) -> Job:
        if self._prober is None:  # an actor, which keeps the images
            self._prober = start_probe_actor(self._start)
        return RayJob(self._prober.probe.remote(step, weights))


class RayJob(NamedTuple):
    """A task of Ray as a job."""

    reference: Any

    def result(self, timeout: float | None = None) -> Any:
        return ray.get(self.reference, timeout=timeout)

    def cancel(self) -> None:
        ray.cancel(self.reference)


def unfinished(jobs: Sequence[Job], seconds: float) -> list[Job]:
    """Wait for some seconds, and return the jobs that have not ended."""
    references = [job.reference for job in jobs if isinstance(job, RayJob)]
    running = ray.wait(references, num_returns=len(references), timeout=seconds)[1] if references else []
    return [job for job, reference in zip(jobs, references, strict=True) if reference in running]


def _beside(gpus: float) -> dict[str, Any]:
    """Return options of Ray for work outside the placement group of a trial, which has no room for it."""
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": "DEFAULT"}


def start_probe_actor(start: RayStart) -> Any:
    """Start the actor that computes the probes of a run."""
    actor: Any = ray.remote(ProbeProcess)
    options: dict[str, Any] = _beside(start.probe_gpus) | {"max_restarts": RESTARTS, "max_task_retries": RESTARTS}
    return actor.options(**options).remote(start.resolved, start.run_dir, "cuda" if start.probe_gpus else "cpu")


def _score(start: RayStart, networks: Sequence[Mapping[str, Tensor]], _previous: Any = None) -> list[Score]:
    device = torch.device("cuda" if start.resolved.run.evaluate.where == "gpu" else "cpu")
    val = start.open_stream(evaluation_spec(start.resolved))
    return score_networks(start.resolved, val, start.load("tokenizer"), networks, device)
