"""Evaluation of the val split, by the training workers or in separate tasks beside them."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import ray
import torch
from torch import Tensor

from vitray.config import Run
from vitray.data.stream import Share
from vitray.data.stream.prefetch import Prefetcher
from vitray.evaluation.scores import EvaluationSet, Score, broadcast_buffers, evaluate, evaluate_loss
from vitray.models.probabilities import probability_of
from vitray.tasks.build import Task
from vitray.tasks.supervised import Classification
from vitray.training import checkpoints
from vitray.training.context import WorkerContext
from vitray.training.data import open_evaluation, own_broadcast, with_masks
from vitray.training.driver_client import DriverClient
from vitray.training.examples import ExampleImages
from vitray.training.learner import Learner
from vitray.training.messages import ExamplePictures, Pictures
from vitray.training.state import TrainState

# A task's tensors by name.
Tensors = dict[str, Tensor]


class Evaluator:
    """Starts the evaluations of a run and returns their scores in order."""

    def __init__(self, context: WorkerContext, share: Share, device: torch.device, learner: Learner) -> None:
        self.latest_step: int | None = None
        """The step of the last evaluation that was started."""
        self._context, self._learner, self._is_reporter = context, learner, share.rank == 0
        self._is_separate = context.run.evaluate.where != "workers"
        share = share._replace(broadcast=own_broadcast())
        self._scorer = None if self._is_separate else Scorer(context, learner.task, share, device)
        # {step: scores}; of separate evaluations, an object reference to them.
        self._started: dict[int, Any] = {}

    def start(self, step: int) -> None:
        """Evaluate the current weights, and their average if there is one."""
        self.latest_step = step
        task, average = self._learner.task, self._learner.average
        if self._scorer is not None:
            self._started[step] = list(self._score_here(self._scorer))
        elif self._is_reporter:
            parts = [task.state_dict(), *([average.state()] if average else [])]
            self._start_task(step, [_on_host(part) for part in parts])

    def restart_pending(self, state: TrainState) -> list[int]:
        """Restart the interrupted evaluations from their checkpoints; return the steps for which this is impossible."""
        lost = []
        for step in state.pending:
            if not self._is_separate or step not in checkpoints.complete_steps(self._context.run_dir):
                lost.append(step)
            elif self._is_reporter:
                parts = checkpoints.read_checkpoint(self._context.run_dir, step).parts
                self._start_task(step, [_on_host(parts[name]) for name in ("model", "average") if name in parts])
                self.latest_step = step
        return lost

    def finished(self, *, wait: bool = False) -> Iterator[tuple[int, list[Score]]]:
        """Yield step and scores of each evaluation finished since the last call, in order."""
        for step, scores in list(self._started.items()):
            if self._is_separate:
                if not wait and not ray.wait([scores], timeout=0)[0]:
                    return
                scores = ray.get(scores)
            del self._started[step]
            yield step, scores

    def is_ready(self, seconds: float) -> bool:
        """Whether all evaluations have finished; waits for them for some seconds."""
        tasks = list(self._started.values()) if self._is_separate else []
        return not tasks or not ray.wait(tasks, num_returns=len(tasks), timeout=seconds)[1]

    @property
    def pending(self) -> list[int]:
        """The steps whose evaluations are running."""
        return list(self._started)

    def discard_after(self, step: int) -> None:
        """Discard the evaluations of later steps, which the run repeats."""
        for started in [each for each in self._started if each > step]:
            scores = self._started.pop(started)
            if self._is_separate:
                ray.cancel(scores)

    def _score_here(self, scorer: "Scorer") -> Iterator[Score]:
        task, average = self._learner.task, self._learner.average
        for weights in [nullcontext(), *([average.applied_to(task)] if average else [])]:
            with weights:
                broadcast_buffers(task)
                yield scorer.score()

    def _start_task(self, step: int, networks: list[Tensors]) -> None:
        # Sequential: two tasks at once would occupy the CPU that decodes their images.
        previous = list(self._started.values())[-1:]
        # Outside the placement group of a trial, which has no room for it.
        evaluate = self._context.run.evaluate
        gpus = evaluate.gpus if evaluate.where == "gpu" else 0
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": "DEFAULT"}
        self._started[step] = ray.remote(score_networks).options(**options).remote(self._context, networks, *previous)


def score_networks(context: WorkerContext, networks: list[Tensors], _previous: Any = None) -> list[Score]:
    """Return the scores of some networks, in a task with a device of its own."""
    device = torch.device("cuda" if context.run.evaluate.where == "gpu" else "cpu")
    task = context.build(device)
    scorer, scores = Scorer(context, task, Share(0, 1), device), []
    for network in networks:
        task.load_state_dict(networks[0] | network)  # frozen weights have no average
        scores.append(scorer.score())
    return scores


class Scorer:
    """Scores a task on the val split, together with all workers of `share`."""

    def __init__(self, context: WorkerContext, task: Task, share: Share, device: torch.device) -> None:
        self._run, self._task, self._share, self._device = context.run, task, share, device
        self._val = open_evaluation(context)
        has_pictures = isinstance(task, Classification) and share.rank == 0 and context.run.evaluate.examples
        self._examples = ExampleImages(context, device) if has_pictures else None
        network = task.vit if isinstance(task, Classification) else task
        # Compiled once, for one shape: every batch is padded to the same size.
        mode: Any = self._run.compute.evaluation_compile
        self._forward: Any = torch.compile(network, dynamic=False, mode=mode) if mode else network

    def score(self) -> Score:
        """Return the score of the task's current weights."""
        run, task, device = self._run, self._task, self._device
        batches = Prefetcher((with_masks(batch, run, None) for batch in self._val.evaluate(self._share)), device)
        val, precision = self._val, autocast(run, device)
        data = EvaluationSet(batches, val.images, run.data.normalize, lambda: list(val.corrupt))
        if isinstance(task, Classification):
            classes = run.model.num_classes or 0
            score = evaluate(self._forward, data, classes, device, precision, probability_of(run))
            score = score._replace(examples=self._examples and self._examples.look(task.vit))
        else:
            score = evaluate_loss(task, task.pictures, data, device, precision, self._forward)
        val.check_corrupt(score.corrupt)
        return score


def autocast(run: Run, device: torch.device) -> torch.autocast:
    """Return the context of the run's precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=run.compute.precision == "bf16")


def log_scores(finished: Iterator[tuple[int, list[Score]]], state: TrainState, client: DriverClient) -> None:
    """Add finished evaluations to the state and send their metrics."""
    for step, scores in finished:
        corrupt = scores[-1].corrupt
        if corrupt and (state.latest is None or state.latest.corrupt != corrupt):
            few = ", ".join(corrupt[:5]) + (f" and {len(corrupt) - 5} more" if len(corrupt) > 5 else "")
            client.note(f"{len(corrupt)} evaluated images could not be decoded and are not scored: {few}")
        state.add_scores(step, scores)
        best = {"best/val_top1": state.best_top1, "best/val_loss": state.best_loss}
        values = {name: value for name, value in best.items() if value is not None}
        for score, suffix in zip(scores, ("", "_ema"), strict=False):
            values |= score.metrics(suffix)
        client.metrics(step, state, values)
        if scores[-1].pictures is not None:
            client.send(Pictures(step, scores[-1].pictures))
        if scores[-1].examples is not None:
            client.send(ExamplePictures(step, scores[-1].examples))


def _on_host(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
