"""Spaces and their points: what is drawn and how, what goes together, what is trained before.

A name without a dot that is no setting of a run is a variable: it is drawn, for texts and for `where` alone.
"""

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from vitray.config import Run
from vitray.config.model_names import Name, parse_name
from vitray.config.parsing import dump_yaml, parse_yaml
from vitray.config.sections import Section, one_of
from vitray.config.sweep import Asha, Budget, Draw, Goal, Grid, Median, NoScheduler, Search, Stage, spelled
from vitray.config.validation import sections_in
from vitray.sweep.expressions import evaluate, names_in

BEFORE = "before"  # the folder of the runs before the trials
MOST = 10_000  # combinations of a grid
VARIABLE = re.compile(r"{(\w+)}")


class Space(Section):
    """What a sweep draws, how it searches, when it stops."""

    space: dict[str, Draw]
    """What is drawn: {dotted setting or variable: how}."""
    where: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What holds for every point, over variables: `depth * branches == 36`."""
    before: dict[str, Stage] = Field(default={})
    """What is trained first, for the trials that name it: {name: run}."""
    search: Annotated[Search, Field(discriminator="kind"), one_of("grid")] = Grid()
    scheduler: Annotated[NoScheduler | Asha | Median, Field(discriminator="kind"), one_of("none")] = NoScheduler()
    budget: Budget = Budget()
    goal: Goal = Goal()
    failures: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of failed trials that stops the sweep."""

    def to_yaml(self) -> str:
        """The space as a file that reads as the same value."""
        return dump_yaml(self.model_dump(mode="json"))

    @property
    def learns(self) -> bool:
        """Whether a point depends on what the ones before it scored."""
        return self.search.kind in ("tpe", "nsga2")

    @property
    def drawn(self) -> dict[str, Draw]:
        """The settings and variables that are drawn, not computed."""
        return {name: draw for name, draw in self.space.items() if draw.text is None}

    def depends(self, stage: str) -> list[str]:
        """What is drawn that a stage depends on, itself or by an earlier stage."""
        words = words_in(self.before[stage].settings)
        names = set(self.drawn) & words
        names.update(*map(self.depends, words & set(self.before)))
        return [name for name in self.drawn if name in names]

    def allows(self, values: Mapping[str, Any]) -> bool:
        """Whether every constraint that is about these values alone holds."""
        return all(evaluate(line, values) for line in self.where if names_in(line) <= set(values))

    def combinations(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The allowed choices of a listed value for each of these names; the last name turns fastest."""
        for values in itertools.product(*(self.space[name].values or () for name in names)):
            chosen = dict(zip(names, values, strict=True))
            if self.allows(chosen):
                yield chosen

    @cached_property
    def named_by(self) -> tuple[list[str], bool]:
        """What a name lists, and whether all its models are of one width, patch and stem.

        Listed is what is drawn, less each variable that follows from the rest: from the model's name, or by `where`.
        """
        listed = [name for name in self.drawn if name != "model.name"]
        finite = [name for name in listed if is_variable(name) and self.space[name].values is not None]
        rows, seen, models = list(self.combinations(finite)), list(finite), ()
        match self.space.get("model.name"):
            case Draw(text=str(text)) if set(VARIABLE.findall(text)) <= set(finite):
                models = [_filled(text, row, self) for row in rows]
                rows = [row | {"model.name": model} for row, model in zip(rows, models, strict=True)]
                seen.append("model.name")
            case Draw(values=tuple(values)):
                models = values
        for name in reversed(finite):
            rest = [other for other in seen if other != name]
            if rest and len({json.dumps([row[other] for other in rest]) for row in rows}) == len(rows):
                listed.remove(name)
                seen = rest
        families = {shape and (shape.width, shape.patch, shape.stem) for shape in map(_shape, models)}
        return ["model.name"] * ("model.name" in self.space) + listed, len(families) == 1 and None not in families


class Point(NamedTuple):
    """One trial."""

    settings: dict[str, Any]
    """{dotted setting: value}, in which `{stage}` stands for the model folder of what is trained before."""
    drawn: dict[str, Any]
    """What was drawn for it, variables too."""
    shown: dict[str, Any]
    """The settings as people read them: of a case its name alone."""
    before: dict[str, str]
    """{stage: which of its runs} of all that is trained before it."""


def grid_points(space: Space) -> list[Point]:
    """Every point of a grid search; what comes last in the file turns fastest."""
    return [_point(space, drawn) for drawn in space.combinations(list(space.drawn))]


def draw_point(space: Space, values: Mapping[str, Any]) -> Point | None:
    """The point of values drawn by name, variables too; None where a constraint forbids it."""
    drawn = {name: draw.snapped(values[name]) for name, draw in space.drawn.items()}
    return _point(space, drawn) if space.allows(drawn) else None


def random_points(space: Space, number: int, seed: int = 0) -> list[Point]:
    """Points drawn at random, all different; fewer where so many are hard to find."""
    generator, found = random.Random(seed), dict[str, Point]()
    for _ in range(100 * number):
        point = draw_point(space, {name: draw.sample(generator) for name, draw in space.drawn.items()})
        if point:
            found.setdefault(name_of(point, space), point)
        if len(found) == number:
            break
    return list(found.values())


def run_of(base: Run, point: Point, home: str = "") -> Run:
    """The run that a point stands for, of the sweep in this folder."""
    return base.replace(settled(point.settings, point.before, home))


def settled(settings: Mapping[str, Any], before: Mapping[str, str], home: str) -> dict[str, Any]:
    """Settings with the address of a model folder in place of `{stage}`."""
    folders = {f"{{{stage}}}": f"{home}/{BEFORE}/{stage}/{stage}={case}/model" for stage, case in before.items()}

    def settle(value: Any) -> Any:
        match value:
            case str():
                return folders.get(value, value)
            case Mapping():
                return {key: settle(below) for key, below in value.items()}
            case list() | tuple():
                return [settle(below) for below in value]
            case _:
                return value

    return settle(settings)


def stage_space(space: Space, stage: str, points: Iterable[Point], home: str) -> Space:
    """What is trained of a stage for these points of the sweep in this folder: a space too, of a case for each run."""
    cases: dict[str, dict[str, Any]] = {}
    for point in points:
        if stage in point.before:
            settings = _filled(space.before[stage].settings, point.drawn, space)
            cases[point.before[stage]] = settled(settings, point.before, home)
    return Space(space={stage: Draw(cases=cases)}, goal=Goal(metric="val/loss", mode="min"), failures=space.failures)


def name_of(point: Point, space: Space) -> str:
    """A point by what varies: `18x2 lr=3e-3 seed=1`, with the whole name of a model whose width varies too."""
    listed, one_family = space.named_by
    words, parts = [name.rpartition(".")[2] for name in listed], []
    for name, word in zip(listed, words, strict=True):
        if name == "model.name":
            shape = _shape(point.settings[name])
            model = f"{shape.depth}x{shape.branches}" if shape and one_family else shape or point.settings[name]
            parts.append(spelled(str(model)))
        else:
            parts.append(f"{word if words.count(word) == 1 else name}={space.space[name].label(point.drawn[name])}")
    return " ".join(parts)


def _point(space: Space, drawn: dict[str, Any]) -> Point:
    settings: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for name, draw in space.space.items():
        if draw.cases:
            settings |= _filled(draw.cases[drawn[name]], drawn, space)
            shown[name] = drawn[name]
        elif not is_variable(name):
            settings[name] = shown[name] = drawn[name] if draw.text is None else _filled(draw.text, drawn, space)
    return Point(settings, drawn, shown, _before(space, settings, drawn))


def _before(space: Space, settings: Any, drawn: Mapping[str, Any]) -> dict[str, str]:
    """{stage: which of its runs} for all stages that settings name, and those that these name, earlier ones first."""
    found: dict[str, str] = {}
    for stage in space.before:
        if stage in words_in(settings):
            found |= _before(space, space.before[stage].settings, drawn)
            found[stage] = ",".join(spelled(drawn[name]) for name in space.depends(stage)) or "once"
    return found


def swept(space: Space) -> Iterator[tuple[str, str]]:
    """(what sets it, setting) of all that the space sets."""
    for name, draw in space.space.items():
        yield from ((name, path) for path in dict.fromkeys(itertools.chain(*(draw.cases or {}).values())))
        if draw.cases is None and not is_variable(name):
            yield name, name


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a value."""
    match value:
        case str():
            yield value
        case Mapping():
            yield from texts_in(list(value.values()))
        case list() | tuple():
            yield from itertools.chain(*map(texts_in, value))


def words_in(value: Any) -> set[str]:
    """The {words} in the texts of a value."""
    return {word for text in texts_in(value) for word in VARIABLE.findall(text)}


def _filled(value: Any, drawn: Mapping[str, Any], space: Space) -> Any:
    """A value whose texts have their variables filled in, read as YAML, of which JSON is a part."""

    def spell(found: re.Match[str]) -> str:
        value = drawn[found[1]]
        return value if isinstance(value, str) else json.dumps(value)

    match value:
        case str() if (words := words_in(value)) and not words & set(space.before):
            return parse_yaml(VARIABLE.sub(spell, value), f"the text {value!r}")[0]
        case Mapping():
            return {key: _filled(below, drawn, space) for key, below in value.items()}
        case list() | tuple():
            return [_filled(below, drawn, space) for below in value]
        case _:
            return value


def _shape(model: Any) -> Name | None:
    """What a model's name says; None of a name that the run will refuse."""
    try:
        return parse_name(str(model))
    except ValueError:
        return None


# ---- names of settings -----------------------------------------------------------------------------------------------


def _settings(section: type[Section], path: str = "") -> Iterator[str]:
    """The dotted path of every setting, in sections of every kind."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        for below in sections_in(field.annotation).values():
            yield from _settings(below, f"{path}{name}.")


SETTINGS = frozenset(_settings(Run))


def is_variable(name: str) -> bool:
    return "." not in name and name not in SETTINGS
