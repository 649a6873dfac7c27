"""python experiments/measure_loader.py IMAGES: the throughput of `vitray.Loader` beside the loaders that people use.

IMAGES is a folder of class folders. All decode with as many worker processes, crop, flip and normalize, and give float
tensors; each reads its own format of the same files, which is written first. Loaders that are not installed are left
out: `pip install torchdata mosaicml-streaming litdata` brings them.
"""

import argparse
import importlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

from vitray import Loader
from vitray.bench.ingest import cpu_seconds_since, tree_cpu_seconds
from vitray.data.shards import read_request, write_dataset
from vitray.system.scratch import temporary_folder
from vitray.system.timing import circumstances, in_rounds, ratio_of, spread_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BASELINE = "torch DataLoader"
# Yields the sizes of an epoch's batches.
Epochs = Callable[[], Iterator[int]]


class Settings(NamedTuple):
    """What all loaders share."""

    images: Path
    folder: Path
    size: int
    batch: int
    workers: int

    @property
    def transform(self) -> Callable[[Image.Image], torch.Tensor]:
        """The augmentation of those that take a function."""
        crop = transforms.RandomResizedCrop(self.size, interpolation=transforms.InterpolationMode.BICUBIC)
        flip, rest = transforms.RandomHorizontalFlip(), [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        return transforms.Compose([crop, flip, *rest])

    @property
    def files(self) -> ImageFolder:
        """The files and their labels."""
        return ImageFolder(str(self.images), self.transform, loader=default_loader)


class Timing(NamedTuple):
    """Seconds of an epoch: until the first batch, of wall and of CPU."""

    first: float
    wall: float
    cpu: float


class Transformed:
    """Turns a stored row into the tensors of an image; a class, as worker processes get it pickled."""

    def __init__(self, settings: Settings) -> None:
        self.transform = settings.transform

    def __call__(self, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
        """Return the image and its label."""
        with Image.open(io.BytesIO(row["image"])) as image:
            return self.transform(image.convert("RGB")), row["label"]

    def batch(self, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Return the images and the labels of some rows."""
        return default_collate([self(row) for row in rows])


def vitray_loader(settings: Settings) -> Epochs:
    """Return our loader, on a dataset of Parquet shards."""
    place = str(settings.folder / "vitray")
    write_dataset(read_request(str(settings.images), place, splits=["train"], overrides=["kind=folder"]))
    loader = Loader(place, batch=settings.batch, size=settings.size, decoders=settings.workers, reader="processes")
    return partial(_sizes, loader)


def torch_loader(settings: Settings, kind: type = DataLoader) -> Epochs:
    """Return torch's loader on the files, or one of its kind."""
    options = {"shuffle": True, "drop_last": True, "persistent_workers": True, "num_workers": settings.workers}
    return partial(_sizes, kind(settings.files, settings.batch, **options))


def stateful_loader(settings: Settings) -> Epochs:
    """Return torchdata's loader, which resumes."""
    return torch_loader(settings, importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader)


def mosaic_loader(settings: Settings) -> Epochs:
    """Return Mosaic's Streaming on its shards."""
    streaming, place = importlib.import_module("streaming"), str(settings.folder / "mosaic")
    with streaming.MDSWriter(out=place, columns={"image": "bytes", "label": "int"}) as writer:
        for path, label in settings.files.samples:
            writer.write({"image": Path(path).read_bytes(), "label": label})
    images = streaming.StreamingDataset(local=place, shuffle=True, batch_size=settings.batch)
    options = {"drop_last": True, "persistent_workers": True, "num_workers": settings.workers}
    return partial(_sizes, DataLoader(images, settings.batch, collate_fn=Transformed(settings).batch, **options))


def litdata_loader(settings: Settings) -> Epochs:
    """Return LitData on its chunks."""
    litdata, place = importlib.import_module("litdata"), str(settings.folder / "litdata")
    litdata.optimize(_litdata_row, settings.files.samples, place, chunk_bytes="64MB", num_workers=1)
    images = litdata.StreamingDataset(place, shuffle=True, drop_last=True, transform=Transformed(settings))
    options = {"drop_last": True, "persistent_workers": True, "num_workers": settings.workers}
    return partial(_sizes, litdata.StreamingDataLoader(images, batch_size=settings.batch, **options))


def _litdata_row(sample: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(sample[0]).read_bytes(), "label": sample[1]}


LOADERS = {
    "vitray.Loader": vitray_loader,
    BASELINE: torch_loader,
    "StatefulDataLoader": stateful_loader,
    "Mosaic Streaming": mosaic_loader,
    "LitData": litdata_loader,
}


def _sizes(loader: Any) -> Iterator[int]:
    for images, _ in loader:
        yield len(images)


def timed(epochs: Epochs, _: int) -> tuple[Timing, int]:
    """Read an epoch; return its times and its images."""
    before, start = tree_cpu_seconds(), time.perf_counter()
    batches = epochs()
    count = next(batches)
    first = time.perf_counter() - start
    count += sum(batches)
    return Timing(first, time.perf_counter() - start, cpu_seconds_since(before)), count


def main() -> None:
    """Read epochs in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="a folder of class folders")
    parser.add_argument("--size", type=int, default=224, help="pixels of a view (%(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with temporary_folder() as folder:
        settings = Settings(options.images.absolute(), folder, options.size, options.batch, options.workers)
        calls = {}
        for name, loader in LOADERS.items():
            try:
                calls[name] = partial(timed, loader(settings))
            except ImportError as error:
                print(f"{name}: {error}")
        results = in_rounds(calls, options.rounds, warm_up=1, shown=True)
    print(f"\n{circumstances(torch.device('cpu'), 1)}; {options.workers} worker processes")
    print(
        f"{options.images.name} to {options.size} px, batches of {options.batch}; {options.rounds} interleaved rounds\n"
    )
    print(f"{'':<22}{'images/s':>18}{'/ ' + BASELINE:>24}{'CPU ms/image':>18}{'first batch s':>18}")
    table = {}
    speeds = {name: [count / timing.wall for timing, count in own] for name, own in results.items()}
    for name, own in results.items():
        cpu = spread_of([1e3 * timing.cpu / count for timing, count in own])
        speed, ratio = spread_of(speeds[name]), ratio_of(speeds[name], speeds[BASELINE])
        first = spread_of([timing.first for timing, _ in own])
        table[name] = {"images_per_second": speed, "ratio": ratio, "cpu_ms": cpu, "first_batch": first}
        print(f"{name:<22}{speed!s:>18}{ratio!s:>24}{cpu!s:>18}{first!s:>18}")
    if options.json:
        print(json.dumps({name: {key: value._asdict() for key, value in row.items()} for name, row in table.items()}))


if __name__ == "__main__":
    main()
