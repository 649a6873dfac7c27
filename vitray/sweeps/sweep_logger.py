"""Logging of a sweep to MLflow, to the console and to the report while its trials run, in a thread of the driver."""

import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TextIO

from vitray.config.parsing import spelled
from vitray.config.sweep import Goal
from vitray.errors import OwnershipLost, one_line
from vitray.runs.console import Console, clock
from vitray.runs.run_dir import RUN_META
from vitray.runs.run_summary import evaluated_identity
from vitray.sweeps.plan import REPORT, Recipe, SweepPlan
from vitray.sweeps.report import (
    Measure,
    SweepResult,
    TrialResult,
    is_imagenet,
    leader,
    paper_result,
    write_report,
)
from vitray.sweeps.trial_store import TrialRecord, TrialStore
from vitray.system import host_facts, storage
from vitray.system.mlflow_client import import_mlflow
from vitray.system.storage import scratch_folder
from vitray.tracking.model_registry import VersionScore
from vitray.tracking.tracker import TrackedRun, Tracker

# Seconds between two looks at the trials.
UPDATE_INTERVAL = 0.5
# Seconds that an interrupted sweep waits for a report that is being drawn.
STOP_TIMEOUT = 5.0
# Seconds between two reports, each of which takes seconds to draw. The last report is always written.
REPORT_INTERVAL = 30.0
# Rows of the table in MLflow's description, which holds 8000 characters.
MOST_DESCRIBED = 40
# Seconds between two tables on a terminal, and between two lines in a file or a pipe.
TABLE_INTERVAL, LINE_INTERVAL = 0.5, 30.0
# Rows of running trials in a terminal's table.
MOST_RUNNING = 12


class SweepOutcome(NamedTuple):
    """How a sweep ended."""

    name: str
    home: str
    """The sweep folder."""
    trials: int
    finished: int
    stopped_early: int
    failed: int
    best: str | None
    best_goal: float | None
    report: str
    mlflow_run: str | None
    """None while the tracking server is unreachable."""


