"""A worker's part of the training and evaluation data, from any step of the run."""

from vitray.config import Run
from vitray.config.augmentation import Augment
from vitray.config.pretraining import Masked
from vitray.config.self_supervised import SelfDistillation
from vitray.data.augment.masks import draw_sources, draw_view_masks
from vitray.data.augment.views import ViewKind, view_kinds
from vitray.data.stream.batches import HostBatch, StreamSpec
from vitray.training.resolved import ResolvedRun


def training_spec(resolved: ResolvedRun, device: str) -> StreamSpec:
    """Return the settings of the stream of training images for workers on a kind of device."""
    run, mask = resolved.run, resolved.holdout_mask
    augment = run.data.augment.resolved(device == "cuda")
    spec = StreamSpec(run.data.train, run.optim.batch, run.model.image_shape, augment, repeats=run.data.repeats)
    spec = spec._replace(in_bulk=device == "cpu", row_mask=None if mask is None else ~mask, views=_views(run, augment))
    return _completed(spec._replace(balance=run.data.balance), run)


def evaluation_spec(resolved: ResolvedRun) -> StreamSpec:
    """Return the settings of the stream of evaluated images."""
    run = resolved.run
    assert run.data.evaluated is not None
    batch = run.evaluate.batch or run.optim.batch
    spec = StreamSpec(run.data.evaluated, batch, run.model.image_shape, run.data.eval_crop)
    # Of several views, the training's: they differ between images, and not between evaluations.
    views = _views(run, run.data.augment.resolved(has_gpu=False))
    return _completed(spec._replace(row_mask=resolved.holdout_mask, views=views), run)


def _views(run: Run, augment: Augment) -> tuple[ViewKind, ...]:
    """Return the kinds of views of a task that compares them; none for others."""
    if "views" not in run.task.traits.needs:
        return ()
    return view_kinds(run.data.chosen_views, run.model.image_shape, run.model.shape.patch, augment)


def _completed(spec: StreamSpec, run: Run) -> StreamSpec:
    return spec._replace(max_corrupt=run.data.max_corrupt, cache=run.data.cache, seed=run.seed)


def with_masks(batch: HostBatch, run: Run, epoch: int | None) -> HostBatch:
    """Return the batch, with the masks of images or views if the task needs them; epoch None is for evaluations.

    Masks are drawn here because this code runs in the prefetch thread.
    """
    if "masks" not in run.task.traits.needs:
        return batch
    positions = batch.positions.tolist()
    if isinstance(run.task, Masked):
        return batch._replace(masks=draw_sources(run.task.mask, run.model.grid, run.seed, epoch, positions))
    assert isinstance(run.task, SelfDistillation)
    views, patch = run.data.chosen_views, run.model.shape.patch
    height, width = views.large_size(run.model.image_shape)
    grid = height // patch, width // patch
    masks_BVN = draw_view_masks(run.task.mask, grid, run.seed, epoch, positions, views.large.count)
    return batch._replace(masks=masks_BVN, hidden=masks_BVN.sum((1, 2)))
