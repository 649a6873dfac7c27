"""What pydantic refused, in one line each: where, got, wanted, nearest."""

import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vitray.config.parsing import short
from vitray.config.sections import Section
from vitray.errors import ConfigError, nearest

# Pydantic's error types in our words; the ones left out say it well themselves.
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


def refusal(invalid: ValidationError, root: type[Section], places: Mapping[str, str], source: str) -> ConfigError:
    """One line for each setting that was refused, headed by where it was given."""
    wrong: dict[str, list[ErrorDetails]] = {}
    for error in invalid.errors(include_url=False):
        wrong.setdefault(_locate(error["loc"], root)[0], []).append(error)
    lines = []
    for path, errors in wrong.items():
        # What was not given has no place; its section has. Sections that do not go together are one setting's fault,
        # which the message begins with.
        given = path.rpartition(".")[0] if _is_absent(errors[0]) else path or _named_by(errors[0])
        lines.append(f"{_place(given, places, source)}: {_explain(path, errors, root)}")
    return ConfigError("\n".join(lines))


def _named_by(error: ErrorDetails) -> str:
    return str(error.get("ctx", {}).get("error", "")).partition(":")[0]


def _is_absent(error: ErrorDetails) -> bool:
    """Whether a setting that has no default was not given; pydantic says the same of a list that is too short."""
    return error["type"] == "missing" and isinstance(error["loc"][-1], str)


def _locate(loc: tuple[int | str, ...], root: type[Section]) -> tuple[str, type[Section]]:
    """The dotted path of a pydantic location, which names union members too, and the section of its last word."""
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


def sections_in(annotation: Any) -> dict[str, type[Section]]:
    """The sections that a field, or each value of a mapping, may hold: {"": the only one}, or {kind: each}."""
    if get_origin(annotation) is dict:
        return sections_in(get_args(annotation)[1])
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    sections = [member for member in members if isinstance(member, type) and issubclass(member, Section)]
    if len(sections) == 1:
        return {"": sections[0]}
    return {section.model_fields["kind"].default: section for section in sections}


def _place(path: str, places: Mapping[str, str], source: str) -> str:
    """Where the setting was given: the last line or word about it or within it, else that of what contains it."""
    within = [place for setting, place in places.items() if setting == path or setting.startswith(f"{path}.")]
    while path and path not in places:
        path = path.rpartition(".")[0]
    return within[-1] if within else places.get(path, source) if path else source


def _explain(path: str, errors: list[ErrorDetails], root: type[Section]) -> str:
    """What is wrong with one setting; several errors are the members of a union, each of which refused it."""
    first = errors[0]
    got, context = first["input"], first.get("ctx", {})
    match first["type"]:
        case "extra_forbidden":
            known = _locate(first["loc"], root)[1].model_fields
            close = nearest(path.rpartition(".")[2], known)
            return f"{path}: unknown setting, wanted one of {', '.join(known)}{close}"
        case "missing" if _is_absent(first):
            wanted = _locate(first["loc"], root)[1].model_fields[path.rpartition(".")[2]].description or "a value"
            return f"{path}: got nothing, wanted {wanted[0].lower()}{wanted[1:].rstrip('.')}"
        case "value_error":
            return f"{path}: {context['error']}".removeprefix(": ")
        case "literal_error" | "union_tag_invalid":
            expected = context.get("expected") or context["expected_tags"]
            got = context.get("tag", got)
            close = nearest(str(got), re.findall("'(.*?)'", expected))
            return f"{path}: got {short(got)}, wanted {expected}{close}"
        case _:
            wants = (WANTED.get(error["type"], error["msg"].removeprefix("Input should be ")) for error in errors)
            return f"{path}: got {short(got)}, wanted {' or '.join(dict.fromkeys(wants))}"
