"""A family: one base network and any number of its deltas, over batches that mix them.

Rows of a batch are sorted by network. A layer that the networks of a batch share is one product over all rows, a layer
that differs is one product per network. Networks of torchvision share the memory of their tensors alone: each computes
its own rows.
Shapes: B images, C colors, H x W pixels, N tokens, D width, K classes.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vitray.config import Model, Rope, Run, SinCos2d
from vitray.errors import ConfigError, nearest
from vitray.models.graphs import GraphedNetwork
from vitray.models.network import build_network
from vitray.models.positions import AxialRope, Positions
from vitray.models.precision import is_autocast, round_products
from vitray.models.vit import ViT, build_head
from vitray.weights.files import State

# Settings that change neither the layers before the head nor their function at inference.
_NOT_TRUNK = {"num_classes", "head", "drop_path", "drop_path_draw", "drop_path_schedule", "dropout"}
_NOT_TRUNK |= {"batch_momentum", "execution"}


@dataclass(frozen=True, eq=False)
class Member:
    """A network of a family: settings, class names, and tensors, of which the shared ones are the base's."""

    run: Run
    classes: list[str] | None
    state: State
    base: State

    @cached_property
    def own(self) -> frozenset[str]:
        """The names of the tensors that are not the base's, and of the modules that they are in."""
        names = {name for name, tensor in self.state.items() if tensor is not self.base.get(name)}
        parts = [name.split(".") for name in names]
        return frozenset(".".join(part[:end]) for part in parts for end in range(1, len(part) + 1))

    @cached_property
    def trunk(self) -> Model:
        """The settings of the network without its head; of torchvision's, all of them."""
        if not self.run.model.is_vit:
            return self.run.model
        return Model.model_validate(
            {**self.run.model.model_dump(exclude=_NOT_TRUNK), "num_classes": None, "execution": "loop"}
        )

    @cached_property
    def head(self) -> nn.Module:
        """The head, without tensors."""
        with torch.device("meta"):
            return build_head(self.run.model).eval()

    @cached_property
    def whole(self) -> nn.Module:
        """The network by itself, on these tensors."""
        with torch.device("meta"):
            network = build_network(self.run.model)
        network.load_state_dict(self.state, assign=True)
        if isinstance(network, ViT):
            give_tables(network, next(iter(self.state.values())).device)
        return network.eval().requires_grad_(False)

    @cached_property
    def graphed(self) -> GraphedNetwork:
        """The Vision Transformer by itself, as CUDA graphs in the precision of the first of them."""
        if is_autocast(next(iter(self.state.values())).device):
            round_products(self.whole)
        return GraphedNetwork(self.whole)

    @cached_property
    def sort_key(self) -> tuple[str, list[str]]:
        """Members with equal keys are neighbors in a batch, so that the rows of a shared layer are too."""
        return self.trunk.model_dump_json(), sorted(self.own)


# Rows start to stop of a sorted batch, which use the tensors of one member.
Segment = tuple[int, int, Member]


