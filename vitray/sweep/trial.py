"""One trial of a sweep, as Ray Tune runs it: a whole training run, in a thread, that can be told to end early.

A trial that was run before is told again from its record instead of trained again, so that a scheduler that starts anew
comes to know all that the interrupted one knew.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ray import tune

from vitray import storage
from vitray.config import Run
from vitray.data.shards.manifest import Dataset
from vitray.errors import ConfigError, RunError
from vitray.runs.driver import Member, train
from vitray.sweep.searcher import is_interrupted
from vitray.sweep.space import run_of
from vitray.sweep.trial_record import Record, read_record, write_record
from vitray.sweep.trial_store import read_entries

# Seconds that a trial which is told to end has to save its state and to say goodbye.
PATIENCE = 300.0


class Context(NamedTuple):
    """What all trials of a sweep are told."""

    base: Run
    """What all share."""
    dataset: Dataset
    """Opened once for all that are trained on it."""
    home: str
    """The sweep's folder, in which each trial has its own."""
    uid: str
    """Of the run that all are shown below."""
    metric: str
    asks: bool
    """Whether a scheduler may end a trial early."""
    at_a_time: int
    """Trials that share the cluster."""
    environment: dict[str, str]
    """Of the driver, that a trial's process may have been started without: not written anywhere."""


class Trial(tune.Trainable):
    """A training run, score by score."""

    def setup(self, config: dict[str, Any], context: Context | None = None) -> None:  # type: ignore[override]
        """Begin the trial of this name."""
        assert context is not None
        os.environ |= context.environment
        self._context = context
        self._begin(config["name"])

    def step(self) -> dict[str, Any]:
        """The next score, or the end; to be asked for it is to be told to go on."""
        if self._waits:
            self._answers.put(False)
        told = self._told.get()
        if isinstance(told, BaseException):
            raise RuntimeError(str(told)) from None
        self._waits = not told["done"]
        return told

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Be another trial, in the same process: all is loaded already."""
        self.cleanup()
        self._begin(new_config["name"])
        return not self._thread_left

    def cleanup(self) -> None:
        """End, and wait until the run has saved its state and given its workers back.

        In a sweep that is told to end the run saves where it is, and goes on from there in another process.
        """
        goes_on = is_interrupted(self._context.home)
        if goes_on:
            self._ends.set()
        self._answers.put(not goes_on)
        self._thread.join(PATIENCE)
        self._thread_left = self._thread.is_alive()

    # ---- the run, in its thread --------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        self._told: queue.Queue[Any] = queue.Queue()
        self._answers: queue.Queue[bool] = queue.Queue()
        self._ends = threading.Event()
        self._waits = self._thread_left = False
        self._thread = threading.Thread(target=self._work, args=(name,), name="trial", daemon=True)
        self._thread.start()

    def _work(self, name: str) -> None:
        try:
            self._run(name)
        except BaseException as error:  # told to Tune by the next step
            self._told.put(error)

    def _run(self, name: str) -> None:
        home = storage.join(self._context.home, name)
        record = read_record(home)
        for step, value in record.scores:
            if self._is_enough(step, value):
                if not record.is_over:
                    write_record(home, record._replace(state="stopped early"))
                return
        if record.state == "failed":
            raise RunError(record.reason or "failed")
        if record.state in ("finished", "stopped early"):
            self._tell_end(record)
            return
        record = self._train(name, home, record)
        self._tell_end(record)

    def _train(self, name: str, home: str, record: Record) -> Record:
        context = self._context
        write_record(home, record := record._replace(state="running", began=time.time(), ended=None))

        def is_enough(step: int, values: Mapping[str, float]) -> bool:
            nonlocal record
            if context.metric not in values or any(step <= known for known, _ in record.scores):
                return False
            record = record._replace(scores=(*record.scores, (step, values[context.metric])))
            with contextlib.suppress(ConfigError):  # storage that is away costs a restart its memory, not the trial
                write_record(home, record)
            return self._is_enough(step, values[context.metric])

        try:
            run = run_of(context.base, read_entries(context.home)[name].point, context.home)
            member = Member(context.uid, is_enough, context.asks, context.dataset, context.at_a_time, self._ends)
            ended = train(run, name, context.home, member=member)
        except (RunError, ConfigError) as error:
            write_record(home, record._replace(state="failed", reason=str(error), ended=time.time()))
            raise
        write_record(home, record := record._replace(state=ended.state, ended=time.time()))
        return record

    def _is_enough(self, step: int, value: float) -> bool:
        """Tell Tune a score, and wait for what its scheduler says to it."""
        self._told.put({"step": step, "goal": value, "done": False})
        return self._answers.get()

    def _tell_end(self, record: Record) -> None:
        step, value = record.scores[-1] if record.scores else (0, float("nan"))
        self._told.put({"step": step, "goal": value, "done": True})
