"""Parsing of YAML recipes and `a.b=c` overrides into trees of plain values."""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from vitray.errors import ConfigError, cut_middle, nearest

# Bounds of one YAML text. The longest recipe or space of ours has 4,000 characters and 100 values; a grid has at most
# 10,000 points. PyYAML reads about 20,000 values in a second.
MOST_CHARACTERS = 200_000
MOST_VALUES = 20_000
MOST_DEPTH = 20
LONGEST_KEY = 200
UNITS = ("epoch", "epochs", "step", "steps", "minute", "minutes")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command that name something, and its overrides `a.b=c`."""
    for before, word in pairwise(words):
        if word.startswith("=") or (before.endswith("=") and "=" not in word):
            raise ConfigError(f"{before} {word}: expected setting=value without spaces, as in optim.lr=1e-3")
        if "=" in before and word in UNITS:
            raise ConfigError(f'{before} {word}: a value with a space needs quotes, as in "{before} {word}"')
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


SIGNS = re.compile(r"[|>,;:/]+")


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return `a.b=c` overrides as {dotted path: value}, each value parsed as YAML."""
    changes: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        where = place_of(override)
        if not equals or not all(path.split(".")):
            raise ConfigError(f"{where}: expected setting=value, for example model.drop_path=0.1")
        if len(path) > LONGEST_KEY or path.count(".") >= MOST_DEPTH:
            raise ConfigError(f"{where}: got a path of {len(path)} characters, expected the dotted path of a setting")
        if path in changes:
            raise ConfigError(f"{where}: {path} is given twice")
        # Signs alone, such as a separator, would begin a block or an alias of YAML.
        changes[path] = text if SIGNS.fullmatch(text) else parse_yaml(text, where)[0]
    return changes


def spelled(value: Any) -> str:
    """Return a value as an override spells it."""
    if not isinstance(value, str):
        return json.dumps(value, default=str)
    with suppress(ConfigError):
        if value.isprintable() and parse_yaml(value, "")[0] == value:
            return value
    return quoted(value)


def quoted(text: str) -> str:
    """Return a text in quotes, as YAML."""
    return yaml.safe_dump(text, default_style='"', width=math.inf).rstrip("\n")


def place_of(override: str) -> str:
    """Return an override as the place of an error."""
    return f"override {cut_middle(repr(override), 200)}"


class _Yaml(yaml.SafeLoader):
    """A loader with the plain scalars of YAML 1.2.

    PyYAML reads `1e-3` as text, `on` as true, `1:30` as 90 and `2026-01-01` as a date.
    """


_Yaml.yaml_implicit_resolvers = {}
_Yaml.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|[nN]ull|NULL|None|)$"), ["~", "n", "N", ""])
_Yaml.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:[tT]rue|[fF]alse)$"), list("tTfF"))
_Yaml.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)
_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))
# SafeLoader reads a leading 0 as octal; here it is decimal.
_Yaml.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(str(node.value)))


def recipe_names() -> list[str]:
    """Return the names of the recipes that vitray brings, sorted."""
    return sorted(path.stem for path in Path(str(files("pipelines.recipes"))).glob("*.yaml"))


def recipe_path(recipe: str | Path) -> Path:
    """Return the path of a file, or else of the recipe of this name."""
    name = str(recipe)
    # Names alone are looked up: a logged model has no recipes beside it, and reads its own file.
    if not re.fullmatch(r"\w{1,100}", name) or Path(name).is_file():
        return Path(recipe)
    if name not in (names := recipe_names()):
        raise ConfigError(f"no recipe {name!r}, and no file{nearest(name, names)}")
    return Path(str(files("pipelines.recipes"))) / f"{name}.yaml"


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tree of a recipe over that of the one it extends, and {dotted path: file:line}."""
    tree, places = read_tree(path)
    if (base := tree.pop("extends", None)) is None:
        return tree, places
    where = places.pop("extends")
    shipped = Path(str(files("pipelines.recipes")))
    folders = dict.fromkeys((path.parent, shipped))
    if not isinstance(base, str) or "/" in base or base.endswith(".yaml"):
        raise ConfigError(f"{where}: extends: got {short(base)}, expected the name of a recipe, as in demo")
    found = next((file for folder in folders if (file := folder / f"{base}.yaml").is_file() and file != path), None)
    if found is None:
        names = (file.stem for folder in folders for file in folder.glob("*.yaml") if file != path)
        raise ConfigError(f"{where}: extends: no recipe {short(base)}{nearest(base, names)}")
    below, places_below = read_tree(found)
    if "extends" in below:
        raise ConfigError(f"{where}: extends: {base} itself extends {below['extends']}; extend that one")
    apply_changes(dict(flatten(tree, "")), below)
    return below, places_below | places


def read_tree(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tree of a YAML file, and {dotted path: file:line}."""
    text = read_text(path)
    tree, places = parse_yaml(text, str(path))
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path}: got {short(tree)}, expected settings as `key: value` lines")
    return tree or {}, places


