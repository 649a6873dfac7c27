"""experiments/measure_predict.py: its pipelines cover all images, and its table has each of them."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from image_sets import write_dataset, write_network
from test_layers import ROOT

from vitray.inference.listing import list_images

sys.path.insert(0, str(ROOT / "experiments"))
import measure_predict
from measure_predict import Job, decode_alone, loader, make_plan, write_images


def test_the_images_are_the_first_ones_and_a_loader_predicts_each(tmp_path):
    write_dataset(tmp_path / "data", {"val": 30}, corrupt=1)
    files = write_images(str(tmp_path / "data"), 20, 8, tmp_path / "images")
    contents = [content for file in files for content in pq.read_table(file)["image"].to_pylist()]
    images = list_images(str(tmp_path / "data")).read(range(1, 20))  # the first one is broken
    assert contents == [image.content for image in images]
    plan = make_plan(str(write_network(tmp_path / "model")), str(tmp_path / "images"), 8, tmp_path / "out", "cpu")
    assert list(loader(Job(plan, files, 1, 1), tmp_path / "out")) == [7, 8, 4]
    assert pq.read_table(tmp_path / "out").num_rows == len(plan.images) == 19


def test_more_cpus_than_batches_decode_every_image_once(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", {"val": 20})
    files = write_images(str(tmp_path / "data"), 20, 8, tmp_path / "images")
    plan = make_plan(str(write_network(tmp_path / "model")), str(tmp_path / "images"), 8, tmp_path / "out", "cpu")
    tasks = []

    def remote(call):
        return SimpleNamespace(remote=lambda *arguments: tasks.append(arguments[1:]) or call(*arguments))

    here = SimpleNamespace(put=lambda value: value, get=lambda values: values, remote=lambda **_: remote)
    monkeypatch.setattr(measure_predict, "ray", here)
    monkeypatch.setattr(measure_predict.torch, "set_num_threads", lambda _: None)
    assert decode_alone(Job(plan, files, 1, 16)) > 0
    assert tasks == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_table_has_every_pipeline(tmp_path):
    write_dataset(tmp_path / "data", {"val": 24})
    command = [sys.executable, ROOT / "experiments/measure_predict.py", tmp_path / "data", "--model=vit_u2x1_8"]
    command += ["--image-size=32", "--batch=8", "--images=24", "--rounds=1", "--workers=2", "--out", tmp_path, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ROOT})
    result = json.loads(done.stdout.splitlines()[-1])
    rows = {row["pipeline"]: row for row in result["rows"]}
    names = ["decode alone", "network alone", "vitray predict", "Ray Data, Pillow", "DataLoader, Pillow"]
    assert list(rows) == names
    assert all(row["images_per_second"] > 0 for row in rows.values())
    assert all(rows[name]["first_batch"] > 0 for name in rows if "alone" not in name)
    assert max(rows["decode alone"]["share_of_bound"], rows["network alone"]["share_of_bound"]) >= 1
    assert min(rows["decode alone"]["share_of_bound"], rows["network alone"]["share_of_bound"]) == 1
    with Path(result["files"][0]).open() as file:
        assert [row["pipeline"] for row in csv.DictReader(file)] == list(rows)
    assert "24 images" in done.stdout
