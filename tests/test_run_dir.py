"""The run folder: the weights from which a fork starts, also after an interruption."""

from types import SimpleNamespace

import pytest

from vitray.config import load_run
from vitray.errors import ConfigError
from vitray.runs.run_dir import fork_source, open_run_dir, resume_command
from vitray.system import storage
from vitray.tasks.build import build_task
from vitray.training.checkpoints import Checkpoint, folder_of, write_checkpoint

TINY = ["model.name=vit_u2x1_8", "model.image_size=32", "model.num_classes=5", "optim.batch=4"]

MEAN, L1 = (f"task={{kind: masked, objective: {{kind: {kind}}}}}" for kind in ("mean_color", "pixels_l1"))
NO_CLASSES = "model.num_classes=null"


def settings(*overrides):
    return load_run(None, list({each.partition("=")[0]: each for each in [*TINY, *overrides]}.values()))


def save(run_dir, run):
    write_checkpoint(run_dir, Checkpoint(3, {"model": dict(build_task(run).state_dict())}, {}))


def opened(out, name, run, fork=None):
    """The folder of a run that has been opened."""
    run_dir = f"{out}/{name}"
    data = SimpleNamespace(identity="d")
    resolved = SimpleNamespace(run=run, dataset=data, initial=None, tokenizer=None, teacher=None)
    open_run_dir(run_dir, name, resolved, "owner", fork)
    return run_dir


@pytest.mark.parametrize("group", ["", "group/"])
def test_a_fork_keeps_its_source_until_it_has_a_checkpoint(tmp_path, group):
    first = opened(tmp_path, f"{group}first", settings())
    assert fork_source(first) is None
    with pytest.raises(ConfigError, match=f"--fork {group}first: {first} has no checkpoint to start from"):
        opened(tmp_path, f"{group}second", settings(), f"{group}first")
    save(first, settings())
    second = opened(tmp_path, f"{group}second", settings(), f"{group}first")
    assert fork_source(second) == first
    assert opened(tmp_path, f"{group}second", settings()) == second  # as --resume opens it
    assert fork_source(second) == first
    storage.remove(folder_of(first, 3))
    with pytest.raises(ConfigError, match=f"--fork {group}first: {first} has no checkpoint to start from"):
        fork_source(second)
    save(second, settings())
    opened(tmp_path, f"{group}second", settings(), f"{group}first")  # as the repeated command opens it
    assert fork_source(second) is None


def test_an_existing_run_is_not_forked_again(tmp_path):
    first, second = (opened(tmp_path, name, settings()) for name in ("first", "second"))
    save(first, settings())
    with pytest.raises(
        ConfigError, match="--fork: got first, expected another --name: second exists and started from no"
    ):
        opened(tmp_path, "second", settings(), "first")
    assert fork_source(second) is None


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ([], ["model.layerscale=0.1"], r"vit.blocks.0.attn1.scale: got none, expected \[64\]"),
        ([], ["model.registers=2"], r"vit.registers: got none, expected \[\S+ 64\]"),
        (["model.pool=mean", "model.class_token=false"], ["model.pool=token"], "vit.class_token: got none"),
        ([MEAN, NO_CLASSES], [L1, NO_CLASSES], r"head.weight: got \[512, 64\], expected \[192, 64\]"),
    ],
)
def test_a_fork_of_another_network_is_refused_before_ray_starts(tmp_path, before, after, first):
    save(opened(tmp_path, "first", settings(*before)), settings(*before))
    opened(tmp_path, "same", settings(*before, "optim.lr=1e-4"), "first")
    with pytest.raises(ConfigError, match=f"--fork: .*/first is of another network: .*{first}"):
        opened(tmp_path, "second", settings(*after), "first")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(("out", "options"), [("runs", ""), ("elsewhere", " --out {}/elsewhere")])
@pytest.mark.parametrize("name", ["first", "team/first"])
def test_the_command_that_resumes_a_run_has_its_name(name, out, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = f"vitray train --resume {name}{options.format(tmp_path)}"
    assert resume_command(name, storage.join(str(tmp_path), out, name)) == command


def test_a_name_in_use_gets_the_way_to_start_from_its_weights(tmp_path):
    opened(tmp_path, "first", settings())
    with pytest.raises(ConfigError, match=r"optim.lr.* Pick another --name, .*: --name NEW --fork first; see"):
        opened(tmp_path, "first", settings("optim.lr=1e-4"))
    tuned = "task={kind: finetune, weights: base}"
    folder = opened(tmp_path, "tuned", settings(tuned))
    checkpoint = rf"--name NEW task.weights=TARGET, after `vitray weights checkpoint {folder} TARGET`; see"
    with pytest.raises(ConfigError, match=checkpoint):  # it has no model yet
        opened(tmp_path, "tuned", settings(tuned, "optim.lr=1e-4"))
    storage.write_bytes(f"{folder}/outcome.json", b'{"state": "finished"}')
    with pytest.raises(ConfigError, match=f"--name NEW task.weights={folder}/model; see"):
        opened(tmp_path, "tuned", settings(tuned, "optim.lr=1e-4"))
