"""What a worker reads: its part of a split, from any step of the run on."""

from collections.abc import Iterator

import ray

from vitray.loop.standing import Job
from vitray.stream import Cursor, HostBatch, Share, Stream


def open_stream(job: Job, split: str, batch: int, share: Share) -> Stream:
    """A split as this run sees it."""
    data, is_train = job.run.data, split == job.run.data.train
    store = ray.cluster_resources()["object_store_memory"]
    return Stream(
        job.dataset,
        split,
        batch=batch,
        size=job.run.model.image_shape,
        crop=data.augment if is_train else data.eval_crop,
        seed=job.run.seed,
        copies=data.copies if is_train else 1,
        max_corrupt=data.max_corrupt,
        # All streams of all workers together keep to half of the object store: what is beyond it goes to disk.
        memory=int(store / 4 / share.workers),
        cache=data.cache,
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
