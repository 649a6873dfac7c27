"""Hostile and broken files: sources, shards, manifests and weights give one short message, or a counted reject."""

import gzip
import io
import json
import os
import re
import socket
import struct
import subprocess
import tarfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sets import save_splits, shard_of
from mlflow.exceptions import MlflowException
from PIL import Image
from safetensors.torch import load_file, save_file

from pipelines import model, shard, weights
from pipelines.__main__ import run_verb
from vitray.config import Run, load_run
from vitray.config.training import Data
from vitray.data.augment.decode import UndecodableImage, decode_image, decode_with_pillow
from vitray.data.shards import arrays, held_out, open_dataset, read_request, tables
from vitray.data.shards.inspection import inspect_chunk
from vitray.data.shards.manifest import Split
from vitray.data.shards.sources import detect_source, list_source
from vitray.data.stream import decoding
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.serving.pyfunc import ImageClassifier
from vitray.system import storage
from vitray.weights import export_weights, files, load_deltas, load_model, save_model
from vitray.weights.delta import read_state

ODD_TEXTS = ("", "x", "../x", "x" * 300, "a\nb", "\x1b[1m", "\0", "\ud800", "s3://", "gs://x", "~nobody/x", "/dev/zero")
ODD_VALUES = (None, True, -1, 2**70, float("nan"), float("inf"), 0.5, [], {}, [[]], {"a": 1}, *ODD_TEXTS)


def encoded(number, form="PNG"):
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(content := io.BytesIO(), form)
    return content.getvalue()


def refusal(function, *args):
    """The message with which a call is refused, or None if it succeeds; every other error fails the test."""
    try:
        function(*args)
    except ConfigError as error:
        message = str(error)
        assert len(message) < 1500
        assert all(character.isprintable() or character == "\n" for character in message)
        return message
    return None


def run_serially(function, calls):
    return [function(*call) for call in calls]


def inspect(source, work, *overrides):
    """List a source and inspect its images as the tasks do; return the listing."""
    request = read_request(str(source), str(work), (), overrides)
    listing = list_source(request, detect_source(request), run_serially)
    inspect_chunk(request, listing.kind, listing.items, "all")
    return listing


# ---- images ----------------------------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "JPEG2000", "PPM"]), st.data())
def test_both_decoders_accept_or_reject_the_same_damaged_images(form, data):
    content = bytearray(encoded(1, form))
    for _ in range(data.draw(st.integers(0, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(content[: data.draw(st.integers(0, len(content)))])
    sizes, reasons = [], []
    for decode in (decode_image, decode_with_pillow):
        try:
            sizes.append(np.asarray(decode(damaged)).shape)
        except UndecodableImage as error:
            reasons.append(str(error))
    assert sizes[:1] == sizes[1:]
    assert all(reason.isprintable() and len(reason) < 300 for reason in reasons)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_an_image_whose_crop_would_take_gigabytes_is_rejected(form):
    Image.new("RGB", (3000, 1)).save(content := io.BytesIO(), form)
    for decode in (decode_image, decode_with_pillow):
        with pytest.raises(UndecodableImage, match="too narrow: 3000x1"):
            decode(content.getvalue())


def progressive(side, more_scans):
    """A JPEG whose last scan, a dozen bytes, is repeated."""
    Image.new("RGB", (side, side)).save(content := io.BytesIO(), "JPEG", progressive=True)
    jpeg = content.getvalue()
    return jpeg[:-2] + jpeg[jpeg.rindex(b"\xff\xda") : -2] * more_scans + jpeg[-2:]


def one_component_a_scan(more_scans):
    """A sequential JPEG whose scans hold one of two components each."""
    jpeg = bytearray(encoded(1, "JPEG"))
    at = jpeg.index(b"\xff\xda")
    jpeg[at : at + 14] = scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"
    return bytes(jpeg[:-2] + scan * more_scans + jpeg[-2:])


def png(side, rows, *, empty=0, length=2**16):
    """A gray PNG with empty chunks before its rows, and with these in chunks of a length."""

    def chunk(kind, data):
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", side.to_bytes(4) * 2 + bytes([8, 0, 0, 0, 0]))
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    data = b"".join(chunk(b"IDAT", packed[at : at + length]) for at in range(0, len(packed), length))
    return head + chunk(b"abCd", b"") * empty + data + chunk(b"IEND", b"")


def tiff(strips):
    """An uncompressed TIFF, all strips of which are its first eight bytes."""
    tags = [(256, 3, 8), (257, 3, 8), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 0), (278, 3, 1), (279, 4, 0)]
    places = 8 + 2 + 12 * len(tags) + 4
    rows = [
        struct.pack("<HHII", tag, kind, strips if kind == 4 else 1, places if kind == 4 else value)
        for tag, kind, value in tags
    ]
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + b"".join(rows) + bytes(4) + struct.pack("<I", 8) * strips


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(progressive(64, 100), "more than 100 JPEG scans", id="progressive"),
        pytest.param(progressive(4000, 20), "more than 25 JPEG scans", id="large_and_progressive"),
        pytest.param(one_component_a_scan(100), "more than 100 JPEG scans", id="sequential"),
        pytest.param(
            progressive(64, 100).replace(b"\xff\xdb", b"\xff\xff\xd0\xff\xdb", 1),
            "more than 20 JPEG scans",
            id="odd_bytes_in_the_header",
        ),
        pytest.param(
            encoded(1, "JPEG").replace(b"\xff\xdb", b"\xff\xfe\x00\x02" * 10_000 + b"\xff\xdb", 1),
            "more than 10,000 JPEG segments before its pixels",
            id="segments",
        ),
        pytest.param(b"P5\n#" + b"x" * 300_000 + b"\n1 1\n255\n\0", "in too many pieces", id="pnm_comment"),
        pytest.param(b"P2\n1 1\n255\n" + b"#\n" * 1001 + b"1\n", "more than 1,000 comments", id="pnm_comments"),
        pytest.param(png(8, np.zeros((8, 8), np.uint8), empty=150_000), "in too many pieces", id="png_chunks"),
        pytest.param(tiff(30_000), "in too many pieces", id="tiff_strips"),
    ],
)
def test_a_small_file_that_would_take_long_to_decode_is_rejected(content, reason):
    for decode in (decode_image, decode_with_pillow):
        with pytest.raises(UndecodableImage, match=reason):
            decode(content)


