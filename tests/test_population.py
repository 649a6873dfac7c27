"""Population-based training: trials that continue from better ones' checkpoints."""

import pytest
import torch

from vitray.config import Run
from vitray.errors import ConfigError, RunError
from vitray.sweeps import population
from vitray.sweeps.population import (
    CONTINUES,
    Continuations,
    continue_from,
    copy_checkpoint_to,
    param_space,
    restore_population,
)
from vitray.sweeps.space import check_space, name_of, read_space
from vitray.sweeps.trial import TrialContext, TrialTrainable
from vitray.sweeps.trial_store import TrialRecord, TrialStore, read_entries, read_record, write_record
from vitray.system import storage
from vitray.training.checkpoints import Checkpoint, complete_steps, read_checkpoint, write_checkpoint

SPACE = """
space:
  depth: {grid: [1, 2]}
  model.name: vit_u{depth}x1_8
  optim.lr: {grid: [1.0e-3, 1.0e-2]}
scheduler: {kind: population, every: 2 steps}
"""


def space_of(tmp_path, text):
    (tmp_path / "space.yaml").write_text(text)
    return read_space(tmp_path / "space.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("optim.lr: {grid: [1.0e-3, 1.0e-2]}", "seed: {seeds: 2}", r"without a drawn setting .*: optim.lr, data.augm"),
        ("kind: population", "kind: population, share: 0.6", "share"),
        ("every: 2 steps", "every: 2 hours", "hours"),
        ("scheduler:", "budget: {minutes: 3}\nscheduler:", "budget: got a limit, expected none"),
        ("scheduler:", "search: {kind: tpe, trials: 3}\nscheduler:", "got a population with search tpe"),
        (
            "optim.lr: {grid: [1.0e-3, 1.0e-2]}",
            "optim.lr: {grid: [1.0e-3]}\n  x: {cases: {a: {}}}",
            "space.x: got cases",
        ),
    ],
)
def test_a_space_that_no_population_can_train_is_refused(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        space_of(tmp_path, SPACE.replace(old, new))


def test_a_continuation_is_a_new_trial_with_the_network_of_its_source_and_other_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = SPACE.replace("space:", "space:\n  data.url: {grid: [data/a]}")
    text = text.replace("{grid: [1.0e-3, 1.0e-2]}", "{loguniform: [1.0e-3, 1.0e-2]}")
    space = space_of(tmp_path, text.replace("scheduler:", "search: {kind: random, trials: 2}\nscheduler:"))
    base = Run().replace({"model.image_size": 32, "model.num_classes": 10})
    points = {name_of(point, space): point for point in check_space(space, base)}
    store = TrialStore(str(tmp_path / "home"), base, points, learns=False)
    source = next(iter(points))
    config = {"name": source} | store.settings(source) | {"optim.lr": 0.5}  # 1.2 times a rate may leave the range
    continued = Continuations(space, store)(config)
    assert continued["optim.lr"] == 0.01
    assert continued["data.url"] == f"{tmp_path}/data/a"  # a trial's process has a working folder of its own
    assert continued["model.name"] == store.settings(source)["model.name"]
    assert continued["name"].endswith("continuation=2")
    store.close()
    entry = read_entries(store.sweep_dir)[continued["name"]]
    assert (entry.continues, entry.point.settings["optim.lr"]) == (source, 0.01)
    # A resumed sweep has it again.
    assert list(TrialStore(store.sweep_dir, base, points, learns=False).trials) == [*points, continued["name"]]


def write(run_dir, step, seconds=5.0):
    state = {
        "train_state": {"step": step, "seconds": seconds, "records": [{"step": 1}], "pending": [1], "best_step": 2}
        | {"pending_probes": [1], "best": {"top1": 0.9}, "recent": [0.5]}
    }
    write_checkpoint(run_dir, Checkpoint(step, {"model": {"weight": torch.randn(3)}}, state))


@pytest.mark.parametrize("remote", [False, True])
def test_a_continuation_begins_with_the_tensors_of_its_source(tmp_path, s3_server, remote):
    out = "s3://bucket/population" if remote else str(tmp_path)
    source, target, folder = storage.join(out, "a"), storage.join(out, "b"), tmp_path / "carried"
    folder.mkdir()
    write(source, 4)
    copy_checkpoint_to(folder, source, 4)
    continue_from(folder, target)
    there, here = read_checkpoint(source, 4), read_checkpoint(target, 4)
    assert torch.equal(there.parts["model"]["weight"], here.parts["model"]["weight"])
    # The time, the records and the best step before belong to the source.
    of_the_source = {"seconds": 0.0, "records": [], "pending": [], "pending_probes": [], "best": {}, "best_step": None}
    assert here.state["train_state"] == {"step": 4, "recent": [0.5], **of_the_source}
    write(target, 6)
    continue_from(folder, target)  # started again, it keeps its own checkpoints
    assert complete_steps(target) == [4, 6]


def test_a_checkpoint_that_never_completes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(population, "CHECKPOINT_SECONDS", 0.3)
    write(str(tmp_path), 4)
    with pytest.raises(RunError, match="the checkpoint of step 6 is not complete"):
        copy_checkpoint_to(tmp_path, str(tmp_path), 6)


def interrupted(tmp_path):
    """A population's store after an interruption: two trials, one of which a continuation was to replace."""
    (tmp_path / "home").mkdir(exist_ok=True)
    space = space_of(tmp_path, SPACE.replace("  depth: {grid: [1, 2]}\n  model.name: vit_u{depth}x1_8\n", ""))
    base = Run().replace({"model.image_size": 32, "model.num_classes": 10})
    points = {name_of(point, space): point for point in check_space(space, base)}
    store = TrialStore(str(tmp_path / "home"), base, points, learns=False)
    for name in points:
        write_record(store.run_dir(name), TrialRecord("running", ((2, 0.5),), steps=8))
    worse, better = points
    write(store.run_dir(better), 4)
    continued = Continuations(space, store)({"name": better} | store.settings(better))["name"]

    def reopen():
        store.close()
        return TrialStore(store.sweep_dir, base, points, learns=False)

    return store, reopen, worse, better, continued


def live(store):
    return param_space(store)["name"]["grid_search"]


def test_an_interrupted_continuation_that_has_replaced_a_trial_gets_the_checkpoint_of_its_source(tmp_path):
    store, reopen, worse, better, continued = interrupted(tmp_path)
    store.replace(continued, worse)
    store = reopen()
    restore_population(store, 2)
    assert live(store) == [better, continued]
    assert complete_steps(store.run_dir(continued)) == [4]
    assert read_record(store.run_dir(worse)).state == "stopped early"


def test_an_interrupted_continuation_that_has_replaced_no_trial_yet_is_given_up(tmp_path):
    _, reopen, worse, better, continued = interrupted(tmp_path)
    store = reopen()
    restore_population(store, 2)
    assert live(store) == [worse, better]
    assert "interrupted before it began" in read_record(store.run_dir(continued)).reason


def test_a_continuation_without_a_checkpoint_never_trains_from_the_start(tmp_path):
    trial = TrialTrainable.__new__(TrialTrainable)  # without Tune's folders and loggers
    context = TrialContext(None, None, str(tmp_path), "", "", space_of(tmp_path, SPACE), 1, None, True, {})
    trial.setup({"name": "b", CONTINUES: "a", "optim.lr": 0.1}, context)
    with pytest.raises(RuntimeError, match="b: it has no checkpoint of a to continue from"):
        trial.step()
