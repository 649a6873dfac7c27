"""First pass of `vitray shard`: decode every image once, and record its size, colors, hash and defects.

Each task writes a file under DEST/.work. Its name is a hash of all inputs of the task, so a restarted command reuses
finished work, and a changed source or setting leads to other names.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vitray.data.augment.decode import UndecodableImage, decode_with_pillow
from vitray.data.shards.label_lists import LabelList
from vitray.data.shards.options import Kind, ShardRequest
from vitray.data.shards.sources import REJECTS, Listing, Reject, SourceEntry, read_items
from vitray.data.shards.tables import read_table
from vitray.data.shards.tasks import Tasks, run_with_progress
from vitray.errors import ConfigError, cut_middle, printable
from vitray.system import storage

WORK = ".work"
# Part of every name: other versions may encode or lay out bytes differently.
VERSIONS = (1, PIL.__version__, pa.__version__)
# Kinds of sources whose images are byte ranges of a file; those of the others are copied.
IN_PLACE = {"folder", "index", "coco", "tar"}

# Kinds of sources with many images in a file.
MANY_IN_A_FILE = {"tar", "parquet", "cifar", "idx"}

# One row per image; (file, start, size) is the present location of its bytes.
INSPECTED = pa.schema(
    [(name, pa.string()) for name in ("split", "name", "sha256", "file", "reason")]
    + [(name, pa.int64()) for name in ("label", "start", "size")]
    + [(name, pa.int32()) for name in ("width", "height")]
    + [("moments", pa.list_(pa.int64())), ("fingerprint", pa.binary()), ("others", pa.list_(pa.string()))]
    # In place of the label, where an image has several.
    + [("labels", pa.list_(pa.int64())), ("unknown", pa.list_(pa.int64()))]
)
REJECTED = pa.schema([(name, pa.string()) for name in Reject._fields])


def inspect_source(request: ShardRequest, listing: Listing, tasks: Tasks) -> tuple[pa.Table, list[Reject]]:
    """Return the usable images in the order of the listing, and the rejects; too many rejects are an error."""
    size = request.settings.chunk
    chunks = [listing.items[start : start + size] for start in range(0, len(listing.items), size)]
    # The settings that, beside the images, decide the result.
    used = {"image", "resize", "quality", "max_pixels"}
    if listing.kind == "demo":
        used |= {"seed", "image_size", "task", "rarity"}
    is_perceptual = request.settings.dedupe == "perceptual"
    inputs = {"kind": listing.kind, "perceptual": is_perceptual, "in_place": request.index_only}
    inputs |= request.settings.model_dump(include=used)
    versions = _file_versions(listing)
    names = [
        content_name(inputs, chunk, {item.file: versions[item.file] for item in chunk if item.file in versions})
        for chunk in chunks
    ]
    done = set(storage.list_files(storage.join(request.dest, WORK)))
    left = [(chunk, name) for chunk, name in zip(chunks, names, strict=True) if f"found-{name}.parquet" not in done]
    calls = [(request, listing.kind, chunk, name) for chunk, name in left]
    run_with_progress(tasks, inspect_chunk, calls, [len(chunk) for chunk, _ in left], "inspected")
    with ThreadPoolExecutor(8) as pool:  # reads may wait for a network
        images = pa.concat_tables(pool.map(lambda name: read_table(_table_file(request, name)), names))
    bad = images.filter(images["reason"].is_valid())
    columns = (bad[name].to_pylist() for name in ("split", "name", "reason"))
    rejects = sorted([*listing.rejects, *map(Reject, *columns)])
    _check_rejects(request, rejects, images.num_rows + len(listing.rejects))
    return images.filter(images["reason"].is_null()), rejects


def _file_versions(listing: Listing) -> dict[str, Any]:
    """Return the versions of files with many images; entries have those of the others."""
    if listing.kind not in MANY_IN_A_FILE:
        return {}

    def version_of(file: str) -> Any:
        if listing.kind != "cifar":
            return storage.file_version(file)
        source = file.rpartition("::")[0]  # an archive or a folder
        return storage.file_version(source) or storage.list_entries(source)

    files = sorted({item.file for item in listing.items})
    with ThreadPoolExecutor(8) as pool:  # reads may wait for a network
        return dict(zip(files, pool.map(version_of, files), strict=True))


def inspect_chunk(request: ShardRequest, kind: Kind, items: Sequence[SourceEntry], name: str) -> None:
    """Decode some images; write their rows to one file, and bytes that are in no file yet to another."""
    settings = request.settings
    copies_file = storage.join(request.dest, WORK, f"bytes-{name}")
    copies = bytearray()
    rows = []
    for item, (content, label) in zip(items, read_items(kind, items, request), strict=True):
        row: dict[str, Any] = {"split": item.split, "name": item.name, "others": list(item.others)}
        if isinstance(label, LabelList):
            row |= {"labels": list(label.present), "unknown": None if label.unknown is None else list(label.unknown)}
        else:
            row["label"] = label
        rows.append(row)
        try:
            image = decode_with_pillow(content, settings.max_pixels)
        except UndecodableImage as bad:
            row["reason"] = str(bad)
            continue
        file, start = item.file, item.place
        smaller = _shrink(image, settings.resize) if settings.resize else None
        if smaller:
            image, content = smaller, _jpeg(smaller, settings.quality)
        if not request.index_only and (smaller or kind not in IN_PLACE):
            file, start = copies_file, len(copies)
            copies += content
        row |= image_stats(image, settings.dedupe == "perceptual")
        row |= {"sha256": hashlib.sha256(content).hexdigest(), "file": file, "start": start, "size": len(content)}
    if copies:
        storage.write_bytes(copies_file, bytes(copies))
    _write_table(_table_file(request, name), rows, INSPECTED)


def image_stats(image: Image.Image, is_perceptual: bool) -> dict[str, Any]:
    """Return size and pixel sums of an RGB image and, on request, its perceptual fingerprint."""
    counts = np.asarray(image.histogram(), dtype=np.int64).reshape(3, 256)
    levels = np.arange(256, dtype=np.int64)
    # Sums of the red, green and blue pixels, then of their squares: whole numbers, exact in any order of addition.
    moments = [*(counts @ levels).tolist(), *(counts @ levels**2).tolist()]
    fingerprint = _fingerprint(image) if is_perceptual else None
    return {"width": image.width, "height": image.height, "moments": moments, "fingerprint": fingerprint}


def _fingerprint(image: Image.Image) -> bytes:
    """Return 128 bits: whether each cell of a 9x9 gray thumbnail is brighter than its right and its lower neighbor."""
    thumbnail = np.asarray(image.convert("L").resize((9, 9), Image.Resampling.LANCZOS), dtype=np.int16)
    # At least 3 levels brighter: otherwise coding noise would decide the bits of flat areas.
    cells, right, below = thumbnail[:8, :8], thumbnail[:8, 1:], thumbnail[1:, :8]
    return np.packbits([cells > right + 2, cells > below + 2]).tobytes()


def _shrink(image: Image.Image, shorter: int) -> Image.Image | None:
    """Return the image with a shorter side of `shorter` pixels; None where it is not larger."""
    side = min(image.size)
    if side <= shorter:
        return None
    width, height = (max(1, round(length * shorter / side)) for length in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _jpeg(image: Image.Image, quality: int) -> bytes:
    image.info.clear()  # Pillow would copy the color profile and EXIF of the original
    image.save(content := io.BytesIO(), "JPEG", quality=quality)
    return content.getvalue()


def _table_file(request: ShardRequest, name: str) -> str:
    return storage.join(request.dest, WORK, f"found-{name}.parquet")


def _check_rejects(request: ShardRequest, rejects: list[Reject], total: int) -> None:
    allowed = request.settings.max_rejects
    if len(rejects) <= allowed * total and len(rejects) < total:
        return
    write_rejects(request, rejects)
    raise ConfigError(
        f"{request.source}: {len(rejects)} of {total} images cannot be used, more than max_rejects={allowed} allows;"
        f" {storage.join(request.dest, REJECTS)} lists them all:\n" + "\n".join(reject_lines(rejects, 20))
    )


def reject_lines(rejects: Sequence[Reject], number: int) -> list[str]:
    """Return a line for each of the first rejects, with its reason, and one for the others."""
    lines = [f"  {printable(cut_middle(reject.file, 100))}: {reject.reason}" for reject in rejects[:number]]
    return lines + ([f"  and {len(rejects) - number:,} more"] if len(rejects) > number else [])


def read_rejects(dest: str) -> list[Reject]:
    """Return the rejected images of a dataset."""
    return [Reject(**row) for row in read_table(storage.join(dest, REJECTS)).to_pylist()]


def write_rejects(request: ShardRequest, rejects: Sequence[Reject]) -> None:
    """Write rejects.parquet."""
    _write_table(storage.join(request.dest, REJECTS), [reject._asdict() for reject in rejects], REJECTED)


def _write_table(url: str, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), table := io.BytesIO())
    storage.write_bytes(url, table.getvalue())


def content_name(*parts: Any) -> str:
    """Return a hash of the parts and of the library versions, as a file name."""
    content = hashlib.sha256(json.dumps(VERSIONS).encode())
    for part in parts:
        if isinstance(part, pa.Table):
            with pa.ipc.new_stream(sink := io.BytesIO(), part.schema) as stream:
                stream.write_table(part)
            content.update(sink.getvalue())
        else:
            content.update(json.dumps(part, sort_keys=True).encode())
    return content.hexdigest()[:24]