def test_many_fill_bytes_of_a_jpeg_are_passed_over():
    """Scans are counted beyond the usual number; a search from each of these bytes would take hours."""
    content = b"\xff\xd8\xff\xda\x00\x02\x01" + b"\xff" * 2_000_000 + b"\x00" + b"\xff\xda" * 21
    with pytest.raises(UndecodableImage):
        decode_image(content)


@pytest.mark.parametrize("place", ["segment", "tail"])
def test_bytes_that_look_like_scans_are_none_outside_the_pixels_of_a_jpeg(place):
    jpeg, many = progressive(64, 0), b"\xff\xda" * 200
    segment = b"\xff\xfe" + (2 + len(many)).to_bytes(2) + many
    odd = jpeg[:2] + segment + jpeg[2:] if place == "segment" else jpeg + many
    for decode in (decode_image, decode_with_pillow):
        assert np.array_equal(decode(odd), decode(jpeg))


def test_a_png_in_small_chunks_is_decoded():
    rows = np.random.default_rng(0).integers(0, 256, (1000, 1000), np.uint8)
    assert np.array_equal(decode_image(png(1000, rows, length=256))[..., 0], rows)


# ---- folders, indexes, names -----------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    """A source of two classes with two images each."""
    for number in range(4):
        file = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(number))
    return tmp_path / "photos"


def test_entries_of_a_folder_that_are_no_plain_files_are_counted_and_named(photos, tmp_path):
    os.mkfifo(photos / "a/pipe.png")
    (photos / "a/broken.png").symlink_to("nothing.png")
    (photos / "a/itself.png").symlink_to("itself.png")
    (photos / "a/zero.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(photos / "a/s.png"))
        listing = inspect(photos, tmp_path / "work")
    assert len(listing.items) == 4
    assert sorted(reject.file for reject in listing.rejects) == [
        f"a/{name}.png" for name in ("broken", "itself", "pipe", "s", "zero")
    ]
    assert {reject.reason for reject in listing.rejects} == {"a pipe, device or broken link"}


def test_a_link_to_a_folder_above_is_refused_and_one_to_another_folder_is_followed(photos, tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more/9.png").write_bytes(encoded(9))
    (photos / "c").symlink_to(tmp_path / "more")
    assert inspect(photos, tmp_path / "work").classes == ("a", "b", "c")
    (tmp_path / "more/back").symlink_to(photos)
    assert "c/back: link loop" in refusal(inspect, photos, tmp_path / "work")


def test_a_file_name_that_is_not_text_is_refused(photos, tmp_path):
    with open(os.fsencode(photos) + b"/a/\xff.png", "wb") as file:
        file.write(encoded(9))
    assert r"a/\udcff.png': expected a path of UTF-8 text" in refusal(inspect, photos, tmp_path / "work")


@pytest.mark.parametrize("read", [storage.read_bytes, storage.read_json, lambda url: storage.read_range(url, 0, 1)])
def test_reading_a_pipe_or_a_device_ends_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for url in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        assert "a folder, pipe or device; expected a file" in refusal(read, str(url))
    for ending in ("csv", "parquet", "tar", "tar.gz"):
        os.mkfifo(tmp_path / f"x.{ending}")
        assert refusal(inspect, tmp_path / f"x.{ending}", tmp_path / "work")


@pytest.mark.parametrize("address", [*ODD_TEXTS, "s3:///x", "s3://a b/x", "s3://../x", "models:/", "runs:/x"])
def test_odd_addresses_are_refused_by_every_verb(tmp_path, monkeypatch, capsys, address):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    for verb, *args in (
        (shard, address, "out", "kind=folder"),
        (shard, address, "out"),
        (weights, "show", address),
        (model, address),
    ):
        assert run_verb(verb.main, args) == 2
        message = capsys.readouterr().err
        assert 20 < len(message) < 1500
        assert message.count("\n") <= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("split", ["../x", "/tmp/x", "a/b", "", ".work", "x" * 65, "a\nb", "\x1b[1m"])
def test_a_split_whose_name_is_no_file_name_is_refused(photos, tmp_path, split):
    (photos / "index.csv").write_text(f'path,label,split\na/0.png,1,train\na/2.png,0,"{split}"\n')
    message = refusal(inspect, photos / "index.csv", tmp_path / "work")
    assert (message is None) == (split == "")
    assert message is None or "expected up to 64 of the characters" in message


@pytest.mark.parametrize(
    "text", ["path,label\ra/0.png,1\r", 'path,label\n"a/0.png,1\n' + "x\n" * 99999, "", "\0", "a,b"]
)
def test_an_index_is_read_or_refused(photos, tmp_path, text):
    (photos / "index.csv").write_text(text, newline="")
    assert (refusal(inspect, photos / "index.csv", tmp_path / "work") is None) == text.endswith("\r")


# ---- tars ------------------------------------------------------------------------------------------------------------


def add(tar, name, content=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content))


def tar_of(path, *members):
    """Write a tar of three samples and some more members: (name, content, fields)."""
    with tarfile.open(path, "w", errors="surrogateescape") as tar:
        for number in range(3):
            add(tar, f"{number}.png", encoded(number))
            add(tar, f"{number}.cls", b"1")
        for name, content, fields in members:
            add(tar, name, content, **fields)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "/abs/x.png",
        "../x.png",
        "a/../../x.png",
        "x\ny.png",
        "x\x1b[1m.png",
        "x" * 300 + ".png",
        "<b>.png",
        "\udcff.png",
    ],
)
def test_odd_member_names_are_taken_or_rejected(tmp_path, name):
    tar_of(tmp_path / "x.tar", (name, encoded(9), {}), (f"{name[:-4]}.cls", b"0", {}))
    listing = inspect(tmp_path / "x.tar", tmp_path / "work")
    leaves = name.startswith(("/", "..", "a/.."))
    assert (len(listing.items), len(listing.rejects)) == ((3, 1) if leaves else (4, 0))
    for item in listing.items:
        item.name.encode()


