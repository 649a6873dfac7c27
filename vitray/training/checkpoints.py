"""Checkpoints of a run: folders of safetensors with one JSON file, at a path or on S3.

    <run>/checkpoints/step-00001200/  model.safetensors  average.safetensors  optimizer.safetensors  checkpoint.json

The JSON is written last, so a folder without it is incomplete. No random state is stored: every draw is a function of
(seed, step).
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitray.errors import ConfigError
from vitray.system import storage
from vitray.system.storage import scratch_folder

META, FORMAT = "checkpoint.json", 3
# Seconds between tries while training goes on. An outage of some minutes delays a checkpoint; it does not end the run.
RETRY_PAUSES = (1, 5, 20, 60, 120)

# {part: {name: tensor}}, for example model, average and optimizer.
Parts = dict[str, dict[str, Tensor]]


class Checkpoint(NamedTuple):
    """The content of a checkpoint folder."""

    step: int
    parts: Parts
    state: dict[str, Any]


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Split an optimizer's state dict into tensors by name and JSON values."""
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
    """Return the state dict that `split_state` split."""
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in rest["rest"].items()}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    return {"state": state, "param_groups": rest["groups"]}


def folder_of(run_dir: str, step: int) -> str:
    """Return the checkpoint folder of a step."""
    return storage.join(run_dir, "checkpoints", f"step-{step:08d}")


def complete_steps(run_dir: str) -> list[int]:
    """Return the steps with a complete checkpoint, ascending."""
    files = storage.list_files(storage.join(run_dir, "checkpoints"))
    folders = [name.partition("/")[0] for name in files if name.endswith(f"/{META}")]
    return sorted(int(folder.removeprefix("step-")) for folder in folders)


def write_checkpoint(run_dir: str, checkpoint: Checkpoint, check: Callable[[], None] = lambda: None) -> None:
    """Write a checkpoint folder, its JSON last; leftovers of an interrupted writer are overwritten.

    `check` is called before the first write and before the JSON, as an upload may take minutes; it may raise.
    """
    check()
    folder = folder_of(run_dir, checkpoint.step)
    meta = storage.join(folder, META)
    if storage.exists(meta):
        storage.remove(meta)  # marks the folder as incomplete
    sizes: dict[str, int] = {}
    with scratch_folder() as scratch:
        for part, tensors in checkpoint.parts.items():
            path = scratch / f"{part}.safetensors"
            save_file(tensors, path)
            sizes[path.name] = path.stat().st_size
            storage.upload(path, storage.join(folder, path.name))
    content = {"format": FORMAT, "step": checkpoint.step, "files": sizes, "state": checkpoint.state}
    check()
    storage.write_bytes(meta, json.dumps(content).encode())


def read_meta(run_dir: str, step: int) -> dict[str, Any]:
    """Return the JSON of a step's checkpoint."""
    path = storage.join(folder_of(run_dir, step), META)
    content = json.loads(storage.read_bytes(path))
    if content.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: got checkpoint format {content.get('format')!r}, expected {FORMAT}; use the version of vitray"
            " that wrote it, or start a new run"
        )
    return content


def read_checkpoint(run_dir: str, step: int) -> Checkpoint:
    """Return the checkpoint of a step."""
    folder, content = folder_of(run_dir, step), read_meta(run_dir, step)
    parts: Parts = {}
    for name, size in content["files"].items():
        with storage.local_copy(storage.join(folder, name)) as path:
            if path.stat().st_size != size:
                raise ConfigError(f"{folder}/{name}: got {path.stat().st_size} bytes, expected {size}")
            try:
                tensors = load_file(path)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{folder}/{name}: cannot be read: {error}") from None
        # Copied, because the mapped file may be removed while its tensors are in use.
        parts[name.removesuffix(".safetensors")] = {key: tensor.clone() for key, tensor in tensors.items()}
    return Checkpoint(step, parts, content["state"])


def weight_shapes(run_dir: str, step: int) -> dict[str, list[int]]:
    """Return the shapes of the task's weights in a checkpoint, by name."""
    url = storage.join(folder_of(run_dir, step), "model.safetensors")
    with storage.local_copy(url) as path, safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no dict)


def read_latest(run_dir: str, device: torch.device) -> Checkpoint | None:
    """Return the last complete checkpoint, or None; rank 0 reads it and sends it to the device of every worker.

    All workers call this. They raise the error of rank 0: otherwise they would wait for it.
    """
    if not dist.is_initialized():
        return _read_latest(run_dir)
    checkpoint, error = None, None
    if dist.get_rank() == 0:
        try:
            checkpoint = _read_latest(run_dir)
        except Exception as failure:  # raised below, on every worker
            error = failure
    parts = checkpoint.parts if checkpoint else {}
    layout = {part: {name: (each.shape, each.dtype) for name, each in parts[part].items()} for part in parts}
    failed = error and (isinstance(error, ConfigError), f"{error}" or type(error).__name__)
    header: list[Any] = [(checkpoint and checkpoint._replace(parts={}), layout, failed)]
    dist.broadcast_object_list(header, 0)
    checkpoint, layout, failed = header[0]
    if failed:
        is_config, text = failed
        raise (ConfigError if is_config else RuntimeError)(text) from error
    received = {part: _broadcast(parts.pop(part, {}), tensors, device) for part, tensors in layout.items()}
    return checkpoint and checkpoint._replace(parts=received)


def _read_latest(run_dir: str) -> Checkpoint | None:
    steps = complete_steps(run_dir)
    return read_checkpoint(run_dir, steps[-1]) if steps else None


