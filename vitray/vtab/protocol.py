"""The VTAB-1k protocol: 1,000 training images of each dataset, one setting for all of them, the mean by groups.

VTAB: Zhai et al., 2019. The ViT paper fine-tunes all tasks with one setting (B.1.1): the better of two learning rates
and two schedules by the mean score on 200 of the images, then trained on all 1,000.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from vitray.errors import ConfigError

TRAIN, DEVELOPMENT = 800, 200
TASKS = (
    *("caltech101", "cifar100", "dtd", "flowers102", "pets", "sun397", "svhn"),
    *("camelyon", "eurosat", "resisc45", "retinopathy"),
    *("clevr_count", "clevr_distance", "dmlab", "dsprites_location", "dsprites_orientation", "kitti_distance"),
    *("smallnorb_azimuth", "smallnorb_elevation"),
)
"""The 19 of VTAB: 7 natural, 4 specialized, 8 structured."""


class Setting(NamedTuple):
    """One point of the sweep."""

    lr: float
    steps: int

    @property
    def warmup(self) -> int:
        """Steps of the warm-up in the authors' code: 500 of 2,500, and 100 of 500."""
        return self.steps // 5


# The paper gives the winner (0.01 and 2,500 steps) and the size of the sweep, not the other values: these are the
# neighbors in its Table 4.
SWEEP = (Setting(0.003, 500), Setting(0.003, 2500), Setting(0.01, 500), Setting(0.01, 2500))


class VtabMean(NamedTuple):
    """The mean score over datasets, and by group."""

    mean: float
    """Over datasets, not over groups."""
    groups: dict[str, float]


def hash_order(dataset: str, names: Sequence[str]) -> np.ndarray:
    """Return the rows by ascending hash of (dataset, name): the same images in any order of the rows."""
    wanted = TRAIN + DEVELOPMENT
    if len(names) < wanted:
        raise ConfigError(
            f"{dataset}: {len(names):,} training images; expected at least {wanted:,}, {TRAIN} + {DEVELOPMENT}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"{dataset}: {len(names) - len(set(names))} names occur twice; expected one for each image")
    digests = [sha256(f"{dataset}\0{name}".encode("utf-8", "surrogateescape")).digest() for name in names]
    return np.array(sorted(range(len(names)), key=digests.__getitem__), dtype=np.int64)


def best_setting(scores: Mapping[Setting, Mapping[str, float]]) -> Setting:
    """Return the setting with the highest mean development score over the datasets; the first of equal ones."""
    return max(scores, key=lambda setting: float(np.mean(list(scores[setting].values()))))


def mean_score(scores: Mapping[str, float], groups: Mapping[str, str]) -> VtabMean:
    """Return the mean of {dataset: score}, and that of each group in {dataset: group}."""
    members = {group: [scores[name] for name in scores if groups[name] == group] for group in groups.values()}
    means = {group: float(np.mean(values)) for group, values in members.items()}
    return VtabMean(float(np.mean(list(scores.values()))), means)
