"""vitray evaluate: exact scores, comparisons, probes, the files of an evaluation, and messages for bad input."""

import csv
import json
import re
import shutil
import tarfile
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_sets import SHAPES, write_dataset, write_folder, write_network
from test_report import measured_page

from pipelines.__main__ import main
from vitray.cluster import session
from vitray.config.augmentation import CenterCrop
from vitray.data.augment.crops import crop_center
from vitray.data.augment.decode import decode_image
from vitray.data.augment.mixing import DeviceBatch, normalized
from vitray.data.augment.views import ViewKind
from vitray.data.shards import open_dataset
from vitray.data.stream.decoding import ViewSettings, decode_positions, locate_rows
from vitray.data.stream.epoch_order import EpochOrder
from vitray.errors import ConfigError
from vitray.evaluation import evaluate
from vitray.evaluation.charts import (
    CONFUSED,
    GROUPS,
    cluster,
    confusion_charts,
    grouped,
    most_confused,
    recall_rank,
)
from vitray.evaluation.classes import all_classes, check_same_classes, class_numbers, numbered
from vitray.evaluation.corruptions import SEVERITIES, corrupt
from vitray.evaluation.evaluate import Request, compute_evaluation
from vitray.evaluation.page import render
from vitray.evaluation.results import Evaluation, Result, compare, score
from vitray.evaluation.texts import score_text, scores_text
from vitray.inference import outputs
from vitray.inference.engine import numerics_of
from vitray.inference.images import open_images
from vitray.inference.models import describe_network
from vitray.inference.outputs import BATCH, Outputs, Work, compute_outputs
from vitray.metrics import linear_probe
from vitray.metrics.classification import ClassScore, classify
from vitray.metrics.label_sets import LabelSet
from vitray.metrics.scores import EvaluationSet
from vitray.metrics.scores import evaluate as score_split
from vitray.system import storage
from vitray.training.evaluator import autocast
from vitray.weights import load_model, save_model

FILES = {"index.html", "results.json", "scores.csv", "classes.csv", "predictions.csv"}
PROBES = ("--probes", "knn", "few_shot", "linear", "rank")


@pytest.fixture(autouse=True)
def untracked(monkeypatch):
    """Without the tracking store that a user of this folder may have."""
    monkeypatch.setattr(evaluate, "has_store", lambda: False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset, a folder of images, and networks: two of the same classes, and two of others."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_dataset(folder / "data", {"train": 130, "val": 101})
    write_folder(folder / "photos", 60)
    write_network(folder / "a")
    write_network(folder / "b", seed=1)
    write_network(folder / "other", classes=tuple(f"other {index}" for index in range(10)))
    write_network(folder / "more", classes=(*SHAPES, "sphere"))
    empty = pa.table({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())})
    pq.write_table(empty, folder / "empty.parquet")
    return folder


