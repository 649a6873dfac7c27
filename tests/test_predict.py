"""Prediction: any source, each image once, the outputs of the network alone, and the same bytes after any kill."""

import csv
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_sets import SHAPES, write_dataset, write_folder, write_network
from test_layers import ROOT

from pipelines.__main__ import main
from vitray.data.augment.crops import crop_center
from vitray.data.augment.decode import decode_image
from vitray.data.augment.mixing import normalized
from vitray.data.augment.views import decode_views, usable
from vitray.data.shards.demo import demo_item
from vitray.errors import ConfigError, RunError
from vitray.inference.images import undecodable
from vitray.inference.listing import ImageList, check_some_decode, list_images
from vitray.inference.models import describe_network
from vitray.inference.networks import views_of
from vitray.inference.parts import count_images, load_networks, predict_batch, print_part, write_part
from vitray.inference.plan import Options, Plan, check_options, missing_parts, open_plan, write_plan
from vitray.inference.predict import Request, predict
from vitray.system.mlflow_client import open_client
from vitray.weights import load_model, save_model

ALL = Options(top_k=3, logits=True, embedding=True, levels=("block00", "block01"), batch=8, part=32)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in an actor: the last bits of outputs depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset of 60 images of which one is broken, a folder of 23 images, and a network."""
    folder = tmp_path_factory.mktemp("predict")
    write_dataset(folder / "data", {"train": 20, "val": 40}, corrupt=1)
    write_folder(folder / "photos", 23)
    write_network(folder / "model")
    return folder


def plan_of(images, out, *models, options=ALL):
    specs = [describe_network(str(model))[0] for model in models]
    return Plan(tuple(specs), list_images(str(images)), check_options(specs, options), str(out))


def tables_of(plan, networks=None):
    """The outputs of each part, computed in this process without Ray: (tables of batches, reasons)."""
    networks = networks or load_networks(plan)
    for part in range(plan.parts):
        tables, reasons = [], []
        for batch in range(plan.batches):
            encoded = [image.content for image in plan.images.read(range(*plan.span(part, batch)))]
            views, missing = decode_views(encoded, views_of(plan.networks), rows=plan.options.batch)
            reasons += missing
            tables.append(predict_batch(plan, networks, views, usable(missing)))
        yield part, tables, reasons


def write_all(plan):
    write_plan(plan)
    for part, tables, reasons in tables_of(plan):
        write_part(plan, part, tables, reasons)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(folder: Path) -> pa.Table:
    return pq.read_table(folder / "parts")


# ---- images ----------------------------------------------------------------------------------------------------------


def contents(images: ImageList) -> dict[str, bytes | str]:
    return {image.key: image.content for image in images.read(range(len(images)))}


def test_a_folder_needs_no_classes(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    wanted = {}
    for number, name in enumerate(["b.jpg", "a.PNG", "deep/er/c.webp"]):
        wanted[name] = (tmp_path / name).write_bytes(bytes([number])) and bytes([number])
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".hidden.jpg").write_bytes(b"x")
    (tmp_path / "link.jpg").symlink_to("nowhere")
    images = list_images(str(tmp_path))
    assert contents(images) == wanted | {"link.jpg": "a pipe, device or broken link"}
    assert set(images.other_files) == {"notes.txt", ".hidden.jpg"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jpg", ["a.jpg", "b.jpg"]),
        ("**/*.jpg", ["a.jpg", "b.jpg", "x/a.jpg", "x/y/c.jpg"]),
        ("x/**", ["a.jpg", "a.png", "y/c.jpg"]),
        ("[!b].jpg", ["a.jpg"]),
        ("*/a.*", ["x/a.jpg", "x/a.png"]),
        ("?.jpg", ["a.jpg", "b.jpg"]),
    ],
)
def test_a_glob_takes_the_files_that_match(tmp_path, pattern, names):
    for name in ("a.jpg", "b.jpg", "x/a.jpg", "x/a.png", "x/y/c.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert sorted(contents(list_images(f"{tmp_path}/{pattern}"))) == names


def test_all_sources_give_the_same_images(place, tmp_path):
    files = sorted((place / "photos").rglob("*.jpg"))
    bytes_of = [path.read_bytes() for path in files]
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for path in files:
            tar.add(path, path.name)
    pq.write_table(pa.table({"image": bytes_of}), tmp_path / "photos.parquet", row_group_size=5)
    addresses = [str(path) if index % 2 else os.path.relpath(path, tmp_path) for index, path in enumerate(files)]
    (tmp_path / "photos.csv").write_text("\n".join(["path", *addresses, addresses[0], "gone.jpg"]))
    for name in ("photos.tar", "photos.parquet"):
        assert list(contents(list_images(str(tmp_path / name))).values()) == bytes_of
    images = list_images(str(tmp_path / "photos.csv"))
    assert contents(images) == dict(zip(addresses, bytes_of, strict=True)) | {"gone.jpg": "no such file"}
    assert images.repeated == 1
    assert contents(list_images(str(place / "photos"))) == {
        str(path.relative_to(place / "photos")): content for path, content in zip(files, bytes_of, strict=True)
    }


def test_a_dataset_gives_its_splits_under_its_keys(place):
    whole, val = list_images(str(place / "data")), list_images(str(place / "data"), ["val"])
    assert (len(whole), len(val)) == (60, 40)
    assert contents(val)["val:3"] == demo_item(23, 0, 32, "shape")[0]
    assert whole.identity != val.identity
    with pytest.raises(ConfigError, match=r"--split vall: .* has train, val; did you mean val"):
        list_images(str(place / "data"), ["vall"])
    with pytest.raises(ConfigError, match=r"--split val: needs a dataset written by `vitray shard`"):
        list_images(str(place / "photos"), ["val"])


def test_wildcards_match_on_s3_and_secrets_in_an_address_stay_out_of_the_message(place, s3_server):
    shutil.copytree(place / "photos", s3_server / "bucket/wild")
    files = [str(path.relative_to(place / "photos")) for path in (place / "photos").rglob("*.jpg")]
    for pattern, wanted in {
        "*/000?.jpg": {name for name in files if "/000" in name},
        "**/00[1]?.jpg": {name for name in files if "/001" in name},
        f"{files[0][:-1]}?": {files[0]},
    }.items():
        images = list_images(f"s3://bucket/wild/{pattern}")
        assert {f"{Path(file).parent.name}/{Path(file).name}" for file in images.table["file"].to_pylist()} == wanted
        assert images.read([0])[0].content == Path(str(s3_server), images.table["file"][0].as_py()[5:]).read_bytes()
    with pytest.raises(ConfigError, match=r"^s3://: an address with keys or options in it"):
        list_images("s3://bucket/wild?secret_key=hidden")


def test_a_glob_of_the_root_is_refused_before_anything_is_listed(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^/\*\.jpg: got a wildcard in the first folder, .*expected a folder above it"
    ):
        list_images("/*.jpg")


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "", r"no files here; expected a folder, a glob"),
        ({}, "none/*.jpg", r"no files here"),
        ({"a.txt": b"x"}, "", r"none of 1 files is an image, such as a.txt"),
        ({"a.csv": b"name\nx"}, "a.csv", r"no column of addresses: its first line has name; expected one of path"),
        ({"a.csv": b"path\nhttp://x/y.jpg"}, "a.csv", r"row 1: http://x/y.jpg: expected a path or s3"),
        ({"a.csv": b"path,x\n,1"}, "a.csv", r"row 1: no address in column path"),
        ({"a.csv": b"path\n"}, "a.csv", r"no images in it"),
        ({"a.jpg": b"x", "b.jpg": b""}, "", r"none of 2 images can be decoded: a.jpg: not an image"),
    ],
)
def test_sources_without_images_are_refused(tmp_path, files, source, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        check_some_decode(list_images(f"{tmp_path}/{source}"))


# ---- the plan --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 90))
def test_the_batches_of_all_parts_hold_each_image_once_in_order(images, batch, part):
    listed = ImageList("", pa.table({"key": [str(number) for number in range(images)]}), "")
    plan = Plan((), listed, Options(batch=batch, part=part), "out")
    spans = [plan.span(number, each) for number in range(plan.parts) for each in range(plan.batches)]
    assert [at for start, stop in spans for at in range(start, stop)] == list(range(images))
    assert all(stop - start <= batch for start, stop in spans)
    assert all(plan.span(number, 0)[0] < plan.span(number, 0)[1] for number in range(plan.parts))


def test_another_plan_in_the_folder_is_refused_by_its_difference(place, tmp_path):
    plan = plan_of(place / "photos", tmp_path / "out", place / "model")
    write_plan(open_plan(plan))
    assert open_plan(plan) == plan
    others = {
        "top_k 3, now 2": plan._replace(options=plan.options._replace(top_k=2)),
        "levels": plan._replace(options=plan.options._replace(levels=())),
        "images 23, now 60": plan._replace(images=list_images(str(place / "data"))),
        "networks": plan._replace(networks=(plan.networks[0]._replace(precision="bf16"),)),
    }
    for difference, other in others.items():
        with pytest.raises(ConfigError, match=rf"holds a prediction with {difference}.*or pick another OUT"):
            open_plan(other)
    (tmp_path / "other/parts").mkdir(parents=True)
    (tmp_path / "other/parts/part-00000-of-00001.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has parts/part-00000-of-00001.parquet without plan.json"):
        open_plan(plan._replace(out=str(tmp_path / "other")))


def _touch(path: Path) -> None:
    """Give a file another time of change, as a rewrite does."""
    os.utime(path, ns=(1, 1))


CHANGED_SOURCES = {
    "an image is rewritten": ("photos", lambda at: _touch(next((at / "photos").rglob("*.jpg")))),
    "an image is added": ("photos", lambda at: (at / "photos/new.jpg").write_bytes(demo_item(50, 0, 32, "shape")[0])),
    "an image is gone": ("photos", lambda at: next((at / "photos").rglob("*.jpg")).unlink()),
    "a tar is rewritten": ("photos.tar", lambda at: _touch(at / "photos.tar")),
    "an image of a table is rewritten": ("photos.csv", lambda at: _touch(next((at / "photos").rglob("*.jpg")))),
    "an absent image of a table appears": ("photos.csv", lambda at: (at / "gone.jpg").write_bytes(b"x")),
    "another dataset": ("data", lambda at: (shutil.rmtree(at / "data"), write_dataset(at / "data", {"val": 23}))),
}


@pytest.mark.parametrize(("source", "change"), CHANGED_SOURCES.values(), ids=CHANGED_SOURCES)
def test_images_that_changed_since_the_first_command_are_refused(place, tmp_path, source, change):
    shutil.copytree(place / "photos", tmp_path / "photos")
    write_dataset(tmp_path / "data", {"val": 23}, corrupt=1)
    names = [str(path.relative_to(tmp_path)) for path in sorted((tmp_path / "photos").rglob("*.jpg"))]
    (tmp_path / "photos.csv").write_text("\n".join(["path", *names, "gone.jpg"]))
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "photos", "photos")
    request = Request([str(place / "model")], str(tmp_path / source), str(tmp_path / "out"))
    write_plan(plan_of(tmp_path / source, tmp_path / "out", place / "model", options=request.options))
    change(tmp_path)
    with pytest.raises(ConfigError, match=r"holds a prediction with (images|identity of the images) .*, now "):
        predict(request)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "difference"),
    [("weights", "networks"), ("loss", "probabilities"), ("names", "class names"), ("alias", "networks")],
)
def test_a_network_that_changed_since_the_first_command_is_refused(
    place, tmp_path, migrated, monkeypatch, change, difference
):
    shutil.copytree(place / "model", tmp_path / "model")
    url = str(tmp_path / "model")
    if change == "alias":
        shutil.copy(migrated, tmp_path / "mlruns.db")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlruns.db")
        client, url = open_client(f"sqlite:///{tmp_path}/mlruns.db"), "models:/vit@champion"
        client.create_registered_model("vit")
        client.create_model_version("vit", str(tmp_path / "model"))
        client.set_registered_model_alias("vit", "champion", "1")
    request = Request([url], str(place / "photos"), str(tmp_path / "out"))
    write_plan(plan_of(place / "photos", tmp_path / "out", url, options=request.options))
    run, vit, classes = load_model(str(place / "model"))
    if change == "alias":
        client.create_model_version("vit", str(write_network(tmp_path / "second", seed=1)))
        client.set_registered_model_alias("vit", "champion", "2")
    else:
        shutil.rmtree(tmp_path / "model")
        if change == "weights":
            torch.nn.init.ones_(vit.head.bias)
        classes = classes[::-1] if change == "names" else classes
        save_model(url, run.replace({"task.loss": "bce"}) if change == "loss" else run, vit, classes)
    with pytest.raises(ConfigError, match=rf"holds a prediction with {difference} "):
        predict(request)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]


def test_options_that_a_network_cannot_give_are_refused(place, tmp_path):
    headless = describe_network(str(write_network(tmp_path / "headless", classes=None)))[0]
    classifier = describe_network(str(place / "model"))[0]
    for options in (Options(), Options(logits=True, embedding=True), Options(top_k=1, embedding=True)):
        with pytest.raises(ConfigError, match=r"it has no head, so no classes; expected a classifier, or --embedding"):
            check_options([headless], options)
    assert check_options([headless], Options(embedding=True)).top_k
    assert check_options([classifier], Options()).top_k == min(5, len(SHAPES))
    with pytest.raises(ConfigError, match=rf"--top-k: got 99, expected at most the {len(SHAPES)} classes"):
        check_options([classifier], Options(top_k=99))
    with pytest.raises(
        ConfigError, match=r"--features blok01: .*expected one of block00 to block01; did you mean block01"
    ):
        check_options([classifier], Options(levels=("blok01",)))


# ---- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions": "rope", "registers": 2, "qk_norm": True},
        {"positions": {"kind": "learned", "where": "levels"}, "norm": "rmsnorm"},
        {"attention": "axial", "class_token": False, "pool": "mean"},
    ],
)
def test_the_outputs_are_those_of_the_network_for_each_image_alone(place, tmp_path, settings):
    write_network(tmp_path / "model", **settings)
    plan = plan_of(place / "data", tmp_path / "out", tmp_path / "model")
    write_all(plan)
    table, loaded = rows_of(tmp_path / "out"), load_model(str(tmp_path / "model"))
    assert table["key"].to_pylist() == plan.images.table["key"].to_pylist()
    levels = {}
    for number, block in enumerate(loaded.vit.blocks):
        keep = partial(levels.__setitem__, f"block{number:02d}")
        block.register_forward_hook(lambda _, __, tokens, keep=keep: keep(tokens))
    vit = loaded.vit.double()
    for row, content in zip(table.to_pylist(), contents(plan.images).values(), strict=True):
        if content == b"none":
            assert row.pop("error") == "not an image"
            row.pop("key")
            assert set(row.values()) == {None}
            continue
        view = crop_center(decode_image(content), loaded.run.data.eval_crop, (32, 32))
        pixels = normalized(torch.from_numpy(view)[None], loaded.run.data.normalize).double()
        with torch.inference_mode():
            logits = vit(pixels)[0].numpy()
            embedding = vit.pooled(vit.tokens(pixels))[0].numpy()
        shares = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-logits)[:3]
        assert row["classes"] == [loaded.classes[at] for at in order]
        np.testing.assert_allclose(row["probabilities"], shares[order], atol=1e-4)
        np.testing.assert_allclose(row["logits"], logits, atol=1e-4)
        np.testing.assert_allclose(row["embedding"], embedding, atol=1e-4)
        for level in ("block00", "block01"):
            tokens = levels[level][0]
            summary = tokens[0] if loaded.vit.model.pool == "token" else tokens.mean(0)
            np.testing.assert_allclose(row[level], summary.numpy(), atol=1e-4)
    assert table["error"].null_count == 58
    assert count_images(plan)[:3] == (58, 2, {"not an image": 2})


def test_half_precision_computes_in_bfloat16(place, tmp_path):
    plan = plan_of(place / "photos", tmp_path / "out", place / "model")
    half = plan._replace(networks=(plan.networks[0]._replace(precision="bf16"),))
    networks, kinds = load_networks(half), set()
    networks._members[0].vit.blocks[0].ffn1.up.register_forward_hook(lambda *args: kinds.add(args[2].dtype))
    for (_, tables, _), (_, others, _) in zip(tables_of(plan), tables_of(half, networks), strict=True):
        for one, other in zip(tables, others, strict=True):
            if one.num_rows:
                exact, rounded = (np.array(table["logits"].to_pylist()) for table in (one, other))
                assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()
    assert kinds == {torch.bfloat16}


def test_networks_of_one_base_share_the_levels_that_are_equal(place, tmp_path):
    run, vit, classes = load_model(str(place / "model"))
    with torch.no_grad():
        vit.head.bias += 1
    save_model(str(tmp_path / "head"), run, vit, classes, relative_to=str(place / "model"))
    with torch.no_grad():
        vit.blocks[1].attn1.qkv.weight += 0.1
    save_model(str(tmp_path / "attn"), run, vit, classes, relative_to=str(place / "model"))
    addresses = [place / "model", tmp_path / "head", tmp_path / "attn"]
    together = plan_of(place / "photos", tmp_path / "out", *addresses)
    networks, calls = load_networks(together), []
    for member in networks._members:
        for number, block in enumerate(member.vit.blocks):
            block.register_forward_hook(lambda *_, number=number: calls.append(number))
    tables = [table for _, tables, _ in tables_of(together, networks) for table in tables if table.num_rows]
    assert sorted(calls) == [0] * len(tables) + [1] * 2 * len(tables)
    for address in addresses:
        alone = plan_of(place / "photos", tmp_path / "out", address)
        own = [table for _, tables, _ in tables_of(alone) for table in tables if table.num_rows]
        for whole, single in zip(tables, own, strict=True):
            for name in single.column_names:
                assert whole[f"{alone.networks[0].name}/{name}"].equals(single[name])


def test_networks_of_other_views_get_their_own(place, tmp_path):
    run, vit, classes = load_model(str(place / "model"))
    save_model(str(tmp_path / "other"), run.replace({"data.eval_crop.crop_ratio": 0.5}), vit, classes)
    together = plan_of(place / "photos", tmp_path / "out", place / "model", tmp_path / "other")
    assert len(views_of(together.networks)) == 2
    tables = next(tables for _, tables, _ in tables_of(together))
    logits = []
    for address in (place / "model", tmp_path / "other"):
        alone = plan_of(place / "photos", tmp_path / "out", address)
        own = next(tables for _, tables, _ in tables_of(alone))
        for whole, single in zip(tables, own, strict=True):
            if single.num_rows:
                assert whole[f"{alone.networks[0].name}/logits"].equals(single["logits"])
        logits.append(own[0]["logits"])
    assert not logits[0].equals(logits[1])


@pytest.mark.slow
def test_compiled_blocks_give_the_same_outputs_and_the_last_batch_is_padded(place, tmp_path):
    plan = plan_of(place / "photos", tmp_path, place / "model")
    compiled = plan._replace(options=plan.options._replace(compile=True))
    networks, shapes = load_networks(compiled), set()
    networks._members[0].vit.stem.register_forward_hook(lambda _, images, __: shapes.add(images[0].shape[0]))
    for (_, tables, _), (_, others, _) in zip(tables_of(plan), tables_of(compiled, networks), strict=True):
        for one, other in zip(tables, others, strict=True):
            assert one.num_rows == other.num_rows
            if one.num_rows:
                values = [np.array(table["logits"].to_pylist()) for table in (one, other)]
                np.testing.assert_allclose(*values, atol=1e-5)
    assert shapes == {plan.options.batch}


def test_parts_of_another_plan_or_of_other_keys_are_noticed(place, tmp_path):
    plan = plan_of(place / "photos", tmp_path / "out", place / "model", options=ALL._replace(part=8))
    write_all(plan)
    assert count_images(plan)[:2] == (23, 0)
    assert missing_parts(plan) == []
    first, second = Path(plan.address(0)), Path(plan.address(1))
    kept = second.read_bytes()
    shutil.copy(first, second)
    with pytest.raises(RunError, match=r"part-00001-of-00003.parquet: its keys are not those of the plan"):
        count_images(plan)
    second.write_bytes(kept)
    with pytest.raises(RunError, match="written by another prediction"):
        count_images(plan._replace(options=plan.options._replace(top_k=1)))


def overflowing(place: Path, folder: Path, name: str, loss: str = "softmax") -> str:
    """Write a network with finite weights whose outputs are not: one tensor is the largest float32."""
    run, vit, classes = load_model(str(place / "model"))
    vit.get_parameter(name).data.fill_(3e38)
    save_model(str(folder), run.replace({"task.loss": loss}), vit, classes)
    return str(folder)


@pytest.mark.parametrize(
    ("tensor", "loss", "options", "column"),
    [
        ("head.weight", "softmax", Options(), "probabilities"),
        ("head.weight", "bce", Options(), "probabilities"),
        ("head.weight", "softmax", Options(top_k=0, logits=True), "logits"),
        ("norm.weight", "softmax", Options(top_k=0, embedding=True), "embedding"),
    ],
)
def test_outputs_that_are_not_finite_end_the_prediction_with_the_first_image(
    place, tmp_path, tensor, loss, options, column
):
    url = overflowing(place, tmp_path / "bad", tensor, loss)
    options = options._replace(batch=8, part=16)
    plan = plan_of(place / "data", tmp_path / "out", url, options=options)
    images = plan.images.read(range(len(plan.images)))
    first = next(image.key for image, reason in zip(images, undecodable(images), strict=True) if reason is None)
    message = rf"^{first}: the network's {column} are not finite, as of 1\d of the 16 images of part 0;"
    with pytest.raises(ConfigError, match=message):
        write_all(plan)
    assert not (tmp_path / "out/parts").exists()
    both = plan_of(place / "data", tmp_path / "both", place / "model", url, options=options)
    with pytest.raises(ConfigError, match=rf"the network's bad/{column} are not finite"):
        write_all(both)


def test_rows_are_printed_as_csv_and_json_lines(place, tmp_path):
    options = Options(top_k=2, batch=8, part=8)
    plan = plan_of(f"{place}/data", tmp_path / "out", place / "model", options=options)
    write_all(plan)
    rows = rows_of(tmp_path / "out").to_pylist()
    text, lines = io.StringIO(), io.StringIO()
    for part in range(plan.parts):
        print_part(plan, part, "csv", text)
        print_part(plan, part, "jsonl", lines)
    assert [json.loads(line) for line in lines.getvalue().splitlines()] == rows
    parsed = list(csv.DictReader(io.StringIO(text.getvalue())))
    assert [row["key"] for row in parsed] == [row["key"] for row in rows]
    assert list(parsed[0]) == ["key", "error", "classes_1", "classes_2", "probabilities_1", "probabilities_2"]
    assert parsed[0]["error"] == "not an image"
    assert parsed[1]["classes_2"] == rows[1]["classes"][1]
    assert float(parsed[1]["probabilities_1"]) == pytest.approx(rows[1]["probabilities"][0])


def test_the_folder_of_the_images_is_no_place_for_predictions(place):
    with pytest.raises(ConfigError, match=r"lies in .*photos, whose images it would join"):
        predict(Request([str(place / "model")], str(place / "photos"), str(place / "photos/out")))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{model}", "{photos}"], "expected at least one MODEL, then IMAGES and OUT"),
        (["{model}", "{photos}", "{out}", "--workers", "3:2"], "expected --workers as in 4 or 2:8"),
        (["{model}", "{photos}", "{out}", "--batch", "0"], "expected --batch and --part from 1 on"),
        (["{model}", "{model}", "{photos}", "{out}"], "given 2 times; expected each network once"),
        (["{model}", "{photos}/none", "{out}"], "no files here"),
        (["{photos}", "{photos}", "{out}"], "vitray: "),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(place, tmp_path, capsys, args, message):
    values = {"model": place / "model", "photos": place / "photos", "out": tmp_path / "out"}
    try:
        status = main(["predict", *(arg.format_map(values) for arg in args)])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- on Ray ----------------------------------------------------------------------------------------------------------


@pytest.mark.ray
def test_outputs_that_are_not_finite_are_one_message_and_status_2(place, tmp_path, ray_cluster, capsys):
    url = overflowing(place, tmp_path / "bad", "head.weight")
    assert main(["predict", url, str(place / "photos"), str(tmp_path / "out")]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vitray: ")]
    assert "the network's probabilities are not finite, as of 23 of the 23 images of part 0;" in line
    assert not (tmp_path / "out/predictions.json").exists()


@pytest.mark.slow
@pytest.mark.ray
def test_a_repeated_command_writes_the_missing_parts_only_and_the_same_bytes(place, tmp_path, ray_cluster):
    out = tmp_path / "out"
    request = Request([str(place / "model")], str(place / "data"), str(out), Options(batch=8, part=16, embedding=True))
    rows = io.StringIO()
    first = predict(request._replace(follow="jsonl"), rows)
    assert first.flat() | {"images_per_second": 0} == {
        "images": 60, "written": 58, "skipped": 2, "parts": 4, "images_per_second": 0, "out": str(out)
    }  # fmt: skip
    assert [json.loads(line) for line in rows.getvalue().splitlines()] == rows_of(out).to_pylist()
    reference = plan_of(place / "data", tmp_path / "alone", place / "model", options=request.options)
    write_all(reference)
    assert contents_of(out / "parts") == contents_of(tmp_path / "alone/parts")
    whole = contents_of(out)
    result = json.loads(whole["predictions.json"])
    assert result["skipped_images"][0] == {"key": "train:0", "reason": "not an image"}
    (out / "predictions.json").unlink()
    (out / "parts/part-00002-of-00004.parquet").unlink()
    times = {path: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    again = predict(request)
    assert again.counts == first.counts
    assert contents_of(out) == whole
    assert {path: path.stat().st_mtime_ns for path in times} == times
    with pytest.raises(ConfigError, match="holds a prediction with embedding True, now False"):
        predict(request._replace(options=request.options._replace(embedding=False)))


# As many compute threads as an actor has.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def command(place, out, *more):
    words = [str(place / "model"), str(place / "many"), str(out), "--batch", "8", "--part", "16", "--json", *more]
    return [sys.executable, "-m", "pipelines.predict", *words]


def test_without_ray_this_process_writes_the_same_bytes(place, tmp_path):
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in ("ray", "optuna", "boto3", "botocore"))
    code = f"import sys; {blocked}from pipelines.__main__ import main; sys.exit(main())"
    words = [str(place / "model"), str(place / "data"), str(tmp_path / "out"), "--batch", "8", "--part", "16"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | ONE_THREAD
    subprocess.run([sys.executable, "-c", code, "predict", *words], cwd=ROOT, env=environment, check=True)
    write_all(plan_of(place / "data", tmp_path / "alone", place / "model", options=Options(batch=8, part=16)))
    assert contents_of(tmp_path / "out/parts") == contents_of(tmp_path / "alone/parts")


@pytest.fixture(scope="module")
def many(place):
    """400 images, two of them broken, and the undisturbed predictions, computed without Ray."""
    write_dataset(place / "many", {"val": 400}, corrupt=2)
    plan = plan_of(place / "many", place / "undisturbed", place / "model", options=Options(batch=8, part=16))
    write_all(plan)
    return contents_of(place / "undisturbed" / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--workers", "1"]], ids=["here", "on Ray"])
def test_a_command_that_is_killed_at_random_moments_ends_with_the_same_bytes(place, many, tmp_path, more):
    draw, out, kills, started = random.Random(0), tmp_path / "out", 0, command(place, tmp_path / "out", *more)
    environment = os.environ | ONE_THREAD
    while kills < 2:
        process = subprocess.Popen(
            started, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        wanted = len(list(out.glob("parts/*.parquet"))) + draw.randrange(1, 5)
        while process.poll() is None and len(list(out.glob("parts/*.parquet"))) < wanted:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.2))
        if process.poll() is not None:
            break
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        for each in family:  # the driver first: nothing of it cleans up
            os.kill(each.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    done = subprocess.run(started, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["images"], result["written"], result["skipped"], result["parts"]) == (400, 398, 2, 25)
    assert kills > 0
    assert {name: content for name, content in contents_of(out / "parts").items() if ".writing" not in name} == many


def working_processes(driver: int) -> list[tuple[psutil.Process, str]]:
    """The processes of Ray below a driver that decode, compute or write now, each with its title."""
    titles = []
    for child in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error, IndexError):  # it has ended meanwhile
            titles.append((child, child.cmdline()[0]))
    return [(child, title) for child, title in titles if title.startswith(("ray::Map", "ray::Write"))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_processes_that_are_killed_are_replaced_and_the_bytes_stay_the_same(place, many, tmp_path, seed):
    """The actor first, then any, at random moments."""
    draw, out, killed = random.Random(seed), tmp_path / "out", []
    process = subprocess.Popen(command(place, out, "--workers", "1"), cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(draw.uniform(0, 0.2))
        if len(killed) == 4 or not list(out.glob("parts/*.parquet")):
            continue
        with suppress(psutil.NoSuchProcess):
            working = [each for each in working_processes(process.pid) if killed or "_Predictor" in each[1]]
            if working:
                child, title = draw.choice(working)
                child.kill()
                killed.append(title)
    assert process.returncode == 0
    assert len(killed) >= 2, killed
    assert contents_of(out / "parts") == many


# Two nodes are lost in turn, each replaced; in its own process, since other tests use another Ray.
LOST_NODES = """
import os, random, subprocess, sys, time
from pathlib import Path
from vitray.cluster import session
session.prepare_environment()
from ray.cluster_utils import Cluster

