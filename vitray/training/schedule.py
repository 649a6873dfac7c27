"""Durations in steps and the learning rate: functions of the step alone, so a resumed run continues exactly."""

import math
from typing import assert_never

from vitray.config.training import Constant, Cosine, Linear, Optim, parse_duration
from vitray.errors import ConfigError


def in_steps(text: str, steps_per_epoch: int) -> int:
    """Return a duration of epochs or steps in whole steps, rounded to the nearest."""
    count, unit = parse_duration(text)
    match unit:
        case "epochs":
            return round(count * steps_per_epoch)
        case "steps":
            return int(count)
        case "minutes":
            raise ValueError(f"got {text!r}, wanted epochs or steps: minutes do not convert to steps")
        case _:
            assert_never(unit)


def total_steps(optim: Optim, steps_per_epoch: int) -> int:
    """Return the steps of the whole run, after a check of its schedule."""
    check_schedule(optim, steps_per_epoch)
    return in_steps(optim.duration, steps_per_epoch)


def check_schedule(optim: Optim, steps_per_epoch: int) -> None:
    """Refuse a run without steps, a warm-up longer than the run, and a rate above lr."""
    total, warmup = in_steps(optim.duration, steps_per_epoch), in_steps(optim.warmup, steps_per_epoch)
    an_epoch = f"an epoch has {steps_per_epoch} steps"
    if total < 1:
        raise ConfigError(f"optim.duration: got {optim.duration!r}, wanted at least one step; {an_epoch}")
    if warmup > total:
        raise ConfigError(
            f"optim.warmup: got {optim.warmup!r}, which is {warmup} steps, wanted at most the {total} steps of"
            f" optim.duration, {optim.duration!r}; {an_epoch}"
        )
    floor = 0.0 if isinstance(optim.schedule, Constant) else optim.schedule.floor
    for setting, rate in (("warmup_from", optim.warmup_from), ("schedule.floor", floor)):
        if rate > optim.lr:
            raise ConfigError(f"optim.{setting}: got {rate}, wanted at most optim.lr, {optim.lr}")


def learning_rate(optim: Optim, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step, counted from 0; at step `total_steps` it is the floor.

    Step 0 uses `warmup_from`, the first step after the warm-up uses lr, as in timm, big_vision and MAE. The first step
    of a warm-up from 0 therefore changes nothing.
    """
    total, warmup = total_steps(optim, steps_per_epoch), in_steps(optim.warmup, steps_per_epoch)
    assert 0 <= step <= total, f"step {step} of a run of {total}"
    if step < warmup:
        return optim.warmup_from + (optim.lr - optim.warmup_from) * step / warmup
    after = (step - warmup) / max(total - warmup, 1)
    match optim.schedule:
        case Cosine(floor=floor, during_warmup=during_warmup):
            progress = step / total if during_warmup else after
            return floor + (optim.lr - floor) * (1 + math.cos(math.pi * progress)) / 2
        case Linear(floor=floor):
            return floor + (optim.lr - floor) * (1 - after)
        case Constant():
            return optim.lr
        case _:
            assert_never(optim.schedule)
