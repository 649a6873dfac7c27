"""Networks in one process: their outputs for a batch of views, as one table.

Vision Transformers of one base pass the levels that they share together: these are computed once.
Shapes: B images, H x W pixels, C colors, N tokens, D width, K classes, T top classes.
"""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from vitray.config.augmentation import CenterCrop
from vitray.data.augment.batch import normalized, to_device
from vitray.data.augment.image import crop_center
from vitray.inference.models import open_network
from vitray.inference.network_spec import NetworkSpec
from vitray.models.positions import VisiblePatches
from vitray.models.probabilities import probabilities_of
from vitray.models.torchvision_networks import TorchvisionNetwork
from vitray.models.vit import ViT
from vitray.prediction.images import decoded
from vitray.prediction.plan import Plan
from vitray.weights import identity_of

# Settings that only the end of a network depends on.
_END_SETTINGS = {"num_classes", "head", "pool"}


class View(NamedTuple):
    """How an image becomes the input of a network."""

    crop: CenterCrop
    size: tuple[int, int]


def views_of(networks: Iterable[NetworkSpec]) -> list[View]:
    """Return the different views of some networks."""
    views: list[View] = []
    for spec in networks:
        view = View(spec.crop, spec.size)
        views += [] if view in views else [view]
    return views


def decode_views(
    contents: Sequence[bytes | str], views: Sequence[View], batch: int
) -> tuple[list[np.ndarray], list[str | None]]:
    """Return a batch of each view (BHWC), and a reason for each image that has no pixels.

    Such images are black, and black ones fill the batch: all batches have one shape.
    """
    pixels = [np.zeros((batch, *view.size, 3), np.uint8) for view in views]
    reasons: list[str | None] = [None] * len(contents)
    for index, content in enumerate(contents):
        image_HWC = decoded(content)
        if isinstance(image_HWC, str):
            reasons[index] = image_HWC
            continue
        for batch_BHWC, view in zip(pixels, views, strict=True):
            batch_BHWC[index] = crop_center(image_HWC, view.crop, view.size)
    return pixels, reasons


class TorchvisionMember(NamedTuple):
    """A loaded network of torchvision, which shares no computation."""

    spec: NetworkSpec
    network: TorchvisionNetwork
    view: int


class Member(NamedTuple):
    """A loaded Vision Transformer; two with equal stages up to some level share the computation up to there."""

    spec: NetworkSpec
    vit: ViT
    view: int
    stages: list[str]
    """A hash of the stem, then of each block."""