def read_text(path: Path) -> str:
    """Return the text of a YAML file, at most one character beyond the bound of `parse_yaml`."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MOST_CHARACTERS + 1)
    except (FileNotFoundError, NotADirectoryError):
        others = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
        raise ConfigError(f"{path}: no such file{nearest(path.name, (file.name for file in others))}") from None
    except (OSError, ValueError) as error:  # a name that is too long or holds a null byte, or bytes that are no text
        raise ConfigError(f"{cut_middle(str(path), 400)}: cannot be read as text: {error}") from None


def parse_yaml(text: str, source: str) -> tuple[Any, dict[str, str]]:
    """Return the value of YAML text, and {dotted path: source:line}; refuse a text beyond the bounds of this module."""
    places: dict[str, str] = {}
    values = 0
    too_deep = ConfigError(f"{source}: expected at most {MOST_DEPTH} levels of lists and mappings")

    def build(node: yaml.Node, path: str, depth: int) -> Any:
        """Return the value of a node. An alias yields its node again, so what is counted here is the value's size."""
        nonlocal values
        values += 1
        if values > MOST_VALUES:
            raise ConfigError(f"{source}: expected at most {MOST_VALUES:,} values, each use of an alias counted")
        if depth > MOST_DEPTH:
            raise too_deep
        place = places[path] = f"{source}:{node.start_mark.line + 1}"
        if node.tag not in _TAGS:
            raise ConfigError(
                f"{place}: got the tag {short(node.tag)}, expected plain text, numbers, lists and mappings"
            )
        if isinstance(node, yaml.SequenceNode):
            return [build(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        tree: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = f"{source}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode) or len(key_node.value) > LONGEST_KEY:
                raise ConfigError(f"{place}: expected a name of at most {LONGEST_KEY} characters before the colon")
            key = str(key_node.value)
            here = f"{path}.{key}".lstrip(".")
            if key in tree:
                raise ConfigError(f"{place}: {here}: given twice, first at {places[here]}")
            tree[key] = build(value_node, here, depth + 1)
        return tree

    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{source}: expected at most {MOST_CHARACTERS:,} characters")
    try:
        loader = _Yaml(text)
        node = loader.get_single_node()
        return (None if node is None else build(node, "", 0)), places
    except ConfigError:
        raise
    except RecursionError:  # PyYAML composes nodes recursively
        raise too_deep from None
    # Lookups of PyYAML fail for a text with another type's tag, such as `!!bool maybe`.
    except (yaml.YAMLError, ValueError, LookupError) as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which `_Yaml` or PyYAML would read as another type."""


for _first, _resolvers in _Yaml.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _pattern, [_first])


def dump_yaml(tree: Any) -> str:
    """Return YAML text that parses to the same plain values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def apply_changes(changes: Mapping[str, Any], tree: dict[str, Any]) -> None:
    """Set dotted settings in a tree; a new `kind` discards the other settings of its section.

    The order of the changes is of no importance: a section comes before its settings, and its kind before the others.
    """
    for path in sorted(changes, key=lambda path: (path.count("."), path.rpartition(".")[2] != "kind")):
        *parents, last = path.split(".")
        section = tree
        for depth, name in enumerate(parents):
            below: Any = section.get(name) or {}
            below = section[name] = {"kind": below} if isinstance(below, str) else below
            if not isinstance(below, dict):
                where = ".".join(parents[: depth + 1])
                raise ConfigError(f"{path}: {where} is {short(below)}, which has no settings of its own")
            section = below
        if last == "kind" and section.get("kind") != changes[path]:
            section.clear()
        below = section.get(last)
        if isinstance(below, dict) and "kind" in below and below["kind"] == changes[path]:
            continue  # `rule=sgd` is short for `rule.kind=sgd`
        section[last] = deepcopy(changes[path])  # a later change may write into it


def flatten(tree: Mapping[str, Any], path: str) -> Iterable[tuple[str, Any]]:
    """Yield (dotted path, value) of every leaf of a tree."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def count_up_to(most: int) -> Callable[[str], int]:
    """Return a type for argparse: a whole number from 1 to `most`."""

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[0-9]{1,18}", text.strip()) else 0
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"got {short(text)}, expected a whole number from 1 to {most:,}")
        return number

    return parse


def number_up_to(most: float) -> Callable[[str], float]:
    """Return a type for argparse: a number above 0, at most `most`."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number <= most:
            raise argparse.ArgumentTypeError(f"got {short(text)}, expected a number above 0, at most {most:,g}")
        return number

    return parse


def short(value: Any) -> str:
    """Return a value as a message quotes it: at most 80 characters."""
    return cut_middle(repr(value), 80)
