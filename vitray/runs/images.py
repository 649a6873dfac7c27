"""The images of `vitray train --data`: a dataset, or a source that becomes one beside the folder of runs."""

import os

from vitray.config import Run
from vitray.data.shards import open_dataset, read_request, write_dataset
from vitray.data.shards.manifest import MANIFEST
from vitray.errors import ConfigError
from vitray.system import storage

# The share of train that is evaluated where a source has no other images.
HOLDOUT = 0.1


def dataset_place(source: str, out: str) -> str:
    """Return where the images of a source lie as a dataset: itself, or data/NAME beside the folder of runs `out`."""
    place = storage.absolute(source).rstrip("/")
    if storage.exists(storage.join(place, MANIFEST)):
        return place
    name, beside = os.path.splitext(place.rpartition("/")[2])[0], storage.absolute(out).rstrip("/").rpartition("/")[0]
    written = storage.join(beside, "data", name)
    return f"{written}-shards" if written == place else written


def with_images(run: Run, source: str, out: str, *, writes: bool = True) -> Run:
    """Return a run on the images of a source, which is written as a dataset first unless it is one.

    Its classes are those of the images. Without images to evaluate, a tenth of those of train is held out.
    """
    if "url" in run.data.model_fields_set:
        raise ConfigError(f"--data {source}: data.url is set, too; expected one of the two")
    place = dataset_place(source, out)
    if place == storage.absolute(source).rstrip("/"):
        dataset = open_dataset(place)
    elif writes:
        dataset = write_dataset(read_request(source, place))
    else:
        raise ConfigError(f"--data {source}: no dataset yet; `vitray shard {source} {place}` writes it")
    changes: dict[str, object] = {"data.url": place}
    if "val" not in dataset.splits and not {"val", "holdout", "fold"} & run.data.model_fields_set:
        changes |= {"data.val": "test"} if "test" in dataset.splits else {"data.holdout": HOLDOUT}
    return run.replace(changes)
