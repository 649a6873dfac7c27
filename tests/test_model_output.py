"""Model folders from checkpoints: which one, with which weights and classes, and what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from image_sets import SHAPES, write_dataset

from pipelines.__main__ import main
from vitray.config import load_run
from vitray.config.pretraining import Tokenizer
from vitray.errors import ConfigError
from vitray.models.adapters import merge_lora
from vitray.runs.model_output import save_checkpoint
from vitray.runs.run_summary import best_block
from vitray.system import storage
from vitray.tasks.build import build_task
from vitray.training.checkpoints import Checkpoint, folder_of, write_checkpoint
from vitray.training.state import TrainState
from vitray.weights import load_model, load_tokenizer, open_weights

MODEL = f"model={{name: vit_u2x2_8, image_size: 32, num_classes: {len(SHAPES)}}}"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("images") / "demo", {"train": 20, "val": 10})


@pytest.fixture
def interrupted(tmp_path, dataset):
    """Make the folder of an interrupted run with checkpoints of steps 2 and 4; return it and {step: weights}."""

    def make(*overrides, best=None, average=(), steps=(2, 4), pending=(), folder="run"):
        run = load_run(None, [*overrides, f"data.url={dataset.url}"])
        folder = str(tmp_path / folder)
        storage.write_bytes(f"{folder}/run.yaml", run.to_yaml().encode())
        storage.write_bytes(f"{folder}/run.json", json.dumps({"dataset_identity": dataset.identity}).encode())
        weights = {}
        for step in steps:
            torch.manual_seed(step)
            model = {name: torch.randn_like(value) for name, value in build_task(run).state_dict().items()}
            averages = {name: torch.randn_like(model[name]) for name in average}
            parts = {"model": model} | ({"average": averages} if average else {})
            state = {"train_state": TrainState(step=step, best_step=best, pending=list(pending)).as_json()}
            write_checkpoint(folder, Checkpoint(step, parts, state))
            weights[step] = model | averages
        return folder, weights

    return make


def check(url, weights):
    """Check that a model folder has the network of a task's weights."""
    loaded = load_model(url)
    assert loaded.classes == list(SHAPES)
    wanted = merge_lora({name.removeprefix("vit."): tensor for name, tensor in weights.items()})
    state = loaded.vit.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def test_a_run_gives_its_best_evaluation_and_without_one_its_last_step(interrupted, tmp_path):
    folder, weights = interrupted(MODEL, best=2, average=["vit.norm.weight"])
    save_checkpoint(folder, str(tmp_path / "best"))
    check(str(tmp_path / "best"), weights[2])
    save_checkpoint(folder_of(folder, 4), str(tmp_path / "four"))
    check(str(tmp_path / "four"), weights[4])
    folder, weights = interrupted(MODEL)
    save_checkpoint(folder, str(tmp_path / "last"))
    check(str(tmp_path / "last"), weights[4])


def test_evaluations_that_end_after_the_last_checkpoint_count(interrupted, tmp_path, capsys):
    folder, weights = interrupted(MODEL, best=2, pending=[4])
    save_checkpoint(folder, str(tmp_path / "before"))
    check(str(tmp_path / "before"), weights[2])
    assert "not evaluated when the run was interrupted, so not compared: steps 4\n" in capsys.readouterr().out
    outcome = {"steps": 4, "best_step": 4}
    storage.write_bytes(f"{folder}/outcome.json", json.dumps(outcome).encode())
    save_checkpoint(folder, str(tmp_path / "after"))
    check(str(tmp_path / "after"), weights[4])
    assert "not compared" not in capsys.readouterr().out
    storage.write_bytes(f"{folder}/outcome.json", json.dumps(outcome | {"steps": 3}).encode())  # resumed since
    save_checkpoint(folder, str(tmp_path / "resumed"))
    check(str(tmp_path / "resumed"), weights[2])


def test_the_only_checkpoint_of_a_run_is_not_taken_for_its_best(interrupted, tmp_path):
    folder, weights = interrupted(MODEL, best=3, steps=(4,))
    with pytest.raises(ConfigError, match="its best evaluation, of step 3, has no checkpoint"):
        save_checkpoint(folder, str(tmp_path / "best"))
    save_checkpoint(folder_of(folder, 4), str(tmp_path / "four"))
    check(str(tmp_path / "four"), weights[4])


