"""Figures of `vitray inspect` in training: the settings, the same pictures by step, and those of a registered model."""

import io
from types import SimpleNamespace

import pytest
import torch
from image_sets import SHAPES, write_dataset
from networks import scrambled
from PIL import Image

from vitray.config import load_run
from vitray.config.evaluation import FEWEST_COMPARED, NEEDS
from vitray.data.shards import held_out
from vitray.errors import ConfigError
from vitray.inspection.report.inspect_networks import Request, make_figures
from vitray.inspection.similarity import FEWEST_IMAGES
from vitray.models.vit import ViT
from vitray.runs.placement import place_workers
from vitray.runs.registered_figures import inspect_model, log_registered_figures
from vitray.runs.resolve import resolve
from vitray.runs.run_logger import RunLogger
from vitray.system import storage
from vitray.training import messages
from vitray.training.examples import read_examples
from vitray.training.figures import draw_figures, read_shown_images
from vitray.training.prober import Probed, ProbeProcess, log_probes
from vitray.training.state import TrainState
from vitray.weights import save_model

MODEL = f"model={{name: vit_u2x2_8, image_size: 32, num_classes: {len(SHAPES)}, layerscale: 0.1}}"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("figures") / "demo", {"train": 90, "val": 50}, corrupt=1)


def recipe(dataset, *overrides):
    settings = [MODEL, f"data.url={dataset.url}", "optim.batch=16", "optim.duration=4 steps", "optim.warmup=0 steps"]
    return load_run(None, [*settings, *overrides])


def size(png) -> tuple[int, int]:
    return Image.open(io.BytesIO(png)).size


