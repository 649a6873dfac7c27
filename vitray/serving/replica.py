"""What computes: a replica holds all tasks, and its batches mix them. Knows nothing of Ray."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from vitray.config.serving import Serving
from vitray.inference.answers import answer
from vitray.serving.hosted import Hosted, Item, logger
from vitray.serving.request_body import BadRequest

T = TypeVar("T")

# Probabilities, or why there are none.
Row = np.ndarray | str
# Batches in a row at which the replica was broken, after which Serve replaces it, and a server of one process ends.
MOST_FAILURES = 3


class Replica:
    """Decodes images on threads, and computes one batch at a time."""

    def __init__(self, serving: Serving) -> None:
        if serving.store:
            os.environ["MLFLOW_TRACKING_URI"] = serving.store
        threads = max(1, int(serving.cpus))
        torch.set_num_threads(threads)
        # Few at a time: while it is decoded, an image of the largest size takes up to a gigabyte.
        self.decoders = ThreadPoolExecutor(threads)
        has_gpu = bool(serving.gpus) and torch.cuda.is_available()
        self.hosted = Hosted(serving, torch.device("cuda" if has_gpu else "cpu"))
        self.batches = Batches(self.hosted.answers, serving.batch)
        self.changing = threading.Lock()
        self.follower = threading.Thread(target=self._follow, args=(serving.follow_seconds,), daemon=True)
        self.follower.start()

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Load the tasks of a changed configuration; Serve calls it at the start too."""
        await asyncio.to_thread(self._change, config["tasks"])

    def _change(self, tasks: dict[str, str]) -> None:
        with self.changing:
            self.hosted.set_tasks(tasks)

    def check_health(self) -> None:
        """Raise if the replica has to be replaced."""
        if self.hosted.failures >= MOST_FAILURES or not self.follower.is_alive():
            raise RuntimeError(f"{self.hosted.failures} batches in a row failed, or the aliases are not followed")

    def _follow(self, seconds: float) -> None:
        ended = threading.Event()
        while not ended.wait(seconds):
            with self.changing:
                for task in self.hosted.follow_aliases():
                    logger.warning("task %s is now %s", task, self.hosted.sources[task].pinned)

    async def predict(self, task: str | None, top_k: int | None, images: list[bytes]) -> dict[str, Any]:
        """Return the answer to a request; for a bad one, `error` and `status`."""
        try:
            name, source, count = self.hosted.choose(task, top_k)
            member = source.member
            start = asyncio.get_running_loop().run_in_executor
            items = await all_or_none(
                [start(self.decoders, self.hosted.item, member, data, at) for at, data in enumerate(images)]
            )
        except BadRequest as bad:
            return {"status": bad.status, "error": bad.message}
        rows = await asyncio.gather(*map(self.batches.answer, items))
        predictions = []
        for index, row in enumerate(rows):
            if isinstance(row, str):
                return {"status": 500, "error": f"task {name}, image {index}: {row}"}
            predictions.append(answer(row, member, count))
        return {"task": name, "model": source.pinned, "predictions": predictions}

    async def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks of this replica."""
        return self.hosted.listing()


async def all_or_none(futures: Sequence["asyncio.Future[T]"]) -> list[T]:
    """Return the results; of those that wait behind the first one that fails none begins."""
    try:
        return await asyncio.gather(*futures)
    finally:
        for future in futures:
            future.cancel()


class Batches:
    """Joins what arrives while a batch is computed into the next one: a lone image waits for nothing."""

    def __init__(self, compute: Callable[[Sequence[Item]], list[Row]], most: int) -> None:
        self._compute, self._most = compute, most
        self._waiting: deque[tuple[Item, asyncio.Future[Row]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def answer(self, item: Item) -> Row:
        """Return the probabilities of an image, or why there are none; the event loop stays free."""
        future: asyncio.Future[Row] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            taken = (self._waiting.popleft() for _ in range(min(self._most, len(self._waiting))))
            batch = [(item, future) for item, future in taken if not future.done()]  # a client may have left
            if not batch:
                continue
            try:
                rows = await asyncio.to_thread(self._compute, [item for item, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), row in zip(batch, rows, strict=True):
                if not future.done():
                    future.set_result(row)
