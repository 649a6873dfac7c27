"""A sweep without Ray: this process trains one trial after another, and shares them with others of the same command.

The folder of a trial is owned by the process that trains it. That of the sweep is owned only while a process begins or
writes the report, which the last one does: a process that was killed leaves its trial to the next.
"""

import random
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from vitray.config import Run
from vitray.errors import ConfigError, OwnershipLost, RunError, one_line
from vitray.runs.local_start import Place
from vitray.runs.resolve import check_storage
from vitray.runs.train import train
from vitray.runs.train_here import check_settings
from vitray.runs.trial_hook import TrialHook
from vitray.sweeps.plan import Recipe, Stage, SweepPlan, plan_stages, plan_sweep, this_machine
from vitray.sweeps.space import STAGES_DIR, Space, check_space, run_of
from vitray.sweeps.sweep import begun
from vitray.sweeps.trial_store import RecordState, Scored, TrialRecord, TrialStore, read_record, recorded, write_record
from vitray.system import storage
from vitray.system.lease import POLL_SECONDS, Claim, Watch, own_folder

if TYPE_CHECKING:
    from vitray.sweeps.sweep_logger import SweepOutcome

# Seconds in which each of many processes that start together begins.
PATIENCE = 600.0
# Seconds to wait for a process that has chosen the same trial; others are free.
TRIAL_PATIENCE = 1.0


def sweep_here(
    recipe: Recipe,
    space: Space,
    name: str,
    out: str,
    command: str,
    stage_recipes: Mapping[str, Recipe] | None = None,
    waits: bool = False,
) -> "SweepOutcome | None":
    """Train the trials that no other process trains, and return the outcome; None if others still train.

    `command` repeats the sweep, or shares it; `stage_recipes` has the recipe of each stage of the space, whose trials
    are shared in the same way before. `waits`: for others to train theirs, as the trials of a stage are.
    """
    storage.check_name(name, "name")
    sweep_dir = storage.join(storage.absolute(out), name)
    check_storage(sweep_dir)
    stages = plan_stages(recipe.run, space, stage_recipes or {}, sweep_dir)
    for each in (Stage(name, recipe, space), *stages):
        check_here(each.space, each.recipe.run)
    if stages:  # before they train for hours
        plan_sweep(recipe.run, space, [this_machine()], sweep_dir, ready=False)
    for stage in stages:
        own_name = storage.join(name, STAGES_DIR, stage.name)
        sweep_here(stage.recipe, stage.space, own_name, out, command, waits=True)
    plan = plan_sweep(recipe.run, space, [this_machine()], sweep_dir)
    begin = partial(begun, plan, recipe, name, command, sweep_dir, follows=False)
    with own_folder(sweep_dir, name, PATIENCE) as ownership, begin(ownership.id) as logger:
        store, uid = logger.store, logger.uid
    print(f"\n  {name}: {len(store.trials)} trials, by each process of this command one at a time\n", file=sys.stderr)
    started, watches = time.monotonic(), {trial: Watch(store.run_dir(trial)) for trial in store.trials}
    while not store.is_spent(space, plan.trials, started):
        if (trial := _next(store, watches)) is None:
            if not waits or not _waiting(store):
                break
            time.sleep(POLL_SECONDS)
            store.read_again()
            continue
        with suppress(OwnershipLost):  # another process was faster
            _train(plan, store, uid, trial)
        store.read_again()
        if store.trials[trial].record.is_over:
            print(f"  {_ended(plan, store, trial)}", file=sys.stderr)
    if taken := [trial for trial in _waiting(store) if watches[trial].live()]:
        print(f"vitray: other processes train {', '.join(taken)}; the last writes the report", file=sys.stderr)
        return None
    with own_folder(sweep_dir, name, PATIENCE) as ownership, begin(ownership.id) as logger:
        return logger.finish()


def check_here(space: Space, base: Run) -> None:
    """Refuse what needs one process that sees all trials, and what a trial by itself would refuse."""
    if base.compute.worker_range not in (None, (1, 1)):
        raise ConfigError(
            f"compute.workers: got {base.compute.workers} with --here, expected 1: a trial is one process"
        )
    wanted = "with --here, where each process trains the trials that are left: sweep without it, on Ray"
    if space.search.traits.learns:
        raise ConfigError(f"search.kind: got {space.search.kind}, expected grid or random {wanted}")
    if space.scheduler.kind != "none":
        raise ConfigError(f"scheduler.kind: got {space.scheduler.kind}, expected none {wanted}")
    for point in check_space(space, base):
        check_settings(run_of(base, point), Place())


def _ended(plan: SweepPlan, store: TrialStore, name: str) -> str:
    """Return how a trial has ended."""
    record = store.trials[name].record
    end = record.reason if record.state == "failed" else f"{plan.space.goal.metric} {record.score}"
    return f"{name} is {record.state}: {end}; {len(_waiting(store))} of {len(store.trials)} trials are not over"


def _waiting(store: TrialStore) -> list[str]:
    """Return the trials that are not over."""
    return [name for name, record in store.records().items() if not record.is_over]


def _next(store: TrialStore, watches: Mapping[str, Watch]) -> str | None:
    """Return a trial that no process trains; None once those of all others are known to live.

    Processes that start together seldom choose the same one. That of another machine lives if its lease is renewed.
    """
    while True:
        waiting = _waiting(store)
        random.shuffle(waiting)
        claims = dict[str, Mapping[str, Claim]]()
        for name in waiting:
            claims[name] = watches[name].live()
            if not claims[name]:
                return name
        if all(any(map(watches[name].is_alive, claims[name])) for name in waiting):
            return None
        time.sleep(POLL_SECONDS)
        store.read_again()


def _train(plan: SweepPlan, store: TrialStore, parent: str, name: str) -> None:
    """Train a trial, and write its record."""
    run_dir = store.run_dir(name)
    record = read_record(run_dir)  # another process may have gone on with it meanwhile
    assert plan.first is not None, "planned before its stages were ready"
    dataset = plan.first.dataset

    def start(scored: Scored) -> RecordState:
        hook = TrialHook(
            parent, scored, waits_for_decision=False, dataset=dataset, is_quiet=False, patience=TRIAL_PATIENCE
        )
        try:
            return train(store.run(name), name, store.sweep_dir, hook=hook, here=True).state
        except (ConfigError, RunError, OwnershipLost):
            raise
        except Exception as error:  # as of a network that does not fit: the other trials go on
            traceback.print_exc()
            raise RunError(one_line(error)) from None

    def decide(record: TrialRecord) -> bool:
        with suppress(ConfigError):  # unreachable storage costs a restart this score, not the trial
            write_record(run_dir, record)
        return False

    record = recorded(start, record.started(), plan.space.goal.metric, decide)
    if not read_record(run_dir).is_over:  # else another process has trained it just before
        write_record(run_dir, record)