def test_an_image_that_another_member_replaces_is_counted(tmp_path):
    tar_of(tmp_path / "x.tar", ("0.png", encoded(8), {}), ("1.jpg", encoded(9), {}))
    listing = inspect(tmp_path / "x.tar", tmp_path / "work")
    assert len(listing.items) == 3
    assert [reject.file for reject in listing.rejects] == ["x.tar/0.png", "x.tar/1.png"]


@pytest.mark.parametrize("text", [b"a\nb", b"\x1b[1m", b"\xff\xfe", b"x" * 300, "a\u202eb".encode()])
def test_a_label_that_cannot_name_a_class_is_refused_with_its_image(tmp_path, text):
    """Rejecting its images would leave out a class."""
    tar_of(tmp_path / "x.tar", ("9.png", encoded(9), {}), ("9.cls", text, {}))
    assert re.search(
        r"^label '.*of x.tar/9.png: (expected one line of text, got U\+|got 300 characters, expected at most 200)",
        refusal(inspect, tmp_path / "x.tar", tmp_path / "work"),
    )


@pytest.mark.parametrize("text", [b"-3", b"-1", b"", b" \n"])
def test_an_image_without_a_label_is_rejected(tmp_path, text):
    tar_of(tmp_path / "x.tar", ("9.png", encoded(9), {}), ("9.cls", text, {}))
    listing = inspect(tmp_path / "x.tar", tmp_path / "work")
    assert len(listing.items) == 3
    assert listing.rejects[0].reason.startswith("no label")
    assert listing.rejects[0].reason.isprintable()


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"label": 1e999}', b'{"label": [1]}', b"\xff"])
def test_an_odd_json_label_rejects_its_image(tmp_path, text):
    tar_of(tmp_path / "x.tar", ("9.png", encoded(9), {}), ("9.json", text, {}))
    assert len(inspect(tmp_path / "x.tar", tmp_path / "work").rejects) == 1


@pytest.mark.parametrize(
    "headers",
    [{"size": "9" * 30}, {"GNU.sparse.map": "a,b"}, {"GNU.sparse.size": "x"}, {"GNU.sparse.major": "1"}],
)
def test_forged_headers_are_refused_or_rejected(tmp_path, headers):
    sparse = {"GNU.sparse.minor": "0", "GNU.sparse.name": "9.png", "GNU.sparse.realsize": "9"}
    headers |= sparse if "GNU.sparse.major" in headers else {}
    tar_of(tmp_path / "x.tar", ("9.png", encoded(9), {"pax_headers": headers}))
    message = refusal(inspect, tmp_path / "x.tar", tmp_path / "work")
    assert message is None or "or a damaged one" in message


