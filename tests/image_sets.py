"""Small sets of synthetic images for tests: a dataset of ours without Ray, and a folder of class folders."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vitray.config import Model, Run
from vitray.data.shards.demo import CLASSES, demo_item
from vitray.data.shards.manifest import Dataset, Duplicates, Rejects, Shard, Split, open_dataset, save_dataset
from vitray.models.network import build_network
from vitray.weights import save_model

SHAPES = CLASSES["shape"]


def write_dataset(folder: Path, sizes: dict[str, int], corrupt: int = 0, classes: tuple[str, ...] = SHAPES) -> Dataset:
    """Write a dataset of synthetic images, {split: images}, in shards of 40; the first `corrupt` of each are broken."""
    folder.mkdir(parents=True)
    splits, first = {}, 0
    for split, count in sizes.items():
        items = [demo_item(first + index, 0, 32, "shape") for index in range(count)]
        items = [(b"none" if at < corrupt else image, label) for at, (image, label) in enumerate(items)]
        shards = []
        for start in range(0, count, 40):
            name = f"{split}-{start:05d}.parquet"
            part = items[start : start + 40]
            keys = [f"{split}:{start + at}" for at in range(len(part))]
            columns = {"image": [image for image, _ in part], "label": [label for _, label in part], "key": keys}
            pq.write_table(pa.table(columns), folder / name, row_group_size=16)
            shards.append(shard_of(folder / name))
        labels = Counter(label for _, label in items)
        splits[split] = Split(shards=tuple(shards), class_counts=tuple(labels[label] for label in range(len(classes))))
        first += count
    return save_splits(folder, splits, classes)


def shard_of(path: Path) -> Shard:
    """Describe a file as a shard."""
    content, layout = path.read_bytes(), pq.ParquetFile(path).metadata
    groups = tuple(layout.row_group(group).num_rows for group in range(layout.num_row_groups))
    sha256 = hashlib.sha256(content).hexdigest()
    return Shard(name=path.name, rows=layout.num_rows, bytes=len(content), sha256=sha256, row_groups=groups)


def save_splits(folder: Path, splits: dict[str, Split], classes: tuple[str, ...]) -> Dataset:
    """Write the manifest of a dataset."""
    dataset = Dataset(
        splits=splits,
        classes=classes,
        mean=(0.5, 0.5, 0.5),
        std=(0.2, 0.2, 0.2),
        source="test",
        seed=0,
        settings={},
        rejects=Rejects(count=0, reasons={}),
        duplicates=Duplicates(within={}, across=0, removed=0),
        url=str(folder),
    )
    save_dataset(dataset)
    return open_dataset(str(folder))


def write_folder(folder: Path, count: int) -> Path:
    """Write synthetic images into class folders."""
    for index in range(count):
        content, label = demo_item(index, 0, 32, "shape")
        (folder / SHAPES[label]).mkdir(parents=True, exist_ok=True)
        (folder / SHAPES[label] / f"{index:04d}.jpg").write_bytes(content)
    return folder


def write_network(folder: Path, seed: int = 0, classes: tuple[str, ...] | None = SHAPES, **settings: Any) -> Path:
    """Write the model folder of a seeded network of 32 px."""
    torch.manual_seed(seed)
    num_classes = None if classes is None else len(classes)
    model = Model.model_validate({"name": "vit_u2x1_8", "image_size": 32, "num_classes": num_classes} | settings)
    run = Run().replace({"model": model.model_dump(mode="json")})
    vit = build_network(run.model)
    if classes is not None:
        torch.nn.init.normal_(vit.head.weight, std=0.5)
    save_model(str(folder), run, vit, classes)
    return folder
