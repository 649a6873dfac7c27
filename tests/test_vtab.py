"""VTAB-1k: the means printed in the ViT paper, 1,000 images by hash, one setting for all datasets, and the verb."""

import csv
import json
import re
import shutil
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset, write_folder, write_network
from test_report import HOSTILE, measured_page

from pipelines import recipes
from pipelines.__main__ import main
from vitray.cluster import session
from vitray.config import load_run
from vitray.data.augment.decode import decode_image
from vitray.data.shards import open_dataset
from vitray.errors import ConfigError, RunError
from vitray.evaluation.vtab import evaluate, tasks
from vitray.evaluation.vtab.page import render
from vitray.evaluation.vtab.scores import (
    SWEEP,
    TASKS,
    NetworkResult,
    Setting,
    TaskResult,
    VtabEvaluation,
    best_setting,
    mean_score,
)
from vitray.evaluation.vtab.tasks import hash_order
from vitray.inference.images import open_images
from vitray.inference.models import describe_network
from vitray.runs.run_dir import Outcome
from vitray.system import storage
from vitray.weights import load_model, open_weights, save_model

# Table 9 of the ViT paper, ViT-H/14 and ViT-L/16, both pre-trained on JFT.
TABLE = {
    77.6: "95.3 85.5 75.2 99.7 97.2 65.0 88.9 83.3 96.7 91.4 76.6 91.7 63.8 53.1 79.4 63.3 84.5 33.2 51.2",
    76.3: "95.4 81.9 74.3 99.7 96.7 63.5 87.4 83.6 96.5 89.7 77.1 86.4 63.1 49.7 74.5 60.5 82.2 36.2 51.1",
}
GROUPS = dict(zip(TASKS, ["natural"] * 7 + ["specialized"] * 4 + ["structured"] * 8, strict=True))
KEYS = [f"image {row}" for row in range(1500)]


# ---- the protocol ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("printed", TABLE)
def test_the_mean_of_19_tasks_is_the_one_printed_in_the_paper(printed):
    scores = dict(zip(TASKS, map(float, TABLE[printed].split()), strict=True))
    mean = mean_score(scores, GROUPS)
    assert round(mean.mean, 1) == printed
    assert mean.groups["natural"] == pytest.approx(np.mean(list(scores.values())[:7]))
    assert mean.groups["specialized"] == pytest.approx(np.mean(list(scores.values())[7:11]))
    assert mean.groups["structured"] == pytest.approx(np.mean(list(scores.values())[11:]))


def test_the_images_have_the_smallest_hashes_in_any_order_of_the_rows():
    order = hash_order("pets", KEYS)
    assert order.tolist() == sorted(range(1500), key=lambda row: sha256(f"pets\0{KEYS[row]}".encode()).digest())
    shuffled = [KEYS[row] for row in np.random.default_rng(0).permutation(1500)]
    assert [shuffled[row] for row in hash_order("pets", shuffled)] == [KEYS[row] for row in order]
    assert not np.array_equal(order, hash_order("dtd", KEYS))
    with pytest.raises(ConfigError, match=r"pets: 999 training images; expected at least 1,000, 800 \+ 200"):
        hash_order("pets", KEYS[:999])
    with pytest.raises(ConfigError, match="pets: 1 names occur twice"):
        hash_order("pets", [*KEYS, KEYS[0]])