def verb(capsys, *args):
    """The result of a command that succeeds."""
    assert main(["evaluate", *map(str, args), "--workers", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refusal(capsys, out, *args):
    """The message of a command that is refused, and writes nothing."""
    capsys.readouterr()
    assert main(["evaluate", *map(str, args), "--out", str(out), "--workers", "1"]) == 2
    assert not out.exists()
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def scores(out, *urls, **options):
    """The scores of a request, without its page."""
    *models, data = map(str, urls)
    return compute_evaluation(Request(models, data, out=str(out), workers=1, **options))[0].flat()


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_one_command_scores_probes_and_writes_the_files(place, tmp_path, capsys):
    result = verb(capsys, place / "a", place / "data", *PROBES, "--out", tmp_path)
    keys = {"images", "top1", "top1_low", "top1_high", "top5", "ece", "nll", "knn10", "few_shot5", "linear"}
    assert keys <= result.keys()
    assert (result["images"], result["left_out"]) == (101, 0)
    for name in ("top1", "top5", "mean_per_class", "nll", "ece", "knn10", "linear"):
        assert result[f"{name}_low"] <= result[name] <= result[f"{name}_high"]
    assert {"few_shot1", "few_shot5", "rankme", "temperature", "brier", "adaptive_ece"} <= result.keys()
    least = min(open_dataset(str(place / "data")).splits["train"].class_counts)
    assert result["few_shot_least"] == least < 25
    assert "few_shot25" not in result
    shown = f'images of the smallest class</td><td class="number">{least}</td>'
    assert shown in (tmp_path / "index.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"outputs"}
    assert result["page"] == str(tmp_path / "index.html")
    predictions = rows(tmp_path / "predictions.csv")
    assert [row["image"] for row in predictions] == [f"val:{index}" for index in range(101)]
    assert sum(row["label"] == row["predicted"] for row in predictions) == round(101 * result["top1"])
    assert sum(int(row["images"]) for row in rows(tmp_path / "classes.csv")) == 101
    details = json.loads((tmp_path / "results.json").read_text())["details"][0]
    assert sum(count for _, _, count in details["confusion"]) == 101
    assert sum(each["images"] for each in details["reliability"]) == 101
    # The same command, and one without the probes, compute nothing again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "outputs").rglob("*.parquet")}
    again = scores(tmp_path, place / "a", place / "data", probes=("knn", "few_shot", "linear", "rank"))
    assert again == {name: value for name, value in result.items() if name != "page"}
    assert scores(tmp_path, place / "a", place / "data")["top1"] == result["top1"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "outputs").rglob("*.parquet")} == before


def test_networks_images_and_results_may_lie_on_s3(place, tmp_path, capsys, s3_server):
    url = "s3://bucket/evaluated"
    for name in ("a", "data"):
        shutil.copytree(place / name, s3_server / "bucket" / "evaluated" / name)
    result = verb(capsys, f"{url}/a", f"{url}/data", "--out", f"{url}/out")
    local = scores(tmp_path, place / "a", place / "data")
    assert {name: result[name] for name in ("images", "top1", "nll")} == {
        name: local[name] for name in ("images", "top1", "nll")
    }
    assert result["page"] == f"{url}/out/index.html"
    assert set(storage.list_files(f"{url}/out")) >= FILES


@pytest.mark.parametrize(("least", "text"), [(24, "24"), (25, "None")])
def test_the_size_of_the_smallest_class_is_shown_where_it_leaves_shots_out(least, text):
    result: Any = SimpleNamespace(flat=lambda: {"few_shot_least": least})
    assert str(score_text(result, "few_shot_least")) == text


def test_classes_are_matched_by_name(place, tmp_path):
    """A network that numbers the classes otherwise has the same scores, and the same predictions by name."""
    run, vit, _ = load_model(str(place / "a"))
    order = np.random.default_rng(0).permutation(len(SHAPES))
    with torch.no_grad():
        vit.head.weight.copy_(vit.head.weight[order].clone())
        vit.head.bias.copy_(vit.head.bias[order].clone())
    save_model(str(tmp_path / "permuted"), run, vit, [SHAPES[label] for label in order])
    result = scores(tmp_path / "out", place / "a", tmp_path / "permuted", place / "data")
    one, other = result["models"]
    assert one["top1"] == other["top1"] > 0
    assert one["nll"] == pytest.approx(other["nll"])
    assert result["agreement"] == [[1, 1], [1, 1]]
    assert result["comparisons"][0]["difference"] == 0
    assert "is not significant" in result["comparisons"][0]["verdict"]


def test_networks_of_another_order_are_not_compared_on_images_without_names(place):
    """Both would be scored by number, one of them wrongly."""
    spec, images = describe_network(str(place / "a"))[0], open_images(str(place / "data"), "val")
    other, unnamed = spec._replace(classes=spec.classes[::-1]), replace(images, classes=tuple(map(str, range(10))))
    check_same_classes([spec, other], images)
    check_same_classes([spec, spec], unnamed)
    with pytest.raises(ConfigError, match=r"got another order than that of .*, and .* has only the numbers"):
        check_same_classes([spec, other], unnamed)


def test_a_named_and_an_unnamed_network_agree_by_number(place):
    evaluation = synthetic(place, 12, 101, 2)
    first, second = evaluation.results
    twin = second._replace(scores=first.scored, classes=tuple(map(str, range(12))))
    assert compare([first, twin])[1].tolist() == [[1, 1], [1, 1]]


def test_names_that_look_like_numbers_are_matched_by_name(place):
    spec, images = describe_network(str(place / "a"))[0], open_images(str(place / "data"), "val")
    names = tuple(sorted(map(str, range(1, 11))))  # 1, 10, 2, ...
    images = replace(images, classes=tuple(map(str, range(3))))
    assert class_numbers(spec._replace(classes=("0", "1", "10", "2"), num_classes=4), images).tolist() == [0, 1, 3]
    assert class_numbers(spec._replace(classes=names), images).tolist()[:3] == [0, 1, 2]  # it has no 0
    assert class_numbers(spec._replace(classes=None), images).tolist()[:3] == [0, 1, 2]


def test_a_network_and_images_without_names_have_numbers_as_names(place, tmp_path):
    """The images know no class beyond their largest label."""
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for label, shape in enumerate(SHAPES[:3]):
            image = next((place / "photos" / shape).iterdir())
            tar.add(image, f"{label}.jpg")
            (tmp_path / "label").write_text(str(label))
            tar.add(tmp_path / "label", f"{label}.cls")
    run, vit, _ = load_model(str(place / "a"))
    with torch.no_grad():
        vit.head.bias[9] += 1000
    save_model(str(tmp_path / "model"), run, vit, None)
    evaluate.evaluate(
        Request([str(tmp_path / "model")], str(tmp_path / "photos.tar"), out=str(tmp_path / "out"), workers=1)
    )
    assert [row["predicted"] for row in rows(tmp_path / "out" / "predictions.csv")] == ["9"] * 3


def test_classes_of_the_same_name_stay_apart(place):
    spec, images = describe_network(str(place / "a"))[0], open_images(str(place / "data"), "val")
    twice = ("crane", "crane", *SHAPES[2:])
    spec, images = spec._replace(classes=twice), replace(images, classes=twice)
    assert class_numbers(spec, images).tolist() == list(range(10))
    check_same_classes([spec, spec], images)
    assert all_classes(images, images) == list(twice)
    found = Outputs(np.arange(2), ["a", "b"], np.array([0, 1]), None, np.zeros((2, 4)), ())
    assert numbered(found, images, twice).labels.tolist() == [0, 1]
    other, others = spec._replace(classes=(*SHAPES[2:], "crane", "crane")), replace(images, classes=("crane",))
    for match in (
        lambda: class_numbers(other, images),
        lambda: class_numbers(spec, others),
        lambda: class_numbers(spec._replace(classes=SHAPES), images),
        lambda: check_same_classes([spec, other], images),
        lambda: all_classes(images, others),
    ):
        with pytest.raises(ConfigError, match="classes: got crane more than once"):
            match()


def test_networks_are_compared_on_the_same_images(place, tmp_path, capsys):
    result = verb(capsys, place / "a", place / "b", place / "photos", "--out", tmp_path)
    [pair] = result["comparisons"]
    assert pair["difference"] == pytest.approx(result["models"][0]["top1"] - result["models"][1]["top1"])
    assert pair["only_first"] - pair["only_second"] == round(60 * pair["difference"])
    page = (tmp_path / "index.html").read_text()
    assert "a is right, b is wrong" in page
    # The page shows an image for each of the first mistakes, and of the differences.
    assert page.count("data:image/jpeg") == 32 + min(12, pair["only_first"]) + min(12, pair["only_second"])


def test_networks_are_compared_by_probes_too(place, tmp_path, capsys):
    args = [place / "a", place / "b", place / "data", "--out", tmp_path, "--probes", "knn", "few_shot", "linear"]
    result = verb(capsys, *args)
    pairs, [first, second] = result["comparisons"], result["models"]
    assert [pair["score"] for pair in pairs] == ["top1", "knn10", "few_shot5", "linear"]
    for pair in pairs:
        assert pair["difference"] == pytest.approx(first[pair["score"]] - second[pair["score"]])
        assert min(1, pair["p_value"]) <= pair["p_corrected"] <= min(1, 4 * pair["p_value"])
    assert result["verdict"].startswith("Is b better than a? ")
    text, page = (tmp_path / name for name in ("results.json", "index.html"))
    assert json.loads(text.read_text())["verdict"] == result["verdict"]
    assert result["verdict"].split("?")[1] in page.read_text()


def judged(**gains):
    """The verdict on two networks of 1,000 images, {score: images that only the second, and only the first has}."""
    first, second = {}, {}
    for name, (more, less) in gains.items():
        first[name], second[name] = np.ones(1000), np.ones(1000)
        first[name][:more], second[name][more : more + less] = 0, 0
    networks = (("old", first), ("new", second))
    both = [SimpleNamespace(name=name, hits=hits, maps={}, scored=None) for name, hits in networks]
    return Evaluation(None, both, *compare(both), "").verdict()


def test_a_verdict_says_whether_it_helped_or_how_many_images_would_tell():
    assert judged(knn10=(80, 20), linear=(22, 20)) == ("Is new better than old? Yes: kNN, 10 neighbors +6.00 points.")
    assert judged(knn10=(20, 80)) == "Is new better than old? No, it is worse: kNN, 10 neighbors -6.00 points."
    both = judged(knn10=(80, 20), linear=(10, 90))
    assert both == "Is new better than old? In part: kNN, 10 neighbors +6.00 points, linear probe -8.00 points."
    assert judged(knn10=(3, 3)) == "Is new better than old? No: no score differs by a point or more."
    unclear = judged(knn10=(35, 25), linear=(20, 22))
    assert "These 1,000 images cannot tell: kNN, 10 neighbors +1.00 points is within chance; about 5," in unclear
    # One image of two kinds: 60 of 1,000 differ; (z(0.0125) + z(0.8))^2 x 0.06 / 0.01^2, of two tests.
    assert re.search(r"about 5,[5-8]\d\d images would tell such a difference, or one of a point,", unclear)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scores_equal_those_of_training(place, tmp_path, precision):
    """The images go through the stream's decoding and the evaluator of training, in batches of another size."""
    run, vit, classes = load_model(str(place / "a"))
    crop = CenterCrop(crop_ratio=1.0, interpolation="bilinear")
    changes = {"compute.precision": precision, "data.eval_crop": crop.model_dump(mode="json")}
    run = run.replace({**changes, "data.normalize": {"mean": [0.4, 0.5, 0.6], "std": [0.3, 0.2, 0.1]}})
    save_model(str(tmp_path / "model"), run, vit, classes)
    located = locate_rows(open_dataset(str(place / "data")), "val")
    parts = [np.arange(start, min(start + 24, 101)) for start in range(0, 101, 24)]
    view = ViewSettings((ViewKind((32, 32), crop),), 0, 0)
    decoded = decode_positions(parts, located, EpochOrder(located.groups, None, None), view)
    batches = []
    for part, each in zip(parts, decoded, strict=True):
        images, labels = torch.from_numpy(each["image"]), torch.from_numpy(each["label"])
        batches.append(DeviceBatch(images, labels, part, each["row"]))
    data, cpu = EvaluationSet(batches, 101, run.data.normalize), torch.device("cpu")
    wanted = score_split(vit, data, 10, cpu, autocast(run, cpu))
    request = Request([str(tmp_path / "model")], str(place / "data"), out=str(tmp_path), workers=1)
    result = compute_evaluation(request)[0].results[0]
    assert result.flat()["top1"] == wanted.top1
    assert result.flat()["top5"] == wanted.top5
    assert result.flat()["loss"] == pytest.approx(wanted.loss, abs=1e-6 if precision == "fp32" else 1e-3)
    assert np.array_equal(result.scored.classification.confusion, wanted.confusion)


def test_a_network_of_more_classes_than_the_images_is_scored(place, tmp_path):
    assert scores(tmp_path, place / "more", place / "data")["images"] == 101


def test_corrupt_images_are_left_out_of_every_score(place, tmp_path, capsys):
    whole = scores(tmp_path / "whole", place / "a", place / "data")
    write_dataset(tmp_path / "data", {"train": 130, "val": 101}, corrupt=3)
    result = verb(capsys, place / "a", tmp_path / "data", "--out", tmp_path / "out", "--max-corrupt", "0.05")
    assert (result["images"], result["left_out"]) == (98, 3)
    assert 0 <= round(101 * whole["top1"]) - round(98 * result["top1"]) <= 3
    assert "val:0 (not an image)" in (tmp_path / "out" / "index.html").read_text()
    assert rows(tmp_path / "out" / "predictions.csv")[0]["image"] == "val:3"


def test_corrupted_copies_are_scored(place, tmp_path):
    result = scores(tmp_path, place / "a", place / "photos", corrupt=True)
    network, images = describe_network(str(place / "a")), open_images(str(place / "photos"), "val")
    wrong = []
    for image in images.read_labeled(range(60)):
        view = corrupt(crop_center(decode_image(image.content), CenterCrop(), (32, 32)), "contrast", 4, 0, image.key)
        with torch.inference_mode():
            logits = network[1](normalized(torch.from_numpy(view)[None], network[0].normalize))
        wrong.append(SHAPES[int(logits.argmax())] != image.key.partition("/")[0])
    assert result["error_contrast_4"] == np.mean(wrong)
    errors = [result[f"error_contrast_{severity}"] for severity in SEVERITIES]
    assert result["corruption_error_contrast"] == pytest.approx(np.mean(errors))
    assert result["top1"] == scores(tmp_path, place / "a", place / "photos")["top1"]


def imagenet_c(root, place, sizes):
    """Folders corruption/severity/class with the first of the photos, {(corruption, severity): images of a class}."""
    for (corruption, severity), count in sizes.items():
        for shape in SHAPES[:3]:
            (root / corruption / str(severity) / shape).mkdir(parents=True)
            for image in sorted((place / "photos" / shape).iterdir())[:count]:
                shutil.copy(image, root / corruption / str(severity) / shape)
    return root


def test_a_folder_laid_out_as_imagenet_c_is_scored_by_kind_and_severity(place, tmp_path, capsys):
    sizes = {("fog", 1): 2, ("fog", 3): 3, ("snow", 1): 4, ("snow", 3): 1}
    root = imagenet_c(tmp_path / "c", place, sizes)
    (tmp_path / "baseline.json").write_text('{"fog": [0.5, 0.9], "snow": 0.8, "rain": 0.1}')
    options = ("--imagenet-c", root, "--baseline", tmp_path / "baseline.json")
    result = verb(capsys, place / "a", place / "photos", *options, "--out", tmp_path / "out")
    spec, vit = describe_network(str(place / "a"))
    errors = {}
    for corruption, severity in sizes:
        wrong = []
        for path in sorted((root / corruption / str(severity)).glob("*/*.jpg")):
            view = crop_center(decode_image(path.read_bytes()), CenterCrop(), (32, 32))
            with torch.inference_mode():
                logits = vit(normalized(torch.from_numpy(view)[None], spec.normalize))
            wrong.append(SHAPES[int(logits.argmax())] != path.parent.name)
        errors[corruption, severity] = np.mean(wrong)
        assert result[f"error_{corruption}_{severity}"] == errors[corruption, severity]
    assert result["corruption_error_fog"] == pytest.approx((errors["fog", 1] + errors["fog", 3]) / 2)
    fog, snow = errors["fog", 1] + errors["fog", 3], errors["snow", 1] + errors["snow", 3]
    assert result["corruption_error"] == pytest.approx((fog + snow) / 4)
    assert result["mce"] == pytest.approx((fog / 1.4 + snow / 1.6) / 2)
    assert (result["images"], result["corruption_images"], result["corruption_left_out"]) == (60, 3, 0)
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("severity 3") == 1
    assert f"{errors['snow', 3]:.1%}" in page
    assert "mCE, relative to the baseline" in page
    # The same command computes nothing again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "outputs").rglob("*.parquet")}
    assert len(before) == 5
    files = {"imagenet_c": str(root), "baseline": str(tmp_path / "baseline.json")}
    again = scores(tmp_path / "out", place / "a", place / "photos", **files)
    assert again == {name: value for name, value in result.items() if name != "page"}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "outputs").rglob("*.parquet")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--imagenet-c", "nowhere"], "nowhere: not a folder; expected corruption/severity/class"),
        (["--imagenet-c", "c", "--corrupt"], "--corrupt: got --imagenet-c too, .* expected one of them"),
        (["--baseline", "half.json"], "--baseline: got no corrupted images; expected --imagenet-c DIR or --corrupt"),
        (["--imagenet-c", "c", "--baseline", "half.json"], "baseline errors: no snow; expected every corruption"),
        (
            ["--imagenet-c", "c", "--baseline", "percent.json"],
            "percent.json: fog: got 88.6, expected shares from 0 to 1",
        ),
        (["--imagenet-c", "c", "--baseline", "list.json"], "list.json: expected a JSON object"),
        (["--imagenet-c", "c", "--baseline", "five.json"], "fog has .*; expected 2 severities"),
        (["--imagenet-c", "c", "--baseline", "none.json"], "none.json"),
        (["--imagenet-c", "others"], "classes: got n01, which .*a does not have"),
    ],
)
def test_corruptions_that_do_not_fit_get_one_message(place, tmp_path, capsys, monkeypatch, options, message):
    imagenet_c(tmp_path / "c", place, {("fog", 1): 1, ("fog", 2): 1, ("snow", 1): 1, ("snow", 2): 1})
    shutil.copytree(tmp_path / "c" / "fog" / "1" / SHAPES[0], tmp_path / "others" / "fog" / "1" / "n01")
    (tmp_path / "half.json").write_text('{"fog": 0.5}')
    (tmp_path / "percent.json").write_text('{"fog": 88.6, "snow": 86.7}')
    (tmp_path / "list.json").write_text("[0.5]")
    (tmp_path / "five.json").write_text('{"fog": [0.1, 0.2, 0.3, 0.4, 0.5], "snow": 0.5}')
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refusal(capsys, tmp_path / "out", place / "a", place / "photos", *options))


