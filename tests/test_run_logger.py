"""The thread that logs a run survives an error, and a trial never waits in vain for its decision."""

from collections import deque
from types import SimpleNamespace

import pytest

from vitray.runs.run_logger import RunLogger
from vitray.training.messages import Metrics
from vitray.training.schedule import Length


def failing(*_):
    raise OSError("the store is away")


@pytest.fixture
def logger():
    """A logger of a trial without its thread, whose tracker is away; its lines and decisions."""
    logger = RunLogger.__new__(RunLogger)
    logger.lines, logger.decided = [], []
    logger.console, logger._notes = SimpleNamespace(line=logger.lines.append), deque()
    logger._tracker = SimpleNamespace(metrics=failing, tag=failing)
    logger._inbox = SimpleNamespace(decide=lambda *answer: logger.decided.append(answer))
    logger.hook = SimpleNamespace(should_stop=lambda *_: True)
    logger._resolved = SimpleNamespace(length=Length(9, 0, 9))
    return logger


def test_an_error_of_the_log_is_a_note(logger):
    logger._guarded(failing)
    assert logger.lines == ["  could not log to MLflow: OSError: the store is away"]


def test_a_trial_gets_its_decision_whatever_fails(logger):
    evaluated = Metrics(4, {"val/loss": 1.0})
    logger._guarded(lambda: logger._log(evaluated))
    logger.hook.should_stop = failing
    logger._guarded(lambda: logger._log(evaluated))
    assert logger.decided == [(4, True), (4, False)]
    assert len(logger.lines) == 2
