"""The story of a sweep: told to MLflow, to the screen and in the report, as its trials end."""

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import tune

from vitray import storage
from vitray.config import Run
from vitray.loop.display import clock
from vitray.model.sizes import sizes_of
from vitray.report import Sweep, Trial, point_of, write_report
from vitray.search.driver import SWEEP, Outcome, Planned
from vitray.search.record import Record, ended, read_record
from vitray.space import Space
from vitray.tracking import Tracker, machine

# Seconds between two printed lines while nothing ends.
PAUSE = 30.0


class Story:
    """What is known of a sweep, and who is told of it."""

    def __init__(
        self,
        planned: Planned,
        base: Run,
        space: Space,
        name: str,
        home: str,
        uid: str,
        command: str,
        recipe: Sequence[str],
    ) -> None:
        self.planned, self.base, self.space = planned, base, space
        self.name, self.home, self.command, self.recipe = name, home, command, recipe
        self.began = time.monotonic()
        self.since = json.loads(storage.read_bytes(storage.join(home, SWEEP)))["began"]
        self._over = sum(record.is_over for record in self._records().values())
        self._printed = 0.0
        params = base.dotted() | {f"space.{key}": value for key, value in space.model_dump(mode="json").items()}
        self.tracker = Tracker.begin(
            uid=uid,
            name=name,
            experiment=base.tracking.experiment,
            params=params,
            tags={"vitray.kind": "sweep", "vitray.home": home} | machine.facts(),
            description=f"{planned.said}\n\n`{command}`",
        )
        self.tracker.text("space.yaml", space.to_yaml())
        self.tracker.text("run.yaml", base.to_yaml())

    def __enter__(self) -> "Story":
        self.tracker.__enter__()
        self.tell()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            print(f"  stopped; the same command goes on: {self.command}", file=sys.stderr, flush=True)
        self.tracker.__exit__(*error)

    def listener(self) -> "Listener":
        """For Tune, which asks it whenever a trial moves."""
        return Listener(self)

    def finish(self) -> Outcome:
        """The last report, the best trial's model, and the end block."""
        trials = self.tell()
        scored = [trial for trial in trials if trial.goal is not None and trial.state != "failed"]
        best = (max if self.space.goal.mode == "max" else min)(scored, key=lambda trial: trial.goal or 0, default=None)
        counts = {
            state: sum(trial.state == state for trial in trials) for state in ("finished", "stopped early", "failed")
        }
        over = ended(storage.join(self.home, best.name)) if best else None
        if over and over["model"] and self.base.tracking.register_as:
            self.tracker.model(over["model"], register_as=self.base.tracking.register_as, top1=over["val_top1"])
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
        facts = {
            "best": f"{outcome.best}: {self.space.goal.metric} {outcome.best_goal}" if best else "none",
            "trials": ", ".join(f"{count} {state}" for state, count in counts.items() if count),
            "report": outcome.report,
            "tracking": self.tracker.run_url(),
        }
        print(
            "\n" + "\n".join(f"  {key:<10} {text}" for key, text in facts.items()) + "\n", file=sys.stderr, flush=True
        )
        return outcome

    # ---- as it goes --------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Something moved: where a trial is over, everyone is told."""
        records = self._records()
        over = sum(record.is_over for record in records.values())
        if over != self._over:
            self._over = over
            self.tell()
        if time.monotonic() - self._printed > PAUSE:
            self._print(records)

    def tell(self) -> list[Trial]:
        """Write the report anew, and give it to MLflow."""
        records = self._records()
        trials = [self._trial(index, record) for index, record in enumerate(records.values())]
        sweep = Sweep(
            name=self.name,
            goal=self.space.goal.metric,
            mode=self.space.goal.mode,
            recipe=" ".join(self.recipe),
            space_text=self.space.to_yaml(),
            plan=self.planned.said,
            began=time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since)),
            command=self.command,
            circumstances=machine.facts(),
            trials=trials,
        )
        with tempfile.TemporaryDirectory(prefix="vitray-") as aside:
            for path in write_report(sweep, Path(aside)):
                storage.upload(path, storage.join(self.home, "report", path.name))
                if path.suffix != ".png":  # the page holds its pictures
                    self.tracker.text(f"report/{path.name}", path.read_text())
        best = [trial.goal for trial in trials if trial.goal is not None]
        if best:
            goal = max(best) if self.space.goal.mode == "max" else min(best)
            self.tracker.metrics(self._over, {f"best/{self.space.goal.metric.replace('/', '_')}": goal})
        self._print(records)
        return trials

    def is_spent(self) -> bool:
        """Whether too many trials have failed, or those that are over have cost what all may cost."""
        records, most = self._records(), self.space.budget.device_hours
        failed = sum(record.state == "failed" for record in records.values())
        if failed > self.space.failures * len(records):
            return True
        if most is None:
            return False
        found = [ended(storage.join(self.home, name)) for name in records]
        return sum(over["device_seconds"] for over in found if over) >= 3600 * most

    def _records(self) -> dict[str, Record]:
        return {name: read_record(storage.join(self.home, name)) for name in self.planned.names}

    def _trial(self, index: int, record: Record) -> Trial:
        name, run, point = self.planned.names[index], self.planned.runs[index], self.planned.points[index]
        over = ended(storage.join(self.home, name)) or {}
        sizes = sizes_of(run.model)
        values = [value for _, value in record.scores]
        pick = max if self.space.goal.mode == "max" else min
        curves = {key: [(step, value) for step, value in points] for key, points in over.get("curves", {}).items()}
        words = [f"{key}={_word(value)}" for key, value in point.settings.items()]
        return Trial(
            name=name,
            settings=dict(point.settings),
            state=record.state,
            reason=record.reason,
            goal=pick(values, default=None),
            curves=curves or {self.space.goal.metric: list(record.scores)},
            device_seconds=over.get("device_seconds"),
            params=sizes.params,
            gflops=sizes.gflops,
            command=shlex.join(["vitray", "train", *self.recipe, *words]),
            paper=point_of(run, self.planned.images) if run.task.kind == "supervised" else None,
        )

    def _print(self, records: dict[str, Record]) -> None:
        self._printed = time.monotonic()
        over = [record for record in records.values() if record.is_over]
        running = [name for name, record in records.items() if record.state == "running"]
        pick = max if self.space.goal.mode == "max" else min
        scores = {name: pick(value for _, value in record.scores) for name, record in records.items() if record.scores}
        best = pick(scores, key=lambda name: scores[name], default=None)
        spent = time.monotonic() - self.began
        left = clock(spent / len(over) * (len(records) - len(over))) if over else "-"
        states = [f"{sum(r.state == state for r in over)} {state}" for state in ("stopped early", "failed")]
        said = [f"{len(over)}/{len(records)} over", *(state for state in states if state[0] != "0")]
        said += [f"running {', '.join(running)}"] if running else []
        said += [f"best {best} {scores[best]:.4g}"] if best else []
        print(f"  {'; '.join(said)}; {left} left", file=sys.stderr, flush=True)


def _word(value: Any) -> str:
    """A value as a word of the command line: YAML, of which JSON is a part."""
    return value if isinstance(value, str) else json.dumps(value)


class Listener(tune.Stopper):
    """Hears of every trial that moves; ends a sweep whose budget is spent, or of which too many trials have failed."""

    def __init__(self, story: Story) -> None:
        self._story = story

    def __call__(self, _trial_id: str, _result: dict[str, Any]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Listener":
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles all that it is given, for a resume of its own that is not used.
        return {}

    def stop_all(self) -> bool:
        """Whether the sweep ends now."""
        self._story.hear()
        return self._story.is_spent()
