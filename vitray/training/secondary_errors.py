"""Errors of a worker that only follow from another worker's end, and Ray Train's log lines about them."""

import logging
import sys

from ray.exceptions import RayError, RayTaskError
from torch.distributed import DistError

from vitray.errors import ConfigError, OwnershipLost

# Logger of the traceback of each worker's error.
TRACEBACKS = "ray.train.v2._internal.util"
# Part of gloo's errors, which have no class of their own: the path of its source.
GLOO = "gloo/"


def is_secondary(error: BaseException) -> bool:
    """Return whether an error means that another process is gone: one of Ray, or of a collective operation."""
    if isinstance(error, RayTaskError):  # an error of a task, such as decoding
        return False
    return isinstance(error, RayError | DistError) or (isinstance(error, RuntimeError) and GLOO in str(error))


def logs_traceback(record: logging.LogRecord) -> bool:
    """Return whether Ray Train logs the traceback of the current error.

    The driver's message replaces those of secondary errors, of bad input and of a lost folder.
    """
    del record
    error = sys.exc_info()[1]
    return error is None or not (is_secondary(error) or isinstance(error, ConfigError | OwnershipLost))


logging.getLogger(TRACEBACKS).addFilter(logs_traceback)