def test_one_connection_to_ray_serves_all_computations(place, tmp_path, monkeypatch):
    """Nothing is left for its actors to compute, so the test needs no Ray."""
    request = Request([str(place / "a"), str(place / "b")], str(place / "photos"), out=str(tmp_path), workers=1)
    compute_evaluation(request)
    events = []

    @contextmanager
    def connected(cpus):
        events.append(f"connect with {cpus}")
        yield
        events.append("disconnect")

    def noted(*args):
        events.append("compute")
        return compute_outputs(*args)

    numerics = numerics_of(1, BATCH)  # those of an actor are others, and so are its outputs
    monkeypatch.setattr(session, "ray_session", connected)
    monkeypatch.setattr(evaluate, "numerics_of", lambda *_: numerics)
    monkeypatch.setattr(evaluate, "compute_outputs", noted)
    compute_evaluation(request._replace(workers=2))
    assert events == ["connect with 2", "compute", "compute", "disconnect"]
    compute_evaluation(request)
    assert events[4:] == ["compute", "compute"]


def shapes_of(names):
    """A label set of folders of shapes, of which the others are not counted."""
    targets = {shape: (index,) if shape in names else () for index, shape in enumerate(SHAPES)}
    return LabelSet("objectnet", targets, False, tuple(range(10)), 10)


