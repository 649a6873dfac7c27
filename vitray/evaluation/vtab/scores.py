"""The VTAB-1k protocol in numbers: the settings it chooses from, and the scores of networks over tasks and seeds.

VTAB: Zhai et al., 2019. The ViT paper fine-tunes all tasks with one setting (B.1.1): the better of two learning rates
and two schedules by the mean score on 200 of the images, then trained on all 1,000.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.inference.network_spec import NetworkSpec
from vitray.metrics.intervals import Interval, wilson

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


def best_setting(scores: Mapping[Setting, Mapping[str, float]]) -> Setting:
    """Return the setting with the highest mean of {dataset: development score}; the first of equal ones."""
    return max(scores, key=lambda setting: float(np.mean(list(scores[setting].values()))))


class VtabMean(NamedTuple):
    """The mean score over datasets, and by group."""

    mean: float
    """Over datasets, not over groups."""
    groups: dict[str, float]


def mean_score(scores: Mapping[str, float], groups: Mapping[str, str]) -> VtabMean:
    """Return the mean of {dataset: score}, and that of each group in {dataset: group}."""
    members = {group: [scores[name] for name in scores if groups[name] == group] for group in groups.values()}
    means = {group: float(np.mean(values)) for group, values in members.items()}
    return VtabMean(float(np.mean(list(scores.values()))), means)


class TaskResult(NamedTuple):
    """One dataset: the networks fine-tuned on 1,000 of its images, one for each seed, on its test images."""

    name: str
    group: str
    url: str
    split: str
    identity: str
    """Of the test images."""
    classes: int
    images: int
    """Test images that count; the same for each seed."""
    left_out: int
    hits: tuple[int, ...]
    """For each seed."""

    @property
    def scores(self) -> list[float]:
        """The top-1 of each seed."""
        return [hits / self.images for hits in self.hits]

    @property
    def interval(self) -> Interval:
        """Wilson's interval of the mean top-1, for the images alone."""
        return wilson(sum(self.hits) / len(self.hits), self.images)

    def flat(self) -> dict[str, Any]:
        """Return all numbers by name."""
        interval = self.interval
        return {
            "dataset": self.name,
            "group": self.group,
            "url": self.url,
            "split": self.split,
            "identity": self.identity,
            "classes": self.classes,
            "images": self.images,
            "left_out": self.left_out,
            "top1": interval.estimate,
            "top1_low": interval.low,
            "top1_high": interval.high,
            "top1_std": deviation(self.scores),
            "seeds": self.scores,
        }


class NetworkResult(NamedTuple):
    """One network on all datasets."""

    name: str
    spec: NetworkSpec
    setting: Setting
    """The best of the sweep."""
    development: Mapping[Setting, Mapping[str, float]]
    """{setting: {dataset: top-1 on the 200 images}}."""
    tasks: Sequence[TaskResult]

    @property
    def mean(self) -> VtabMean:
        """The mean over datasets, and by group, of the means over seeds."""
        return self._mean([float(np.mean(task.scores)) for task in self.tasks])

    @property
    def seed_means(self) -> list[VtabMean]:
        """The means of each seed."""
        return [self._mean(scores) for scores in zip(*(task.scores for task in self.tasks), strict=True)]

    def _mean(self, scores: Sequence[float]) -> VtabMean:
        names = [task.name for task in self.tasks]
        return mean_score(dict(zip(names, scores, strict=True)), {task.name: task.group for task in self.tasks})

    def group_std(self, group: str) -> float | None:
        """Return the deviation of a group's mean over the seeds."""
        return deviation([mean.groups[group] for mean in self.seed_means])

    def flat(self) -> dict[str, Any]:
        """Return all numbers by name."""
        mean, spec = self.mean, self.spec
        values: dict[str, Any] = {"model": self.name, "url": spec.url, "identity": spec.identity}
        values |= {"network": spec.network, "vtab": mean.mean}
        values["vtab_std"] = deviation([each.mean for each in self.seed_means])
        for group, score in mean.groups.items():
            values |= {f"vtab_{group}": score, f"vtab_{group}_std": self.group_std(group)}
        values |= {"lr": self.setting.lr, "steps": self.setting.steps, "tasks": [task.flat() for task in self.tasks]}
        values["sweep"] = [
            {**setting._asdict(), "mean": float(np.mean(list(scores.values()))), "scores": dict(scores)}
            for setting, scores in self.development.items()
        ]
        return values


class VtabEvaluation(NamedTuple):
    """Networks on one set of datasets."""

    results: Sequence[NetworkResult]
    seeds: int
    settings: Mapping[str, Any]
    """{dotted setting: value} that all fine-tunings share."""
    command: str

    @property
    def missing(self) -> list[str]:
        """The tasks of VTAB without a dataset of their name: with any, the mean is not VTAB's."""
        return [name for name in TASKS if name not in {task.name for task in self.results[0].tasks}]

    def flat(self) -> dict[str, Any]:
        """Return everything for JSON; the scores of a single network are at the top."""
        head: dict[str, Any] = {"datasets": len(self.results[0].tasks), "seeds": self.seeds}
        head |= {"missing_of_vtab": self.missing, "command": self.command, "settings": dict(self.settings)}
        if len(self.results) == 1:
            return head | self.results[0].flat()
        return head | {"models": [result.flat() for result in self.results]}


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None for one value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
