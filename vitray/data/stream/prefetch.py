"""Batches on the device before they are asked for: a thread reads ahead while the device computes."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitray.data.stream.stream import HostBatch

# Batches that wait ready; more would only hide a longer pause of the reading.
AHEAD = 2


class DeviceBatch(NamedTuple):
    """One worker's part of one step, its images, labels and weights on the device."""

    images: Tensor
    """uint8, BHWC."""
    labels: Tensor
    weights: Tensor
    positions: np.ndarray
    rows: np.ndarray


class Feed:
    """An iterator over batches on a device that counts how long it was waited for; close it, or exhaust it."""

    def __init__(self, batches: Iterable[HostBatch], device: torch.device) -> None:
        self.waited = 0.0
        """Seconds that the caller has spent waiting for batches."""
        self._device = device
        self._ready: queue.Queue[Any] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._read, args=(iter(batches),), name="feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        start = time.perf_counter()
        found = self._ready.get()
        self.waited += time.perf_counter() - start
        if found is None:
            raise StopIteration
        if isinstance(found, BaseException):
            raise found
        batch, copied = found
        if copied is not None:
            # The computing stream waits for the copy, this thread does not; and the memory is not reused before.
            here = torch.cuda.current_stream(self._device)
            here.wait_event(copied)
            for tensor in batch[:3]:
                tensor.record_stream(here)
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def _read(self, batches: Iterator[HostBatch]) -> None:
        try:
            for batch in batches:
                if self._closed.is_set():
                    return
                self._ready.put(self._copied(batch))
            self._ready.put(None)
        except BaseException as error:  # whatever it is belongs to the one who waits
            self._ready.put(error)

    def _copied(self, batch: HostBatch) -> tuple[DeviceBatch, Any]:
        with torch.cuda.stream(self._copies):  # of None, nothing
            images, labels, weights = (
                _own(array, self._copies is not None).to(self._device, non_blocking=True)
                for array in (batch.images, batch.labels, batch.weights)
            )
        copied = self._copies.record_event() if self._copies else None
        return DeviceBatch(images, labels, weights, batch.positions, batch.rows), copied


def _own(array: np.ndarray, pinned: bool) -> Tensor:
    """A tensor with memory of its own: the object store's may be read, not written, and is not pinned."""
    tensor = torch.from_numpy(np.empty(0, array.dtype)).new_empty(array.shape, pin_memory=pinned)
    np.copyto(tensor.numpy(), array)
    return tensor
