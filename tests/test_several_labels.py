"""Several labels an image: sources, the stream, losses, scores, and a network from the images to its answers."""

import csv
import io
import json
import re
import tarfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from networks import scrambled
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score, precision_score, recall_score
from torch import Tensor

import vitray
from pipelines.__main__ import main
from vitray.config import load_run
from vitray.config.augmentation import Augment, Mix, Normalize
from vitray.config.classification import Asymmetric
from vitray.config.sweep import Goal
from vitray.data.augment.mixing import BatchSettings, prepare_batch
from vitray.data.shards import open_dataset
from vitray.data.shards.demo import CLASSES, demo_item
from vitray.data.shards.held_out import fold_numbers
from vitray.data.shards.label_lists import LabelList, label_states, names_of
from vitray.data.stream.balance import loss_weights
from vitray.data.stream.batches import Share, StreamSpec
from vitray.data.stream.decoder import DecodeThread
from vitray.data.stream.decoding import locate_rows, read_labels
from vitray.data.stream.local_reader import LocalReader
from vitray.data.stream.stream import Stream
from vitray.errors import ConfigError
from vitray.metrics import linear_probe
from vitray.metrics.arrays import Labeled, ProbeInputs
from vitray.metrics.intervals import corrected
from vitray.metrics.knn import label_scores
from vitray.metrics.linear_probe import fit_head, probe_linear
from vitray.metrics.multilabel import (
    Ranking,
    best_threshold,
    compare_maps,
    cross_chosen,
    drawn_counts,
    label_loss,
    mean_average_precision,
    score_labels,
)
from vitray.metrics.probes import probe_scores, probe_shares
from vitray.models.vit import ViT
from vitray.runs.resolve import resolve
from vitray.sweeps.capacity import Node
from vitray.sweeps.plan import plan_sweep
from vitray.sweeps.space import read_space
from vitray.tasks.supervised import LOSSES

# ---- scores ----------------------------------------------------------------------------------------------------------

# Few values, so that many are equal.
scores_of_4 = arrays(
    np.float64, st.tuples(st.integers(2, 40), st.just(4)), elements=st.sampled_from(np.arange(1, 8) / 8)
)
seeds = st.integers(0, 2**32 - 1)