def test_a_label_set_restricts_the_classes(place, tmp_path, capsys):
    """As on ImageNet-A: only the classes that have a folder compete."""
    ids = [f"n{index:08d}" for index in range(10)]
    for index, shape in enumerate(SHAPES[:4]):
        shutil.copytree(place / "photos" / shape, tmp_path / "subset" / ids[index])
    run, vit, _ = load_model(str(place / "a"))
    save_model(str(tmp_path / "model"), run, vit, ids)
    labels = f"imagenet-a={tmp_path / 'subset'}"
    result = scores(tmp_path / "out", tmp_path / "model", tmp_path / "subset", labels=labels)
    images = open_images(str(tmp_path / "subset"), "val")
    network = describe_network(str(tmp_path / "model"))
    logits = compute_outputs(
        Work(network[0], images, ("logits",), str(tmp_path / "again"), numerics_of(1, BATCH)), 1, network[1]
    )
    assert result["labels_top1"] == (logits.logits[:, :4].argmax(1) == logits.labels).mean()
    assert result["labels_top1_low"] < result["labels_top1"] < result["labels_top1_high"]
    assert result["top1"] <= result["labels_top1"]
    assert "imagenet-a" in refusal(capsys, tmp_path / "no", place / "a", place / "photos", "--labels", labels)
    assert "--labels: got real" in refusal(capsys, tmp_path / "no", place / "a", place / "photos", "--labels", "real")


