"""Inference: each image once, for any chunk and number of workers, and continued after a kill."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset, write_folder, write_network
from test_layers import ROOT

from vitray.cluster import session
from vitray.config.augmentation import CenterCrop
from vitray.data.augment.crops import crop_center
from vitray.data.augment.decode import decode_image
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError
from vitray.inference import engine
from vitray.inference.engine import Job, Worker, numerics_of
from vitray.inference.images import open_images
from vitray.inference.models import describe_network, open_network, short_name
from vitray.inference.outputs import BATCH, Work, compute_outputs
from vitray.models.vit import ViT
from vitray.weights import load_model, save_model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset with 101 validation images, a network, and a folder of 23 images."""
    folder = tmp_path_factory.mktemp("inference")
    write_dataset(folder / "data", {"train": 50, "val": 101})
    write_network(folder / "model")
    write_folder(folder / "photos", 23)
    return folder


def work(place, folder, **changes):
    network, _ = describe_network(str(place / "model"))
    images = open_images(str(place / changes.pop("data", "data")), "val")
    changes = {"outputs": ("logits", "features"), "numerics": numerics_of(1, BATCH)} | changes
    return Work(network, images, folder=str(folder), **changes)


@pytest.fixture(scope="module")
def expected(place):
    """Logits and features of each validation image, computed one by one."""
    loaded, images = load_model(str(place / "model")), open_images(str(place / "data"), "val")
    logits, features = [], []
    with torch.inference_mode():
        for image in images.read_labeled(range(101)):
            view = crop_center(decode_image(image.content), CenterCrop(), (32, 32))
            pixels = normalized(torch.from_numpy(view)[None], loaded.run.data.normalize)
            features.append(loaded.vit.pooled(loaded.vit.tokens(pixels))[0].numpy())
            logits.append(loaded.vit(pixels)[0].numpy())
    return np.stack(logits), np.stack(features)


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 101, 1000])
def test_every_image_is_in_the_outputs_once_for_any_chunk(place, expected, tmp_path, chunk):
    outputs = compute_outputs(work(place, tmp_path, chunk=chunk), workers=1)
    assert outputs.keys == [f"val:{index}" for index in range(101)]
    assert outputs.rows.tolist() == list(range(101))
    np.testing.assert_allclose(outputs.logits, expected[0], atol=1e-5)
    np.testing.assert_allclose(outputs.features, expected[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.ray
def test_actors_give_the_outputs_of_one_process(place, tmp_path, ray_cluster):
    alone = compute_outputs(work(place, tmp_path / "1", chunk=7), workers=1)
    for workers in (2, 3, 4):  # on three CPUs
        shared = compute_outputs(work(place, tmp_path / str(workers), chunk=7), workers)
        assert shared.keys == alone.keys
        np.testing.assert_allclose(shared.logits, alone.logits, atol=1e-6)
    corrupt = write_dataset(tmp_path / "corrupt", {"val": 5}, corrupt=5)
    planned = work(place, tmp_path / "refused")._replace(images=open_images(corrupt.url, "val"), chunk=2)
    with pytest.raises(ConfigError, match=r"of 5 images cannot be used, more than max_corrupt 0.01: val:"):
        compute_outputs(planned, 2)


def test_a_worker_refuses_its_network_after_its_constructor(place, tmp_path):
    """Ray reports an error of an actor's constructor as a death without a cause."""
    write_network(tmp_path / "model")
    spec = describe_network(str(tmp_path / "model"))[0]
    shutil.rmtree(tmp_path / "model")
    images = open_images(str(place / "data"), "val")
    worker = Worker(Job(images, [spec], lambda _networks, views, _pixels: len(views[0]), numerics_of(1, 2)))
    with pytest.raises(ConfigError, match="model: "):
        worker.load()
    write_network(tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match="its weights or settings have changed since the command began"):
        worker.load()
    shutil.rmtree(tmp_path / "model")
    write_network(tmp_path / "model")
    worker.load()
    assert worker.chunk(0, 3).values == [2, 1]


def test_an_actor_decodes_on_its_share_of_the_cpus():
    def node(cpus, gpus=0, alive=True):
        return {"Alive": alive, "Resources": {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})}

    assert engine.decoders_of([node(64, 8)], 8) == 8
    assert engine.decoders_of([node(64, 8), node(12, 2), node(4), node(1, 1, alive=False)], 10) == 6
    assert engine.decoders_of([node(2, 4)], 4) == 1
    assert engine.decoders_of([node(16)], 4) == 4
    assert engine.decoders_of([node(2), node(1)], 4) == 1


def test_a_cluster_that_grows_is_asked_for_its_gpus(monkeypatch):
    """Its head, which has no GPU, does not compute in their place."""
    asked, resources = [], {"CPU": 8.0}
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    monkeypatch.setattr(session, "wait_for_nodes", lambda *args: asked.append(args))
    for name, value in (("VITRAY_GROWS_WITHIN", "1800"), ("VITRAY_GROWS_DEVICE", "gpu")):
        engine._await_gpus(None)
        monkeypatch.setenv(name, value)
    assert not asked
    engine._await_gpus(None)
    engine._await_gpus(2)
    assert asked == [([{"CPU": 1.0, "GPU": 1.0}] * count, 1800.0) for count in (1, 2)]
    resources["GPU"] = 1.0
    engine._await_gpus(2)
    assert len(asked) == 2


@pytest.mark.ray
def test_an_idle_actor_takes_the_chunks_of_a_lost_one(place, tmp_path, ray_cluster):
    marker = str(tmp_path / "marker")

    def die_in_the_first_actor(view, key):
        import ray

        actor = ray.get_runtime_context().get_actor_id()
        with suppress(FileExistsError), open(marker, "x") as file:
            file.write(actor)
        if Path(marker).read_text() == actor:
            os._exit(1)  # each time that it starts
        return view

    planned = work(place, tmp_path / "lost", chunk=51)._replace(alter=die_in_the_first_actor)
    assert compute_outputs(planned, 2).keys == [f"val:{index}" for index in range(101)]
    assert Path(marker).exists()


def test_finished_chunks_are_not_computed_again(place, tmp_path, capsys):
    planned = work(place, tmp_path, chunk=20)
    first = compute_outputs(planned, workers=1)
    files = sorted(tmp_path.rglob("*.parquet"))
    assert len(files) == 12
    before = {path: path.stat().st_mtime_ns for path in files}
    files[0].unlink()  # features of the first chunk
    again = compute_outputs(planned, workers=1)
    assert "81 of 101 images are done already" in capsys.readouterr().err
    assert {path for path, written in before.items() if path.stat().st_mtime_ns != written} == {files[0]}
    assert np.array_equal(again.logits, first.logits)
    assert np.array_equal(again.features, first.features)


def test_other_weights_images_and_settings_have_other_outputs(place, tmp_path):
    write_network(tmp_path / "other", seed=1)
    planned = work(place, tmp_path)
    others = [
        planned._replace(network=describe_network(str(tmp_path / "other"))[0]),
        planned._replace(network=planned.network._replace(crop=CenterCrop(crop_ratio=1.0))),
        planned._replace(network=planned.network._replace(precision="bf16")),
        planned._replace(network=planned.network._replace(tf32=False)),
        planned._replace(images=open_images(str(place / "data"), "train")),
        planned._replace(alteration="noise 3"),
        *(planned._replace(numerics=planned.numerics._replace(**{name: 3})) for name in ("threads", "batch")),
    ]
    assert len({each.place for each in [planned, *others]}) == 9
    shutil.copytree(place / "data", tmp_path / "copy")
    shutil.copytree(place / "model", tmp_path / "model")
    network, images = describe_network(str(tmp_path / "model"))[0], open_images(str(tmp_path / "copy"), "val")
    assert planned._replace(network=network, images=images).place == planned.place


def test_a_killed_command_goes_on(place, tmp_path):
    code = (
        "import sys; from vitray.inference import engine, outputs, images, models\n"
        "network, _ = models.describe_network(sys.argv[1])\n"
        "data, how = images.open_images(sys.argv[2], 'val'), engine.numerics_of(1, outputs.BATCH)\n"
        "outputs.compute_outputs(outputs.Work(network, data, ('logits',), sys.argv[3], how, chunk=1), 1)"
    )
    command = [sys.executable, "-c", code, str(place / "model"), str(place / "data"), str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (done := list(tmp_path.rglob("logits-*.parquet"))):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written = {path: path.stat().st_mtime_ns for path in done}
    outputs = compute_outputs(work(place, tmp_path, chunk=1, outputs=("logits",)), workers=1)
    assert outputs.keys == [f"val:{index}" for index in range(101)]
    assert {path: path.stat().st_mtime_ns for path in done} == written


def test_a_folder_and_a_tar_are_read_without_sharding(place, tmp_path):
    whole = compute_outputs(work(place, tmp_path / "a", data="photos"), workers=1)
    assert len(whole.keys) == 23
    assert whole.keys == sorted(whole.keys)
    names = sorted({key.partition("/")[0] for key in whole.keys})
    assert [names[label] for label in whole.labels] == [key.partition("/")[0] for key in whole.keys]
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for key, label in zip(whole.keys, whole.labels, strict=True):
            tar.add(place / "photos" / key, key.replace("/", "-"))
            (tmp_path / "label").write_text(str(label))
            tar.add(tmp_path / "label", key.replace("/", "-").replace(".jpg", ".cls"))
    images = open_images(str(tmp_path / "photos.tar"), "val")
    packed = compute_outputs(work(place, tmp_path / "b")._replace(images=images), workers=1)
    assert np.array_equal(packed.labels, whole.labels)
    np.testing.assert_allclose(packed.logits, whole.logits, atol=1e-5)


def test_images_at_a_relative_address_are_read_in_any_working_folder(place, tmp_path, monkeypatch):
    """As by the actors of a cluster."""
    monkeypatch.chdir(place)
    opened = [open_images(url, "val") for url in ("data", "photos", "demo")]
    monkeypatch.chdir(tmp_path)
    assert [images.name for images in opened] == ["data", "photos", "demo"]
    for images in opened:
        assert len(images.read_labeled([1])[0].content) > 100
    whole = [open_images(str(place / "data"), "val"), open_images(str(place / "photos"), "val")]
    assert [images.identity for images in opened[:2]] == [images.identity for images in whole]


def test_a_changed_file_changes_the_identity_of_a_folder(place, tmp_path):
    shutil.copytree(place / "photos", tmp_path / "photos")
    before = open_images(str(tmp_path / "photos"), "val").identity
    assert open_images(str(tmp_path / "photos"), "val").identity == before
    path = next((tmp_path / "photos").rglob("*.jpg"))
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(1, 1))
    assert open_images(str(tmp_path / "photos"), "val").identity != before


def test_images_that_cannot_be_decoded_are_named_and_left_out(place, tmp_path):
    dataset = write_dataset(tmp_path / "data", {"val": 30}, corrupt=2)
    planned = work(place, tmp_path)._replace(images=open_images(dataset.url, "val"), chunk=4, max_corrupt=0.1)
    outputs = compute_outputs(planned, workers=1)
    assert outputs.rows.tolist() == list(range(2, 30))
    assert len(outputs.labels) == len(outputs.logits) == len(outputs.features) == len(outputs.keys) == 28
    assert outputs.left_out == ("val:0 (not an image)", "val:1 (not an image)")
    with pytest.raises(ConfigError, match=r"2 of 30 images cannot be used, more than max_corrupt 0.05: val:0"):
        compute_outputs(planned._replace(max_corrupt=0.05), workers=1)


def test_an_error_ends_the_computation_of_later_chunks(place, tmp_path):
    dataset, seen = write_dataset(tmp_path / "data", {"val": 60}, corrupt=2), []

    def noted(view, key):
        seen.append(key)
        return view

    planned = (
        work(place, tmp_path)
        ._replace(images=open_images(dataset.url, "val"), chunk=1)
        ._replace(alter=noted, max_corrupt=0.02)
    )
    with pytest.raises(ConfigError, match="of 60 images cannot be used"):
        compute_outputs(planned, workers=1)
    assert len(seen) <= 2  # of the two chunks after the second


def test_files_that_are_set_aside_count_as_left_out(place, tmp_path):
    shutil.copytree(place / "photos", tmp_path / "photos")
    (tmp_path / "photos" / "loose.jpg").write_bytes(b"")
    planned = work(place, tmp_path)._replace(images=open_images(str(tmp_path / "photos"), "val"), max_corrupt=0.1)
    assert compute_outputs(planned, workers=1).left_out == ("loose.jpg (not in a class folder)",)
    with pytest.raises(ConfigError, match="1 of 24 images cannot be used"):
        compute_outputs(planned._replace(max_corrupt=0.01), workers=1)


def test_images_without_labels_are_refused_by_name(tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        (tmp_path / "x.jpg").write_bytes(b"x")
        tar.add(tmp_path / "x.jpg", "x.jpg")
    with pytest.raises(ConfigError, match=r"photos.tar: none of 1 images can be used.*x.jpg: no label"):
        open_images(str(tmp_path / "photos.tar"), "val")


def test_weights_that_change_meanwhile_are_refused(tmp_path):
    spec, _ = describe_network(str(write_network(tmp_path / "model")))
    shutil.rmtree(tmp_path / "model")
    write_network(tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match="its weights or settings have changed since"):
        open_network(spec)


def test_other_settings_of_the_network_have_other_outputs(place, tmp_path):
    """Equal tensors with other attention heads, activation or epsilon are another network."""
    run, vit, classes = load_model(str(place / "model"))

    def spec(name, setting, value):
        other = ViT(run.model.model_copy(update={setting: value}))
        other.load_state_dict(vit.state_dict())
        save_model(str(tmp_path / name), run, other, classes)
        return describe_network(str(tmp_path / name))[0]

    first = describe_network(str(place / "model"))[0]
    others = [spec("1", "heads", 1), spec("2", "activation", "gelu_tanh"), spec("3", "norm_eps", 1e-3)]
    assert len({each.key for each in [first, *others]}) == 4
    assert spec("4", "drop_path", 0.5).key == spec("5", "execution", "loop").key == first.key
    shutil.rmtree(tmp_path / "1")
    spec("1", "heads", 2)
    with pytest.raises(ConfigError, match="its weights or settings have changed since"):
        open_network(others[0])


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("runs/first/model", "first"),
        ("models:/vit@champion", "vit-champion"),
        ("models:/vit/3", "vit-3"),
        ("s3://bucket/weights/deit_b.pth", "deit_b"),
        ("model", "model"),
        ("runs:/abc/model", "abc"),
    ],
)
def test_a_network_has_a_short_name(url, name):
    assert short_name(url) == name


def test_drawn_images_are_a_source_too():
    images = open_images("demo", "val")
    assert (len(images), images.classes) == (1000, SHAPES)
