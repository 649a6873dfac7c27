"""Restarts, the backoff after an out-of-memory kill, and Ray Train's log lines; test_faults provokes real kills."""

import logging
import logging.config
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from vitray.errors import ConfigError, OwnershipLost, RunError
from vitray.runs import failures
from vitray.runs.failures import CONTROLLER
from vitray.runs.train_on_ray import RayMailbox
from vitray.runs.worker_mailbox import MailboxLost

# The beginning of the message of Ray 2.60.
KILLED = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 5af6ae)"
    " was 4.69GB used / 23.54GB limit (0.199254)\nOOM kill reason: Memory usage 5029142528B exceeded threshold"
)


@pytest.fixture
def mailbox(ray_cluster):
    return RayMailbox().actor


@pytest.fixture
def slept(monkeypatch):
    """The seconds of each wait; nothing sleeps."""
    slept = []
    monkeypatch.setattr(failures, "time", SimpleNamespace(sleep=slept.append))
    return slept


def attempts(*errors):
    """A training that raises these errors in turn, and then returns; and the number of its starts."""
    starts = []

    def fit():
        starts.append(len(starts))
        if len(starts) <= len(errors):
            raise errors[len(starts) - 1]
        return "trained"

    return fit, starts


IN_A_START, IN_A_STEP = ControllerError(OutOfMemoryError(KILLED)), WorkerGroupError("", {1: OutOfMemoryError(KILLED)})
ANOTHER = WorkerGroupError("", {0: ValueError("another")})


@pytest.mark.ray
@pytest.mark.parametrize(
    ("errors", "waits"),
    [
        ([], []),
        ([ANOTHER, ActorDiedError()], [0, 0]),  # the process of a worker, and of Ray Train's controller
        ([IN_A_START, IN_A_STEP, ANOTHER, IN_A_START, IN_A_STEP], [15, 60, 0, 240, 240]),
    ],
)
def test_kills_in_a_start_and_in_a_step_share_one_growing_backoff(mailbox, slept, errors, waits):
    fit, starts = attempts(*errors)
    assert failures.fit_with_restarts(fit, mailbox, restarts=len(errors)) == "trained"
    assert slept == waits
    assert len(starts) == len(errors) + 1
    notes = [note.text for note in ray.get(mailbox.take.remote())]
    expected = [f"the workers {f'start again in {seconds} s' if seconds else 'start again'}" for seconds in waits]
    assert [note.rpartition("; ")[2] for note in notes] == expected


@pytest.mark.ray
def test_nothing_waits_after_the_last_failure(mailbox, slept):
    fit, starts = attempts(*[IN_A_STEP, IN_A_START] * 9)
    with pytest.raises(RunError) as error:
        failures.fit_with_restarts(fit, mailbox, restarts=3)
    assert slept == [15, 60, 240]
    assert len(starts) == 4
    assert "4 times, the last time: node 192.0.2.2 ran out of memory, 4.69GB of 23.54GB taken; " in str(error.value)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ControllerError(ValueError("one")), RunError("the workers failed: one")),
        (ConfigError("settings: refused"), RunError("settings: refused")),
        (OwnershipLost("runs/first: taken over"), OwnershipLost("runs/first: taken over")),
    ],
)
def test_an_error_that_no_restart_mends_ends_the_run_at_once(mailbox, slept, error, raised):
    fatal = not isinstance(error, ControllerError)
    if fatal:
        ray.get(mailbox.record_fatal_error.remote(error))
    fit, starts = attempts(ANOTHER if fatal else error)
    with pytest.raises(type(raised), match=f"^{raised}$"):
        failures.fit_with_restarts(fit, mailbox, restarts=3)
    assert (slept, len(starts)) == ([], 1)


@pytest.mark.ray
def test_training_without_its_mailbox_does_not_start_again(mailbox, slept):
    ray.kill(mailbox)
    fit, starts = attempts(ANOTHER)
    with pytest.raises(MailboxLost):
        failures.fit_with_restarts(fit, mailbox, restarts=3)
    assert (slept, len(starts)) == ([], 1)


def test_workers_do_not_start_again_once_ray_has_ended(monkeypatch, slept):
    """After a second Ctrl-C, any call of Ray would start another one."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    fit, starts = attempts(IN_A_STEP)
    with pytest.raises(type(IN_A_STEP)):
        failures.fit_with_restarts(fit, mailbox=None, restarts=3)
    assert (slept, len(starts)) == ([], 1)


@pytest.mark.ray
def test_workers_do_not_start_again_if_ray_ends_in_a_wait(mailbox, monkeypatch):
    fit, starts = attempts(IN_A_STEP)
    is_running = [True]
    monkeypatch.setattr(ray, "is_initialized", lambda: is_running[0])
    monkeypatch.setattr(failures, "time", SimpleNamespace(sleep=lambda _: is_running.__setitem__(0, False)))
    with pytest.raises(type(IN_A_STEP)):
        failures.fit_with_restarts(fit, mailbox, restarts=3)
    assert len(starts) == 1


def test_repeated_start_attempts_log_one_line_a_minute_and_other_errors_all_lines(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: now[0]))
    logger = logging.getLogger(f"{failures.RAY_TRAIN}.execution.controller.controller")
    caplog.set_level(logging.WARNING, "ray")
    monkeypatch.setattr(logger, "filters", [failures.StartupRetryFilter()])
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


def test_ray_train_keeps_the_filters_of_its_loggers(caplog):
    """Ray Train configures its loggers in each of its processes, which resets their levels."""
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": {"ray.train": {}}})
    for name in failures.QUIET_LOGGERS:
        logging.getLogger(name).warning("harmless")
        logging.getLogger(name).error("an error")
    assert [record.getMessage() for record in caplog.records] == ["an error"] * len(failures.QUIET_LOGGERS)
    assert any(isinstance(each, failures.StartupRetryFilter) for each in logging.getLogger(CONTROLLER).filters)
