"""`vitray.Loader`: the images of a run in any loop, resumed at any batch, on any number of workers."""

import gc
import json
import shutil

import numpy as np
import psutil
import pytest
import torch
from image_sets import write_dataset
from test_stream import broken, jpeg, write

from vitray import ConfigError, Loader, load_run
from vitray.config.augmentation import Augment
from vitray.runs.train import train
from vitray.training import step as one_step

SMALL = {"batch": 32, "size": 16, "decoders": 0, "reader": "processes"}
ON_RAY = SMALL | {"reader": "auto"}
MIXED = {"augment": {"policy": "three_augment", "jitter": 0.3, "erase": 0.25}, "mix": {"mixup": 0.8, "cutmix": 1.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of 200 images in 7 classes: 6 batches of 32 an epoch."""
    return write(tmp_path_factory.mktemp("loader") / "data", [jpeg(index) for index in range(200)], row_group=30).url


def epochs(loader, number=1):
    """The rows, the images and the labels of each batch of some epochs."""
    return [(loader.rows, images, labels) for _ in range(number) for images, labels in loader]


def same(one, other):
    assert len(one) == len(other)
    return all(
        np.array_equal(rows, others) and torch.equal(images, copies) and torch.equal(labels, again)
        for (rows, images, labels), (others, copies, again) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", [{}, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["plain", "mixed"])
def test_a_loader_gives_the_batches_of_a_run(tmp_path, monkeypatch, migrated, kind):
    """Of a real run, whose batches are those that its loop computes with."""
    shutil.copy(migrated, tmp_path / "mlruns.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    write_dataset(tmp_path / "data", {"train": 70})
    taken, prepare = [], one_step.prepare_batch
    monkeypatch.setattr(one_step, "prepare_batch", lambda *args: taken.append(prepare(*args)) or taken[-1])
    settings = [
        "model.name=vit_u1x1_8", "model.image_size=32", f"data.url={tmp_path / 'data'}", "data.val=null",
        "optim.batch=32", "optim.duration=2 epochs", "optim.warmup=0 epochs", "compute.workers=1", "seed=3",
        *(f"data.{name}.{key}={value}" for name, section in kind.items() for key, value in section.items()),
    ]  # fmt: skip
    train(load_run(None, settings), "run", str(tmp_path / "runs"), here=True)
    assert len(taken) == 4
    with Loader(tmp_path / "data", batch=32, size=32, seed=3, decoders=1, reader="processes", **kind) as loader:
        assert len(loader) == 2
        for (images, targets), (_, own, labels) in zip(taken, epochs(loader, 2), strict=True):
            assert torch.equal(own, images)
            assert torch.equal(labels if kind else torch.nn.functional.one_hot(labels, targets.shape[1]), targets)


@pytest.mark.parametrize("kind", [{}, MIXED, {"repeats": 3, "mix": {"mixup": 0.2}}], ids=["plain", "mixed", "repeated"])
def test_it_resumes_in_the_middle_of_an_epoch_on_other_workers(folder, kind):
    """Over two epochs: two batches by two workers, three by one, and the rest by three."""
    with Loader(folder, **SMALL, **kind) as loader:
        whole = epochs(loader, 2)
    assert not np.array_equal(whole[0][0], whole[6][0])
    state, done = None, 0
    for workers, batches in ((2, 2), (1, 3), (3, 7)):
        states, parts = [], []
        for rank in range(workers):
            with Loader(folder, **SMALL, **kind, rank=rank, workers=workers) as loader:
                if state:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                own = []
                while len(own) < batches:
                    for images, labels in loader:
                        own.append((loader.rows, images, labels))
                        if len(own) == batches:
                            break
                parts.append(own)
                states.append(loader.state_dict())
        assert all(each == states[0] for each in states)
        for at in range(batches):
            rows, images, labels = whole[done + at]
            shares = [part[at] for part in parts]
            assert sorted(np.concatenate([share[0] for share in shares])) == sorted(rows)
            found = {
                (row, image.numpy().tobytes()): label for row, image, label in zip(rows, images, labels, strict=True)
            }
            for share in shares:
                for row, image, label in zip(*share, strict=True):
                    assert torch.equal(found[row, image.numpy().tobytes()], label)
        state, done = states[0], done + batches
    assert (state["epoch"], state["step"]) == (2, 0)


def test_a_loop_that_is_left_ends_its_epoch_unless_its_state_is_loaded(folder):
    with Loader(folder, **SMALL) as loader:
        whole = epochs(loader, 3)
    with Loader(folder, **SMALL) as loader:
        for _ in loader:
            break
        state = loader.state_dict()
        assert (state["epoch"], state["step"]) == (0, 1)
        assert same(epochs(loader), whole[6:12])
        loader.load_state_dict(state)
        assert same(epochs(loader), whole[1:6])
        loader.load_state_dict(state)
        loader.set_epoch(0)  # as a trainer calls it before each epoch
        assert same(epochs(loader), whole[1:6])
        loader.set_epoch(2)
        assert same(epochs(loader), whole[12:])


def test_an_evaluation_has_each_image_once(tmp_path):
    dataset = broken(tmp_path)
    parts = []
    for rank in range(2):
        with Loader(
            dataset.url, split="train", **SMALL, augment=None, max_corrupt=0.01, rank=rank, workers=2
        ) as loader:
            assert len(loader) == 10
            for _ in loader:
                break
            parts.append(epochs(loader))  # from the first image again
            assert all(len(rows) == len(images) == len(labels) for rows, images, labels in parts[-1])
            assert same(parts[-1], epochs(loader))
    rows = np.concatenate([rows for part in parts for rows, _, _ in part])
    assert sorted(rows) == sorted(set(range(300)) - {7, 130})
    assert {len(part) for part in parts} == {10}
    labels = torch.cat([labels for part in parts for _, _, labels in part])
    assert np.array_equal(labels, rows % 7)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_data_gives_the_same_where_this_process_is_connected(folder, ray_cluster):
    with Loader(folder, **SMALL, **MIXED) as loader:
        whole = epochs(loader, 2)
    loader = Loader(folder, **ON_RAY, **MIXED)
    for _ in loader:
        break
    loader.load_state_dict(loader.state_dict())
    assert same(epochs(loader, 2), whole[1:])
    with pytest.raises(ConfigError, match="2 workers share one execution of Ray Data, which needs a process group"):
        Loader(folder, **ON_RAY, workers=2, rank=0)
    with Loader(folder, **SMALL, augment=None) as one:
        assert same(epochs(Loader(folder, **ON_RAY, augment=None)), epochs(one))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "Loader: batch: got 0, expected greater than or equal to 1"),
        ({"batch": 201}, "Loader: batch: got 201, expected at most the 200 images"),
        ({"batch": 2, "workers": 3}, "Loader: batch: got 2, expected at least one image for each of 3 workers"),
        ({"rank": 2, "workers": 2}, "Loader: got rank 2 of 2 workers, expected a rank from 0 to 1"),
        ({"split": "trian"}, "no split 'trian', expected one of train; did you mean train"),
        ({"augment": "three_augmet"}, "Loader: augment.policy: got 'three_augmet', .*; did you mean three_augment"),
        ({"augment": {"flop": 1}}, "Loader: augment.flop: unknown setting, .*; did you mean flip"),
        ({"augment": None, "mix": {"mixup": 0.2}}, "mix is for training, and augment=None gives each image once"),
        ({"augment": None, "repeats": 2}, "repeats is for training"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        Loader(folder, **SMALL | settings)


def test_the_state_of_another_loader_is_refused(folder, tmp_path):
    other = write(tmp_path / "other", [jpeg(index) for index in range(100)]).url
    with Loader(folder, **SMALL) as loader:
        state = loader.state_dict()
        for kind, message in (
            ({"batch": 16}, "batch: the state has 32, and this loader 16"),
            ({"size": 24}, "size: the state has 16, and this loader 24"),
            ({"seed": 5}, "seed: the state has 0, and this loader 5"),
            ({"augment": Augment(flip=0.0)}, "augment: the state has .*'flip': 0.5.*'flip': 0.0"),
        ):
            with Loader(folder, **SMALL | kind) as mine, pytest.raises(ConfigError, match=message):
                mine.load_state_dict(state)
        with Loader(other, **SMALL) as mine, pytest.raises(ConfigError, match="dataset: the state has"):
            mine.load_state_dict(state)
        with pytest.raises(ConfigError, match="not the state of a Loader: "):
            loader.load_state_dict({"epoch": 1})
        with Loader(folder, **SMALL, max_corrupt=0.5) as mine:
            mine.load_state_dict(state)


def test_two_loops_on_one_loader_are_refused(folder):
    with Loader(folder, **SMALL) as loader:
        first = iter(loader)
        next(first)
        with pytest.raises(ConfigError, match="another loop over this loader is open"):
            iter(loader)
        first.close()
        assert len(epochs(loader)) == 6
        counted = iter(loader)
        assert len([next(counted) for _ in range(6)]) == 6
        assert len(epochs(loader)) == 6
    with pytest.raises(ConfigError, match="this loader is closed"):
        next(iter(loader))


def test_a_loader_ends_its_processes(folder):
    before = set(psutil.Process().children())
    loader = Loader(folder, **SMALL | {"decoders": 1})
    next(iter(loader))
    assert len(set(psutil.Process().children()) - before) == 1
    del loader
    gc.collect()
    assert set(psutil.Process().children()) == before
