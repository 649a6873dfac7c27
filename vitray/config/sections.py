"""The building blocks of settings: sections, bounded numbers and texts, durations, the nature of a task.

Only settings that some code reads are listed. Their docstrings are the text of docs/settings.md.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, assert_never

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from vitray.config.parsing import short
from vitray.config.validation import explain_error
from vitray.errors import odd_character


class _Explained(type(BaseModel)):
    """Turns the errors of a constructor into those of a recipe; validation of sections within does not pass here."""

    if not TYPE_CHECKING:  # a type checker knows the settings of each section

        def __call__(cls, *values: Any, **settings: Any) -> Any:
            try:
                return super().__call__(*values, **settings)
            except ValidationError as invalid:
                raise explain_error(invalid, cls, {}, cls.__name__) from None


class Section(BaseModel, metaclass=_Explained):
    """A group of settings: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def one_of(default: str) -> BeforeValidator:
    """Return a validator that reads `head: mlp` as `head: {kind: mlp}`, and adds the default kind where none is set."""

    def spell_out(value: Any) -> Any:
        if isinstance(value, str):
            return {"kind": value}
        return {"kind": default, **value} if isinstance(value, dict) else value

    return BeforeValidator(spell_out)


class NameOf:
    """Restricts a text to the names of a table, as it is when the text is read: a row may come later than the field."""

    def __init__(self, names: Callable[[], Sequence[str]]) -> None:
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the check of the text."""
        del source, handler
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        """Return the names for editors."""
        del schema, handler
        return {"type": "string", "enum": list(self.names())}

    def _check(self, value: Any) -> str:
        names = self.names()
        if value in names:
            return value
        *first, last = map(repr, names)
        expected = f"{', '.join(first)} or {last}" if first else last
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


def _check_text(text: str) -> str:
    if not text.strip() or odd_character(text) or len(text) > LONGEST_TEXT:
        raise ValueError(f"got {short(text)}, expected one line of text, at most {LONGEST_TEXT} characters")
    return text


# Products of a few counts stay exact in 64 bits, and such numbers stay finite in float32.
MOST_COUNT = 10**12
MOST_NUMBER = 1e30
LONGEST_TEXT = 1000
# The largest published ViT has 22 billion; the weights of this many take 400 GB.
MOST_PARAMETERS = 100 * 10**9

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=MOST_NUMBER)]
NotNegative = Annotated[float, Field(ge=0, le=MOST_NUMBER)]
Size = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Side = Size | Annotated[tuple[Size, Size], Field(strict=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, AfterValidator(_check_text)]


# ---- durations -------------------------------------------------------------------------------------------------------

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


@cache
def in_steps(text: str, steps_per_epoch: int) -> int:
    """Return a duration of epochs or steps in whole steps, rounded to the nearest."""
    count, unit = parse_duration(text)
    match unit:
        case "epochs":
            return round(count * steps_per_epoch)
        case "steps":
            return int(count)
        case "minutes":
            raise ValueError(f"got {text!r}, expected epochs or steps: minutes do not convert to steps")
        case _:
            assert_never(unit)


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


# ---- the nature of a task --------------------------------------------------------------------------------------------

Need = Literal["labels", "masks", "views", "hidden"]


class TaskTraits(NamedTuple):
    """The nature of a kind of task."""

    needs: tuple[Need, ...]
    """What its loss takes beside the images, in this order. With labels, images are mixed and erased, and an evaluation
    counts correct answers; without, it is the mean of the loss. With views, the images are the global ones of
    data.views, and the local ones follow."""
    saves: Literal["network", "tokenizer"] = "network"
    """What its model folder holds: a network, whose features can be probed, or a tokenizer, which has codes."""
    may_collapse: bool = False
    """Whether features may become equal for all images, which guard.on_collapse watches."""
    joint: bool = False
    """Whether the loss is of the whole batch, not a mean over its images: every worker returns the same number, after
    collectives, and a step is never taken in several passes."""
    network: str = "vit"
    """The module of the task that is the network it makes: the one that is probed, and written as the model."""
    suspects: Callable[[Any, Mapping[str, float]], list[str]] | None = None
    """Returns what often makes features equal, the likeliest first, of the settings and the scores of an evaluation."""
    by_data: bool = False
    """Whether settings that a recipe leaves out follow the number of images, by `BY_DATA`."""
