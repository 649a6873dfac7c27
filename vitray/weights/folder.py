"""Model folders: model.safetensors + run.yaml + classes.json, local or on S3. No pickle, so no code.

A folder with a delta.json is a delta, readable only with its base.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from vitray.config import Model, Run, load_run
from vitray.config.parsing import short
from vitray.config.sections import LONGEST_TEXT
from vitray.errors import ConfigError, odd_character
from vitray.models.adapters import merge_lora
from vitray.models.network import AnyNetwork, build_network
from vitray.models.stems import resize_kernel
from vitray.models.tokenizer import VisualTokenizer
from vitray.models.vit import ViT
from vitray.system import storage
from vitray.system.lease import own_folder
from vitray.system.storage import scratch_folder
from vitray.weights.addresses import resolve_uri
from vitray.weights.convert import import_weights
from vitray.weights.delta import (
    CLASSES,
    DELTA,
    RUN,
    WEIGHTS,
    Delta,
    Link,
    compose,
    identity_of,
    make_delta,
    read_chain,
    read_delta,
    read_own,
    read_state,
    stored_types,
)
from vitray.weights.family import Family, Member
from vitray.weights.files import State, few


class LoadedModel(NamedTuple):
    """The content of a model folder."""

    run: Run
    vit: AnyNetwork
    classes: list[str] | None


class SavedModel(NamedTuple):
    """The size of a saved model folder."""

    bytes: int
    """Bytes of the written tensors."""
    whole: int
    """Bytes of all tensors of the network."""

    @property
    def share(self) -> float:
        """The written share of the network: 1 for a whole model, less for a delta."""
        return self.bytes / self.whole


def save_model(
    url: str, run: Run, vit: AnyNetwork, classes: Sequence[str] | None = None, relative_to: str | None = None
) -> SavedModel:
    """Write a model folder and return its size; `run.yaml` is written last and marks a complete model.

    With `relative_to`, the address of a base network, the folder becomes a delta and keeps LoRA factors separate. In a
    whole model they are merged.
    """
    if classes is not None and len(classes) != run.model.num_classes:
        raise ConfigError(f"{url}: got {len(classes)} class names for {run.model.num_classes} classes")
    state = vit.state_dict() if relative_to else merge_lora(vit.state_dict())
    delta = None if relative_to is None else make_delta(url, state, relative_to)
    return _write(url, run.replace({"model": vit.model.model_dump(mode="json")}), state, classes, delta)


def save_tokenizer(url: str, tokenizer: VisualTokenizer) -> SavedModel:
    """Write the model folder of a tokenizer and return its size; the tensor names are those of its task."""
    return _write(url, tokenizer.run, tokenizer.state_dict(), None, None)


def _write(url: str, run: Run, state: State, classes: Sequence[str] | None, delta: Delta | None) -> SavedModel:
    _check_new(url)
    own = {name: tensor for name, tensor in state.items() if delta is None or name not in delta.taken}
    with own_folder(url, "model", other="folder"):  # two writers would mix the files of two models
        _check_new(url)
        storage.remove_unfinished(url)
        with scratch_folder() as folder:
            save_file({name: tensor.contiguous() for name, tensor in own.items()}, folder / WEIGHTS)
            storage.upload(folder / WEIGHTS, storage.join(url, WEIGHTS))
        if delta is not None:
            storage.write_bytes(storage.join(url, DELTA), f"{delta.model_dump_json(indent=1)}\n".encode())
        elif storage.exists(storage.join(url, DELTA)):
            storage.remove(storage.join(url, DELTA))  # left by an interrupted write of a delta
        storage.write_bytes(storage.join(url, CLASSES), json.dumps(None if classes is None else list(classes)).encode())
        storage.write_bytes(storage.join(url, RUN), run.to_yaml().encode())
    return SavedModel(sum(tensor.nbytes for tensor in own.values()), sum(tensor.nbytes for tensor in state.values()))


def _check_new(url: str) -> None:
    if storage.exists(storage.join(url, RUN)):
        raise ConfigError(f"{url}: a model is there already; expected a new folder")


def load_model(url: str) -> LoadedModel:
    """Return the content of a model folder, with the network in evaluation mode."""
    location = _folder_at(url)
    state = read_state(location)
    run = _network_run(location, state)
    classes = _read_classes(storage.join(location, CLASSES), run)
    vit = build_network(run.model)
    vit.load_state_dict(state, assign=True)  # without a copy
    return LoadedModel(run, vit.eval(), classes)


def load_tokenizer(url: str) -> VisualTokenizer:
    """Return the tokenizer of a model folder, frozen and in evaluation mode."""
    location = _folder_at(url)
    run = _run_at(location)
    if run.task.traits.saves != "tokenizer":
        raise ConfigError(f"{url}: got the network of a run of task {run.task.kind}, expected that of task tokenizer")
    tokenizer, state = VisualTokenizer(run), read_state(location)
    _check_fit(tokenizer, location, run, state)
    tokenizer.load_state_dict(state, assign=True)
    return tokenizer.eval().requires_grad_(False)


def load_deltas(base_url: str, urls: Mapping[str, str], device: torch.device | str = "cpu") -> Family:
    """Return a base network's deltas by name, with the base's tensors in memory once, for batches that mix them.

    The base may be among them.
    """
    base = read_state(base_url)
    identity = identity_of(base)
    members = {name: read_member(url, base_url, base, identity) for name, url in urls.items()}
    return Family(base, members, device)


def read_member(url: str, base_url: str, base: State, identity: str) -> Member:
    """Return the network at `url`: the base, whose tensors and hash are `base` and `identity`, or a delta of it."""
    location, state = _folder_at(url), base
    if location != resolve_uri(base_url):
        state = compose(_chain_to(url, base_url, identity), base, identity)
    run = _network_run(location, state)
    return Member(run, _read_classes(storage.join(location, CLASSES), run), state, base)


def check_member(url: str, base_url: str, identity: str) -> Run:
    """Return the run at `url`, without reading tensors; refuse any network but the base and its deltas."""
    location = _folder_at(url)
    if location != resolve_uri(base_url):
        _chain_to(url, base_url, identity)
    return _run_at(location)


def _chain_to(url: str, base_url: str, identity: str) -> list[Link]:
    """The chain of deltas down to the base."""
    links, root = read_chain(_folder_at(url), until=identity)
    if not links or links[-1].delta.base.identity != identity:
        bases = [f"{link.delta.base.url} ({link.delta.base.identity[:12]})" for link in links]
        got = f"a delta of {', and that of '.join(bases)}" if bases else f"whole ({root})"
        raise ConfigError(f"{url}: it is {got}; expected a delta of {base_url} ({identity[:12]})")
    return links


def flatten_model(url: str, target: str) -> SavedModel:
    """Write a delta as a whole model folder, independent of its base, and return the folder's size."""
    run, vit, classes = load_model(url)
    return save_model(target, run, vit, classes)


