"""Frozen and trained parts of a network, and an audit of their parameters."""

import json
from typing import NamedTuple, get_args

from torch import nn

from vitray.config.classification import Finetune, Part
from vitray.config.self_supervised import Lejepa, SelfDistillation
from vitray.errors import ConfigError
from vitray.models.adapters import add_lora
from vitray.models.network import AnyNetwork
from vitray.models.vit import ViT

# A task that starts from given weights, of which it may train some.
Tuned = Finetune | Lejepa | SelfDistillation


def part_of(name: str) -> Part:
    """Return the part of a ViT that holds the parameter `name`."""
    match name.split("."):
        case ["stem" | "class_token" | "distillation_token" | "registers" | "positions" | "head" as part, *_]:
            return part
        case ["level_positions", *_]:
            return "positions"
        case ["norm", _] | ["blocks", _, _, "norm", _]:
            return "norms"
        case ["blocks", _, _, _, "lora", *_] | ["blocks", _, _, _, "lora_scale"]:
            return "lora"
        case ["blocks", _, _, "adapter", *_]:
            return "adapters"
        case ["blocks", _, _, "qkv" | "out" | "q_norm" | "k_norm" | "relative", *_]:
            return "attn"
        case ["blocks", _, _, "up" | "down", _]:
            return "ffn"
        case ["blocks", _, _, "scale"]:
            return "layerscale"
        case _:
            raise AssertionError(f"parameter {name} belongs to no part")


def parts_of(network: AnyNetwork) -> dict[str, Part]:
    """Return the part of each parameter, by parameter name."""
    if not isinstance(network, ViT):
        return network.parts()
    return {name: part_of(name) for name, _ in network.named_parameters()}


def prepare(vit: AnyNetwork, settings: Tuned) -> None:
    """Add what a fine-tuning adds to the network, and freeze every parameter except those that the settings train."""
    if isinstance(vit, ViT) and settings.mode == "lora":
        lora, width = settings.lora, vit.model.shape.size
        if lora.rank > width:
            raise ConfigError(
                f"task.lora.rank: got {lora.rank}, expected at most {width}, the width of {vit.model.name}"
            )
        add_lora(vit, lora.matrices, lora.rank, lora.alpha)
    freeze(vit, settings)


def freeze(vit: AnyNetwork, settings: Tuned) -> None:
    """Freeze every parameter except those that the settings train."""
    parts = parts_of(vit)
    further = settings.also_train if isinstance(settings, Finetune) else ()
    if absent := [part for part in further if part not in parts.values()]:
        raise ConfigError(
            f"task.also_train: got {', '.join(absent)}, expected parts that {vit.model.name} has with its settings"
        )
    trained = {name for name, part in parts.items() if part in settings.trained} | _trained_beside(vit, settings)
    if isinstance(settings, Finetune) and settings.first_branch:
        trained -= {name for name in trained if parts[name] == "attn" and ".attn1." not in name}
    if not trained:
        raise ConfigError(
            f"task.mode: got {settings.mode}, which leaves nothing to train of {vit.model.name} with"
            f" model.num_classes {json.dumps(vit.model.num_classes)}, expected a mode whose parts it has"
        )
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(name in trained)
    vit.train(vit.training)  # puts a newly frozen stem or batch norm into evaluation mode


def _trained_beside(vit: AnyNetwork, settings: Tuned) -> set[str]:
    """The parameters that a mode trains besides whole parts."""
    if not isinstance(vit, ViT):
        return set()
    names = [name for name, _ in vit.named_parameters()]
    match settings.mode:
        case "bias":
            # The statistics of a batch norm change with its stem, which therefore stays frozen.
            has_statistics = any(isinstance(module, nn.BatchNorm2d) for module in vit.stem.modules())
            return {
                name for name in names if name.endswith(".bias") and not (has_statistics and part_of(name) == "stem")
            }
        case "last" if isinstance(settings, Finetune):
            depth = len(vit.blocks)
            if settings.levels > depth:
                raise ConfigError(
                    f"task.levels: got {settings.levels}, expected at most {depth}, the levels of {vit.model.name}"
                )
            levels = tuple(f"blocks.{level}." for level in range(depth - settings.levels, depth))
            return {name for name in names if name.startswith((*levels, "norm."))}
        case "adapter" if vit.model.adapters is None:
            raise ConfigError(
                "task.mode: got adapter, and model.adapters is null; expected a width, as in model.adapters=16"
            )
        case _:
            return set()


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


def audit(vit: AnyNetwork) -> Audit:
    """Return the trained and frozen parameter counts of a network in its present state."""
    rows, parts = [], parts_of(vit)
    for part in get_args(Part):
        parameters = [parameter for name, parameter in vit.named_parameters() if parts[name] == part]
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
