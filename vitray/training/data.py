"""A worker's part of the training and evaluation data, from any step of the run."""

from collections.abc import Iterator

import ray

from vitray.config import Run
from vitray.config.pretraining import Masked
from vitray.data.augment.masks import draw_sources
from vitray.data.stream import Cursor, HostBatch, Share, Stream, StreamSpec
from vitray.training.context import WorkerContext


def open_training(context: WorkerContext, share: Share) -> Stream:
    """Return the stream of the training images."""
    run, mask = context.run, context.holdout_mask
    spec = StreamSpec(run.data.train, run.optim.batch, run.model.image_shape, run.data.augment, copies=run.data.copies)
    return _open(context, share, spec if mask is None else spec._replace(row_mask=~mask))


def open_evaluation(context: WorkerContext, share: Share) -> Stream:
    """Return the stream of the evaluated images."""
    run = context.run
    assert run.data.evaluated is not None
    batch = run.evaluate.batch or run.optim.batch
    spec = StreamSpec(run.data.evaluated, batch, run.model.image_shape, run.data.eval_crop)
    return _open(context, share, spec._replace(row_mask=context.holdout_mask))


def _open(context: WorkerContext, share: Share, spec: StreamSpec) -> Stream:
    run, store = context.run, ray.cluster_resources()["object_store_memory"]
    # The streams of all workers use half of the object store, so that nothing spills to disk.
    memory = int(store / 4 / share.workers)
    limits = {"seed": run.seed, "max_corrupt": run.data.max_corrupt, "memory": memory, "cache": run.data.cache}
    return Stream(context.dataset, spec._replace(**limits))


def batches_from(run: Run, stream: Stream, step: int, total: int, share: Share) -> Iterator[HostBatch]:
    """Yield a worker's batches from a step of the run to its end, across epochs."""
    while step < total:
        epoch, within = divmod(step, stream.steps)
        for batch in stream.train(Cursor(epoch, within), share):
            yield with_masks(batch, run, epoch)
            step += 1
            if step == total:
                return


def with_masks(batch: HostBatch, run: Run, epoch: int | None) -> HostBatch:
    """Return the batch, for masked training with each image's mask as its label; epoch None is for evaluations.

    Masks are drawn here because this code runs in the prefetch thread.
    """
    if not isinstance(run.task, Masked):
        return batch
    sources_BN = draw_sources(run.task.mask, run.model.grid, run.seed, epoch, batch.positions.tolist())
    return batch._replace(labels=sources_BN)
