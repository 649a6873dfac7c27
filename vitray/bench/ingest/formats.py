"""WebDataset and MosaicML Streaming, where they are installed: the same images in their files, the same view of each.

Each shuffles in its own way, as its users have it; the images of an epoch come once.
"""

import importlib.util
import io
import tarfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from vitray.augment.decode import decode_image
from vitray.augment.draws import generator
from vitray.augment.sample import augment_image
from vitray.config.augmentation import Augment
from vitray.stream import Stream
from vitray.stream.decoding import View, read_rows

# Of an image, as both libraries recommend: some thousand images, so that shards are worth opening.
SHARD_BYTES = 2**26
ROWS_AT_ONCE = 256
# Images that WebDataset holds back to shuffle them, as its documentation does.
SHUFFLED = 1000

Pipeline = Callable[[int], Iterator[int]]


def other_formats(stream: Stream, images: int, workers: int, folder: Path) -> dict[str, Pipeline]:
    """A pipeline by the name of each library that is installed; the images are written below `folder` first."""
    found: dict[str, Pipeline] = {}
    if importlib.util.find_spec("webdataset"):
        tars = _write_tars(stream, images, folder / "tars", workers)
        found["webdataset"] = lambda epoch: _webdataset(tars, stream, epoch, workers)
    if importlib.util.find_spec("streaming"):
        found["mosaicml-streaming"] = _mosaicml(stream, images, folder / "mds", workers)
    return found


def _contents(stream: Stream, images: int) -> Iterator[tuple[bytes, int, str]]:
    for start in range(0, images, ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, images))
        found = read_rows(rows, stream.rows)
        yield from (found[row] for row in rows.tolist())


def _view(content: bytes, label: int, key: str, view: View) -> tuple[torch.Tensor, int]:
    assert isinstance(view.crop, Augment)
    torch.set_num_threads(1)
    draws = generator(view.seed, view.epoch, key, 0)
    return torch.from_numpy(augment_image(decode_image(content), view.crop, view.size, draws)), label


def _write_tars(stream: Stream, images: int, folder: Path, workers: int) -> list[str]:
    """At least two a worker, or some would have nothing to do."""
    folder.mkdir()
    found = [(content, label) for content, label, _ in _contents(stream, min(images, ROWS_AT_ONCE))]
    mean = sum(len(content) for content, _ in found) / len(found)
    per_tar = max(1, min(int(SHARD_BYTES / mean), -(-images // (2 * workers))))
    names: list[str] = []
    tar: tarfile.TarFile | None = None
    for index, (content, label, _) in enumerate(_contents(stream, images)):
        if tar is None or index % per_tar == 0:
            if tar is not None:
                tar.close()
            names.append(str(folder / f"{len(names):05d}.tar"))
            tar = tarfile.open(names[-1], "w")  # noqa: SIM115 - closed when the next begins
        for ending, data in (("jpg", content), ("cls", str(label).encode())):
            about = tarfile.TarInfo(f"{index:08d}.{ending}")
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    if tar is not None:
        tar.close()
    return names


def _webdataset(tars: Sequence[str], stream: Stream, epoch: int, workers: int) -> Iterator[int]:
    from webdataset import WebDataset  # pyright: ignore[reportAttributeAccessIssue] - exported when it is asked for

    view = View(stream.size, stream.crop, stream.seed, epoch)
    dataset = WebDataset(list(tars), shardshuffle=len(tars), detshuffle=True, seed=epoch, empty_check=False)
    dataset = dataset.shuffle(SHUFFLED, seed=epoch).map(partial(_from_tar, view=view))
    dataset = dataset.batched(stream.batch, collation_fn=default_collate, partial=True)
    for pixels, _ in DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork"):
        yield len(pixels)


def _from_tar(sample: dict[str, Any], view: View) -> tuple[torch.Tensor, int]:
    return _view(sample["jpg"], int(sample["cls"]), sample["__key__"], view)


def _mosaicml(stream: Stream, images: int, folder: Path, workers: int) -> Pipeline:
    import streaming  # pyright: ignore[reportMissingImports]

    columns = {"image": "bytes", "label": "int", "key": "str"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES) as out:
        for content, label, key in _contents(stream, images):
            out.write({"image": content, "label": label, "key": key})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own defaults
        dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=stream.batch)

    def epoch_of(epoch: int) -> Iterator[int]:
        collate = partial(_from_mds, view=View(stream.size, stream.crop, stream.seed, epoch))
        # It counts its epochs itself: one each time that it is iterated over.
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork", "collate_fn": collate}
        for pixels, _ in DataLoader(dataset, stream.batch, **options):
            yield len(pixels)

    return epoch_of


def _from_mds(samples: list[dict[str, Any]], view: View) -> Any:
    return default_collate([_view(each["image"], each["label"], each["key"], view) for each in samples])
