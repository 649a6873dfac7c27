"""The best checkpoint of a run, as the driver learns of it: scores and files may come in either order."""

from collections.abc import Mapping
from typing import NamedTuple


class Best(NamedTuple):
    """A step and its scores."""

    step: int
    scores: Mapping[str, float]


class BestCheckpoint:
    """Pairs the best scores so far with the checkpoint of their step."""

    def __init__(self) -> None:
        self._saved: set[int] = set()
        self._best: Best | None = None
        self._best_value: float | None = None

    def evaluated(self, step: int, values: Mapping[str, float]) -> Best | None:
        """Note the metrics of a step; return its scores if they are the best and its checkpoint is complete."""
        score = "top1" if "best/val_top1" in values else "loss"
        best = values.get(f"best/val_{score}")
        # Those of the averaged weights count, if there are any.
        own = values.get(f"val/{score}_ema", values.get(f"val/{score}"))
        if best is None or own != best or best == self._best_value:
            return None
        scores = {name: value for name, value in values.items() if name.startswith("val/")}
        self._best, self._best_value = Best(step, scores), best
        return self._best if step in self._saved else None

    @property
    def without_checkpoint(self) -> Best | None:
        """The best scores so far, if no checkpoint has their weights."""
        return self._best if self._best and self._best.step not in self._saved else None

    def saved(self, step: int) -> Best | None:
        """Note a complete checkpoint; return its scores if they are the best."""
        self._saved.add(step)
        return self._best if self._best and self._best.step == step else None