def open_weights(
    url: str, settings: Mapping[str, Any] | None = None, *, fallback: Mapping[str, Any] | None = None
) -> LoadedModel:
    """Return the network at an address: a model folder, or a weights file of another library.

    `settings` completes a weights file. `fallback` gives settings that count only where they would be missing.
    """
    location = resolve_uri(url)
    if storage.exists(storage.join(location, RUN)):
        if storage.exists(storage.join(location, "model", RUN)):
            raise ConfigError(f"{url}: the folder of a run; its network is {storage.join(url, 'model')}")
        if settings:
            raise ConfigError(f"{url}: a model folder has its own settings; got {', '.join(settings)}, expected none")
        return load_model(location)
    _refuse_checkpoint(url, location)
    run, vit = import_weights(location, settings=settings, fallback=fallback)
    return LoadedModel(run, vit, None)


def describe_weights(url: str) -> tuple[str, dict[str, Any]]:
    """Return what a model folder or a weights file holds, and its base if it is a delta: as a line, and by name."""
    place = resolve_uri(url)
    delta, (model, network) = read_delta(place), _content_of(place)
    taken, base, identity = ((), None, None) if delta is None else (delta.taken, delta.base.url, delta.base.identity)
    kept = len(tensors := network if delta is None else read_own(place))  # of LoRA, the factors
    own, whole = (sum(tensor.nbytes for tensor in each.values()) for each in (tensors, network))
    kind = "whole" if identity is None else f"a delta of {base} ({identity[:12]})"
    text = f"{url}: {model}, {kind}: {kept} of {kept + len(taken)} tensors, {own:,} bytes, {own / whole:.1%}"
    types = stored_types(place) if has_settings(place) else None
    if types and {each for each in types if "float" in each} != {"float32"}:
        text += f"; stored as {', '.join(types)}, read as float32"
    facts = {"url": url, "model": model, "kind": "whole" if delta is None else "delta", "types": types}
    facts |= {"base": base, "base_identity": identity, "taken": len(taken), "kept": kept}
    return text, facts | {"bytes": own, "whole": whole, "share": own / whole}


def _content_of(location: str) -> tuple[str, State]:
    """Return the name and all tensors of a network or tokenizer."""
    if has_settings(location) and _run_at(location).task.traits.saves == "tokenizer":
        tokenizer = load_tokenizer(location)
        return f"tokenizer of {tokenizer.run.model.name}", tokenizer.state_dict()
    loaded = open_weights(location)
    return loaded.run.model.name, loaded.vit.state_dict()


def has_settings(url: str) -> bool:
    """Whether an address is that of a model folder, not of a weights file."""
    return storage.exists(storage.join(resolve_uri(url), RUN))


