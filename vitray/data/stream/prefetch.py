"""Batches copied to the device and augmented there ahead of time: a thread reads while the device computes."""

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vitray.data.augment.mixing import DeviceBatch
from vitray.data.stream.batches import HostBatch, Share

# Batches that wait ready; more of them would only hide longer pauses in reading.
AHEAD = 2


class Prefetcher:
    """An iterator over batches on a device that counts the time spent waiting; close it or exhaust it.

    `largest` returns the largest of all workers' numbers: workers that share a stream must stop after the same batch,
    since a worker that stops earlier would keep the others waiting for theirs.
    """

    def __init__(
        self, batches: Iterator[HostBatch], device: torch.device, largest: Callable[[int], int] = lambda number: number
    ) -> None:
        self.waited = 0.0
        """Seconds that the caller has waited for batches."""
        self._batches_started, self._limit = 0, math.inf
        self._starting = threading.Lock()
        self._largest = largest
        self._device = device
        self._ready: queue.Queue[Any] = queue.Queue(AHEAD)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._read, args=(batches,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        start = time.perf_counter()
        item = self._ready.get()
        self.waited += time.perf_counter() - start
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        batch, copied = item
        if copied is not None:
            # The computing stream waits for the copy, not this thread; until then the memory is not reused.
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in (batch.images, batch.labels, batch.masks, batch.views):
                if tensor is not None:
                    tensor.record_stream(current)
        return batch

    def close(self) -> None:
        """Stop reading ahead, on every worker after the same batch; all workers call it."""
        with self._starting:  # no batch is started until the workers agree
            self._limit = self._largest(self._batches_started)
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def abandon(self) -> None:
        """Let the thread end after the batch that it reads, without waiting for it or for other workers."""
        self._limit = 0
        while not self._ready.empty():  # so that there is room for that batch
            self._ready.get()

    def _read(self, batches: Iterator[HostBatch]) -> None:
        try:
            while self._may_start() and (batch := next(batches, None)) is not None:
                self._ready.put(self._to_device(batch))
            self._ready.put(None)
        except BaseException as error:  # `__next__` raises it in the caller's thread
            self._ready.put(error)

    def _may_start(self) -> bool:
        """Return whether to read another batch, and count it."""
        with self._starting:
            if self._batches_started >= self._limit:
                return False
            self._batches_started += 1
            return True

    def _to_device(self, batch: HostBatch) -> tuple[DeviceBatch, Any]:
        # torch keeps freed pinned memory until its copies are done, then reuses it for later batches.
        with torch.cuda.stream(self._copies):  # does nothing for None
            images, labels, masks, views = (
                None
                if array is None
                else _own_tensor(array, self._copies is not None).to(self._device, non_blocking=True)
                for array in (batch.images, batch.labels, batch.masks, batch.views)
            )
            assert images is not None
            assert labels is not None
            if batch.draws:
                # Imported here: torchvision takes seconds, and most runs augment in tasks.
                from vitray.data.augment.ops_tensor import apply_draws

                for pixels, draws in zip((images, views), batch.draws, strict=False):
                    assert pixels is not None
                    apply_draws(pixels.flatten(0, -4), draws)
        copied = self._copies.record_event() if self._copies else None
        return DeviceBatch(images, labels, batch.positions, batch.rows, masks, views, batch.hidden), copied


# ---- what workers agree on -------------------------------------------------------------------------------------------


def new_share(rank: int, workers: int, node: str = "") -> Share:
    """Return the part of a worker, of which the node has a name; all workers call this.

    Its broadcast has a process group of its own: the threads that read ahead use it while the main thread trains.
    """
    if not dist.is_initialized():
        return Share(rank, workers)
    group: Any = dist.new_group(backend="gloo")
    nodes = [node] * dist.get_world_size()
    dist.all_gather_object(nodes, node, group=group)
    order = dealt_order(nodes)

    def broadcast(value: Any, rank: int = 0) -> Any:
        values = [value]
        dist.broadcast_object_list(values, order[rank], group=group)
        return values[0]

    sizes = Counter(nodes)
    return Share(order.index(rank), workers, broadcast, len(sizes) if len({*sizes.values()}) == 1 else 1)


def dealt_order(nodes: Sequence[str]) -> list[int]:
    """Return all ranks in an order that takes one of each node in turn; `nodes` has the node of each."""
    taken: Counter[str] = Counter()
    turns = []
    for node in nodes:
        turns.append(taken[node])
        taken[node] += 1
    first = {node: nodes.index(node) for node in taken}
    return sorted(range(len(nodes)), key=lambda rank: (turns[rank], first[nodes[rank]]))


def all_reduce_max(number: int, device: torch.device) -> int:
    """Return the largest of all workers' numbers."""
    if not dist.is_initialized():
        return number
    numbers = torch.tensor([number], device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return int(numbers)


def _own_tensor(array: np.ndarray, pinned: bool) -> Tensor:
    """Return a copy in writable memory, pinned on request; the object store's memory is neither."""
    tensor = torch.from_numpy(np.empty(0, array.dtype)).new_empty(array.shape, pin_memory=pinned)
    np.copyto(tensor.numpy(), array)
    return tensor