class Family:
    """A base network's tensors, and networks that share them; `members` holds these by name."""

    def __init__(
        self, base: State, members: Mapping[str, Member], device: torch.device | str = "cpu", *, graphs: bool = False
    ) -> None:
        """`graphs`: a batch of one network is a CUDA graph, always in the precision of the first."""
        self.device = torch.device(device)
        self._has_graphs = graphs and self.device.type == "cuda"
        self.base = {name: tensor.to(self.device) for name, tensor in base.items()}
        self.members: dict[str, Member] = {}
        self._trunks: dict[Model, _Trunk] = {}
        for name, member in members.items():
            self.add(name, member)

    def placed(self, member: Member) -> Member:
        """Return a network on this device, with the shared tensors of the base; `outputs` takes it before `add`."""
        state = {
            key: self.base[key] if tensor is member.base.get(key) else tensor.to(self.device)
            for key, tensor in member.state.items()
        }
        return replace(member, state=state, base=self.base)

    def add(self, name: str, member: Member) -> Member:
        """Add a network, or replace the one of this name, which batches that hold it still use; return it."""
        member = self.placed(member)
        self.members = self.members | {name: member}
        return member

    def remove(self, name: str) -> None:
        """Remove a network; batches that hold it still use it."""
        self.members = {other: member for other, member in self.members.items() if other != name}

    def member(self, name: str) -> Member:
        """Return the network of this name."""
        if name not in self.members:
            known = ", ".join(self.members) or "none"
            raise ConfigError(f"task: got {name!r}, expected one of {known}{nearest(name, self.members)}")
        return self.members[name]

    def __call__(self, images: Sequence[Tensor] | Tensor, tasks: Sequence[str]) -> list[Tensor]:
        """Return the logits of each image by the network that its task names."""
        return self.outputs(images, [self.member(name) for name in tasks])

    @torch.inference_mode()
    def outputs(self, images: Sequence[Tensor] | Tensor, members: Sequence[Member]) -> list[Tensor]:
        """Return the logits of each image (CHW, normalized) by its member, or the features of a member without a head.

        Images of different sizes are processed one size after the other.
        """
        if len(images) != len(members):
            raise ValueError(f"got {len(images)} images and {len(members)} members, expected as many")
        keys = [
            (member.sort_key[0], tuple(image.shape), member.sort_key[1], id(member))
            for image, member in zip(images, members, strict=True)
        ]
        order = sorted(range(len(members)), key=keys.__getitem__)
        results: list[Tensor] = [torch.empty(0)] * len(members)
        for _, batch in itertools.groupby(order, key=lambda row: keys[row][:2]):
            rows = list(batch)
            images_BCHW = torch.stack([images[row] for row in rows]).to(self.device)
            for row, output in zip(rows, self._outputs(images_BCHW, [members[row] for row in rows]), strict=True):
                results[row] = output
        return results

    def _outputs(self, images_BCHW: Tensor, members: list[Member]) -> Iterator[Tensor]:
        plan = Plan(members)
        model = members[0].trunk
        if not model.is_vit:
            for start, stop, member in plan.segments:
                yield from member.whole(images_BCHW[start:stop])
            return
        if self._has_graphs and len(plan.segments) == 1:
            yield from members[0].graphed(images_BCHW)
            return
        if model not in self._trunks:
            self._trunks[model] = _Trunk(model, self.device)
        pooled_BD = self._trunks[model](images_BCHW, plan)
        for start, stop, member in plan.segments_of_heads():
            head = {name.removeprefix("head."): t for name, t in member.state.items() if name.startswith("head.")}
            yield from functional_call(member.head, head, (pooled_BD[start:stop],))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors in memory; shared ones count once."""
        states = [self.base, *(member.state for member in self.members.values())]
        return sum({tensor.data_ptr(): tensor.nbytes for state in states for tensor in state.values()}.values())

    @property
    def nbytes_apart(self) -> int:
        """The bytes that the networks would take if each were loaded whole."""
        return sum(tensor.nbytes for member in self.members.values() for tensor in member.state.values())


class Plan:
    """The networks of the rows of a sorted batch, in segments of rows that use the same tensors."""

    def __init__(self, members: list[Member]) -> None:
        self.size = len(members)
        self.segments: list[Segment] = []
        for row, member in enumerate(members):
            if self.segments and self.segments[-1][2] is member:
                self.segments[-1] = (self.segments[-1][0], row + 1, member)
            else:
                self.segments.append((row, row + 1, member))
        self.own = frozenset().union(*(member.own for _, _, member in self.segments))

    def segments_of(self, layer: str) -> list[Segment]:
        """Return the rows of a layer (or a tensor) that use the same tensors."""
        if layer not in self.own:
            return [(0, self.size, self.segments[0][2])]
        return _joined(self.segments, lambda one, other: layer not in one.own and layer not in other.own)

    def segments_of_heads(self) -> list[Segment]:
        """Return the rows that use the same head."""

        def is_same(one: Member, other: Member) -> bool:
            names = [name for name in {**one.state, **other.state} if name.startswith("head.")]
            has_same = all(one.state.get(name) is other.state.get(name) for name in names)
            return has_same and one.run.model.head == other.run.model.head

        return _joined(self.segments, is_same)

    def vector(self, name: str) -> Tensor:
        """Return a vector or a table of the network, D or RD; if it differs between rows, B1D or BRD."""
        segments = self.segments_of(name)
        if len(segments) == 1:
            return segments[0][2].state[name]
        counts = torch.tensor([stop - start for start, stop, _ in segments], device=segments[0][2].state[name].device)
        tensors = [member.state[name] for _, _, member in segments]
        return torch.stack([torch.atleast_2d(tensor) for tensor in tensors]).repeat_interleave(counts, dim=0)


def _joined(segments: list[Segment], is_same: Callable[[Member, Member], bool]) -> list[Segment]:
    joined = segments[:1]
    for start, stop, member in segments[1:]:
        if is_same(joined[-1][2], member):
            joined[-1] = (joined[-1][0], stop, joined[-1][2])
        else:
            joined.append((start, stop, member))
    return joined


class _Trunk:
    """A network without a head and without tensors: each layer takes those of the batch's networks."""

    def __init__(self, model: Model, device: torch.device) -> None:
        with torch.device("meta"):
            self.vit = ViT(model).eval()
        give_tables(self.vit, device)
        self.lock = threading.Lock()
        self.layers: list[Layer] = []
        inside = ""
        for name, layer in list(self.vit.named_modules()):
            if inside and name.startswith(inside):
                continue
            tensors = [key for key, _ in [*layer.named_parameters(), *layer.named_buffers()]]
            is_whole = getattr(layer, "rows_are_patches", False)
            inside = f"{name}." if is_whole else inside
            if tensors and (is_whole or not list(layer.children())):
                self.layers.append(Layer(name, layer.requires_grad_(False)))
                self.vit.set_submodule(name, self.layers[-1])
        self.vectors = [name for name, _ in self.vit.named_parameters()]  # class token, registers, LayerScale, offsets

    def __call__(self, images_BCHW: Tensor, plan: Plan) -> Tensor:
        with self.lock:  # the layers hold the plan of one batch
            for layer in self.layers:
                layer.plan = plan
            vectors = {name: plan.vector(name) for name in self.vectors}
            return functional_call(self.vit, vectors, (images_BCHW,))


