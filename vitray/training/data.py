"""A worker's part of the training and evaluation data, from any step of the run."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from vitray.config import Run
from vitray.config.pretraining import Masked
from vitray.data.augment.masks import draw_sources
from vitray.data.stream import HostBatch, Share, Stream, StreamSpec
from vitray.training.context import WorkerContext


def open_training(context: WorkerContext, device: torch.device) -> Stream:
    """Return the stream of the training images for workers on a kind of device."""
    run, mask = context.run, context.holdout_mask
    augment = run.data.augment.resolved(device.type == "cuda")
    spec = StreamSpec(run.data.train, run.optim.batch, run.model.image_shape, augment, repeats=run.data.repeats)
    spec = spec._replace(in_bulk=device.type == "cpu")
    return _open(context, spec if mask is None else spec._replace(row_mask=~mask))


def open_evaluation(context: WorkerContext) -> Stream:
    """Return the stream of the evaluated images."""
    run = context.run
    assert run.data.evaluated is not None
    batch = run.evaluate.batch or run.optim.batch
    spec = StreamSpec(run.data.evaluated, batch, run.model.image_shape, run.data.eval_crop)
    return _open(context, spec._replace(row_mask=context.holdout_mask))


def _open(context: WorkerContext, spec: StreamSpec) -> Stream:
    data = context.run.data
    spec = spec._replace(max_corrupt=data.max_corrupt, cache=data.cache, cpus=context.data_cpus)
    return Stream(context.dataset, spec._replace(seed=context.run.seed))


def own_broadcast() -> Callable[[Any], Any]:
    """Return a function that returns the first worker's value on every worker; all workers call both.

    It has a process group of its own: the threads that read ahead use it while the main thread trains.
    """
    if not dist.is_initialized():
        return lambda value: value
    group: Any = dist.new_group(backend="gloo")

    def broadcast(value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, 0, group=group)
        return values[0]

    return broadcast


def batches_from(run: Run, stream: Stream, step: int, total: int, share: Share) -> Iterator[HostBatch]:
    """Yield a worker's batches from a step of the run to its end, across epochs."""
    for batch in stream.train(step, total, share):
        yield with_masks(batch, run, batch.epoch)


def with_masks(batch: HostBatch, run: Run, epoch: int | None) -> HostBatch:
    """Return the batch, for masked training with each image's mask as its label; epoch None is for evaluations.

    Masks are drawn here because this code runs in the prefetch thread.
    """
    if not isinstance(run.task, Masked):
        return batch
    sources_BN = draw_sources(run.task.mask, run.model.grid, run.seed, epoch, batch.positions.tolist())
    return batch._replace(labels=sources_BN)
