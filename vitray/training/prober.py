"""Probes and figures beside training, in a process of their own, so that no step waits for them."""

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitray.config import Run
from vitray.errors import ConfigError, cut_middle, one_line
from vitray.inspection.report.subjects import ChosenImages
from vitray.training import checkpoints
from vitray.training.host import Host, Job
from vitray.training.learner import Learner
from vitray.training.messages import FigurePictures, Note
from vitray.training.probes import ProbeImages, network_weights, probe_weights, read_probe_images
from vitray.training.resolved import ResolvedRun
from vitray.training.state import TrainState, report_collapse

# Probes that may wait for their process: each holds a copy of the network.
MOST_WAITING = 2
LONGEST_REASON = 300
# Seconds that the end of a run waits for the probes of one step: their process may have lost its place for good.
LONGEST_WAIT = 1800.0
# Added to the niceness of Ray's workers, 15: when they compete for its CPU, the probes get less than a third of it.
NICENESS = 4


class Probed(NamedTuple):
    """The probe scores and the figures of one step's weights."""

    values: dict[str, float]
    """Of evaluate.probes."""
    pictures: dict[str, bytes]
    """Of evaluate.figures: PNG."""


class Prober:
    """Starts probes and figures of a run, on rank 0, and returns them in order; without either it does nothing."""

    def __init__(self, run: Run, run_dir: str, host: Host) -> None:
        self._run_dir, self._host = run_dir, host
        self._module = run.task.traits.network
        self._is_active = host.rank == 0 and run.evaluate.has_prober
        wanted = {"probes": run.evaluate.probes, "figures": run.evaluate.figures}
        self._names = " and ".join(name for name, chosen in wanted.items() if chosen)
        self._started: dict[int, Job] = {}

    def start(self, step: int, learner: Learner, *, is_last: bool) -> None:
        """Probe the current weights, or their average if there is one; the last step's probes are never left out."""
        if self._is_active:
            average = {"average": learner.average.state()} if learner.average else {}
            weights = network_weights({"model": learner.task.state_dict()} | average, self._module)
            self._start(step, weights, is_needed=is_last)

    def restart_pending(self, state: TrainState) -> None:
        """Restart the interrupted probes from their checkpoints; report those for which this is impossible."""
        if not self._is_active:
            return
        saved = checkpoints.complete_steps(self._run_dir)
        for step in state.pending_probes:
            if step not in saved:
                self._note(f"the {self._names} of step {step:,} were lost when the run was interrupted")
                continue
            try:
                parts = checkpoints.read_checkpoint(self._run_dir, step).parts
            except (ConfigError, OSError) as error:
                self._note(f"the {self._names} of step {step:,} were lost with their checkpoint: {one_line(error)}")
                continue
            self._start(step, network_weights(parts, self._module), is_needed=True)

    def finished(self, *, wait: bool = False) -> Iterator[tuple[int, Probed]]:
        """Yield step and result of the probes that have finished since the last call, in order."""
        for step, probed in list(self._started.items()):
            if not wait and self._host.unfinished([probed], 0):
                return
            del self._started[step]
            try:
                result = probed.result(LONGEST_WAIT)
            except Exception as error:
                # An error of Ray holds that of the job.
                reason = cut_middle(one_line(getattr(error, "cause", None) or error), LONGEST_REASON)
                self._note(f"the {self._names} of step {step:,} failed, and training goes on: {reason}")
                continue
            yield step, result

    def is_ready(self, seconds: float, waited: float) -> bool:
        """Whether all probes have finished; waits for them for some seconds.

        After `waited` seconds, those that are too late are left out with a note.
        """
        running = self._host.unfinished(list(self._started.values()), seconds)
        if running and waited > LONGEST_WAIT * len(self._started):
            late = [step for step, probed in self._started.items() if probed in running]
            self._started = {step: probed for step, probed in self._started.items() if step not in late}
            steps = ", ".join(f"{step:,}" for step in late)
            self._note(f"the {self._names} of step {steps} are left out: they have not finished in {waited:.0f} s")
            return True
        return not running

    @property
    def pending(self) -> list[int]:
        """The steps whose probes are running or waiting."""
        return list(self._started)

    def discard_after(self, step: int) -> None:
        """Discard the probes of later steps, which the run repeats."""
        self._started = {started: probed for started, probed in self._started.items() if started <= step}

    def _start(self, step: int, weights: Mapping[str, Tensor], *, is_needed: bool) -> None:
        waiting = self._host.unfinished(list(self._started.values()), 0)
        if len(waiting) >= MOST_WAITING and not is_needed:
            self._note(
                f"the {self._names} of step {step:,} are left out: those of {len(waiting)} earlier evaluations still"
                " run; raise evaluate.every, or lower evaluate.probe_images or evaluate.examples"
            )
            return
        # As arrays, which Ray copies once into its object store.
        arrays = {name: each.numpy() for name, each in checkpoints.to_host(weights).items()}
        self._started[step] = self._host.start_probes(step, arrays)

    def _note(self, text: str) -> None:
        self._host.send(Note(text))


class ProbeProcess:
    """Computes the probes and figures of one run, in a process of its own."""

    def __init__(self, resolved: ResolvedRun, run_dir: str, device: str) -> None:
        os.nice(NICENESS)
        self._resolved, self._name = resolved, run_dir.rstrip("/").rpartition("/")[2]
        self._device = torch.device(device)
        self._images: ProbeImages | None = None
        self._shown: ChosenImages | None = None

    def probe(self, step: int, weights: Mapping[str, np.ndarray]) -> Probed:
        """Return probes and figures of a ViT's weights; the images are read at the first call."""
        run, dataset, holdout_mask = self._resolved.run, self._resolved.dataset, self._resolved.holdout_mask
        tensors = {name: torch.tensor(each) for name, each in weights.items()}
        probed = Probed({}, {})
        if run.evaluate.probes:
            if self._images is None:
                self._images = read_probe_images(run, dataset, holdout_mask)
            probed = probed._replace(values=probe_weights(run, tensors, self._images, self._device))
        if run.evaluate.figures:
            from vitray.training.figures import draw_figures, read_shown_images  # Matplotlib takes a second to import

            if self._shown is None:
                self._shown = read_shown_images(run, dataset, holdout_mask)
            title = f"{self._name}, step {step:,}"
            probed = probed._replace(pictures=draw_figures(run, tensors, self._shown, title, self._device))
        return probed


def log_probes(finished: Iterator[tuple[int, Probed]], run: Run, state: TrainState, host: Host) -> None:
    """Send finished probes as metrics of their steps, and figures; report features that have collapsed."""
    for step, (values, pictures) in finished:
        if pictures:
            host.send(FigurePictures(step, pictures))
        if not values:
            continue
        host.send(state.recorded(step, {f"probe/{name}": float(value) for name, value in values.items()}))
        report_collapse(step, values, run, state, host)
