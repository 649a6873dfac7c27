"""Backoff after an out-of-memory kill, and its log lines; test_faults provokes real kills."""

import logging
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError

from vitray.runs import oom_backoff

# The beginning of the message of Ray 2.60.
KILLED = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 5af6ae)"
    " was 4.69GB used / 23.54GB limit (0.199254)\nOOM kill reason: Memory usage 5029142528B exceeded threshold"
)


def test_the_reason_names_the_node_and_its_memory_in_any_wrapped_error():
    wrapped = WorkerHealthCheckFailedError("A worker health check failed.", OutOfMemoryError(KILLED))
    expected = "node 192.0.2.2 ran out of memory, 4.69GB of 23.54GB taken"
    assert oom_backoff.out_of_memory_reason([ValueError("another"), wrapped]) == expected
    assert (
        oom_backoff.out_of_memory_reason([OutOfMemoryError("the node running low on memory")])
        == "node ran out of memory"
    )
    assert oom_backoff.out_of_memory_reason([ValueError("another"), RuntimeError("CUDA out of memory")]) is None


@pytest.mark.parametrize(("error", "waits"), [(OutOfMemoryError(KILLED), [15, 60, 240, 240]), (ValueError("no"), [])])
def test_only_memory_kills_cause_a_growing_backoff_and_none_after_the_last_restart(monkeypatch, error, waits):
    slept, messages = [], []
    monkeypatch.setattr(oom_backoff.time, "sleep", slept.append)
    callback = oom_backoff.OomBackoff(SimpleNamespace(put=SimpleNamespace(remote=messages.append)), restarts=4)
    for _ in range(5):
        callback.after_exception(None, {1: error})
    assert slept == waits
    assert all(f"wait {seconds} s" in note.text for note, seconds in zip(messages, waits, strict=True))


@pytest.mark.parametrize(("times", "waits"), [(0, []), (2, [15, 60]), (9, [15, 60, 240])])
def test_a_worker_killed_during_its_start_is_retried_with_backoff(monkeypatch, times, waits):
    slept, tries = [], []

    def fit():
        tries.append(len(tries))
        if len(tries) <= times:
            raise ControllerError(OutOfMemoryError(KILLED))
        return "trained"

    monkeypatch.setattr(oom_backoff.time, "sleep", slept.append)
    mailbox = SimpleNamespace(put=SimpleNamespace(remote=lambda _: None))
    if times > len(oom_backoff.WAITS):
        with pytest.raises(ControllerError):
            oom_backoff.fit_with_backoff(fit, mailbox)
    else:
        assert oom_backoff.fit_with_backoff(fit, mailbox) == "trained"
    assert slept == waits


def test_other_start_errors_are_not_retried():
    def fit():
        raise ControllerError(ValueError("another"))

    with pytest.raises(ControllerError):
        oom_backoff.fit_with_backoff(fit, None)


def test_repeated_start_attempts_log_one_line_a_minute_and_other_errors_all_lines(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(oom_backoff.time, "monotonic", lambda: now[0])
    logger = logging.getLogger(f"{oom_backoff.RAY_TRAIN}.execution.controller.controller")
    caplog.set_level(logging.WARNING, "ray")
    monkeypatch.setattr(logger, "filters", [oom_backoff.StartupRetryFilter()])
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


def test_the_loggers_exist_in_the_installed_ray():
    from ray.train.v2._internal.callbacks import backend_setup
    from ray.train.v2._internal.execution.controller import controller
    from ray.train.v2._internal.execution.scaling_policy import autoscaling_coordinator_client

    assert backend_setup.logger.level == autoscaling_coordinator_client.logger.level == logging.ERROR
    assert any(isinstance(each, oom_backoff.StartupRetryFilter) for each in controller.logger.filters)
