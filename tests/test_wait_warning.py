"""A run warns once that training waits for images, with the setting that helps most."""

import pytest

from vitray.config import load_run
from vitray.runs.wait_warning import WaitWarning, best_remedy


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