def states_like(scores_NK: np.ndarray, seed: int, unknown=0.2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    states_NK = (rng.random(scores_NK.shape) < 0.4).astype(np.int8)
    states_NK[rng.random(scores_NK.shape) < unknown] = -1
    return states_NK


@given(scores_NK=scores_of_4, seed=seeds)
def test_scores_are_those_of_scikit_learn(scores_NK, seed):
    states_NK = states_like(scores_NK, seed)
    keys = [str(row) for row in range(len(scores_NK))]
    thresholds = [0.5, 0.3, 0.9, 0.0]
    found = score_labels(scores_NK, states_NK, keys, thresholds, draws=5)
    means, f1s, hits, both = [], [], 0, 0
    for each in found.classes:
        is_known_N = states_NK[:, each.label] >= 0
        present, scores = states_NK[is_known_N, each.label], scores_NK[is_known_N, each.label]
        predicted = scores >= thresholds[each.label]
        hits, both = hits + (present * predicted).sum(), both + present.sum() + predicted.sum()
        assert (each.images, each.known) == (present.sum(), len(present))
        if not present.sum():
            assert each.average_precision is each.f1 is each.recall is each.best_threshold is None
            continue
        means.append(average_precision_score(present, scores))
        f1s.append(f1_score(present, predicted, zero_division=0))
        assert each.average_precision.estimate == pytest.approx(means[-1], abs=1e-12)
        assert each.f1 == pytest.approx(f1s[-1], abs=1e-12)
        assert each.recall == pytest.approx(recall_score(present, predicted), abs=1e-12)
        if predicted.any():
            assert each.precision == pytest.approx(precision_score(present, predicted), abs=1e-12)
    if means:
        assert found.intervals["map"].estimate == pytest.approx(np.mean(means), abs=1e-12)
        assert mean_average_precision(scores_NK, states_NK) == pytest.approx(np.mean(means), abs=1e-12)
        assert found.intervals["f1_macro"].estimate == pytest.approx(np.mean(f1s), abs=1e-12)
    assert found.intervals["f1_micro"].estimate == pytest.approx(2 * hits / max(1, both), abs=1e-12)


@given(scores_NK=scores_of_4, seed=seeds)
def test_a_threshold_has_the_highest_f1_of_all(scores_NK, seed):
    states_NK = states_like(scores_NK, seed)
    for scores_N, states_N in zip(scores_NK.T, states_NK.T, strict=True):
        chosen, is_known_N = best_threshold(scores_N, states_N), states_N >= 0
        if chosen is None:
            assert not (states_N == 1).any()
            continue

        present, scores = states_N[is_known_N], scores_N[is_known_N]
        best = max(f1_score(present, scores >= value) for value in [*scores_N, chosen])
        assert f1_score(present, scores >= chosen) == pytest.approx(best, abs=1e-12)


def test_a_class_that_is_unknown_does_not_count():
    rng = np.random.default_rng(0)
    scores_NK, states_NK = rng.random((50, 3)), (rng.random((50, 3)) < 0.3).astype(np.int8)
    states_NK[:20, 1] = -1
    keys, changed_NK = [str(row) for row in range(50)], scores_NK.copy()
    changed_NK[:20, 1] = rng.random(20)
    one, other = (score_labels(each, states_NK, keys, draws=20) for each in (scores_NK, changed_NK))
    assert one.intervals == other.intervals
    assert one.classes == other.classes
    assert (one.predicted_together == other.predicted_together).all()


def test_a_draw_ranks_each_image_as_often_as_it_has_it():
    rng = np.random.default_rng(1)
    scores_N, states_N = rng.integers(9, size=30) / 9, (rng.random(30) < 0.4).astype(np.int8)
    ranking = Ranking.of(scores_N, states_N)
    [counts_DN] = drawn_counts(30, 8)
    for counts_N, found in zip(counts_DN, ranking.average_precision(counts_DN), strict=True):
        rows = np.repeat(np.arange(30), counts_N.astype(int))
        assert counts_N.sum() == 30
        assert found == pytest.approx(average_precision_score(states_N[rows], scores_N[rows]), abs=1e-12)


def test_intervals_cover_the_score_of_all_images():
    """Of 300 images in 200 repetitions; percentiles of draws, which have images twice, covered 85 of 100."""
    rng, shares = np.random.default_rng(2), np.linspace(0.1, 0.4, 4)

    def drawn(images: int) -> tuple[np.ndarray, np.ndarray]:
        states_NK = (rng.random((images, 4)) < shares).astype(np.int8)
        return 1 / (1 + np.exp(-(rng.normal(size=(images, 4)) + 1.3 * states_NK))), states_NK

    truth, keys = mean_average_precision(*drawn(200_000)), [str(row) for row in range(300)]
    intervals = [score_labels(*drawn(300), keys, draws=200).intervals["map"] for _ in range(200)]
    assert sum(each.low <= truth <= each.high for each in intervals) >= 174  # 0.92, less three standard errors


def test_two_networks_are_compared_on_the_same_draws():
    rng, keys = np.random.default_rng(3), [str(row) for row in range(400)]
    states_NK = (rng.random((400, 5)) < 0.3).astype(np.int8)
    noise_NK = rng.normal(size=(400, 5))
    weak, same, strong = (
        score_labels(1 / (1 + np.exp(-(noise_NK + gain * states_NK))), states_NK, keys) for gain in (1.0, 1.0, 1.6)
    )
    better, equal = compare_maps(strong.map, weak.map), compare_maps(weak.map, same.map)
    assert better.significant
    assert better.difference.low > 0.03
    z = better.difference.difference / np.std(strong.map.drawn - weak.map.drawn)
    assert better.p_value == pytest.approx(2 * norm.sf(z))
    assert f"bootstrap over images: p = {better.p_value:.2g})" in better.sentence()
    assert corrected([better] * 100)[0].significant
    assert not equal.significant
    assert (equal.difference.difference, equal.p_value) == (0, 1.0)


def test_chosen_thresholds_are_those_of_the_other_half():
    rng = np.random.default_rng(4)
    scores_NK, states_NK = rng.random((200, 2)), (rng.random((200, 2)) < 0.5).astype(np.int8)
    keys = [str(row) for row in range(200)]
    before = cross_chosen(scores_NK, states_NK, keys)
    for row in range(200):  # the own labels of an image do not change its prediction
        changed_NK = states_NK.copy()
        changed_NK[row] = 1 - changed_NK[row]
        assert (cross_chosen(scores_NK, changed_NK, keys)[row] == before[row]).all()
        if row == 9:
            break


# ---- losses ----------------------------------------------------------------------------------------------------------


def logits_and_targets(seed=0, unknown=True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_BK = torch.randn(6, 5, generator=generator, dtype=torch.float64).float()
    targets_BK = (torch.rand(6, 5, generator=generator) < 0.4).float()
    targets_BK[0] = 0  # an image without a label
    if unknown:
        targets_BK[torch.rand(6, 5, generator=generator) < 0.3] = torch.nan
        targets_BK[5] = torch.nan
    return logits_BK, targets_BK


def by_hand(kind: str, logits_BK: Tensor, targets_BK: Tensor, smoothing: float, settings: Asymmetric) -> float:
    """Each loss, a number at a time."""
    images, classes = targets_BK.shape
    total = 0.0
    for logits_K, targets_K in zip(logits_BK.detach().double(), targets_BK.double(), strict=True):
        known = [label for label in range(classes) if not targets_K[label].isnan()]
        present = [label for label in known if targets_K[label] > 0]
        if kind == "softmax":
            if present:
                log_p = logits_K[known].log_softmax(0)
                for place, label in enumerate(known):
                    share = (1 - smoothing) * (label in present) / len(present) + smoothing / len(known)
                    total -= share * float(log_p[place])
            continue
        for label in known:
            p = float(logits_K[label].sigmoid())
            target = (1 - smoothing) * (label in present) + smoothing / classes
            if kind == "bce":
                total -= target * np.log(p) + (1 - target) * np.log(1 - p)
            else:
                q = max(0.0, p - settings.shift)
                total -= target * (1 - p) ** settings.focus_present * np.log(p)
                total -= (1 - target) * q**settings.focus_absent * np.log(1 - q)
    return total / images if kind == "softmax" else total / (images * classes)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("kind", "asymmetric"),
    [
        ("softmax", None),
        ("bce", None),
        ("asymmetric", None),
        ("asymmetric", {"focus_present": 1.0, "focus_absent": 2.0, "shift": 0.0}),
    ],
)
def test_losses_are_their_formulas_and_unknown_classes_have_no_gradient(kind, asymmetric, smoothing):
    changes = {"task.labels": "several", "task.loss": kind, "task.smoothing": smoothing, "task.asymmetric": asymmetric}
    run = load_run(None, changes)
    for seed in range(5):
        logits_BK, targets_BK = logits_and_targets(seed)
        logits_BK.requires_grad_()
        loss = LOSSES[kind].of_labels(logits_BK, targets_BK, run.task, None)
        expected = by_hand(kind, logits_BK, targets_BK, smoothing, run.task.asymmetric or Asymmetric())
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
        loss.backward()
        assert logits_BK.grad.isfinite().all()
        assert (logits_BK.grad[targets_BK.isnan()] == 0).all()


@pytest.mark.parametrize("kind", ["softmax", "bce", "asymmetric"])
def test_a_loss_is_the_mean_over_its_parts(kind):
    """So that it is the same on any number of workers, however many classes are known on each."""
    task = load_run(None, {"task.labels": "several", "task.loss": kind}).task
    logits_BK, targets_BK = logits_and_targets()
    whole = LOSSES[kind].of_labels(logits_BK, targets_BK, task, None)
    parts = [LOSSES[kind].of_labels(logits_BK[part], targets_BK[part], task, None) for part in (slice(2), slice(2, 6))]
    assert whole.tolist() == pytest.approx(((2 * parts[0] + 4 * parts[1]) / 6).tolist(), rel=1e-6)


def test_without_focus_and_shift_the_asymmetric_loss_is_the_binary_cross_entropy():
    logits_BK, targets_BK = logits_and_targets(unknown=False)
    changes = {"task.loss": "asymmetric", "task.asymmetric": {"focus_absent": 0.0, "shift": 0.0}}
    loss = LOSSES["asymmetric"].of_labels(logits_BK, targets_BK, load_run(None, changes).task, None)
    assert float(loss) == pytest.approx(float(F.binary_cross_entropy_with_logits(logits_BK, targets_BK)), rel=1e-6)


# ---- mixing ----------------------------------------------------------------------------------------------------------


def test_a_mixed_image_has_the_labels_of_both():
    images_BHWC = torch.randint(256, (4, 8, 8, 3), dtype=torch.uint8)
    states_BK = torch.tensor([[1, 0, 0], [0, 1, -1], [1, 0, -1], [0, 0, 1]], dtype=torch.int8)
    normalize = Normalize()
    plain = BatchSettings(Augment(), Mix(), normalize, 3)
    _, targets_BK = prepare_batch(images_BHWC, states_BK, plain, 0, 0)
    assert torch.equal(targets_BK.nan_to_num(-1), states_BK.float())
    _, mixed_BK = prepare_batch(images_BHWC, states_BK, plain._replace(mix=Mix(mixup=1.0, per="pair")), 0, 1)
    # Where one image shows the class, it does not matter that it is unknown of the other.
    assert mixed_BK.isnan().tolist() == [[False, False, True]] * 2 + [[False, False, False]] * 2
    assert float(mixed_BK[2:, 2].sum()) == pytest.approx(1)
    assert float(mixed_BK[0, 0] + mixed_BK[1, 0]) == pytest.approx(1)
    assert float(mixed_BK[0, 1] + mixed_BK[1, 1]) == pytest.approx(1)
    # An image that takes nothing from its partner keeps its own.
    never = Mix(mixup=1.0, cutmix=1.0, chance=1e-9)
    _, kept_BK = prepare_batch(images_BHWC, states_BK, plain._replace(mix=never), 0, 1)
    assert torch.equal(kept_BK.nan_to_num(-1), states_BK.float())


# ---- sources ---------------------------------------------------------------------------------------------------------

LABELS = [["cat", "dog"], ["dog"], [], ["bird", "cat"], ["bird"], ["cat"]]
# Of the fourth image it is not known whether it shows a dog; of the last one nothing but the cat.
UNKNOWN = [[], [], [], ["dog"], [], "*"]
STATES = [[0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, -1], [1, 0, 0], [-1, 1, -1]]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Six images in a folder, with their labels as an index, Parquet, a tar and COCO's JSON."""
    folder = tmp_path_factory.mktemp("several")
    lines, rows = ["path,labels,unsure"], []
    with tarfile.open(folder / "images.tar", "w") as tar:
        for index, (labels, unknown) in enumerate(zip(LABELS, UNKNOWN, strict=True)):
            content, _ = demo_item(index, 0, 16, "shape")
            (folder / f"{index}.jpg").write_bytes(content)
            listed = unknown if isinstance(unknown, str) else "|".join(unknown)
            lines.append(f"{index}.jpg,{'|'.join(labels)},{listed}")
            rows.append({"image": content, "label": labels, "unsure": list(unknown)})
            for name, data in (("jpg", content), ("json", json.dumps({"label": labels, "unsure": unknown}).encode())):
                member = tarfile.TarInfo(f"{index}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    (folder / "index.csv").write_text("\n".join(lines))
    pq.write_table(pa.Table.from_pylist(rows), folder / "images.parquet")
    numbers = {"bird": 7, "cat": 3, "dog": 90}
    coco = {
        "categories": [{"id": number, "name": name} for name, number in reversed(numbers.items())],
        "images": [{"id": 100 + index, "file_name": f"{index}.jpg"} for index in range(6)],
        "annotations": [
            {"id": 10 * index + at, "image_id": 100 + index, "category_id": numbers[name], "bbox": [0, 0, 4, 4]}
            for index, labels in enumerate(LABELS)
            for at, name in enumerate([*labels, *labels[:1]])  # two objects of a class are one label
        ],
    }
    coco["images"][5]["neg_category_ids"] = []
    coco["images"][3]["neg_category_ids"] = []
    (folder / "coco.json").write_text(json.dumps(coco))
    return folder


def states_by_name(url: str) -> dict[str, list[int]]:
    """{first digit of the image's name: states}, with the classes in alphabetical order."""
    dataset = open_dataset(url)
    assert dataset.labels == "several"
    order, rows = np.argsort(dataset.classes), locate_rows(dataset, "train")
    states_NK = read_labels(np.arange(rows.starts[-1]), rows)
    [shard] = dataset.splits["train"].shards
    keys = pq.read_table(dataset.address(shard), columns=["key"])["key"].to_pylist()
    counts = dataset.splits["train"].class_counts
    assert [counts[label] for label in range(3)] == (states_NK == 1).sum(0).tolist()
    names = [re.findall(r"\d+", key.partition(":")[2])[-1] for key in keys]
    return {name: states_K[order].tolist() for name, states_K in zip(names, states_NK, strict=True)}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("index.csv", ["separator=|", "unknown=unsure"]),
        ("images.parquet", ["unknown=unsure"]),
        ("images.tar", ["unknown=unsure"]),
        ("coco.json", []),
    ],
)
def test_each_source_gives_the_same_labels(pictures, tmp_path, source, words):
    assert main(["shard", str(pictures / source), str(tmp_path / "data"), *words, "workers=1"]) == 0
    found = states_by_name(str(tmp_path / "data"))
    assert found == {str(index): states for index, states in enumerate(STATES)}
    assert open_dataset(str(tmp_path / "data")).classes == (
        ("cat", "bird", "dog") if source == "coco.json" else ("bird", "cat", "dog")
    )


