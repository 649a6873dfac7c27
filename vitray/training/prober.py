"""Probes and figures beside the workers: an actor of its own computes them, so that no step waits for them."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from vitray.config.pretraining import Masked
from vitray.errors import ConfigError, cut_middle, one_line
from vitray.inspection.report.subjects import ChosenImages
from vitray.training import checkpoints
from vitray.training.context import WorkerContext
from vitray.training.driver_client import DriverClient
from vitray.training.learner import Learner
from vitray.training.messages import FigurePictures
from vitray.training.probes import ProbeImages, network_weights, probe_weights, read_probe_images
from vitray.training.state import TrainState

# Probes that may wait for the actor: each holds a copy of the network.
MOST_WAITING = 2
# Restarts of the actor after its process or its node was lost.
RESTARTS = 3
# Added to the niceness of Ray's workers, 15: when they compete for its CPU, the actor gets less than a third of it.
NICENESS = 4
LONGEST_REASON = 300
# Seconds that the end of a run waits for the probes of one step: their actor may have lost its place for good.
LONGEST_WAIT = 1800.0


class Probed(NamedTuple):
    """The probe scores and the figures of one step's weights."""

    values: dict[str, float]
    """Of evaluate.probes."""
    pictures: dict[str, bytes]
    """Of evaluate.figures: PNG."""


class Prober:
    """Starts probes and figures of a run, on rank 0, and returns them in order; without either it does nothing."""

    def __init__(self, context: WorkerContext, client: DriverClient, *, is_reporter: bool) -> None:
        self._context, self._client = context, client
        self._is_active = is_reporter and context.run.evaluate.has_prober
        wanted = {"probes": context.run.evaluate.probes, "figures": context.run.evaluate.figures}
        self._jobs = " and ".join(name for name, chosen in wanted.items() if chosen)
        self._actor: Any = None
        self._started: dict[int, Any] = {}

    def start(self, step: int, learner: Learner, *, is_last: bool) -> None:
        """Probe the current weights, or their average if there is one; the last step's probes are never left out."""
        if self._is_active:
            average = {"average": learner.average.state()} if learner.average else {}
            self._start(step, network_weights({"model": learner.task.state_dict()} | average), is_needed=is_last)

    def restart_pending(self, state: TrainState) -> None:
        """Restart the interrupted probes from their checkpoints; report those for which this is impossible."""
        if not self._is_active:
            return
        saved = checkpoints.complete_steps(self._context.run_dir)
        for step in state.pending_probes:
            if step not in saved:
                self._client.note(f"the {self._jobs} of step {step:,} were lost when the run was interrupted")
                continue
            try:
                parts = checkpoints.read_checkpoint(self._context.run_dir, step).parts
            except (ConfigError, OSError) as error:
                self._client.note(
                    f"the {self._jobs} of step {step:,} were lost with their checkpoint: {one_line(error)}"
                )
                continue
            self._start(step, network_weights(parts), is_needed=True)

    def finished(self, *, wait: bool = False) -> Iterator[tuple[int, Probed]]:
        """Yield step and result of the probes that have finished since the last call, in order."""
        for step, probed in list(self._started.items()):
            if not wait and not ray.wait([probed], timeout=0)[0]:
                return
            del self._started[step]
            try:
                yield step, ray.get(probed, timeout=LONGEST_WAIT)
            except RayError as error:
                reason = cut_middle(one_line(getattr(error, "cause", None) or error), LONGEST_REASON)
                self._client.note(f"the {self._jobs} of step {step:,} failed, and training goes on: {reason}")

    def is_ready(self, seconds: float, waited: float) -> bool:
        """Whether all probes have finished; waits for them for some seconds.

        After `waited` seconds, those that are too late are left out with a note.
        """
        running = self._running(seconds)
        if running and waited > LONGEST_WAIT * len(self._started):
            late = [step for step, probed in self._started.items() if probed in running]
            self._started = {step: probed for step, probed in self._started.items() if step not in late}
            steps = ", ".join(f"{step:,}" for step in late)
            self._client.note(
                f"the {self._jobs} of step {steps} are left out: they have not finished in {waited:.0f} s"
            )
            return True
        return not running

    @property
    def pending(self) -> list[int]:
        """The steps whose probes are running or waiting."""
        return list(self._started)

    def discard_after(self, step: int) -> None:
        """Discard the probes of later steps, which the run repeats."""
        self._started = {started: probed for started, probed in self._started.items() if started <= step}

    def _running(self, seconds: float) -> list[Any]:
        """Return the probes that have not finished after some seconds."""
        started = list(self._started.values())
        return ray.wait(started, num_returns=len(started), timeout=seconds)[1] if started else []

    def _start(self, step: int, weights: Mapping[str, Tensor], *, is_needed: bool) -> None:
        waiting = self._running(0)
        if len(waiting) >= MOST_WAITING and not is_needed:
            self._client.note(
                f"the {self._jobs} of step {step:,} are left out: those of {len(waiting)} earlier evaluations still"
                " run; raise evaluate.every, or lower evaluate.probe_images or evaluate.examples"
            )
            return
        if self._actor is None:
            self._actor = start_actor(self._context)
        # As arrays, which Ray copies once into its object store.
        arrays = {name: each.cpu().numpy() for name, each in weights.items()}
        self._started[step] = self._actor.probe.remote(step, arrays)


