"""The settings of a sweep: distributions, search, scheduler, budget and goal."""

import math
import random
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_serializer, model_validator

from vitray.config.parsing import short
from vitray.config.sections import LONGEST_TEXT, MOST_NUMBER, Fraction, Positive, Section, Seed, Size, Text, duration_in

# Each point is drawn, named and checked as a run before a sweep starts, in about a millisecond.
MOST_POINTS = 10_000
# Of a range with steps; a finer one is as good as uniform.
MOST_STEPS = 1_000_000
DIGITS = 4  # significant digits of a value drawn from a range; names print all of them


def _check_values(values: Any) -> Any:
    """Return values unchanged, or raise for one that a name or a message cannot print."""
    match values:
        case bool() | None:
            pass
        case int() | float():
            if not -MOST_NUMBER <= values <= MOST_NUMBER:
                raise ValueError(f"got {short(values)}, expected a number within {MOST_NUMBER:g}")
        case str():
            if not values.isprintable() or len(values) > LONGEST_TEXT:
                raise ValueError(f"got {short(values)}, expected one line of text, at most {LONGEST_TEXT} characters")
        case Mapping():
            for key, value in values.items():
                _check_values(key)
                _check_values(value)
        case _:
            for value in values:
                _check_values(value)
    return values


Number = Annotated[int | float, Field(ge=-MOST_NUMBER, le=MOST_NUMBER)]
Values = Annotated[tuple[Any, ...], Field(strict=False, max_length=MOST_POINTS), AfterValidator(_check_values)]
Range = Annotated[tuple[Number, Number], Field(strict=False)]


def slug(value: Any) -> str:
    """Return a value as part of a name: short, exact, and safe in a path and in a shell."""
    match value:
        case bool() | None:
            text = "null" if value is None else str(value).lower()
        case float():
            number = Decimal(repr(value)).normalize()
            digits = "".join(map(str, number.as_tuple().digits))
            mantissa = f"{'-' * number.is_signed()}{digits[0]}{'.' * (len(digits) > 1)}{digits[1:]}"
            text = min(f"{number:f}", f"{mantissa}e{number.adjusted()}", key=len)
        case Mapping():
            text = ",".join(f"{key}={slug(below)}".removeprefix("kind=") for key, below in value.items())
        case list() | tuple():
            text = ",".join(map(slug, value))
        case _:
            text = str(value)
    return re.sub(r"[^\w.,=+-]+", "_", text)


def _short_slug(value: Any) -> str:
    """Return the kind of a section, or the last part of a path."""
    if isinstance(value, Mapping) and "kind" in value:
        return slug(value["kind"])
    return slug(value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value)


