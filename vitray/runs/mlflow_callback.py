"""MLflow for any job of Ray Train: `vitray.MLflowCallback`, one run through the restarts of its workers and its driver.

Ray Train calls it in the process of its controller, which ends without a word. So it passes all on to the driver, which
keeps the records: they wait on its disk while MLflow is away, and the run ends as the driver's block does.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Event, Thread
from types import TracebackType
from typing import Any, NamedTuple, Self

import ray
from ray.train import Checkpoint, UserCallback

from vitray.config.parsing import flatten
from vitray.errors import ConfigError, one_line
from vitray.runs.train_on_ray import RayMailbox
from vitray.system.host_facts import SystemSampler
from vitray.tracking.tracker import TrackedRun, Tracker

# Seconds between two looks at the mailbox, and between two samples of the driver's machine.
PAUSE, SAMPLE_SECONDS = 0.5, 10.0


class Reported(NamedTuple):
    """What the workers have reported."""

    values: dict[str, Any]
    """Of the first worker."""
    checkpoint: str | None
    """Its place."""
    job: str
    """The name that Ray Train gives the job."""


class Failed(NamedTuple):
    """Workers that have failed."""

    reason: str


class MLflowCallback(UserCallback):
    """A job of Ray Train as one run of MLflow.

        with MLflowCallback("photos", "first", params=config) as tracking:
            TorchTrainer(train, run_config=RunConfig(callbacks=[tracking])).fit()

    The numbers that the first worker reports are its metrics, those of nested mappings as in `val/top1`. Beside them it
    has the load of the driver's machine, the places of checkpoints, the failures of workers, and a status: FINISHED,
    FAILED or KILLED, as the block ends. Records wait on disk while MLflow is away.
    """

    def __init__(
        self,
        experiment: str,
        name: str,
        *,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        description: str = "",
        step: str = "step",
    ) -> None:
        """`name` of the run: the same name continues it, and a step that it has is not logged again.

        step: the reported value that counts steps; without it, reports are counted
        """
        self._run = TrackedRun(
            uid=hashlib.sha256(f"{experiment}\n{name}".encode()).hexdigest()[:32],
            name=name,
            experiment=experiment,
            starts=int(time.time()),  # only their order counts
        )
        self._begin = dict(flatten(params or {}, "")), dict(tags or {}), description
        self._step = step
        self._reports = self._failures = self._last_step = 0
        self._tags: dict[str, str] = {}
        self._ended = Event()
        self._actor: Any = None  # the mailbox, in both processes

    # ---- in the controller -------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Only the mailbox travels to the controller."""
        if self._actor is None:
            raise ConfigError("MLflowCallback: use it in its block, `with MLflowCallback(...) as tracking:`")
        return {"_actor": self._actor}

    def after_report(
        self, run_context: Any, metrics: Sequence[Mapping[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """Pass on what the first worker has reported."""
        place = checkpoint.path if checkpoint else None
        self._actor.put.remote(Reported(dict(metrics[0]), place, str(run_context.run_config.name)))

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Pass on which workers have failed."""
        del run_context
        texts = [f"worker {rank}: {one_line(error)[:300]}" for rank, error in sorted(worker_exceptions.items())[:5]]
        self._actor.put.remote(Failed("; ".join(texts)))

    # ---- in the driver -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not ray.is_initialized():
            raise ConfigError("MLflowCallback: connect to Ray first, with ray.init()")
        self._mailbox = RayMailbox()
        self._actor = self._mailbox.actor
        self._tracker = Tracker(self._run, *self._begin)
        self._thread = Thread(target=self._record, name="mlflow callback", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._take()
        self._tracker.__exit__(kind, error, trace)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until MLflow has the run."""
        return self._tracker.run_id

    def _record(self) -> None:
        sampler, sampled = SystemSampler(), 0.0
        while not self._ended.wait(PAUSE):
            self._take()
            if time.monotonic() > sampled + SAMPLE_SECONDS:
                sampled = time.monotonic()
                self._tracker.metrics(self._last_step, sampler.sample())

    def _take(self) -> None:
        messages: list[Any] = self._mailbox.take()
        for message in messages:
            match message:
                case Reported(values, checkpoint, job):
                    self._report(dict(_flat(values)), checkpoint, job)
                case Failed(reason):
                    self._failures += 1
                    self._tag("ray.failures", str(self._failures))
                    self._tag("ray.last_failure", reason)

    def _report(self, values: Mapping[str, Any], checkpoint: str | None, job: str) -> None:
        self._reports += 1
        step: Any = values.get(self._step)
        self._last_step = int(step) if _is_number(step) else self._reports
        numbers = {name: value for name, value in values.items() if _is_number(value) and name != self._step}
        self._tracker.metrics(self._last_step, numbers)
        self._tag("ray.job", job)
        if checkpoint:
            self._tag("ray.checkpoint", checkpoint)
            self._tag("ray.checkpoint_step", str(self._last_step))

    def _tag(self, name: str, value: str) -> None:
        if self._tags.get(name) != value:
            self._tags[name] = value
            self._tracker.tag(name, value)


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, as in `val/top1`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0)