class SweepLogger:
    """Writes the progress and the results of a sweep."""

    def __init__(
        self,
        plan: SweepPlan,
        store: TrialStore,
        recipe: Recipe,
        *,
        name: str,
        command: str,
        uid: str,
        starts: int,
        began: float,
        follows: bool = True,
    ) -> None:
        """`command` repeats or resumes the sweep, which started this many times, first at `began` since 1970.

        `uid` is that of its run in MLflow; `follows`: whether the console shows its trials.
        """
        self.plan, self.store, self.recipe, base = plan, store, recipe, recipe.run
        self.name, self.command, self.uid, self.began, self._follows = name, command, uid, began, follows
        self._console = SweepConsole(plan.trials, plan.space.goal, store.records())
        self._reported, self._reported_over = 0.0, -1
        self._stopped, self._fault = threading.Event(), ""
        self._thread = threading.Thread(target=self._watch, name="sweep-logger", daemon=True)
        first = plan.first
        self._on_imagenet = first and is_imagenet(first.images, first.val_images, len(first.dataset.classes))
        with suppress(Exception):  # the tracker reports it
            import_mlflow()  # before Optuna, which imports some of the same modules
        space_params = {f"space.{key}": value for key, value in plan.space.model_dump(mode="json").items()}
        self._tracker = Tracker(
            TrackedRun(uid, name, base.tracking.experiment, starts=starts),
            params=base.dotted() | space_params,
            tags={"vitray.kind": "sweep", "vitray.home": store.sweep_dir} | host_facts.facts(),
            description=self._description([]),
        )
        self._tracker.text("space.yaml", plan.space.to_yaml())
        self._tracker.text("run.yaml", base.to_yaml())

    def __enter__(self) -> "SweepLogger":
        self._tracker.__enter__()
        self.report()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stopped.set()
        self._thread.join(STOP_TIMEOUT)
        if error[0] is not None and not isinstance(error[1], OwnershipLost):
            self._console.line(f"  stopped; the same command resumes it: {self.command}")
        if isinstance(error[1], KeyboardInterrupt | SystemExit):
            for name, record in self.store.records().items():
                if record.state == "running":
                    self._kill(name, "its sweep was interrupted")
        if error[0] is None:  # `finish` has ended the run, or processes without a logger train the trials
            self._tracker.leave()
        self._tracker.__exit__(*error)

    def finish(self) -> SweepOutcome:
        """Write the last report, register the best trial's model, print the end block and return the outcome."""
        self._stopped.set()
        self._thread.join()
        trials, goal = self.report(), self.plan.space.goal
        for trial in trials:
            if trial.state in ("stopped early", "failed") and self.store.outcome(trial.name).mlflow_run is None:
                # Its own process could not.
                self._kill(trial.name, trial.reason or "stopped early, by the scheduler of its sweep")
        best = leader([trial for trial in trials if trial.state != "failed"], Measure(goal.metric, goal.mode))
        if best:
            from vitray.runs.registered_figures import log_registered_figures  # Matplotlib takes a second to import

            result, registered = self.store.outcome(best.name), self.recipe.run.tracking.register_as
            if result.model and registered:
                assert self.plan.first is not None, "finished before its stages were ready"
                scored_on = evaluated_identity(self.store.run(best.name).data, self.plan.first.dataset)
                self._tracker.model(
                    result.model, registered, VersionScore.of(result.val_top1, result.val_map), scored_on
                )
                if fault := log_registered_figures(self._tracker, result.model):
                    self._console.line(f"  {fault}")
            elif registered:
                self._console.line(f"  no model is registered as {registered}: {best.name} is {best.state}")
            self._tracker.tag("vitray.best", best.name)
        self._tracker.end("FINISHED")
        states = [trial.state for trial in trials]
        counts = {state: states.count(state) for state in ("finished", "stopped early", "failed")}
        outcome = SweepOutcome(
            name=self.name,
            home=self.store.sweep_dir,
            trials=len(trials),
            finished=counts["finished"],
            stopped_early=counts["stopped early"],
            failed=counts["failed"],
            best=best.name if best else None,
            best_goal=best.goal if best else None,
            report=storage.join(self.store.sweep_dir, REPORT),
            mlflow_run=self._tracker.run_id,
        )
        is_population = self.plan.space.scheduler.traits.is_population
        not_started = "not started: the budget is spent, too many failed, or no new point is left"
        counts[not_started] = max(0, self.plan.trials - sum(counts.values()))  # a population has more trials
        self._console.end(
            {
                "best": f"{outcome.best}: {goal.metric} {outcome.best_goal}" if best else "none",
                "trials": ", ".join(f"{count} {state}" for state, count in counts.items() if count),
                **({"retry": f"{self.command} --retry-failed"} if outcome.failed and not is_population else {}),
                "report": outcome.report,
                "tracking": self._tracker.run_url(),
            }
        )
        return outcome

    def _watch(self) -> None:
        """Update until the end of the sweep; an error, such as an unreachable storage, is a note."""
        while not self._stopped.wait(UPDATE_INTERVAL):
            try:
                self.update()
                self._fault = ""
            except Exception as error:
                if self._fault != (fault := one_line(error)):
                    self._console.line(f"  cannot update the report, will try again: {fault}")
                self._fault = fault

    def update(self) -> None:
        """Show the progress, and write a report if a trial has ended and the last report is old enough."""
        records = self.store.records()
        if self._follows:
            self._console.show(records)
        self.store.retry_points()
        self.store.read_ends()
        over = sum(record.is_over for record in records.values())
        if over != self._reported_over and time.monotonic() - self._reported > REPORT_INTERVAL:
            self.report()

    def report(self) -> list[TrialResult]:
        """Write the report to the sweep's folder and to MLflow, and return the trials."""
        records, space = self.store.records(), self.plan.space
        self._reported_over = sum(record.is_over for record in records.values())
        trials = [self._trial_result(name) for name in records]
        result = SweepResult(
            name=self.name,
            goal=space.goal.metric,
            mode=space.goal.mode,
            recipe=" ".join(self.recipe.args),
            space_text=space.to_yaml(),
            plan=self.plan.summary,
            began=time.strftime("%Y-%m-%d %H:%M", time.localtime(self.began)),
            command=self.command,
            circumstances=host_facts.facts(),
            trials=trials,
            shared_stage=space.shared_stage,
            control=space.goal.control,
        )
        with scratch_folder() as folder:
            for path in write_report(result, folder):
                storage.upload(path, storage.join(self.store.sweep_dir, "report", path.name))
                if path.suffix != ".png":
                    self._tracker.text(f"report/{path.name}", path.read_text())
                elif not path.stem.endswith("-dark"):  # the page holds both; MLflow shows the light one
                    self._tracker.figure(f"report/{path.name}", path.read_bytes())
        goals = [trial.goal for trial in trials if trial.goal is not None]
        if goals:
            best = max(goals) if space.goal.mode == "max" else min(goals)
            self._tracker.metrics(self._reported_over, {f"best/{space.goal.metric.replace('/', '_')}": best})
        self._tracker.describe(self._description(trials))
        self._reported = time.monotonic()
        if self._follows:
            self._console.show(records)
        return trials

    def _trial_result(self, name: str) -> TrialResult:
        store, goal = self.store, self.plan.space.goal
        record, result, sizes = store.trials[name].record, store.outcome(name), store.sizes(name)
        curves = {key: [(int(step), value) for step, value in curve] for key, curve in (result.curves or {}).items()}
        overrides = [f"{key}={spelled(value)}" for key, value in store.settings(name).items()]
        return TrialResult(
            name=name,
            settings=dict(store.trials[name].entry.point.shown),
            state=record.state,
            reason=record.reason,
            goal=record.score,
            curves=curves or {goal.metric: list(record.scores)},
            device_seconds=result.device_seconds,
            params=sizes and sizes.params,
            gflops=sizes and sizes.gflops,
            command=shlex.join(["vitray", "train", *self.recipe.args, *overrides]),
            run_url=self._tracker.url_of(result.mlflow_run) if result.mlflow_run else None,
            paper=paper_result(store.run(name)) if self._on_imagenet else None,
            latency_ms=result.latency_ms,
            peak_memory_bytes=result.peak_memory_bytes,
            val_images=result.val_images,
        )

    def _description(self, trials: Sequence[TrialResult]) -> str:
        """Return MLflow's description of the sweep: the plan, and a table of the trials by their varied settings."""
        goal, sign = self.plan.space.goal, -1 if self.plan.space.goal.mode == "max" else 1
        ranked = sorted(trials, key=lambda trial: (trial.goal is None, sign * (trial.goal or 0)))
        varied = list(dict.fromkeys(path for trial in trials for path in trial.settings))
        lines = [self.plan.summary, "", f"`{self.command}`", ""]
        if trials:
            lines += [_row("trial", goal.metric, "state", *varied), _row(*["---"] * (3 + len(varied)))]
        for trial in ranked[:MOST_DESCRIBED]:
            name = f"[{trial.name}]({trial.run_url})" if trial.run_url else trial.name
            cells = [spelled(trial.settings[path]) if path in trial.settings else "" for path in varied]
            lines.append(_row(name, "" if trial.goal is None else f"{trial.goal:.4g}", trial.state, *cells))
        if len(ranked) > MOST_DESCRIBED:
            lines.append(f"\nand {len(ranked) - MOST_DESCRIBED} more: report/results.csv")
        return "\n".join(lines)

    def _kill(self, name: str, reason: str) -> None:
        """Mark a trial as killed in MLflow if it still runs there. A resumed sweep continues the same MLflow run."""
        path = storage.join(self.store.run_dir(name), RUN_META)
        if storage.exists(path):
            self._tracker.kill(storage.read_json(path)["uid"], reason)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# ---- the console -----------------------------------------------------------------------------------------------------