class Distribution(Section):
    """The distribution of a setting or a variable: exactly one of these kinds."""

    grid: Values | None = None
    """Listed values: a grid search tries all of them, any other search draws one."""
    choice: Values | None = None
    """The same as grid."""
    uniform: Range | None = None
    """[low, high]."""
    loguniform: Range | None = None
    """[low, high], uniform in the logarithm."""
    quniform: Annotated[tuple[Number, Number, Number], Field(strict=False)] | None = None
    """[low, high, step]: low, low + step, and so on."""
    seeds: Annotated[int, Field(ge=1, le=MOST_POINTS)] | None = None
    """Number of seeds, from 0 on."""
    cases: Annotated[dict[str, dict[str, Any]], AfterValidator(_check_values)] | None = None
    """{name: {dotted setting: value or text}}: named groups of settings."""
    text: str | None = None
    """A text with {variable}, filled in and read as YAML. `name: text` is short for `name: {text: text}`."""
    lookup: Annotated[dict[Any, Any], AfterValidator(_check_values)] | None = None
    """A table, nested by the values of the variables in `of`: `{of: [stem], lookup: {linear: 1e-3, conv: 2e-3}}`."""
    of: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """The variables of a lookup, from the outermost level of its table."""

    @model_validator(mode="before")
    @classmethod
    def _expand_text(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"text": given}
        if not isinstance(given, dict):
            raise ValueError(f"got {short(given)}, expected a distribution, as in {{grid: [1, 2]}}")
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"got {' and '.join(given) or 'nothing'}, expected one of {', '.join(KINDS)}")
        if (self.lookup is None) != (not self.of):
            raise ValueError("`of` and `lookup` need each other, as in {of: [stem], lookup: {linear: 1, conv: 2}}")
        if self.values is not None and len(set(map(slug, self.values))) < max(1, len(self.values)):
            raise ValueError(f"{self.kind}: got {short(list(self.values))}, expected values that differ, at least one")
        least = 0.0 if self.kind == "loguniform" else -math.inf
        if self.bounds and not least < self.bounds[0] < self.bounds[1] < math.inf:
            wanted = f"low < high{', both above 0' if least == 0 else ''}"
            raise ValueError(f"{self.kind}: got {list(self.bounds)}, expected {wanted}")
        if self.quniform:
            low, high, step = self.quniform
            if not (step > 0 and high - low <= MOST_STEPS * step):
                wanted = f"more than 0, with at most {MOST_STEPS:,} steps from {low} to {high}"
                raise ValueError(f"quniform: got a step of {step}, expected {wanted}")
        return self

    @model_serializer
    def _to_yaml(self) -> Any:
        if self.text is not None:
            return self.text
        return {**({"of": self.of} if self.of else {}), self.kind: getattr(self, self.kind)}

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def is_drawn(self) -> bool:
        """Whether a search draws it; a text and a lookup follow from what is drawn."""
        return self.text is None and self.lookup is None

    @property
    def values(self) -> tuple[Any, ...] | None:
        """All values in order; None for a range, a text or a lookup."""
        if self.seeds or self.cases is not None:
            return tuple(range(self.seeds) if self.seeds else self.cases or ())
        return self.grid if self.grid is not None else self.choice

    @property
    def bounds(self) -> tuple[Number, Number] | None:
        """The lowest and the highest value of a range."""
        ends = self.uniform or self.loguniform or self.quniform
        return ends and (ends[0], ends[1])

    @property
    def extremes(self) -> tuple[Any, Any]:
        """The first and the last value."""
        return self.bounds or (self.values[0], self.values[-1])  # type: ignore[index]

    def sample(self, generator: random.Random) -> Any:
        """Draw one value; a value from a range is not yet snapped."""
        if self.values is not None:
            return generator.choice(self.values)
        low, high = self.extremes
        if self.kind == "loguniform":
            return math.exp(generator.uniform(math.log(low), math.log(high)))
        return generator.uniform(low, high)

    def snap(self, value: Any) -> Any:
        """Round a drawn value to the steps of its range, or to the digits that a name prints."""
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
        """Return a value for a name: its kind, or the last part of a path, if that is unique."""
        return _short_slug(value) if self._has_short_labels else slug(value)

    @cached_property
    def _has_short_labels(self) -> bool:
        """Whether the short names of all values differ."""
        others = self.values or ()
        return len(set(map(_short_slug, others))) == len(others)


KINDS = tuple(name for name in Distribution.model_fields if name != "of")


class EarlierStage(Section):
    """A run before the trials: the text `{name}` in a trial's settings stands for its model folder."""

    recipe: Text
    """A YAML file, or one that vitray brings."""
    settings: Annotated[dict[str, Any], AfterValidator(_check_values)] = Field(default={})
    """{dotted setting: value or text}, overrides of the recipe. Texts may hold {variables} and earlier stages."""


class SearchTraits(NamedTuple):
    """The nature of a kind of search."""

    is_exhaustive: bool = False
    """Whether it tries every combination of listed values; any other search draws its points."""
    learns: bool = False
    """Whether a point depends on the scores of earlier ones."""


