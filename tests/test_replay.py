"""`vitray replay`: a past step gives the loss that the run had, and its images show what broke it."""

import json
from pathlib import Path

import numpy as np
import pytest
from image_sets import write_folder
from PIL import Image
from torch import Tensor

import vitray
from pipelines.__main__ import main
from vitray import ConfigError, RunError, load_run
from vitray.data.shards import read_request, write_dataset
from vitray.runs import replay

# Dropped branches, dropout, mixing and erasing: all that a step draws.
DRAWN = {"data.mix.mixup": 0.8, "data.mix.cutmix": 1.0, "data.augment.erase": 0.25, "model.drop_path": 0.2}
NOT_DRAWN = dict.fromkeys(DRAWN, 0.0)
TINY = {
    "model.name": "vit_u2x1_8",
    "model.image_size": 32,
    "optim.batch": 16,
    "optim.duration": "12 steps",
    "optim.warmup": "2 steps",
    "evaluate.every": "5 steps",
    "checkpoint.every": "5 steps",
    "checkpoint.keep": 9,
    "tracking.every": "1 step",
    "compute.workers": 1,
    "compute.cpus": 1,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small dataset, and a tracking store of its own."""
    folder = tmp_path_factory.mktemp("replay")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        write_folder(folder / "photos", 80)
        write_dataset(read_request(str(folder / "photos"), str(folder / "data"), splits=["val=0.2"]))
        yield folder


def trained(place, name, settings):
    run = load_run("demo", TINY | {"data.url": str(place / "data")} | settings)
    return vitray.train(run, name, str(place / "runs"), here=True)


@pytest.fixture(scope="module")
def drawn(place):
    return trained(place, "drawn", DRAWN)


def state_of(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(folder).rglob("*")}


@pytest.mark.parametrize("step", [1, 6, 12])
def test_a_step_has_the_loss_that_the_run_had(place, drawn, step):
    before = state_of(drawn.home)
    again = vitray.replay(drawn.home, step, out=place / f"again{step}")
    curves = vitray.open_run("drawn", place / "runs").curves
    assert again["loss"] == curves["train/loss"][step]
    assert again["grad_norm"] == curves["train/grad_norm"][step]
    assert again["learning_rate"] == curves["train/lr"][step]
    assert again["start"] == (step - 1) // 5 * 5
    assert state_of(drawn.home) == before


def test_the_images_are_ranked_and_shown(place, drawn, capsys):
    words = ["replay", drawn.home, "--step", "6", "--out", str(place / "shown"), "--json"]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    values = json.loads(printed[-1])
    report = vitray.replay(drawn.home, 6, out=place / "shown")
    assert report.values == values
    losses = report.frame["loss"].to_numpy()
    assert len(losses) == 16
    assert (losses[:-1] >= losses[1:]).all()
    assert report.frame["key"].tolist()[:5] == values["worst"]
    assert set(report.frame["label"]) <= {path.name for path in (place / "photos").iterdir()}
    with Image.open(values["sheet"]) as sheet:
        assert sheet.width > 8 * 144
        assert sheet.height > 2 * 144
    assert "data:image/png;base64" in report._repr_html_()
    assert printed[0].startswith("step 6: loss ")
    assert " times the median loss of its batch" in printed[1]


@pytest.mark.slow
def test_a_mean_over_images_is_the_loss_of_a_batch_without_draws(place):
    outcome = trained(place, "plain", NOT_DRAWN)
    report = vitray.replay(outcome.home, 3, out=place / "plain3")
    np.testing.assert_allclose(report.frame["loss"].mean(), report["loss"], rtol=1e-5)


def test_a_broken_loss_names_the_step_and_its_replay(place):
    with pytest.raises(
        RunError, match=r"loss .* at step (\d+), .*`vitray replay .* --step \1` shows its images"
    ) as error:
        trained(place, "broken", {"optim.lr": 1e30, "optim.warmup": "0 steps", "optim.rule": "sgd", "optim.clip": None})
    step = int(str(error.value).rpartition("--step ")[2].split("`")[0])
    report = vitray.replay(str(place / "runs" / "broken"), step, out=place / "broken-step")
    assert not np.isfinite(report["loss"])
    assert "not finite" in report["verdict"]


def test_the_loss_of_an_image_of_views_does_not_hang_on_those_before_it(place, monkeypatch):
    """The center of the teacher moves with each pass of a task, also with one that only looks."""
    views = {"task.centering": "center", "task.prototypes": 12, "data.views.local.size": 16, "evaluate.probes": []}
    run = load_run("demo_self_distillation", TINY | views | {"data.url": str(place / "data"), "evaluate.figures": []})
    outcome = vitray.train(run, "views", str(place / "runs"), here=True)
    look, looked = replay._look, []

    def both_ways(run, step, batch, learner, length):
        fields = {name: value for name, value in batch._asdict().items() if value is not None}
        back = {
            name: value.flip(0) if isinstance(value, Tensor) else value[::-1].copy() for name, value in fields.items()
        }
        looked.extend(look(run, step, each, learner, length) for each in (batch, batch._replace(**back)))
        return looked[0]

    monkeypatch.setattr(replay, "_look", both_ways)
    again = vitray.replay(outcome.home, 9, out=place / "views9")
    assert again["loss"] == vitray.open_run("views", place / "runs").curves["train/loss"][9]
    first, second = ([image.loss for image in each.images] for each in looked)
    assert len(first) == 16
    assert first == pytest.approx(second[::-1], rel=1e-5)


COLORS = {"red": (200, 60, 60), "green": (60, 180, 60), "blue": (60, 60, 200), "gray": (128, 128, 128)}


def write_colors(folder, planted):
    """Write 320 noisy images of a color each, some of them to the folder of another class; return the keys of these."""
    random, names, keys = np.random.default_rng(0), list(COLORS), []
    for number in range(320):
        name = names[number % 4]
        image = np.clip(np.array(COLORS[name]) + random.normal(0, 25, (32, 32, 3)), 0, 255).astype(np.uint8)
        if is_planted := number % 16 == 3 and len(keys) < planted:
            name = names[(number + 1 + number // 16 % 3) % 4]
        path = folder / name / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        if is_planted:
            keys.append(f"{name}/{path.name}")
    return keys


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_planted_image_of_a_wrong_class_is_ranked_first_in_20_of_20(place):
    planted = write_colors(place / "colors", 20)
    write_dataset(read_request(str(place / "colors"), str(place / "colored")))
    settings = {"data.url": str(place / "colored"), "optim.duration": "5 epochs", "checkpoint.every": "10 steps"}
    outcome = trained(place, "colored", NOT_DRAWN | settings | {"data.val": None, "evaluate.every": "100 steps"})
    found = []
    for step in range(81, 101):  # the last epoch, in which each image is once
        keys = vitray.replay(outcome.home, step, out=place / "colored-steps").frame["key"].tolist()
        here = [key for key in keys if key.endswith(tuple(planted))]
        assert set(keys[: len(here)]) == set(here), f"step {step}"
        found += here
    assert len(found) == 20


@pytest.mark.parametrize(
    ("run", "step", "message"),
    [
        ("drawn", 0, "--step: got 0, expected one of the 12 steps"),
        ("drawn", 13, "--step: got 13, expected one of the 12 steps"),
        ("drawm", 3, "no run to resume; did you mean drawn"),
    ],
)
def test_a_step_or_run_that_does_not_exist_is_refused(place, drawn, run, step, message):
    with pytest.raises(ConfigError, match=message):
        vitray.replay(place / "runs" / run, step)
