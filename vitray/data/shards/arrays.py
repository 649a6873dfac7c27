"""Sources of raw pixels: CIFAR-10 and CIFAR-100 for Python, and IDX files (MNIST); each image becomes a PNG."""

import gzip
import io
import pickle
import re
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from vitray import storage
from vitray.errors import ConfigError, nearest

IDX_IMAGES = re.compile(r"images[-.]idx3-ubyte(\.gz)?$")
CIFAR_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
CIFAR_BATCHES += ("train", "test")
CIFAR_META = ("batches.meta", "meta")
# The files of these datasets are below 180 MB.
LARGEST_MEMBER = 2**28


class ArrayFile(NamedTuple):
    """One file of images with their labels."""

    name: str
    file: str
    labels: Sequence[int]


def read_png(kind: Literal["cifar", "idx"], file: str, row: int) -> bytes:
    """Return one image; its file stays in memory for the next calls."""
    if kind == "cifar":
        pixels = np.asarray(_cifar_batch(file)["data"][row], np.uint8).reshape(3, 32, 32).transpose(1, 2, 0)
    else:
        pixels = _idx(file)[row]
    Image.fromarray(pixels).save(content := io.BytesIO(), "PNG")
    return content.getvalue()


def list_cifar(source: str, label: str | None) -> tuple[list[ArrayFile], list[str]]:
    """Return the batches, each as `source::member` of an archive or of its unpacked folder, and the class names."""
    members = _cifar_members(source)
    batches, metas = ([name for name in names if name in members] for names in (CIFAR_BATCHES, CIFAR_META))
    if not (batches and metas):
        raise ConfigError(f"{source}: wanted the python version of CIFAR: batches, and meta or batches.meta")
    meta = _cifar_batch(f"{source}::{metas[0]}")
    label = label or ("labels" if "label_names" in meta else "fine_labels")
    files = []
    for name in batches:
        batch = _cifar_batch(f"{source}::{name}")
        if label not in batch:
            known = [key for key in batch if key.endswith("labels")]
            raise ConfigError(f"label={label}: {source} has {', '.join(known)}{nearest(label, known)}")
        split_name = f"train_{name}" if name.startswith("data_") else name  # data_batch_1 belongs to train
        files.append(ArrayFile(split_name, f"{source}::{name}", batch[label]))
    return files, list(meta[label.replace("labels", "label_names")])


@lru_cache(maxsize=1)
def _cifar_members(source: str) -> dict[str, bytes | str]:
    """Return {name: content} of an archive, {name: address} of a folder."""
    expected = CIFAR_BATCHES + CIFAR_META
    if not source.endswith((".tar.gz", ".tgz", ".tar")):
        names = {name.rpartition("/")[2]: storage.join(source, name) for name in storage.list_files(source)}
        return {name: file for name, file in names.items() if name in expected}
    members: dict[str, bytes | str] = {}
    try:
        with storage.local_copy(source) as path, tarfile.open(path) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                is_small = member.isreg() and member.size <= LARGEST_MEMBER
                if name in expected and is_small and (file := tar.extractfile(member)):
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


class _ArraysOnly(pickle.Unpickler):
    """Reads numbers, text, lists, dicts and arrays; a pickle can run no other code."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            # Array bytes of the old pickle protocols.
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which image data does not need")
        return allowed[module, name]


def list_idx(source: str) -> list[ArrayFile]:
    """Return the files of images in a folder, or beside one of them."""
    folder = source.rpartition("/")[0] if IDX_IMAGES.search(source) else source
    names = storage.list_files(folder)
    images = [name for name in names if IDX_IMAGES.search(name)]
    files = []
    for name in images:
        expected = re.sub(r"images([-.])idx3", r"labels\1idx1", name)
        choices = (expected, f"{expected}.gz", expected.removesuffix(".gz"))
        labels = next((choice for choice in choices if choice in names), None)
        if labels is None:
            raise ConfigError(f"{storage.join(source, name)}: no labels beside it: wanted {expected}")
        file, numbers = storage.join(folder, name), _idx(storage.join(folder, labels)).tolist()
        if len(numbers) != len(_idx(file)):
            raise ConfigError(f"{file}: {len(_idx(file))} images, but {len(numbers)} labels")
        files.append(ArrayFile(IDX_IMAGES.sub("", name).rstrip("-."), file, numbers))
    if len({each.name for each in files}) < len(files):
        raise ConfigError(f"{source}: contains the same images packed and unpacked: remove one of them")
    return files


@lru_cache(maxsize=2)
def _idx(file: str) -> np.ndarray:
    """Return an IDX file: two zeros, type 8 (bytes), the number of dimensions, each as 4 bytes, the content."""
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
        raise ConfigError(f"{file}: {len(content)} bytes, but its header has shape {shape}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
