"""`vitray.open_run`: a run from its folder, as values for people: settings, curves, the best step, the model."""

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vitray.config import Run
from vitray.errors import ConfigError
from vitray.pages.notebook import facts_html, joined_html, picture_html
from vitray.runs.run_dir import OUTCOME, stored_run
from vitray.system import storage
from vitray.training import checkpoints

if TYPE_CHECKING:
    import pandas as pd


class SavedRun:
    """A run as it is in its folder at the time of opening: finished, or on its way."""

    def __init__(self, url: str) -> None:
        """See `open_run`."""
        self.url = url
        """The folder."""
        self.run: Run = stored_run(url)
        """The settings."""
        path = storage.join(url, OUTCOME)
        self.outcome: dict[str, Any] | None = storage.read_json(path) if storage.exists(path) else None
        """How the run ended, by name, as `vitray train --json` prints it; None while it has not."""
        self._checkpoints = checkpoints.complete_steps(url)

    @property
    def model(self) -> str:
        """The address of the model folder, for `vitray.load`."""
        if self.outcome is None or self.outcome["model"] is None:
            raise ConfigError(f"{self.url}: the run has no model yet; it gets one when it is finished")
        return self.outcome["model"]

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation; None without one."""
        return self._saved.get("best_step") if self.outcome is None else self.outcome["best_step"]

    @cached_property
    def curves(self) -> "pd.DataFrame":
        """The recorded metrics: a row for each step, a column for each metric.

        Of a run on its way they are those of its last checkpoint, which keeps the latest hundred records.
        """
        import pandas as pd

        columns = {name: pd.Series(dict(points), dtype=float) for name, points in self._history.items()}
        return pd.DataFrame(columns).sort_index().rename_axis("step")

    @cached_property
    def _saved(self) -> dict[str, Any]:
        """The training state of the last checkpoint; empty before it."""
        if not self._checkpoints:
            return {}
        return checkpoints.read_meta(self.url, self._checkpoints[-1])["state"]["train_state"]

    @cached_property
    def _history(self) -> dict[str, list[tuple[int, float]]]:
        if self.outcome is not None:
            return {
                name: [(int(step), value) for step, value in curve] for name, curve in self.outcome["curves"].items()
            }
        history: dict[str, list[tuple[int, float]]] = {}
        for record in self._saved.get("records", []):
            for name, value in record["values"].items():
                history.setdefault(name, []).append((record["step"], value))
        return history

    def _facts(self) -> dict[str, Any]:
        last = self._checkpoints[-1] if self._checkpoints else 0
        facts: dict[str, Any] = {"state": f"not finished; the last checkpoint is of step {last:,}", "folder": self.url}
        if self.outcome is not None:
            scores = {
                name: self.outcome[name]
                for name in ("val_top1", "val_map", "val_loss")
                if self.outcome.get(name) is not None
            }
            facts |= {"state": self.outcome["state"], "steps": f"{self.outcome['steps']:,}"}
            facts |= {name: f"{value:.4g}" for name, value in scores.items()}
            facts |= {"model": self.outcome["model"]} if self.outcome["model"] else {}
        return {"network": self.run.model.name, "data": self.run.data.url, **facts, "best step": self.best_step}

    def __repr__(self) -> str:
        return "\n".join(f"{name:<10} {value}" for name, value in self._facts().items())

    def _repr_html_(self) -> str:
        from vitray.tracking.figures import draw_curves  # Matplotlib takes a second to import

        title = self.url.rpartition("/")[2]
        return joined_html([facts_html(title, self._facts()), picture_html(draw_curves(self._history))])


def open_run(name: str | os.PathLike[str], out: str | os.PathLike[str] = "runs") -> SavedRun:
    """Return the run of a name below a folder of runs, finished or not; a trial of a sweep is a run, too.

    `out`: the folder of all runs, or s3://
    """
    storage.check_name(os.fspath(name), "name")
    return SavedRun(storage.join(storage.absolute(os.fspath(out)), os.fspath(name)))
