"""When every image of the val split is counted: by the workers, who stop training for it, or apart, beside them."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import ray
import ray.train.torch
import torch
from torch import Tensor

from vitray.config import Run
from vitray.data.stream import Share
from vitray.data.stream.prefetch import Feed
from vitray.evaluation.scores import Score, agree_on_buffers, evaluate, evaluate_loss
from vitray.tasks.supervised import Supervised, Task
from vitray.train import checkpoints
from vitray.train.data import open_evaluation, with_masks
from vitray.train.optim import Average
from vitray.train.state import Job, Standing, Teller

# A task's tensors by name.
State = dict[str, Tensor]


class Evaluations:
    """The evaluations of a run: begun at a step, and some time later done, in order."""

    def __init__(self, job: Job, share: Share, device: torch.device) -> None:
        self.latest: int | None = None
        """The last step that an evaluation was begun at."""
        self._job, self._share, self._device = job, share, device
        self._where = job.run.evaluate.where
        # Here scores, apart the promise of scores.
        self._begun: dict[int, Any] = {}

    def begin(self, step: int, task: Task, average: Average | None) -> None:
        """Evaluate the weights as they are now, and their average where there is one."""
        self.latest = step
        if self._where == "workers":
            self._begun[step] = list(self._scores_here(task, average))
        elif self._share.rank == 0:
            parts = [task.state_dict(), *([average.state()] if average else [])]
            self._begin_apart(step, [_network(part) for part in parts])

    def begin_again(self, standing: Standing) -> list[int]:
        """Evaluate anew, from their checkpoints, what was under way when the run was interrupted; those that cannot."""
        lost = []
        for step in standing.pending:
            if self._where == "workers" or step not in checkpoints.complete_steps(self._job.home):
                lost.append(step)
            elif self._share.rank == 0:
                parts = checkpoints.read_checkpoint(self._job.home, step).parts
                self._begin_apart(step, [_network(parts[name]) for name in ("model", "average") if name in parts])
                self.latest = step
        return lost

    def done(self, *, wait: bool = False) -> Iterator[tuple[int, list[Score]]]:
        """What is done since the last call, in order; apart, an evaluation may take until several steps later."""
        for step, found in list(self._begun.items()):
            if self._where != "workers":
                if not wait and not ray.wait([found], timeout=0)[0]:
                    return
                found = ray.get(found)
            del self._begun[step]
            yield step, found

    @property
    def pending(self) -> list[int]:
        """The steps whose evaluations are under way."""
        return list(self._begun)

    def forget(self, step: int) -> None:
        """Leave out what was begun after a step: the run goes on from there."""
        self._begun = {begun: found for begun, found in self._begun.items() if begun <= step}

    def _scores_here(self, task: Task, average: Average | None) -> Iterator[Score]:
        for weights in [nullcontext(), *([average.applied_to(task)] if average else [])]:
            with weights:
                agree_on_buffers(task)
                yield score_split(self._job, task, self._share, self._device)

    def _begin_apart(self, step: int, networks: list[State]) -> None:
        # One after another: two at once would take the CPU that the images of both are decoded on.
        before = list(self._begun.values())[-1:]
        # Anywhere: a trial of a sweep has a group of its own, in which there is no room for it.
        options = {"num_cpus": 1, "num_gpus": int(self._where == "gpu"), "scheduling_strategy": "DEFAULT"}
        self._begun[step] = ray.remote(score_apart).options(**options).remote(self._job, networks, *before)


def score_apart(job: Job, networks: list[State], _before: Any = None) -> list[Score]:
    """The scores of some networks, on a device of their own."""
    device = torch.device("cuda" if job.run.evaluate.where == "gpu" else "cpu")
    task = job.build(device)
    scores = []
    for network in networks:
        # What is not trained has no average.
        task.load_state_dict(networks[0] | network)
        scores.append(score_split(job, task, Share(0, 1), device))
    return scores


def score_split(job: Job, task: Task, share: Share, device: torch.device) -> Score:
    """The score of a task's weights on the val split, with all who have a share in it."""
    run = job.run
    val = open_evaluation(job, share)
    feed = Feed((with_masks(batch, run, None) for batch in val.evaluate(share)), device)
    normalise, precision = run.data.normalise, autocast(run, device)
    if not isinstance(task, Supervised):
        return evaluate_loss(task, feed, normalise, images=val.images, device=device, autocast=precision)
    classes = run.model.num_classes or 0
    return evaluate(
        task.vit, feed, normalise, images=val.images, num_classes=classes, device=device, autocast=precision
    )


def autocast(run: Run, device: torch.device) -> torch.autocast:
    """The precision of a forward pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=run.compute.precision == "bf16")


def judge(found: Iterator[tuple[int, list[Score]]], standing: Standing, teller: Teller) -> None:
    """Remember and tell what is done."""
    for step, scores in found:
        standing.judge(step, scores)
        best = {"best/val_top1": standing.best_top1, "best/val_loss": standing.best_loss}
        values = {name: value for name, value in best.items() if value is not None}
        for score, suffix in zip(scores, ("", "_ema"), strict=False):
            values |= score.numbers(suffix)
        teller.metrics(step, standing, values)
        if scores[-1].pictures is not None:
            teller.say("pictures", {"pictures": scores[-1].pictures})


def _network(task: Mapping[str, Tensor]) -> State:
    """A task's tensors on the host."""
    return {name: tensor.detach().cpu() for name, tensor in task.items()}
