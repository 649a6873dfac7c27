"""Fine-tuning: which parts of a network train, what that costs, and the weights that another network starts from."""

import json
from collections.abc import Iterable
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from vitray.config import Learned, Model
from vitray.config.training import Finetune, Part
from vitray.errors import ConfigError
from vitray.models.positions import resample
from vitray.models.vit import ViT, build_head

# ---- parts -----------------------------------------------------------------------------------------------------------


def part_of(name: str) -> Part:
    """The part that a parameter of a ViT belongs to, by its name."""
    match name.split("."):
        case ["stem" | "class_token" | "positions" | "head" as part, *_]:
            return part
        case ["norm", _] | ["blocks", _, _, "norm", _]:
            return "norms"
        case ["blocks", _, _, "qkv" | "out", _]:
            return "attn"
        case ["blocks", _, _, "up" | "down", _]:
            return "ffn"
        case ["blocks", _, _, "scale"]:
            return "layerscale"
        case _:
            raise AssertionError(f"parameter {name} belongs to no part")


def parts_of(vit: ViT) -> dict[str, Part]:
    """The part of each parameter."""
    return {name: part_of(name) for name, _ in vit.named_parameters()}


def freeze(vit: ViT, settings: Finetune) -> None:
    """Let what the settings name train, and nothing else."""
    parts = parts_of(vit)
    if absent := [part for part in settings.also if part not in parts.values()]:
        raise ConfigError(
            f"task.also: got {', '.join(absent)}, which {vit.model.name} as it is set has no parameters of"
        )
    trained = {name for name, part in parts.items() if part in settings.trained and not _left_out(name, part, settings)}
    if not trained:
        raise ConfigError(
            f"task.mode: got {settings.mode}, which leaves nothing to train of {vit.model.name} with"
            f" model.num_classes {json.dumps(vit.model.num_classes)}, wanted a mode whose parts it has"
        )
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(name in trained)
    vit.train(vit.training)  # a stem that has just been frozen leaves training mode


def _left_out(name: str, part: Part, settings: Finetune) -> bool:
    return settings.first_branch and part == "attn" and ".attn1." not in name


# ---- the audit -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The parameters of a part, how many of them train, and the bytes of those."""

    part: Part
    parameters: int
    trained: int
    bytes_trained: int


class Audit(NamedTuple):
    """What trains of a network: a row for each part that it has, and their sums."""

    rows: list[Row]
    parameters: int
    trained: int
    bytes_trained: int

    @property
    def share(self) -> float:
        """Share of the parameters that train."""
        return self.trained / self.parameters


def audit(vit: ViT) -> Audit:
    """What trains of a network as it is now."""
    parts: dict[Part, list[nn.Parameter]] = {part: [] for part in get_args(Part)}
    for name, parameter in vit.named_parameters():
        parts[part_of(name)].append(parameter)
    rows = [_row(part, parameters) for part, parameters in parts.items() if parameters]
    return Audit(
        rows,
        sum(row.parameters for row in rows),
        sum(row.trained for row in rows),
        sum(row.bytes_trained for row in rows),
    )


def _row(part: Part, parameters: list[nn.Parameter]) -> Row:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    count, count_trained = (sum(parameter.numel() for parameter in some) for some in (parameters, trained))
    return Row(part, count, count_trained, sum(parameter.nbytes for parameter in trained))


def audit_table(audited: Audit) -> str:
    """An audit as Markdown that reads as well on a terminal; shares are of all parameters, as papers give them."""
    lines = [("part", "parameters", "trained", "share", "MB trained")]
    for part, parameters, trained, bytes_trained in [*audited.rows, ("total", *audited[1:])]:
        share = f"{100 * trained / audited.parameters:.1f} %"
        lines.append((part, f"{parameters:,}", f"{trained:,}", share, f"{bytes_trained / 1e6:.1f}"))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    drawn = [f"| {line[0]:<{widths[0]}} | {_right(line[1:], widths[1:])} |" for line in lines]
    rule = f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths[1:])}|"
    return "\n".join([drawn[0], rule, *drawn[1:]])


def _right(cells: Iterable[str], widths: Iterable[int]) -> str:
    return " | ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


# ---- the start -------------------------------------------------------------------------------------------------------

# Settings that are the network; others say how it is run or trained, or are adapted to.
FIXED = ("name", "class_token", "pool", "positions", "layerscale", "activation", "norm_eps")


def adapt(start: ViT, model: Model, where: str, *, new_head: bool) -> dict[str, Tensor]:
    """The state dict that `ViT(model)` starts from: `start` at the image size and with the classes of `model`.

    Positions are resized in the way that is recorded beside the start. `new_head` says that the classes are others,
    even if as many; a head that does not fit is new too, and a new head ends in a layer of zeros (seed 002, B.1.1).
    `where` heads a refusal, as in `task.weights models/vit_b`.
    """
    if differences := [*_other_settings(start.model, model), *_other_tensors(start, model)]:
        raise ConfigError(f"{where}: not the network of this run: {'; '.join(differences)}")
    state = {name: tensor for name, tensor in start.state_dict().items() if part_of(name) != "head"}
    if isinstance(start.model.positions, Learned):
        convention = start.model.positions.resample
        state["positions.table"] = resample(state["positions.table"], start.positions.grid, model.grid, convention)
    head = build_head(model)
    if new_head or _shapes(head) != _shapes(start.head):
        for tensor in [*head.parameters()][-2:]:
            nn.init.zeros_(tensor)
    else:
        head = start.head
    return state | {f"head.{name}": tensor for name, tensor in head.state_dict().items()}


def _other_settings(old: Model, new: Model) -> list[str]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for model in (before, after):
        model["positions"].pop("resample", None)
    if old.layerscale and new.layerscale:
        after["layerscale"] = old.layerscale  # where a network starts from weights its initial value is not read
    return [
        f"model.{setting}: got {json.dumps(before[setting])}, wanted {json.dumps(after[setting])}"
        for setting in FIXED
        if before[setting] != after[setting]
    ]


def _other_tensors(start: ViT, model: Model) -> list[str]:
    """The first few tensors, of those that are not adapted, that one network has and the other has not, or has so."""
    with torch.device("meta"):
        wanted = _shapes(ViT(model))
    got = _shapes(start)
    names = [
        name
        for name in {**wanted, **got}
        if wanted.get(name) != got.get(name) and not name.startswith(("head.", "positions."))
    ]
    told = [f"{name}: got {got.get(name, 'none')}, wanted {wanted.get(name, 'none')}" for name in names[:3]]
    return [*told, f"and {len(names) - 3} tensors more"] if len(names) > 3 else told


def _shapes(module: nn.Module) -> dict[str, str]:
    return {name: " x ".join(map(str, tensor.shape)) for name, tensor in module.state_dict().items()}
