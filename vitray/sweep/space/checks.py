"""Spaces read from files, and every fault of one told with its place: nothing is trained that is no run."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vitray.config import Run
from vitray.config.parsing import parse_words, read_recipe, short
from vitray.config.sweep import spelled
from vitray.config.validation import refusal
from vitray.errors import ConfigError, nearest
from vitray.sweep.expressions import names_in
from vitray.sweep.space.points import (
    MOST,
    SETTINGS,
    VARIABLE,
    Point,
    Space,
    draw_point,
    grid_points,
    is_variable,
    name_of,
    random_points,
    run_of,
    swept,
    texts_in,
    words_in,
)

# What a sweep gives to each trial alike: by it, as many run at a time as fit.
OF_THE_SWEEP = ("compute.workers", "compute.device", "compute.cpus", "compute.gpus", "tracking.register_as")


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
        if draw.cases:
            raise ConfigError(f"the word {word!r}: a case is added in the file of the space")
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


def words_apart(space: Space, words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words for the trials, and {stage: its recipe, and the words for it}, as in `stage.optim.lr=1e-3`."""
    apart = {name: [stage.recipe] for name, stage in space.before.items()}
    own = []
    for word in words:
        stage, _, rest = word.partition(".")
        (apart.get(stage) or own).append(rest if stage in apart else word)
    return own, apart


def check_words(space: Space, words: Sequence[str]) -> None:
    """Refuse a word of the command line that the space would be laid over."""
    for path in parse_words(words):
        other = next((setting for _, setting in swept(space) if f"{path}.".startswith(f"{setting}.")), None)
        if other:
            raise ConfigError(f"the word {path}=...: the space sets {other} too, wanted it set by one of them")


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


# ---- faults ----------------------------------------------------------------------------------------------------------


def _check(space: Space, places: Mapping[str, str], source: str) -> None:
    """Refuse a space with a part that is unknown, unused or impossible."""
    faults = (_text_faults, _name_faults, _bundle_faults, _case_faults, _stage_faults, _where_faults, _point_faults)
    for part, fault in itertools.chain.from_iterable(find(space) for find in faults):
        raise ConfigError(f"{places.get(part, source)}: {part}: {fault}")


def _text_faults(space: Space) -> Iterator[tuple[str, str]]:
    for name, draw in space.space.items():
        if draw.text is None:
            continue
        known = {**space.drawn, **space.before}
        wrong = [word for word in VARIABLE.findall(draw.text) if word not in known]
        if is_variable(name):
            yield f"space.{name}", f"got the text {draw.text!r}, wanted a draw, as {name} is a variable"
        elif wrong:
            yield f"space.{name}", f"no variable {wrong[0]!r} is drawn{nearest(wrong[0], known)}"
        elif not VARIABLE.search(draw.text) or re.search("[{}]", VARIABLE.sub("", draw.text)):
            wanted = f"a text with {{variable}}; what does not vary is a word, {name}=..."
            yield f"space.{name}", f"got {short(draw.text)}, wanted {wanted}"
        elif mixed := _mixed(space, draw.text):
            yield f"space.{name}", mixed


def _name_faults(space: Space) -> Iterator[tuple[str, str]]:
    used = words_in([draw.model_dump() for draw in space.space.values()])
    used |= words_in([stage.settings for stage in space.before.values()])
    used |= {name for name, draw in space.space.items() if draw.cases}
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
        elif is_variable(name) and name not in used:
            meant = min((setting for setting in SETTINGS if setting.endswith(f".{name}")), default=None)
            close = f"; nearest: {meant}" if meant else nearest(name, Run.model_fields)
            yield f"space.{name}", f"no setting, and no text uses it as a variable, as {{{name}}}{close}"
        elif space.search.kind == "grid" and draw.text is None and draw.values is None:
            yield f"space.{name}", f"got {draw.kind}, of which a grid search has no end; wanted grid, or search: random"


def _bundle_faults(space: Space) -> Iterator[tuple[str, str]]:
    """Of settings that are set together: by a case, or for what is trained before."""
    bundles = [
        (f"space.{name}.cases.{case}", settings, [*space.drawn, *space.before])
        for name, draw in space.space.items()
        for case, settings in (draw.cases or {}).items()
    ]
    stages = list(space.before)
    bundles += [
        (f"before.{name}.settings", stage.settings, [*space.drawn, *stages[: stages.index(name)]])
        for name, stage in space.before.items()
    ]
    for place, settings, known in bundles:
        for path, value in settings.items():
            unknown = sorted(words_in(value) - set(known))
            if path not in SETTINGS:
                yield f"{place}.{path}", f"unknown setting of a run{nearest(path, SETTINGS)}"
            elif any(_meet(path, setting) for setting in OF_THE_SWEEP):
                yield f"{place}.{path}", f"is the same for all trials of a sweep; wanted it as a word, {path}=..."
            elif unknown:
                yield (
                    f"{place}.{path}",
                    f"{unknown[0]!r} is neither drawn nor trained before{nearest(unknown[0], known)}",
                )
            elif mixed := _mixed(space, value):
                yield f"{place}.{path}", mixed


def _case_faults(space: Space) -> Iterator[tuple[str, str]]:
    for name, path in swept(space):
        other = next((each for by, each in swept(space) if by != name and _meet(path, each)), None)
        if space.space[name].cases and not is_variable(name):
            yield f"space.{name}", "got cases, wanted another way to draw it: cases are of a variable"
        elif space.space[name].cases and other:
            yield f"space.{name}", f"a case sets {path}, and the space sets {other} too; wanted it set by one of them"


def _stage_faults(space: Space) -> Iterator[tuple[str, str]]:
    if space.before and space.learns:
        yield "before", f"got search {space.search.kind}, wanted grid or random: what it draws is not known before"
    named = words_in([draw.model_dump() for draw in space.space.values()])
    named |= words_in([stage.settings for stage in space.before.values()])
    for name in space.before:
        if name in space.space or name in SETTINGS or not re.fullmatch(r"\w+", name):
            yield f"before.{name}", "wanted a name that is neither drawn nor a setting, of letters, digits and _"
        elif name not in named:
            yield f"before.{name}", f"no trial names it, as {{{name}}}"


def _mixed(space: Space, value: Any) -> str | None:
    """What is wrong with a text in which the name of a stage is not all."""
    for text in texts_in(value):
        mixed = sorted(words_in(text) & set(space.before))
        if mixed and text != f"{{{mixed[0]}}}":
            return f"got {short(text)}, wanted {{{mixed[0]}}} alone: it stands for the address of a folder"
    return None


def _meet(path: str, other: str) -> bool:
    """Whether one setting is the other, or lies in it."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


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
    listed = [draw.values for name, draw in space.drawn.items() if draw.values and (is_grid or is_variable(name))]
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