def test_the_sweep_and_the_recipe_are_those_of_the_paper():
    """B.1.1 and Table 4; the warm-up is that of the authors' code."""
    assert (len(SWEEP), len({each.lr for each in SWEEP}), len({each.steps for each in SWEEP})) == (4, 2, 2)
    assert Setting(0.01, 2500) in SWEEP
    assert [Setting(0.01, steps).warmup for steps in (500, 2500)] == [100, 500]
    run = load_run(recipes.path_of("finetune_sgd_imagenet")).replace(evaluate.PROTOCOL)
    assert (run.optim.rule.kind, run.optim.rule.momentum, run.optim.rule.nesterov) == ("sgd", 0.9, False)
    assert (run.optim.batch, run.optim.weight_decay, run.optim.clip) == (512, 0, 1)
    assert (run.optim.schedule.kind, run.optim.schedule.floor, run.optim.layer_decay) == ("cosine", 0, 1)
    assert (run.model.image_size, run.task.mode, run.task.smoothing) == (384, "full", 0)
    assert (run.data.augment.crop.kind, run.data.augment.flip, run.data.augment.policy.kind) == ("center", 0, "none")
    assert run.data.augment.crop.crop_ratio is None  # the whole image
    assert run.data.eval_crop.crop_ratio is None
    assert not run.data.mix.is_mixing


def test_one_setting_is_best_for_all_datasets():
    scores = {
        Setting(0.01, 500): {"pets": 0.9, "dtd": 0.1},
        Setting(0.01, 2500): {"pets": 0.6, "dtd": 0.6},
        Setting(0.003, 500): {"pets": 0.6, "dtd": 0.6},
    }
    assert best_setting(scores) == Setting(0.01, 2500)


# ---- the verb, with fine-tunings that only shift the head ------------------------------------------------------------


def shrink(monkeypatch, *sweep):
    """A protocol of 40 + 10 images and these settings."""
    for module in (tasks, evaluate):
        monkeypatch.setattr(module, "TRAIN", 40)
    monkeypatch.setattr(tasks, "DEVELOPMENT", 10)
    monkeypatch.setattr(evaluate, "SWEEP", sweep)


