"""A run's checkpoints: folders of safetensors and one JSON that is written last, at a path or on S3.

    <run>/checkpoints/step-00001200/  model.safetensors  average.safetensors  optimizer.safetensors  checkpoint.json

Only a folder with its checkpoint.json exists. Nothing random is kept: every draw is a function of (seed, step).
"""

import json
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitray import storage
from vitray.errors import ConfigError

LAST, FORMAT = "checkpoint.json", 1
# Seconds between tries, while training goes on: storage that is away for some minutes costs a checkpoint, not the run.
PAUSES = (1, 5, 20, 60, 120)

# {part: {name: tensor}}, for example model, average and optimizer.
Parts = dict[str, dict[str, Tensor]]


class Checkpoint(NamedTuple):
    """What one folder holds."""

    step: int
    parts: Parts
    state: dict[str, Any]


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """An optimizer's state dict as tensors by name, and the plain rest."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                rest.setdefault(str(index), {})[name] = value
    return tensors, {"rest": rest, "groups": state["param_groups"]}


def join_state(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state dict again."""
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in rest["rest"].items()}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    return {"state": state, "param_groups": rest["groups"]}


def folder_of(home: str, step: int) -> str:
    """Where the checkpoint of a step lies."""
    return storage.join(home, "checkpoints", f"step-{step:08d}")


def complete_steps(home: str) -> list[int]:
    """The steps that have a whole checkpoint, ascending."""
    found = storage.list_files(storage.join(home, "checkpoints"))
    folders = [name.partition("/")[0] for name in found if name.endswith(f"/{LAST}")]
    return sorted(int(folder.removeprefix("step-")) for folder in folders)


def write_checkpoint(home: str, checkpoint: Checkpoint) -> None:
    """Write a folder, its checkpoint.json last; what an interrupted writer left there is written over."""
    folder = folder_of(home, checkpoint.step)
    if storage.exists(last := storage.join(folder, LAST)):
        storage.remove(last)  # from here on the folder is not whole
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="vitray-") as aside:
        for part, tensors in checkpoint.parts.items():
            path = Path(aside) / f"{part}.safetensors"
            save_file(tensors, path)
            sizes[path.name] = path.stat().st_size
            storage.upload(path, storage.join(folder, path.name))
    content = {"format": FORMAT, "step": checkpoint.step, "files": sizes, "state": checkpoint.state}
    storage.write_bytes(storage.join(folder, LAST), json.dumps(content).encode())


def read_checkpoint(home: str, step: int) -> Checkpoint:
    """The checkpoint of a step."""
    folder = folder_of(home, step)
    content = json.loads(storage.read_bytes(storage.join(folder, LAST)))
    if content.get("format") != FORMAT:
        raise ConfigError(f"{folder}/{LAST}: format: got {content.get('format')!r}, wanted {FORMAT}")
    parts: Parts = {}
    for name, size in content["files"].items():
        with storage.local_copy(storage.join(folder, name)) as path:
            if path.stat().st_size != size:
                raise ConfigError(f"{folder}/{name}: got {path.stat().st_size} bytes, wanted {size}")
            try:
                tensors = load_file(path)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{folder}/{name}: cannot be read: {error}") from None
        # Copied: the file that a mapped tensor shows may be removed while it is still looked at.
        parts[name.removesuffix(".safetensors")] = {key: tensor.clone() for key, tensor in tensors.items()}
    return Checkpoint(step, parts, content["state"])


def prune(home: str, keep: int, spared: Collection[int]) -> None:
    """Remove all but the latest `keep` and the spared; the JSON goes first, so that no half folder looks whole."""
    steps = complete_steps(home)
    for step in steps[:-keep]:
        if step not in spared:
            storage.remove(storage.join(folder_of(home, step), LAST))
            storage.remove(folder_of(home, step))


class Saver:
    """Writes checkpoints in a thread, one at a time and in order, while training goes on."""

    def __init__(
        self,
        home: str,
        keep: int,
        saved: Callable[[int], None] = lambda _: None,
        delayed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`saved` hears of each step whose checkpoint is whole, `delayed` why one is not yet."""
        self.home, self.keep, self.saved, self.delayed = home, keep, saved, delayed
        self._error: BaseException | None = None
        # One waits while one is written: a third would only show that the storage cannot keep up.
        self._waiting: queue.Queue[tuple[Checkpoint, Collection[int]] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._write, name="checkpoints", daemon=True)
        self._thread.start()

    def save(self, checkpoint: Checkpoint, spared: Collection[int] = ()) -> None:
        """Copy the tensors to host memory now, and write them soon; the steps of `spared` stay whatever follows."""
        self._raise()
        parts = {
            part: {name: _host_copy(tensor) for name, tensor in tensors.items()}
            for part, tensors in checkpoint.parts.items()
        }
        self._waiting.put((checkpoint._replace(parts=parts), spared))

    def close(self) -> None:
        """Wait until everything is written."""
        self._waiting.put(None)
        self._thread.join()
        self._raise()

    def _write(self) -> None:
        while (found := self._waiting.get()) is not None:
            checkpoint, spared = found
            if self._error is not None:
                continue
            try:
                self._write_patiently(checkpoint)
                prune(self.home, self.keep, spared)
                self.saved(checkpoint.step)
            except BaseException as error:  # told to the trainer at its next save
                self._error = error

    def _write_patiently(self, checkpoint: Checkpoint) -> None:
        for pause in PAUSES:
            try:
                return write_checkpoint(self.home, checkpoint)
            except (ConfigError, SafetensorError, OSError) as error:  # the latter of a full disk of this node
                self.delayed(f"the checkpoint of step {checkpoint.step:,} is tried again in {pause} s: {error}")
                time.sleep(pause)
        return write_checkpoint(self.home, checkpoint)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _host_copy(tensor: Tensor) -> Tensor:
    """The values as they are now: the original is trained on."""
    return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor.detach())