def test_a_tar_that_is_cut_or_damaged_anywhere_never_loses_images_silently(tmp_path):
    content = tar_of(tmp_path / "x.tar").read_bytes()
    end = 3 * 4 * 512  # of the last member: each image, each label has a header and a block
    damaged = [content[:size] for size in range(0, end + 512, 256)]
    damaged += [content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :] for at in range(0, end, 512)]
    damaged += [content + b"x" * 512]
    for each in damaged:
        (tmp_path / "y.tar").write_bytes(each)
        message = refusal(inspect, tmp_path / "y.tar", tmp_path / "work")
        if message is None:
            listing = inspect(tmp_path / "y.tar", tmp_path / "work")
            assert len(listing.items) + len(listing.rejects) == 3
        else:
            assert "damaged one" in message or "no image" in message or "label 'd' of " in message


def test_a_tar_without_end_blocks_is_refused_with_the_command_that_adds_them(tmp_path):
    """Such a tar equals one that was cut between two members, so it is not read on suspicion."""
    content = tar_of(tmp_path / "x.tar").read_bytes()
    end = 3 * 4 * 512
    for size in (end, end - 4 * 512):
        (tmp_path / "x.tar").write_bytes(content[:size])
        message = refusal(inspect, tmp_path / "x.tar", tmp_path / "work")
        assert "members may be missing" in message
        command = re.search(r"head -c 1024 /dev/zero >> FILE", message)[0]
        subprocess.run(command.replace("FILE", "x.tar"), shell=True, check=True, cwd=tmp_path)
        assert len(inspect(tmp_path / "x.tar", tmp_path / "work").items) == size // 2048


# ---- Parquet and datasets --------------------------------------------------------------------------------------------


def parquet(path, metadata=None, **columns):
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata(metadata) if metadata else table, path)
    return path


def test_odd_parquet_is_refused_or_its_rows_are_rejected(tmp_path):
    images = [encoded(number) for number in range(3)]
    for labels in ([-3, 0, 1], [None, 0, 1], [float("nan"), 0.0, 1.0], [0.5, 0.0, 1.0]):
        source = parquet(tmp_path / "x.parquet", image=images, label=labels)
        assert len(inspect(source, tmp_path / "work").rejects) == 1
    twice = pa.table([images, images, [0, 1, 0]], names=["image", "image", "label"])
    pq.write_table(twice, tmp_path / "x.parquet")
    assert "has 2 columns image; expected one" in refusal(inspect, tmp_path / "x.parquet", tmp_path / "work")
    dotted = pa.table([images, [0, 1, 0]], names=["image.bytes", "label"])
    pq.write_table(dotted, tmp_path / "x.parquet")
    assert len(inspect(tmp_path / "x.parquet", tmp_path / "work", "image=image.bytes").items) == 3


