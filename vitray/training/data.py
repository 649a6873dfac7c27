"""A worker's part of the training and evaluation data, from any step of the run."""

from vitray.config import Run
from vitray.config.pretraining import Masked
from vitray.data.augment.masks import draw_sources
from vitray.data.stream.batches import HostBatch, StreamSpec
from vitray.training.resolved import ResolvedRun


def training_spec(resolved: ResolvedRun, device: str) -> StreamSpec:
    """Return the settings of the stream of training images for workers on a kind of device."""
    run, mask = resolved.run, resolved.holdout_mask
    augment = run.data.augment.resolved(device == "cuda")
    spec = StreamSpec(run.data.train, run.optim.batch, run.model.image_shape, augment, repeats=run.data.repeats)
    return _completed(spec._replace(in_bulk=device == "cpu", row_mask=None if mask is None else ~mask), run)


def evaluation_spec(resolved: ResolvedRun) -> StreamSpec:
    """Return the settings of the stream of evaluated images."""
    run = resolved.run
    assert run.data.evaluated is not None
    batch = run.evaluate.batch or run.optim.batch
    spec = StreamSpec(run.data.evaluated, batch, run.model.image_shape, run.data.eval_crop)
    return _completed(spec._replace(row_mask=resolved.holdout_mask), run)


def _completed(spec: StreamSpec, run: Run) -> StreamSpec:
    return spec._replace(max_corrupt=run.data.max_corrupt, cache=run.data.cache, seed=run.seed)


def with_masks(batch: HostBatch, run: Run, epoch: int | None) -> HostBatch:
    """Return the batch, with the mask of each image if the task needs one; epoch None is for evaluations.

    Masks are drawn here because this code runs in the prefetch thread.
    """
    if "masks" not in run.task.traits.needs:
        return batch
    assert isinstance(run.task, Masked)
    sources_BN = draw_sources(run.task.mask, run.model.grid, run.seed, epoch, batch.positions.tolist())
    return batch._replace(masks=sources_BN)
