"""Durations and learning rates, compared with independent references."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.scheduler import CosineLRScheduler
from torch import nn

from vitray.config import load_run
from vitray.config.sections import in_steps
from vitray.config.training import Optim
from vitray.errors import ConfigError
from vitray.training.schedule import (
    CHECK_SECONDS,
    CheckTimer,
    Length,
    Triggers,
    intervals_of,
    learning_rate,
    length_of,
)


def optim(**settings) -> Optim:
    return Optim.model_validate({"duration": "40 steps", "warmup": "8 steps", "lr": 0.1} | settings)


@pytest.mark.parametrize(
    ("text", "steps"), [("3 epochs", 30), ("0.25 epochs", 2), ("1 epoch", 10), ("7 steps", 7), ("0 epochs", 0)]
)
def test_durations_become_steps(text, steps):
    assert in_steps(text, steps_per_epoch=10) == steps


@pytest.mark.parametrize("every", ["1 step", "7 steps", "2 epochs", "40 steps", "1000000000 epochs"])
def test_an_interval_ends_at_the_last_step(every):
    run = load_run(None, [f"{section}.every={every}" for section in ("tracking", "evaluate", "checkpoint")])
    triggers = Triggers(intervals_of(run, Length(epoch=10, warmup=0, total=40)), 40)
    wanted = {step for step in range(1, 41) if step % in_steps(every, 10) == 0} | {40}
    for is_one in (triggers.records, triggers.evaluates, triggers.saves, triggers.__contains__):
        assert {step for step in range(50) if is_one(step)} == wanted


def test_a_clock_saves_between_evaluated_steps(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    length = Length(epoch=10, warmup=0, total=40)
    for settings, evaluated in ([], {10, 20, 30, 40}), (["data.val=null"], {40}):
        run = load_run(None, settings)
        assert run.checkpoint.every == "10 minutes"
        now = 0.0
        triggers, saved = Triggers(intervals_of(run, length), 40), set()
        for step in range(1, 41):
            now += 90.0 if step > 20 else 1.0  # a slow second half: ten minutes are seven of its steps
            saved |= {step} if triggers.saves(step) else set()
        assert evaluated <= saved
        assert all(after - before <= 7 for before, after in itertools.pairwise(sorted(saved | {20})) if before >= 20)
        assert saved - evaluated


def test_an_interval_that_rounds_to_no_step_is_refused():
    with pytest.raises(
        ConfigError, match=r"^evaluate.every: got '0.01 epochs', which rounds to 0 steps, expected at least one;"
    ):
        intervals_of(load_run(None, ["evaluate.every=0.01 epochs"]), Length(epoch=10, warmup=0, total=40))


def test_minutes_are_not_converted_to_steps():
    with pytest.raises(ValueError, match="got '10 minutes', expected epochs or steps"):
        in_steps("10 minutes", 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"duration": "40 steps", "warmup": "5 epochs"},
            "optim.warmup: got '5 epochs', which is 50 steps, expected at most the 40 steps of optim.duration,"
            " '40 steps'; an epoch has 10 steps",
        ),
        (
            {"duration": "0.01 epochs", "warmup": "0 steps"},
            "optim.duration: got '0.01 epochs', expected at least one step",
        ),
        ({"warmup_from": 0.2}, "optim.warmup_from: got 0.2, expected at most optim.lr, 0.1"),
        (
            {"schedule": {"kind": "linear", "floor": 0.2}},
            "optim.schedule.floor: got 0.2, expected at most optim.lr, 0.1",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        length_of(optim(**settings), steps_per_epoch=10)
    assert message in str(error.value)


def test_a_warmup_may_last_the_whole_run():
    whole = optim(duration="4 epochs", warmup="40 steps")
    assert length_of(whole, 10) == (10, 40, 40)
    assert [learning_rate(whole, length_of(whole, 10), step) for step in (0, 20, 40)] == pytest.approx([0, 0.05, 0.1])


@pytest.mark.parametrize("during_warmup", [True, False])
@pytest.mark.parametrize("warmup", [0, 8])
def test_the_cosine_equals_timms(during_warmup, warmup):
    ours = optim(warmup=f"{warmup} steps", warmup_from=1e-3, schedule={"floor": 1e-2, "during_warmup": during_warmup})
    theirs = CosineLRScheduler(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
        t_initial=40 if during_warmup else 40 - warmup,
        lr_min=1e-2,
        warmup_t=warmup,
        warmup_lr_init=1e-3,
        warmup_prefix=not during_warmup,
        t_in_epochs=False,
    )
    for step in range(41):
        theirs.step_update(step)
        assert learning_rate(ours, length_of(ours, 10), step) == pytest.approx(
            theirs.optimizer.param_groups[0]["lr"], rel=1e-12
        )


def test_the_linear_schedule_equals_torchs():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.2, total_iters=40)
    ours = optim(warmup="0 steps", schedule={"kind": "linear", "floor": 0.02})
    for step in range(41):
        assert learning_rate(ours, length_of(ours, 10), step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


SCHEDULES = st.fixed_dictionaries(
    {"kind": st.sampled_from(["cosine", "linear"]), "floor": st.floats(0, 0.1)}
) | st.just({"kind": "constant"})


@given(total=st.integers(1, 60), share=st.floats(0, 1), start=st.floats(0, 0.1), schedule=SCHEDULES)
def test_the_rate_rises_to_lr_and_falls_to_the_floor(total, share, start, schedule):
    warmup = round(share * total)
    settings = optim(duration=f"{total} steps", warmup=f"{warmup} steps", warmup_from=start, schedule=schedule)
    rates = [learning_rate(settings, length_of(settings, 7), step) for step in range(total + 1)]
    rising, falling = rates[: warmup + 1], rates[warmup:]
    assert rising == pytest.approx(sorted(rising))
    assert falling == pytest.approx(sorted(falling, reverse=True))
    assert rates[warmup] == pytest.approx(0.1)
    if warmup:
        assert rates[0] == start
    if warmup < total:
        assert rates[total] == pytest.approx(schedule.get("floor", 0.1))


@given(seconds=st.lists(st.floats(1e-3, 30), min_size=1, max_size=20))
def test_checks_are_spaced_by_the_time_of_the_whole_loop(seconds):
    """A record takes as long as many steps, so the time of the steps alone would space the checks too far."""
    now, step = 0.0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: now)
        timer, interval = CheckTimer(0, 0.0), 1
        for pace in seconds:
            now, step = now + interval * pace, step + interval
            interval = timer.steps_to_next(step)
            assert interval == 1 or abs(interval - CHECK_SECONDS / pace) < 0.51
            assert interval * pace <= max(1.5 * CHECK_SECONDS, pace)