def repeated(value, rows):
    """A column of equal values, which stay one in memory and in a file."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))


def bomb(target, **columns):
    pq.write_table(pa.table(columns), target, store_schema=False)  # otherwise they are read as dictionaries
    return target


def test_a_parquet_with_more_rows_than_bytes_is_refused(tmp_path):
    source = bomb(tmp_path / "x.parquet", image=repeated(b"", 10**6), label=repeated(0, 10**6))
    assert source.stat().st_size < 10_000
    assert "1,000,000 rows in " in refusal(inspect, source, tmp_path / "work")
    source = bomb(tmp_path / "y.parquet", path=repeated("a/0.png", 10**6), label=repeated(0, 10**6))
    assert "1,000,000 rows in " in refusal(inspect, source, tmp_path / "work")


def test_images_and_texts_of_parquet_that_expand_out_of_proportion_are_refused(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SMALL", 2**16)
    image, rows = encoded(0) + bytes(10**5), 400
    source = bomb(tmp_path / "x.parquet", image=repeated(image, rows), label=repeated("a", rows))
    limit = 100 * source.stat().st_size
    assert len(image) < limit < rows * len(image)
    assert f"its images take more than {limit:,}; expected" in refusal(inspect, source, tmp_path / "work")
    index = bomb(photos / "x.parquet", path=repeated("x" * 10**5, rows), label=repeated("a", rows))
    assert "its texts take more than" in refusal(inspect, index, tmp_path / "work")
    zeros = tmp_path / "z.parquet"
    pq.write_table(pa.table({"image": [bytes(10**7)], "label": [0]}), zeros, compression="zstd", use_dictionary=False)
    assert "its rows take more than" in refusal(inspect, zeros, tmp_path / "work")


def test_few_of_the_repeated_images_of_a_row_group_are_in_memory(tmp_path):
    image = np.random.default_rng(0).bytes(10**6)
    source = bomb(tmp_path / "x.parquet", image=repeated(image, 200), label=repeated(0, 200))
    start = pa.total_allocated_bytes()
    for row, content in zip((3, 50, 50, 199), tables.read_images(str(source), None, [3, 50, 50, 199]), strict=True):
        assert content == image, row
        assert pa.total_allocated_bytes() - start < 100 * 10**6


def test_long_texts_as_labels_of_parquet_are_one_object(tmp_path):
    source = bomb(tmp_path / "x.parquet", image=repeated(encoded(0), 500), label=repeated("x" * 10**6, 500))
    labels = tables.read_image_table(str(source), None, None).labels
    assert len(set(map(id, labels))) == 1


def test_labels_of_parquet_that_are_lists_of_lists_are_refused(tmp_path):
    source = parquet(tmp_path / "x.parquet", image=[encoded(0)], label=[[[0, 1]]])
    message = refusal(inspect, source, tmp_path / "w")
    assert "column label is list<element: list<element: int64>>, expected numbers or text, or a list of them" in message


def test_a_class_name_of_a_megabyte_is_refused_with_its_beginning(base, tmp_path, verb):
    features = json.dumps({"info": {"features": {"label": {"names": ["x" * 10**6, "d"]}}}})
    source = parquet(tmp_path / "x.parquet", {"huggingface": features}, image=[encoded(0), encoded(1)], label=[0, 1])
    message = refusal(inspect, source, tmp_path / "work")
    assert message.startswith("class name 'xxx")
    assert "1,000,000 characters, expected at most 200" in message
    names = json.dumps(["a", "b", "x" * 10**6]).encode()
    message = verb(weights, "show", copy_of(base / "base", tmp_path / "m", "classes.json", names))
    assert "1,000,000 characters, expected at most 1000" in message


@pytest.mark.parametrize("names", ["cd", {"c": 1, "d": 2}, [1, 2], [None, "d"], ["c\x1b", "d"], ["\ud800", "d"], 5])
def test_odd_class_names_of_hugging_face_are_refused_or_left_out(tmp_path, names):
    features = json.dumps({"info": {"features": {"label": {"names": names}}}})
    images = {"image": [encoded(0), encoded(1)], "label": [0, 1]}
    source = parquet(tmp_path / "x.parquet", {"huggingface": features}, **images)
    message = refusal(inspect, source, tmp_path / "work")
    assert message is None or "class name" in message
    if message is None:
        assert inspect(source, tmp_path / "work").classes == ("0", "1")


def dataset_of(folder, table):
    """Write a dataset of one shard."""
    folder.mkdir()
    pq.write_table(table, folder / "all.parquet", row_group_size=5)
    split = Split(shards=(shard_of(folder / "all.parquet"),), class_counts=(10, 10))
    save_splits(folder, {"train": split}, ("a", "b"))
    return folder


def rows_of(columns):
    images = [encoded(number) for number in range(20)]
    return pa.table({"image": images, "label": [0, 1] * 10, "key": [str(number) for number in range(20)]} | columns)


def use(folder):
    """Open a dataset and read it as a run does."""
    dataset = open_dataset(str(folder))
    for split in dataset.splits:
        held_out(dataset, Data(train=split, holdout=0.5))
        rows = decoding.locate_rows(dataset, split)
        decoding._local_shard.cache_clear()
        decoding.read_rows(np.arange(rows.starts[-1]), rows)


def changed(tree, path, value):
    """A copy of a JSON tree with one value replaced; Ellipsis removes it."""
    tree = json.loads(json.dumps(tree))
    inner = tree
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return tree


def paths_of(tree, path=()):
    if path:
        yield path
    for step in tree if isinstance(tree, dict) else range(min(len(tree), 1)) if isinstance(tree, list) else ():
        yield from paths_of(tree[step], (*path, step))


def test_every_odd_value_in_a_manifest_is_refused_or_harmless(tmp_path):
    folder = dataset_of(tmp_path / "d", rows_of({}))
    manifest = folder / "dataset.json"
    tree = json.loads(manifest.read_text())
    assert refusal(use, folder) is None
    refused = 0
    paths = [path for path in paths_of(tree) if len(path) == 1 or path[0] in ("splits", "classes", "mean", "columns")]
    texts = [json.dumps(changed(tree, path, value)) for path in paths for value in (*ODD_VALUES, ...)]
    texts += ["", "{", "[]", "null", "[" * 100_000, '{"format":' * 50_000, "9" * 10_000, manifest.read_text() + "x"]
    texts += [json.dumps(changed(tree, ("splits", name), tree["splits"]["train"])) for name in ODD_TEXTS if name != "x"]
    for text in texts:
        manifest.write_text(text)
        refused += refusal(use, folder) is not None
    assert refused > 350


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_shard_is_named_by_one_message(tmp_path_factory, data):
    folder = dataset_of(tmp_path_factory.mktemp("damaged") / "d", rows_of({}))
    content = bytearray((folder / "all.parquet").read_bytes())
    footer = len(content) - 1500
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(footer, len(content) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([0, 9, footer, len(content) - 1, len(content)]))
    (folder / "all.parquet").write_bytes(content[:size])
    message = refusal(use, folder)
    assert message is None or "all.parquet: " in message
    assert size == len(content) or message


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"label": [5] * 20}, "column label: expected a number from 0 to 1"),
        ({"label": [-1] * 20}, "column label"),
        ({"label": ["a"] * 20}, "column label"),
        ({"label": [None] * 20}, "column label"),
        ({"key": pa.nulls(20, pa.string())}, "column key: expected a text"),
        ({"image": pa.nulls(20, pa.binary())}, None),
    ],
)
def test_a_shard_with_other_content_is_refused(tmp_path, columns, fault):
    message = refusal(use, dataset_of(tmp_path / "d", rows_of(columns)))
    assert message is None if fault is None else fault in message


def test_a_shard_that_would_expand_out_of_proportion_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SMALL", 2**16)
    (tmp_path / "d").mkdir()
    rows = pa.table({"image": [bytes(10**7)] * 2, "label": [0, 1], "key": ["a", "b"]})
    pq.write_table(rows, tmp_path / "d/all.parquet", compression="zstd", use_dictionary=False)
    split = Split(shards=(shard_of(tmp_path / "d/all.parquet"),), class_counts=(1, 1))
    save_splits(tmp_path / "d", {"train": split}, ("a", "b"))
    assert "all.parquet: " in (message := refusal(use, tmp_path / "d") or "")
    assert "its rows take more than" in message


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(), (4,), (4, 5, 0), (2**32 - 1,) * 3, (2**22, 2**21, 2**21), (4, 5, 2, 3), (4, 5, 6)]
)
def test_odd_shapes_of_idx_files_are_refused(tmp_path, shape):
    def idx(*sides):
        return struct.pack(f">4B{len(sides)}I", 0, 0, 8, len(sides), *sides)

    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(*shape) + bytes(119))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(4) + bytes(4))
    assert "train-images-idx3-ubyte: " in refusal(inspect, tmp_path, tmp_path / "work")


def test_packed_arrays_that_expand_out_of_proportion_are_refused(tmp_path, monkeypatch):
    images = b"\0\0\x08\x03" + b"".join(side.to_bytes(4) for side in (2**21, 1, 1)) + bytes(2**21)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\1\0")
    assert "expands to more than 1,048,576 bytes" in refusal(inspect, tmp_path, tmp_path / "work")
    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as tar:
        for name in ("data_batch_1.bin", "data_batch_2.bin", "batches.meta.txt"):
            add(tar, name, bytes(3073 * 100))
    monkeypatch.setattr(arrays, "LARGEST", 500_000)
    message = refusal(inspect, tmp_path / "cifar.tar.gz", tmp_path / "work")
    assert "its CIFAR files take more than 500,000 bytes" in message


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model folder `base`, a delta of it, and the files of other libraries."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    run = load_run(None, ["model.name=vit_u2x1_8", "model.image_size=16", "model.num_classes=3"])
    vit = ViT(run.model)
    save_model(str(folder / "base"), run, vit, ["a", "b", "c"])
    with torch.no_grad():
        vit.head.weight.add_(1)
    save_model(str(folder / "delta"), run, vit, ["a", "b", "c"], relative_to=str(folder / "base"))
    torch.save(export_weights(vit, "timm"), folder / "timm.pth")
    save_file(
        {key: tensor.contiguous() for key, tensor in export_weights(vit, "hf").items()}, folder / "hf.safetensors"
    )
    return folder


@pytest.fixture
def verb(capsys, tmp_path, monkeypatch):
    """Run a verb and return its message if it refuses; any other end than 0 or 2 fails the test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")

    def call(main, *args):
        status = run_verb(main.main, [str(arg) for arg in args])
        message = capsys.readouterr().err
        assert status in (0, 2)
        assert len(message) < 1500
        return message if status else None

    return call


