"""`vitray bench predict`: its pipelines cover all images, and its table has each of them."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from image_sets import write_dataset, write_network

from vitray.bench import predict_pipelines
from vitray.bench.predict import OURS, PredictSettings, measure_predict
from vitray.bench.predict_pipelines import Job, decode_alone, loader, make_plan, write_images
from vitray.inference.listing import list_images


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
    monkeypatch.setattr(predict_pipelines, "ray", here)
    monkeypatch.setattr(predict_pipelines.torch, "set_num_threads", lambda _: None)
    assert decode_alone(Job(plan, files, 1, 16)) > 0
    assert tasks == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.slow
@pytest.mark.ray
def test_the_table_has_every_pipeline(tmp_path, ray_cluster, capsys):
    write_dataset(tmp_path / "data", {"val": 24})
    sizes = {"image_size": 32, "batch": 8, "images": 24}
    result = measure_predict(PredictSettings(str(tmp_path / "data"), "vit_u2x1_8", **sizes, rounds=1, out=tmp_path))
    rows = {row["pipeline"]: row for row in result["rows"]}
    assert list(rows) == ["decode alone", "network alone", OURS, "Ray Data, Pillow", "DataLoader, Pillow"]
    assert all(row["images_per_second"] > 0 for row in rows.values())
    assert all(rows[name]["first_batch"] > 0 for name in rows if "alone" not in name)
    assert max(rows["decode alone"]["share_of_bound"], rows["network alone"]["share_of_bound"]) >= 1
    assert min(rows["decode alone"]["share_of_bound"], rows["network alone"]["share_of_bound"]) == 1
    with Path(result["files"][0]).open() as file:
        assert [row["pipeline"] for row in csv.DictReader(file)] == list(rows)
    assert "24 images" in capsys.readouterr().out
