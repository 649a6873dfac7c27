"""A sweep as a value: what is drawn and how, what goes together, and every point of it a run before one is trained.

A name without a dot that is no setting of a run is a variable: it is drawn, for texts and for `where` alone.
"""

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from vitray.config import ConfigError, Run
from vitray.config.reading import dump_yaml, parse_words, parse_yaml, read_recipe, short
from vitray.config.refusals import refusal, sections_in
from vitray.config.sections import Section, one_of
from vitray.config.sweeping import (
    Asha,
    Budget,
    Draw,
    Goal,
    Grid,
    Median,
    NoScheduler,
    Search,
    spelled,
)
from vitray.expressions import evaluate, names_in
from vitray.model.names import Name, nearest, parse_name

MOST = 10_000  # combinations of a grid
VARIABLE = re.compile(r"{(\w+)}")


class Space(Section):
    """What a sweep draws, how it searches, when it stops."""

    space: dict[str, Draw]
    """What is drawn: {dotted setting or variable: how}."""
    where: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What holds for every point, over variables: `depth * branches == 36`."""
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
        finite = [name for name in listed if _is_variable(name) and self.space[name].values is not None]
        rows, seen, models = list(self.combinations(finite)), list(finite), ()
        match self.space.get("model.name"):
            case Draw(text=str(text)) if set(VARIABLE.findall(text)) <= set(finite):
                models = [_filled(text, row) for row in rows]
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
    """One trial: {dotted setting: value}, and what was drawn for it, variables too."""

    settings: dict[str, Any]
    drawn: dict[str, Any]


def read_space(path: Path) -> Space:
    """The space of a file."""
    tree, places = read_recipe(path)
    try:
        space = Space.model_validate(tree)
    except ValidationError as invalid:
        raise refusal(invalid, Space, places, str(path)) from None
    _check(space, places, str(path))
    return space


def extended(space: Space, words: Sequence[str]) -> Space:
    """The space with one more value of what lists its values for each word, such as `optim.lr=1e-2`."""
    for word in words:
        ((name, value),) = parse_words([word]).items()
        listing = {name: draw for name, draw in space.drawn.items() if draw.values is not None}
        if name not in listing:
            raise ConfigError(f"the word {word!r}: the space lists no values of {name}{nearest(name, listing)}")
        draw = listing[name]
        if spelled(value) in map(spelled, draw.values or ()):
            raise ConfigError(f"the word {word!r}: the space has this value of {name} already")
        tree = space.model_dump()
        tree["space"][name] = {"grid" if draw.seeds else draw.kind: [*(draw.values or ()), value]}
        wider = Space.model_validate(tree)
        _check(wider, {}, f"the word {word!r}")
        if space.search.kind == "grid" and len(grid_points(wider)) == len(grid_points(space)):
            raise ConfigError(f"the word {word!r}: adds no point that where allows")
        space = wider
    return space


def check_words(space: Space, words: Sequence[str]) -> None:
    """Refuse a word of the command line that the space would be laid over."""
    for path in parse_words(words):
        swept = next((name for name in space.space if f"{path}.".startswith(f"{name}.")), None)
        if swept:
            raise ConfigError(f"the word {path}=...: the space sets {swept} too, wanted it set by one of them")


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


def run_of(base: Run, point: Point) -> Run:
    """The run that a point stands for."""
    return base.replace(point.settings)


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


def check_space(space: Space, base: Run) -> list[Point]:
    """The points of a search, once each is known to be a run: of one that learns, as many as it may try, at random.

    What is drawn is checked by corners and 100 draws too.
    """
    examples: list[Point] = []
    if space.search.kind == "grid":
        points = grid_points(space)
    else:
        points = random_points(space, space.search.trials, space.search.seed)
        extremes = itertools.product(*(draw.extremes for draw in space.drawn.values()))
        corners = (dict(zip(space.drawn, values, strict=True)) for values in itertools.islice(extremes, 1024))
        examples = [*filter(None, (draw_point(space, corner) for corner in corners)), *random_points(space, 100)]
    runs: dict[Run, str] = {}
    for point in [*examples, *points]:
        name = name_of(point, space)
        try:
            known = runs.setdefault(run_of(base, point), name)
        except ConfigError as error:
            said = str(error).splitlines()[0].removeprefix("replace: ")
            raise ConfigError(f"the point {name}: {said}") from None
        if known != name:
            raise ConfigError(f"the point {name}: is the same run as {known}, wanted one of them")
    return points


def _point(space: Space, drawn: dict[str, Any]) -> Point:
    settings = {
        name: drawn[name] if draw.text is None else _filled(draw.text, drawn)
        for name, draw in space.space.items()
        if not _is_variable(name)
    }
    return Point(settings, drawn)


def _filled(text: str, drawn: Mapping[str, Any]) -> Any:
    """A text with its variables filled in, read as YAML, of which JSON is a part."""

    def spell(found: re.Match[str]) -> str:
        value = drawn[found[1]]
        return value if isinstance(value, str) else json.dumps(value)

    return parse_yaml(VARIABLE.sub(spell, text), f"the text {text!r}")[0]


def _shape(model: Any) -> Name | None:
    """What a model's name says; None of a name that the run will refuse."""
    try:
        return parse_name(str(model))
    except ValueError:
        return None