def copy_of(folder, target, name, content):
    target.mkdir(exist_ok=True)
    for file in Path(folder).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / name).write_bytes(content)
    return target


CLASSES = [b"", b"{", b"1", b'"abc"', b'["a"]', b"[1,2,3]", b"[" * 100_000, b"\xff", b'["\\u001b","b","c"]']


@pytest.mark.parametrize("text", CLASSES)
def test_odd_class_names_of_a_model_folder_are_refused(base, tmp_path, verb, text):
    assert "classes.json: " in verb(weights, "show", copy_of(base / "base", tmp_path / "m", "classes.json", text))


def test_a_network_of_another_size_is_refused_before_it_is_built(base, tmp_path, verb):
    text = b"model: {name: vit_h900x1_14, num_classes: 3}"
    assert "does not fit" in verb(weights, "show", copy_of(base / "base", tmp_path / "m", "run.yaml", text))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_weights_that_are_no_fractions_are_refused(base, tmp_path, verb, dtype):
    vit = ViT(load_run(base / "base/run.yaml").model)
    save_file({key: tensor.to(dtype) for key, tensor in vit.state_dict().items()}, tmp_path / "x")
    folder = copy_of(base / "base", tmp_path / "m", "model.safetensors", (tmp_path / "x").read_bytes())
    assert f"is {dtype}, expected torch.float32" in verb(weights, "show", folder)
    torch.save({key: tensor.to(dtype) for key, tensor in export_weights(vit, "timm").items()}, tmp_path / "x.pth")
    assert f"is {dtype}, expected torch.float32" in verb(model, tmp_path / "x.pth", "heads=1")