parts, command = Path(sys.argv[1]), sys.argv[2:]
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
workers = [nodes.add_node(num_cpus=2) for _ in range(2)]
process = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": nodes.address})
for wanted, node in zip(sorted(random.Random(0).sample(range(1, 16), 2)), workers):
    while len(list(parts.glob("*.parquet"))) < wanted:
        assert process.poll() is None
        time.sleep(0.02)
    nodes.remove_node(node, allow_graceful=False)
    nodes.add_node(num_cpus=2)
assert process.wait() == 0
nodes.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_that_are_lost_do_not_change_the_bytes(place, many, tmp_path):
    out = tmp_path / "out"
    args = [sys.executable, "-c", LOST_NODES, str(out / "parts"), *command(place, out)]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents_of(out / "parts") == many


@pytest.mark.slow
@pytest.mark.ray
def test_images_and_predictions_may_lie_on_s3(place, many, tmp_path, s3_server, ray_cluster):
    shutil.copytree(place / "many", s3_server / "bucket/many")
    shutil.copytree(place / "photos", s3_server / "bucket/photos")
    models, options = [str(place / "model")], Options(batch=8, part=16)
    prediction = predict(Request(models, "s3://bucket/many", "s3://bucket/out", options))
    assert prediction.counts.written == 398
    written = contents_of(s3_server / "bucket/out")
    assert {name.removeprefix("parts/"): written[name] for name in written if name.startswith("parts/")} == many
    shown = predict(Request(models, "s3://bucket/photos/*/*.jpg", "s3://bucket/glob", options))
    assert shown.counts.written == 23
    with pytest.raises(ConfigError, match="absent"):
        predict(Request(models, "s3://absent/photos", "s3://bucket/x", options))
    with pytest.raises(ConfigError, match="absent"):
        predict(Request(models, str(place / "photos"), "s3://absent/x", options))
