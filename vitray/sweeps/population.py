"""Population-based training: a trial continues from the checkpoint of a better one, with other settings.

Ray Tune's scheduler decides; each continuation is a new trial of the store, with a run folder of its own.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from ray import tune

from vitray.errors import RunError
from vitray.sweeps.plan import with_absolute_addresses
from vitray.sweeps.space import Space, draw_point, name_of
from vitray.sweeps.trial_store import TrialEntry, TrialStore
from vitray.system import storage

# The key of a trial's configuration for the trial that it continues.
CONTINUES = "continues"
# Seconds in which a run writes the checkpoint of its last evaluation. Tune's loop waits for it.
CHECKPOINT_SECONDS = 120.0


class Continuations:
    """Makes the trial that continues another one."""

    def __init__(self, space: Space, store: TrialStore) -> None:
        self._space, self._store = space, store

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its arguments to resume by itself, which is not used.
        return {}

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the name and settings of the new trial; `config` is the perturbed one of the trial to continue."""
        space, source = self._space, config["name"]
        point = self._store.trials[source].entry.point
        drawn = point.drawn | {name: config[name] for name in space.changeable}
        point = draw_point(space, drawn) or point  # where a constraint forbids the change
        name = f"{name_of(point, space)} continuation={len(self._store.trials)}"
        self._store.add(name, TrialEntry(with_absolute_addresses(point), continues=source))
        return {"name": name, CONTINUES: source} | self._store.settings(name)


def param_space(store: TrialStore) -> dict[str, Any]:
    """Return the trials that are not over as Tune's `param_space`: its scheduler of populations accepts no searcher."""
    configs = {name: store.settings(name) for name, record in store.records().items() if not record.is_over}
    for name, config in configs.items():
        config[CONTINUES] = store.trials[name].entry.continues
    paths = dict.fromkeys(path for settings in configs.values() for path in settings)

    def setting(path: str) -> Any:
        return tune.sample_from(lambda config: configs[config["name"]][path])

    return {"name": tune.grid_search(list(configs))} | {path: setting(path) for path in paths}


def restore_population(store: TrialStore, size: int) -> None:
    """Complete interrupted continuations: replaced trials end, and new ones get their checkpoints."""
    from vitray.training.checkpoints import complete_steps

    for trial in store.trials.values():
        if replaced := trial.entry.replaces:
            store.write_end(replaced, "stopped early", "another trial's continuation took its place")
    begun = [name for name, record in store.records().items() if not record.is_over]
    for name in reversed(begun):
        entry = store.trials[name].entry
        if entry.continues and not complete_steps(store.run_dir(name)):
            source = store.run_dir(entry.continues)
            steps = complete_steps(source)
            is_extra = not entry.replaces and len(begun) > size  # the trial that it would have replaced goes on
            if is_extra or not steps:
                store.write_end(name, "failed", "its sweep was interrupted before it began")
                begun.remove(name)
                continue
            with storage.scratch_folder() as folder:
                copy_checkpoint_to(folder, source, steps[-1])
                continue_from(folder, store.run_dir(name))


# ---- checkpoints that Tune carries from trial to trial ---------------------------------------------------------------


def copy_checkpoint_to(folder: Path, run_dir: str, step: int) -> None:
    """Copy the checkpoint of an evaluated step to a local folder; the run may still be writing it."""
    from vitray.training import checkpoints

    deadline = time.monotonic() + CHECKPOINT_SECONDS
    while step not in checkpoints.complete_steps(run_dir):
        if time.monotonic() > deadline:
            raise RunError(f"{run_dir}: the checkpoint of step {step} is not complete after {CHECKPOINT_SECONDS:.0f} s")
        time.sleep(0.2)
    source = checkpoints.folder_of(run_dir, step)
    for name in storage.list_files(source):
        with storage.local_copy(storage.join(source, name)) as path:
            shutil.copyfile(path, folder / name)


def continue_from(folder: Path, run_dir: str) -> None:
    """Make the checkpoint in a local folder the first one of a run, unless the run has one already."""
    from vitray.training import checkpoints

    if checkpoints.complete_steps(run_dir):  # the same trial, started again
        return
    meta = folder / checkpoints.META
    content = json.loads(meta.read_text())
    # The time, the metrics and the best scores before this step belong to the other run, as its checkpoints do.
    of_the_other = {"seconds": 0.0, "records": [], "pending": [], "pending_probes": [], "best": {}, "best_step": None}
    content["state"]["train_state"] |= of_the_other
    target = checkpoints.folder_of(run_dir, content["step"])
    for path in folder.iterdir():
        if path.name in content["files"]:
            storage.upload(path, storage.join(target, path.name))
    storage.write_bytes(storage.join(target, meta.name), json.dumps(content).encode())