FLOATS = [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def stored(vit, base, folder, change):
    """A copy of the model folder `base` whose tensors are those of a network after `change(name, tensor)`."""
    folder.mkdir()
    state = {name: change(name, tensor) for name, tensor in vit.state_dict().items()}
    save_file(state, folder / "x")
    return copy_of(base / "base", folder, "model.safetensors", (folder / "x").read_bytes())


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_of_every_float_type_are_read_as_float32(base, tmp_path, verb, capsys, dtype):
    vit = ViT(load_run(base / "base/run.yaml").model)
    folder = stored(vit, base, tmp_path / "m", lambda _, tensor: tensor.to(dtype))
    expected = {name: tensor.to(dtype).float() for name, tensor in vit.state_dict().items()}
    loaded = load_model(str(folder)).vit
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    loaded.head.bias.data += 1
    save_model(str(tmp_path / "delta"), Run(model=vit.model), loaded, relative_to=str(folder))
    family = load_deltas(str(folder), {"own": str(folder), "delta": str(tmp_path / "delta")})
    images = torch.rand(2, 3, *vit.model.image_shape)
    own, delta = family(images, ["own", "delta"])
    torch.testing.assert_close(own, load_model(str(folder)).vit(images)[0].detach())
    assert delta.dtype == torch.float32
    assert weights.main(["show", str(folder)])["types"] == [str(dtype)[6:]]
    assert f"100.0%; stored as {str(dtype)[6:]}, read as float32" in capsys.readouterr().out
    torch.save({key: tensor.to(dtype) for key, tensor in export_weights(vit, "timm").items()}, tmp_path / "x.pth")
    assert {tensor.dtype for tensor in read_state(str(tmp_path / "x.pth")).values()} == {torch.float32}


def spoiled(value, dtype=torch.float32):
    """A change that writes a value into two tensors."""

    def change(name, tensor):
        tensor = tensor.to(dtype)
        if name in ("head.bias", "norm.weight"):
            tensor[1] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.float32),
        (-float("inf"), torch.float16),
        (1e300, torch.float64),
        (float("nan"), torch.float8_e4m3fn),
    ],
)
def test_values_that_are_not_finite_are_refused_by_the_name_of_their_tensor(base, tmp_path, verb, value, dtype):
    vit = ViT(load_run(base / "base/run.yaml").model)
    folder = stored(vit, base, tmp_path / "m", spoiled(value, dtype))
    message = "values that are not finite as float32 in head.bias (1 of 3 values), norm.weight (1 of 64 values)"
    assert message in verb(weights, "show", folder)
    assert message in verb(model, folder)
    state = {name: spoiled(value, dtype)(name, tensor) for name, tensor in export_weights(vit, "timm").items()}
    torch.save(state, tmp_path / "x.pth")
    assert f"x.pth: {message}" in verb(model, tmp_path / "x.pth", "heads=1")
    own = load_file(base / "delta/model.safetensors")
    own["head.weight"][0, 0] = torch.inf
    save_file(own, tmp_path / "y")
    delta = copy_of(base / "delta", tmp_path / "d", "model.safetensors", (tmp_path / "y").read_bytes())
    message = "d: model.safetensors: values that are not finite as float32 in head.weight (1 of 192 values)"
    assert message in refusal(load_deltas, str(base / "base"), {"d": str(delta)})


def test_weights_that_cannot_become_float32_are_refused_by_name(base, tmp_path, verb):
    vit = ViT(load_run(base / "base/run.yaml").model)
    packed = torch.empty(3, dtype=torch.float4_e2m1fn_x2)
    folder = stored(vit, base, tmp_path / "m", lambda name, tensor: packed if name == "head.bias" else tensor)
    assert "head.bias is float4_e2m1fn_x2, which cannot be read as float32" in verb(weights, "show", folder)


@pytest.mark.parametrize("setting", ["format", "base", "base.url", "base.beside", "base.identity", "taken"])
def test_every_odd_value_in_a_delta_is_refused_or_harmless(base, tmp_path, verb, setting):
    tree = json.loads((base / "delta/delta.json").read_text())
    for value in (*ODD_VALUES, ...):
        if value == "s3://":
            continue
        text = json.dumps(changed(tree, setting.split("."), value)).encode()
        verb(weights, "show", copy_of(base / "delta", tmp_path / "m", "delta.json", text))


def test_deltas_in_a_circle_are_refused(base, tmp_path, verb):
    tree = json.loads((base / "delta/delta.json").read_text())
    for name, other in (("one", "two"), ("two", "one")):
        location = {"url": str(tmp_path / other), "beside": None, "identity": tree["base"]["identity"]}
        copy_of(base / "delta", tmp_path / name, "delta.json", json.dumps(tree | {"base": location}).encode())
    assert "a delta of itself" in verb(weights, "show", tmp_path / "one")


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_weights_file_is_refused_or_read(base, tmp_path_factory, data):
    name = data.draw(st.sampled_from(["timm.pth", "hf.safetensors", "base/model.safetensors"]))
    content = bytearray((base / name).read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        near_an_end = data.draw(st.integers(-2000, 1999))
        content[near_an_end] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([0, 7, 8, 100, len(content) // 2, len(content) - 1, len(content)]))
    target = tmp_path_factory.mktemp("cut") / Path(name).name
    target.write_bytes(content[:size])
    assert run_verb(model.main, [str(target), "heads=1", "activation=gelu", "norm_eps=1e-6"]) in (0, 2)


@pytest.mark.parametrize(
    "content", [{1: torch.zeros(1)}, {None: torch.zeros(1)}, {"model": {3: torch.zeros(1)}}, [1], 5]
)
def test_a_pickle_without_tensors_by_name_is_refused(tmp_path, verb, content):
    for is_zip in (True, False):
        torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=is_zip)
        assert verb(model, tmp_path / "x.pth")


def test_odd_arrays_are_refused(tmp_path, verb):
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npy").read_bytes())
    assert "it holds one array" in verb(model, tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["x.npz", "x.pth"])
def test_a_weights_file_that_would_expand_out_of_proportion_is_refused(tmp_path, verb, monkeypatch, name):
    monkeypatch.setattr(files, "SMALL", 2**16)
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(2**20, np.float32))
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "stored.pth")
    with ZipFile(tmp_path / "stored.pth") as stored, ZipFile(tmp_path / "x.pth", "w", ZIP_DEFLATED) as packed:
        for member in stored.namelist():
            packed.writestr(member, stored.read(member))
    assert "expected at most 20 times as many" in verb(model, tmp_path / name)


