"""Hostile and broken files: sources, shards, manifests and weights give one short message, or a counted reject."""

import io
import json
import os
import re
import socket
import struct
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

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
from safetensors.torch import save_file

from pipelines import model, shard, weights
from pipelines.__main__ import run_verb
from vitray import storage
from vitray.config import load_run
from vitray.data.augment.decode import UndecodableImage, decode_image, decode_with_pillow
from vitray.data.shards import holdout_mask, open_dataset, read_request
from vitray.data.shards.inspection import inspect_chunk
from vitray.data.shards.manifest import Split
from vitray.data.shards.sources import detect_source, list_source
from vitray.data.stream import decoding
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.tracking.pyfunc import ImageClassifier
from vitray.weights import export_weights, save_model

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
    assert "c/back: a link to a folder that it lies in" in refusal(inspect, photos, tmp_path / "work")


def test_a_file_name_that_is_not_text_is_refused(photos, tmp_path):
    with open(os.fsencode(photos) + b"/a/\xff.png", "wb") as file:
        file.write(encoded(9))
    assert r"a/\udcff.png': wanted a path of UTF-8 text" in refusal(inspect, photos, tmp_path / "work")


@pytest.mark.parametrize("read", [storage.read_bytes, storage.read_json, lambda url: storage.read_range(url, 0, 1)])
def test_reading_a_pipe_or_a_device_ends_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for url in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        assert "a folder, pipe or device; wanted a file" in refusal(read, str(url))
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
    assert message is None or "wanted up to 64 of the characters" in message


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
    assert "has 2 columns image; wanted one" in refusal(inspect, tmp_path / "x.parquet", tmp_path / "work")
    dotted = pa.table([images, [0, 1, 0]], names=["image.bytes", "label"])
    pq.write_table(dotted, tmp_path / "x.parquet")
    assert len(inspect(tmp_path / "x.parquet", tmp_path / "work", "image=image.bytes").items) == 3


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
        holdout_mask(dataset, split, 0.5)
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
        ({"label": [5] * 20}, "column label: wanted a number from 0 to 1"),
        ({"label": [-1] * 20}, "column label"),
        ({"label": ["a"] * 20}, "column label"),
        ({"label": [None] * 20}, "column label"),
        ({"key": pa.nulls(20, pa.string())}, "column key: wanted a text"),
        ({"image": pa.nulls(20, pa.binary())}, None),
    ],
)
def test_a_shard_with_other_content_is_refused(tmp_path, columns, fault):
    message = refusal(use, dataset_of(tmp_path / "d", rows_of(columns)))
    assert message is None if fault is None else fault in message


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
    assert f"is {dtype}, wanted torch.float32" in verb(weights, "show", folder)
    torch.save({key: tensor.to(dtype) for key, tensor in export_weights(vit, "timm").items()}, tmp_path / "x.pth")
    assert f"is {dtype}, wanted torch.float32" in verb(model, tmp_path / "x.pth", "heads=1")


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
        verb(model, tmp_path / "m", "normalise={}")
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
    with pytest.raises(MlflowException, match=r"top_k: got .*, wanted 1 to 3"):
        classifier.predict([{"image": encoded(0)}], {"top_k": top_k})