def test_a_label_set_compares_networks_whose_classes_are_not_those_of_the_folders(place, tmp_path, capsys, monkeypatch):
    ids = [f"n{index:08d}" for index in range(10)]
    for name, source in (("model", "a"), ("second", "b")):
        run, vit, _ = load_model(str(place / source))
        save_model(str(tmp_path / name), run, vit, ids)
    mappings = tmp_path / "mappings"
    mappings.mkdir()
    monkeypatch.setattr("vitray.evaluation.evaluate.read_label_set", lambda *_: shapes_of(SHAPES[:4]))
    both = verb(
        *(capsys, tmp_path / "model", tmp_path / "second", place / "photos", "--labels", f"objectnet={mappings}"),
        *("--out", tmp_path / "both"),
    )
    [pair] = both["comparisons"]
    one, other = (model["labels_top1"] for model in both["models"])
    assert (pair["score"], pair["difference"]) == ("labels_top1", pytest.approx(one - other))
    assert both["agreement"] is None
    assert all("top1" not in model for model in both["models"])
    counted = sum(image.parent.name in SHAPES[:4] for image in (place / "photos").glob("*/*"))
    assert {model["labels_images"] for model in both["models"]} == {counted}
    assert round(counted * (one - other)) == pair["only_first"] - pair["only_second"]
    page = (tmp_path / "both" / "index.html").read_text()
    assert f"{100 * max(one, other):.2f} %<small>highest top-1 by the label set" in page
    assert "Difference of top-1 by the label set" in page