@pytest.fixture
def small(monkeypatch):
    """A protocol of 40 + 10 images, whose fine-tunings are `shift_head`."""
    shrink(monkeypatch, Setting(0.1, 10), Setting(0.2, 20))
    monkeypatch.setattr(session, "ray_session", lambda **_: nullcontext())
    runs = []

    def recorded(run, name, out):
        runs.append((run, name, out))
        return shift_head(run, name, out)

    monkeypatch.setattr(evaluate, "train", recorded)
    return runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two datasets, one of them a source that was not sharded, and two networks."""
    folder = tmp_path_factory.mktemp("vtab")
    write_dataset(folder / "shapes", {"train": 70, "val": 33})
    for split, count in (("train", 80), ("val", 60)):
        write_folder(folder / "photos" / split, count)
    write_network(folder / "a")
    write_network(folder / "b", seed=1, classes=("other", "classes"))
    return folder


def shift_head(run, name, out):
    """Stand for a training: a seeded head in place of zeros, scored on the evaluated split."""
    dataset = open_dataset(run.data.url)
    loaded = open_weights(run.task.weights)
    generator = torch.Generator().manual_seed(run.seed)
    head = torch.nn.Linear(loaded.vit.model.shape.size, len(dataset.classes))
    for tensor in head.parameters():
        tensor.data = torch.randn(tensor.shape, generator=generator)
    vit, model = loaded.vit, loaded.vit.model.model_copy(update={"num_classes": len(dataset.classes)})
    vit.model, vit.head = model, head
    home = storage.join(out, name)
    save_model(storage.join(home, "model"), run.replace({"model": model.model_dump(mode="json")}), vit, dataset.classes)
    top1 = int(run.optim.duration.split()[0]) / 100 if run.data.val else None
    numbers = {"model_bytes": 1, "val_top1": top1, "val_loss": None, "mlflow_run": "id", "steps": 1, "seconds": 1.0}
    model_folder = storage.join(home, "model")
    return Outcome(name, home, "finished", model_folder, **numbers, images_per_second=None, start={})


def args_of(place, out, *more):
    words = [str(place / "a"), "model.image_size=32", "optim.batch=20", "--out", str(out), *map(str, more)]
    return ["evaluate", *words, "--vtab", f"natural={place / 'shapes'}", f"structured={place / 'photos'}"]


@pytest.mark.slow
def test_the_verb_chooses_one_setting_and_scores_each_seed(place, small, tmp_path, capsys, monkeypatch):
    assert main([*args_of(place, tmp_path, "--seeds", 2), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    # The sweep: 2 settings x 2 datasets on 40 images; then 2 seeds x 2 datasets with the better setting on all 50.
    assert [(run.optim.lr, run.optim.duration, run.data.train, run.data.val) for run, _, _ in small] == [
        *[(0.1, "10 steps", "train800", "val200")] * 2,
        *[(0.2, "20 steps", "train800", "val200")] * 2,
        *[(0.2, "20 steps", "train800val200", None)] * 4,
    ]
    assert [run.seed for run, _, _ in small] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert small[-1][1] == "a-photos-lr0.2-20-seed1"
    assert small[2][0].optim.warmup == "4 steps"
    assert [each["mean"] for each in result["sweep"]] == [0.1, pytest.approx(0.2)]
    assert (result["lr"], result["steps"], result["datasets"], result["seeds"]) == (0.2, 20, 2, 2)
    assert len(result["missing_of_vtab"]) == 19
    # The images that count are those of the split, each once.
    shapes, photos = result["tasks"]
    assert (shapes["images"], photos["images"]) == (33, 60)
    assert (shapes["group"], photos["group"]) == ("natural", "structured")
    # An independent count of one score, and the means and deviations by hand.
    seed1 = shift_head(small[-1][0], "again", str(tmp_path / "again"))
    assert photos["seeds"][1] == np.mean([correct(seed1.model, image) for image in (place / "photos/val").glob("*/*")])
    assert photos["top1"] == pytest.approx(np.mean(photos["seeds"]))
    assert photos["top1_std"] == pytest.approx(abs(photos["seeds"][0] - photos["seeds"][1]) / np.sqrt(2))
    assert photos["top1_low"] <= photos["top1"] < photos["top1_high"]
    assert result["vtab"] == pytest.approx((shapes["top1"] + photos["top1"]) / 2)
    assert result["vtab_structured"] == pytest.approx(photos["top1"])
    means = [np.mean([task["seeds"][seed] for task in result["tasks"]]) for seed in (0, 1)]
    assert result["vtab_std"] == pytest.approx(np.std(means, ddof=1))
    # The files.
    assert {path.name for path in tmp_path.iterdir()} >= {"index.html", "results.json", "scores.csv", "sweep.csv"}
    assert not list((tmp_path / "runs").iterdir())
    with (tmp_path / "scores.csv").open() as file:
        assert [row["top1"] for row in csv.DictReader(file)] == [str(task["top1"]) for task in result["tasks"]]
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 5
    page = (tmp_path / "index.html").read_text()
    for text in (f"{100 * result['vtab']:.2f} ± ", "(chosen)", "2 seeds", "Not the mean of VTAB", "compute.precision"):
        assert text in page
    # The same command trains nothing again; one more seed trains two.
    monkeypatch.setattr(session, "ray_session", lambda: pytest.fail("Ray starts"))
    assert main([*args_of(place, tmp_path, "--seeds", 2), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    monkeypatch.setattr(session, "ray_session", lambda **_: nullcontext())
    before = len(small)
    assert main(args_of(place, tmp_path, "--seeds", 3)) == 0
    assert [(run.seed, run.data.val) for run, _, _ in small[before:]] == [(2, None)] * 2


def correct(model, path):
    from vitray.config.augmentation import CenterCrop
    from vitray.data.augment.crops import crop_center
    from vitray.data.augment.mixing import normalized

    run, vit, classes = load_model(model)
    crop = CenterCrop(crop_ratio=None, interpolation="bilinear")
    view = crop_center(decode_image(path.read_bytes()), crop, (32, 32))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=run.compute.precision == "bf16"):
        logits = vit.eval()(normalized(torch.from_numpy(view)[None], run.data.normalize))
    return classes[int(logits.argmax())] == path.parent.name


@pytest.mark.slow
def test_a_killed_command_continues_with_the_fine_tuning_that_it_was_at(place, small, tmp_path, monkeypatch, capsys):
    whole = evaluate.train

    def killed(run, name, out):
        if len(small) == 5:
            raise RunError(f"{name}: killed")
        return whole(run, name, out)

    monkeypatch.setattr(evaluate, "train", killed)
    assert main(args_of(place, tmp_path, "--seeds", 1)) == 1
    assert "killed" in capsys.readouterr().err
    assert not (tmp_path / "index.html").exists()
    monkeypatch.setattr(evaluate, "train", whole)
    assert main(args_of(place, tmp_path, "--seeds", 1)) == 0
    assert len({out for _, _, out in small}) == len(small) == 6


def test_a_subset_holds_the_same_images_from_a_source_and_from_its_dataset(small, tmp_path):
    """Images that cannot be decoded are left out and listed; the next hashes take their place."""
    write_folder(tmp_path / "photos" / "train", 60)
    write_folder(tmp_path / "photos" / "val", 20)
    [task] = tasks.open_tasks([f"natural={tmp_path / 'photos'}"], "train", "val")
    images = [image.key for image in task.train.read_labeled(task.order.tolist())]
    broken = next(path for path in (tmp_path / "photos/train").glob("*/*") if images[3].endswith(path.name))
    broken.write_bytes(broken.read_bytes()[:200])
    [task] = tasks.open_tasks([f"natural={tmp_path / 'photos'}"], "train", "val")
    dataset = tasks.write_subset(task, str(tmp_path / "subsets"))
    wanted = [*images[:3], *images[4:51]]
    for split, part in (("train800", wanted[:40]), ("val200", wanted[40:]), ("train800val200", wanted)):
        stored = open_images(dataset.url, split)
        assert [image.key for image in stored.read_labeled(range(len(stored)))] == part
    assert len(dataset.settings["left_out"]) == dataset.rejects.count == 1
    assert images[3] in dataset.settings["left_out"][0]
    pixels = np.concatenate(
        [
            decode_image(image.content).reshape(-1, 3)
            for image in open_images(dataset.url, "train800").read_labeled(range(40))
        ]
    )
    assert np.allclose(dataset.mean, (pixels / 255).mean(0))
    assert np.allclose(dataset.std, (pixels / 255).std(0))
    assert tasks.write_subset(task, str(tmp_path / "subsets")).identity == dataset.identity


@pytest.mark.ray
@pytest.mark.slow
def test_the_verb_fine_tunes_with_runs_of_vitray_train(place, ray_cluster, tmp_path, monkeypatch, capsys):
    shrink(monkeypatch, Setting(0.1, 4), Setting(0.1, 8))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    words = [str(place / "a"), "model.image_size=32", "optim.batch=20", "compute.workers=1", "compute.precision=fp32"]
    options = ["--out", str(tmp_path / "out"), "--seeds", "1", "--json", "--vtab", f"natural={place / 'photos'}"]
    assert main(["evaluate", *words, *options]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["tasks"][0]["images"], result["vtab_std"]) == (60, None)
    assert result["vtab"] == result["tasks"][0]["top1"]
    assert {each["steps"] for each in result["sweep"]} == {4, 8}
    records = [json.loads(path.read_text()) for path in (tmp_path / "out" / "done").iterdir()]
    assert len({record["mlflow_run"] for record in records} - {None}) == 3
    assert not list((tmp_path / "out" / "runs").iterdir())
    # Repeated, it reads what is done.
    monkeypatch.setattr(evaluate, "train", lambda *args: pytest.fail("trains again"))
    assert main(["evaluate", *words, *options]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--vtab", "data/shapes"], "--vtab: got 'data/shapes', expected GROUP=DATA, as in natural=data/pets"),
        (["a", "--vtab", "x=shapes", "optim.batch=9"], "got 'optim.batch=9', .*settings come before --vtab"),
        (["optim.batch=9", "--vtab", "x=shapes"], "--vtab: got no MODEL"),
        (["a", "--vtab", "x=nowhere"], "nowhere: no files here"),
        (["a", "--vtab", "x=shapes", "y=copy/shapes"], "shapes have one name; expected distinct names"),
        (["a", "--vtab", "x=flat"], "--train-split: got train, whose images are those of --split val"),
        (["a", "--vtab", "x=few"], r"few: 30 training images; expected at least 50, 40 \+ 10"),
        (["a", "--vtab", "x=news"], "news: val has the class 'sphere', which train lacks"),
        (["a", "optim.lr=1", "--vtab", "x=shapes"], "override optim.lr: the protocol sets optim.lr"),
        (["a", "data.augment.flip=0.5", "--vtab", "x=shapes"], "override data.augment.flip: the protocol sets data"),
        (["a", "optim.batch=41", "--vtab", "x=shapes"], "optim.batch: got 41, expected at most the 40 training images"),
        (["a", "--vtab", "x=shapes"], "optim.batch: got 512, expected at most the 40"),
        (["a", "optim.batch=4", "model.name=vit_ti12x1_16", "--vtab", "x=shapes"], "not the network of this run"),
        (["a", "a", "optim.batch=4", "--vtab", "x=shapes"], "a: given 2 times"),
    ],
)
def test_bad_input_gets_one_message_and_writes_nothing(place, small, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(place)
    if not (place / "few").exists():
        write_dataset(place / "few", {"train": 30, "val": 5})
        write_folder(place / "flat", 60)
        shutil.copytree(place / "shapes", place / "copy" / "shapes")
        shutil.copytree(place / "photos", place / "news")
        shutil.copytree(place / "news/val" / SHAPES[0], place / "news/val/sphere")
    assert main(["evaluate", words[0], "--out", str(tmp_path / "out"), *words[1:]]) == 2
    captured = capsys.readouterr().err
    assert re.search(message, captured), captured
    assert captured.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not small


def page_of(place, networks, names):
    """The page of networks on datasets of these names, with drawn scores."""
    spec, rng, results = describe_network(str(place / "a"))[0], np.random.default_rng(0), []
    for network in networks:
        done = [
            TaskResult(
                name, GROUPS.get(name, name), name, "test", "ab" * 32, 10, 500, 1, tuple(rng.integers(0, 500, 3))
            )
            for name in names
        ]
        swept = {setting: dict.fromkeys(names, 0.5) for setting in SWEEP}
        results.append(NetworkResult(network, spec, SWEEP[3], swept, done))
    return render(VtabEvaluation(results, 3, {"optim.batch": names[0]}, f"vitray evaluate {networks[0]} --vtab"))


def test_names_are_escaped(place):
    page = page_of(place, [HOSTILE, "b"], [HOSTILE, "<img src=x onerror=alert(1)>"])
    assert "<script" not in page
    assert "<img src=x" not in page
    assert page.count("&lt;script&gt;") > 10


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_a_browser_shows_the_page_in_any_width_and_theme(place, tmp_path, width, theme):
    """With all 19 datasets and two networks."""
    page = page_of(place, ["vit_b12x1_16", "vit_b12x2_16"], list(TASKS))
    measured = measured_page(page, width, theme, tmp_path)
    assert measured["wide"] <= width
    assert measured["boxes"] == 0
    assert measured["drawn"]
    assert (measured["images"], measured["dark"]) == (1, theme == "dark")


def test_probes_with_vtab_are_a_usage_error(place):
    with pytest.raises(SystemExit) as exit_:
        main([*args_of(place, Path("out"), "--probes", "knn")])
    assert exit_.value.code == 2