def test_the_setting_takes_the_figures_of_one_network():
    names = [name for name, needs in NEEDS.items() if not needs.two]
    overrides = [MODEL, "data.url=data", f"evaluate.figures=[{','.join(names)}]"]
    assert load_run(None, overrides).evaluate.figures == tuple(names)
    for name in NEEDS.keys() - set(names):
        with pytest.raises(ConfigError, match=rf"evaluate.figures\S* got '{name}', expected 'rollout', .*'spectra'"):
            load_run(None, [f"evaluate.figures=[{name}]"])
    assert FEWEST_COMPARED == FEWEST_IMAGES
    assert load_run(None, []).evaluate.figures == ()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluate.figures=[rolout]"], r"evaluate.figures.*got 'rolout', expected .*; did you mean rollout"),
        (["evaluate.figures=[norms,norms]"], "evaluate: figures: got norms more than once"),
        (["evaluate.figures=[norms]", "data.val=null"], "evaluate.figures needs data.val or data.holdout"),
        (["evaluate.figures=[norms]", "evaluate.examples=0"], "evaluate.examples: got 0, expected 1 to 64 images"),
        (
            ["evaluate.figures=[similarity]", "evaluate.examples=3"],
            "got 3, expected at least 4: evaluate.figures has sim",
        ),
        (["evaluate.figures=[branches]"], "figures branches does not apply to vit_ti12x1_16, which has one branch"),
        (["evaluate.figures=[layerscale]"], "figures layerscale does not apply to vit_ti12x1_16, which has no L"),
        (
            ["evaluate.figures=[positions]", "model.positions=none"],
            "positions does not apply to .* has no position embedding",
        ),
    ],
)
def test_figures_that_do_not_fit_get_one_message(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_run(None, overrides)


def test_a_tokenizer_has_no_figures():
    overrides = ["task=tokenizer", "model={name: vit_u2x1_8, image_size: 32, num_classes: null, pool: mean}"]
    with pytest.raises(ConfigError, match=r"evaluate.figures does not apply to task tokenizer"):
        load_run(None, [*overrides, "evaluate.figures=[rollout]"])


def test_figures_are_drawn_on_a_cpu_of_their_own(dataset, monkeypatch):
    import ray

    run = recipe(dataset, "evaluate.figures=[rollout]", "compute.workers=1")
    for cpus, fits in ((2.0, False), (3.0, True)):
        node = {"CPU": cpus}
        monkeypatch.setattr(ray, "cluster_resources", lambda node=node: node)
        monkeypatch.setattr(ray, "nodes", lambda node=node: [{"Alive": True, "Resources": node}])
        if fits:
            assert place_workers(run).cpus == 1
        else:
            with pytest.raises(ConfigError, match=r"one for evaluate.figures do not fit .*`vitray inspect RUN"):
                place_workers(run)
            with pytest.raises(ConfigError, match=r"evaluate.probes and evaluate.figures, .* and `vitray inspect RUN"):
                place_workers(run.replace({"evaluate.probes": ["knn"]}))
    resolve(run)


@pytest.mark.parametrize("development", [0.0, 0.3])
def test_figures_show_the_images_of_the_example_pictures(dataset, development):
    run = recipe(dataset, f"data.holdout={development}", "evaluate.examples=5")
    mask = held_out(dataset, run.data)
    views, labels = read_examples(SimpleNamespace(run=run, dataset=dataset, holdout_mask=mask))
    chosen = read_shown_images(run, dataset, mask)
    assert [image.label for image in chosen.shown] == labels.tolist()
    assert len(views) == chosen.used == len(chosen.shown)
    assert chosen.total == (50 if mask is None else int(mask.sum()))
    assert chosen.over(4).startswith(
        f"4 of {chosen.total} images of demo, {'train, 30% held out' if development else 'val'}"
    )


def test_the_pictures_of_two_steps_have_the_same_names_and_other_values(dataset):
    run = recipe(dataset, "evaluate.figures=[distance,rollout]", "evaluate.examples=4")
    images, drawn = read_shown_images(run, dataset, None), []
    for seed, step in ((0, 2), (1, 1200)):
        weights = scrambled(ViT(run.model), seed).state_dict()
        drawn.append(draw_figures(run, weights, images, f"first, step {step:,}", torch.device("cpu")))
    wanted = ["rollout", "attention_distance", "entropy_of_attention"]
    assert list(drawn[0]) == list(drawn[1]) == wanted
    for name in wanted:
        assert size(drawn[0][name]) == size(drawn[1][name])
        assert drawn[0][name] != drawn[1][name]


@pytest.mark.parametrize("kind", ["rope", "relative"])
def test_positions_that_attention_adds_are_drawn_too(dataset, kind):
    changes = [f"model.positions={kind}", "model.class_token=false", "model.pool=mean"]
    run = recipe(dataset, "evaluate.figures=[positions]", "evaluate.examples=4", *changes)
    weights, images = scrambled(ViT(run.model)).state_dict(), read_shown_images(run, dataset, None)
    (picture,) = draw_figures(run, weights, images, "first, step 2", torch.device("cpu")).values()
    assert min(size(picture)) > 100


def test_figures_of_the_actor_reach_the_image_grid_by_step(dataset):
    run = recipe(dataset, "evaluate.figures=[norms]", "evaluate.examples=5")
    resolved, sent, recorded = SimpleNamespace(run=run, dataset=dataset, holdout_mask=None), [], []
    weights = {name: each.numpy() for name, each in scrambled(ViT(run.model)).state_dict().items()}
    probed = ProbeProcess(resolved, "/runs/first", "cpu").probe(1200, weights)
    assert probed.values == {}
    host = SimpleNamespace(send=sent.append)
    log_probes(iter([(1200, probed), (1400, Probed({}, {}))]), run, TrainState(), host)
    assert [type(message) for message in sent] == [messages.FigurePictures]
    logger = SimpleNamespace(_tracker=SimpleNamespace(image=lambda *record: recorded.append(record)))
    RunLogger._log(logger, sent[0])
    [(key, step, png)] = recorded
    assert (key, step) == ("figures/norms", 1200)
    assert min(size(png)) > 200


@pytest.fixture
def registered(dataset, tmp_path):
    """The folder of a finished run, by its settings."""

    def save(*overrides):
        run = recipe(dataset, *overrides)
        storage.remove(str(tmp_path / "model"))
        (tmp_path / "run.yaml").write_text(run.to_yaml())
        (tmp_path / "run.json").write_text("{}")
        save_model(str(tmp_path / "model"), run, scrambled(ViT(run.model)), SHAPES if run.model.num_classes else None)
        return run, str(tmp_path / "model")

    return save


class Artifacts:
    """The part of a tracker that takes files."""

    def __init__(self):
        self.files = {}

    def figure(self, path, png):
        self.files[path] = png

    def text(self, path, text):
        self.files[path] = text


def test_a_registered_model_has_its_figures_as_artifacts(dataset, registered):
    _, model = registered("evaluate.examples=5")
    tracker = Artifacts()
    assert log_registered_figures(tracker, model) is None
    assert set(tracker.files) >= {
        f"inspection/{name}" for name in ("index.html", "distance.csv", "rollout.csv", "predictions.csv")
    }
    page = tracker.files["inspection/index.html"]
    words = f"vitray inspect {model} {dataset.url} --images 5 --figures rollout,distance"
    assert words in page
    # The command makes the same figures.
    inspection, _ = make_figures(Request(model, [dataset.url], ["rollout", "distance"], images=5, out=model + "-out"))
    for table in (table for result in inspection.results for table in result.tables):
        assert tracker.files[f"inspection/{table.file}.csv"] == table.csv()


def test_figures_of_a_registered_model_are_those_of_the_recipe_or_of_its_weights(registered):
    run, model = registered("evaluate.figures=[layerscale,norms]", "data.holdout=0.3")
    inspection = inspect_model(run, model)
    assert [result.name for result in inspection.results] == ["norms", "layerscale"]
    assert inspection.command == "", "the command line cannot choose held-out images"
    run, model = registered("evaluate.examples=0")
    inspection = inspect_model(run, model)
    assert inspection.images is None
    assert [result.name for result in inspection.results] == ["filters", "positions", "layerscale", "spectra"]


def test_figures_that_fail_are_a_line_and_the_model_stays_registered(registered, tmp_path):
    _, model = registered()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"none")
    tracker = Artifacts()
    assert log_registered_figures(tracker, model).startswith("the registered model has no figures: ConfigError: ")
    assert tracker.files == {}