class ProbeActor:
    """Computes the probes and figures of one run in a process of its own."""

    def __init__(self, context: WorkerContext) -> None:
        os.nice(NICENESS)
        self._context = context
        self._device = torch.device("cuda" if context.probe_gpus else "cpu")
        self._images: ProbeImages | None = None
        self._shown: ChosenImages | None = None

    def probe(self, step: int, weights: dict[str, np.ndarray]) -> Probed:
        """Return probes and figures of a ViT's weights; the images are read at the first call."""
        context, run = self._context, self._context.run
        tensors = {name: torch.tensor(each) for name, each in weights.items()}
        probed = Probed({}, {})
        if run.evaluate.probes:
            if self._images is None:
                self._images = read_probe_images(run, context.dataset, context.holdout_mask)
            probed = probed._replace(values=probe_weights(run, tensors, self._images, self._device))
        if run.evaluate.figures:
            from vitray.training.figures import draw_figures, read_shown_images  # Matplotlib takes a second to import

            if self._shown is None:
                self._shown = read_shown_images(run, context.dataset, context.holdout_mask)
            title = f"{context.run_dir.rstrip('/').rpartition('/')[2]}, step {step:,}"
            probed = probed._replace(pictures=draw_figures(run, tensors, self._shown, title, self._device))
        return probed


def start_actor(context: WorkerContext) -> Any:
    """Start the actor outside the placement group of a trial, which has no room for it."""
    options = {"num_cpus": 1, "num_gpus": context.probe_gpus, "scheduling_strategy": "DEFAULT"}
    actor: Any = ray.remote(ProbeActor)
    context = context._replace(mailbox=None, initial_weights=None, tokenizer=None, teacher=None)
    return actor.options(**options, max_restarts=RESTARTS, max_task_retries=RESTARTS).remote(context)


def log_probes(
    finished: Iterator[tuple[int, Probed]], context: WorkerContext, state: TrainState, client: DriverClient
) -> None:
    """Send finished probes as metrics of their steps, and figures; report features that have collapsed."""
    guard = context.run.guard
    for step, (values, pictures) in finished:
        if pictures:
            client.send(FigurePictures(step, pictures))
        if not values:
            continue
        client.metrics(step, state, {f"probe/{name}": float(value) for name, value in values.items()})
        if not isinstance(context.run.task, Masked):
            continue
        before, found = state.collapse, state.check_collapse(step, values, guard)
        # A later probe does not take back a stop that all workers may have decided on.
        state.collapse = (before or found) if guard.on_collapse == "stop" else found
        if state.collapse and not before:
            client.note(f"collapse: {state.collapse}")
