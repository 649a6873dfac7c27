"""The tasks of a VTAB-1k evaluation: each a dataset with its group, of which 1,000 training images are kept."""

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitray.data.augment.decode import UndecodableImage
from vitray.data.shards.manifest import (
    MANIFEST,
    Dataset,
    Duplicates,
    Rejects,
    Shard,
    Split,
    open_dataset,
    save_dataset,
)
from vitray.errors import ConfigError
from vitray.evaluation.evaluate import open_training
from vitray.inference.images import EncodedImage, ImageSet, open_images
from vitray.system import storage

TRAIN, DEVELOPMENT = 800, 200
# The splits of a subset, named as VTAB names them.
TRAIN_SPLIT, DEVELOPMENT_SPLIT, BOTH_SPLIT = "train800", "val200", "train800val200"
# Images that are read at a time, and rows of a row group.
READ_AT_ONCE, ROW_GROUP = 200, 50


class Task(NamedTuple):
    """A dataset and its group."""

    name: str
    """The end of the dataset's address."""
    group: str
    order: np.ndarray
    """The training images by ascending hash."""
    train: ImageSet
    test: ImageSet


def open_tasks(words: Sequence[str], train_split: str, split: str) -> list[Task]:
    """Return the tasks that these words name as GROUP=DATA."""
    tasks = []
    for word in words:
        group, _, url = word.partition("=")
        if not re.fullmatch(r"[\w-]+", group) or not url:
            raise ConfigError(
                f"--vtab: got {word!r}, expected GROUP=DATA, as in natural=data/pets; settings come before --vtab"
            )
        test = open_images(url, split)
        if not len(test):
            raise ConfigError(f"{test.url}: {test.split} has no images")
        train = open_training(test, train_split)
        if unknown := sorted(set(test.classes) - set(train.classes)):
            raise ConfigError(f"{test.url}: {test.split} has the class {unknown[0]!r}, which {train.split} lacks")
        if same := next((task for task in tasks if task.name == train.name), None):
            raise ConfigError(f"--vtab: {same.train.url} and {train.url} have one name; expected distinct names")
        tasks.append(Task(train.name, group, hash_order(train.name, train.read_names()), train, test))
    return tasks


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


def write_subset(task: Task, folder: str) -> Dataset:
    """Write the 1,000 images with the smallest hashes as a dataset below a folder, or return the one that is there.

    Its splits are 800 images, 200, and both. Images that cannot be decoded are left out and listed in its settings.
    """
    url = storage.join(folder, f"{task.name}-{task.train.identity[:12]}")
    if storage.exists(storage.join(url, MANIFEST)):
        return open_dataset(url)
    left_out: list[str] = []
    images = list(islice(_decodable(task, left_out), TRAIN + DEVELOPMENT))
    if len(images) < TRAIN + DEVELOPMENT:
        raise ConfigError(
            f"{task.train.url}: {len(images):,} images of {task.train.split} can be decoded; expected at least"
            f" {TRAIN + DEVELOPMENT:,}: {', '.join(left_out[:5])}"
        )
    mean, std = _colors(images[:TRAIN])
    train = _write_split(url, TRAIN_SPLIT, images[:TRAIN], len(task.train.classes))
    development = _write_split(url, DEVELOPMENT_SPLIT, images[TRAIN:], len(task.train.classes))
    counts = tuple(map(sum, zip(train.class_counts, development.class_counts, strict=True)))
    both = Split(shards=(*train.shards, *development.shards), class_counts=counts)
    dataset = Dataset(
        splits={TRAIN_SPLIT: train, DEVELOPMENT_SPLIT: development, BOTH_SPLIT: both},
        classes=task.train.classes,
        mean=mean,
        std=std,
        source=task.train.url,
        seed=0,
        settings={"split": task.train.split, "identity": task.train.identity, "left_out": left_out},
        rejects=Rejects(count=len(left_out), reasons={}),
        duplicates=Duplicates(within={}, across=0, removed=0),
        url=url,
    )
    save_dataset(dataset)
    return dataset


def _decodable(task: Task, left_out: list[str]) -> Iterator[EncodedImage]:
    """Yield the images that can be decoded, by ascending hash, and list the others."""
    for start in range(0, len(task.order), READ_AT_ONCE):
        for image in task.train.read_labeled(task.order[start : start + READ_AT_ONCE].tolist()):
            try:
                image.pixels()
            except UndecodableImage as error:
                left_out.append(f"{image.key} ({error})")
                continue
            yield image


def _colors(images: Sequence[EncodedImage]) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return mean and deviation of red, green and blue over all pixels."""
    pixels, sums_C, squares_C = 0, np.zeros(3), np.zeros(3)
    for image in images:
        pixels_PC = image.pixels().reshape(-1, 3) / 255
        pixels += len(pixels_PC)
        sums_C += pixels_PC.sum(0)
        squares_C += (pixels_PC**2).sum(0)
    mean_C = sums_C / pixels
    std_C = np.sqrt(np.maximum(squares_C / pixels - mean_C**2, 0))
    (red, green, blue), (red_std, green_std, blue_std) = mean_C.tolist(), std_C.tolist()
    return (red, green, blue), (red_std, green_std, blue_std)


def _write_split(url: str, split: str, images: Sequence[EncodedImage], num_classes: int) -> Split:
    columns = {
        "image": pa.array([image.content for image in images], pa.binary()),
        "label": pa.array([image.label for image in images], pa.int64()),
        "key": pa.array([image.key for image in images], pa.string()),
    }
    pq.write_table(pa.table(columns), content := io.BytesIO(), row_group_size=ROW_GROUP)
    name, data = f"{split}.parquet", content.getvalue()
    storage.write_bytes(storage.join(url, name), data)
    groups = tuple(min(ROW_GROUP, len(images) - at) for at in range(0, len(images), ROW_GROUP))
    labels = Counter(image.label for image in images)
    digest = sha256(data).hexdigest()
    shard = Shard(name=name, rows=len(images), bytes=len(data), sha256=digest, row_groups=groups)
    return Split(shards=(shard,), class_counts=tuple(labels[label] for label in range(num_classes)))
