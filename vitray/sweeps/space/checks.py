"""Reading and checking of spaces: every fault gets one message with its line."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

from pydantic import ValidationError

from vitray.config import Run
from vitray.config.parsing import parse_overrides, read_tree, short
from vitray.config.sweep import MOST_POINTS, Distribution, Grid, Nsga2, Random, Tpe, slug
from vitray.config.validation import explain_error
from vitray.errors import ConfigError, nearest
from vitray.sweeps.space.expressions import names_in
from vitray.sweeps.space.points import (
    CHANGEABLE,
    LONGEST_NAME,
    PLACEHOLDER,
    REPEATS,
    SETTINGS,
    Space,
    SweepPoint,
    draw_point,
    grid_points,
    is_variable,
    look_up,
    name_of,
    placeholders,
    random_points,
    run_of,
    swept_settings,
    texts_in,
)

# Settings that all trials share, because the sweep packs trials onto the cluster by them.
FIXED_SETTINGS = ("compute.workers", "compute.device", "compute.cpus", "compute.gpus", "tracking.register_as")


def read_space(path: Path) -> Space:
    """Return the space of a YAML file."""
    tree, places = read_tree(path)
    try:
        space = Space.model_validate(tree)
    except ValidationError as invalid:
        raise explain_error(invalid, Space, places, str(path)) from None
    _check(space, places, str(path))
    return space


def extend_space(space: Space, additions: Sequence[str]) -> Space:
    """Return the space with more listed values, such as `optim.lr=1e-2`."""
    for addition in additions:
        ((name, value),) = parse_overrides([addition]).items()
        where = f"--add {short(addition)}"
        listing = {name: distribution for name, distribution in space.drawn.items() if distribution.values is not None}
        if name not in listing:
            raise ConfigError(f"{where}: the space lists no values of {name}{nearest(name, listing)}")
        distribution = listing[name]
        if distribution.cases:
            raise ConfigError(f"{where}: add a case in the file of the space")
        tree = space.model_dump()
        kind = "grid" if distribution.seeds else distribution.kind
        tree["space"][name] = {kind: [*(distribution.values or ()), value]}
        try:
            Distribution.model_validate({"grid": (value,)})  # first, as `slug` reads no NaN
            if slug(value) in map(slug, distribution.values or ()):
                raise ConfigError(f"{where}: the space already has this value of {name}")
            wider = Space.model_validate(tree)
        except ValidationError as invalid:
            raise explain_error(invalid, Space, {}, where) from None
        _check(wider, {}, where)
        if space.search.traits.is_exhaustive and len(grid_points(wider)) == len(grid_points(space)):
            raise ConfigError(f"{where}: adds no point that `where` allows")
        space = wider
    return space


def split_overrides(space: Space, overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the trials' overrides, and {stage: [recipe, overrides of the stage]}, as in `stage.optim.lr=1e-3`."""
    stages = {name: [stage.recipe] for name, stage in space.before.items()}
    own = []
    for override in overrides:
        stage, _, rest = override.partition(".")
        (stages.get(stage) or own).append(rest if stage in stages else override)
    return own, stages


def check_overrides(space: Space, overrides: Sequence[str]) -> None:
    """Refuse an override of a setting that the space sets."""
    check_set_once(overrides, [setting for _, setting in swept_settings(space)], "the space")


def check_set_once(overrides: Sequence[str], settings: Iterable[str], setter: str) -> None:
    """Refuse an override of one of these settings, which another place sets too."""
    for path, setting in itertools.product(parse_overrides(overrides), settings):
        if f"{path}.".startswith(f"{setting}."):
            raise ConfigError(f"override {path}=...: {setter} sets {setting} too; set it in one place")


def check_space(space: Space, base: Run) -> list[SweepPoint]:
    """Return the points of a search, each checked to be a run; a search that learns gets as many random examples.

    A space with random draws is also checked at its corners and at 100 random points.
    """
    examples: list[SweepPoint] = []
    match space.search:
        case Grid():
            points = grid_points(space)
        case Random(trials=trials, seed=seed) | Tpe(trials=trials, seed=seed) | Nsga2(trials=trials, seed=seed):
            points = random_points(space, trials, seed)
            extremes = itertools.product(*(distribution.extremes for distribution in space.drawn.values()))
            corners = (dict(zip(space.drawn, values, strict=True)) for values in itertools.islice(extremes, 1024))
            examples = [*filter(None, (draw_point(space, corner) for corner in corners)), *random_points(space, 100)]
        case _:
            assert_never(space.search)
    runs: dict[Run, str] = {}
    for point in [*examples, *points]:
        name = name_of(point, space)
        try:
            first = runs.setdefault(run_of(base, point), name)
        except ConfigError as error:
            reason = str(error).splitlines()[0].removeprefix("replace: ")
            raise ConfigError(f"the point {name}: {reason}") from None
        if first != name:
            raise ConfigError(f"the point {name}: is the same run as {first}, expected one of them")
    return points