# ---- what cannot be swept --------------------------------------------------------------------------------------------


def _settings(section: type[Section], path: str = "") -> Iterator[str]:
    """The dotted path of every setting, in sections of every kind."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        for below in sections_in(field.annotation).values():
            yield from _settings(below, f"{path}{name}.")


SETTINGS = frozenset(_settings(Run))
# What a sweep gives to each trial alike: by it, as many run at a time as fit.
OF_THE_SWEEP = ("compute.workers", "compute.device", "compute.cpus", "compute.gpus", "tracking.register_as")


def _is_variable(name: str) -> bool:
    return "." not in name and name not in SETTINGS


def _check(space: Space, places: Mapping[str, str], source: str) -> None:
    """Refuse a space with a part that is unknown, unused or impossible."""
    faults = itertools.chain(_text_faults(space), _name_faults(space), _where_faults(space), _point_faults(space))
    for part, fault in faults:
        raise ConfigError(f"{places.get(part, source)}: {part}: {fault}")


def _text_faults(space: Space) -> Iterator[tuple[str, str]]:
    for name, draw in space.space.items():
        if draw.text is None:
            continue
        wrong = [word for word in VARIABLE.findall(draw.text) if word not in space.drawn]
        if _is_variable(name):
            yield f"space.{name}", f"got the text {draw.text!r}, wanted a draw, as {name} is a variable"
        elif wrong:
            yield f"space.{name}", f"no variable {wrong[0]!r} is drawn{nearest(wrong[0], space.drawn)}"
        elif not VARIABLE.search(draw.text) or re.search("[{}]", VARIABLE.sub("", draw.text)):
            wanted = f"a text with {{variable}}; what does not vary is a word, {name}=..."
            yield f"space.{name}", f"got {short(draw.text)}, wanted {wanted}"


def _name_faults(space: Space) -> Iterator[tuple[str, str]]:
    used = {name for draw in space.space.values() for name in VARIABLE.findall(draw.text or "")}
    if not space.space:
        yield "space", "got nothing, wanted what is drawn, as in `optim.lr: {grid: [1e-3, 3e-3]}`"
    for name, draw in space.space.items():
        whole = next((other for other in space.space if name.startswith(f"{other}.")), None)
        if "." in name and name not in SETTINGS:
            yield f"space.{name}", f"unknown setting of a run{nearest(name, SETTINGS)}"
        elif any(f"{setting}.".startswith(f"{name}.") for setting in OF_THE_SWEEP):
            yield f"space.{name}", f"is the same for all trials of a sweep; wanted it as a word, {name}=..."
        elif whole:
            yield f"space.{name}", f"lies in {whole}, which the space sets whole; wanted one of them"
        elif _is_variable(name) and name not in used:
            meant = min((setting for setting in SETTINGS if setting.endswith(f".{name}")), default=None)
            close = f"; nearest: {meant}" if meant else nearest(name, Run.model_fields)
            yield f"space.{name}", f"no setting, and no text uses it as a variable, as {{{name}}}{close}"
        elif space.search.kind == "grid" and draw.text is None and draw.values is None:
            yield f"space.{name}", f"got {draw.kind}, of which a grid search has no end; wanted grid, or search: random"


def _where_faults(space: Space) -> Iterator[tuple[str, str]]:
    for index, line in enumerate(space.where):
        try:
            wrong = sorted(names_in(line) - set(space.drawn))
        except ConfigError as error:
            yield f"where[{index}]", str(error)
            return
        if wrong:
            yield f"where[{index}]", f"no variable {wrong[0]!r} is drawn{nearest(wrong[0], space.drawn)}"


def _point_faults(space: Space) -> Iterator[tuple[str, str]]:
    is_grid = space.search.kind == "grid"
    if space.search.kind == "nsga2" and space.scheduler.kind != "none":
        yield "scheduler", f"got {space.scheduler.kind}, wanted none: search nsga2 compares trials that have ended"
    listed = [draw.values for name, draw in space.drawn.items() if draw.values and (is_grid or _is_variable(name))]
    if math.prod(map(len, listed)) > MOST:
        yield "space", f"got {math.prod(map(len, listed)):,} combinations, wanted at most {MOST:,}"
        return
    try:
        points = grid_points(space) if is_grid else random_points(space, 1)
        named: dict[str, Point] = {}
        for point in points:
            other = named.setdefault(name_of(point, space), point)
            if other is not point:
                yield "space", f"two points are both {name_of(point, space)}: {other.drawn} and {point.drawn}"
    except ConfigError as error:
        yield "where", str(error)
        return
    if not points:
        yield "where", "no point that is drawn satisfies it, wanted one at least"