def _refuse_checkpoint(url: str, location: str) -> None:
    if storage.exists(storage.join(location, "checkpoint.json")):
        command = shlex.join(["vitray", "weights", "checkpoint", location, "TARGET"])
        raise ConfigError(f"{url}: a checkpoint, expected a model folder; `{command}` writes one")


def _folder_at(url: str) -> str:
    location = resolve_uri(url)
    if not storage.exists(storage.join(location, RUN)):
        _refuse_checkpoint(url, location)
        raise ConfigError(f"{url}: no {RUN}, so no model folder; expected one written by vitray")
    return location


def _network_run(location: str, state: State) -> Run:
    """The run of a folder; refuse a tokenizer, and tensors that do not fit."""
    run = _run_at(location)
    if run.task.traits.saves == "tokenizer":
        raise ConfigError(f"{location}: got a tokenizer, expected the network of a run of another task")
    with torch.device("meta"):  # initial values of a large network take a minute
        _check_fit(build_network(run.model), location, run, state)
    return run


def _read_classes(url: str, run: Run) -> list[str] | None:
    """Return the class names of a model folder, as many as classes, or None."""
    classes = storage.read_json(url)
    names = classes if isinstance(classes, list) else []
    if wrong := next((name for name in names if isinstance(name, str) and len(name) > LONGEST_TEXT), None):
        raise ConfigError(
            f"{url}: class name {short(wrong)}: {len(wrong):,} characters, expected at most {LONGEST_TEXT}"
        )
    is_list = isinstance(classes, list) and all(isinstance(name, str) and not odd_character(name) for name in classes)
    if classes is None or (is_list and len(classes) == run.model.num_classes):
        return classes
    raise ConfigError(f"{url}: got {short(classes)}, expected null or a list of {run.model.num_classes} names")


def _run_at(location: str) -> Run:
    with storage.local_copy(storage.join(location, RUN)) as path:
        return load_run(path)


def _check_fit(network: nn.Module, url: str, run: Run, state: State) -> None:
    """Refuse tensors that are missing, left over or misshapen, and those of another type, such as integers."""
    wanted = network.state_dict()
    wrong = [f"{key} is missing" for key in wanted.keys() - state.keys()]
    wrong += [f"{key} has no place" for key in state.keys() - wanted.keys()]
    for key in wanted.keys() & state.keys():
        got, expected = state[key], wanted[key]
        if got.shape != expected.shape:
            wrong.append(f"{key} is {tuple(got.shape)}, expected {tuple(expected.shape)}")
        if got.dtype != expected.dtype:
            wrong.append(f"{key} is {got.dtype}, expected {expected.dtype}")
    if wrong:
        raise ConfigError(f"{url}: {WEIGHTS} does not fit {run.model.name} of {RUN}: {few(sorted(wrong), '; ')}")


# ---- another patch size (FlexiViT) -----------------------------------------------------------------------------------


def repatch_model(url: str, patch: int, target: str, image_size: int | None = None) -> SavedModel:
    """Write a network with patches of another size as a model folder, and return the folder's size."""
    run, vit, classes = repatched(open_weights(url), patch, url, image_size)
    return save_model(target, run, vit, classes)


def repatched(loaded: LoadedModel, patch: int, url: str, image_size: int | None = None) -> LoadedModel:
    """Return a network with patches of another size, at its own image size or a given one."""
    run, old, classes = loaded
    run.model.require_vit(f"{url}: another patch size")
    assert isinstance(old, ViT)
    run = run.replace({"model": _model_at(old.model, patch, url, image_size).model_dump(mode="json")})
    new = ViT(run.model)
    state = old.state_dict() | old.positions_at(new.model.grid)
    kernel = "stem.proj.0.weight"
    new.load_state_dict(state | {kernel: resize_kernel(state[kernel], patch)})
    return LoadedModel(run, new.eval(), classes)


def _model_at(model: Model, patch: int, url: str, image_size: int | None) -> Model:
    if not model.shape.traits.is_resizable:
        raise ConfigError(
            f"{url}: got {model.name}, expected a linear stem: only its kernel is resized to other patches"
        )
    if model.positions.kind == "relative":
        raise ConfigError(f"{url}: relative positions are those of one grid; expected other positions")
    size = model.image_shape if image_size is None else (image_size, image_size)
    if patch < 1 or any(side % patch or not side for side in size):
        sides = " x ".join(map(str, size))
        below = max(size[0] // max(patch, 1), 1) * max(patch, 1)
        raise ConfigError(
            f"{url}: got patches of {patch} for images of {sides} px, expected a size that divides them, or"
            f" --image-size {below} or {below + max(patch, 1)}"
        )
    name = str(replace(model.shape, patch=patch))
    side = size[0] if size[0] == size[1] else size
    return Model.model_validate({**model.model_dump(), "name": name, "image_size": side, "patches": ()})
