"""Writing datasets: every kind of source, odd and broken images, reproducible bytes."""

import gzip
import hashlib
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipelines import shard
from pipelines.__main__ import run_verb
from vitray.config import load_run
from vitray.data.augment.decode import UndecodableImage, decode_with_pillow
from vitray.data.shards import ShardSettings, inspection, open_dataset, read_request, write_dataset, writing
from vitray.data.shards.demo import CLASSES, demo_item
from vitray.data.shards.inspection import image_stats
from vitray.data.shards.sources import Listing, detect_source, list_source, read_items
from vitray.data.shards.tasks import ProgressLine, Tasks
from vitray.data.shards.writing import _check_indexable, find_duplicates, select_classes
from vitray.errors import ConfigError, OwnershipLost
from vitray.inference.images import open_images
from vitray.models.network import build_network
from vitray.system import storage
from vitray.system.lease import own_folder
from vitray.system.processes import process_tags
from vitray.weights import load_model, save_model

ROOT = Path(__file__).parent.parent


def photo(number: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    """Return a smooth picture, different for each number."""
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    image.save(content := io.BytesIO(), form, **options)
    return content.getvalue()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def class_folders(root: Path, counts: dict[str, int]) -> Path:
    """Write class folders: {"train/cat": 3} writes three different JPEGs there."""
    number = 0
    for folder, count in counts.items():
        for index in range(count):
            write(root / folder / f"{index:03d}.jpg", encoded(photo(number)))
            number += 1
    return root


def call_here(function, call):
    """A place of tasks, in this process."""
    future = Future()
    future.set_result(function(*call))
    return future


HERE = Tasks([call_here])


def listed(source: Path | str, *overrides: str, splits: tuple[str, ...] = ()) -> Listing:
    request = read_request(str(source), "unused", splits, overrides)
    return list_source(request, detect_source(request), HERE.run)


def contents(listing: Listing, source: Path | str, *overrides: str) -> list[tuple[bytes, int | None]]:
    return list(read_items(listing.kind, listing.items, read_request(str(source), "unused", (), overrides)))


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(decode_with_pillow(content))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(dataset_folder: Path, split: str) -> pa.Table:
    dataset = open_dataset(str(dataset_folder))
    return pa.concat_tables([pq.read_table(dataset.address(part)) for part in dataset.splits[split].shards])


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_a_folder_of_class_folders(tmp_path):
    class_folders(tmp_path, {"cat": 2, "ant": 1})
    write(tmp_path / "README", b"words")
    listing = listed(tmp_path)
    assert listing.kind == "folder"
    assert listing.classes == ("ant", "cat")
    assert [(item.split, item.name, item.label) for item in listing.items] == [
        ("train", "ant/000.jpg", 0),
        ("train", "cat/000.jpg", 1),
        ("train", "cat/001.jpg", 1),
    ]
    assert listing.rejects == [("train", "README", "not in a class folder")]
    assert contents(listing, tmp_path)[1] == ((tmp_path / "cat/000.jpg").read_bytes(), 1)


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet", "idx", "index"])
def test_the_files_of_a_source_are_listed_once(tmp_path, monkeypatch, kind):
    class_folders(tmp_path / "images", {"x": 2})
    source = tmp_path / "images"
    match kind:
        case "tar":
            source = tmp_path / "tars"
            source.mkdir()
            with tarfile.open(source / "a.tar", "w") as tar:
                tar.add(tmp_path / "images/x/000.jpg", "0.jpg")
                add(tar, "0.cls", b"1")
        case "parquet":
            source = tmp_path / "tables"
            source.mkdir()
            pq.write_table(pa.table({"image": [encoded(photo(0))], "label": [0]}), source / "a.parquet")
        case "idx":
            source = tmp_path / "arrays"
            write(source / "train-images-idx3-ubyte", struct.pack(">IIII", 0x803, 1, 2, 2) + bytes(4))
            write(source / "train-labels-idx1-ubyte", struct.pack(">II", 0x801, 1) + bytes(1))
        case "index":
            source = write(tmp_path / "index.csv", b"path,label\nimages/x/000.jpg,0\n")
    calls = []
    real = storage.list_entries
    monkeypatch.setattr(storage, "list_entries", lambda url: calls.append(url) or real(url))
    images = open_images(str(source), "train")
    assert len(images) == (2 if kind == "folder" else 1)
    assert len(calls) == 1


def test_a_file_of_any_name_is_read_as_the_kind_that_is_set(tmp_path):
    with tarfile.open(tmp_path / "images.wds", "w") as tar:
        add(tar, "0.jpg", encoded(photo(0)))
        add(tar, "0.cls", b"1")
    assert [item.label for item in listed(tmp_path / "images.wds", "kind=tar").items] == [1]


def test_a_folder_with_splits_on_top(tmp_path):
    class_folders(tmp_path, {"train/cat": 2, "train/ant/deeper": 1, "validation/cat": 1})
    listing = listed(tmp_path)
    assert [(item.split, item.label) for item in listing.items] == [
        ("train", 0),
        ("train", 1),
        ("train", 1),
        ("val", 1),
    ]
    assert {item.split for item in listed(tmp_path, splits=("val",)).items} == {"val"}
    with pytest.raises(ConfigError, match=r"--split vla: .* has train, val; did you mean"):
        listed(tmp_path, splits=("vla",))


def test_a_share_is_drawn_by_the_seed(tmp_path):
    class_folders(tmp_path, {"cat": 20})
    drawn = [[item.name for item in listed(tmp_path, f"seed={seed}", splits=("val=0.25",)).items if item.split == "val"]
             for seed in (0, 0, 1)]  # fmt: skip
    assert len(drawn[0]) == 5
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_index_of_paths(tmp_path, form):
    class_folders(tmp_path / "images", {"x": 3})
    write(tmp_path.parent / "outside.jpg", encoded(photo(9)))
    index = {
        "path": ["images/x/001.jpg", "images/x/../x/000.jpg", "../outside.jpg", "/etc/passwd", "images/x/9.jpg", ""],
        "label": ["dog", "cat", "cat", "cat", "cat", "cat"],
        "split": ["train", "val", "train", "train", "train", "train"],
    }
    if form == "csv":
        lines = [",".join(row) for row in zip(*index.values(), strict=True)]
        source = write(tmp_path / "index.csv", "\n".join(["path,label,split", *lines]).encode())
    else:
        pq.write_table(pa.table(index), source := tmp_path / "index.parquet")
    listing = listed(source)
    assert listing.kind == "index"
    assert listing.classes == ("cat", "dog")
    assert [(item.split, item.name, item.label) for item in listing.items] == [
        ("train", "images/x/001.jpg", 1),
        ("val", "images/x/../x/000.jpg", 0),
    ]
    reasons = [reason for _, _, reason in listing.rejects]
    assert reasons == ["the path leaves the folder of the index"] * 2 + ["no such file"] * 2
    assert contents(listing, source)[0] == ((tmp_path / "images/x/001.jpg").read_bytes(), 1)


def test_an_index_of_numbers_keeps_them(tmp_path):
    class_folders(tmp_path, {"x": 2})
    source = write(tmp_path / "index.tsv", b"file\tclass\nx/000.jpg\t2\nx/001.jpg\t0\n")
    listing = listed(source)
    assert listing.classes == ("0", "1", "2")
    assert [item.label for item in listing.items] == [2, 0]
    with pytest.raises(ConfigError, match=r"no column 'klass'; it has file, class: set label=COLUMN; did you mean"):
        listed(source, "label=klass")


LABELS = ("index.csv", "index.parquet", "x.parquet", "cls.tar", "json.tar")


def labeled(folder: Path, form: str, labels: list) -> Path:
    """Write images with these labels as a source of one of the forms that have labels as numbers or text."""
    contents = [encoded(photo(number)) for number in range(len(labels))]
    source = folder / form
    match form:
        case "x.parquet":
            pq.write_table(pa.table({"image": contents, "label": labels}), source)
        case "cls.tar" | "json.tar":
            with tarfile.open(source, "w") as tar:
                for number, (content, label) in enumerate(zip(contents, labels, strict=True)):
                    text = str(label) if form == "cls.tar" else json.dumps({"label": label})
                    for name, member in ((f"{number:02d}.jpg", content), (f"{number:02d}.{form[:-4]}", text.encode())):
                        (info := tarfile.TarInfo(name)).size = len(member)
                        tar.addfile(info, io.BytesIO(member))
        case _:
            for number, content in enumerate(contents):
                write(folder / f"{number:02d}.jpg", content)
            table = pa.table({"path": [f"{number:02d}.jpg" for number in range(len(labels))], "label": labels})
            pa_csv.write_csv(table, source) if form == "index.csv" else pq.write_table(table, source)
    return source


@pytest.mark.parametrize("form", LABELS)
def test_numbers_stay_the_labels_or_are_refused(tmp_path, form):
    def labels(*values) -> list:
        listing = listed(labeled(tmp_path, form, list(values)))
        assert listing.classes == tuple(map(str, range(len(listing.classes))))
        return [item.label for item in listing.items]

    assert labels(*range(12)) == [*range(12)]
    assert labels(3, 999) == [3, 999], "numbers in between are classes without images"
    assert labels(2.0, 10.0, 0.0) == [2, 10, 0], "as a column with missing values is stored"
    source = labeled(tmp_path, form, [*range(12), 1_000_000])
    with pytest.raises(
        ConfigError,
        match=r"^label 1000000 of (12.jpg|x.parquet:12|(cls|json).tar/12.jpg): as the number of a class it would make"
        r" 1,000,001 classes, and the labels are 13 different numbers; correct that label, or number the",
    ):
        listed(source)
    source = labeled(tmp_path, form, [*map(str, range(12)), "unknown"])
    with pytest.raises(ConfigError, match=r"^label 'unknown' of .*12.*: expected a number, as the label 2 of .*2"):
        listed(source)
    names = [*map(str, range(10)), "A", "B"]  # as sorted names, the numbers stay the labels
    assert listed(labeled(tmp_path, form, names)).classes == tuple(names)


@pytest.mark.parametrize("form", LABELS)
def test_a_class_name_is_any_line_of_text(tmp_path, form):
    """A joiner inside a Persian word, a joined emoji, a space that does not break, a wide space."""
    names = [
        "\u0645\u06cc\u200c\u0631\u0648\u0645",
        "\U0001f469\u200d\U0001f4bb",
        "New\u00a0York",
        "\u6771\u3000\u4eac",
    ]
    listing = listed(labeled(tmp_path, form, names))
    assert [listing.classes[item.label] for item in listing.items] == names
    assert listing.rejects == []


@pytest.mark.parametrize(
    ("name", "odd"),
    [("a\u202eb", r"U\+202E"), ("a\u2066b", r"U\+2066"), ("a\x1b[1m", r"U\+001B"), ("a\u2028b", r"U\+2028")],
)
@pytest.mark.parametrize("form", ["folder", *LABELS])
def test_a_class_that_cannot_be_named_is_refused(tmp_path, form, name, odd):
    if form == "folder":
        source = class_folders(tmp_path / "s", {"cat": 3, name: 1})
    else:
        source = labeled(tmp_path, form, ["cat"] * 3 + [name])
    with pytest.raises(ConfigError, match=f"^label '.*' of .*: expected one line of text, got {odd}$"):
        listed(source)


def test_a_folder_of_any_name_is_a_class(tmp_path):
    assert listed(class_folders(tmp_path / "s", {"-1": 2, "10": 1, "9": 1})).classes == ("-1", "10", "9")
    with pytest.raises(ConfigError, match="class name ' ': expected one line of text"):
        listed(class_folders(tmp_path / "s", {" ": 1}))


def test_class_names_stay_the_same_in_a_dataset_and_a_model_folder(tmp_path, without_ray):
    names = ["New\u00a0York", "\U0001f469\u200d\U0001f4bb"]
    class_folders(tmp_path / "s", dict.fromkeys(names, 2))
    dataset = write_dataset(read_request(str(tmp_path / "s"), str(tmp_path / "d")))
    assert list(dataset.classes) == list(open_dataset(str(tmp_path / "d")).classes) == names
    run = load_run(None, ["model={name: vit_u2x2_8, image_size: 32, num_classes: 2}"])
    save_model(str(tmp_path / "m"), run, build_network(run.model), dataset.classes)
    assert load_model(str(tmp_path / "m")).classes == names


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_a_changed_file_is_inspected_again(tmp_path, monkeypatch, kind):
    source, names = tmp_path / "source", []
    source.mkdir()

    def stop(_tasks, _function, calls, *_):
        names.append(calls[0][3])
        raise InterruptedError

    monkeypatch.setattr(inspection, "run_with_progress", stop)
    for content in (b"one", b"two", b"two"):  # of equal size
        match kind:
            case "folder":
                file = source / "x/0.jpg"
            case "tar":
                file = source / "a.tar"
            case "parquet":
                file = source / "a.parquet"
        if not file.exists() or content not in file.read_bytes():
            file.parent.mkdir(exist_ok=True)
            if kind == "folder":
                file.write_bytes(content)
            elif kind == "parquet":
                pq.write_table(pa.table({"image": [content], "label": [0]}), file)
            else:
                with tarfile.open(file, "w") as tar:
                    add(tar, "0.jpg", content)
                    add(tar, "0.cls", b"1")
        with pytest.raises(InterruptedError):
            inspection.inspect_source(read_request(str(source), str(tmp_path / "data")), listed(source), HERE)
    assert names[0] != names[1]
    assert names[1] == names[2]


def test_a_file_with_an_empty_row_group_cannot_stay_as_it_is(tmp_path):
    table = pa.table({"image": [b"x", b"y"], "label": [0, 1]})
    with pq.ParquetWriter(tmp_path / "train.parquet", table.schema) as writer:
        for part in (table.slice(0, 1), table.slice(0, 0), table.slice(1)):
            writer.write_table(part)
    listing = listed(tmp_path)
    assert [item.place for item in listing.items] == [0, 1]
    with pytest.raises(ConfigError, match=r"train.parquet: row group 1 is empty; expected files without such groups"):
        _check_indexable(listing)


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def test_webdataset_tars(tmp_path):
    images = [encoded(photo(number)) for number in range(4)]
    with tarfile.open(tmp_path / "set-train-000.tar", "w") as tar:
        add(tar, "a/0001.jpg", images[0])
        add(tar, "a/0001.cls", b"3")
        add(tar, "0002.json", json.dumps({"label": 1}).encode())
        add(tar, "0002.png", images[1])
        add(tar, "../escape.jpg", images[2])
        add(tar, "../escape.cls", b"0")
        link = tarfile.TarInfo("0003.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        add(tar, "0003.cls", b"0")
        add(tar, "0004.jpg", images[3])
    with tarfile.open(tmp_path / "set-val-000.tar", "w") as tar:
        add(tar, "0005.jpg", images[3])
        add(tar, "0005.cls", b"2")
    listing = listed(tmp_path)
    assert listing.kind == "tar"
    assert [(item.split, item.name, item.label) for item in listing.items] == [
        ("train", "set-train-000.tar/a/0001.jpg", 3),
        ("train", "set-train-000.tar/0002.png", 1),
        ("val", "set-val-000.tar/0005.jpg", 2),
    ]
    assert {(name.partition("/")[2], reason) for _, name, reason in listing.rejects} == {
        ("../escape.jpg", "the member's name leaves the archive"),
        ("0003.jpg", "the member is no plain file"),
        ("0004.jpg", "no label"),
    }
    assert contents(listing, tmp_path) == [(images[0], 3), (images[1], 1), (images[3], 2)]


def hugging_face(path: Path, first: int, count: int) -> None:
    """A Parquet file as `datasets` writes it: a struct of bytes and path, class names in the metadata."""
    images = [{"bytes": encoded(photo(first + row)), "path": f"{row}.jpg"} for row in range(count)]
    table = pa.table({"image": images, "label": [row % 2 for row in range(count)]})
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=4)


def test_hugging_face_parquet(tmp_path):
    hugging_face(tmp_path / "data/train-00000-of-00001.parquet", 0, 10)
    hugging_face(tmp_path / "data/validation-00000-of-00001.parquet", 50, 3)
    listing = listed(tmp_path)
    assert listing.kind == "parquet"
    assert listing.classes == ("cat", "dog")
    assert [item.split for item in listing.items] == ["train"] * 10 + ["val"] * 3
    read = contents(listing._replace(items=[listing.items[5], listing.items[9], listing.items[11]]), tmp_path)
    assert read == [(encoded(photo(5)), 1), (encoded(photo(9)), 1), (encoded(photo(51)), 1)]


def cifar_batch(first: int, count: int) -> dict:
    return {"data": np.arange(first, first + count * 3072).astype(np.uint8).reshape(count, 3072)}


def test_cifar_10(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write(folder / "data_batch_1", pickle.dumps(cifar_batch(0, 3) | {"labels": [1, 0, 1]}, protocol=2))
    write(folder / "test_batch", pickle.dumps(cifar_batch(9, 2) | {"labels": [0, 1]}))
    write(folder / "batches.meta", pickle.dumps({"label_names": ["plane", "car"]}))
    listing = listed(folder)
    assert listing.kind == "cifar"
    assert listing.classes == ("plane", "car")
    assert [item.split for item in listing.items] == ["train"] * 3 + ["test"] * 2
    assert [item.label for item in listing.items] == [1, 0, 1, 0, 1]
    content = contents(listing, folder)[1][0]
    assert np.array_equal(pixels(content), cifar_batch(0, 3)["data"][1].reshape(3, 32, 32).transpose(1, 2, 0))


@pytest.mark.parametrize(
    "content", [b"cnumpy\nndarray\n((I8589934592\ntS'O'\ntR.", pickle.dumps({"data": np.array([None])}, protocol=2)]
)
def test_a_pickle_that_asks_for_memory_or_objects_is_refused(tmp_path, content):
    write(tmp_path / "data_batch_1", content)
    write(tmp_path / "test_batch", content)
    write(tmp_path / "batches.meta", pickle.dumps({"label_names": ["plane", "car"]}))
    with pytest.raises(ConfigError, match="not a batch of CIFAR"):
        listed(tmp_path)


def test_cifar_100_in_its_archive(tmp_path):
    train = {b"data": cifar_batch(0, 2)["data"], b"fine_labels": [1, 0], b"coarse_labels": [0, 0]}
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as tar:
        add(tar, "cifar-100-python/train", pickle.dumps(train))
        meta = {"fine_label_names": ["apple", "bee"], "coarse_label_names": ["thing"]}
        add(tar, "cifar-100-python/meta", pickle.dumps(meta))
    source = tmp_path / "cifar-100-python.tar.gz"
    assert listed(source).classes == ("apple", "bee")
    assert [item.label for item in listed(source, "label=coarse_labels").items] == [0, 0]


def test_some_classes_are_taken_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "data_batch_1", pickle.dumps(cifar_batch(0, 4) | {"labels": [2, 0, 1, 2]}))
    write(tmp_path / "test_batch", pickle.dumps(cifar_batch(9, 2) | {"labels": [0, 2]}))
    write(tmp_path / "batches.meta", pickle.dumps({"label_names": ["plane", "car", "bird", "cat"]}))
    listing = listed(tmp_path)
    taken = select_classes(listing, ["bird", "plane"])
    assert taken.classes == ("bird", "plane")
    assert [(item.split, item.label) for item in taken.items] == [
        ("train", 0), ("train", 1), ("train", 0), ("test", 1), ("test", 0)
    ]  # fmt: skip
    assert [item._replace(label=None) for item in taken.items] == [
        item._replace(label=None) for item in listing.items if item.label != 1
    ]
    assert select_classes(listing, None) is listing


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["birds"], "classes: got birds, expected some of plane, car, bird, cat; did you mean bird"),
        (["car", "car"], "classes: got car more than once"),
        (["cat"], "classes: no image of cat"),
    ],
)
def test_classes_that_cannot_be_taken_are_refused(tmp_path, names, message):
    write(tmp_path / "data_batch_1", pickle.dumps(cifar_batch(0, 3) | {"labels": [2, 0, 1]}))
    write(tmp_path / "batches.meta", pickle.dumps({"label_names": ["plane", "car", "bird", "cat"]}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        select_classes(listed(tmp_path), names)


def test_the_classes_are_a_recorded_setting_only_where_they_are_set(tmp_path):
    some = read_request("photos", str(tmp_path), overrides=["classes=[bird,plane]"])
    assert some.settings.classes == ("bird", "plane")
    assert some.recorded()["classes"] == ["bird", "plane"]
    assert "classes" not in read_request("photos", str(tmp_path)).recorded()
    with pytest.raises(ConfigError, match="the demo does not"):
        select_classes(listed("demo", "images=16"), [CLASSES["shape"][0]])


def cifar_binary(labels: list[tuple[int, ...]], first: int = 0) -> bytes:
    rows = cifar_batch(first, len(labels))["data"]
    return b"".join(bytes(own) + row.tobytes() for own, row in zip(labels, rows, strict=True))


def test_cifar_10_in_binary_is_the_same_as_for_python(tmp_path):
    python, binary = tmp_path / "python", tmp_path / "binary"
    write(python / "data_batch_1", pickle.dumps(cifar_batch(0, 3) | {"labels": [1, 0, 1]}))
    write(python / "test_batch", pickle.dumps(cifar_batch(9, 2) | {"labels": [0, 1]}))
    write(python / "batches.meta", pickle.dumps({"label_names": ["plane", "car"]}))
    write(binary / "data_batch_1.bin", cifar_binary([(1,), (0,), (1,)]))
    write(binary / "test_batch.bin", cifar_binary([(0,), (1,)], 9))
    write(binary / "batches.meta.txt", b"plane\ncar\n\n")
    write(binary / "readme.html", b"<html>")
    one, other = listed(python), listed(binary)
    assert (other.kind, other.classes) == ("cifar", one.classes)
    strip = lambda item: (item.split, item.name, item.place, item.label)  # noqa: E731
    assert list(map(strip, other.items)) == list(map(strip, one.items))
    assert contents(other, binary) == contents(one, python)


def test_cifar_100_in_its_binary_archive(tmp_path):
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as tar:
        add(tar, "cifar-100-binary/train.bin", cifar_binary([(0, 1), (0, 0)]))
        add(tar, "cifar-100-binary/fine_label_names.txt", b"apple\nbee\n")
        add(tar, "cifar-100-binary/coarse_label_names.txt", b"thing\n")
    source = tmp_path / "cifar-100-binary.tar.gz"
    assert listed(source).classes == ("apple", "bee")
    assert [item.label for item in listed(source).items] == [1, 0]
    assert [item.label for item in listed(source, "label=coarse_labels").items] == [0, 0]


def test_a_binary_batch_that_is_cut_is_refused(tmp_path):
    write(tmp_path / "data_batch_1.bin", cifar_binary([(1,), (0,)])[:-1])
    write(tmp_path / "batches.meta.txt", b"plane\ncar\n")
    with pytest.raises(ConfigError, match=r"data_batch_1\.bin: 6,145 bytes, expected a multiple of 3,073"):
        listed(tmp_path)


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_no_code(tmp_path):
    write(tmp_path / "bad/data_batch_1", pickle.dumps({"data": Attack(tmp_path / "ran"), "labels": [0]}))
    write(tmp_path / "bad/batches.meta", pickle.dumps({"label_names": ["a"]}))
    with pytest.raises(ConfigError, match=r"the file asks for posix\.mkdir"):
        listed(tmp_path / "bad")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_idx(tmp_path, compress):
    suffix = ".gz" if compress is gzip.compress else ""
    images = np.arange(2 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5)
    for name in ("train", "t10k"):
        head = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
        write(tmp_path / f"{name}-images-idx3-ubyte{suffix}", compress(head + images.tobytes()))
        write(tmp_path / f"{name}-labels-idx1-ubyte{suffix}", compress(struct.pack(">4BI", 0, 0, 8, 1, 2) + b"\7\0"))
    listing = listed(tmp_path)
    assert listing.kind == "idx"
    assert [(item.split, item.label) for item in listing.items] == [
        ("test", 7),
        ("test", 0),
        ("train", 7),
        ("train", 0),
    ]
    assert np.array_equal(pixels(contents(listing, tmp_path)[1][0])[..., 0], images[1])


def test_the_demo(tmp_path):
    overrides = ("images=6", "val_share=0.5", "image_size=16", "seed=3", "task=texture")
    listing = listed("demo", *overrides)
    assert [item.split for item in listing.items] == ["train"] * 6 + ["val"] * 3
    assert listing.classes == CLASSES["texture"]
    assert contents(listing, "demo", *overrides)[7] == demo_item(7, 3, 16, "texture")


# ---- images ----------------------------------------------------------------------------------------------------------


def exif_rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    return encoded(photo(1), exif=exif)


def palette_with_alpha() -> bytes:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(1, (4, 0, 8, 8))
    return encoded(image, "PNG", transparency=0)


def animated() -> bytes:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def flat(image: Image.Image, form: str = "PNG") -> bytes:
    return encoded(image, form)


HANDLED = {
    "cmyk": (flat(Image.new("CMYK", (8, 6), (0, 255, 255, 0)), "JPEG"), (8, 6), (254, 0, 0)),
    "16-bit": (flat(Image.fromarray(np.full((6, 8), 40000, np.uint16))), (8, 6), (156, 156, 156)),
    "palette with alpha": (palette_with_alpha(), (8, 8), (255, 255, 255)),
    "alpha": (flat(Image.new("RGBA", (8, 6), (255, 0, 0, 0))), (8, 6), (255, 255, 255)),
    "gray": (flat(Image.new("L", (8, 6), 77)), (8, 6), (77, 77, 77)),
    "gray with alpha": (flat(Image.new("LA", (8, 6), (0, 128))), (8, 6), (127, 127, 127)),
    "1-bit": (flat(Image.new("1", (8, 6), 1)), (8, 6), (255, 255, 255)),
    "animated": (animated(), (8, 8), (255, 0, 0)),
    "webp": (encoded(Image.new("RGB", (8, 6), "blue"), "WEBP", lossless=True), (8, 6), (0, 0, 255)),
}


@pytest.mark.parametrize("name", HANDLED)
def test_an_image_is_decoded_as_a_viewer_shows_it(name):
    content, size, corner = HANDLED[name]
    image = decode_with_pillow(content)
    assert (image.mode, image.size) == ("RGB", size)
    assert np.abs(np.subtract(image.getpixel((0, 0)), corner)).max() <= 1


def test_exif_turns_an_image_upright():
    assert decode_with_pillow(exif_rotated()).size == (16, 24)
    unrotated = decode_with_pillow(encoded(photo(1)))
    assert np.array_equal(
        np.asarray(decode_with_pillow(exif_rotated())), np.asarray(unrotated.transpose(Image.Transpose.ROTATE_270))
    )


def bomb() -> bytes:
    """A PNG that claims 60,000 pixels a side."""
    content = flat(Image.new("L", (8, 8)))
    head = b"IHDR" + struct.pack(">II", 60000, 60000) + content[24:29]
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


BROKEN = {
    "empty": (b"", "empty file"),
    "text": (b"<html>404 not found</html>", "not an image"),
    "truncated": (encoded(photo(1))[:-40], "cannot be decoded: .*truncated"),
    "truncated png": (flat(photo(1))[:-40], "cannot be decoded: .*truncated"),
    "bomb": (bomb(), "too large"),
    "postscript": (encoded(photo(1), "EPS"), "not an image"),
    "float": (encoded(Image.new("F", (8, 8), 0.5), "TIFF"), "unknown brightness scale: floating point"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_undecodable_image_is_rejected_with_a_reason(name):
    content, reason = BROKEN[name]
    with pytest.raises(UndecodableImage, match=reason) as first:
        decode_with_pillow(content)
    with pytest.raises(UndecodableImage) as second:
        decode_with_pillow(content)
    assert str(first.value) == str(second.value)


def test_the_pixel_limit_is_a_setting():
    assert decode_with_pillow(encoded(photo(1)), 24 * 16).size == (24, 16)
    with pytest.raises(UndecodableImage, match="too large: 24x16, max_pixels=383"):
        decode_with_pillow(encoded(photo(1)), 383)


def test_moments_are_exact():
    image = photo(3)
    values = np.asarray(image).reshape(-1, 3).astype(np.int64)
    assert image_stats(image, is_perceptual=False)["moments"] == [*values.sum(0), *(values**2).sum(0)]


# ---- the command -----------------------------------------------------------------------------------------------------


def sharded(source: Path | str, dest: Path | str, *overrides: str) -> int:
    return run_verb(shard.main, [str(source), str(dest), *overrides])


@pytest.fixture(scope="module")
def mixed_source(tmp_path_factory) -> Path:
    """Class folders with good, odd and broken images, some of them duplicates."""
    root = tmp_path_factory.mktemp("nasty")
    class_folders(root, {"train/cat": 30, "train/dog": 25, "val/cat": 12})
    for folder, table in (("train/dog", HANDLED), ("val/dog", {"exif": (exif_rotated(),)})):
        for name, (content, *_) in table.items():
            write(root / folder / f"{name}.img", content)
    for name, (content, _) in BROKEN.items():
        write(root / "train/cat" / f"{name}.bad", content)
    write(root / "train/dog/repeated.jpg", encoded(photo(0)))
    write(root / "train/dog/leaked.jpg", (root / "val/cat/003.jpg").read_bytes())
    return root


@pytest.mark.ray
def test_bytes_do_not_depend_on_the_workers(ray_cluster, mixed_source, tmp_path, capsys):
    overrides = ("max_rejects=0.1", "shard_bytes=9000", "row_group=8", "seed=5", "--json")
    assert sharded(mixed_source, tmp_path / "one", *overrides, "workers=1", "chunk=7") == 0
    printed = capsys.readouterr()
    assert sharded(mixed_source, tmp_path / "two", *overrides, "workers=2", "chunk=64") == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    result = json.loads(printed.out.splitlines()[-1])
    assert result["splits"] == {"train": 65, "val": 13}
    assert re.search(r"left out, all in rejects.parquet:\n    train/cat/\S+\.bad: \w", printed.out)
    assert "inspected 86/86 images" in printed.err
    assert "\r" not in printed.err


@pytest.mark.ray
def test_a_dataset_has_the_usable_images_of_its_source(ray_cluster, mixed_source, tmp_path):
    assert sharded(mixed_source, tmp_path / "d", "max_rejects=0.1", "shard_bytes=9000", "row_group=8") == 0
    dataset = open_dataset(str(tmp_path / "d"))
    assert set(tree(tmp_path / "d")) == {
        "dataset.json",
        "rejects.parquet",
        *(part.name for split in dataset.splits.values() for part in split.shards),
    }
    train = rows(tmp_path / "d", "train")
    assert train.schema.names == ["image", "label", "key", "width", "height"]
    by_name = {row["key"].partition(":")[2]: row for row in train.to_pylist()}
    for name, row in by_name.items():
        assert row["image"] == (mixed_source / name).read_bytes()
        assert dataset.classes[row["label"]] == name.split("/")[1]
        assert decode_with_pillow(row["image"]).size == (row["width"], row["height"])
    upright = next(row for row in rows(tmp_path / "d", "val").to_pylist() if "exif" in row["key"])
    assert (upright["width"], upright["height"]) == (16, 24)
    assert list(by_name) != sorted(by_name)
    assert dataset.splits["train"].class_counts == (30, 35)

    # Each rejected image is listed with its reason.
    rejects = pq.read_table(tmp_path / "d/rejects.parquet").to_pylist()
    broken = {row["file"] for row in rejects if row["file"].endswith(".bad")}
    assert broken == {f"train/cat/{name}.bad" for name in BROKEN}
    assert dataset.rejects.count == len(BROKEN)
    assert dataset.rejects.reasons["not an image"] == 2
    assert ("train/dog/leaked.jpg", "shows the same as val/cat/003.jpg") in [(r["file"], r["reason"]) for r in rejects]
    assert dataset.duplicates.model_dump() == {"within": {"train": 1, "val": 0}, "across": 1, "removed": 1}

    # The statistics are those of the train pixels.
    values = np.concatenate([pixels(row["image"]).reshape(-1, 3) for row in by_name.values()]) / 255
    assert np.allclose(dataset.mean, values.mean(0), atol=1e-5)
    assert np.allclose(dataset.std, values.std(0), atol=1e-5)

    # Shards are uncompressed, without dictionary and statistics, and have the requested row groups.
    part = dataset.splits["train"].shards[0]
    assert len(dataset.splits["train"].shards) > 3
    metadata = pq.read_metadata(dataset.address(part))
    assert tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)) == part.row_groups
    column = metadata.row_group(0).column(0)
    assert (column.compression, column.has_dictionary_page, column.statistics) == ("UNCOMPRESSED", False, None)
    assert (tmp_path / "d" / part.name).stat().st_size == part.bytes


@pytest.mark.ray
def test_too_many_rejects_write_a_list_and_no_dataset(ray_cluster, mixed_source, tmp_path, capsys):
    assert sharded(mixed_source, tmp_path / "d") == 2
    printed = capsys.readouterr().err
    assert f"{len(BROKEN)} of 86 images cannot be used, more than max_rejects=0.01 allows" in printed
    assert "train/cat/empty.bad: empty file" in printed
    assert pq.read_metadata(tmp_path / "d/rejects.parquet").num_rows == len(BROKEN)
    with pytest.raises(ConfigError, match=r"not a vitray dataset \(no dataset\.json\)"):
        open_dataset(str(tmp_path / "d"))
    assert sharded(mixed_source, tmp_path / "d", "max_rejects=0.1") == 0
    assert "inspected" not in capsys.readouterr().err  # the inspection of the first run is reused


@pytest.mark.ray
def test_a_killed_job_resumes_to_the_same_bytes(ray_cluster, tmp_path):
    args = ["demo", "images=300", "image_size=24", "shard_bytes=6000", "chunk=10", "workers=1"]
    undisturbed, killed = tmp_path / "whole", tmp_path / "killed"
    write_dataset(read_request(args[0], str(undisturbed), (), args[1:]))
    command = [sys.executable, "-m", "pipelines.shard", args[0], str(killed), *args[1:]]
    for pattern in (".work/found-*", "train-*.parquet"):  # once in each pass
        job = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"RAY_ADDRESS": ray_cluster}, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while len(list(killed.glob(pattern))) < 3:
            assert job.poll() is None, job.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        job.kill()
        job.wait()
        job.stderr.close()
        assert not (killed / "dataset.json").exists()
    assert (killed / ".work").exists()
    before = {path: path.stat().st_mtime_ns for path in killed.glob("train-*.parquet")}
    write_dataset(read_request(args[0], str(killed), (), args[1:]))
    assert tree(killed) == tree(undisturbed)
    assert before
    assert sum(path.stat().st_mtime_ns == written for path, written in before.items()) >= len(before) - 1


@pytest.fixture
def without_ray(monkeypatch):
    """Let commands call their tasks in this process, one after another."""
    monkeypatch.setattr(writing, "open_tasks", lambda workers: nullcontext(HERE))


@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_second_command_on_a_folder_is_refused(tmp_path, s3_server, without_ray, capsys, place):
    dest = str(tmp_path / "d") if place == "local" else f"s3://bucket/{tmp_path.name}"
    with own_folder(dest, "shard"):
        assert sharded("demo", dest, "images=8", "image_size=8") == 2
    message = capsys.readouterr().err
    assert f"shard: {dest} is in use by process {os.getpid()} on " in message
    assert message.endswith("wait for it to end, stop it, or choose another folder\n")
    assert message.count("\n") == 1
    assert storage.list_files(dest) == []
    assert sharded("demo", dest, "images=8", "image_size=8") == 0
    names = storage.list_files(dest)
    assert [name for name in names if name.startswith(".")] == [], "the claims are removed"


def test_interrupted_commands_of_other_settings_leave_no_shard_in_a_dataset(tmp_path, without_ray, monkeypatch):
    """The labels differ, and the names and the sizes of the shards do not."""

    def interrupted(*call):
        write_shard(*call)
        raise KeyboardInterrupt

    write_shard, settings = writing.write_shard, ("images=64", "image_size=8", "shard_bytes=9000", "row_group=8")
    for task in ("shape", "texture", "shape"):
        request = read_request("demo", str(tmp_path / "d"), (), [*settings, f"task={task}"])
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write_shard", interrupted)
            with pytest.raises(KeyboardInterrupt):
                write_dataset(request)
    dataset = write_dataset(request)
    assert len(dataset.splits["train"].shards) > 2
    for part in dataset.splits["train"].shards:
        assert hashlib.sha256((tmp_path / "d" / part.name).read_bytes()).hexdigest() == part.sha256


def test_what_a_command_leaves_that_is_killed_at_its_start_does_not_stop_the_next(tmp_path, without_ray):
    tags = process_tags()
    tags["vitray.pid_started"] = " ".join([*tags["vitray.pid_started"].split()[:3], "0"])  # another process of this id
    write(tmp_path / "d/.owner/a.json", json.dumps({"process": tags, "since": "now"}).encode())
    write(tmp_path / "d/.owner/a.beat", b"3")
    write(tmp_path / "d" / f"{storage.UNFINISHED}0123", b"vitray")  # the check that it may write there
    assert sharded("demo", tmp_path / "d", "images=8", "image_size=8") == 0
    assert not [name for name in tree(tmp_path / "d") if name.startswith(".")]


def test_a_command_that_lost_its_folder_describes_no_dataset(tmp_path, without_ray, monkeypatch):
    dest = tmp_path / "d"

    def taken_over(*call):
        write_shard(*call)
        storage.remove(str(dest / ".owner"))
        claim = {"process": {"vitray.host": "elsewhere", "vitray.pid": "1"}, "since": "now"}
        write(dest / ".owner/other.json", json.dumps(claim).encode())

    write_shard = writing.write_shard
    monkeypatch.setattr(writing, "write_shard", taken_over)
    with pytest.raises(OwnershipLost, match="taken over by process 1 on elsewhere"):
        write_dataset(read_request("demo", str(dest), (), ["images=8", "image_size=8"]))
    assert not (dest / "dataset.json").exists()


def test_a_complete_dataset_with_another_shard_is_not_called_complete(tmp_path, without_ray, capsys):
    command = ["demo", tmp_path / "d", "images=8", "image_size=8"]
    assert sharded(*command) == 0
    path = next((tmp_path / "d").glob("train-*.parquet"))
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert sharded(*command) == 2
    assert f"{path}: its sha256 is not that of dataset.json" in capsys.readouterr().err


@pytest.mark.ray
def test_resize_re_encodes_larger_images(ray_cluster, tmp_path):
    source = tmp_path / "s"
    write(source / "a/large.png", flat(photo(1, (64, 32))))
    small = write(source / "a/small.jpg", encoded(photo(2, (20, 16)))).read_bytes()
    assert sharded(source, tmp_path / "d", "resize=16") == 0
    by_name = {row["key"].rpartition("/")[2]: row for row in rows(tmp_path / "d", "train").to_pylist()}
    assert by_name["small.jpg"]["image"] == small
    large = by_name["large.png"]
    assert (large["width"], large["height"]) == (32, 16) == decode_with_pillow(large["image"]).size
    assert Image.open(io.BytesIO(large["image"])).format == "JPEG"


@pytest.mark.ray
def test_files_can_stay_in_place(ray_cluster, tmp_path):
    source = tmp_path / "s"
    hugging_face(source / "train-00000-of-00002.parquet", 0, 6)
    hugging_face(source / "train-00001-of-00002.parquet", 10, 5)
    hugging_face(source / "test-00000-of-00001.parquet", 0, 2)
    before = tree(source)
    assert sharded(source, tmp_path / "elsewhere", "--index-only") == 0
    assert sharded(source, source, "--index-only") == 0
    assert before.items() <= tree(source).items()
    in_place, elsewhere = open_dataset(str(source)), open_dataset(str(tmp_path / "elsewhere"))
    assert [part.name for part in in_place.splits["train"].shards] == [
        f"train-0000{n}-of-00002.parquet" for n in (0, 1)
    ]
    assert in_place.identity == elsewhere.identity
    for dataset in (in_place, elsewhere):
        assert dataset.columns.model_dump() == {"image": "image.bytes", "label": "label", "key": None}
        assert {name: split.rows for name, split in dataset.splits.items()} == {"test": 2, "train": 11}
        assert dataset.splits["train"].shards[0].row_groups == (4, 2)
        assert dataset.duplicates.model_dump() == {"within": {"train": 0, "test": 0}, "across": 2, "removed": 0}
        assert pq.read_metadata(dataset.address(dataset.splits["train"].shards[1])).num_rows == 5


@pytest.mark.ray
def test_both_ends_may_be_on_s3(ray_cluster, s3_server, tmp_path):
    class_folders(s3_server / "pictures/animals", {"train/cat": 9, "train/dog": 8, "val/cat": 3})
    (s3_server / "made").mkdir()
    overrides = ("shard_bytes=3000", "row_group=4")
    assert sharded("s3://pictures/animals", "s3://made/set", *overrides) == 0
    assert sharded(s3_server / "pictures/animals", tmp_path / "local", *overrides) == 0
    remote, local = open_dataset("s3://made/set"), open_dataset(str(tmp_path / "local"))
    assert remote.identity == local.identity
    parts = {name: content for name, content in tree(tmp_path / "local").items() if name != "dataset.json"}
    assert parts.items() <= tree(s3_server / "made/set").items()
    assert not any(name.startswith(".work") for name in tree(s3_server / "made/set"))
    # A finished dataset can be a source; images and class names stay the same.
    assert sharded("s3://made/set", tmp_path / "again", *overrides) == 0
    resharded = open_dataset(str(tmp_path / "again"))
    assert resharded.classes == ("cat", "dog")
    assert sorted(rows(tmp_path / "again", "train")["image"].to_pylist()) == sorted(
        rows(tmp_path / "local", "train")["image"].to_pylist()
    )


# ---- rejected input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["demo", "d", "imagse=3"], r"override 'imagse=3': imagse: unknown setting, .*did you mean"),
        (["demo", "d", "images=0"], "images: got 0, expected greater than or equal to 1"),
        (["demo", "d", "dedupe=exakt"], r"dedupe: got 'exakt', expected .*did you mean"),
        (["demo", "d", "task=sahpe"], r"task: got 'sahpe', expected 'shape', 'texture' or 'scene'; did you mean shape"),
        (["s", "d", "images=3"], "images: a setting of the demo source only; the source here is s"),
        (["nowhere", "d"], "nowhere: no files here; expected a folder"),
        (["gs://a/b", "d"], "gs://a/b: expected a path or s3://bucket/key"),
        (["s", "s/inside"], "lies within the source"),
        (["s", "full"], "full: holds other files, such as diary.txt: expected a new or empty folder"),
        (["mixed", "d"], "could be tar or folder: set kind=, one of folder, index"),
        (["words", "d"], "its 1 files are of no known kind"),
        (
            ["flat", "d"],
            r"flat: its images lie in no class folders: got 0.png, expected .*, as in cat/0.png, or",
        ),
        (["s", "d", "--index-only"], "--index-only: expected Parquet with images in it; s is of kind folder"),
        (["s", "d", "--split", "val=1.5"], "--split val=1.5: expected each NAME once, or NAME=SHARE"),
        (["s", "d", "--split", "a=0.5", "--split", "b=0.5"], "the shares leave nothing to train"),
    ],
)
def test_bad_arguments_end_with_one_message(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "s", {"cat": 1})
    class_folders(tmp_path / "mixed", {"cat": 1})
    write(tmp_path / "mixed/a.tar", b"")
    write(tmp_path / "words/a.txt", b"")
    write(tmp_path / "flat/0.png", b"")
    write(tmp_path / "full/diary.txt", b"")
    assert run_verb(shard.main, args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err), printed.err
    assert not (tmp_path / "d/dataset.json").exists()


