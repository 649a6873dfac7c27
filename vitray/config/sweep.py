"""The settings of a sweep: how values are drawn, searched through and stopped, and what for."""

import math
import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_serializer, model_validator

from vitray.config.parsing import short
from vitray.config.sections import Positive, Section, Size
from vitray.config.training import parse_duration

Number = int | float
Values = Annotated[tuple[Any, ...], Field(strict=False)]
Range = Annotated[tuple[Number, Number], Field(strict=False)]
DIGITS = 4  # of a value drawn from a range: no experiment can tell more apart, and a name prints them all


def spelled(value: Any) -> str:
    """A value as part of a name: short, exact, and without what a path or a shell would trip over."""
    match value:
        case bool() | None:
            text = "null" if value is None else str(value).lower()
        case float():
            number = Decimal(repr(value)).normalize()
            digits = "".join(map(str, number.as_tuple().digits))
            mantissa = f"{'-' * number.is_signed()}{digits[0]}{'.' * (len(digits) > 1)}{digits[1:]}"
            text = min(f"{number:f}", f"{mantissa}e{number.adjusted()}", key=len)
        case Mapping():
            text = ",".join(f"{key}={spelled(below)}".removeprefix("kind=") for key, below in value.items())
        case list() | tuple():
            text = ",".join(map(spelled, value))
        case _:
            text = str(value)
    return re.sub(r"[^\w.,=+-]+", "_", text)


def _brief(value: Any) -> str:
    """The kind of a section, the last word of a path."""
    if isinstance(value, Mapping) and "kind" in value:
        return spelled(value["kind"])
    return spelled(value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value)


