"""The VTAB-1k protocol: 800 + 200 training images of each dataset, the sweep of the ViT paper, the mean by groups.

VTAB: Zhai et al., 2019. The ViT paper fine-tunes all tasks with one setting: the better of two learning rates and two
schedules by the mean score on the 200 images, then trained on all 1,000.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from vitray.errors import ConfigError, nearest

TRAIN, DEVELOPMENT = 800, 200
GROUPS: dict[str, tuple[str, ...]] = {
    "natural": ("caltech101", "cifar100", "dtd", "flowers102", "pets", "sun397", "svhn"),
    "specialized": ("camelyon", "eurosat", "resisc45", "retinopathy"),
    "structured": (
        "clevr_count",
        "clevr_distance",
        "dmlab",
        "dsprites_location",
        "dsprites_orientation",
        "kitti_distance",
        "smallnorb_azimuth",
        "smallnorb_elevation",
    ),
}


class Setting(NamedTuple):
    """One point of the sweep; the rest is SGD with momentum 0.9, cosine, no weight decay, clipping at norm 1."""

    lr: float
    steps: int


# The paper gives the winner (0.01 and 2,500 steps) and the size of the sweep, not the other values: these are the
# neighbours in its Table 4.
SWEEP = (Setting(0.003, 500), Setting(0.003, 2500), Setting(0.01, 500), Setting(0.01, 2500))
PAPER_SETTING = Setting(0.01, 2500)
BATCH, MOMENTUM, IMAGE_SIZE = 512, 0.9, 384


class Split(NamedTuple):
    """The rows of a dataset's training images that VTAB-1k uses, ascending."""

    train: np.ndarray
    development: np.ndarray

    @property
    def both(self) -> np.ndarray:
        """The rows of the final training."""
        return np.sort(np.concatenate([self.train, self.development]))


class VtabMean(NamedTuple):
    """The mean score over datasets, and by group."""

    mean: float
    """Over datasets, not over groups."""
    groups: dict[str, float]
    datasets: int
    missing: tuple[str, ...]
    """The datasets of the groups without a score: with any, the mean is not VTAB's."""


def split_rows(dataset: str, keys: Sequence[str], train: int = TRAIN, development: int = DEVELOPMENT) -> Split:
    """Return the rows with the smallest hashes of (dataset, key): 800 to train on, the next 200 to choose settings.

    The images are the same in any order of the rows.
    """
    wanted = train + development
    if train < 1 or development < 1 or len(keys) < wanted:
        raise ConfigError(
            f"{dataset}: {len(keys):,} training images; wanted at least {wanted:,}, {train} + {development}"
        )
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{dataset}: {len(keys) - len(set(keys))} keys occur twice; wanted one key for each image")
    digests = [sha256(f"{dataset}\0{key}".encode("utf-8", "surrogateescape")).digest() for key in keys]
    order = np.array(sorted(range(len(keys)), key=digests.__getitem__), dtype=np.int64)
    return Split(np.sort(order[:train]), np.sort(order[train:wanted]))


def best_setting(scores: Mapping[Setting, Mapping[str, float]]) -> Setting:
    """Return the setting with the highest mean development score over the datasets; the first of equal ones."""
    if not scores:
        raise ConfigError("sweep: no score; wanted {setting: {dataset: score}}")
    datasets = set(next(iter(scores.values())))
    for setting, values in scores.items():
        differing = datasets.symmetric_difference(values)
        if differing or not values:
            raise ConfigError(f"sweep: {setting} lacks or adds {sorted(differing)}; wanted the same datasets for all")
    return max(scores, key=lambda setting: float(np.mean(list(scores[setting].values()))))


def mean_score(scores: Mapping[str, float], groups: Mapping[str, Sequence[str]] = GROUPS) -> VtabMean:
    """Return the mean of {dataset: score}, and that of each group with a score."""
    members = [dataset for datasets in groups.values() for dataset in datasets]
    if not scores:
        raise ConfigError("scores: none; wanted {dataset: score}")
    for dataset in scores:
        if dataset not in members:
            raise ConfigError(f"scores: {dataset!r} is in no group; wanted one of {members}{nearest(dataset, members)}")
    if len(set(members)) < len(members):
        double = next(dataset for dataset in members if members.count(dataset) > 1)
        raise ConfigError(f"groups: {double!r} is in two; wanted each dataset in one")
    means = {
        group: float(np.mean([scores[dataset] for dataset in datasets if dataset in scores]))
        for group, datasets in groups.items()
        if any(dataset in scores for dataset in datasets)
    }
    missing = tuple(dataset for dataset in members if dataset not in scores)
    return VtabMean(float(np.mean(list(scores.values()))), means, len(scores), missing)
