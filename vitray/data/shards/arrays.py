"""Sources of raw pixels: CIFAR-10 and CIFAR-100, for Python or binary, and IDX files; each image becomes a PNG."""

import gzip
import io
import math
import pickle
import re
import tarfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from vitray.errors import ConfigError, nearest, one_line
from vitray.system import storage

IDX_IMAGES = re.compile(r"images[-.]idx3-ubyte(\.gz)?$")
CIFAR_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
CIFAR_BATCHES += ("train", "test")
CIFAR_META = ("batches.meta", "meta")
# The names of the classes, a line each, beside the binary version.
CIFAR_TEXTS = {
    "batches.meta.txt": "label_names",
    "fine_label_names.txt": "fine_label_names",
    "coarse_label_names.txt": "coarse_label_names",
}
CIFAR_FILES = (*CIFAR_BATCHES, *(f"{name}.bin" for name in CIFAR_BATCHES), *CIFAR_META, *CIFAR_TEXTS)
# The files of these datasets together are below 190 MB, and a packed one expands to ten times its size; labels in order
# expand further.
LARGEST, MOST_EXPANSION, SMALL = 2**28, 100, 2**20


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
    found = [name for name in CIFAR_FILES if name in members]
    batches = [name for name in found if name.removesuffix(".bin") in CIFAR_BATCHES]
    metas = [name for name in found if name not in batches]
    if not (batches and metas):
        raise ConfigError(
            f"{source}: expected CIFAR for Python (batches, and meta or batches.meta) or its binary version (batches"
            f" that end in .bin, and {' or '.join(CIFAR_TEXTS)})"
        )
    if len({name.removesuffix(".bin") for name in batches}) < len(batches):
        raise ConfigError(f"{source}: contains CIFAR for Python and its binary version: remove one of them")
    meta = {key: value for name in metas for key, value in _cifar_batch(f"{source}::{name}").items()}
    label = label or ("labels" if "label_names" in meta else "fine_labels")
    files = []
    for name in batches:
        batch = _cifar_batch(f"{source}::{name}")
        if label not in batch:
            known = [key for key in batch if key.endswith("labels")]
            raise ConfigError(f"label={label}: {source} has {', '.join(known)}{nearest(label, known)}")
        _check_batch(batch, label, f"{source}::{name}")
        stem = name.removesuffix(".bin")
        split_name = f"train_{stem}" if stem.startswith("data_") else stem  # data_batch_1 belongs to train
        files.append(ArrayFile(split_name, f"{source}::{name}", batch[label]))
    names = meta.get(label.replace("labels", "label_names"))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{source}::{metas[0]}: expected a list of class names for {label}")
    return files, names


def _check_batch(batch: dict[str, Any], label: str, file: str) -> None:
    data, labels = batch.get("data"), batch[label]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
        raise ConfigError(f"{file}: expected `data` as bytes, 3,072 for each image")
    if not isinstance(labels, list) or len(labels) != len(data):
        raise ConfigError(f"{file}: expected {label} as a list of {len(data)} numbers, as many as images")


@lru_cache(maxsize=1)
def _cifar_members(source: str) -> dict[str, bytes | str]:
    """Return {name: content} of an archive, {name: address} of a folder."""
    if not source.endswith((".tar.gz", ".tgz", ".tar")):
        names = {name.rpartition("/")[2]: storage.join(source, name) for name in storage.list_files(source)}
        return {name: file for name, file in names.items() if name in CIFAR_FILES}
    members: dict[str, bytes | str] = {}
    left = LARGEST
    try:
        with storage.local_copy(source) as path, tarfile.open(path) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                if name in CIFAR_FILES and member.isreg() and (file := tar.extractfile(member)):
                    left -= member.size
                    if left < 0:
                        raise ConfigError(f"{source}: its CIFAR files take more than {LARGEST:,} bytes, expected fewer")
                    members[name] = file.read()
            check_tar_end(tar)
    except ConfigError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{source}: cannot be read as a tar archive: {text}") from None
    return members


def check_tar_end(tar: tarfile.TarFile) -> None:
    """Raise a ReadError unless an archive, read to its end, ends in zeros only.

    tarfile ends silently at a damaged header or where the file was cut. Reading on also checks a checksum of gzip.
    """
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    end = file.read(tarfile.BLOCKSIZE)
    if not end:
        raise tarfile.ReadError(
            "no blocks of zeros at its end: members may be missing. If none is, add them to the uncompressed file:"
            " head -c 1024 /dev/zero >> FILE"
        )
    if len(end) < tarfile.BLOCKSIZE or any(end):
        raise tarfile.ReadError("cut off, or a damaged header in the middle")
    while rest := file.read(2**20):
        if any(rest):
            raise tarfile.ReadError("data after its end")


