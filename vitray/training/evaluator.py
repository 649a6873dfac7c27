"""Evaluation of the val split, by the training workers or in jobs beside them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from vitray.config import Run
from vitray.data.stream.batches import HostBatch, Share
from vitray.data.stream.prefetch import Prefetcher, new_share
from vitray.data.stream.stream import Stream
from vitray.metrics.scores import (
    EvaluationSet,
    Score,
    broadcast_buffers,
    evaluate,
    evaluate_labels,
    evaluate_loss,
)
from vitray.models.precision import precision_on
from vitray.models.probabilities import probability_of
from vitray.models.tokenizer import VisualTokenizer
from vitray.tasks.build import Task, build_task
from vitray.training import checkpoints
from vitray.training.compiling import compiled
from vitray.training.data import evaluation_spec, with_masks
from vitray.training.examples import ExampleImages
from vitray.training.host import Host
from vitray.training.learner import Learner
from vitray.training.messages import Evaluation, ExamplePictures, Note, Pictures
from vitray.training.resolved import ResolvedRun
from vitray.training.state import TrainState, report_collapse

# A worker's images of all evaluations are decoded once where they take no more than this.
KEPT_BYTES = 2**30


class Evaluator:
    """Starts the evaluations of a run and returns their scores in order."""

    def __init__(self, resolved: ResolvedRun, run_dir: str, host: Host, learner: Learner) -> None:
        self.latest_step: int | None = None
        """The step of the last evaluation that was started."""
        self._run_dir, self._host, self._learner = run_dir, host, learner
        share = new_share(host.rank, host.workers, host.node)
        self._scorer = None
        if resolved.run.evaluate.where == "workers":
            val = host.open_stream(evaluation_spec(resolved))
            self._scorer = Scorer(resolved, val, learner.task, share, host.device)
        # {step: scores}, or the job that computes them.
        self._started: dict[int, Any] = {}

    def start(self, step: int) -> None:
        """Evaluate the current weights, and their average if there is one."""
        self.latest_step = step
        task, average = self._learner.task, self._learner.average
        if self._scorer is not None:
            self._started[step] = list(self._score_here(self._scorer))
        elif self._host.rank == 0:
            self._start_job(step, [task.state_dict(), *([average.state()] if average else [])])

    def restart_pending(self, state: TrainState) -> list[int]:
        """Restart the interrupted evaluations from their checkpoints; return the steps for which this is impossible."""
        lost = []
        for step in state.pending:
            if self._scorer is not None or step not in checkpoints.complete_steps(self._run_dir):
                lost.append(step)
            elif self._host.rank == 0:
                parts = checkpoints.read_checkpoint(self._run_dir, step).parts
                self._start_job(step, [parts[name] for name in ("model", "average") if name in parts])
                self.latest_step = step
        return lost

    def finished(self, *, wait: bool = False) -> Iterator[tuple[int, list[Score]]]:
        """Yield step and scores of each evaluation finished since the last call, in order."""
        for step, scores in list(self._started.items()):
            if self._scorer is None:
                if not wait and self._host.unfinished([scores], 0):
                    return
                scores = scores.result()
            del self._started[step]
            yield step, scores

    def is_ready(self, seconds: float) -> bool:
        """Whether all evaluations have finished; waits for them for some seconds."""
        jobs = list(self._started.values()) if self._scorer is None else []
        return not self._host.unfinished(jobs, seconds)

    @property
    def pending(self) -> list[int]:
        """The steps whose evaluations are running."""
        return list(self._started)

    def discard_after(self, step: int) -> None:
        """Discard the evaluations of later steps, which the run repeats."""
        for started in [each for each in self._started if each > step]:
            scores = self._started.pop(started)
            if self._scorer is None:
                scores.cancel()

    def _score_here(self, scorer: "Scorer") -> Iterator[Score]:
        task, average = self._learner.task, self._learner.average
        for weights in [nullcontext(), *([average.applied_to(task)] if average else [])]:
            with weights:
                broadcast_buffers(task)
                yield scorer.score()

    def _start_job(self, step: int, networks: Sequence[Mapping[str, Tensor]]) -> None:
        # One after another: two jobs at once would occupy the CPU that decodes their images.
        after = next(reversed(self._started.values()), None)
        self._started[step] = self._host.start_scores([checkpoints.to_host(each) for each in networks], after)


def score_networks(
    resolved: ResolvedRun,
    val: Stream,
    tokenizer: VisualTokenizer | None,
    networks: Sequence[Mapping[str, Tensor]],
    device: torch.device,
) -> list[Score]:
    """Return the scores of some weights of the task, beside training."""
    task = build_task(resolved.run, tokenizer and tokenizer.to(device)).to(device)
    scorer, scores = Scorer(resolved, val, task, Share(0, 1), device), []
    for network in networks:
        task.load_state_dict({**networks[0], **network})  # frozen weights have no average
        scores.append(scorer.score())
    return scores


class Scorer:
    """Scores a task on the val split, together with all workers of `share`."""

    def __init__(self, resolved: ResolvedRun, val: Stream, task: Task, share: Share, device: torch.device) -> None:
        self._run, self._val, self._task, self._share, self._device = resolved.run, val, task, share, device
        self._kept: list[HostBatch] = []
        has_pictures = self._run.classification and share.rank == 0 and self._run.evaluate.examples
        self._examples = ExampleImages(resolved, device) if has_pictures else None
        network = task.vit if self._run.classification else task
        # Compiled once, for one shape: every batch is padded to the same size, but for a number of hidden patches.
        dynamic = None if "hidden" in self._run.task.traits.needs else False
        mode = self._run.compute.compile_on(device.type, graphs=False)
        self._forward: Any = compiled(network, mode, dynamic=dynamic)

    def score(self) -> Score:
        """Return the score of the task's current weights."""
        run, task, device = self._run, self._task, self._device
        batches = Prefetcher((with_masks(batch, run, None) for batch in self._batches()), device)
        val, precision = self._val, autocast(run, device)
        data = EvaluationSet(batches, val.images, run.data.normalize, lambda: list(val.corrupt))
        if run.classification:
            classes = run.model.num_classes or 0
            scored = evaluate_labels if run.has_several_labels else evaluate
            score = scored(self._forward, data, classes, device, precision, probability_of(run))
            score = score._replace(examples=self._examples and self._examples.look(task.vit))
        else:
            score = evaluate_loss(task, run.task.traits, data, device, precision, self._forward)
        val.check_corrupt(score.corrupt)
        return score

    def _batches(self) -> Iterator[HostBatch]:
        """Yield this worker's batches, from the second pass on without decoding where memory holds them."""
        if self._kept:
            yield from self._kept
            return
        kept: list[HostBatch] = []
        for batch in self._val.evaluate(self._share):
            # Of all workers alike, as a stream gives each of them its part only if the others take theirs.
            arrays = [each for each in (batch.images, batch.views, batch.masks) if each is not None]
            each_bytes = sum(array.nbytes for array in arrays) / max(1, len(batch.images))
            if each_bytes * self._val.images <= KEPT_BYTES * self._share.workers:
                kept.append(batch)
            yield batch
        self._kept = kept


