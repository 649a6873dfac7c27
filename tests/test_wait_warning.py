"""A run warns once that training waits for images, with the setting that helps most."""

from types import SimpleNamespace

import pytest
from image_sets import write_dataset

from vitray.config import load_run
from vitray.runs.callback import Callback
from vitray.runs.placement import Placement
from vitray.runs.resolve import resolve
from vitray.runs.run_logger import RunLogger, WaitWarning, best_remedy
from vitray.runs.run_summary import placement_block
from vitray.training.messages import Metrics, Note, Resumed


def test_the_warning_comes_once_and_not_for_a_start():
    warning = WaitWarning(load_run().data, has_gpu=False)
    assert warning.report(0.9) is None  # includes the start
    assert warning.report(0.05) is None
    warning.restart()
    assert warning.report(0.9) is None
    text = warning.report(0.06)
    assert text is not None
    assert text.startswith("training waits for images 6% of the time: set data.cache=decoded")
    assert text.endswith("docs/faq.md#data-wait")
    assert warning.report(0.5) is None


@pytest.mark.parametrize(
    ("changes", "has_gpu", "remedy"),
    [
        ({"data.augment.policy": "three_augment"}, True, "set data.augment.on=device"),
        ({"data.augment.jitter": 0.3}, True, "set data.augment.on=device"),
        ({"data.augment.policy": "three_augment"}, False, "set data.cache=decoded"),
        ({"data.augment.policy": "three_augment", "data.augment.on": "auto"}, True, "set data.cache=decoded"),
        ({}, True, "set data.cache=decoded"),
        ({"data.cache": "decoded"}, True, "add CPUs"),
    ],
)
def test_the_remedy_is_the_largest_that_is_left(changes, has_gpu, remedy):
    assert best_remedy(load_run().replace(changes).data, has_gpu).startswith(remedy)


def test_the_remedy_without_ray_is_of_this_machine():
    data = load_run().data
    assert best_remedy(data, has_gpu=False, is_here=True).endswith("if the pixels fit into memory")
    kept = load_run().replace({"data.cache": "decoded"}).data
    assert best_remedy(kept, has_gpu=False, is_here=True).startswith("train on Ray, which decodes on all CPUs")


def test_a_run_notes_the_warning_at_its_first_large_share_after_a_start():
    notes = []
    logger = SimpleNamespace(
        hook=None,
        _history={},
        _tagged={},
        _tracker=SimpleNamespace(metrics=lambda *_: None),
        _progress=SimpleNamespace(metrics=lambda *_: None, resume=lambda *_: None),
        _wait_warning=WaitWarning(load_run().data, has_gpu=False),
        _has_pictures=False,
        _log=notes.append,
        _log_best=lambda _: None,
        _best=SimpleNamespace(evaluated=lambda *_: None),
        _callback=Callback(),
        _tell=lambda *_: None,
    )

    def report(step, share, is_repeated=False):
        RunLogger._log_metrics(logger, Metrics(step, {"train/data_wait_share": share}, is_repeated))
        return len(notes)

    assert report(10, 0.8) == 0  # of the start
    assert report(20, 0.04) == 0
    RunLogger._log(logger, Resumed(20, 1))
    assert report(20, 0.9, is_repeated=True) == 0
    assert report(30, 0.9) == 0  # of the second start
    assert report(40, 0.3) == 1
    assert report(50, 0.3) == 1
    (note,) = notes
    assert isinstance(note, Note)
    assert note.text.startswith("training waits for images 30% of the time: set data.cache=decoded")


@pytest.mark.parametrize(
    ("on", "use_gpu", "text"),
    [
        ("auto", True, "on the workers' device, chosen by data.augment.on=auto"),
        ("auto", False, "in decoding tasks, chosen by data.augment.on=auto"),
        ("device", False, "on the workers' device"),
        ("tasks", True, "in decoding tasks"),
    ],
)
def test_a_run_says_where_it_augments_and_who_chose_it(on, use_gpu, text, tmp_path):
    dataset = write_dataset(tmp_path / "demo", {"train": 60, "val": 20})
    changes = {"data.url": dataset.url, "data.augment.policy": "three_augment", "data.augment.on": on}
    changes |= {"model.name": "vit_u1x1_8", "model.image_size": 16, "model.num_classes": 10, "optim.batch": 8}
    run = load_run().replace(changes | {"optim.duration": "4 steps", "optim.warmup": "0 steps"})
    placement = Placement((1, 1), use_gpu, 1.0, 1)
    assert placement_block(resolve(run), placement)["augment"] == f"random_resized crop, policy three_augment, {text}"
