"""Batches that are read ahead: their order, their memory, and the errors of the reader."""

import numpy as np
import pytest
import torch

from vitray.data.augment.draws import OPERATIONS, Draws
from vitray.data.stream.batches import HostBatch
from vitray.data.stream.prefetch import AHEAD, Prefetcher

CPU = torch.device("cpu")


def host_batches(count, size=4):
    for number in range(count):
        images = np.full((2, size, size, 3), number, np.uint8)
        images.flags.writeable = False  # like the object store's memory
        rows = np.arange(2) + 2 * number
        yield HostBatch(images, rows % 3, rows, rows, 0)


def test_batches_arrive_in_order_in_memory_of_their_own():
    for number, batch in enumerate(Prefetcher(host_batches(7), CPU)):
        assert batch.images.add_(1).unique().tolist() == [number + 1]
        assert batch.rows.tolist() == batch.positions.tolist() == [2 * number, 2 * number + 1]
        assert batch.labels.tolist() == [row % 3 for row in batch.rows]
    assert number == 6


def test_a_batch_is_augmented_on_its_way_to_the_device():
    ramp = np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3).repeat(2, 0)
    codes = np.full((2, 1), OPERATIONS.index("invert"), np.uint8)
    draws = Draws(np.array([True, False]), codes, np.zeros((2, 1)), "bicubic", (0, 0, 0))
    [batch] = Prefetcher(iter([HostBatch(ramp, *np.zeros((3, 2), np.int64), 0, (draws,))]), CPU)
    assert np.array_equal(batch.images, 255 - np.stack([ramp[0, :, ::-1], ramp[1]]))
    assert ramp.max() == 47


def test_an_error_of_the_reader_is_raised_after_the_batches_before_it():
    def breaking():
        yield from host_batches(2)
        raise ValueError("broken shard")

    prefetcher = Prefetcher(breaking(), CPU)
    assert len([next(prefetcher), next(prefetcher)]) == 2
    with pytest.raises(ValueError, match="broken shard"):
        next(prefetcher)


@pytest.mark.gpu
def test_pinned_memory_is_reused_after_its_copy():
    before = torch.cuda.host_memory_stats().get("num_host_alloc", 0)
    for number, batch in enumerate(Prefetcher(host_batches(60, size=512), torch.device("cuda"))):
        assert batch.images.is_cuda
        assert bool((batch.images == number).all())
    assert number == 59
    # Images and labels of the batches that wait, of one in the making and of one that is copied.
    assert torch.cuda.host_memory_stats()["num_host_alloc"] - before <= 2 * (AHEAD + 2)
