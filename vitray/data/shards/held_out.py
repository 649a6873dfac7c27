"""The images of train that a run evaluates and does not train on: a share of them, or one of several folds."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitray.config.training import Data, Fold
from vitray.data.shards.manifest import Dataset, read_column, row_keys
from vitray.errors import ConfigError


def held_out(dataset: Dataset, data: Data) -> np.ndarray | None:
    """Return True for each row of data.train that is held out; None where all are trained on."""
    if data.fold is not None:
        return _numbers(dataset, data.train, data.fold) == data.fold.index
    if not data.holdout:
        return None
    # A larger share includes the images of a smaller one.
    limit = int(data.holdout * 2**64)
    return np.array([_hash(key) < limit for key in row_keys(dataset, data.train)])


def _numbers(dataset: Dataset, split: str, fold: Fold) -> np.ndarray:
    def column(name: str) -> list[Any]:
        return [value for shard in dataset.splits[split].shards for value in read_column(dataset, shard, name)]

    if fold.group is not None and fold.group not in dataset.others:
        known = ", ".join(dataset.others) or "none"
        keep = f"`vitray shard ... 'columns=[{fold.group}]'` keeps one of the source"
        raise ConfigError(f"data.fold.group: got {fold.group}, and the columns of {dataset.url} are {known}; {keep}")
    keys, labels = list(row_keys(dataset, split)), column(dataset.columns.label)
    lists = [each or () if dataset.labels == "several" else (each,) for each in labels]
    groups = None if fold.group is None else column(fold.group)
    numbers = fold_numbers(keys, lists, fold.of, groups)
    found: dict[int, set[int]] = {}
    for number, classes in zip(numbers.tolist(), lists, strict=True):
        for label in classes:
            found.setdefault(label, set()).add(number)
    for label, folds in sorted(found.items()):
        if len(folds) == 1:
            alone, name = "one group" if groups else "one image", dataset.classes[label]
            raise ConfigError(
                f"data.fold: all images of class {name} are in fold {min(folds)}, so that a run on the others does not"
                f" learn it; expected classes of more than {alone}"
            )
    return numbers


def fold_numbers(
    keys: Sequence[str], labels: Sequence[Sequence[int]], of: int, groups: Sequence[object] | None = None
) -> np.ndarray:
    """Return the fold of each image: folds of equal sizes, with equal shares of each class.

    The folds depend on the set of images, not on their order. Images of one class each and without groups are dealt to
    the folds in the order of a hash of their keys, each class from where the one before it ended: the counts of a class
    differ by at most one, and so do those of all images. Groups, which may be of any size, and images of several
    classes go as a whole, the largest first, to the fold whose shares of their classes are the smallest.
    """
    if groups is None and all(len(each) == 1 for each in labels):
        order = sorted(range(len(keys)), key=lambda row: (labels[row][0], _hash(keys[row]), keys[row]))
        numbers = np.empty(len(keys), np.int64)
        numbers[order] = np.arange(len(keys)) % of
        return numbers
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups or [None] * len(keys)):
        # An image without a group is one of its own.
        members.setdefault(f"key {keys[row]}" if group is None else f"group {group}", []).append(row)
    if len(members) < of:
        raise ConfigError(f"data.fold.of: got {of}, expected at most {len(members)}, the number of groups")
    total = np.maximum(1, np.bincount(_joined(labels)))
    counts, sizes = np.zeros((of, len(total))), np.zeros(of, np.int64)
    numbers = np.empty(len(keys), np.int64)
    weights = {name: sum(map(len, (labels[row] for row in rows))) for name, rows in members.items()}
    for name in sorted(members, key=lambda name: (-len(members[name]), -weights[name], _hash(name), name)):
        rows = members[name]
        own = np.bincount(_joined([labels[row] for row in rows]), minlength=len(total))
        present = np.flatnonzero(own)
        # What the sum of squared shares grows by.
        shares, added = counts[:, present] / total[present], own[present] / total[present]
        growth = ((2 * shares + added) * added).sum(axis=1)
        fold = min(range(of), key=lambda number: (round(float(growth[number]), 12), int(sizes[number]), number))
        counts[fold] += own
        sizes[fold] += len(rows)
        numbers[rows] = fold
    return numbers


def _joined(labels: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array([label for each in labels for label in each], np.int64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