class SweepConsole:
    """Progress of a sweep on stderr: a table that a terminal rewrites in place, or a line at times in a file."""

    def __init__(
        self, trials: int, goal: Goal, records: Mapping[str, TrialRecord], stream: TextIO | None = None
    ) -> None:
        self._trials, self._goal, self._console = trials, goal, Console(stream)
        self._started = self._last_end = time.monotonic()
        self._printed, self._rows, self._has_named = 0.0, 0, False
        # Trials that were over at the start do not count in the estimate of the remaining time.
        self._over = self._over_at_start = sum(record.is_over for record in records.values())

    def show(self, records: Mapping[str, TrialRecord]) -> None:
        """Print the progress, once per interval, at the first start of a trial and at each end of one."""
        over = sum(record.is_over for record in records.values())
        interval = TABLE_INTERVAL if self._console.is_terminal else LINE_INTERVAL
        is_first = not self._has_named and any(record.state == "running" for record in records.values())
        if over == self._over and not is_first and time.monotonic() - self._printed < interval:
            return
        self._has_named |= is_first
        self._printed = time.monotonic()
        if over != self._over:
            self._over, self._last_end = over, self._printed
        self._clear()
        rows = self._table(records) if self._console.is_terminal else [self._sentence(records)]
        print("\n".join(rows), file=self._console.stream, flush=True)
        self._rows = len(rows) if self._console.is_terminal else 0

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self._clear()
        self._console.line(text)

    def end(self, facts: Mapping[str, str]) -> None:
        """Print the end block."""
        self._clear()
        self._console.block(facts)

    def _sentence(self, records: Mapping[str, TrialRecord]) -> str:
        running = [name for name, record in records.items() if record.state == "running"]
        best = self._best(records)
        parts = [self._counts(records), *([f"running {', '.join(running)}"] if running else [])]
        parts += [f"best {best} {self._score(records[best])}"] if best else []
        return f"  {'; '.join(parts)}; {self._left()} left"

    def _table(self, records: Mapping[str, TrialRecord]) -> list[str]:
        """Return the rows of the running trials and of the best, the counts, and the remaining time."""
        best = self._best(records)
        names = [name for name, record in records.items() if record.state == "running"][:MOST_RUNNING]
        names += [best] if best and best not in names else []
        width = max([5, *map(len, names)])
        rows = [f"  {'trial':<{width}}  {self._goal.metric:>12}  {'step':>9}  state"] if names else []
        for name in names:
            record = records[name]
            step = f"{record.scores[-1][0]:,}" if record.scores else "-"
            state = record.state + (", best so far" if name == best else "")
            rows.append(f"  {name:<{width}}  {self._score(record):>12}  {step:>9}  {state}")
        return [*rows, f"  {self._counts(records)}; {self._left()} left"]

    def _counts(self, records: Mapping[str, TrialRecord]) -> str:
        over = [record for record in records.values() if record.is_over]
        states = {state: sum(record.state == state for record in over) for state in ("stopped early", "failed")}
        details = ", ".join(f"{count} {state}" for state, count in states.items() if count)
        total = max(self._trials, len(records))
        text = f"{len(over)}/{total} over{f' ({details})' if details else ''}"
        if len(over) < total and not any(record.state == "running" for record in records.values()):
            text += ", none running: a trial starts when its CPUs or GPUs are free"
        return text

    def _best(self, records: Mapping[str, TrialRecord]) -> str | None:
        scores = {name: record.score for name, record in records.items() if record.score is not None}
        return (max if self._goal.mode == "max" else min)(scores, key=lambda name: scores[name], default=None)

    def _score(self, record: TrialRecord) -> str:
        return "-" if record.score is None else f"{record.score:.4g}"

    def _left(self) -> str:
        """Return the remaining time, from the mean time per trial so far."""
        done = self._over - self._over_at_start
        if not done:
            return "-"
        end = self._last_end + (self._last_end - self._started) / done * (self._trials - self._over)
        return clock(max(0.0, end - time.monotonic()))

    def _clear(self) -> None:
        if self._rows:
            print(f"\x1b[{self._rows}F\x1b[J", end="", file=self._console.stream)
            self._rows = 0
