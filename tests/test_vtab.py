"""VTAB-1k: the means printed in the ViT paper, splits that follow the keys, and the choice of one setting."""

from hashlib import sha256

import numpy as np
import pytest

from vitray.errors import ConfigError
from vitray.evaluation import vtab
from vitray.evaluation.vtab import GROUPS, PAPER_SETTING, SWEEP, Setting, best_setting, mean_score, split_rows

TASKS = [dataset for datasets in GROUPS.values() for dataset in datasets]
# Table 9 of the ViT paper, ViT-H/14 and ViT-L/16, both pre-trained on JFT.
TABLE = {
    77.6: "95.3 85.5 75.2 99.7 97.2 65.0 88.9 83.3 96.7 91.4 76.6 91.7 63.8 53.1 79.4 63.3 84.5 33.2 51.2",
    76.3: "95.4 81.9 74.3 99.7 96.7 63.5 87.4 83.6 96.5 89.7 77.1 86.4 63.1 49.7 74.5 60.5 82.2 36.2 51.1",
}
KEYS = [f"image {row}" for row in range(1500)]


@pytest.mark.parametrize("printed", TABLE)
def test_the_mean_of_19_tasks_is_the_one_printed_in_the_paper(printed):
    scores = dict(zip(TASKS, map(float, TABLE[printed].split()), strict=True))
    found = mean_score(scores)
    assert round(found.mean, 1) == printed
    assert (found.datasets, found.missing) == (19, ())
    assert found.groups["natural"] == pytest.approx(np.mean(list(scores.values())[:7]))
    assert found.groups["specialized"] == pytest.approx(np.mean(list(scores.values())[7:11]))
    assert found.groups["structured"] == pytest.approx(np.mean(list(scores.values())[11:]))


def test_missing_datasets_are_named_and_own_groups_are_possible():
    found = mean_score({"pets": 0.9, "dmlab": 0.5})
    assert (found.mean, found.groups) == (0.7, {"natural": 0.9, "structured": 0.5})
    assert len(found.missing) == 17
    assert "svhn" in found.missing
    assert mean_score({"a": 1.0, "b": 0.0}, {"mine": ["a", "b"]}) == (0.5, {"mine": 0.5}, 2, ())


def test_a_split_takes_the_smallest_hashes():
    split = split_rows("pets", KEYS)
    order = sorted(range(1500), key=lambda row: sha256(f"pets\0{KEYS[row]}".encode()).digest())
    assert split.train.tolist() == sorted(order[:800])
    assert split.development.tolist() == sorted(order[800:1000])
    assert len(set(split.both.tolist())) == 1000


def test_a_split_follows_the_keys_and_the_dataset():
    order = np.random.default_rng(0).permutation(1500)
    shuffled = [KEYS[row] for row in order]
    one, other = split_rows("pets", KEYS), split_rows("pets", shuffled)
    assert {KEYS[row] for row in one.train} == {shuffled[row] for row in other.train}
    assert {KEYS[row] for row in one.development} == {shuffled[row] for row in other.development}
    assert not np.array_equal(one.train, split_rows("dtd", KEYS).train)
    assert len(split_rows("pets", KEYS[:1000]).both) == 1000


def test_the_sweep_has_two_learning_rates_and_two_schedules_around_the_papers_setting():
    assert (len(SWEEP), len({each.lr for each in SWEEP}), len({each.steps for each in SWEEP})) == (4, 2, 2)
    assert PAPER_SETTING in SWEEP
    assert (*PAPER_SETTING, vtab.BATCH, vtab.MOMENTUM, vtab.IMAGE_SIZE) == (0.01, 2500, 512, 0.9, 384)


def test_one_setting_is_best_for_all_datasets():
    scores = {
        Setting(0.01, 500): {"pets": 0.9, "dtd": 0.1},
        Setting(0.01, 2500): {"pets": 0.6, "dtd": 0.6},
        Setting(0.003, 500): {"pets": 0.6, "dtd": 0.6},
    }
    assert best_setting(scores) == Setting(0.01, 2500)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_rows("pets", KEYS[:999]), r"pets: 999 training images; wanted at least 1,000, 800 \+ 200"),
        (lambda: split_rows("pets", [*KEYS, KEYS[0]]), "pets: 1 keys occur twice"),
        (lambda: mean_score({}), "scores: none"),
        (lambda: mean_score({"pet": 1.0}), "'pet' is in no group; .*nearest: pets"),
        (lambda: mean_score({"a": 1.0}, {"x": ["a"], "y": ["a"]}), "'a' is in two"),
        (lambda: best_setting({}), "sweep: no score"),
        (lambda: best_setting({SWEEP[0]: {"a": 1.0}, SWEEP[1]: {"b": 1.0}}), r"lacks or adds \['a', 'b'\]"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
