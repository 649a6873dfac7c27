"""A network written as what differs from another one, its base: few tensors, and where the rest of them is.

    model.safetensors  the tensors that differ from the base's in a bit, or that it has not
    delta.json         where the base lies, a hash of its tensors, and the names of those that are taken from it

A base may be a delta itself. A delta without its base is worth nothing, so the base's hash is checked whenever one is
read.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, get_args

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitray import storage
from vitray.config.sections import Section
from vitray.config.validation import refusal
from vitray.errors import ConfigError
from vitray.tracking.mlflow_client import is_address, pin_uri, resolve_uri
from vitray.weights.convert import State, import_weights

WEIGHTS, DELTA, CLASSES, RUN = "model.safetensors", "delta.json", "classes.json", "run.yaml"
Format = Literal[1]


class Origin(Section):
    """The network that a delta was written against."""

    url: str
    """A model folder or a weights file, as its address reads in every folder."""
    beside: str | None = None
    """The way from the delta to it, for the day when both are moved together; None where one of them is no path."""
    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """`identity_of` its tensors."""


class Delta(Section):
    """Everything that delta.json says."""

    format: Format = get_args(Format)[0]
    base: Origin
    taken: tuple[str, ...]
    """The tensors that are the base's."""


class Link(NamedTuple):
    """A delta, and where it lies."""

    place: str
    delta: Delta


def identity_of(state: Mapping[str, Tensor]) -> str:
    """A hash of a network's tensors: their names, types, shapes and bits, however they are stored."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bits(tensor).numpy().data)
    return digest.hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, without a copy where it lies in one piece on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors are the same to the last bit; torch.equal takes -0.0 for 0.0, and NaN for different."""
    if other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def make_delta(place: str, state: State, base_url: str) -> Delta:
    """What the tensors of a network that will lie at `place` have in common with those of its base."""
    url = pin_uri(base_url)
    base = read_state(url)
    is_path = not (is_address(url) or storage.is_remote(url) or storage.is_remote(place))
    beside = os.path.relpath(url, storage.absolute(place)) if is_path else None
    taken = tuple(name for name, tensor in state.items() if _is_same(tensor, base.get(name)))
    return Delta(base=Origin(url=url, beside=beside, identity=identity_of(base)), taken=taken)


def read_delta(place: str) -> Delta | None:
    """The delta in a folder; None where a network lies there whole."""
    where = storage.join(place, DELTA)
    if not storage.exists(where):
        return None
    text = storage.read_bytes(where)
    try:
        version = json.loads(text)["format"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{where}: not a {DELTA}: wanted a JSON object with a format") from None
    if version not in get_args(Format):
        raise ConfigError(f"{where}: format: got {version!r}, wanted {get_args(Format)[0]}: written by another vitray")
    try:
        return Delta.model_validate_json(text)
    except ValidationError as invalid:
        raise refusal(invalid, Delta, {}, where) from None


def read_chain(place: str, until: str | None = None) -> tuple[list[Link], str]:
    """The deltas from a place down, and the whole network below them; or down to the one on a base of this identity."""
    links: list[Link] = []
    while (delta := read_delta(place)) is not None:
        if place in (above := [link.place for link in links]):
            raise ConfigError(f"{above[0]}: a delta of itself, {' -> '.join([*above, place])}; wanted a whole network")
        links.append(Link(place, delta))
        if delta.base.identity == until:
            break
        place = _place_of(delta.base, place)
    return links, place


def _place_of(base: Origin, place: str) -> str:
    """Where the base of the delta at `place` lies now."""
    lost = f"{place}: a delta of {base.url} (identity {base.identity[:12]})"
    remedy = "wanted it back there; where it still lies, `vitray weights flatten` writes the delta as a whole model"
    try:
        places = [resolve_uri(base.url)]
    except ConfigError as error:
        raise ConfigError(f"{lost}, which is not to be had: {error}; {remedy}") from None
    if base.beside is not None and not storage.is_remote(place):
        places.append(os.path.normpath(os.path.join(storage.absolute(place), base.beside)))
    for found in places:
        if any(storage.exists(file) for file in (storage.join(found, RUN), found, storage.join(found, WEIGHTS))):
            return found
    raise ConfigError(f"{lost}, which is not there; {remedy}")


def read_state(url: str) -> State:
    """The tensors of the network at an address under our names: of a whole one, of a delta, or of another library."""
    links, root = read_chain(resolve_uri(url))
    return compose(links, _read_whole(root))


def _read_whole(place: str) -> State:
    if storage.exists(storage.join(place, RUN)):
        return _read_own(place)
    return _aligned(import_weights(place)[1].state_dict())


def _read_own(place: str) -> State:
    with storage.local_copy(storage.join(place, WEIGHTS)) as path:
        try:
            return _aligned(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{place}: {WEIGHTS} cannot be read: {error}") from None


def _aligned(state: State) -> State:
    # Where a mapped file has a tensor off the 64 bytes of torch's own, products differ in their last bits: the same
    # network would answer otherwise from a delta's file than from a whole one.
    return {name: tensor if tensor.data_ptr() % 64 == 0 else tensor.clone() for name, tensor in state.items()}


def compose(links: Sequence[Link], state: State) -> State:
    """The tensors of the first of some deltas, the last of which is one of the network with this state.

    What comes from that network is its tensors themselves, not copies.
    """
    for place, delta in reversed(links):
        if (got := identity_of(state)) != delta.base.identity:
            raise ConfigError(
                f"{place}: a delta of {delta.base.url}, which has changed: got identity {got[:12]}, wanted"
                f" {delta.base.identity[:12]}"
            )
        own = _read_own(place)
        wrong = [name for name in delta.taken if name in own or name not in state]
        if wrong:
            raise ConfigError(f"{place}: {DELTA} takes {wrong[0]} from the base, but {WEIGHTS} has it or the base not")
        state = own | {name: state[name] for name in delta.taken}
    return state