def test_parquet_stays_in_place_with_numbers_as_labels(pictures, tmp_path):
    table = pq.read_table(pictures / "images.parquet").to_pylist()
    numbers = {"bird": 0, "cat": 1, "dog": 2}
    for row in table:
        row["unsure"] = [name for name in row["unsure"] if name in numbers]
        row |= {name: [numbers[each] for each in row[name]] for name in ("label", "unsure")}
    (tmp_path / "files").mkdir()
    schema = pa.schema({"image": pa.binary(), "label": pa.list_(pa.int32()), "unsure": pa.list_(pa.int32())})
    pq.write_table(pa.Table.from_pylist(table, schema), tmp_path / "files/train.parquet")
    words = ["unknown=unsure", "workers=1", "--index-only"]
    assert main(["shard", str(tmp_path / "files"), str(tmp_path / "data"), *words]) == 0
    dataset = open_dataset(str(tmp_path / "data"))
    rows = locate_rows(dataset, "train")
    assert read_labels(np.arange(6), rows).tolist() == [*STATES[:5], [0, 1, 0]]


@pytest.mark.parametrize(
    ("source", "content", "words", "message"),
    [
        ("coco.json", '{"images": []}', [], "not a file of COCO's layout: no categories; expected images (id,"),
        ("coco.json", "[" * 100_000, [], "not a file of COCO's layout: 'maximum"),
        ("annotation", -4, [], "annotation 0: no category has id -4"),
        (
            "labels.csv",
            "path,label\n0.jpg,3|-1\n1.jpg,2",
            ["separator=|"],
            "label '-1' of 0.jpg: expected a class",
        ),
        ("labels.csv", "path,label\n0.jpg,\n1.jpg,", ["separator=|"], "no image has a label; expected at least one"),
        ("labels.csv", "path,label\n0.jpg,a\n1.jpg,b", ["unknown=maybe"], "no column 'maybe'; it has path, label: set"),
        ("demo", None, ["separator=|"], "separator: got |, and it does not apply to a source of kind demo"),
    ],
)
def test_bad_labels_are_one_message(pictures, tmp_path, capsys, source, content, words, message):
    where = pictures / source
    if source == "annotation":
        tree = json.loads((pictures / "coco.json").read_text())
        tree["annotations"][0]["category_id"] = content
        where, content = tmp_path / "coco.json", json.dumps(tree)
    elif source != "demo":
        where = tmp_path / source
    if content is not None:
        where.write_text(content)
        for index in range(6):
            (tmp_path / f"{index}.jpg").write_bytes((pictures / f"{index}.jpg").read_bytes())
    out = str(tmp_path / "data/out")
    assert main(["shard", "demo" if source == "demo" else str(where), out, *words, "workers=1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_files_of_coco_that_are_elsewhere_are_named(pictures, tmp_path, capsys):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/coco.json").write_text((pictures / "coco.json").read_text())
    assert main(["shard", str(tmp_path / "annotations/coco.json"), str(tmp_path / "data"), "workers=1"]) == 2
    assert "none of 6 images can be used, as a coco source: 0.jpg: no such file" in capsys.readouterr().err


def test_lvis_names_files_by_their_address(pictures, tmp_path):
    tree = json.loads((pictures / "coco.json").read_text())
    (tmp_path / "train2017").mkdir()
    for image in tree["images"]:
        name = image.pop("file_name")
        (tmp_path / "train2017" / name).write_bytes((pictures / name).read_bytes())
        image["coco_url"] = f"http://images.cocodataset.org/train2017/{name}"
    tree["images"][0]["neg_category_ids"] = [7]  # it shows a cat and a dog, and no bird: nothing is unknown
    tree["images"][1]["neg_category_ids"] = [3]  # it shows a dog and no cat
    (tmp_path / "lvis.json").write_text(json.dumps(tree))
    assert main(["shard", str(tmp_path / "lvis.json"), str(tmp_path / "data"), "workers=1"]) == 0
    found = states_by_name(str(tmp_path / "data"))
    assert (found["0"], found["1"]) == ([0, 1, 1], [-1, 0, 1])


def test_lists_that_expand_out_of_proportion_are_refused(tmp_path, capsys):
    content, _ = demo_item(0, 0, 16, "shape")
    table = pa.table({"image": [content], "label": pa.array([np.zeros(3_000_000, np.int64)])})
    pq.write_table(table, tmp_path / "images.parquet")
    assert (tmp_path / "images.parquet").stat().st_size < 10_000
    assert main(["shard", str(tmp_path / "images.parquet"), str(tmp_path / "data"), "workers=1"]) == 2
    assert "3,000,000 values in" in capsys.readouterr().err


def test_a_repeated_member_of_a_tar_with_groups_is_rejected(tmp_path):
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for index in (0, 1, 1):
            content, label = demo_item(index, 0, 16, "shape")
            fields = {"label": label, "patient": f"p{index}"}
            for name, data in (("jpg", content), ("json", json.dumps(fields).encode())):
                member = tarfile.TarInfo(f"{index}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    words = ["columns=[patient]", "group=patient", "workers=1", "max_rejects=0.5"]
    assert main(["shard", str(tmp_path / "images.tar"), str(tmp_path / "data"), *words]) == 0
    assert open_dataset(str(tmp_path / "data")).rejects.count == 1


def test_lists_of_labels_become_states_and_names():
    listed = LabelList(("b", "a", "b"), ("c", "a"))
    code = {"a": 0, "b": 1, "c": 2}
    assert listed.numbered(code) == LabelList((0, 1), (2,))
    assert LabelList(("b",), None).numbered(code) == LabelList((1,), None)
    states_NK = label_states([((0, 1), (2,)), ((), ()), ((3,), None)], 4)
    assert states_NK.tolist() == [[1, 1, -1, 0], [0, 0, 0, 0], [-1, -1, -1, 1]]
    assert [names_of(states_K, "abcd") for states_K in states_NK] == ["a, b", "none", "d"]


def test_scenes_have_two_to_four_shapes_and_rare_ones_as_often_as_asked():
    counts, number = np.zeros(10), 600
    for index in range(number):
        _, label = demo_item(index, 0, 8, "scene", 16)
        assert 2 <= len(label.present) <= 4
        assert list(label.present) == sorted({*label.present})
        counts[list(label.present)] += 1
    assert counts[0] > counts[4] > counts[9]
    # Without putting back, the first shapes are at most in every scene.
    assert 5 < counts[0] / counts[9] < 16
    singles = np.bincount([demo_item(index, 0, 8, "shape", 16)[1] for index in range(number)], minlength=10)
    assert 8 < singles[0] / singles[9] < 32


# ---- stream ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("scenes") / "data"
    words = ["task=scene", "images=96", "image_size=32", "rarity=4", "row_group=16", "workers=1"]
    assert main(["shard", "demo", str(folder), *words]) == 0
    return str(folder)


def test_1_to_8_workers_get_the_states_of_each_image(scenes):
    dataset, found = open_dataset(scenes), []
    assert dataset.labels == "several"
    rows = locate_rows(dataset, "train")
    states_NK = read_labels(np.arange(96), rows)
    for workers in (1, 2, 3, 8):
        images = {}
        for rank in range(workers):
            stream = Stream(
                dataset,
                StreamSpec("train", 24, (32, 32), Augment(), seed=3),
                lambda own: LocalReader(own, DecodeThread()),
            )
            for batch in stream.train(2, 6, Share(rank, workers)):
                assert batch.labels.dtype == np.int8
                for position, row, states_K in zip(batch.positions, batch.rows, batch.labels, strict=True):
                    assert states_K.tolist() == states_NK[row].tolist()
                    images[batch.epoch, int(position)] = int(row)
        found.append(images)
    assert all(each == found[0] for each in found)
    assert len(found[0]) == 96


def test_a_loader_gives_states_as_floats(scenes):
    with vitray.Loader(scenes, split="val", batch=8, size=32, augment=None) as loader:
        dataset = open_dataset(scenes)
        rows = locate_rows(dataset, "val")
        states_NK = read_labels(np.arange(16), rows)
        got = torch.cat([labels for _, labels in loader])
    assert got.dtype == torch.float32
    assert got.nan_to_num(-1).tolist() == states_NK.tolist()


# ---- folds -----------------------------------------------------------------------------------------------------------


def test_folds_of_several_labels_have_nearly_equal_shares_of_each_class():
    rng = np.random.default_rng(0)
    states_NK = rng.random((500, 6)) < np.array([0.5, 0.3, 0.2, 0.1, 0.05, 0.02])
    labels = [np.flatnonzero(states_K).tolist() for states_K in states_NK]
    keys = [str(row) for row in range(500)]
    numbers = fold_numbers(keys, labels, 5)
    counts = np.array([states_NK[numbers == fold].sum(0) for fold in range(5)])
    assert np.abs(counts - states_NK.sum(0) / 5).max() <= 2
    assert np.ptp(np.bincount(numbers)) <= 5
    order = rng.permutation(500)
    again = fold_numbers([keys[row] for row in order], [labels[row] for row in order], 5)
    assert (again == numbers[order]).all()


# ---- a run -----------------------------------------------------------------------------------------------------------

NETWORK = ["model.name=vit_u1x1_8", "model.image_size=32", "optim.batch=16", "optim.lr=3e-3", "compute.workers=1"]


@pytest.fixture(scope="module")
def trained(scenes, tmp_path_factory) -> Path:
    """The folder of a short run, here, with mixing and the average of the weights."""
    place = tmp_path_factory.mktemp("run")
    words = [
        *NETWORK,
        f"data.url={scenes}",
        "optim.duration=3 epochs",
        "optim.warmup=2 steps",
        "optim.ema={decay: 0.5}",
    ]
    words += ["data.mix={mixup: 0.2, per: pair, chance: 0.5}", "evaluate.examples=4", "evaluate.every=1 epoch"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlruns.db")
        assert main(["train", "demo", "--here", "--name", "first", "--out", str(place / "runs"), *words]) == 0
    return place / "runs/first"


def test_a_run_learns_by_the_labels_of_its_data_and_reports_map(trained):
    run = vitray.open_run("first", trained.parent)
    assert (run.run.task.labels, run.run.task.loss) == ("several", "bce")
    assert run.outcome["val_top1"] is None
    assert 0 < run.outcome["val_map"] <= 1
    curve = run.outcome["curves"]["val/map"]
    assert [step for step, _ in curve] == [6, 12, 18]
    assert run.outcome["curves"]["val/map_ema"][-1][1] == run.outcome["val_map"]
    model = vitray.open_weights(str(trained / "model"))
    assert len(model.run.task.thresholds) == 10


def test_evaluate_predict_load_and_serve_give_the_same_labels(trained, scenes, tmp_path, capsys):
    model = str(trained / "model")
    report = vitray.evaluate(model, scenes, out=str(tmp_path / "evaluation"))
    assert report["map"] == pytest.approx(vitray.open_run("first", trained.parent).outcome["val_map"], abs=1e-12)
    assert report["map_low"] < report["map"] < report["map_high"]
    page = (tmp_path / "evaluation/index.html").read_text()
    for words in ("mAP", "Labels that come together", "average precision of 10 classes", "by a bootstrap over images"):
        assert words in page
    rows = list(csv.DictReader(io.StringIO((tmp_path / "evaluation/predictions.csv").read_text())))
    assert len(rows) == 16
    vitray.predict(model, scenes, str(tmp_path / "predictions"), splits=["val"])
    [part] = (tmp_path / "predictions/parts").iterdir()
    table = {row["key"]: row for row in pq.read_table(part).to_pylist()}
    network = vitray.load(model)
    limits = dict(zip(network.classes, vitray.open_weights(model).run.task.thresholds, strict=True))
    dataset = open_dataset(scenes)
    [shard] = dataset.splits["val"].shards
    stored = pq.read_table(dataset.address(shard)).to_pylist()
    for row in rows:
        shown = sorted(row["predicted"].split("|")) if row["predicted"] else []
        predicted = table[row["image"]]
        assert sorted(predicted["labels"]) == shown
        assert predicted["scores"] == sorted(predicted["scores"], reverse=True)
        assert all(score >= limits[name] for name, score in zip(predicted["labels"], predicted["scores"], strict=True))
        [encoded] = [each["image"] for each in stored if each["key"] == row["image"]]
        [answer] = network.predict(encoded)
        assert answer.labels == predicted["labels"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.distill={teacher: models/a}"], "task.distill does not apply to several labels an image"),
        (["task.thresholds=[0.5, 0.5]"], "task.thresholds: got 2, expected one for each of 10 classes"),
    ],
)
def test_what_does_not_apply_is_refused_in_one_line(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_run(None, ["task.labels=several", "model.num_classes=10", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.asymmetric={shift: 0.1}"], "task.asymmetric does not apply to task.loss softmax"),
        (["task.thresholds=[0.5]"], "task.thresholds does not apply to one label an image"),
    ],
)
def test_settings_of_several_labels_need_several(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_run(None, words)


@pytest.mark.parametrize("option", [["--probes", "few_shot"], ["--corrupt"], ["--labels", "real=real.json"]])
def test_scores_of_one_label_are_refused(trained, scenes, tmp_path, capsys, option):
    words = [str(trained / "model"), scenes, "--out", str(tmp_path / "out"), *option]
    assert main(["evaluate", *words]) == 2
    assert "whose images have several labels" in capsys.readouterr().err


def test_labels_that_the_data_do_not_have_are_refused(scenes, capsys):
    assert main(["train", "demo", "--dry-run", *NETWORK, f"data.url={scenes}", "task.labels=one"]) == 2
    assert "task.labels: got one, expected several, as the images of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["few_shot", "calibration"])
def test_probes_of_one_label_are_refused(scenes, name):
    run = load_run(None, [*NETWORK, f"data.url={scenes}", f"evaluate.probes=[{name}]"])
    with pytest.raises(ConfigError, match=rf"evaluate.probes: {name} does not apply to .*, whose images have several"):
        resolve(run)


# ---- probes ----------------------------------------------------------------------------------------------------------


def features_and_states(images: int, seed: int) -> Labeled:
    """Six features that tell three of four classes, one of which is unknown at a third of the images."""
    rng = np.random.default_rng(seed)
    states_NK = (rng.random((images, 4)) < 0.4).astype(np.int8)
    features_NF = rng.normal(size=(images, 6)) + 2 * np.pad(states_NK[:, :3], ((0, 0), (0, 3)))
    states_NK[rng.random(images) < 0.3, 1] = -1
    return Labeled(features_NF.astype(np.float32), states_NK)


def test_neighbors_vote_for_each_class_that_they_know():
    train, test = features_and_states(60, 0), features_and_states(20, 1)
    train.labels[:, 3] = -1
    train.labels[0, 3] = 1  # known of one image alone: of most others no neighbor knows it
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (train.features, test.features)]
    similar = unit[1] @ unit[0].T
    for k, scores_NK in label_scores(train, test.features, [3, 10]).items():
        for row in range(20):
            near = np.argsort(-similar[row], kind="stable")[:k]
            weights = np.exp(similar[row, near].astype(float) / 0.07)
            for label in range(4):
                states = train.labels[near, label]
                known = weights[states >= 0].sum()
                wanted = (
                    weights[states == 1].sum() / known
                    if known
                    else (train.labels[:, label] == 1).sum() / max(1, (train.labels[:, label] >= 0).sum())
                )
                assert scores_NK[row, label] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("l2", [1e-3, 1e-1])
def test_the_linear_probe_is_a_logistic_regression_of_each_class(l2):
    train = features_and_states(150, 2)
    head, converged = fit_head(train, 4, l2)
    x = train.features.astype(float)
    x = (x - x.mean(0)) / (x.std(0) + 1e-5)
    assert converged
    for label in range(4):
        known = train.labels[:, label] >= 0
        reference = LogisticRegression(C=1 / (l2 * 150), solver="newton-cg", tol=1e-12, max_iter=1000)
        reference.fit(x[known], train.labels[known, label])
        assert np.allclose(head.weights[:, label], reference.coef_[0], atol=1e-6)
        assert head.bias[label] == pytest.approx(reference.intercept_[0], abs=1e-6)


def test_probes_score_by_map_and_choose_by_the_loss(monkeypatch):
    train, test = features_and_states(300, 3), features_and_states(200, 4)
    keys = [f"image {row}" for row in range(300)]
    inputs = ProbeInputs(test, 4, train, keys)
    found = probe_scores(["knn", "linear", "rank"], inputs)
    scores_NK = label_scores(train, test.features, [10])[10]
    assert found.scores["knn10_map"] == mean_average_precision(scores_NK, test.labels)
    assert found.scores["knn10_map_low"] < found.scores["knn10_map"] < found.scores["knn10_map_high"]
    assert sorted(found.maps) == ["knn10_map", "linear_map"]
    assert "rankme" in found.scores
    assert "separation_cosine" not in found.scores
    probe = probe_linear(train, 4, keys)
    assert found.scores["linear_map_l2"] == probe.chosen == max(probe.quality, key=lambda l2: probe.quality[l2])
    assert found.scores["linear_map"] > 0.7  # of the fourth class no feature tells
    assert compare_maps(found.maps["linear_map"], found.maps["linear_map"]).p_value == 1.0
    assert probe_shares([0.5], inputs)["linear_share0.5_map"] > 0.7
    monkeypatch.setattr(linear_probe, "MOST_BYTES", 0)
    by_sgd = probe_scores(["linear"], inputs).scores
    assert by_sgd["linear_map_fit"] == "sgd"
    assert by_sgd["linear_map"] == pytest.approx(found.scores["linear_map"], abs=0.02)


def test_evaluate_probes_the_features(trained, scenes, tmp_path, capsys):
    words = [str(trained / "model"), scenes, "--out", str(tmp_path / "out"), "--probes", "knn", "linear"]
    assert main(["evaluate", *words, "--train-shares", "0.5", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < scores["knn10_map"] <= scores["knn10_map_high"]
    assert "kNN, 10 neighbors, mAP" in (tmp_path / "out" / "index.html").read_text()
    assert "linear probe, 50 % of train, mAP" in (tmp_path / "out" / "index.html").read_text()


def test_weights_are_of_the_images_that_are_trained_on(scenes):
    run = load_run(None, [*NETWORK, f"data.url={scenes}", "task.class_weights=equal", "data.holdout=0.5"])
    resolved = resolve(run)
    rows = locate_rows(open_dataset(scenes), "train")
    states_NK = read_labels(np.flatnonzero(~resolved.holdout_mask), rows)
    present_K = (states_NK == 1).sum(0)
    expected = (len(states_NK) - present_K) / np.maximum(1, present_K)
    assert resolved.run.task.class_weights == pytest.approx(expected.tolist(), rel=1e-5)


def test_saturated_networks_have_finite_losses_and_gradients():
    logits_BK = torch.tensor([[20.0, 25.0, -30.0], [17.0, -17.0, 0.0]], requires_grad=True)
    targets_BK = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, torch.nan]])
    for settings in ({"focus_present": 0.5}, {"focus_present": 1.0, "focus_absent": 0.5, "shift": 0.0}, None):
        task = load_run(None, {"task.labels": "several", "task.loss": "asymmetric", "task.asymmetric": settings}).task
        logits_BK.grad = None
        LOSSES["asymmetric"].of_labels(logits_BK, targets_BK, task, None).backward()
        assert logits_BK.grad.isfinite().all()
    states_NK = np.array([[0, 1, 1], [0, 0, -1]])
    found = label_loss(logits_BK.detach().numpy(), states_NK, "sigmoid")
    assert found == pytest.approx((20 + np.log1p(np.exp(-25)) + 30 + 17 + np.log1p(np.exp(-17))) / 5, rel=1e-6)
    assert best_threshold(np.array([1.0, 1.0]), np.array([1, 1])) == 1.0
    load_run(None, {"task.labels": "several", "model.num_classes": 2, "task.thresholds": [1.0, 0.0]})


def test_each_demo_task_names_its_classes():
    assert CLASSES["scene"] == CLASSES["shape"]


# ---- weights of classes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softmax", "bce", "asymmetric"])
def test_the_weight_of_a_class_multiplies_its_term(kind):
    """A loss is linear in the weights; with weight 1 of all it is the loss without."""
    task = load_run(None, {"task.labels": "several", "task.loss": kind}).task
    logits_BK, targets_BK = logits_and_targets()

    def loss(weights: list[float] | None) -> float:
        weights_K = None if weights is None else torch.tensor(weights)
        return float(LOSSES[kind].of_labels(logits_BK, targets_BK, task, weights_K))

    assert loss([1.0] * 5) == pytest.approx(loss(None), rel=1e-6)
    rest = loss([0.0] * 5)
    terms = [loss([float(label == other) for other in range(5)]) - rest for label in range(5)]
    assert loss([3.0, 0.5, 1.0, 2.0, 0.0]) == pytest.approx(rest + np.dot([3.0, 0.5, 1.0, 2.0, 0.0], terms), rel=1e-5)


def test_weights_of_one_label_are_those_of_torch():
    logits_BK, labels_B = torch.randn(8, 4), torch.tensor([0, 1, 2, 3, 0, 0, 1, 2])
    weights_K = torch.tensor([0.5, 1.0, 2.0, 4.0])
    found = LOSSES["softmax"].of_labels(logits_BK, F.one_hot(labels_B, 4).float(), load_run(None).task, weights_K)
    each_B = F.cross_entropy(logits_BK, labels_B, weights_K, reduction="none")
    assert float(found) == pytest.approx(float(each_B.mean()), rel=1e-6)


@given(counts=st.lists(st.integers(0, 500), min_size=3, max_size=3).filter(any))
def test_weights_by_rarity_keep_the_mean_over_the_images(counts):
    counts_K = np.array(counts)
    for balance, power in (("square_root", 0.5), ("equal", 1.0)):
        weights_K = loss_weights(balance, counts_K, sum(counts) - counts_K, ["a", "b", "c"], "one")
        assert (weights_K * counts_K).sum() / counts_K.sum() == pytest.approx(1)
        shares = weights_K * np.maximum(counts_K, 1) ** power
        assert np.ptp(shares) == pytest.approx(0, abs=1e-9)
        absent_K = 1000 - 2 * counts_K  # of some images it is not known
        several_K = loss_weights(balance, counts_K, absent_K, ["a", "b", "c"], "several")
        expected = (np.maximum(1, absent_K) / np.maximum(1, counts_K)) ** power
        assert several_K.tolist() == pytest.approx(expected.tolist())


def test_a_run_records_the_weights_of_its_classes(scenes, capsys):
    run = load_run(None, [*NETWORK, f"data.url={scenes}", "task.class_weights=equal"])
    resolved = resolve(run)
    counts = open_dataset(scenes).splits["train"].class_counts
    expected = [(96 - count) / count for count in counts]
    assert resolved.run.task.class_weights == pytest.approx(expected, rel=1e-5)
    assert resolve(resolved.run).run.task.class_weights == resolved.run.task.class_weights
    named = resolve(run.replace({"task.class_weights": {"bolt": 3.0}})).run.task.class_weights
    assert named == (1.0,) * 9 + (3.0,)
    with pytest.raises(ConfigError, match=r"task.class_weights: got bolts, which is no class of the dataset.*bolt"):
        resolve(run.replace({"task.class_weights": {"bolts": 3.0}}))


def test_an_epoch_shows_rare_labels_more_often(scenes):
    run = load_run(None, [*NETWORK, f"data.url={scenes}", "data.balance={bolt: 8}"])
    plan, dataset = resolve(run).balance, open_dataset(scenes)
    assert plan is not None
    assert tuple(each.images for each in plan) == dataset.splits["train"].class_counts
    bolt = plan[dataset.classes.index("bolt")]
    assert bolt.shown > 2 * bolt.images
    assert bolt.left_out == 0
    assert all(each.left_out > 0 for each in plan if each != bolt)


@pytest.mark.parametrize(("lists", "kind"), [(8, "several"), (2, "one")])
def test_images_whose_labels_are_of_the_rarer_kind_are_rejected(tmp_path, lists, kind):
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for index in range(10):
            content, label = demo_item(index, 0, 16, "shape")
            fields = {"label": [label] if index < lists else label}
            for name, data in (("jpg", content), ("json", json.dumps(fields).encode())):
                member = tarfile.TarInfo(f"{index}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    words = [str(tmp_path / "images.tar"), str(tmp_path / "data"), "workers=1", "max_rejects=0.3", "dedupe=off"]
    assert main(["shard", *words]) == 0
    dataset = open_dataset(str(tmp_path / "data"))
    assert (dataset.labels, dataset.rejects.count) == (kind, 2)
    assert ("unknown" in dataset.model_dump()["columns"]) is (kind == "several")


def test_a_sweep_that_names_no_goal_compares_the_map(scenes):
    run = load_run("demo", [*NETWORK, f"data.url={scenes}"])
    folds = read_space(Path(str(files("tune_spaces"))) / "folds.yaml")
    plan = plan_sweep(run, folds, [Node(cpus=4)])
    assert plan.trials == 5
    assert plan.space.goal == Goal(metric="val/map")
    named = folds.model_copy(update={"goal": Goal(metric="val/top1")})
    with pytest.raises(ConfigError, match=r"goal.metric: got 'val/top1', expected one of val/map, val/loss, as"):
        plan_sweep(run, named, [Node(cpus=4)])


def test_the_folds_of_a_split_are_scored_as_one(scenes, tmp_path, capsys):
    """Each image by the network that did not learn it."""
    models = []
    for index in range(2):
        run = load_run("demo", [*NETWORK, f"data.url={scenes}", f"data.fold={{of: 2, index: {index}}}"])
        run = resolve(run).run

        models.append(str(tmp_path / f"model{index}"))
        vitray.save_model(models[-1], run, scrambled(ViT(run.model), seed=index), open_dataset(scenes).classes)
    report = vitray.evaluate(models, scenes, split="train", out_of_fold=True, out=str(tmp_path / "out"))
    assert report["images"] == 96
    both = [vitray.evaluate(model, scenes, split="train", out=str(tmp_path / "each"))["map"] for model in models]
    assert 0 < report["map"] < 1
    assert report["map"] not in both
