"""Workers that Ray ended for want of memory: what is said, and how long they wait; test_faults does it for real."""

from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from vitray.loop import memory

# The beginning of what Ray 2.60 says.
SAID = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 5af6ae)"
    " was 4.69GB used / 23.54GB limit (0.199254)\nOOM kill reason: Memory usage 5029142528B exceeded threshold"
)


def test_the_node_and_its_memory_are_named_however_the_error_is_wrapped():
    wrapped = WorkerHealthCheckFailedError("A worker health check failed.", OutOfMemoryError(SAID))
    expected = "node 192.0.2.2 ran out of memory, 4.69GB of 23.54GB taken"
    assert memory.short_of_memory([ValueError("another"), wrapped]) == expected
    assert memory.short_of_memory([OutOfMemoryError("the node running low on memory")]) == "node ran out of memory"
    assert memory.short_of_memory([ValueError("another"), RuntimeError("CUDA out of memory")]) is None


@pytest.mark.parametrize(("error", "waits"), [(OutOfMemoryError(SAID), [15, 60, 240, 240]), (ValueError("no"), [])])
def test_workers_wait_longer_each_time_for_memory_alone(monkeypatch, error, waits):
    slept, said = [], []
    monkeypatch.setattr(memory.time, "sleep", slept.append)
    callback = memory.WaitForMemory(SimpleNamespace(put=SimpleNamespace(remote=said.append)))
    for _ in range(4):
        callback.after_exception(None, {1: error})
    assert slept == waits
    assert [f"wait {seconds} s" in note["text"] for note, seconds in zip(said, waits, strict=True)] == [True] * len(
        waits
    )


@pytest.mark.parametrize(("times", "waits"), [(0, []), (2, [15, 60]), (9, [15, 60, 240])])
def test_a_worker_that_is_ended_before_it_has_begun_is_waited_for_too(monkeypatch, times, waits):
    slept, tries = [], []

    def fit():
        tries.append(len(tries))
        if len(tries) <= times:
            raise ControllerError(OutOfMemoryError(SAID))
        return "trained"

    monkeypatch.setattr(memory.time, "sleep", slept.append)
    desk = SimpleNamespace(put=SimpleNamespace(remote=lambda _: None))
    if times > len(memory.WAITS):
        with pytest.raises(ControllerError):
            memory.fit_patiently(fit, desk)
    else:
        assert memory.fit_patiently(fit, desk) == "trained"
    assert slept == waits


def test_what_is_not_for_memory_is_not_waited_for():
    def fit():
        raise ControllerError(ValueError("another"))

    with pytest.raises(ControllerError):
        memory.fit_patiently(fit, None)
