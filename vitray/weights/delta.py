"""Deltas: networks stored as their differences from a base network.

    model.safetensors  the tensors that differ from those of the base, or that the base lacks; LoRA factors stay
                       separate, and every read merges them
    delta.json         the address of the base, a hash of its tensors, and the names of the shared tensors

A base may be a delta itself. A delta is useless without its base, so every read checks the hash of the base.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitray.config.sections import Section
from vitray.config.validation import explain_error
from vitray.errors import ConfigError
from vitray.models.adapters import merge_lora
from vitray.system import storage
from vitray.weights.addresses import pin_uri, resolve_uri
from vitray.weights.convert import import_state
from vitray.weights.files import State, as_float32

WEIGHTS, DELTA, CLASSES, RUN = "model.safetensors", "delta.json", "classes.json", "run.yaml"
FORMAT = 1


class Origin(Section):
    """The base of a delta."""

    url: str
    """A model folder or a weights file, readable from any folder."""
    beside: str | None = None
    """The relative path from the delta to its base, valid after both move together; None unless both are local."""
    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """The hash of its tensors, by `identity_of`."""


class Delta(Section):
    """The content of delta.json."""

    format: Literal[1] = FORMAT
    base: Origin
    taken: tuple[str, ...]
    """The names of the tensors shared with the base."""


class Link(NamedTuple):
    """A delta and its folder."""

    location: str
    delta: Delta


def identity_of(state: Mapping[str, Tensor]) -> str:
    """Return a hash of a network's tensors: names, types, shapes and bits, but not memory layout."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bits(tensor).numpy().data)
    return digest.hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, without a copy for a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _is_same(tensor: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors are equal bit by bit; torch.equal treats -0.0 as 0.0, and NaN as unequal."""
    if other is None or tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    return torch.equal(_bits(tensor), _bits(other))


def make_delta(location: str, state: State, base_url: str) -> Delta:
    """Return the delta of a network, to be saved at `location`, from its base."""
    url = pin_uri(base_url)
    base = read_state(url)
    is_path = os.path.isabs(url) and not storage.is_remote(location)
    beside = os.path.relpath(url, storage.absolute(location)) if is_path else None
    taken = tuple(name for name, tensor in state.items() if _is_same(tensor, base.get(name)))
    return Delta(base=Origin(url=url, beside=beside, identity=identity_of(base)), taken=taken)


def read_delta(location: str) -> Delta | None:
    """Return the delta in a folder, or None for a whole network."""
    url = storage.join(location, DELTA)
    if not storage.exists(url):
        return None
    tree = storage.read_json(url)
    if not isinstance(tree, dict) or "format" not in tree:
        raise ConfigError(f"{url}: not a {DELTA}: expected a JSON object with a format")
    if (version := tree["format"]) != FORMAT:
        raise ConfigError(f"{url}: format: got {version!r}, expected {FORMAT}: written by another vitray")
    try:
        return Delta.model_validate_json(json.dumps(tree))
    except ValidationError as invalid:
        raise explain_error(invalid, Delta, {}, url) from None


def read_chain(location: str, until: str | None = None) -> tuple[list[Link], str]:
    """Return the chain of deltas from a folder to its whole network, and the location at its end.

    The chain ends early at a delta whose base has the identity `until`.
    """
    links: list[Link] = []
    while (delta := read_delta(location)) is not None:
        if location in (visited := [link.location for link in links]):
            path = " -> ".join([*visited, location])
            raise ConfigError(f"{visited[0]}: a delta of itself, {path}; expected a whole network")
        links.append(Link(location, delta))
        if delta.base.identity == until:
            break
        location = _location_of(delta.base, location)
    return links, location


def _location_of(base: Origin, location: str) -> str:
    """The present location of the base of the delta at `location`."""
    message = f"{location}: a delta of {base.url} (identity {base.identity[:12]})"
    remedy = "put the base back there, or run `vitray weights flatten` where it still exists, for a whole model"
    try:
        candidates = [resolve_uri(base.url)]
    except ConfigError as error:
        raise ConfigError(f"{message}, which cannot be resolved: {error}; {remedy}") from None
    if base.beside is not None and not storage.is_remote(location):
        candidates.append(os.path.normpath(os.path.join(storage.absolute(location), base.beside)))
    for candidate in candidates:
        files = (storage.join(candidate, RUN), candidate, storage.join(candidate, WEIGHTS))
        if any(storage.exists(file) for file in files):
            return candidate
    raise ConfigError(f"{message}, which is not there; {remedy}")


def read_state(url: str) -> State:
    """Return the tensors, under our names, of a model folder, a delta or a weights file of another library."""
    links, root = read_chain(resolve_uri(url))
    has_run = storage.exists(storage.join(root, RUN))
    return compose(links, read_own(root) if has_run else _aligned(import_state(root)))


def read_own(location: str) -> State:
    """Return the tensors of a folder's own file, floats as float32."""
    return _aligned(as_float32(_read_file(location), f"{location}: {WEIGHTS}"))


def stored_types(location: str) -> list[str]:
    """Return the types of the tensors in a folder's own file, such as float16."""
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in _read_file(location).values()})


def _read_file(location: str) -> State:
    with storage.local_copy(storage.join(location, WEIGHTS)) as path:
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{location}: {WEIGHTS} cannot be read: {error}") from None


def _aligned(state: State) -> State:
    # A memory-mapped tensor may lack torch's alignment of 64 bytes, which changes the last bits of products. Without
    # this, a delta and the whole network would give different results.
    return {name: tensor if tensor.data_ptr() % 64 == 0 else tensor.clone() for name, tensor in state.items()}


def compose(links: Sequence[Link], state: State, identity: str | None = None) -> State:
    """Return the tensors of the first delta of a chain, whose last base has the tensors `state`.

    Tensors of the base are shared, not copied. `identity` is that of `state`, if it is known.
    """
    for location, delta in reversed(links):
        got, identity = identity or identity_of(state), None
        if got != delta.base.identity:
            raise ConfigError(
                f"{location}: a delta of {delta.base.url}, which has changed: got identity {got[:12]}, expected"
                f" {delta.base.identity[:12]}"
            )
        own = read_own(location)
        if wrong := [name for name in delta.taken if name in own or name not in state]:
            raise ConfigError(
                f"{location}: {DELTA} takes {wrong[0]} from the base, but {WEIGHTS} has it or the base lacks it"
            )
        state = own | {name: state[name] for name in delta.taken}
        try:
            state = merge_lora(state)
        except ConfigError as error:
            raise ConfigError(f"{location}: {WEIGHTS}: {error}") from None
    return state
