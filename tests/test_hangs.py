"""Hangs: the message names the worker that did not arrive; test_loop provokes a real one."""

import pytest
import ray
from ray.exceptions import ActorDiedError

from vitray.runs import failures
from vitray.runs.train_on_ray import RayMailbox
from vitray.training.messages import Heartbeat

WAITED = "the others waited at the computation of step 415"


def beats(*workers, size=None):
    """Heartbeats of (step, activity, seconds, failed, age)."""
    return [
        (Heartbeat(rank, size or len(workers), f"host-{rank}", step, activity, seconds, failed), age)
        for rank, (step, activity, seconds, failed, age) in enumerate(workers)
    ]


def at(step, activity="computation", seconds=600, failed=False, age=2):
    return step, activity, seconds, failed, age


@pytest.mark.parametrize(
    ("workers", "failed", "expected"),
    [
        # gloo: all who waited raise an error.
        (
            [at(415, failed=True), at(415), at(415, failed=True)],
            [0],
            f"worker 1 (node host-1) has been at the computation of step 415 for 602 s; {WAITED}",
        ),
        # NCCL: the first process that timed out is gone, the others follow.
        (
            [at(415), at(415), at(415), at(412, "images", 640)],
            [1],
            f"worker 3 (node host-3) has been at the images of step 412 for 642 s; {WAITED}",
        ),
        # All are gone, also the one that they waited for.
        (
            [at(415, failed=True), at(415, "images", 603, failed=True)],
            [0, 1],
            f"worker 1 (node host-1) has been at the images of step 415 for 605 s; {WAITED}",
        ),
        # A node without power sends nothing.
        (
            [at(415, failed=True), at(415), at(414, "metrics", 0.5, age=590)],
            [0],
            f"worker 2 (node host-2) has been silent for 590 s, last at the metrics of step 414; {WAITED}",
        ),
        # Ray ends a silent worker before the others time out.
        (
            [at(415), at(415), at(414, "metrics", 0.5, age=200)],
            [2],
            f"worker 2 (node host-2) has been silent for 200 s, last at the metrics of step 414; {WAITED}",
        ),
        (
            [at(415, failed=True), *[at(410, "evaluation", 600, age=0)] * 5],
            [0],
            "worker 1 (node host-1) has been at the evaluation of step 410 for 600 s,"
            " worker 2 (node host-2) has been at the evaluation of step 410 for 600 s,"
            f" worker 3 (node host-3) has been at the evaluation of step 410 for 600 s, and 2 more workers; {WAITED}",
        ),
    ],
)
def test_the_worker_that_did_not_arrive_is_named(workers, failed, expected):
    assert failures.describe_hang(beats(*workers), failed, timeout=600) == expected


def test_a_failure_without_a_long_wait_is_no_hang():
    assert failures.describe_hang([], [0], timeout=600) is None
    assert failures.describe_hang(beats(at(415, seconds=20, failed=True), at(415)), [0], timeout=600) is None
    # A node that is lost, with all of its heartbeats.
    assert failures.describe_hang(beats(at(415, seconds=1), at(415, seconds=1, age=40)), [1], timeout=600) is None
    # A slow worker alone, and an error of another one that did not wait.
    assert failures.describe_hang(beats(at(415), at(415, seconds=1)), [1], timeout=600) is None


def test_workers_of_an_earlier_larger_group_are_not_named():
    old = [(Heartbeat(2, 3, "host-2", 3, "images", 1, False), 5000.0)]
    text = failures.describe_hang([*old, *beats(at(415, failed=True), at(415))], [0], timeout=600)
    assert text.startswith("worker 1 (node host-1)")
    assert "host-2" not in text


@pytest.mark.ray
def test_only_a_time_out_is_reported(ray_cluster, monkeypatch):
    monkeypatch.setattr(failures, "SETTLE_SECONDS", 0)
    mailbox = RayMailbox().actor
    report = failures.HangReport(mailbox, timeout=600)
    for heartbeat, _ in [*beats(at(415), at(2)), *beats(at(415, failed=True), at(412))]:  # the last ones count
        ray.get(mailbox.beat.remote(heartbeat))
    for error, is_hang in [
        (
            RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
            True,
        ),
        (ValueError("a mistake in a long evaluation"), False),
        (RuntimeError("Watchdog caught collective operation timeout"), True),
        (ActorDiedError(), True),  # NCCL ends the process
    ]:
        report.after_exception(None, {0: error})
        hang = ray.get(mailbox.hang.remote())
        assert bool(hang) == is_hang
        assert not hang or hang.startswith("worker 1 (node host-1) has been at the computation of step 412 for 6")