def give_tables(vit: ViT, device: torch.device) -> None:
    """Give a network of the meta device its sin-cos tables and rotary angles, which are no tensors of its state."""
    model = vit.model
    if isinstance(model.positions, SinCos2d):
        vit.positions = Positions(model.positions, model.grid, model.shape.size).to(device)
    if isinstance(model.positions, Rope):
        vit.rope = AxialRope(model.grid, model.head_size, model.positions.base).to(device)


class Layer(nn.Module):
    """A layer of several networks: it applies to each row of a sorted batch the tensors of the row's network."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.name, self.keys = name, list(layer.state_dict())
        self.plan: Plan | None = None
        self.layer = (layer,)  # in a tuple, because its tensors have no values

    @property
    def weight(self) -> Tensor:
        """The weight of the first network, for its type and its device."""
        assert self.plan is not None
        return self.plan.segments[0][2].state[f"{self.name}.weight"]

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        assert self.plan is not None
        segments = self.plan.segments_of(self.name)
        if len(segments) == 1:
            return self._compute(segments[0][2], x, rest)
        if isinstance(self.layer[0], nn.Linear) and not torch.is_autocast_enabled(x.device.type):
            return self._linear(x.contiguous(), segments)
        return torch.cat([self._compute(member, x[start:stop], rest) for start, stop, member in segments])

    def _compute(self, member: Member, x: Tensor, rest: tuple[Any, ...]) -> Tensor:
        tensors = [member.state[f"{self.name}.{key}"] for key in self.keys]
        match self.layer[0]:
            case nn.Linear():
                return F.linear(x, *tensors)
            case layer if type(layer) is nn.LayerNorm:
                return F.layer_norm(x, layer.normalized_shape, *tensors, eps=layer.eps)
            case layer:
                return functional_call(layer, dict(zip(self.keys, tensors, strict=True)), (x, *rest))

    def _linear(self, x: Tensor, segments: list[Segment]) -> Tensor:
        """Write each product to its rows of the output; a concatenation would copy them."""
        weight, bias = f"{self.name}.weight", f"{self.name}.bias"
        out = x.new_empty(*x.shape[:-1], len(segments[0][2].state[weight]))
        for start, stop, member in segments:
            rows, target = (part[start:stop].flatten(0, -2) for part in (x, out))
            if bias in member.state:
                torch.addmm(member.state[bias], rows, member.state[weight].t(), out=target)
            else:
                torch.mm(rows, member.state[weight].t(), out=target)
        return out