def test_names_are_escaped(tmp_path, capsys):
    classes = ("<script>alert(1)</script>", *SHAPES[1:])
    write_dataset(tmp_path / "data", {"val": 30}, classes=classes)
    write_network(tmp_path / "<img src=x onerror=alert(1)>", classes=classes)
    verb(capsys, tmp_path / "<img src=x onerror=alert(1)>", tmp_path / "data", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;" in page


def test_a_network_without_a_head_has_probes_only(place, tmp_path, capsys):
    write_network(tmp_path / "headless", classes=None)
    message = refusal(capsys, tmp_path / "out", tmp_path / "headless", place / "data")
    assert "headless: it has no head, so no predictions; expected a classifier, or --probes knn" in message
    result = verb(capsys, tmp_path / "headless", place / "data", "--probes", "knn,rank", "--out", tmp_path / "out")
    assert "top1" not in result
    assert 0 < result["knn10"] < 1
    assert "kNN, 10 neighbors" in (tmp_path / "out" / "index.html").read_text()


def test_sgd_fits_the_linear_probe_where_features_do_not_fit_memory(place, tmp_path, capsys, monkeypatch):
    whole = scores(tmp_path, place / "a", place / "data", probes=("linear",))
    assert (whole["linear_fit"], whole["linear_converged"]) == ("l-bfgs", True)
    size = 130 * max(describe_network(str(place / "a"))[0].features, 10) * 8
    monkeypatch.setattr(linear_probe, "MOST_BYTES", size - 1)
    monkeypatch.setattr(linear_probe, "SGD_CHUNK", 40)
    monkeypatch.setattr(outputs, "MOST_IN_MEMORY", 0)
    words = ("--probes", "linear", "--train-shares", "0.3", "0.7", "--out", tmp_path)
    result = verb(capsys, place / "a", place / "data", *words)
    assert result["linear_share0.3_fit"] == "l-bfgs"
    assert 0 < result["linear_share0.3"] <= 1
    assert "linear probe, 70 % of train" in (tmp_path / "index.html").read_text()
    assert "--train-shares 0.3 0.7" in json.loads((tmp_path / "results.json").read_text())["command"]
    assert (result["linear_fit"], result["linear_epochs"]) == ("sgd", 10)
    assert result["linear_lr"] in linear_probe.RATES
    assert "linear_l2" not in result
    assert abs(result["linear"] - whole["linear"]) < 0.15
    assert result["linear_low"] < result["linear"] < result["linear_high"]
    assert "by SGD" in (tmp_path / "index.html").read_text()
    assert not linear_probe.is_too_large(130, 0, size // 130 // 8 - 1)
    assert linear_probe.is_too_large(1_281_167, 768, 1000)


def test_large_outputs_are_read_into_a_temporary_file(place, tmp_path, monkeypatch):
    """Without the images that cannot be decoded, and in the same order."""
    write_dataset(tmp_path / "data", {"val": 101}, corrupt=3)
    network, images = describe_network(str(place / "a")), open_images(str(tmp_path / "data"), "val")
    work = Work(
        network[0], images, ("logits", "features"), str(tmp_path / "out"), numerics_of(1, BATCH), 24, max_corrupt=0.05
    )
    small = compute_outputs(work, 1, network[1])
    monkeypatch.setattr(outputs, "MOST_IN_MEMORY", 101 * 10 * 4)  # the features are wider
    large = compute_outputs(work, 1, network[1])
    assert isinstance(large.features, np.memmap)
    assert not isinstance(large.logits, np.memmap)
    assert np.array_equal(small.features, large.features)
    assert large.features.shape == (98, network[0].features)
    assert (large.keys, large.left_out) == (small.keys, small.left_out)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"TMPDIR: .*: No space left on device; expected 0.0 GiB for the"):
        compute_outputs(work, 1, network[1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a", "data", "--split", "vall"], r"data: no split 'vall', expected one of train, val; did you mean val"),
        (["a", "nowhere"], "nowhere: no files here"),
        (["nowhere", "data"], "nowhere: "),
        (["a", "empty.parquet"], "empty.parquet: "),
        (["a", "a", "data"], "a: given 2 times; expected each network once"),
        (
            ["a", "data", "--probes", "knnn"],
            "--probes: got knnn, expected some of knn, few_shot, linear, rank; did you mean",
        ),
        (["a", "data", "--probes", "knn", "--train-split", "test"], "data: no split 'test'"),
        (["a", "photos", "--probes", "knn"], "--train-split: got train, whose images are those of --split val"),
        (["a", "data", "--probes", "knn", "--train-split", "val"], "--train-split: got val, whose images are those"),
        (["other", "data"], f"data: classes: got {SHAPES[0]}, .*other does not have"),
        (["a", "more", "data"], "more: classes: they differ from those of .*a in sphere"),
    ],
)
def test_bad_input_gets_one_message_and_writes_nothing(place, tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(place)
    assert re.search(message, refusal(capsys, tmp_path / "out", *args))


def test_a_missing_argument_is_a_usage_error():
    for args in (["a"], ["a", "data", "--workers", "0"], ["a", "data", "--max-corrupt", "1"]):
        with pytest.raises(SystemExit) as exit_:
            main(["evaluate", *args])
        assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.nan, "nan: model.safetensors: values that are not finite as float32 in head.weight (1 of"),
        (3e38, "val:0: the network's logits are not finite"),  # the sum of the products is too large
    ],
)
def test_weights_without_finite_logits_are_refused(place, tmp_path, capsys, value, message):
    run, vit, classes = load_model(str(place / "a"))
    with torch.no_grad():
        vit.norm.bias[5] = 10
        vit.head.weight[3, 5] = value
    save_model(str(tmp_path / "nan"), run, vit, classes)
    assert main(["evaluate", str(tmp_path / "nan"), str(place / "data"), "--workers", "1", "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_default_folder_is_named_after_networks_and_data(place, tmp_path, monkeypatch):
    shutil.copytree(place / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    request = Request([str(place / "a"), str(place / "b")], "data", "train", workers=1)
    assert compute_evaluation(request)[1] == "evaluations/a-b-data-train"
    assert (tmp_path / "evaluations" / "a-b-data-train" / "outputs").is_dir()


def drawn(classes, images, seed=0):
    """A network with drawn logits on drawn labels, as far as the charts need it."""
    rng = np.random.default_rng(seed)
    labels, logits = rng.integers(0, classes, images), rng.normal(size=(images, classes))
    logits[np.arange(images), labels] += 2.5
    names = tuple(f"class {index}" for index in range(classes))
    return SimpleNamespace(name="a", classes=names), SimpleNamespace(classification=classify(logits, labels))


def test_many_classes_are_drawn_as_groups_and_as_the_most_confused_ones():
    """Each image of the confusion matrix is in one cell of the groups."""
    result, scored = drawn(90, 2000)
    confusion = scored.classification.confusion
    order = np.random.default_rng(1).permutation(90)
    groups = np.array_split(order, GROUPS)
    matrix = grouped(result, confusion, order)
    wanted = [[sum(confusion[a, b] for a in one for b in other) for other in groups] for one in groups]
    assert matrix.counts.tolist() == wanted
    assert matrix.images.sum() == 2000
    for name, group in zip(matrix.names, groups, strict=True):
        wrong = {f"class {each} +{len(group) - 1}": confusion[each].sum() - confusion[each, each] for each in group}
        assert wrong[name] == max(wrong.values())
    most, confused = most_confused(scored), confusion - np.diag(confusion.diagonal())
    assert len(set(most)) == len(most) == CONFUSED
    assert confused[most[0], most[1]] == confused.max()
    assert [len(confusion_charts(*drawn(classes, 500))) for classes in (2, 40, 41)] == [1, 1, 2]


def test_classes_of_equal_recall_are_ordered_by_their_images():
    """Many images without a hit say more than few: they are the lowest of all."""
    counts = [(4, 4), (2, 0), (9, 5), (30, 30), (40, 0)]
    shuffled = [ClassScore(0, images, hits, hits, hits / images, None, None) for images, hits in counts]
    assert [(each.images, each.hits) for each in sorted(shuffled, key=recall_rank)] == [
        (40, 0),
        (2, 0),
        (9, 5),
        (4, 4),
        (30, 30),
    ]


def synthetic(place, classes, images, networks):
    """An evaluation with drawn logits on synthetic images."""
    names = SHAPES if classes == 10 else tuple(f"class {index} <&> of many" for index in range(classes))
    spec, opened = describe_network(str(place / "a"))[0], open_images(str(place / "data"), "val")
    labels, results = np.random.default_rng(0).integers(0, classes, images), []
    keys = [f"{index}.jpg" for index in range(images)]
    for seed in range(networks):
        logits = np.random.default_rng(seed).normal(size=(images, classes)).astype(np.float32)
        logits[np.arange(images), labels] += 2.0 + seed
        found = Outputs(np.arange(images) % 101, keys, labels, logits, None, ())
        more = {"knn10": 0.5, "knn10_low": 0.4, "knn10_high": 0.6, "few_shot5": 0.25, "few_shot5_std": 0.01}
        results.append(Result(f"vit_b12x{seed}_16", spec, found, names, score(logits, labels, keys), more))
    return Evaluation(replace(opened, classes=names), results, *compare(results), "vitray evaluate a b data")


def test_a_page_may_begin_with_a_network_without_a_head(place):
    evaluation = synthetic(place, 10, 101, 2)
    first, second = evaluation.results
    errors = {"corruption_error_contrast": 0.5, "error_contrast_1": 0.5, "corruption_images": 101}
    results = [first._replace(scores=None), second._replace(more={**second.more, **errors})]
    page = render(evaluation._replace(results=results, pairs=[], agreement=None))
    assert "Each is of 101 images" in page
    assert "highest top-1" in page


def test_a_score_and_its_interval_do_not_break_at_the_end_of_a_line(place):
    evaluation = synthetic(place, 10, 101, 1)
    page = render(evaluation)
    top5 = evaluation.results[0].scored.intervals["top5"]
    low, high = f"{100 * top5.low:.2f}", f"{100 * top5.high:.2f}"
    shown = f'{100 * top5.estimate:.2f}\u00a0% <small class="pale">{low}\u00a0to\u00a0{high}</small>'
    assert page.count(shown) == 2  # beside the headline, and in the table
    assert '25.00\u00a0% <small class="pale">±\u00a01.00</small>' in page
    assert f"{100 * top5.estimate:.2f} % ({low} to {high})" in scores_text(evaluation)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize(("classes", "networks"), [(10, 1), (10, 2), (10, 4), (1000, 2)])
def test_a_browser_shows_the_page_in_any_width_and_theme(place, tmp_path, classes, networks, width, theme):
    page = render(synthetic(place, classes, 2000 if classes > 10 else 101, networks))
    measured = measured_page(page, width, theme, tmp_path)
    assert measured["wide"] <= width
    assert measured["boxes"] == 0
    assert measured["drawn"]
    assert measured["dark"] == (page.count("<source") if theme == "dark" else 0)
    charts = networks * (4 if classes > 10 else 3) + (networks > 1)
    assert measured["images"] == charts + page.count("data:image/jpeg")


def test_confused_classes_are_neighbors():
    confusion = np.eye(6, dtype=int) * 50
    for one, other in ((0, 4), (1, 5), (2, 3)):
        confusion[one, other] = confusion[other, one] = 20
    order = cluster(confusion).tolist()
    assert all(abs(order.index(one) - order.index(other)) == 1 for one, other in ((0, 4), (1, 5), (2, 3)))