def test_no_thread_of_arrow_outlives_a_command(tmp_path):
    """One that frees a file's bytes while the interpreter ends would abort it: an exit status of a finished dataset."""
    code = """
import threading
import psutil
import numpy, pyarrow.parquet
from pipelines.__main__ import main

def foreign():
    return {each.id for each in psutil.Process().threads()} - {each.native_id for each in threading.enumerate()}

before = foreign()
assert main(["shard", "demo", "data", "images=40", "image_size=32", "workers=2"]) == 0
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join(10)
assert foreign() == before, foreign() - before
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0


@pytest.mark.ray
def test_a_finished_dataset_is_never_overwritten(ray_cluster, tmp_path, capsys):
    source = class_folders(tmp_path / "s", {"cat": 2})
    assert sharded(source, tmp_path / "d") == 0
    before = tree(tmp_path / "d")
    assert sharded(source, tmp_path / "d", "workers=1") == 0
    assert "already complete, nothing done" in capsys.readouterr().err
    assert sharded(source, tmp_path / "d", "seed=1") == 2
    assert "holds another dataset" in capsys.readouterr().err
    assert tree(tmp_path / "d") == before
    changed = json.loads((tmp_path / "d/dataset.json").read_text())
    write(tmp_path / "d/dataset.json", json.dumps(changed | {"format": 2}).encode())
    with pytest.raises(ConfigError, match=r"dataset\.json: format: got 2, expected 1: written by another vitray"):
        open_dataset(str(tmp_path / "d"))
    write(tmp_path / "d/dataset.json", json.dumps(changed | {"splts": {}}).encode())
    with pytest.raises(ConfigError, match=r"dataset\.json: splts: unknown setting, .*did you mean"):
        open_dataset(str(tmp_path / "d"))


# ---- duplicates ------------------------------------------------------------------------------------------------------


def inspected(images: list[tuple[str, bytes]]) -> pa.Table:
    stats = [image_stats(decode_with_pillow(content), is_perceptual=True) for _, content in images]
    return pa.table(
        {
            "split": [split for split, _ in images],
            "sha256": [str(hash(content)) for _, content in images],
            **{field: [one[field] for one in stats] for field in stats[0]},
        }
    )


def test_near_duplicates_are_found_by_fingerprint():
    pictures = [decode_with_pillow(demo_item(number, 0, 96, "shape")[0]) for number in range(60)]
    resized = encoded(pictures[7].resize((64, 64), Image.Resampling.BICUBIC), quality=80)
    images = [("train", encoded(picture, quality=95)) for picture in pictures]
    images += [
        ("val", resized),
        ("val", flat(Image.new("RGB", (9, 9), "white"))),
        ("train", flat(Image.new("RGB", (9, 9)))),
    ]
    counts, in_train = find_duplicates(inspected(images), "perceptual")
    assert in_train == {7: 60}
    assert counts.model_dump() == {"within": {"train": 0, "val": 0}, "across": 1, "removed": 1}
    assert find_duplicates(inspected(images), "exact")[1] == {}


def test_duplicates_within_a_split_stay_and_are_counted():
    images = [(split, encoded(photo(number))) for split, number in [*[("train", 0)] * 3, ("val", 1), ("test", 1)]]
    counts, in_train = find_duplicates(inspected(images), "exact")
    assert in_train == {}
    assert counts.model_dump() == {"within": {"train": 2, "val": 0, "test": 0}, "across": 1, "removed": 0}
    assert find_duplicates(inspected(images), "off")[0].across == 0


def test_the_progress_line_is_rewritten_on_a_terminal_only(capsys, monkeypatch):
    for live in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda live=live: live)
        progress = ProgressLine("read", 2000)
        progress.add(1500)
        progress.end()
        printed = capsys.readouterr().err
        assert "read 1,500/2,000 images, " in printed
        assert printed.startswith("\r") is live


def test_every_setting_has_a_description():
    assert all(field.description for name, field in ShardSettings.model_fields.items())
