"""Parsing of YAML recipes and `a.b=c` overrides into trees of plain values."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vitray.errors import ConfigError, nearest


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return `a.b=c` overrides as {dotted path: value}, each value parsed as YAML."""
    changes: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"override {override!r}: wanted setting=value, for example model.drop_path=0.1")
        if path in changes:
            raise ConfigError(f"override {override!r}: {path} is given twice")
        changes[path] = parse_yaml(text, f"override {override!r}")[0]
    return changes


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
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)
# SafeLoader reads a leading 0 as octal; here it is decimal.
_Yaml.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(str(node.value)))


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tree of a recipe, and {dotted path: file:line}."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        others = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
        raise ConfigError(f"{path}: no such file{nearest(path.name, (file.name for file in others))}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from None
    tree, places = parse_yaml(text, str(path))
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path}: got {short(tree)}, wanted settings as `key: value` lines")
    return tree or {}, places


def parse_yaml(text: str, source: str) -> tuple[Any, dict[str, str]]:
    """Return the value of YAML text, and {dotted path: source:line}."""
    places: dict[str, str] = {}

    def build(loader: _Yaml, node: yaml.Node, path: str) -> Any:
        places[path] = f"{source}:{node.start_mark.line + 1}"
        if isinstance(node, yaml.SequenceNode):
            return [build(loader, item, f"{path}[{index}]") for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        tree: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = f"{path}.{key}".lstrip(".")
            if key in tree:
                raise ConfigError(
                    f"{source}:{key_node.start_mark.line + 1}: {here}: given twice, first at {places[here]}"
                )
            tree[key] = build(loader, value_node, here)
        return tree

    try:
        loader = _Yaml(text)
        node = loader.get_single_node()
        return (None if node is None else build(loader, node, "")), places
    except RecursionError:
        raise ConfigError(f"{source}: an alias refers to itself") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
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
    """Set dotted settings in a tree; a new `kind` discards the other settings of its section."""
    for path in sorted(changes, key=lambda path: not path.endswith(".kind")):
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
        section[last] = changes[path]


def flatten(tree: Mapping[str, Any], path: str) -> Iterable[tuple[str, Any]]:
    """Yield (dotted path, value) of every leaf of a tree."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def short(value: Any) -> str:
    """Return a value as a message quotes it: at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
