"""The worker's connection to the driver: messages out, decisions in."""

import time
from typing import Any

import ray
import torch.distributed as dist

from vitray.evaluation.scores import Score
from vitray.training.messages import CheckpointSaved, Evaluation, Message, Metrics, Note, Progress
from vitray.training.state import RECENT, TrainState

PROGRESS_INTERVAL = 1.0


class DriverClient:
    """Sends a worker's messages to the mailbox; only the reporting worker, rank 0, sends any."""

    def __init__(self, mailbox: Any, is_reporter: bool) -> None:
        self._mailbox, self._is_reporter = mailbox, is_reporter
        self._progress_sent = 0.0
        self._stop_requested: Any = None

    def send(self, message: Message) -> None:
        """Send a message without waiting."""
        if self._is_reporter:
            self._mailbox.put.remote(message)

    def metrics(self, step: int, state: TrainState, values: dict[str, float]) -> None:
        """Send the metrics of a step and keep them for the next checkpoint."""
        state.records = [*state.records, {"step": step, "values": values}][-RECENT:]
        self.send(Metrics(step, values))

    def evaluation(self, score: Score) -> None:
        """Send the parts of a score that are plotted, as types that import no torch."""
        mistakes = [(each.probability, each.row, each.label, each.predicted) for each in score.mistakes]
        self.send(Evaluation(score.confusion, mistakes))

    def saved(self, step: int) -> None:
        """Report a complete checkpoint."""
        self.send(CheckpointSaved(step))

    def note(self, text: str) -> None:
        """Send a line for the user."""
        self.send(Note(text))

    def should_stop(self, step: int) -> bool:
        """Wait for the driver's decision about an early stop after the evaluation of a step."""
        answer: list[bool | None] = [None]
        while self._is_reporter and answer[0] is None:
            time.sleep(0.05)
            answer = [ray.get(self._mailbox.decision.remote(step))]
        if dist.is_initialized():
            dist.broadcast_object_list(answer, 0)
        return bool(answer[0])

    def progress(self, step: int) -> None:
        """Report progress about once a second, and ask whether a stop is requested."""
        if time.monotonic() - self._progress_sent > PROGRESS_INTERVAL:
            self._progress_sent = time.monotonic()
            self.send(Progress(step))
            if self._is_reporter and not self.is_stop_requested():
                self._stop_requested = self._mailbox.is_stop_requested.remote()

    def is_stop_requested(self) -> bool:
        """Return the driver's last answer without waiting."""
        answer = self._stop_requested
        return answer is not None and bool(ray.wait([answer], timeout=0)[0]) and ray.get(answer)
