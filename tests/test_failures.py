"""Failures of workers: the message names the dead worker, or the first error; test_loop kills real workers."""

import sys

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from torch.distributed import DistBackendError

from vitray.errors import ConfigError, OwnershipLost
from vitray.runs.failures import describe_failure, logs_traceback, out_of_memory_reason
from vitray.training.messages import Heartbeat

BEATS = [(Heartbeat(rank, 3, f"host-{rank}", 412, "computation", 1.0), 2.0) for rank in range(3)]
# Texts of Ray 2.60 and torch 2.15.
KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker"
    " unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) ..."
)
STOPPED = "Worker exit type: INTENDED_SYSTEM_EXIT Worker exit detail: Worker exits with an exit code 9.\nThe end"
LOST = "The actor died because its node has died. Node Id: 5af6ae"
OWNER = "\tclass_name: SplitCoordinator\nThe actor is dead because its owner has died."
GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 5af6ae)"
    " was 4.69GB used / 23.54GB limit (0.199254)\nOOM kill reason: Memory usage 5029142528B exceeded threshold"
)


def actor_died(text):
    error = ActorDiedError()
    error.error_msg = text
    return error


def dead(text):
    return WorkerHealthCheckFailedError("A worker health check failed.\n", actor_died(text))


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        (
            {0: GLOO, 1: dead(KILLED), 2: actor_died(OWNER)},
            "worker 1 (node host-1) died: its process was killed (SIGKILL, perhaps for lack of memory) or crashed"
            " (perhaps by SIGSEGV)",
        ),
        ({1: dead(LOST)}, "worker 1 (node host-1) died: its node was lost"),
        ({0: dead(STOPPED)}, "worker 0 (node host-0) died: Worker exits with an exit code 9."),
        ({7: dead(LOST)}, "worker 7 died: its node was lost"),
        (
            {0: GLOO, 1: DistBackendError("NCCL"), 2: ValueError("a mistake\nof ours")},
            "worker 2 (node host-2) ended with ValueError: a mistake of ours",
        ),
        (
            {1: GLOO},
            "worker 1 (node host-1) ended with RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547]"
            " Connection closed by peer",
        ),
        (
            dict.fromkeys(range(5), dead(LOST)),
            "worker 0 (node host-0) died: its node was lost; worker 1 (node host-1) died: its node was lost;"
            " worker 2 (node host-2) died: its node was lost; 2 more workers died",
        ),
        ({0: GLOO, 1: dead(MEMORY)}, "node 192.0.2.2 ran out of memory, 4.69GB of 23.54GB taken"),
    ],
)
def test_the_first_cause_is_named(failures, message):
    assert describe_failure(WorkerGroupError("[Rank 0 Error Snippet]: many lines", failures), BEATS) == message


def test_a_failure_of_the_start_is_its_last_line():
    assert describe_failure(ControllerError(ValueError("one\ntwo")), BEATS) == "two"


def test_only_a_memory_kill_is_one():
    assert out_of_memory_reason(ControllerError(OutOfMemoryError(MEMORY))) is not None
    assert out_of_memory_reason(OutOfMemoryError("the node running low on memory")) == "node ran out of memory"
    assert out_of_memory_reason(WorkerGroupError("", {0: RuntimeError("CUDA out of memory")})) is None


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (ValueError("a mistake"), True),
        (RuntimeError("CUDA out of memory"), True),
        (RayTaskError("decode", "a traceback", ValueError("a mistake")), True),
        (GLOO, False),
        (DistBackendError("NCCL"), False),
        (actor_died(OWNER), False),
        (ConfigError("data: refused"), False),
        (OwnershipLost("runs/first: taken over"), False),
    ],
)
def test_a_traceback_is_logged_unless_the_driver_explains_the_error(error, is_logged):
    try:
        raise error
    except Exception:
        assert sys.exc_info()[1] is error
        assert logs_traceback(None) is is_logged
