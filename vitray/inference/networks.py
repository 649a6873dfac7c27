"""Networks on one device: their outputs for a batch of views.

Vision Transformers of one base pass the levels that they share together: these are computed once.
Shapes: B images, H x W pixels, C colors, N tokens, D width, K classes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitray.data.augment.mixing import normalized, to_device
from vitray.data.augment.views import View
from vitray.inference.models import open_network
from vitray.inference.network_spec import NetworkSpec, Numerics, Wanted
from vitray.models.network import AnyNetwork
from vitray.models.other_networks import OtherNetwork
from vitray.models.positions import VisiblePatches
from vitray.models.precision import round_products, tf32_products
from vitray.models.vit import ViT
from vitray.weights import identity_of

# Settings that only the end of a network depends on.
_END_SETTINGS = {"num_classes", "head", "pool"}


def views_of(networks: Sequence[NetworkSpec]) -> list[View]:
    """Return the different views of some networks."""
    return list(dict.fromkeys(spec.view for spec in networks))


def prepared(view_BHWC: np.ndarray, spec: NetworkSpec, network: AnyNetwork) -> Tensor:
    """Return images as a network takes them: normalized, BCHW, on its device."""
    device = next(network.parameters()).device
    return normalized(torch.from_numpy(view_BHWC).to(device), spec.normalize).contiguous()


class OtherMember(NamedTuple):
    """A loaded network of torchvision, which shares no computation."""

    spec: NetworkSpec
    network: OtherNetwork
    view: int


class Member(NamedTuple):
    """A loaded Vision Transformer; two with equal stages up to some level share the computation up to there."""

    spec: NetworkSpec
    vit: ViT
    view: int
    stages: list[str]
    """A hash of the stem, then of each block."""


class Networks:
    """Some networks on one device."""

    def __init__(
        self,
        specs: Sequence[NetworkSpec],
        wanted: Wanted,
        numerics: Numerics,
        loaded: Mapping[str, AnyNetwork] | None = None,
    ) -> None:
        """`loaded` are those networks, by name, that this process has already."""
        self._wanted, self._device = wanted, torch.device(numerics.device)
        views = views_of(specs)
        self._all: list[tuple[NetworkSpec, AnyNetwork, int]] = []
        self._members: list[Member] = []
        self._others: list[OtherMember] = []
        shares = len(specs) > 1 and wanted != Wanted()
        for spec in specs:
            opened = None if spec.name in (loaded or {}) else open_network(spec)
            network = opened or (loaded or {})[spec.name]
            network, view = network.to(self._device).eval(), views.index(spec.view)
            self._all.append((spec, network, view))
            if isinstance(network, OtherNetwork):
                if numerics.compile:
                    network.compile(dynamic=False)
                self._others.append(OtherMember(spec, network, view))
                continue
            stages = _stages(spec, network) if shares else [""] * (len(network.blocks) + 1)
            # The others are the caller's, too, and where no output is wanted, the caller sends float32 images itself.
            if opened is not None and wanted != Wanted() and spec.precision == "bf16":
                round_products(network)
            if numerics.compile:
                for block in network.blocks:
                    block.compile(dynamic=False)
            self._members.append(Member(spec, network, view, stages))

    @torch.inference_mode()
    def outputs(self, views: Sequence[np.ndarray]) -> dict[str, dict[str, Tensor]]:
        """Return the outputs of every network, by its name, for a batch of each view (uint8, BHWC)."""
        values: dict[str, dict[str, Tensor]] = {member.spec.name: {} for member in self._members}
        inputs = [np.require(view_BHWC, requirements="W") for view_BHWC in views]  # else torch warns
        on_device = [to_device(torch.from_numpy(each), self._device) for each in inputs]
        self._run_from_level(self._members, 0, on_device, values)
        for other in self._others:
            values[other.spec.name] = self._other_outputs(other, on_device[other.view])
        return values

    def inputs(self, views: Sequence[np.ndarray]) -> list[tuple[AnyNetwork, Tensor]]:
        """Return every network with its images (BCHW) of a batch of each view."""
        return [(network, prepared(views[view], spec, network)) for spec, network, view in self._all]

    def _run_from_level(
        self, members: Sequence[Member], level: int, inputs: Sequence[Tensor], values: dict[str, dict[str, Tensor]]
    ) -> None:
        """Pass the inputs through one stage, once for each group of equal stages, then through all later stages.

        `inputs` holds a batch for each view before the stem, and a single one for all members after it.
        """
        for group in _groups(members, level):
            first = group[0]
            with self._precision(first.spec):
                x_BND = _stage(first, level, inputs)
                for spec, vit, _, stages in group:
                    name = f"block{level - 1:02d}"
                    if name in self._wanted.levels:
                        values[spec.name][name] = _summary(vit, x_BND)
                    if level == len(stages) - 1:
                        values[spec.name] |= self._end(spec, vit, x_BND)
            deeper = [member for member in group if level < len(member.stages) - 1]
            if deeper:
                self._run_from_level(deeper, level + 1, [x_BND], values)

    def _end(self, spec: NetworkSpec, vit: ViT, x_BND: Tensor) -> dict[str, Tensor]:
        pooled_BD = vit.pooled(x_BND)
        ends = {"features": pooled_BD} if self._wanted.features else {}
        if spec.num_classes is not None and self._wanted.logits:
            ends["logits"] = vit.head(pooled_BD)
        return ends

    @contextmanager
    def _precision(self, spec: NetworkSpec) -> Iterator[None]:
        """Compute in the precision of a network for a block."""
        autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=spec.precision == "bf16")
        with tf32_products(self._device, spec.tf32), autocast:
            yield

    def _other_outputs(self, other: OtherMember, view_BHWC: Tensor) -> dict[str, Tensor]:
        """Return the outputs of a network of torchvision; the features of a stage are the mean over positions."""
        spec, network, _ = other
        images_BCHW, wanted = normalized(view_BHWC, spec.normalize), self._wanted
        with self._precision(spec):
            if not (wanted.levels or wanted.features):
                return {"logits": network(images_BCHW)}
            with network.watching_stages() as states:
                features_BD, logits_BK = network.features_and_logits(images_BCHW)
        means = [state_BCHW.mean(dim=(2, 3)) for state_BCHW in states[1:]]
        return dict(zip(network.stages, means, strict=True)) | {"features": features_BD, "logits": logits_BK}


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
    begin = [settings, spec.size, spec.precision, spec.tf32, spec.normalize.model_dump(mode="json")]
    begin += [spec.crop.model_dump(mode="json"), vit.execution, identity_of(_tensors_before(vit))]
    return [json.dumps(begin, sort_keys=True), *(identity_of(block.state_dict()) for block in vit.blocks)]


def _tensors_before(vit: ViT) -> dict[str, Tensor]:
    later: tuple[str, ...] = ("blocks.", "norm.", "head.")
    return {name: tensor for name, tensor in vit.state_dict().items() if not name.startswith(later)}