class SchedulerTraits(NamedTuple):
    """The nature of a kind of scheduler."""

    decides: bool
    """Whether it decides after each score; the trial waits for it."""
    is_population: bool = False
    """Whether trials continue from each other's checkpoints."""


Trials = Annotated[int, Field(ge=1, le=MOST_POINTS, description="How many points are tried.")]
Cost = Literal["params", "gflops", "device_seconds", "latency_ms", "peak_memory_bytes"]


class Goal(Section):
    """The metric to maximize or minimize."""

    metric: Text = "val/top1"
    """If omitted, and an image has several labels: val/map."""
    mode: Literal["max", "min"] = "max"
    control: dict[str, Any] | None = None
    """Settings of the group that all others are compared with, by Dunnett's test; null: each is compared with each, by
    Tukey's."""


class Grid(Section):
    """Every point."""

    traits: ClassVar = SearchTraits(is_exhaustive=True)
    trials: ClassVar[int | None] = None
    second_goal: ClassVar[Cost | None] = None
    kind: Literal["grid"] = "grid"


class Random(Section):
    """Independent random points."""

    traits: ClassVar = SearchTraits()
    second_goal: ClassVar[Cost | None] = None
    kind: Literal["random"] = "random"
    trials: Trials
    seed: Seed = 0


class Tpe(Section):
    """Points near the best so far: Optuna's tree-structured Parzen estimator."""

    traits: ClassVar = SearchTraits(learns=True)
    second_goal: ClassVar[Cost | None] = None
    kind: Literal["tpe"] = "tpe"
    trials: Trials
    first: Size = 10
    """Random points before the estimator starts."""
    seed: Seed = 0


class Nsga2(Section):
    """Crossovers of the best trade-offs between goal and cost: Optuna's NSGA-II."""

    traits: ClassVar = SearchTraits(learns=True)
    kind: Literal["nsga2"] = "nsga2"
    trials: Trials
    population: Annotated[int, Field(ge=2, le=MOST_POINTS)] = 20
    """Points per generation; the first generation is random."""
    second_goal: Cost = "gflops"
    """The cost to minimize."""
    seed: Seed = 0


Search = Grid | Random | Tpe | Nsga2


Grace = Annotated[str, duration_in("epochs", "steps", least=0), Field(description="The shortest training of a trial.")]


class NoScheduler(Section):
    """Every trial runs to its end."""

    traits: ClassVar = SchedulerTraits(decides=False)
    kind: Literal["none"] = "none"


class Asha(Section):
    """Stops trials outside the best 1 / reduction at grace, grace x reduction, ...; trials are shuffled."""

    traits: ClassVar = SchedulerTraits(decides=True)
    kind: Literal["asha"] = "asha"
    grace: Grace = "1 epoch"
    reduction: Annotated[int, Field(ge=2, le=1000)] = 4


class Median(Section):
    """Stops trials worse than the median of the others at the same share of their runs; trials are shuffled."""

    traits: ClassVar = SchedulerTraits(decides=True)
    kind: Literal["median"] = "median"
    grace: Grace = "1 epoch"


class Population(Section):
    """Population-based training: the worst trials continue from checkpoints of the best, with other settings."""

    traits: ClassVar = SchedulerTraits(decides=True, is_population=True)
    kind: Literal["population"] = "population"
    every: Annotated[str, duration_in("epochs", "steps")] = "1 epoch"
    """Training between two comparisons of a trial; the next evaluation after it decides."""
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """Share of the trials that count as the worst, and as the best."""
    resample: Fraction = 0.25
    """Probability that a changed setting is drawn anew, not multiplied by 0.8 or 1.2."""


Scheduler = NoScheduler | Asha | Median | Population


class Budget(Section):
    """Limits after which no new trial starts; running trials finish. None is no limit."""

    trials: Size | None = None
    device_hours: Positive | None = None
    minutes: Positive | None = None
