"""Folds of train: equal, stratified, grouped, exhaustive, and the same for any order of the images."""

import csv
import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import scrambled
from scipy.stats import binomtest

import tune_spaces
import vitray
from pipelines.__main__ import main
from vitray.config import load_run
from vitray.config.training import Data, Fold
from vitray.data.shards import held_out, open_dataset
from vitray.data.shards.demo import demo_item
from vitray.data.shards.held_out import fold_numbers
from vitray.data.shards.manifest import read_column, row_keys
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.runs.resolve import resolve
from vitray.sweeps.report import SweepResult, TrialResult
from vitray.sweeps.report.page import render
from vitray.sweeps.report.results import results_of
from vitray.sweeps.space import check_space, read_space, run_of
from vitray.weights import save_model


def counts_of(numbers: np.ndarray, labels: np.ndarray, of: int) -> np.ndarray:
    """The images of each class in each fold."""
    return np.array([np.bincount(labels[numbers == fold], minlength=labels.max() + 1) for fold in range(of)])


labels_of_any_shares = st.lists(st.integers(0, 4), min_size=2, max_size=200)


@given(labels=labels_of_any_shares, of=st.integers(2, 7), seed=st.integers(0, 9))
def test_without_groups_sizes_and_class_counts_differ_by_at_most_one(labels, of, seed):
    labels = np.array(labels)
    keys = [f"image {seed} {row}" for row in range(len(labels))]
    numbers = fold_numbers(keys, labels[:, np.newaxis].tolist(), of)
    counts = counts_of(numbers, labels, of)
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(counts.sum(axis=1)) <= 1
    order = np.random.default_rng(seed).permutation(len(labels))
    assert (fold_numbers([keys[row] for row in order], labels[order, np.newaxis].tolist(), of) == numbers[order]).all()


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12) | st.none()), min_size=20, max_size=200),
    of=st.integers(2, 5),
)
def test_no_group_is_in_two_folds(rows, of):
    labels, groups = np.array([label for label, _ in rows]), [group for _, group in rows]
    keys = [str(row) for row in range(len(rows))]
    if len({*groups} - {None}) + groups.count(None) < of:
        with pytest.raises(ConfigError, match="the number of groups"):
            fold_numbers(keys, labels[:, np.newaxis].tolist(), of, groups)
        return
    numbers = fold_numbers(keys, labels[:, np.newaxis].tolist(), of, groups)
    assert {*numbers.tolist()} == {*range(of)}
    for group in {*groups} - {None}:
        assert len({number for number, other in zip(numbers.tolist(), groups, strict=True) if other == group}) == 1


def test_groups_of_any_size_make_folds_of_nearly_equal_shares():
    generator = np.random.default_rng(3)
    sizes = generator.integers(1, 40, 120)
    groups = np.repeat(np.arange(120), sizes)
    # Most images of a group have its own class.
    labels = np.where(generator.random(len(groups)) < 0.7, groups % 6, generator.integers(6, size=len(groups)))
    numbers = fold_numbers([str(row) for row in range(len(groups))], labels[:, np.newaxis].tolist(), 5, groups.tolist())
    counts = counts_of(numbers, labels, 5)
    assert np.abs(counts / counts.sum(axis=0) - 0.2).max() < 0.04
    # At random, groups of such sizes differ by more.
    drawn = counts_of(generator.integers(5, size=120)[groups], labels, 5)
    assert np.abs(drawn / drawn.sum(axis=0) - 0.2).max() > 0.04


# ---- datasets and runs -----------------------------------------------------------------------------------------------

PATIENTS = 13


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
    """120 images of an index, four classes and 13 patients, one of which nobody noted."""
    folder = tmp_path_factory.mktemp("folds")
    lines = ["path,label,patient"]
    for index in range(120):
        content, label = demo_item(index, 0, 16, "shape")
        (folder / f"{index}.png").write_bytes(content)
        patient = "" if index == 7 else f"p{index * 7 % PATIENTS}"
        lines.append(f"{index}.png,{label % 4},{patient}")
    (folder / "index.csv").write_text("\n".join(lines))
    words = [str(folder / "index.csv"), str(folder / "data"), "columns=[patient]", "workers=1", "dedupe=off"]
    assert main(["shard", *words]) == 0
    return str(folder / "data")


