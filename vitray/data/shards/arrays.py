"""Raw pixels as a source: CIFAR-10 and CIFAR-100 for Python, and IDX files (MNIST); each image becomes a PNG."""

import gzip
import io
import pickle
import re
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from vitray import storage
from vitray.data.shards.images import png
from vitray.errors import ConfigError, nearest

IDX_IMAGES = re.compile(r"images[-.]idx3-ubyte(\.gz)?$")
CIFAR_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
CIFAR_BATCHES += ("train", "test")
CIFAR_META = ("batches.meta", "meta")
# Files of these datasets are below 180 MB; one that unpacks to more is not one of them.
LARGEST_MEMBER = 2**28


class Block(NamedTuple):
    """One file of images."""

    name: str
    file: str
    labels: Sequence[int]


def list_arrays(kind: Literal["cifar", "idx"], source: str, label: str | None) -> tuple[list[Block], list[str] | None]:
    """The files of images with their labels, and the class names where the source says them."""
    return _list_cifar(source, label) if kind == "cifar" else (_list_idx(source), None)


def read_png(kind: Literal["cifar", "idx"], file: str, row: int) -> bytes:
    """One image; the file stays in memory for the next ones."""
    return png(_cifar_pixels(file)[row].transpose(1, 2, 0) if kind == "cifar" else _idx(file)[row])


def _list_cifar(source: str, label: str | None) -> tuple[list[Block], list[str] | None]:
    """A batch is named `source::member`, whether the source is the archive or the folder that it unpacks to."""
    names = [name for name in (*CIFAR_BATCHES, *CIFAR_META) if name in _cifar_members(source)]
    metas = [name for name in names if name in CIFAR_META]
    if not metas or len(names) == len(metas):
        raise ConfigError(f"{source}: wanted the python version of CIFAR: batches, and meta or batches.meta")
    meta = _cifar_batch(f"{source}::{metas[0]}")
    label = label or ("labels" if "label_names" in meta else "fine_labels")
    blocks = []
    for name in names:
        if name in CIFAR_META:
            continue
        batch = _cifar_batch(f"{source}::{name}")
        if label not in batch:
            known = [key for key in batch if key.endswith("labels")]
            raise ConfigError(f"label={label}: {source} has {', '.join(known)}{nearest(label, known)}")
        # The training batches do not say so in their names.
        blocks.append(Block(f"train_{name}" if name.startswith("data_") else name, f"{source}::{name}", batch[label]))
    return blocks, list(meta[label.replace("labels", "label_names")])


@lru_cache(maxsize=1)
def _cifar_members(source: str) -> dict[str, bytes | str]:
    """{name: content} of an archive, {name: address} of a folder."""
    wanted = (*CIFAR_BATCHES, *CIFAR_META)
    if not source.endswith((".tar.gz", ".tgz", ".tar")):
        names = {name.rpartition("/")[2]: storage.join(source, name) for name in storage.list_files(source)}
        return {name: file for name, file in names.items() if name in wanted}
    members: dict[str, bytes | str] = {}
    try:
        with storage.local_copy(source) as path, tarfile.open(path) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                small = member.isreg() and member.size <= LARGEST_MEMBER
                if name in wanted and small and (file := tar.extractfile(member)):
                    members[name] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{source}: cannot be read as a tar archive: {error}") from None
    return members


@lru_cache(maxsize=2)
def _cifar_batch(file: str) -> dict[str, Any]:
    source, _, name = file.rpartition("::")
    member = _cifar_members(source)[name]
    content = member if isinstance(member, bytes) else storage.read_bytes(member)
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        return {key if isinstance(key, str) else key.decode(): value for key, value in batch.items()}
    except Exception as error:  # a malformed pickle may raise anything
        raise ConfigError(f"{file}: not a batch of CIFAR: {error}") from None


def _cifar_pixels(file: str) -> np.ndarray:
    pixels = _cifar_batch(file)["data"]
    return np.asarray(pixels, dtype=np.uint8).reshape(len(pixels), 3, 32, 32)


class _ArraysOnly(pickle.Unpickler):
    """Reads numbers, text, lists, dicts and arrays; no other code that a pickle asks for is run."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("_codecs", "encode"): _latin1,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which no image data needs")
        return allowed[module, name]


def _latin1(text: str, _: str) -> bytes:
    """How Python 3 writes the bytes of an array in an old protocol."""
    return text.encode("latin1")


def _list_idx(source: str) -> list[Block]:
    folder = source.rpartition("/")[0] if IDX_IMAGES.search(source) else source
    names = storage.list_files(folder)
    images = [name for name in names if IDX_IMAGES.search(name)]
    blocks = []
    for name in images:
        beside = re.sub(r"images([-.])idx3", r"labels\1idx1", name)
        choices = (beside, f"{beside}.gz", beside.removesuffix(".gz"))
        labels = next((choice for choice in choices if choice in names), None)
        if labels is None:
            raise ConfigError(f"{storage.join(source, name)}: no labels beside it: wanted {beside}")
        file, numbers = storage.join(folder, name), _idx(storage.join(folder, labels)).tolist()
        if len(numbers) != len(_idx(file)):
            raise ConfigError(f"{file}: {len(_idx(file))} images, but {len(numbers)} labels")
        blocks.append(Block(IDX_IMAGES.sub("", name).rstrip("-."), file, numbers))
    if len({block.name for block in blocks}) < len(blocks):
        raise ConfigError(f"{source}: the same images are there twice, packed and unpacked: leave one of them")
    return blocks


@lru_cache(maxsize=2)
def _idx(file: str) -> np.ndarray:
    """An IDX file of bytes: two zeros, type 8, the number of dimensions, each as 4 bytes, the content."""
    content = storage.read_bytes(file)
    if file.endswith(".gz"):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(LARGEST_MEMBER)
        except (OSError, EOFError) as error:
            raise ConfigError(f"{file}: cannot be unpacked: {error}") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ConfigError(f"{file}: not an IDX file of bytes")
    head = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:head], ">u4").tolist()
    if len(content) != head + int(np.prod(shape)):
        raise ConfigError(f"{file}: {len(content)} bytes, but its head says {shape}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