# ---- faults ----------------------------------------------------------------------------------------------------------


def _check(space: Space, places: Mapping[str, str], source: str) -> None:
    """Refuse a space with an unknown, unused or impossible part."""
    faults = (_text_faults, _lookup_faults, _name_faults, _group_faults, _case_faults, _stage_faults, _where_faults)
    faults += (_population_faults, _point_faults, _control_faults)
    for part, fault in itertools.chain.from_iterable(find(space) for find in faults):
        raise ConfigError(f"{places.get(part, source)}: {part}: {fault}")


def _text_faults(space: Space) -> Iterator[tuple[str, str]]:
    known = {**space.drawn, **space.before}
    for name, text in ((name, each.text) for name, each in space.space.items() if each.text is not None):
        unknown = [variable for variable in PLACEHOLDER.findall(text) if variable not in known]
        if is_variable(name):
            yield f"space.{name}", f"got the text {text!r}, expected a distribution, as {name} is a variable"
        elif unknown:
            yield f"space.{name}", f"no variable {unknown[0]!r} is drawn{nearest(unknown[0], known)}"
        elif not PLACEHOLDER.search(text) or re.search("[{}]", PLACEHOLDER.sub("", text)):
            wanted = f"a text with {{variable}}; set a constant with the override {name}=..."
            yield f"space.{name}", f"got {short(text)}, expected {wanted}"
        elif mixed := _mixed(space, text):
            yield f"space.{name}", mixed


def _lookup_faults(space: Space) -> Iterator[tuple[str, str]]:
    for name, distribution in space.space.items():
        if distribution.lookup is None:
            continue
        unlisted = [each for each in distribution.of if each not in space.drawn or space.drawn[each].values is None]
        if is_variable(name):
            yield f"space.{name}", f"got a lookup, expected another distribution, as {name} is a variable"
        elif unlisted:
            yield f"space.{name}", f"of: no listed variable {unlisted[0]!r} is drawn{nearest(unlisted[0], space.drawn)}"
        elif math.prod(len(space.space[each].values or ()) for each in distribution.of) <= MOST_POINTS:
            try:
                for drawn in space.combinations(list(distribution.of)):
                    look_up(distribution, drawn)
            except ConfigError as error:
                yield f"space.{name}", str(error)


def _name_faults(space: Space) -> Iterator[tuple[str, str]]:
    used = _references(space) | {name for name, each in space.space.items() if each.cases}
    if not space.space:
        yield "space", "got nothing, expected distributions, as in `optim.lr: {grid: [1e-3, 3e-3]}`"
    for name, distribution in space.space.items():
        whole = next((other for other in space.space if name.startswith(f"{other}.")), None)
        if "." in name and name not in SETTINGS:
            yield f"space.{name}", f"unknown setting of a run{nearest(name, SETTINGS)}"
        elif any(f"{setting}.".startswith(f"{name}.") for setting in FIXED_SETTINGS):
            yield f"space.{name}", f"is the same for all trials of a sweep; set it with the override {name}=..."
        elif whole:
            yield f"space.{name}", f"lies in {whole}, which the space also sets; expected one of them"
        elif is_variable(name) and name not in used:
            meant = min((setting for setting in SETTINGS if setting.endswith(f".{name}")), default=None)
            close = f"; did you mean {meant}" if meant else nearest(name, Run.model_fields)
            yield f"space.{name}", f"no setting, and no text uses it as the variable {{{name}}}{close}"
        elif space.search.traits.is_exhaustive and distribution.is_drawn and distribution.values is None:
            fault = f"got {distribution.kind}, which a grid search cannot list; expected grid, or search: random"
            yield f"space.{name}", fault


def _group_faults(space: Space) -> Iterator[tuple[str, str]]:
    """Faults of settings that are set together, by a case or for a stage."""
    groups = [
        (f"space.{name}.cases.{case}", settings, [*space.drawn, *space.before])
        for name, distribution in space.space.items()
        for case, settings in (distribution.cases or {}).items()
    ]
    stages = list(space.before)
    groups += [
        (f"before.{name}.settings", stage.settings, [*space.drawn, *stages[: stages.index(name)]])
        for name, stage in space.before.items()
    ]
    for place, settings, known in groups:
        for path, value in settings.items():
            unknown = sorted(placeholders(value) - set(known))
            if path not in SETTINGS:
                yield f"{place}.{path}", f"unknown setting of a run{nearest(path, SETTINGS)}"
            elif any(_meet(path, setting) for setting in FIXED_SETTINGS):
                yield f"{place}.{path}", f"is the same for all trials of a sweep; set it with the override {path}=..."
            elif unknown:
                fault = f"{unknown[0]!r} is neither drawn nor an earlier stage{nearest(unknown[0], known)}"
                yield f"{place}.{path}", fault
            elif mixed := _mixed(space, value):
                yield f"{place}.{path}", mixed


