"""Frozen and trained parts of a network, and an audit of their parameters."""

import json
from typing import NamedTuple, get_args

from vitray.config.training import Finetune, Part
from vitray.errors import ConfigError
from vitray.models.vit import ViT


def part_of(name: str) -> Part:
    """Return the part of a ViT that holds the parameter `name`."""
    match name.split("."):
        case ["stem" | "class_token" | "distillation_token" | "registers" | "positions" | "head" as part, *_]:
            return part
        case ["level_positions", *_]:
            return "positions"
        case ["norm", _] | ["blocks", _, _, "norm", _]:
            return "norms"
        case ["blocks", _, _, "qkv" | "out" | "q_norm" | "k_norm" | "relative", *_]:
            return "attn"
        case ["blocks", _, _, "up" | "down", _]:
            return "ffn"
        case ["blocks", _, _, "scale"]:
            return "layerscale"
        case _:
            raise AssertionError(f"parameter {name} belongs to no part")


def parts_of(vit: ViT) -> dict[str, Part]:
    """Return the part of each parameter, by parameter name."""
    return {name: part_of(name) for name, _ in vit.named_parameters()}


def freeze(vit: ViT, settings: Finetune) -> None:
    """Freeze every parameter except those that the settings train."""
    parts = parts_of(vit)
    if absent := [part for part in settings.also if part not in parts.values()]:
        raise ConfigError(
            f"task.also: got {', '.join(absent)}, which {vit.model.name} as it is set has no parameters of"
        )
    trained = {name for name, part in parts.items() if part in settings.trained}
    if settings.first_branch:
        trained -= {name for name in trained if parts[name] == "attn" and ".attn1." not in name}
    if not trained:
        raise ConfigError(
            f"task.mode: got {settings.mode}, which leaves nothing to train of {vit.model.name} with"
            f" model.num_classes {json.dumps(vit.model.num_classes)}, wanted a mode whose parts it has"
        )
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(name in trained)
    vit.train(vit.training)  # puts a newly frozen stem into evaluation mode


# ---- the audit -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Parameter counts of one part."""

    part: Part
    parameters: int
    trained: int
    bytes_trained: int


class Audit(NamedTuple):
    """Parameter counts of a network: a row for each part, and the sums."""

    rows: list[Row]
    parameters: int
    trained: int
    bytes_trained: int

    @property
    def share(self) -> float:
        """Trained parameters as a share of all."""
        return self.trained / self.parameters


def audit(vit: ViT) -> Audit:
    """Return the trained and frozen parameter counts of a network in its present state."""
    rows = []
    for part in get_args(Part):
        parameters = [parameter for name, parameter in vit.named_parameters() if part_of(name) == part]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if parameters:
            count, count_trained = (sum(parameter.numel() for parameter in group) for group in (parameters, trained))
            rows.append(Row(part, count, count_trained, sum(parameter.nbytes for parameter in trained)))
    _, *totals = zip(*rows, strict=True)
    return Audit(rows, *map(sum, totals))


def audit_table(audited: Audit) -> str:
    """Return an audit as an aligned Markdown table; shares are of all parameters, as in the papers."""
    lines = [("part", "parameters", "trained", "share", "MB trained")]
    for part, parameters, trained, bytes_trained in [*audited.rows, ("total", *audited[1:])]:
        share = f"{100 * trained / audited.parameters:.1f} %"
        lines.append((part, f"{parameters:,}", f"{trained:,}", share, f"{bytes_trained / 1e6:.1f}"))
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = []
    for part, *numbers in lines:
        cells = [f"{number:>{width}}" for number, width in zip(numbers, others, strict=True)]
        table.append(f"| {part:<{first}} | {' | '.join(cells)} |")
    table.insert(1, f"|{'-' * (first + 2)}|{'|'.join('-' * (width + 1) + ':' for width in others)}|")
    return "\n".join(table)
