"""One optimizer step on a worker, of one or several passes.

Augmentation, mixing, dropout and learning rate are functions of (seed, step).
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from vitray.config import Run
from vitray.data.augment.keyed_random import step_generator
from vitray.data.augment.mixing import BatchRows, BatchSettings, DeviceBatch, prepare_batch
from vitray.data.stream.batches import Share
from vitray.models.stems import use_patch
from vitray.training.evaluator import autocast
from vitray.training.learner import Learner
from vitray.training.optim import clip_gradients, set_learning_rate, set_weight_decay
from vitray.training.schedule import Length, learning_rate, micro_batches, num_passes, weight_decay


def take_step(run: Run, step: int, batch: DeviceBatch, share: Share, learner: Learner, length: Length) -> Tensor:
    """Take one optimizer step; return this worker's part of loss and gradient norm, still on the device."""
    set_learning_rate(learner.optimizer, learning_rate(run.optim, length, step))
    if run.optim.weight_decay_end is not None:
        set_weight_decay(learner.optimizer, weight_decay(run.optim, length, step))
    torch.manual_seed(int(step_generator(run.seed, step, f"torch {share.rank}").integers(2**63)))
    loss = torch.zeros((), device=batch.images.device)
    use_patch(learner.task, drawn_patch(run, step))
    learner.task.before_step(step, length.epoch, length.total)
    parts = micro_batches(len(batch.images), num_passes(run, share.workers), run)
    for part in parts:
        inputs = prepare_micro_batch(batch, part, run, step, length)
        # DDP averages the workers' gradients, so each worker is weighted by its share of the global batch.
        weight = len(inputs[0]) * share.workers / run.optim.batch
        is_last = part is parts[-1]
        with nullcontext() if is_last or share.workers == 1 else learner.model.no_sync():  # pyright: ignore[reportCallIssue]
            if run.compute.has_graphs:
                torch.compiler.cudagraph_mark_step_begin()  # may overwrite the previous loss, which `loss` holds
            with autocast(run, batch.images.device):
                part_loss = learner.model(*inputs) * weight
            part_loss.backward()
        loss += part_loss.detach() / share.workers
    use_patch(learner.task, None)
    learner.task.after_backward()
    norm = clip_gradients(learner.task.parameters(), run.optim.clip)
    learner.optimizer.step()
    learner.task.after_step()
    learner.optimizer.zero_grad(set_to_none=not run.compute.has_graphs)
    if learner.average is not None:
        learner.average.update(step)
    return torch.stack([loss, norm / share.workers])


def drawn_patch(run: Run, step: int) -> int | None:
    """Return the patch size of a step, equal on all workers; None where the run draws none."""
    patches = run.model.patches
    return patches[int(step_generator(run.seed, step, "patch").integers(len(patches)))] if patches else None


def prepare_micro_batch(batch: DeviceBatch, part: slice, run: Run, step: int, length: Length) -> Sequence[Tensor]:
    """Return a slice of the batch as the inputs of the task: images, and what else it needs."""
    if not run.classification:  # without mixing or erasing
        return batch.inputs(run.task.traits.needs, run.data.normalize, part)
    data = run.data
    is_early = data.early is not None and step < data.early.share * length.total
    shape = run.early_shape if is_early else None
    settings = BatchSettings(data.augment, data.mix, data.normalize, run.model.num_classes or 0, shape)
    rows = BatchRows(batch.positions[part] % run.optim.batch, run.optim.batch)
    return prepare_batch(batch.images[part], batch.labels[part], settings, run.seed, step, rows)
