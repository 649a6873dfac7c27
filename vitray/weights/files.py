"""Weights files of other libraries: tensors by name, and the description of the network beside them."""

import argparse
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitray.errors import ConfigError, cut_middle
from vitray.system import storage

State = dict[str, Tensor]
# Training scripts save {"model": ...}; flax prefixes names with the path of the tree.
WRAPPERS = ("model", "state_dict")
# Weights hardly compress, but a zip file of a megabyte may expand to a gigabyte of zeros.
MOST_EXPANSION, SMALL = 20, 2**26
PREFIXES = ("opt/target/", "params/img/", "params/", "module.")


class WeightsFile(NamedTuple):
    """The content of a weights file."""

    tensors: State
    config: dict[str, Any]
    """The config.json of its folder; empty without one."""
    processor: dict[str, Any]
    """The preprocessor_config.json of its folder, as Hugging Face writes it; empty without one."""
    network: str | None
    """The library's name of the network, from config.json or the arguments of the training script."""


def read_weights(url: str) -> WeightsFile:
    """Return the tensors of a weights file, and its description; reading cannot run code."""
    if storage.exists(storage.join(url, "model.safetensors")):  # a folder, as Hugging Face writes it
        url = storage.join(url, "model.safetensors")
    with storage.local_copy(url) as path:
        try:
            if is_zipfile(path):  # of numpy or torch
                _check_expansion(path)
            content = _READERS.get(path.suffix, _read_pickle)(path)
        except (SafetensorError, BadZipFile, OSError, ValueError, RuntimeError, EOFError, MemoryError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{url}: not a {path.suffix or 'known'} weights file: {cut_middle(text, 400)}") from None
    config, processor = (_read_beside(url, name) for name in ("config.json", "preprocessor_config.json"))
    names = (config.get("architecture"), content.get("arch"), getattr(content.get("args"), "model", None))
    # timm's config.json has the first; checkpoints of timm, DeiT, MAE and torchvision have the others.
    network = next((name for name in names if isinstance(name, str)), None)
    for wrapper in WRAPPERS:
        if isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    named = {key: value for key, value in content.items() if isinstance(key, str)}
    prefix = next((prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in named)), "")
    state = {key.removeprefix(prefix): value for key, value in named.items() if isinstance(value, Tensor)}
    if not state:
        raise ConfigError(f"{url}: holds no tensors by name")
    return WeightsFile(as_float32(state, url), config, processor, network)


def as_float32(state: State, url: str) -> State:
    """Return the tensors of a file with all floats as float32, which every network computes with.

    Tensors with values that are not finite then are refused by name.
    """
    converted, wrong = {}, []
    for name, tensor in state.items():
        _check_storage(name, tensor, url)
        if tensor.is_floating_point():
            try:
                tensor = tensor.float()
                # Twenty times as fast as a look at each value.
                is_finite = not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())
            except RuntimeError:  # a packed, sparse or empty storage
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ConfigError(f"{url}: {name} is {kind}, which cannot be read as float32") from None
            if not is_finite:
                wrong.append(f"{name} ({int((~tensor.isfinite()).sum()):,} of {tensor.numel():,} values)")
        converted[name] = tensor
    if wrong:
        values = f"values that are not finite as float32 in {few(sorted(wrong))}"
        raise ConfigError(f"{url}: {values}; expected the weights of a finished training")
    return converted


def _check_storage(name: str, tensor: Tensor, url: str) -> None:
    """Refuse a tensor that shows few stored values many times."""
    if tensor.layout == torch.strided:
        stored, shown = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
        if shown > max(SMALL, MOST_EXPANSION * stored):
            raise ConfigError(
                f"{url}: {name} shows {stored:,} bytes as {shown:,}; expected a tensor that is stored whole"
            )


def _check_expansion(path: Path) -> None:
    with ZipFile(path) as archive:
        expanded, size = sum(member.file_size for member in archive.infolist()), path.stat().st_size
    if expanded > max(SMALL, MOST_EXPANSION * size):
        raise ValueError(
            f"{size:,} bytes would expand to {expanded:,}, expected at most {MOST_EXPANSION} times as many"
        )


def _read_beside(url: str, description: str) -> dict[str, Any]:
    """The content of a JSON file beside a model.safetensors; empty without one, and for weights of another name."""
    folder, _, name = url.rpartition("/")
    place = storage.join(folder or ".", description)
    if name != "model.safetensors" or not storage.exists(place):
        return {}
    config = storage.read_json(place)
    if not isinstance(config, dict):
        raise ConfigError(f"{place}: holds a {type(config).__name__}, expected settings by name")
    return config


def _read_pickle(path: Path) -> dict[str, Any]:
    # The training scripts of DeiT, MAE, timm and torchvision save their arguments, a Namespace, which only holds
    # attributes.
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise ValueError(
                f"it holds {_unsafe_names(path)}, which only running code could load; save its tensors alone"
            ) from None
        except Exception as error:  # unreadable bytes raise almost anything
            with path.open("rb") as file:
                is_usual = file.read(2) in (b"PK", b"\x80\x02")
            if not is_usual:
                raise ValueError("its bytes are neither safetensors nor of torch.save") from None
            raise ValueError(f"torch.load cannot read it: {type(error).__name__}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
    return content


def _unsafe_names(path: Path) -> str:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # the format before torch 1.6, or unreadable bytes
        names = []
    return ", ".join(sorted(names)) or "more than tensors"


def _read_npz(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array, not arrays by name")
        return {key: torch.from_numpy(np.asarray(arrays[key], dtype=np.float32)) for key in arrays.files}


_READERS = {".safetensors": load_file, ".npz": _read_npz}


def few(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first six names, and the number of the others."""
    return separator.join(names[:6]) + (f"{separator}and {len(names) - 6} more" if len(names) > 6 else "")
