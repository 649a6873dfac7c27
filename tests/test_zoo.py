"""The networks that come with vitray: their scores on photographs, their names as addresses, and their page."""

import json
import os
import sys

import pytest
import torch
from scipy import stats
from test_layers import ROOT

import vitray
from pipelines.__main__ import main
from vitray import ConfigError, load_run
from vitray.models.network import build_network
from vitray.weights import identity_of, load_model, open_weights, read_delta
from vitray.weights.addresses import pin_uri, resolve_uri
from vitray.weights.pretrained import open_initial_weights
from vitray.weights.zoo import FOLDER, zoo_names

sys.path.insert(0, str(ROOT / "experiments"))
import write_zoo

# As their cards say, of all test images.
TOP1 = {"cifar10_3x1": 0.8743}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """The first 20 test images of each class of CIFAR-10."""
    return vitray.shard(ROOT / "tests" / "cifar10", tmp_path_factory.mktemp("cifar10") / "data").path


@pytest.mark.parametrize("name", zoo_names())
def test_a_network_scores_on_photographs_what_its_card_says(name, photographs, tmp_path):
    assert f"{100 * TOP1[name]:.2f} % top-1 of the 10,000" in (FOLDER / name / "card.md").read_text()
    report = vitray.evaluate(f"zoo/{name}", photographs, split="test", out=tmp_path / "scores")
    low, high = stats.binom(200, TOP1[name]).interval(0.999)
    assert report["images"] == 200
    assert low <= 200 * report["top1"] <= high


def test_a_command_takes_the_name(photographs, tmp_path, capsys):
    assert main(["predict", "zoo/cifar10_3x1", photographs, str(tmp_path / "answers"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["written"] == 200
    assert main(["predict", "zoo/cifar10", photographs, str(tmp_path / "others")]) == 2
    assert "neither a network of vitray nor a path; expected zoo/cifar10_3x1" in capsys.readouterr().err


def test_its_page_is_that_of_the_cards_and_all_are_small():
    assert write_zoo.PAGE.read_text() == write_zoo.page()
    assert set(zoo_names()) == set(TOP1)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 12e6
    for name in zoo_names():
        assert str(open_weights(f"zoo/{name}").run.data.url) == "data/cifar10"


def test_a_name_is_an_address_on_every_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pin_uri("zoo/cifar10_3x1") == "zoo/cifar10_3x1"
    run, vit, classes = load_model("zoo/cifar10_3x1")
    with torch.no_grad():
        vit.head.bias.add_(1)
    vitray.save_model("delta", run, vit, classes, relative_to="zoo/cifar10_3x1")
    assert (delta := read_delta("delta")) is not None
    assert (delta.base.url, delta.base.beside) == ("zoo/cifar10_3x1", None)
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "delta", tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert identity_of(load_model("moved").vit.state_dict()) == identity_of(vit.state_dict())


def test_a_fine_tuning_takes_all_settings_that_define_the_network():
    """One of them, `ffn_ratio`, once was forgotten in a list of these settings."""
    run = load_run("demo_finetune", {"task.weights": "zoo/cifar10_3x1", "model.num_classes": 4})
    run, weights = open_initial_weights(run, run.task, ("a", "b", "c", "d"))
    assert (run.model.ffn_ratio, run.model.image_size, run.task.weights) == (2.0, 48, "zoo/cifar10_3x1")
    assert weights.url == "zoo/cifar10_3x1"
    assert build_network(run.model).state_dict().keys() == weights.state.keys()


def test_unknown_names_are_refused_and_folders_of_ones_own_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = (
        "zoo/cifar10_3x: neither a network of vitray nor a path; expected zoo/cifar10_3x1; did you mean cifar10_3x1?"
    )
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        vitray.load("zoo/cifar10_3x")
    (tmp_path / "zoo" / "mine").mkdir(parents=True)
    assert resolve_uri("zoo/mine") == "zoo/mine"
    assert pin_uri("zoo/mine") == str(tmp_path / "zoo" / "mine")
    (tmp_path / "zoo" / "cifar10_3x1").mkdir()
    assert resolve_uri("zoo/cifar10_3x1") == str(FOLDER / "cifar10_3x1")
    assert pin_uri("./zoo/cifar10_3x1") == str(tmp_path / "zoo" / "cifar10_3x1")
