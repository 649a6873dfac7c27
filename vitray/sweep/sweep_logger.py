"""The story of a sweep: told to MLflow, to the screen and in the report, as its trials end."""

import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune

from vitray import storage
from vitray.runs.driver import HOME
from vitray.sweep.console import Screen
from vitray.sweep.driver import SWEEP, Outcome, Planned, Recipe
from vitray.sweep.report import Sweep, Trial, dataset_of, point_of, write_report
from vitray.sweep.searcher import Interruption
from vitray.sweep.space import Space, settled
from vitray.sweep.trial_store import Ledger
from vitray.tracking import Tracker, system_info
from vitray.tracking.mlflow_client import import_mlflow

# Seconds between two reports, each of which takes seconds to draw; the last one is always written.
PAUSE = 30.0
# Rows of the table in MLflow's description, of which it takes 8000 characters.
MOST_ROWS = 40


class Story:
    """What is known of a sweep, and who is told of it."""

    def __init__(
        self,
        planned: Planned,
        ledger: Ledger,
        recipe: Recipe,
        space: Space,
        name: str,
        uid: str,
        command: str,
    ) -> None:
        self.planned, self.ledger, self.recipe, self.space = planned, ledger, recipe, space
        self.name, self.home, self.command, base = name, ledger.home, command, recipe.run
        self.screen = Screen(planned.trials, space.goal, self.ledger.records())
        self.since = json.loads(storage.read_bytes(storage.join(self.home, SWEEP)))["began"]
        self._over, self._told = -1, 0.0
        params = base.dotted() | {f"space.{key}": value for key, value in space.model_dump(mode="json").items()}
        plan = planned.plan
        self._images = plan and dataset_of(plan.images, plan.val_images, plan.classes)
        with suppress(Exception):  # which the tracker says
            import_mlflow()  # before Optuna is loaded, which is partly made of the same modules
        self.tracker = Tracker.begin(
            uid=uid,
            name=name,
            experiment=base.tracking.experiment,
            params=params,
            tags={"vitray.kind": "sweep", "vitray.home": self.home} | system_info.facts(),
            description=self._description([]),
        )
        self.tracker.text("space.yaml", space.to_yaml())
        self.tracker.text("run.yaml", base.to_yaml())

    def __enter__(self) -> "Story":
        self.tracker.__enter__()
        self.tell()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self.screen.line(f"  stopped; the same command goes on: {self.command}")
        if isinstance(error[1], KeyboardInterrupt | SystemExit):
            self._kill_children()
        self.tracker.__exit__(*error)

    def listener(self, interruption: Interruption) -> "Listener":
        """For Tune, which asks it whenever a trial moves."""
        return Listener(self, interruption)

    def finish(self) -> Outcome:
        """The last report, the best trial's model, and the end block."""
        trials = self.tell()
        scored = [trial for trial in trials if trial.goal is not None and trial.state != "failed"]
        best = (max if self.space.goal.mode == "max" else min)(scored, key=lambda trial: trial.goal or 0, default=None)
        counts = {
            state: sum(trial.state == state for trial in trials) for state in ("finished", "stopped early", "failed")
        }
        over = self.ledger.outcome(best.name) if best else {}
        registered = self.recipe.run.tracking.register_as
        if over.get("model") and registered:
            self.tracker.model(over["model"], register_as=registered, top1=over["val_top1"])
        if best:
            self.tracker.tag("vitray.best", best.name)
        self.tracker.end("FINISHED")
        outcome = Outcome(
            name=self.name,
            home=self.home,
            trials=len(trials),
            finished=counts["finished"],
            stopped_early=counts["stopped early"],
            failed=counts["failed"],
            best=best.name if best else None,
            best_goal=best.goal if best else None,
            report=storage.join(self.home, "report", "index.html"),
            mlflow_run=self.tracker.run_id,
        )
        left = self.planned.trials - sum(counts.values())
        states = counts | {"not begun: the budget is spent, too many failed, or there is no other point": left}
        self.screen.end(
            {
                "best": f"{outcome.best}: {self.space.goal.metric} {outcome.best_goal}" if best else "none",
                "trials": ", ".join(f"{count} {state}" for state, count in states.items() if count),
                "report": outcome.report,
                "tracking": self.tracker.run_url(),
            }
        )
        return outcome

    # ---- as it goes --------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Something moved: the screen shows it, and where a trial is over, everyone is told."""
        records = self.ledger.records()
        self.screen.show(records)
        over = sum(record.is_over for record in records.values())
        if over != self._over and time.monotonic() - self._told > PAUSE:
            self.tell()

    def tell(self) -> list[Trial]:
        """Write the report anew, and give it to MLflow."""
        records = self.ledger.records()
        self._over = sum(record.is_over for record in records.values())
        trials = [self._trial(name) for name in records]
        sweep = Sweep(
            name=self.name,
            goal=self.space.goal.metric,
            mode=self.space.goal.mode,
            recipe=" ".join(self.recipe.words),
            space_text=self.space.to_yaml(),
            plan=self.planned.said,
            began=time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since)),
            command=self.command,
            circumstances=system_info.facts(),
            trials=trials,
        )
        with tempfile.TemporaryDirectory(prefix="vitray-") as aside:
            for path in write_report(sweep, Path(aside)):
                storage.upload(path, storage.join(self.home, "report", path.name))
                if path.suffix != ".png":
                    self.tracker.text(f"report/{path.name}", path.read_text())
                elif not path.stem.endswith("-dark"):  # for a look without the page, which holds both
                    self.tracker.figure(f"report/{path.name}", path.read_bytes())
        best = [trial.goal for trial in trials if trial.goal is not None]
        if best:
            goal = max(best) if self.space.goal.mode == "max" else min(best)
            self.tracker.metrics(self._over, {f"best/{self.space.goal.metric.replace('/', '_')}": goal})
        self.tracker.describe(self._description(trials))
        self._told = time.monotonic()
        self.screen.show(records)
        return trials

    def _trial(self, name: str) -> Trial:
        ledger = self.ledger
        record, over, run, entry = ledger.record(name), ledger.outcome(name), ledger.run(name), ledger.entries[name]
        sizes = ledger.sizes(name)
        curves = {key: [(step, value) for step, value in points] for key, points in over.get("curves", {}).items()}
        settings = settled(entry.point.settings, entry.point.before, self.home)
        words = [f"{key}={_word(value)}" for key, value in settings.items()]
        return Trial(
            name=name,
            settings=dict(entry.point.shown),
            state=record.state,
            reason=record.reason,
            goal=record.best(self.space.goal.mode),
            curves=curves or {self.space.goal.metric: list(record.scores)},
            device_seconds=over.get("device_seconds"),
            params=sizes and sizes.params,
            gflops=sizes and sizes.gflops,
            command=shlex.join(["vitray", "train", *self.recipe.words, *words]),
            run_url=self.tracker.url_of(over["mlflow_run"]) if over.get("mlflow_run") else None,
            paper=point_of(run, self._images) if run.task.kind == "supervised" else None,
            latency_ms=over.get("latency_ms"),
            peak_memory_bytes=over.get("peak_memory_bytes"),
        )

    def _description(self, trials: Sequence[Trial]) -> str:
        """What MLflow shows above everything else: the plan, and a table of the trials by what varies."""
        goal, pick = self.space.goal, -1 if self.space.goal.mode == "max" else 1
        ranked = sorted(trials, key=lambda trial: (trial.goal is None, pick * (trial.goal or 0)))
        varied = list(dict.fromkeys(path for trial in trials for path in trial.settings))
        lines = [self.planned.said, "", f"`{self.command}`", ""]
        if trials:
            lines += [_row("trial", goal.metric, "state", *varied), _row(*["---"] * (3 + len(varied)))]
        for trial in ranked[:MOST_ROWS]:
            name = f"[{trial.name}]({trial.run_url})" if trial.run_url else trial.name
            cells = [_word(trial.settings[path]) if path in trial.settings else "" for path in varied]
            lines.append(_row(name, "" if trial.goal is None else f"{trial.goal:.4g}", trial.state, *cells))
        if len(ranked) > MOST_ROWS:
            lines.append(f"\nand {len(ranked) - MOST_ROWS} more: report/results.csv")
        return "\n".join(lines)

    def _kill_children(self) -> None:
        """MLflow hears of the trials that were ended in the middle; they go on in the same runs."""
        for name, record in self.ledger.records().items():
            where = storage.join(self.ledger.place(name), HOME)
            if record.state == "running" and storage.exists(where):
                self.tracker.kill(json.loads(storage.read_bytes(where))["uid"], "its sweep was told to end")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _word(value: Any) -> str:
    """A value as a word of the command line: YAML, of which JSON is a part."""
    return value if isinstance(value, str) else json.dumps(value)


class Listener(tune.Stopper):
    """Hears of every trial that moves, and ends a sweep that is told to end."""

    def __init__(self, story: Story, interruption: Interruption) -> None:
        self._story, self._interruption = story, interruption

    def __call__(self, _trial_id: str, _result: dict[str, Any]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Listener":
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles all that it is given, for a resume of its own that is not used.
        return {}

    def stop_all(self) -> bool:
        """Whether the sweep ends now."""
        if self._interruption.signal:
            self._interruption.tell()
            return True
        self._story.hear()
        return False
