"""The verbs in Python: each gives the values of its command line, as a table and as HTML."""

import json
from pathlib import Path

import pandas as pd
import pytest
from image_sets import write_folder
from PIL import Image
from pyarrow import parquet as pq

import vitray
from pipelines.__main__ import main
from vitray import ConfigError, load_run
from vitray.runs.console import Console

TINY = {
    "model.name": "vit_u2x1_8",
    "model.image_size": 32,
    "model.pool": "token",
    "model.class_token": True,
    "optim.batch": 16,
    "optim.duration": "6 steps",
    "optim.warmup": "0 steps",
    "evaluate.every": "3 steps",
    "checkpoint.every": "3 steps",
    "tracking.every": "1 step",
    "compute.workers": 1,
    "compute.cpus": 1,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with photographs, their dataset, and a run of six steps."""
    folder = tmp_path_factory.mktemp("verbs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        write_folder(folder / "photos", 80)
        sharded = vitray.shard(folder / "photos", folder / "data", {"row_group": 16}, splits=["val=0.25"])
        assert sharded.frame.set_index("split")["images"].to_dict() == sharded["splits"]
        assert sharded["splits"]["val"] == 20
        run = load_run("demo", TINY | {"data.url": sharded.path})
        with pytest.MonkeyPatch.context() as said:
            lines = []
            said.setattr(Console, "line", lambda self, text: lines.append(text))
            broken = vitray.Callback(on_evaluation=lambda step, values: values["val/top2"])
            vitray.train(run, "tiny", str(folder / "runs"), here=True, callback=broken)
        assert [line.strip() for line in lines if "callback" in line] == [
            f"a callback failed at step {step}: KeyError: 'val/top2'" for step in (3, 6)
        ]
        yield folder


@pytest.fixture
def run(place):
    return vitray.open_run("tiny", place / "runs")


def on_command_line(capsys, *words):
    """The values that a command prints with `--json`."""
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_opens_with_its_curves_and_its_model(run, place):
    assert (run.outcome["state"], run.best_step in (3, 6), run.run.model.name) == ("finished", True, "vit_u2x1_8")
    assert list(run.curves.index) == [1, 2, 3, 4, 5, 6]
    assert run.curves["train/loss"].notna().all()
    assert list(run.curves["val/top1"].dropna().index) == [3, 6]
    assert vitray.load(run.model).classes == sorted(path.name for path in (place / "photos").iterdir())
    assert "data:image/png;base64" in run._repr_html_()
    assert "finished" in repr(run)


def test_a_run_on_its_way_has_the_curves_of_its_last_checkpoint(run, place):
    (outcome := Path(run.url) / "outcome.json").rename(aside := place / "outcome.json")
    try:
        unfinished = vitray.open_run("tiny", place / "runs")
        assert (unfinished.outcome, unfinished.best_step) == (None, run.best_step)
        pd.testing.assert_series_equal(unfinished.curves["train/loss"], run.curves["train/loss"])
        assert "not finished; the last checkpoint is of step 6" in unfinished._repr_html_()
        with pytest.raises(ConfigError, match="the run has no model yet"):
            _ = unfinished.model
    finally:
        aside.rename(outcome)


def test_an_evaluation_is_that_of_the_command_line(run, place, capsys):
    report = vitray.evaluate(run.model, place / "data", out=place / "scores")
    wanted = on_command_line(capsys, "evaluate", run.model, place / "data", "--out", place / "scores")
    assert report.values == wanted
    assert report["top1"] == report.frame["top1"][0] == run.outcome["val_top1"]
    assert "<iframe sandbox srcdoc=" in (html := report._repr_html_())
    assert "<script" not in html
    assert repr(report).endswith(report.path)


def test_predictions_are_a_table_of_the_images(run, place, capsys):
    report = vitray.predict(run.model, place / "photos", place / "answers", embedding=True, batch=16, part=32)
    wanted = on_command_line(
        capsys, "predict", run.model, place / "photos", place / "more", "--embedding", "--batch", "16", "--part", "32"
    )
    assert {name: report[name] for name in ("images", "written", "parts")} == {"images": 80, "written": 80, "parts": 3}
    assert (wanted["images"], wanted["parts"]) == (80, 3)
    assert report.frame["key"].tolist() == pq.read_table(place / "more" / "parts")["key"].to_pylist()
    [answer] = vitray.load(run.model).predict(Image.open(place / "photos" / report.frame["key"][0]))
    assert answer.name == report.frame["classes"][0][0]
    assert "and 60 more rows" in report._repr_html_()


def test_the_inside_is_a_page_with_files(run, place, capsys):
    report = vitray.inspect(run.model, place / "data", figures=["rollout"], most=4, out=place / "inside")
    words = ["inspect", run.model, place / "data", "--figures", "rollout", "--images", "4", "--out", place / "inside"]
    assert report.values == on_command_line(capsys, *words)
    assert report.frame["file"].tolist() == report["files"]
    assert all((place / "inside" / name).is_file() for name in report["files"])


def test_an_export_has_its_proof(run, place, capsys):
    report = vitray.export(run.model, "torchvision", out=place / "exported", data=place / "data", images=8, rounds=1)
    words = ["export", run.model, "--to", "torchvision", "--out", place / "again", "--data", place / "data"]
    wanted = on_command_line(capsys, *words, "--images", "8", "--rounds", "1")
    assert report.values | {"path": 0} == wanted | {"path": 0}
    assert report.frame["changed_top1"].tolist() == [0]


def test_a_folder_of_photographs_becomes_a_network_in_one_command(run, place, capsys):
    settings = [f"{path}={value}" for path, value in TINY.items() if not path.startswith("model.")]
    words = ["train", "finetune", "--data", str(place / "photos"), f"task.weights={run.model}", *settings]
    words += ["--here", "--out", str(place / "mine" / "runs")]
    assert main([*words, "--dry-run"]) == 2
    refused = f"no dataset yet; `vitray shard {place / 'photos'} {place / 'mine' / 'data' / 'photos'}` writes it"
    assert refused in capsys.readouterr().err
    assert main([*words, "--name", "tuned", "--json"]) == 0
    printed = capsys.readouterr()
    tuned = vitray.open_run("tuned", place / "mine" / "runs")
    assert json.loads(printed.out.splitlines()[-1])["model"] == tuned.model
    assert (tuned.run.task.mode, tuned.run.data.holdout) == ("attn", 0.1)
    assert Path(tuned.run.data.url) == place / "mine" / "data" / "photos"
    commands = [line.split() for line in printed.err.splitlines()[-4:] if "vitray" in line]
    assert [command[1] for command in commands] == ["evaluate", "inspect", "predict"]
    assert {command[2] for command in commands} == {tuned.model}
    assert vitray.load(tuned.model).classes == vitray.load(run.model).classes
    # A dataset is taken as it is, with its own images to evaluate.
    words[3] = str(place / "data")
    assert main([*words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["val_images"] == 20
    assert main([*words, "data.url=elsewhere"]) == 2
    assert "data.url is set, too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vitray.open_run("absent", "."), "absent: no run"),
        (lambda: vitray.open_sweep("absent", "."), "absent: no sweep"),
        (lambda: vitray.evaluate("m", "d", workers=0), "workers: got 0, expected 1 or more"),
        (lambda: vitray.evaluate("m", "d", max_corrupt=1), "max_corrupt: got 1, expected a share"),
        (lambda: vitray.predict("m", "d", "o", workers=(3, 2)), r"workers=\(3, 2\)"),
        (lambda: vitray.predict("m", "d", "o", part=0), "part: got 0"),
        (lambda: vitray.inspect("m", most=0), "most: got 0"),
        (lambda: vitray.export("m", "onnx", bound=2), "bound: got 2"),
        (lambda: vitray.export("m", "onx"), "expected one of onnx, .*did you mean onnx"),
        (lambda: vitray.sweep("demo", "demo_lrs"), "no space 'demo_lrs'.*demo_lr"),
        (lambda: vitray.sweep("demo", "demo_lr", {"optim.lr": 1.0}), "the space sets optim.lr too"),
        (lambda: vitray.shard("demo", "d", {"imags": 3}), "imags.*did you mean images"),
    ],
)
def test_bad_arguments_have_one_message(call, message):
    with pytest.raises(ConfigError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
