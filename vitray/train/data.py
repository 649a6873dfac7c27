"""What a worker reads: its part of a split, from any step of the run on."""

from collections.abc import Iterator

import numpy as np
import ray

from vitray.config import Run
from vitray.config.augmentation import Augment, CentreCrop
from vitray.config.pretraining import Masked
from vitray.data.augment.masks import draw_sources
from vitray.data.stream import Cursor, HostBatch, Share, Stream
from vitray.train.state import Job


def open_training(job: Job, share: Share) -> Stream:
    """What the run is trained on."""
    data = job.run.data
    only = None if job.aside is None else ~job.aside
    return _open(job, data.train, job.run.optim.batch, share, data.augment, data.copies, only)


def open_evaluation(job: Job, share: Share) -> Stream:
    """What the run is evaluated on."""
    run = job.run
    assert run.data.evaluated is not None
    batch = run.evaluate.batch or run.optim.batch
    return _open(job, run.data.evaluated, batch, share, run.data.eval_crop, 1, job.aside)


def _open(
    job: Job, split: str, batch: int, share: Share, crop: Augment | CentreCrop, copies: int, only: np.ndarray | None
) -> Stream:
    store = ray.cluster_resources()["object_store_memory"]
    return Stream(
        job.dataset,
        split,
        batch=batch,
        size=job.run.model.image_shape,
        crop=crop,
        seed=job.run.seed,
        copies=copies,
        max_corrupt=job.run.data.max_corrupt,
        # All streams of all workers together keep to half of the object store: what is beyond it goes to disk.
        memory=int(store / 4 / share.workers),
        cache=job.run.data.cache,
        only=only,
    )


def batches_from(run: Run, stream: Stream, step: int, total: int, share: Share) -> Iterator[HostBatch]:
    """A worker's batches from a step of the run to its end, one epoch after another."""
    while step < total:
        epoch, within = divmod(step, stream.steps)
        for batch in stream.train(Cursor(epoch, within), share):
            yield with_masks(batch, run, epoch)
            step += 1
            if step == total:
                return


def with_masks(batch: HostBatch, run: Run, epoch: int | None) -> HostBatch:
    """The batch of a run that predicts patches, with those of each image in place of its label.

    Drawn where batches are read, which is a thread that reads ahead. Epoch None is that of the evaluations.
    """
    if not isinstance(run.task, Masked):
        return batch
    sources_BN = draw_sources(run.task.mask, run.model.grid, run.seed, epoch, batch.positions.tolist())
    return batch._replace(labels=sources_BN)