def _case_faults(space: Space) -> Iterator[tuple[str, str]]:
    for name, path in swept_settings(space):
        other = next((each for by, each in swept_settings(space) if by != name and _meet(path, each)), None)
        if space.space[name].cases and not is_variable(name):
            yield f"space.{name}", "got cases, which only a variable can have; expected another distribution"
        elif space.space[name].cases and other:
            yield f"space.{name}", f"a case sets {path}, and the space sets {other} too; set it in one place"


def _stage_faults(space: Space) -> Iterator[tuple[str, str]]:
    if space.before and space.search.traits.learns:
        yield "before", f"got search {space.search.kind}, expected grid or random, whose points are known in advance"
    for name in space.before:
        if name in space.space or name in SETTINGS or not re.fullmatch(r"\w+", name):
            yield f"before.{name}", "expected a name of letters, digits and _ that is neither drawn nor a setting"
        elif name not in _references(space):
            yield f"before.{name}", f"is not used; expected {{{name}}} as a value in the space, or no such stage"


def _references(space: Space) -> set[str]:
    """Return the names that texts of the space refer to."""
    names = placeholders([each.model_dump() for each in space.space.values()])
    names.update(*(each.of for each in space.space.values()))
    return names | placeholders([stage.settings for stage in space.before.values()])


def _mixed(space: Space, value: Any) -> str | None:
    """Return the fault of a text that holds more than the name of a stage."""
    for text in texts_in(value):
        mixed = sorted(placeholders(text) & set(space.before))
        if mixed and text != f"{{{mixed[0]}}}":
            return f"got {short(text)}, expected {{{mixed[0]}}} alone: it stands for the path of a folder"
    return None


def _meet(path: str, other: str) -> bool:
    """Whether one setting is the other or contains it."""
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


def _population_faults(space: Space) -> Iterator[tuple[str, str]]:
    if not space.scheduler.traits.is_population:
        return
    if space.search.traits.learns:
        yield "scheduler", f"got a population with search {space.search.kind}, expected search grid or random"
    if not space.changeable:
        known = ", ".join(f"{name}*" if name.endswith(".") else name for name in CHANGEABLE)
        yield "scheduler", f"got a population without a drawn setting that may change during training: {known}"
    if space.budget.minutes or space.budget.device_hours:
        yield "budget", "got a limit, expected none: all trials of a population start at once"
    for name, distribution in space.space.items():
        if distribution.cases:
            yield f"space.{name}", "got cases, expected another distribution for a population"


def _point_faults(space: Space) -> Iterator[tuple[str, str]]:
    is_grid = space.search.traits.is_exhaustive
    if space.search.second_goal and space.scheduler.traits.decides:
        fault = f"got {space.scheduler.kind}, expected none: search {space.search.kind} compares trials that have ended"
        yield "scheduler", fault
    listed = [each.values for name, each in space.drawn.items() if each.values and (is_grid or is_variable(name))]
    if (combinations := math.prod(map(len, listed))) > MOST_POINTS:
        yield "space", f"got {combinations:,} combinations, expected at most {MOST_POINTS:,}"
        return
    try:
        points = grid_points(space) if is_grid else random_points(space, 1)
        named: dict[str, SweepPoint] = {}
        for point in points:
            name = name_of(point, space)
            if len(name.encode()) > LONGEST_NAME:
                wanted = f"a name of at most {LONGEST_NAME} bytes; `cases` give a combination a short name"
                yield "space", f"the point {name}: expected {wanted}"
            other = named.setdefault(name, point)
            if other is not point:
                yield "space", f"two points are both {name}: {other.drawn} and {point.drawn}"
    except ConfigError as error:
        yield "where", str(error)
        return
    if not points:
        yield "where", "no point satisfies it, expected at least one"


def _control_faults(space: Space) -> Iterator[tuple[str, str]]:
    control, shown = space.goal.control, [name for name, each in space.space.items() if "." in name or each.cases]
    if control is None:
        return
    for name in control:
        if name not in shown:
            yield f"goal.control.{name}", f"is no setting or case of the space{nearest(name, shown)}"
    if space.search.traits.is_exhaustive:
        groups = {
            json.dumps({name: value for name, value in point.shown.items() if name not in REPEATS}, default=str)
            for point in grid_points(space)
            if control.items() <= point.shown.items()
        }
        if len(groups) != 1:
            yield "goal.control", f"fits {len(groups)} groups of the space, expected the settings of one"
