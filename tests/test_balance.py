"""`data.balance`: how often an epoch shows the images of each class, and that all workers agree on it."""

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_stream import images_of_epoch, jpeg, train_stream, write

from pipelines.__main__ import main
from vitray.config import load_run
from vitray.data.stream.balance import GOLDEN, PARTS, ClassBalance, class_draws, class_weights, sums_by_class
from vitray.data.stream.epoch_order import EpochOrder, positions_of
from vitray.errors import ConfigError

CLASSES = ("common", "some", "rare", "none")


def split(counts=(700, 250, 50, 0), seed=0) -> np.ndarray:
    """The labels of the rows of a split."""
    labels = np.repeat(np.arange(len(counts)), counts)
    return labels[np.random.default_rng(seed).permutation(len(labels))]


def draws_of(balance, labels: np.ndarray, used: np.ndarray | None = None, group=64) -> ClassBalance:
    used = np.arange(len(labels)) if used is None else used
    counts = sums_by_class(labels[used], np.ones(len(used)), len(CLASSES))
    starts = np.append(np.arange(0, len(labels), group), len(labels))
    return ClassBalance(labels, used, starts, class_weights(balance, counts, CLASSES), "key 0")


@pytest.mark.parametrize(
    ("balance", "shares"),
    [
        ("none", (700, 250, 50, 0)),
        ("equal", (1000 / 3, 1000 / 3, 1000 / 3, 0)),
        ("square_root", tuple(1000 * count**0.5 / (700**0.5 + 250**0.5 + 50**0.5) for count in (700, 250, 50, 0))),
        ({"rare": 4.0, "common": 0.5}, tuple(1000 * part / 800 for part in (350, 250, 200, 0))),
    ],
)
def test_each_epoch_shows_the_share_of_each_class_rounded(balance, shares):
    labels = split()
    draws, seen = draws_of(balance, labels), np.zeros((40, len(labels)), int)
    for epoch in range(40):
        groups, rows, before = draws.of_rows(epoch)
        assert (np.diff(rows) >= 0).all()
        assert len(rows) == groups.sum() == 1000
        assert groups.tolist() == np.bincount(rows // 64, minlength=16).tolist()
        seen[epoch] = np.bincount(rows, minlength=1000)
        assert [*zip(rows.tolist(), before.tolist(), strict=True)] == [
            (row, copy) for row in range(1000) for copy in range(seen[epoch, row])
        ]
        shown = np.bincount(labels, weights=seen[epoch], minlength=4)
        assert all(abs(have - share) < 1 for have, share in zip(shown, shares, strict=True))
        for label, each in enumerate(class_draws(labels, np.arange(1000), draws.times(epoch), 4)):
            own = seen[epoch, labels == label]
            assert (each.images, each.shown) == (len(own), own.sum())
            assert each.left_out == (own == 0).sum()
            assert each.repeated == (own > 1).sum()
            assert len(own) == 0 or np.ptp(own) <= 1
    # Over all epochs, the images of a class are shown equally often, and the classes by their shares.
    total = seen.sum(axis=0)
    for label, share in enumerate(shares):
        own = total[labels == label]
        assert len(own) == 0 or np.ptp(own) <= 1
        assert abs(own.sum() - 40 * share) < 3


@given(
    counts=st.lists(st.integers(0, 60), min_size=4, max_size=4).filter(any),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    epochs=st.integers(1, 30),
)
def test_shares_are_those_of_exact_fractions(counts, weights, epochs):
    labels = split(tuple(counts))
    draws = draws_of(dict(zip(CLASSES, weights, strict=True)), labels)
    shares = [Fraction(count) * Fraction(weight) for count, weight in zip(counts, weights, strict=True)]
    ends = [sum(shares[: place + 1], Fraction(0)) / sum(shares) * len(labels) for place in range(4)]
    for epoch in range(epochs):
        offset = Fraction(epoch * GOLDEN % PARTS, PARTS)
        shown = np.bincount(labels, draws.times(epoch), 4).tolist()
        assert sum(shown) == len(labels)
        assert min(shown) >= 0
        for place in range(4):
            # In parts of 2^-20 of an image.
            assert abs(sum(shown[: place + 1]) - (ends[place] + offset)) < 1 + Fraction(2, PARTS)


@pytest.mark.parametrize("repeats", [1, 2])
def test_1_to_8_workers_show_the_same_images_from_any_step_on(repeats):
    labels = split()
    used = np.flatnonzero(np.random.default_rng(1).random(1000) < 0.8)
    draws = draws_of("equal", labels, used)
    stored = EpochOrder(np.diff(np.searchsorted(used, np.append(np.arange(0, 1000, 64), 1000))), used, None)
    for epoch in (0, 3):
        order = EpochOrder(stored.groups, used, ("id", 0, epoch), repeats, draws)
        assert order.images == stored.images
        wanted = np.arange(order.images // 64 * 64)
        rows, copies = order.at(wanted)
        assert set(rows.tolist()) <= set(used.tolist())
        # Equal images of an epoch differ in their augmentation.
        assert max(Counter(zip(rows.tolist(), copies.tolist(), strict=True)).values()) == 1
        if repeats == 1:
            shown = np.bincount(order.at(np.arange(order.images))[0], minlength=1000)
            assert shown.tolist() == np.bincount(draws.of_rows(epoch)[1], minlength=1000).tolist()
        for workers in (1, 2, 3, 8):
            parts = [positions_of(step, 64, rank, workers) for step in (2, 3) for rank in range(workers)]
            found = {int(position): order.at(np.array([position])) for part in parts for position in part}
            assert sorted(found) == [*range(128, 256)]
            assert all(found[place][0][0] == rows[place] and found[place][1][0] == copies[place] for place in found)


def test_an_order_of_another_epoch_is_that_epochs():
    labels = split()
    draws, groups = draws_of("square_root", labels), np.full(15, 64)
    groups = np.append(groups, 40)
    first = EpochOrder(groups, None, ("id", 0, 0), balance=draws)
    later = replace(first, shuffle=("id", 0, 5))
    direct = EpochOrder(groups, None, ("id", 0, 5), balance=draws)
    positions = np.arange(1000)
    assert [each.tolist() for each in later.at(positions)] == [each.tolist() for each in direct.at(positions)]
    assert not np.array_equal(later.at(positions)[0], first.at(positions)[0])


def test_of_several_labels_an_image_counts_as_its_rarest_class():
    rng = np.random.default_rng(0)
    states = (rng.random((1000, 4)) < (0.6, 0.3, 0.05, 0.0)).astype(np.int8)
    states[rng.random((1000, 4)) < 0.1] = -1  # unknown
    counts = (states == 1).sum(0)
    draws, used = draws_of("equal", states), np.arange(1000)
    rarest = np.where((states == 1).any(1), np.where(states == 1, -counts, -9999).argmax(1), 4)
    factors = np.append(1 / np.maximum(counts, 1), 1 / counts.max())[rarest]  # an image without any: the least
    expected = 1000 * factors / factors.sum()
    seen = np.zeros((30, 1000), int)
    for epoch in range(30):
        seen[epoch] = draws.times(epoch)
        assert seen[epoch].sum() == 1000
        for circle in range(5):
            own = seen[epoch, rarest == circle]
            assert len(own) == 0 or np.ptp(own) <= 1
        for label, each in enumerate(class_draws(states, used, seen[epoch], 4)):
            own = seen[epoch, states[:, label] == 1]
            assert each == (len(own), own.sum(), (own > 1).sum(), (own == 0).sum())
    assert np.abs(seen.mean(axis=0) - expected).max() < 1 / 15
    shown = seen.mean(axis=0)
    assert shown[states[:, 2] == 1].mean() > 3 * shown[states[:, 0] == 1].mean()


@pytest.mark.ray
def test_workers_on_ray_show_the_images_of_the_order(tmp_path, ray_cluster):
    dataset = write(tmp_path / "data", [jpeg(index) for index in range(400)], per_shard=150, row_group=30)
    stream = train_stream(dataset, balance={"a": 6.0, "b": 0.25}, batch=24)
    for workers, step in ((1, 0), (2, 5)):
        images = images_of_epoch(stream, workers, epoch=1, step=step)
        assert sorted(images) == [*range(24 * step, stream.steps * 24)]
        rows = stream.order(1).at(np.array(sorted(images)))[0]
        assert [images[place][0] for place in sorted(images)] == rows.tolist()
        shown = Counter(label for _, label, _ in images.values())
        assert shown[0] > 2 * shown[2] > 4 * shown[1]
    # Equal images of an epoch look different.
    [(row, _), *_] = Counter(row for row, _, _ in images.values()).most_common()
    looks = [pixels for other, _, pixels in images.values() if other == row]
    assert len(set(looks)) == len(looks) > 1


def test_the_plan_says_how_often_each_class_is_shown(tmp_path, capsys):
    dataset = write(tmp_path / "data", [jpeg(index) for index in range(70)])
    words = [f"data.url={dataset.url}", "data.val=null", "optim.batch=8", "data.balance={a: 4}", "model.image_size=32"]
    assert main(["train", "demo", *words, "--dry-run"]) == 0
    text = capsys.readouterr().err
    assert re.search(r"\n  class +images +shown +repeated +left out\n", text)
    assert re.search(r"\n  a +10 +28 +10 +0\n", text)
    assert re.search(r"\n  g +10 +7 +0 +3\n", text)


def test_settings_that_do_not_fit_are_one_message():
    labels = split()
    with pytest.raises(ConfigError, match=r"data.balance: got rares, which is no class .*did you mean rare"):
        draws_of({"rares": 2.0}, labels)
    for overrides, message in (
        (["data.balance=even"], "data.balance"),
        (["data.balance={rare: 0}"], "data.balance"),
        (["data.balance=equal", "task=masked", "model.num_classes=null"], "data.balance does not apply to task masked"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            load_run(None, overrides)
        assert "\n" not in str(error.value)
