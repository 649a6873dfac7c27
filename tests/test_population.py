"""Population-based training: trials that continue from better ones' checkpoints."""

import pytest
import torch

from vitray import storage
from vitray.config import Run
from vitray.errors import ConfigError, RunError
from vitray.sweep import population
from vitray.sweep.population import Continuations, continue_from, copy_checkpoint_to
from vitray.sweep.space import check_space, name_of, read_space
from vitray.sweep.trial_store import TrialStore, read_entries
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
        ("scheduler:", "budget: {minutes: 3}\nscheduler:", "budget: got a limit, wanted none"),
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


def test_a_continuation_is_a_new_trial_with_the_network_of_its_source_and_other_settings(tmp_path):
    space = space_of(
        tmp_path,
        SPACE.replace("{grid: [1.0e-3, 1.0e-2]}", "{loguniform: [1.0e-3, 1.0e-2]}").replace(
            "scheduler:", "search: {kind: random, trials: 2}\nscheduler:"
        ),
    )
    base = Run().replace({"model.image_size": 32, "model.num_classes": 10})
    points = {name_of(point, space): point for point in check_space(space, base)}
    store = TrialStore(str(tmp_path / "home"), base, points, learns=False)
    source = next(iter(points))
    config = {"name": source} | store.settings(source) | {"optim.lr": 0.5}  # 1.2 times a rate may leave the range
    continued = Continuations(space, store)(config)
    assert continued["optim.lr"] == 0.01
    assert continued["model.name"] == store.settings(source)["model.name"]
    assert continued["name"].endswith("continuation=2")
    store.close()
    entry = read_entries(store.sweep_dir)[continued["name"]]
    assert (entry.continues, entry.point.settings["optim.lr"]) == (source, 0.01)
    # A resumed sweep has it again.
    assert list(TrialStore(store.sweep_dir, base, points, learns=False).entries) == [*points, continued["name"]]


def write(run_dir, step, seconds=5.0):
    state = {
        "train_state": {"step": step, "seconds": seconds, "records": [{"step": 1}], "pending": [1], "best_step": 2}
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
    # The time and the records before belong to the source.
    assert here.state["train_state"] == {"step": 4, "seconds": 0.0, "records": [], "pending": [], "best_step": 2}
    write(target, 6)
    continue_from(folder, target)  # started again, it keeps its own checkpoints
    assert complete_steps(target) == [4, 6]


def test_a_checkpoint_that_never_completes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(population, "CHECKPOINT_SECONDS", 0.3)
    write(str(tmp_path), 4)
    with pytest.raises(RunError, match="the checkpoint of step 6 is not complete"):
        copy_checkpoint_to(tmp_path, str(tmp_path), 6)