@pytest.mark.parametrize("group", [None, "patient"])
def test_each_image_is_held_out_by_one_fold(dataset, group):
    opened = open_dataset(dataset)
    keys, patients = [*row_keys(opened, "train")], []
    for shard in opened.splits["train"].shards:
        patients += read_column(opened, shard, "patient")
    assert patients.count(None) == 1
    total = np.zeros(len(keys), int)
    for index in range(5):
        run = load_run(None, [f"data.url={dataset}", "model.num_classes=4", "optim.batch=8"])
        run = run.replace({"data.fold": {"of": 5, "index": index, "group": group}})
        resolved = resolve(run)
        mask = resolved.holdout_mask
        assert resolved.images + resolved.val_images == 120
        assert resolved.val_images == mask.sum() == (24 if group is None else mask.sum())
        total += mask
        if group:
            chosen = {patient for patient, held in zip(patients, mask, strict=True) if held}
            others = {patient for patient, held in zip(patients, mask, strict=True) if not held}
            assert chosen & others <= {None}
    assert (total == 1).all()


def test_a_tar_and_parquet_keep_columns_too(tmp_path, dataset):
    source = open_dataset(dataset)
    [shard] = source.splits["train"].shards
    table = pq.read_table(source.address(shard))
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for row in table.to_pylist():
            fields = {"label": row["label"], "patient": row["patient"]}
            for name, content in (("png", row["image"]), ("json", json.dumps(fields).encode())):
                member = tarfile.TarInfo(f"{row['key'].replace('/', '_').replace('.', '_')}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    (tmp_path / "parquet").mkdir()
    pq.write_table(table, tmp_path / "parquet/train.parquet")
    expected = sorted((row["image"], row["patient"]) for row in table.to_pylist() if row["patient"])
    for kind, path in (("tar", tmp_path / "images.tar"), ("parquet", tmp_path / "parquet")):
        out = tmp_path / f"data-{kind}"
        assert main(["shard", str(path), str(out), "columns=[patient]", "workers=1", "dedupe=off"]) == 0
        made = open_dataset(str(out))
        assert made.others == ("patient",)
        [shard] = made.splits["train"].shards
        rows = pq.read_table(made.address(shard), columns=["image", "patient"])
        assert rows.schema.field("patient").type == pa.string()
        assert sorted((row["image"], row["patient"]) for row in rows.to_pylist() if row["patient"]) == expected
    in_place = tmp_path / "in-place"
    words = [str(tmp_path / "parquet"), str(in_place), "columns=[patient]", "workers=1", "dedupe=off", "--index-only"]
    assert main(["shard", *words]) == 0
    masks = [
        held_out(open_dataset(str(in_place)), Data(fold={"index": index, "group": "patient"})) for index in range(5)
    ]  # pyright: ignore[reportArgumentType]
    assert (np.sum(masks, axis=0) == 1).all()


def test_splits_are_drawn_of_whole_groups(dataset, tmp_path):
    index = dataset.removesuffix("data") + "index.csv"
    words = ["columns=[patient]", "group=patient", "workers=1", "dedupe=off"]
    words += ["--split", "val=0.3", "--split", "test=0.2"]
    assert main(["shard", index, str(tmp_path / "data"), *words]) == 0
    made, patients = open_dataset(str(tmp_path / "data")), {}
    for split, described in made.splits.items():
        for shard in described.shards:
            patients.setdefault(split, set()).update({*read_column(made, shard, "patient")} - {None})
    assert patients.keys() == {"train", "val", "test"}
    assert sum(map(len, patients.values())) == len(set.union(*patients.values())) == PATIENTS
    rows = {split: described.rows for split, described in made.splits.items()}
    assert sum(rows.values()) == 120
    assert 36 - 120 / PATIENTS < rows["val"] <= 36
    assert 24 - 120 / PATIENTS < rows["test"] <= 24


def test_a_group_in_two_splits_is_refused(dataset, tmp_path, capsys):
    folder = Path(dataset).parent
    lines = (folder / "index.csv").read_text().splitlines()
    moved = [f"{lines[0]},split", *(f"{line},{'val' if row == 20 else 'train'}" for row, line in enumerate(lines[1:]))]
    (folder / "moved.csv").write_text("\n".join(moved))
    words = [str(folder / "moved.csv"), str(tmp_path / "data"), "columns=[patient]", "workers=1", "dedupe=off"]
    assert main(["shard", *words, "group=patient"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"patient p\d+ is in \w+ \(\d+.png\) and in \w+ \(\d+.png\); expected each patient in one", error)
    assert main(["shard", *words]) == 0
    assert main(["shard", *words[:1], str(tmp_path / "other"), "group=patient", "workers=1"]) == 2
    assert "group: got patient, expected one of columns, as in columns=[patient]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "words", "message"),
    [
        (
            "demo",
            ["columns=[patient]"],
            "it does not apply to a source of kind demo; expected an index of paths, Parquet or a tar",
        ),
        ("index", ["columns=[patent]"], "no column 'patent'; it has path, label, patient: set columns=COLUMN"),
        ("index", ["columns=[patient, patient]"], "columns: got patient, it more than once; expected other names"),
        ("index", ["columns=[key]"], "columns: got key, a column that shards have anyway"),
    ],
)
def test_columns_that_cannot_be_kept_are_one_message(dataset, tmp_path, capsys, source, words, message):
    where = "demo" if source == "demo" else f"{dataset.removesuffix('data')}index.csv"
    assert main(["shard", where, str(tmp_path / "out"), *words, "workers=1"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "message"),
    [("p" * 201, "got 201 characters, expected at most 200"), ("\ud800", "expected one line of text, got")],
)
def test_a_value_of_a_column_that_is_no_short_line_is_one_message(tmp_path, capsys, value, message):
    content, _ = demo_item(0, 0, 16, "shape")
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for name, data in (("png", content), ("json", json.dumps({"label": 0, "patient": value}).encode())):
            member = tarfile.TarInfo(f"a.{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert main(["shard", str(tmp_path / "images.tar"), str(tmp_path / "out"), "columns=[patient]", "workers=1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "of a.json" in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.fold={of: 5, index: 5}"], "index: got 5, expected at most 4, the last of 5 folds"),
        (["data.fold.of=1"], "data.fold.of"),
        (["data.fold={}", "data.holdout=0.1"], "holdout: got 0.1 with a fold, expected 0: the fold is held out"),
    ],
)
def test_settings_that_hold_out_nothing_or_twice_are_one_message(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_run(None, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fold", "message"),
    [
        ({"group": "doctor"}, "data.fold.group: got doctor, and the columns of .* are patient; `vitray shard"),
        ({"of": 20, "group": "patient"}, "data.fold.of: got 20, expected at most 14, the number of groups"),
    ],
)
def test_folds_that_cannot_be_made_are_one_message(dataset, fold, message):
    with pytest.raises(ConfigError, match=message):
        held_out(open_dataset(dataset), Data(fold=fold))


def test_a_class_that_is_in_one_fold_alone_is_refused(dataset, tmp_path):
    index = tmp_path / "index.csv"
    folder = Path(dataset).parent
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes((folder / f"{number}.png").read_bytes())
    index.write_text("path,label\n" + "\n".join(f"{number}.png,{'ab'[number == 4]}" for number in range(5)))
    assert main(["shard", str(index), str(tmp_path / "data"), "workers=1"]) == 0
    with pytest.raises(
        ConfigError, match=r"data.fold: all images of class b are in fold .*expected classes of more than"
    ):
        held_out(open_dataset(str(tmp_path / "data")), Data(fold={"of": 2}))  # pyright: ignore[reportArgumentType]


# ---- the report of a sweep of folds ----------------------------------------------------------------------------------


def fold_trial(lr: float, fold: int, goal: float, images: int = 20, **other) -> TrialResult:
    unset = {"reason": None, "curves": {}, "device_seconds": None, "params": None, "gflops": None}
    settings = {"optim.lr": lr, "data.fold.index": fold}
    name = f"lr={lr:g} fold={fold}"
    values = {"state": "finished", "command": "vitray train demo", "val_images": images, **unset, **other}
    return TrialResult(**{"name": name, "settings": settings, "goal": goal, **values})


def fold_sweep(trials: list[TrialResult]) -> SweepResult:
    texts = dict.fromkeys(("name", "recipe", "space_text", "plan", "began", "command"), "text")
    return SweepResult(**texts, goal="val/top1", mode="max", circumstances={}, trials=trials)


def test_folds_are_repeats_of_a_group_and_every_image_counts_once():
    hits = {0.1: [10, 12, 14, 16, 9], 0.2: [12, 14, 16, 18, 11]}
    trials = [
        fold_trial(lr, fold, hit / (20 + (fold == 4)), 20 + (fold == 4))
        for lr, each in hits.items()
        for fold, hit in enumerate(each)
    ]
    results = results_of(fold_sweep(trials))
    assert [group.label for group in results.groups] == ["lr 0.2", "lr 0.1"]
    assert results.repeats == "folds"
    best, other = results.groups
    found = best.out_of_fold(results.folds)
    assert found is not None
    share, images = found
    assert (share.estimate, images) == (71 / 101, 101)
    interval = binomtest(71, 101).proportion_ci(method="wilson")
    assert (share.low, share.high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    # Each fold is as hard for both: their differences of two images of 20 are clear, beside folds that differ by eight.
    [pair] = results.pairs
    assert (pair.one, pair.other) == (best, other)
    assert pair.verdict("max") == "better"
    page = render(results, {}, b"")
    assert "Results over folds" in page
    assert "of 101 images right, out of fold" in page
    assert "70.30 (60.77 to 78.33) of 101" in page
    assert "folds share most of what they are trained on (Nadeau and Bengio" in page
    page = render(results_of(fold_sweep(trials)._replace(goal="val/map")), {}, b"")
    assert "right, out of fold" not in page
    assert "is that of vitray evaluate MODELS DATA --split train --out-of-fold" in page


def test_out_of_fold_needs_each_fold_once():
    trials = [fold_trial(0.1, fold, 0.5) for fold in range(5)]
    [group] = results_of(fold_sweep(trials)).groups
    assert group.out_of_fold(range(5)) is not None
    assert group._replace(trials=trials[:4]).out_of_fold(range(5)) is None
    assert group._replace(trials=[*trials, trials[0]]).out_of_fold(range(5)) is None
    assert group._replace(trials=[*trials[:4], fold_trial(0.1, 4, 0.5, state="failed")]).out_of_fold(range(5)) is None
    unknown = fold_trial(0.1, 4, 0.5, val_images=None)
    assert group._replace(trials=[*trials[:4], unknown]).out_of_fold(range(5)) is None


def test_the_space_holds_out_each_fold():
    space = read_space(tune_spaces.path_of("folds"))
    base = load_run("demo", ["data.fold.group=patient"])
    runs = [run_of(base, point) for point in check_space(space, base)]
    assert [run.data.held_out for run in runs] == [f"fold {index} of 5 by patient" for index in range(5)]
    assert {run.data.evaluated for run in runs} == {"train"}


# ---- the networks of all folds as one --------------------------------------------------------------------------------


def fold_models(folder, of=3, **fold) -> list[str]:
    """Random networks, each as if trained on all folds but one."""
    urls = []
    for index in range(of):
        settings = {"of": of, "index": index, **fold}
        model = {"name": "vit_u1x1_8", "image_size": 16, "num_classes": 4, "class_token": False, "pool": "mean"}
        run = load_run(None, {"model": model, "data.fold": settings})
        torch.manual_seed(index)
        urls.append(str(folder / f"fold-{index}"))
        save_model(urls[-1], run, scrambled(ViT(run.model), index), list("0123"))
    return urls


def test_each_image_is_scored_by_the_network_that_did_not_learn_it(dataset, tmp_path):
    urls = fold_models(tmp_path, group="patient")
    whole = vitray.evaluate(urls, dataset, split="train", out_of_fold=True, out=str(tmp_path / "whole")).values
    opened = open_dataset(dataset)
    keys, hits = [*row_keys(opened, "train")], {}
    for index, url in enumerate(urls):
        vitray.evaluate(url, dataset, split="train", out=str(tmp_path / f"each-{index}"))
        mask = held_out(opened, Data(fold=Fold(of=3, index=index, group="patient")))
        own = {key for key, held in zip(keys, mask, strict=True) if held}
        with open(tmp_path / f"each-{index}/predictions.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["image"] in own]
        hits |= {row["image"]: row["label"] == row["predicted"] for row in rows}
    assert sorted(hits) == sorted(keys)
    assert whole["images"] == 120
    assert whole["top1"] == pytest.approx(sum(hits.values()) / 120)
    with open(tmp_path / "whole/predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["image"]: row["label"] == row["predicted"] for row in rows} == hits


def test_networks_that_are_not_those_of_all_folds_are_one_message(dataset, tmp_path, capsys):
    urls = fold_models(tmp_path)
    other = fold_models(tmp_path / "other", of=2)
    run = load_run(None, {"model": {"name": "vit_u1x1_8", "image_size": 16, "num_classes": 4}})
    plain = str(tmp_path / "plain")
    save_model(plain, run, ViT(run.model), list("0123"))
    for words, message in (
        (urls[:2], r"--out-of-fold: got folds \[0, 1\], expected each of 3 once, from 0 on"),
        ([*urls[:2], other[0]], "other/fold-0 has one of 2 folds by image, and the first network of 3 folds by image"),
        ([plain], "plain was trained without data.fold; expected all with one"),
    ):
        words = [*words, dataset, "--split", "train", "--out", str(tmp_path / "no")]
        assert main(["evaluate", *words, "--out-of-fold"]) == 2
        assert re.search(message, capsys.readouterr().err)
