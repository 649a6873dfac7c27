"""Search spaces and their points.

A name without a dot that is no setting of a run is a variable: it exists only for texts and for `where`.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from vitray.config import Run
from vitray.config.model_names import Name, parse_name
from vitray.config.parsing import dump_yaml, parse_yaml
from vitray.config.sections import Section, one_of
from vitray.config.sweep import (
    Budget,
    Distribution,
    EarlierStage,
    Goal,
    Grid,
    NoScheduler,
    Scheduler,
    Search,
    slug,
)
from vitray.config.validation import sections_in
from vitray.errors import ConfigError, nearest
from vitray.sweeps.space.expressions import evaluate, names_in

STAGES_DIR = "before"  # the folder of the stages in a sweep's folder
SEED, FOLD = "seed", "data.fold.index"
# Settings whose values repeat a group, by what people call their values.
REPEATS = {SEED: "seeds", FOLD: "folds"}
LONGEST_NAME = 180  # bytes; storage allows 200, and a population adds ` continuation=12`
# Settings that a checkpoint of a run does not depend on; with a final dot, all settings of a section.
CHANGEABLE = ("optim.lr", "data.augment.", "data.mix.")
PLACEHOLDER = re.compile(r"{(\w+)}")


class Space(Section):
    """The search space of a sweep, with its search, scheduler, budget and goal."""

    space: Annotated[dict[str, Distribution], Field(max_length=100)]
    """{dotted setting or variable: distribution}."""
    where: Annotated[tuple[str, ...], Field(strict=False, max_length=100)] = ()
    """Constraints on every point, over variables: `depth * branches == 36`."""
    before: dict[str, EarlierStage] = Field(default={}, max_length=10)
    """{name: run} of the stages: runs before the trials, for the trials that name them."""
    search: Annotated[Search, Field(discriminator="kind"), one_of("grid")] = Grid()
    scheduler: Annotated[Scheduler, Field(discriminator="kind"), one_of("none")] = NoScheduler()
    budget: Budget = Budget()
    goal: Goal = Goal()
    failures: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of failed trials that stops the sweep."""

    def to_yaml(self) -> str:
        """Return the space as a YAML file that reads as the same value."""
        return dump_yaml(self.model_dump(mode="json"))

    @property
    def changeable(self) -> list[str]:
        """The drawn settings that may change while a population trains."""
        return [name for name in self.drawn if name.startswith(CHANGEABLE)]

    @property
    def drawn(self) -> dict[str, Distribution]:
        """The settings and variables that are drawn, not computed."""
        return {name: distribution for name, distribution in self.space.items() if distribution.is_drawn}

    def dependencies(self, stage: str) -> list[str]:
        """Return the drawn names that a stage depends on, directly or through an earlier stage."""
        references = placeholders(self.before[stage].settings)
        names = set(self.drawn) & references
        names.update(*map(self.dependencies, references & set(self.before)))
        return [name for name in self.drawn if name in names]

    @cached_property
    def shared_stage(self) -> str | None:
        """The stage that trials of one seed share, and no others: all name it, and it depends on the seed alone."""
        fixed = [each for name, each in self.space.items() if not is_variable(name) and not each.cases]
        named = {name for each in fixed for name in PLACEHOLDER.findall(each.text or "")}
        return next((stage for stage in self.before if stage in named and self.dependencies(stage) == ["seed"]), None)

    def allows(self, values: Mapping[str, Any]) -> bool:
        """Whether every constraint that uses only these names holds."""
        return all(evaluate(line, values) for line in self.where if names_in(line) <= set(values))

    def combinations(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the allowed combinations of listed values for these names; the last name varies fastest."""
        for values in itertools.product(*(self.space[name].values or () for name in names)):
            chosen = dict(zip(names, values, strict=True))
            if self.allows(chosen):
                yield chosen

    @cached_property
    def name_parts(self) -> tuple[list[str], bool]:
        """The names that a point's name lists, and whether all models share one width, patch and stem.

        The list leaves out each variable that follows from the rest, through the model's name or a constraint.
        """
        listed = [name for name in self.drawn if name != "model.name"]
        finite = [name for name in listed if is_variable(name) and self.space[name].values is not None]
        rows, kept, models = list(self.combinations(finite)), list(finite), ()
        match self.space.get("model.name"):
            case Distribution(text=str(text)) if set(PLACEHOLDER.findall(text)) <= set(finite):
                models = [_fill(text, row, self) for row in rows]
                rows = [row | {"model.name": model} for row, model in zip(rows, models, strict=True)]
                kept.append("model.name")
            case Distribution(values=tuple(values)):
                models = values
        for name in reversed(finite):
            rest = [other for other in kept if other != name]
            if rest and len({json.dumps([row[other] for other in rest]) for row in rows}) == len(rows):
                listed.remove(name)
                kept = rest
        families = {shape and (shape.width, shape.patch, shape.stem) for shape in map(shape_of, models)}
        return ["model.name"] * ("model.name" in self.space) + listed, len(families) == 1 and None not in families


class SweepPoint(NamedTuple):
    """The settings of one trial."""

    settings: dict[str, Any]
    """{dotted setting: value}; `{stage}` stands for the model folder of a stage."""
    drawn: dict[str, Any]
    """{name: value} of the drawn settings and variables."""
    shown: dict[str, Any]
    """The settings for people: of a case only its name."""
    before: dict[str, str]
    """{stage: case} of the stages that the trial starts from."""


def grid_points(space: Space) -> list[SweepPoint]:
    """Return every point of a grid search; the last name in the file varies fastest."""
    return [_point(space, drawn) for drawn in space.combinations(list(space.drawn))]


def draw_point(space: Space, values: Mapping[str, Any]) -> SweepPoint | None:
    """Return the point of these drawn values; None where a constraint forbids it."""
    drawn = {name: distribution.snap(values[name]) for name, distribution in space.drawn.items()}
    return _point(space, drawn) if space.allows(drawn) else None


def random_points(space: Space, number: int, seed: int = 0) -> list[SweepPoint]:
    """Return different random points; fewer where that many are hard to find."""
    generator, points = random.Random(seed), dict[str, SweepPoint]()
    for _ in range(100 * number):
        point = draw_point(space, {name: each.sample(generator) for name, each in space.drawn.items()})
        if point:
            points.setdefault(name_of(point, space), point)
        if len(points) == number:
            break
    return list(points.values())


def run_of(base: Run, point: SweepPoint, sweep_dir: str = "") -> Run:
    """Return the run of a point."""
    return base.replace(resolve_stages(point.settings, point.before, sweep_dir))


def resolve_stages(settings: Mapping[str, Any], before: Mapping[str, str], sweep_dir: str) -> dict[str, Any]:
    """Return settings with the model folder of the stage in place of `{stage}`."""
    folders = {f"{{{stage}}}": folder for stage, folder in stage_models(before, sweep_dir).items()}
    return _map_texts(settings, lambda text: folders.get(text, text))


def stage_models(before: Mapping[str, str], sweep_dir: str) -> dict[str, str]:
    """Return {stage: model folder of its run} for {stage: case}."""
    return {stage: f"{sweep_dir}/{STAGES_DIR}/{stage}/{stage}={case}/model" for stage, case in before.items()}


def stage_space(space: Space, stage: str, points: Iterable[SweepPoint], sweep_dir: str) -> Space:
    """Return the space of a stage: one case for each of its runs that these points start from."""
    cases: dict[str, dict[str, Any]] = {}
    for point in points:
        if stage in point.before:
            settings = _fill(space.before[stage].settings, point.drawn, space)
            cases[point.before[stage]] = resolve_stages(settings, point.before, sweep_dir)
    goal = Goal(metric="val/loss", mode="min")
    return Space(space={stage: Distribution(cases=cases)}, goal=goal, failures=space.failures)


def name_of(point: SweepPoint, space: Space) -> str:
    """Return a point's name by its varying settings: `18x2 lr=3e-3 seed=1`; the whole model name if widths vary."""
    listed, one_family = space.name_parts
    keys, parts = [name.rpartition(".")[2] for name in listed], []
    for name, key in zip(listed, keys, strict=True):
        if name == "model.name":
            shape = shape_of(point.settings[name])
            model = f"{shape.depth}x{shape.branches}" if shape and one_family else shape or point.settings[name]
            parts.append(slug(str(model)))
        else:
            parts.append(f"{key if keys.count(key) == 1 else name}={space.space[name].label(point.drawn[name])}")
    return " ".join(parts)


def _point(space: Space, drawn: dict[str, Any]) -> SweepPoint:
    settings: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for name, distribution in space.space.items():
        if distribution.cases:
            settings |= _fill(distribution.cases[drawn[name]], drawn, space)
            shown[name] = drawn[name]
        elif not is_variable(name):
            if distribution.lookup is not None:
                value = look_up(distribution, drawn)
            else:
                value = drawn[name] if distribution.text is None else _fill(distribution.text, drawn, space)
            settings[name] = shown[name] = value
    return SweepPoint(settings, drawn, shown, _stage_cases(space, settings, drawn))


def look_up(distribution: Distribution, drawn: Mapping[str, Any]) -> Any:
    """Return the value of a lookup; keys and values are equal if they are spelled alike in a name."""
    found: Any = distribution.lookup
    for variable in distribution.of:
        rows = {slug(key): below for key, below in found.items()} if isinstance(found, Mapping) else {}
        if (key := slug(drawn[variable])) not in rows:
            cell = ", ".join(f"{name}={slug(drawn[name])}" for name in distribution.of)
            raise ConfigError(f"the lookup has no value for {cell}{nearest(key, rows)}")
        found = rows[key]
    return found


def _stage_cases(space: Space, settings: Any, drawn: Mapping[str, Any]) -> dict[str, str]:
    """Return {stage: case} for the stages that settings name, directly or through a stage; earlier stages first."""
    cases: dict[str, str] = {}
    for stage in space.before:
        if stage in placeholders(settings):
            cases |= _stage_cases(space, space.before[stage].settings, drawn)
            cases[stage] = ",".join(slug(drawn[name]) for name in space.dependencies(stage)) or "once"
    return cases


def swept_settings(space: Space) -> Iterator[tuple[str, str]]:
    """Yield (name in the space, setting) for every setting that the space sets."""
    for name, distribution in space.space.items():
        yield from ((name, path) for path in dict.fromkeys(itertools.chain(*(distribution.cases or {}).values())))
        if distribution.cases is None and not is_variable(name):
            yield name, name


def texts_in(value: Any) -> list[str]:
    """Return every text in a value."""
    texts: list[str] = []
    _map_texts(value, texts.append)
    return texts


def placeholders(value: Any) -> set[str]:
    """Return the names of the {placeholders} in the texts of a value."""
    return {name for text in texts_in(value) for name in PLACEHOLDER.findall(text)}


def _fill(value: Any, drawn: Mapping[str, Any], space: Space) -> Any:
    """Fill variables into the texts of a value and parse these as YAML; texts with a stage stay."""

    def spell(match: re.Match[str]) -> str:
        value = drawn[match[1]]
        return value if isinstance(value, str) else json.dumps(value)

    def fill(text: str) -> Any:
        names = placeholders(text)
        if not names or names & set(space.before):
            return text
        return parse_yaml(PLACEHOLDER.sub(spell, text), f"the text {text!r}")[0]

    return _map_texts(value, fill)


def _map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a value with every text in it changed."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {key: _map_texts(below, change) for key, below in value.items()}
        case list() | tuple():
            return [_map_texts(below, change) for below in value]
        case _:
            return value


def shape_of(model: Any) -> Name | None:
    """Return the parsed name of a model; None for an invalid one, which the run refuses later."""
    try:
        return parse_name(str(model))
    except ValueError:
        return None


# ---- names of settings -----------------------------------------------------------------------------------------------


def _settings(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the dotted path of every setting, in sections of every kind."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        for below in sections_in(field.annotation).values():
            yield from _settings(below, f"{path}{name}.")


SETTINGS = frozenset(_settings(Run))


def is_variable(name: str) -> bool:
    """Whether a name in a space is a variable, not a setting."""
    return "." not in name and name not in SETTINGS
