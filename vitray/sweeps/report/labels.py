"""Short names of settings, their values and networks, as tables and pictures show them."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from vitray.config.model_names import Name
from vitray.sweeps.report.trials import TrialResult
from vitray.sweeps.space import shape_of

SEED, MODEL, LR = "seed", "model.name", "optim.lr"
# Settings whose values need no name beside them.
UNNAMED = (MODEL, "task.mode")


def varied_settings(trials: Sequence[TrialResult]) -> dict[str, list[Any]]:
    """Return {setting: its distinct values} of the settings that vary, without the seed."""
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for trial in trials:
        for path, value in trial.settings.items():
            values[path].setdefault(canonical(value), value)
    absent = {path for path in values if any(path not in trial.settings for trial in trials)}
    return {
        path: list(distinct.values())
        for path, distinct in values.items()
        if path != SEED and (len(distinct) > 1 or path in absent)
    }


def label_of(settings: dict[str, Any], varied: dict[str, list[Any]]) -> str:
    """Return the varied settings as a short label: `18x2, lr 0.003, attn`."""
    names = [short_name(path) for path in varied]
    parts = []
    for path, name in zip(varied, names, strict=True):
        if path in settings:
            value = value_text(settings[path], varied[path])
            prefix = "" if path in UNNAMED else path if names.count(name) > 1 else name
            parts.append(f"{prefix} {value}".strip())
    return ", ".join(parts) or "all alike"


def short_name(path: str) -> str:
    """Return the last telling part of a path: lr of optim.lr, rule of optim.rule.kind."""
    return path.removesuffix(".kind").rpartition(".")[2]


def value_text(value: Any, among: Sequence[Any] = ()) -> str:
    """Return a setting's value as people write it; networks that differ in depth and branches show only those."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if not isinstance(value, str):
        return canonical(value)
    shape, shapes = shape_of(value), [shape_of(each) for each in among]
    if shape is None or None in shapes:
        return value
    if len(shapes) > 1 and len({family_of(each) for each in shapes if each}) == 1:
        return f"{shape.depth}x{shape.branches}"
    return shape.paper_spelling + _stem(shape)


def family_of(shape: Name) -> str:
    """Return a network's name without depth and branches: ViT-S/16."""
    return f"ViT-{shape.width.capitalize()}/{shape.patch}{_stem(shape)}"


def _stem(shape: Name) -> str:
    return "" if shape.stem == "linear" else f" {shape.stem}"


def canonical(value: Any) -> str:
    """Return the same text for equal values, and different texts for different ones."""
    return json.dumps(value, sort_keys=True, default=str)