def test_a_tensor_that_shows_one_stored_value_everywhere_is_refused(tmp_path, verb):
    whole = torch.zeros(1).as_strided((2**30, 2**20), (0, 0))
    torch.save({"a": whole}, tmp_path / "x.pth")
    assert (tmp_path / "x.pth").stat().st_size < 10_000
    assert "a shows 4 bytes as 4,503,599,627,370,496" in verb(model, tmp_path / "x.pth")


@pytest.mark.parametrize("content", [b"run: 1\n", b"hello", b"(.", b"\x85x"])
def test_a_delta_of_a_file_without_weights_says_so(base, tmp_path, verb, content):
    (tmp_path / "stray").write_bytes(content)
    tree = json.loads((base / "delta/delta.json").read_text())
    tree["base"] |= {"url": str(tmp_path / "stray"), "beside": None}
    message = verb(weights, "show", copy_of(base / "delta", tmp_path / "m", "delta.json", json.dumps(tree).encode()))
    assert "stray: not a known weights file: its bytes are neither safetensors nor of torch.save" in message


@pytest.mark.parametrize("shape", [(), (3,), (0, 0), (1, 1, 1, 1)])
def test_tensors_of_any_shape_are_refused_or_read(base, tmp_path, verb, shape):
    whole = torch.load(base / "timm.pth")
    for name in whole:
        torch.save(whole | {name: torch.zeros(shape)}, tmp_path / "x.pth")
        verb(model, tmp_path / "x.pth", "heads=1", "activation=gelu", "norm_eps=1e-6")


@pytest.mark.parametrize("setting", ["model_type", "hidden_act", "num_attention_heads", "layer_norm_eps", "image_size"])
def test_every_odd_value_in_a_config_of_hugging_face_is_refused_or_harmless(base, tmp_path, verb, setting):
    known = {
        "model_type": "vit",
        "hidden_act": "gelu",
        "num_attention_heads": 1,
        "layer_norm_eps": 1e-6,
        "image_size": 16,
    }
    (tmp_path / "m").mkdir()
    (tmp_path / "m/model.safetensors").write_bytes((base / "hf.safetensors").read_bytes())
    for value in ODD_VALUES:
        (tmp_path / "m/config.json").write_text(json.dumps(known | {setting: value}))
        verb(model, tmp_path / "m", "normalize={}")
    (tmp_path / "m/config.json").write_text(json.dumps(known))
    for value in ODD_VALUES:
        (tmp_path / "m/preprocessor_config.json").write_text(json.dumps({"image_mean": value, "image_std": [1, 1, 1]}))
        verb(model, tmp_path / "m")


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(base):
    served = ImageClassifier()
    served.load_context(SimpleNamespace(artifacts={"model": str(base / "base")}))
    return served


REQUESTS = (
    None,
    5,
    True,
    float("nan"),
    "no base64",
    b"",
    {},
    {"image": None},
    {"image": 5},
    {f"c{n}": 1 for n in range(9999)},
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda value: repr(value)[:20])
def test_an_odd_request_is_refused_with_a_short_message(classifier, request_):
    with pytest.raises(MlflowException) as rejected:
        classifier.predict(request_)
    assert len(str(rejected.value)) < 1500


ODD_IMAGES = (
    np.full((4, 4, 3), "x"),
    np.zeros((1, 30_000_000, 3), np.uint8),
    np.zeros((4, 4, 3), bool),
    "\ud800",
    object(),
)


@pytest.mark.parametrize("image", [*ODD_IMAGES, *ODD_VALUES], ids=lambda value: repr(value)[:20])
def test_an_odd_image_of_a_request_is_named_by_its_index(classifier, image):
    with pytest.raises(MlflowException, match="image 0: "):
        classifier.predict([{"image": image}])


@pytest.mark.parametrize("top_k", ["1", 1.5, [1], {}, 0, -1, 10**30])
def test_an_odd_number_of_classes_is_refused(classifier, top_k):
    with pytest.raises(MlflowException, match=r"top_k: got .*, expected 1 to 3"):
        classifier.predict([{"image": encoded(0)}], {"top_k": top_k})