class Networks:
    """All networks of a plan on one device."""

    def __init__(self, plan: Plan) -> None:
        self._options, self._device = plan.options, torch.device(plan.device)
        views = views_of(plan.networks)
        self._specs = plan.networks
        self._members: list[Member] = []
        self._others: list[TorchvisionMember] = []
        for spec in plan.networks:
            vit, view = open_network(spec).to(self._device).eval(), views.index(View(spec.crop, spec.size))
            if isinstance(vit, TorchvisionNetwork):
                if plan.options.compile:
                    vit.compile(dynamic=False)
                self._others.append(TorchvisionMember(spec, vit, view))
                continue
            stages = _stages(spec, vit) if len(plan.networks) > 1 else [""] * (len(vit.blocks) + 1)
            if plan.options.compile:
                for block in vit.blocks:
                    block.compile(dynamic=False)
            self._members.append(Member(spec, vit, view, stages))

    @torch.inference_mode()
    def outputs(self, views: Sequence[np.ndarray], is_usable: np.ndarray) -> pa.Table:
        """Return the columns of all networks for a batch (uint8, BHWC, of each view), null where not usable."""
        count = len(is_usable)
        if not count:  # the last part has fewer batches than the others
            return pa.table({})
        values: dict[str, dict[str, Tensor]] = {spec.name: {} for spec in self._specs}
        length = len(views[0]) if self._options.compile else count
        inputs = [np.require(view_BHWC[:length], requirements="W") for view_BHWC in views]  # else torch warns
        on_device = [to_device(torch.from_numpy(each), self._device) for each in inputs]
        self._run_from_level(self._members, 0, on_device, values)
        for other in self._others:
            values[other.spec.name] = self._torchvision_outputs(other, on_device[other.view])
        columns: dict[str, pa.Array] = {}
        for spec in self._specs:
            rows = {name: value[:count].float().cpu()[is_usable] for name, value in values[spec.name].items()}
            prefix = f"{spec.name}/" if len(self._specs) > 1 else ""
            columns |= {prefix + name: _lists(array, is_usable) for name, array in self._arrays(spec, rows).items()}
        return pa.table(columns)

    def _run_from_level(
        self, members: Sequence[Member], level: int, inputs: Sequence[Tensor], values: dict[str, dict[str, Tensor]]
    ) -> None:
        """Pass the inputs through one stage, once for each group of equal stages, then through all later stages.

        `inputs` holds a batch for each view before the stem, and a single one for all members after it.
        """
        for group in _groups(members, level):
            first = group[0]
            with torch.autocast(self._device.type, torch.bfloat16, enabled=first.spec.precision == "bf16"):
                x_BND = _stage(first, level, inputs)
                for spec, vit, _, stages in group:
                    name = f"block{level - 1:02d}"
                    if name in self._options.levels:
                        values[spec.name][name] = _summary(vit, x_BND)
                    if level == len(stages) - 1:
                        values[spec.name] |= self._end(spec, vit, x_BND)
            deeper = [member for member in group if level < len(member.stages) - 1]
            if deeper:
                self._run_from_level(deeper, level + 1, [x_BND], values)

    def _end(self, spec: NetworkSpec, vit: ViT, x_BND: Tensor) -> dict[str, Tensor]:
        pooled_BD = vit.pooled(x_BND)
        ends = {"embedding": pooled_BD} if self._options.embedding else {}
        if spec.num_classes is not None and (self._options.top_k or self._options.logits):
            ends["logits"] = vit.head(pooled_BD)
        return ends

    def _torchvision_outputs(self, other: TorchvisionMember, view_BHWC: Tensor) -> dict[str, Tensor]:
        """Return the outputs of a network of torchvision; the features of a stage are the mean over positions."""
        spec, network, _ = other
        images_BCHW, options = normalized(view_BHWC, spec.normalize), self._options
        with torch.autocast(self._device.type, torch.bfloat16, enabled=spec.precision == "bf16"):
            if not (options.levels or options.embedding):
                return {"logits": network(images_BCHW)}
            with network.watching_stages() as states:
                features_BD, logits_BK = network.features_and_logits(images_BCHW)
        means = [state_BCHW.mean(dim=(2, 3)) for state_BCHW in states[1:]]
        return dict(zip(network.stages, means, strict=True)) | {"embedding": features_BD, "logits": logits_BK}

    def _arrays(self, spec: NetworkSpec, rows: dict[str, Tensor]) -> dict[str, pa.Array]:
        """Return the values of each column for the usable images, one after another."""
        options, arrays = self._options, {}
        if spec.num_classes is not None and options.top_k:
            logits_BK = rows["logits"]
            # Sorted by logits, as large ones have equal sigmoids; stable: of equal logits the lower class is first.
            classes_BT = logits_BK.sort(dim=-1, descending=True, stable=True).indices[:, : options.top_k]
            probabilities_BT = probabilities_of(logits_BK, spec.probability).gather(1, classes_BT)
            names = spec.classes or [str(number) for number in range(spec.num_classes)]
            arrays["classes"] = pa.array([names[number] for number in classes_BT.flatten().tolist()], pa.string())
            arrays["probabilities"] = pa.array(probabilities_BT.flatten().numpy())
        wanted = ["logits"] * options.logits + list(options.levels) + ["embedding"] * options.embedding
        return arrays | {name: pa.array(rows[name].flatten().numpy()) for name in wanted if name in rows}


def _lists(values: pa.Array, is_usable: np.ndarray) -> pa.ListArray:
    """Return the values as a list of equal length for each usable image, and null for the others."""
    # Not of a fixed size: pyarrow 25 cannot read those with nulls from Parquet.
    size = len(values) // max(1, int(is_usable.sum()))
    offsets = np.concatenate([[0], np.cumsum(is_usable * size)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(~is_usable))


def _stage(member: Member, level: int, inputs: Sequence[Tensor]) -> Tensor:
    """Return the tokens after the stem (level 0), or after a block."""
    spec, vit, view, _ = member
    if level:
        height, width = (side // vit.stem.patch for side in spec.size)
        places = VisiblePatches((height, width))
        x_BND = vit.level_input(level - 1, inputs[0], places)
        return vit.blocks[level - 1](x_BND, None, "", vit.attention_positions(places))
    x_BND, grid = vit.stem(normalized(inputs[view], spec.normalize))
    return vit.first_input(vit.positions(x_BND, grid))


def _summary(vit: ViT, x_BND: Tensor) -> Tensor:
    """Return one vector per image, without a norm: the class token, or the mean of the patches, by `model.pool`."""
    if vit.model.pool == "token":
        return x_BND[:, 0]
    return x_BND[:, vit.num_prefix :].mean(dim=1)


def _groups(members: Sequence[Member], level: int) -> list[list[Member]]:
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.stages[level], []).append(member)
    return list(groups.values())


def _stages(spec: NetworkSpec, vit: ViT) -> list[str]:
    """Return a hash of everything that decides the tokens after the stem, and of the tensors of each block."""
    settings = {name: value for name, value in json.loads(spec.settings).items() if name not in _END_SETTINGS}
    begin = [settings, spec.size, spec.precision, spec.normalize.model_dump(mode="json")]
    begin += [spec.crop.model_dump(mode="json"), vit.execution, identity_of(_tensors_before(vit))]
    return [json.dumps(begin, sort_keys=True), *(identity_of(block.state_dict()) for block in vit.blocks)]


def _tensors_before(vit: ViT) -> dict[str, Tensor]:
    later: tuple[str, ...] = ("blocks.", "norm.", "head.")
    return {name: tensor for name, tensor in vit.state_dict().items() if not name.startswith(later)}