def _broadcast(
    tensors: dict[str, Tensor], layout: dict[str, tuple[torch.Size, torch.dtype]], device: torch.device
) -> dict[str, Tensor]:
    """Return rank 0's tensors on the device of every worker; rank 0 frees those in host memory one by one."""
    received, pending = {}, []
    for name, (shape, dtype) in layout.items():
        tensor = tensors.pop(name).to(device) if tensors else torch.empty(shape, dtype=dtype, device=device)
        received[name] = tensor
        if tensor.numel():
            # As bytes: gloo does not send every type.
            pending.append(dist.broadcast(tensor.view(-1).view(torch.uint8), 0, async_op=True))
    for work in pending:
        work.wait()
    return received


def prune(run_dir: str, keep: int, protected: Collection[int]) -> None:
    """Remove all but the latest `keep` and the protected checkpoints, each JSON first."""
    steps = complete_steps(run_dir)
    for step in steps[:-keep]:
        if step not in protected:
            storage.remove(storage.join(folder_of(run_dir, step), META))
            storage.remove(folder_of(run_dir, step))


class HostCopy(NamedTuple):
    """A checkpoint in host memory, complete after its events."""

    checkpoint: Checkpoint
    events: list[torch.cuda.Event]


def copy_to_host(checkpoint: Checkpoint) -> HostCopy:
    """Start to copy the tensors of a checkpoint, one after another, without waiting for a GPU.

    A GPU copies in the order of its stream, so before any later change of the tensors.
    """
    parts = {
        part: {name: _host_copy(tensor) for name, tensor in tensors.items()}
        for part, tensors in checkpoint.parts.items()
    }
    devices = {tensor.device for tensors in checkpoint.parts.values() for tensor in tensors.values() if tensor.is_cuda}
    # A blocking event puts the waiting thread to sleep; another one would occupy a CPU.
    events = {device: torch.cuda.Event(blocking=True) for device in devices}
    for device, event in events.items():
        event.record(torch.cuda.current_stream(device))
    return HostCopy(checkpoint._replace(parts=parts), list(events.values()))


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in host memory: copies of those on a GPU, which all arrive in one wait."""
    copies = {name: _host_copy(tensor) if tensor.is_cuda else tensor.detach() for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def page_lock(tensors: Iterable[Tensor]) -> threading.Thread | None:
    """Page-lock host memory for copies of the GPU tensors among these, on a thread beside training.

    torch keeps the memory for the first checkpoint, which would otherwise hold up a step while it is locked.
    """
    sizes = [(tensor.shape, tensor.dtype) for tensor in tensors if tensor.is_cuda]
    if not sizes:
        return None

    def lock() -> None:
        _ = [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in sizes]

    thread = threading.Thread(target=lock, name="page-lock", daemon=True)
    thread.start()
    return thread


def _host_copy(tensor: Tensor) -> Tensor:
    # Copies to pinned memory need not be waited for. torch reuses the memory for later checkpoints.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


class Saver:
    """A background thread that writes checkpoints one at a time, in order."""

    def __init__(
        self,
        run_dir: str,
        keep: int,
        on_saved: Callable[[int], None] = lambda _: None,
        on_delay: Callable[[str], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_saved` is called with the step of each complete checkpoint, `on_delay` with the reason of each retry.

        `check` is called before each write; it raises if another process has taken over the folder.
        """
        self._run_dir, self._keep, self._check = run_dir, keep, check
        self._on_saved, self._on_delay = on_saved, on_delay
        self._error: BaseException | None = None
        self.latest: int | None = None
        """The step of the last complete checkpoint."""
        self.is_prepared = False
        # One checkpoint waits while one is written; a third blocks training until storage catches up.
        self._places = threading.Semaphore(2)
        self._waiting: queue.Queue[tuple[HostCopy, Collection[int]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write, name="checkpoints", daemon=True)
        self._thread.start()

    def prepare(self, checkpoint: Checkpoint) -> None:
        """Page-lock host memory for checkpoints like this one, beside training."""
        self.is_prepared = True
        page_lock(tensor for part in checkpoint.parts.values() for tensor in part.values())

    def save(self, checkpoint: Checkpoint, protected: Collection[int] = ()) -> None:
        """Copy the tensors to host memory and write them soon; `protected` steps are not pruned.

        The tensors may change after the call, and the call does not wait for a GPU.
        """
        self._raise()
        self.is_prepared = True
        self._places.acquire()
        self._waiting.put((copy_to_host(checkpoint), protected))

    def abandon(self) -> None:
        """Let the thread end after the checkpoints that wait, without waiting for it."""
        self._waiting.put(None)

    def close(self) -> None:
        """Wait until all checkpoints are written."""
        self._waiting.put(None)
        self._thread.join()
        self._raise()

    def _write(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._error is None:
                self._write_one(*item)
            del item  # its memory is free for the next copy
            self._places.release()

    def _write_one(self, copy: HostCopy, protected: Collection[int]) -> None:
        try:
            for event in copy.events:
                event.synchronize()
            self._write_with_retries(copy.checkpoint)
            self.latest = copy.checkpoint.step
            self._on_saved(self.latest)
            try:
                self._check()
                prune(self._run_dir, self._keep, protected)
            except ConfigError as error:  # the storage is away: the next one prunes what this one leaves
                self._on_delay(f"checkpoints before step {self.latest:,} stay until the next one: {error}")
        except BaseException as error:  # raised by the next save
            self._error = error

    def _write_with_retries(self, checkpoint: Checkpoint) -> None:
        for pause in RETRY_PAUSES:
            try:
                return write_checkpoint(self._run_dir, checkpoint, self._check)
            except (ConfigError, SafetensorError, OSError) as error:  # OSError: this node's disk is full
                self._on_delay(f"the checkpoint of step {checkpoint.step:,} is tried again in {pause} s: {error}")
                time.sleep(pause)
        return write_checkpoint(self._run_dir, checkpoint, self._check)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