@lru_cache(maxsize=2)
def _cifar_batch(file: str) -> dict[str, Any]:
    """Return a batch, or the class names, as {name: value}."""
    source, _, name = file.rpartition("::")
    member = _cifar_members(source)[name]
    content = member if isinstance(member, bytes) else storage.read_bytes(member)
    if name in CIFAR_TEXTS:
        return {
            CIFAR_TEXTS[name]: [line.strip() for line in content.decode(errors="replace").split("\n") if line.strip()]
        }
    if name.endswith(".bin"):
        return _binary_batch(content, file)
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        if not isinstance(batch, dict):
            raise ValueError(f"it holds a {type(batch).__name__}")
        names = {key if isinstance(key, str) else key.decode(): value for key, value in batch.items()}
        return {name: value.values if isinstance(value, _Array) else value for name, value in names.items()}
    except Exception as error:  # a malformed pickle may raise anything
        raise ConfigError(f"{file}: not a batch of CIFAR: {one_line(error)[:300]}") from None


def _binary_batch(content: bytes, file: str) -> dict[str, Any]:
    """Return a batch of the binary version, whose rows are one label (CIFAR-10) or two (CIFAR-100) and the pixels."""
    is_100 = file.endswith(("::train.bin", "::test.bin"))
    labels = ("coarse_labels", "fine_labels") if is_100 else ("labels",)
    row = len(labels) + 3072
    if not content or len(content) % row:
        raise ConfigError(
            f"{file}: {len(content):,} bytes, expected a multiple of {row:,}, {len(labels)} + 3,072 an image"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    return {"data": rows[:, len(labels) :]} | {name: rows[:, place].tolist() for place, name in enumerate(labels)}


class _Type:
    """The type of an array's numbers, of a pickle; numpy itself would take types and states that corrupt memory."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]


class _Array:
    """An array of integers, of a pickle."""

    def __init__(self, *_: Any) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, in_columns, content = state
        if not re.fullmatch("[iu][1248]", kind.name):
            raise pickle.UnpicklingError(f"an array of {kind.name}, expected integers")
        content = content.encode("latin1") if isinstance(content, str) else content
        values = np.frombuffer(content, np.dtype(kind.name).newbyteorder(kind.order))
        self.values = values.reshape(shape, order="F" if in_columns else "C")


class _ArraysOnly(pickle.Unpickler):
    """Reads numbers, text, lists, dicts and arrays; a pickle can run no other code."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"): object,  # named, and not called
            ("numpy", "dtype"): _Type,
            ("numpy.core.multiarray", "_reconstruct"): _Array,
            ("numpy._core.multiarray", "_reconstruct"): _Array,
            # Array bytes of the old pickle protocols.
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which image data does not need")
        return allowed[module, name]


def list_idx(folder: str, names: Sequence[str]) -> list[ArrayFile]:
    """Return the files of images among those of a folder."""
    files = []
    for name in filter(IDX_IMAGES.search, names):
        expected = re.sub(r"images([-.])idx3", r"labels\1idx1", name)
        choices = (expected, f"{expected}.gz", expected.removesuffix(".gz"))
        labels = next((choice for choice in choices if choice in names), None)
        if labels is None:
            raise ConfigError(f"{storage.join(folder, name)}: no labels beside it: expected {expected}")
        file, numbers = storage.join(folder, name), _idx(storage.join(folder, labels))
        images = _idx(file)
        if images.ndim != 3 or 0 in images.shape[1:] or numbers.ndim != 1:
            raise ConfigError(f"{file}: images {images.shape}, labels {numbers.shape}; expected 3 and 1 dimensions")
        if len(numbers) != len(images):
            raise ConfigError(f"{file}: {len(images)} images, but {len(numbers)} labels")
        files.append(ArrayFile(IDX_IMAGES.sub("", name).rstrip("-."), file, numbers.tolist()))
    if len({each.name for each in files}) < len(files):
        raise ConfigError(f"{folder}: contains the same images packed and unpacked: remove one of them")
    return files


@lru_cache(maxsize=2)
def _idx(file: str) -> np.ndarray:
    """Return an IDX file: two zeros, type 8 (bytes), the number of dimensions, each as 4 bytes, the content."""
    content = storage.read_bytes(file)
    if file.endswith(".gz"):
        most = min(LARGEST, max(SMALL, MOST_EXPANSION * len(content)))
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{file}: cannot be unpacked: {error}") from None
        if len(content) > most:
            raise ConfigError(
                f"{file}: expands to more than {most:,} bytes, expected at most {MOST_EXPANSION} times its own"
            )
    head = 4 + 4 * content[3] if len(content) >= 4 else 4
    if len(content) < head or content[:3] != b"\0\0\x08" or content[3] > 3:
        raise ConfigError(f"{file}: not an IDX file of bytes with at most three sides")
    shape = np.frombuffer(content[4:head], ">u4").tolist()
    if len(content) != head + math.prod(shape):
        raise ConfigError(f"{file}: {len(content)} bytes, but its header has shape {shape}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
