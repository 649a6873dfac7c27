"""The deployment that computes: each replica holds all tasks, and its batches mix them."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from ray import serve

from vitray.config.serving import Serving
from vitray.inference.answers import answer, class_names
from vitray.serving.hosted import Hosted, Item, logger
from vitray.serving.request_body import BadRequest

# Batches in a row at which the replica was broken, after which Serve replaces it.
MOST_FAILURES = 3


@serve.deployment(name="network")
class Network:
    """A replica: decodes images on threads, and computes one batch at a time."""

    def __init__(self, serving: Serving) -> None:
        if serving.store:
            os.environ["MLFLOW_TRACKING_URI"] = serving.store
        threads = max(1, int(serving.cpus))
        torch.set_num_threads(threads)
        # Few at a time: while it is decoded, an image of the largest size takes up to a gigabyte.
        self.decoders = ThreadPoolExecutor(threads)
        has_gpu = bool(serving.gpus) and torch.cuda.is_available()
        self.hosted = Hosted(serving, torch.device("cuda" if has_gpu else "cpu"))
        batching: Any = self.infer  # Serve's decorator adds the two setters
        batching.set_max_batch_size(serving.batch)
        batching.set_batch_wait_timeout_s(serving.batch_wait_ms / 1000)
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
            decoding = [start(self.decoders, self.hosted.item, member, data, at) for at, data in enumerate(images)]
            items = await asyncio.gather(*decoding)
        except BadRequest as bad:
            return {"status": bad.status, "error": bad.message}
        rows = await asyncio.gather(*map(self.infer, items))
        names, predictions = class_names(member), []
        for index, row in enumerate(rows):
            if isinstance(row, str):
                return {"status": 500, "error": f"task {name}, image {index}: {row}"}
            predictions.append(answer(row, names, count))
        return {"task": name, "model": source.pinned, "predictions": predictions}

    async def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks of this replica."""
        return self.hosted.listing()

    @serve.batch
    async def infer(self, items: list[Item]) -> list[np.ndarray | str]:
        """Return the probabilities of each image of a batch, or why there are none; the event loop stays free."""
        return await asyncio.to_thread(self.hosted.answers, items)