class Draw(Section):
    """How the values of a setting or a variable come about: exactly one of these."""

    grid: Values | None = None
    """These values: each of them in a grid search, one of them in any other."""
    choice: Values | None = None
    """The same, in the word of the others."""
    uniform: Range | None = None
    """[low, high]."""
    loguniform: Range | None = None
    """[low, high], each order of magnitude as likely."""
    quniform: Annotated[tuple[Number, Number, Number], Field(strict=False)] | None = None
    """[low, high, step]: low, low + step, and so on."""
    seeds: Size | None = None
    """So many, from 0 on."""
    cases: dict[str, dict[str, Any]] | None = None
    """{name: {dotted setting: value or text}}: settings that go together, under a name each."""
    text: str | None = None
    """Computed: a text with {variable}, read as YAML once that is filled in. The text alone is short for it."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_short_for_itself(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"text": given}
        if not isinstance(given, dict):
            raise ValueError(f"got {short(given)}, wanted how it is drawn, as in {{grid: [1, 2]}}")
        return given

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        given = [kind for kind in type(self).model_fields if getattr(self, kind) is not None]
        if len(given) != 1:
            known = ", ".join(type(self).model_fields)
            raise ValueError(f"got {' and '.join(given) or 'nothing'}, wanted one of {known}")
        if self.values is not None and len(set(map(spelled, self.values))) < max(1, len(self.values)):
            raise ValueError(f"{self.kind}: got {short(list(self.values))}, wanted values that differ, at least one")
        least = 0.0 if self.kind == "loguniform" else -math.inf
        if self.bounds and not least < self.bounds[0] < self.bounds[1] < math.inf:
            wanted = f"low < high{', both above 0' if least == 0 else ''}"
            raise ValueError(f"{self.kind}: got {list(self.bounds)}, wanted {wanted}")
        if self.quniform and not 0 < self.quniform[2] < math.inf:
            raise ValueError(f"quniform: got a step of {self.quniform[2]}, wanted more than 0")
        return self

    @model_serializer
    def _as_it_is_written(self) -> Any:
        return self.text if self.text is not None else {self.kind: getattr(self, self.kind)}

    @property
    def kind(self) -> str:
        """The word that says how."""
        return next(kind for kind in type(self).model_fields if getattr(self, kind) is not None)

    @property
    def values(self) -> tuple[Any, ...] | None:
        """All values, in order; None where they are not listed."""
        if self.seeds or self.cases is not None:
            return tuple(range(self.seeds) if self.seeds else self.cases or ())
        return self.grid if self.grid is not None else self.choice

    @property
    def bounds(self) -> tuple[Number, Number] | None:
        """Lowest and highest value of a range."""
        found = self.uniform or self.loguniform or self.quniform
        return found and (found[0], found[1])

    @property
    def extremes(self) -> tuple[Any, Any]:
        """The first and the last value."""
        return self.bounds or (self.values[0], self.values[-1])  # type: ignore[index]

    def sample(self, generator: random.Random) -> Any:
        """One value, drawn at random; of a range, not yet snapped."""
        if self.values is not None:
            return generator.choice(self.values)
        low, high = self.extremes
        if self.kind == "loguniform":
            return math.exp(generator.uniform(math.log(low), math.log(high)))
        return generator.uniform(low, high)

    def snapped(self, value: Any) -> Any:
        """The value that is trained for a drawn one: on its lattice, or of as many digits as a name prints."""
        if self.values is not None:
            return value
        low, high = self.extremes
        if self.quniform:
            # Decimal, so that 0.1 + 2 * 0.1 is 0.3.
            start, end, step = (Decimal(str(number)) for number in self.quniform)
            exact = start + step * min(max(round((Decimal(str(value)) - start) / step), 0), (end - start) // step)
            return int(exact) if all(isinstance(number, int) for number in self.quniform) else float(exact)
        leading = math.floor(math.log10(value if self.kind == "loguniform" else high - low))
        return float(min(max(round(float(value), DIGITS - 1 - leading), low), high))

    def label(self, value: Any) -> str:
        """A value in a name: its kind, or the last word of a path, where no other value has the same."""
        others = self.values or ()
        return _brief(value) if len(set(map(_brief, others))) == len(others) else spelled(value)


class Stage(Section):
    """A run before the trials that name it: `{its name}`, as a whole text, is the model folder that it leaves."""

    recipe: str
    """A YAML file, or one that vitray brings."""
    settings: dict[str, Any] = Field(default={})
    """{dotted setting: value or text}, laid over the recipe; a text may hold {variables} and name an earlier stage."""


def _without_minutes(text: str) -> str:
    if parse_duration(text).unit == "minutes":
        raise ValueError(f"got {text!r}, wanted epochs or steps")
    return text


Grace = Annotated[str, AfterValidator(_without_minutes)]
Seed = Annotated[int, Field(ge=0)]
Cost = Literal["params", "gflops", "device_seconds", "latency_ms", "peak_memory_bytes"]


class Goal(Section):
    """A number of a trial that is to be as high, or as low, as possible."""

    metric: str = "val/top1"
    mode: Literal["max", "min"] = "max"


class Grid(Section):
    """Every point."""

    kind: Literal["grid"] = "grid"


class Random(Section):
    """Points that know nothing of each other."""

    kind: Literal["random"] = "random"
    trials: Size
    """How many points are tried."""
    seed: Seed = 0


class Tpe(Section):
    """Points like those that did well so far: Optuna's tree of Parzen estimators."""

    kind: Literal["tpe"] = "tpe"
    trials: Size
    """How many points are tried."""
    first: Size = 10
    """Points drawn at random before any is drawn from what they scored."""
    seed: Seed = 0


class Nsga2(Section):
    """Points crossed from the best trade-offs between the goal and a cost: Optuna's NSGA-II."""

    kind: Literal["nsga2"] = "nsga2"
    trials: Size
    """How many points are tried."""
    population: Annotated[int, Field(ge=2)] = 20
    """Points of a generation, the first of which is drawn at random."""
    against: Cost = "gflops"
    """What is to be as low as possible while the goal is as good as possible."""
    seed: Seed = 0


Search = Grid | Random | Tpe | Nsga2


class NoScheduler(Section):
    """Every trial runs to its end."""

    kind: Literal["none"] = "none"


class Asha(Section):
    """Stops what is not among the best 1 / reduction, at grace, grace x reduction, and so on; trials come shuffled."""

    kind: Literal["asha"] = "asha"
    grace: Grace = "1 epoch"
    """No trial stops before it."""
    reduction: Annotated[int, Field(ge=2)] = 4


class Median(Section):
    """Stops what is worse than the median of the others at the same time; trials come shuffled."""

    kind: Literal["median"] = "median"
    grace: Grace = "1 epoch"
    """No trial stops before it."""


class Budget(Section):
    """After what no further trial begins, while those that run go on to their end; None is no limit."""

    trials: Size | None = None
    device_hours: Positive | None = None
    minutes: Positive | None = None