def autocast(run: Run, device: torch.device) -> torch.autocast:
    """Return the context of the run's precision."""
    is_bf16 = precision_on(device, run.compute.precision) == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16)


def log_scores(finished: Iterator[tuple[int, list[Score]]], run: Run, state: TrainState, host: Host) -> None:
    """Add finished evaluations to the state and send their metrics; report features that have collapsed."""
    for step, scores in finished:
        corrupt = scores[-1].corrupt
        if corrupt and (state.latest is None or state.latest.corrupt != corrupt):
            few = ", ".join(corrupt[:5]) + (f" and {len(corrupt) - 5} more" if len(corrupt) > 5 else "")
            host.send(Note(f"{len(corrupt)} evaluated images could not be decoded and are not scored: {few}"))
        state.add_scores(step, scores)
        values = {f"best/val_{name}": value for name, value in state.best.items()}
        for score, suffix in zip(scores, ("", "_ema"), strict=False):
            values |= score.metrics(suffix)
        host.send(state.recorded(step, values))
        if scores[-1].pictures is not None:
            host.send(Pictures(step, scores[-1].pictures))
        if scores[-1].examples is not None:
            host.send(ExamplePictures(step, scores[-1].examples))
        report_collapse(step, scores[-1].others, run, state, host)


def evaluation_message(score: Score) -> Evaluation:
    """Return the parts of a score that are plotted, as types that import no torch."""
    mistakes = [(each.probability, each.row, each.label, each.predicted) for each in score.mistakes]
    return Evaluation(score.confusion, mistakes)
