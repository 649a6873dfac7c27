"""Durations and intervals: a number of epochs, steps or minutes, as settings spell them."""

import re
from typing import Any, Literal, NamedTuple

from pydantic import BeforeValidator

from vitray.config.parsing import short

Unit = Literal["epochs", "steps", "minutes"]


# A billion steps a second apart are 30 years.
LONGEST_DURATION = 10**9


class Duration(NamedTuple):
    """A number of epochs, steps or minutes."""

    number: float
    unit: Unit


def parse_duration(text: str) -> Duration:
    """Return the duration that a text such as `300 epochs`, `10000 steps` or `10 minutes` spells."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(epoch|step|minute)s?", text.strip())
    if match is None:
        raise ValueError(f"got {short(text)}, expected a number and a unit, as in '300 epochs' or '10000 steps'")
    number = float(match[1])
    if number > LONGEST_DURATION:
        raise ValueError(f"got {short(text)}, expected at most {LONGEST_DURATION:,} {match[2]}s")
    return Duration(number, f"{match[2]}s")  # type: ignore[arg-type]


def duration_in(*units: Unit, least: float = 1e-9) -> BeforeValidator:
    """Return a validator for durations in these units, which stores them in one spelling."""

    def spell(text: Any) -> str:
        count, unit = parse_duration(str(text))
        if unit not in units:
            raise ValueError(f"got {short(text)}, expected {' or '.join(units)}")
        if unit == "steps" and count != int(count):
            raise ValueError(f"got {short(text)}, expected whole steps")
        if count < least:
            raise ValueError(f"got {short(text)}, must be greater than 0")
        return f"{count:.15g} {unit if count != 1 else unit[:-1]}"

    return BeforeValidator(spell)
