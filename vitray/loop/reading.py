"""What a worker reads: its part of a split, from any step of the run on."""

from collections.abc import Iterator

import numpy as np
import ray

from vitray.config.augmentation import Augment, CentreCrop
from vitray.loop.standing import Job
from vitray.stream import Cursor, HostBatch, Share, Stream


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


def batches_from(stream: Stream, step: int, total: int, share: Share) -> Iterator[HostBatch]:
    """A worker's batches from a step of the run to its end, one epoch after another."""
    while step < total:
        epoch, within = divmod(step, stream.steps)
        for batch in stream.train(Cursor(epoch, within), share):
            yield batch
            step += 1
            if step == total:
                return