def test_a_run_below_a_folder_of_the_name_checkpoints_is_found(interrupted, tmp_path):
    folder, weights = interrupted(MODEL, folder="checkpoints/runs/a b")
    save_checkpoint(folder, str(tmp_path / "last"))
    check(str(tmp_path / "last"), weights[4])


@pytest.mark.parametrize("mode", ["attn", "lora"])
def test_a_checkpoint_of_a_fine_tuning_becomes_a_whole_network(mode, interrupted, tmp_path):
    folder, weights = interrupted(MODEL, f"task={{kind: finetune, weights: unread, mode: {mode}}}", best=2)
    save_checkpoint(folder, str(tmp_path / "best"))
    check(str(tmp_path / "best"), weights[2])


def test_a_checkpoint_of_a_tokenizer_becomes_a_tokenizer(interrupted, tmp_path, capsys):
    folder, weights = interrupted("task=tokenizer", "model={name: vit_u2x1_8, image_size: 32, num_classes: null}")
    run = load_run(f"{folder}/run.yaml", [f"data.url={tmp_path}/gone"])  # no class names are read
    storage.write_bytes(f"{folder}/run.yaml", run.to_yaml().encode())
    assert main(["weights", "checkpoint", folder, str(tmp_path / "last"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["kind"], facts["model"], facts["share"]) == ("whole", "tokenizer of vit_u2x1_8", 1)
    tokenizer = load_tokenizer(str(tmp_path / "last"))
    assert isinstance(tokenizer.run.task, Tokenizer)
    assert all(torch.equal(tensor, weights[4][name]) for name, tensor in tokenizer.state_dict().items())


def test_classes_are_those_of_the_finished_run_even_if_its_images_are_gone(interrupted, tmp_path):
    folder, weights = interrupted(MODEL, best=4)
    run = load_run(f"{folder}/run.yaml", [f"data.url={tmp_path}/gone"])
    storage.write_bytes(f"{folder}/run.yaml", run.to_yaml().encode())
    with pytest.raises(ConfigError, match="gone"):
        save_checkpoint(folder, str(tmp_path / "best"))
    storage.write_bytes(f"{folder}/model/classes.json", json.dumps(SHAPES).encode())
    save_checkpoint(folder, str(tmp_path / "best"))
    check(str(tmp_path / "best"), weights[4])


def test_the_verb_writes_the_folder_and_describes_it(interrupted, tmp_path, capsys):
    folder, _ = interrupted(MODEL, best=2)
    assert main(["weights", "checkpoint", folder, str(tmp_path / "best"), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder_of(folder, 2)} -> ")
    facts = json.loads(lines[-1])
    assert (facts["kind"], facts["model"], facts["url"]) == ("whole", "vit_u2x2_8", str(tmp_path / "best"))
    with pytest.raises(SystemExit, match="2"):
        main(["weights", "checkpoint", folder])
    assert "checkpoint: expected RUN TARGET, or RUN/checkpoints/step-00001200 TARGET" in capsys.readouterr().err


def test_what_is_no_usable_checkpoint_gets_one_message(interrupted, tmp_path, dataset):
    folder, _ = interrupted(MODEL, best=3)
    with pytest.raises(
        ConfigError, match=r"best evaluation, of step 3, has no checkpoint; expected \S+/step-00000004, "
    ):
        save_checkpoint(folder, str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="no complete checkpoint; expected one of the steps 2, 4"):
        save_checkpoint(folder_of(folder, 3), str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="no run folder; expected one"):
        save_checkpoint(f"{folder}s", str(tmp_path / "x"))
    place = folder_of(folder, 2)
    for read in (load_model, open_weights):
        with pytest.raises(
            ConfigError, match=f"a checkpoint, expected a model folder; `vitray weights checkpoint {place} "
        ):
            read(place)
    storage.write_bytes(f"{folder}/run.json", json.dumps({"dataset_identity": "other"}).encode())
    with pytest.raises(ConfigError, match=f"{dataset.url}: the images have changed since"):
        save_checkpoint(folder_of(folder, 2), str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_the_end_of_a_run_shows_the_command_for_a_better_earlier_step():
    def block(best, *complete):
        return best_block(SimpleNamespace(steps=9, home="/runs/a b", best_step=best), complete)

    assert block(None, 9) == block(9, 4, 9) == {}
    assert block(4, 9) == {}  # its checkpoint is gone
    assert block(4, 4, 9) == {"best": "step 4: vitray weights checkpoint '/runs/a b' TARGET"}
