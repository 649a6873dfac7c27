"""What is waited for before workers begin anew, and what is said of it; test_faults does it for real."""

import logging
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError

from vitray.runs import oom_backoff

# The beginning of what Ray 2.60 says.
SAID = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 5af6ae)"
    " was 4.69GB used / 23.54GB limit (0.199254)\nOOM kill reason: Memory usage 5029142528B exceeded threshold"
)


def test_the_node_and_its_memory_are_named_however_the_error_is_wrapped():
    wrapped = WorkerHealthCheckFailedError("A worker health check failed.", OutOfMemoryError(SAID))
    expected = "node 192.0.2.2 ran out of memory, 4.69GB of 23.54GB taken"
    assert oom_backoff.short_of_memory([ValueError("another"), wrapped]) == expected
    assert oom_backoff.short_of_memory([OutOfMemoryError("the node running low on memory")]) == "node ran out of memory"
    assert oom_backoff.short_of_memory([ValueError("another"), RuntimeError("CUDA out of memory")]) is None


@pytest.mark.parametrize(("error", "waits"), [(OutOfMemoryError(SAID), [15, 60, 240, 240]), (ValueError("no"), [])])
def test_workers_wait_longer_each_time_for_memory_alone_and_not_before_the_end(monkeypatch, error, waits):
    slept, said = [], []
    monkeypatch.setattr(oom_backoff.time, "sleep", slept.append)
    callback = oom_backoff.WaitForMemory(SimpleNamespace(put=SimpleNamespace(remote=said.append)), tries=4)
    for _ in range(5):
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

    monkeypatch.setattr(oom_backoff.time, "sleep", slept.append)
    desk = SimpleNamespace(put=SimpleNamespace(remote=lambda _: None))
    if times > len(oom_backoff.WAITS):
        with pytest.raises(ControllerError):
            oom_backoff.fit_patiently(fit, desk)
    else:
        assert oom_backoff.fit_patiently(fit, desk) == "trained"
    assert slept == waits


def test_what_is_not_for_memory_is_not_waited_for():
    def fit():
        raise ControllerError(ValueError("another"))

    with pytest.raises(ControllerError):
        oom_backoff.fit_patiently(fit, None)


def test_a_start_that_is_tried_again_is_one_line_a_minute_and_the_rest_is_said_as_it_comes(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(oom_backoff.time, "monotonic", lambda: now[0])
    logger = logging.getLogger(f"{oom_backoff.TRAIN}.execution.controller.controller")
    caplog.set_level(logging.WARNING, "ray")
    monkeypatch.setattr(logger, "filters", [oom_backoff.OneLine()])
    for _ in range(7):
        try:
            raise WorkerGroupStartupTimeoutError(2)
        except WorkerGroupStartupTimeoutError as error:
            logger.exception("Error in control loop iteration: %s", error)
        now[0] += 10
    logger.error("another %s", "error")
    first, second, last = caplog.records
    assert (first.exc_info, last.getMessage()) == (None, "another error")
    assert first.getMessage() == second.getMessage()
    assert "waiting for 2 workers; tried again" in first.getMessage()


def test_the_loggers_are_those_of_this_ray():
    from ray.train.v2._internal.callbacks import backend_setup
    from ray.train.v2._internal.execution.controller import controller
    from ray.train.v2._internal.execution.scaling_policy import autoscaling_coordinator_client

    assert backend_setup.logger.level == autoscaling_coordinator_client.logger.level == logging.ERROR
    assert any(isinstance(each, oom_backoff.OneLine) for each in controller.logger.filters)
