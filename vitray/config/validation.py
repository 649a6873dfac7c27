"""Validation errors of pydantic as messages to users: one line each, with where, got, expected and nearest."""

import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vitray.config.parsing import short
from vitray.errors import ConfigError, nearest

# Pydantic's error types, described for users. Other types keep pydantic's own text.
WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "settings as `key: value`",
    "missing": "a longer list",
    "too_short": "a longer list",
    "too_long": "a shorter list",
    "model_type": "settings as `key: value`",
    "model_attributes_type": "settings as `key: value`",
}


def explain_error(
    invalid: ValidationError, root: type[BaseModel], places: Mapping[str, str], source: str
) -> ConfigError:
    """Return an error with one line per invalid setting, each beginning with the place that sets it."""
    wrong: dict[str, list[ErrorDetails]] = {}
    for error in invalid.errors(include_url=False):
        wrong.setdefault(_locate(error["loc"], root)[0], []).append(error)
    lines = []
    for path, errors in wrong.items():
        # A missing setting has no place, but its section has. An error across sections starts with the setting.
        setting = re.split(r"[^\w.]", str(errors[0].get("ctx", {}).get("error", "")))[0]
        given = path.rpartition(".")[0] if _is_missing(errors[0]) else path or setting
        lines.append(f"{_place(given, places, source)}: {_explain(path, errors, root)}")
    return ConfigError("\n".join(lines))


def _is_missing(error: ErrorDetails) -> bool:
    """Return whether a required setting is missing; pydantic uses the same type for a list that is too short."""
    return error["type"] == "missing" and isinstance(error["loc"][-1], str)


def _locate(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """Return the dotted path of a pydantic location, which names union members too, and the section it ends in."""
    path, holder, below, keyed = "", root, {"": root}, False
    for step in loc:
        if keyed:
            path, keyed = f"{path}.{step}", False
        elif len(below) > 1 and step in below:
            below = {"": below[str(step)]}
        elif "" in below and isinstance(step, str):
            path, holder = f"{path}.{step}".lstrip("."), below[""]
            field = holder.model_fields.get(step)
            below = sections_in(field.annotation) if field else {}
            keyed = field is not None and get_origin(field.annotation) is dict
    return path, holder


def sections_in(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the sections that a field, or a mapping's value, may hold: {"": the only one}, or {kind: section}."""
    if get_origin(annotation) is dict:
        return sections_in(get_args(annotation)[1])
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    sections = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    if len(sections) == 1:
        return {"": sections[0]}
    return {section.model_fields["kind"].default: section for section in sections}


def _paths(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the dotted paths of all settings of a section and of those in it."""
    for name, field in section.model_fields.items():
        yield f"{above}{name}"
        for below in sections_in(field.annotation).values():
            yield from _paths(below, f"{above}{name}.")


def _place(path: str, places: Mapping[str, str], source: str) -> str:
    """Return the last place that sets a path or something inside it, else the place of its section."""
    within = [place for setting, place in places.items() if setting == path or setting.startswith(f"{path}.")]
    while path and path not in places:
        path = path.rpartition(".")[0]
    return within[-1] if within else places.get(path, source) if path else source


def _explain(path: str, errors: list[ErrorDetails], root: type[BaseModel]) -> str:
    """Return the message for one setting; a union gives one error per member."""
    first = errors[0]
    got, context = first["input"], first.get("ctx", {})
    match first["type"]:
        case "extra_forbidden":
            known = _locate(first["loc"], root)[1].model_fields
            name = path.rpartition(".")[2]
            deeper = [each for each in _paths(root) if each.endswith(f".{name}")] if path == name else []
            close = f"; did you mean {' or '.join(deeper[:3])}?" if deeper else nearest(name, known)
            return f"{path}: unknown setting, expected one of {', '.join(known)}{close}"
        case "missing" if _is_missing(first):
            wanted = _locate(first["loc"], root)[1].model_fields[path.rpartition(".")[2]].description or "a value"
            return f"{path}: got nothing, expected {wanted[0].lower()}{wanted[1:].rstrip('.')}"
        case "value_error":
            return f"{path}: {context['error']}".removeprefix(": ")
        case "literal_error" | "union_tag_invalid":
            expected = context.get("expected") or context["expected_tags"]
            got = context.get("tag", got)
            close = nearest(str(got), re.findall("'(.*?)'", expected))
            return f"{path}: got {short(got)}, expected {expected}{close}"
        case _:
            wants = (WANTED.get(error["type"], error["msg"].removeprefix("Input should be ")) for error in errors)
            return f"{path}: got {short(got)}, expected {' or '.join(dict.fromkeys(wants))}"
