"""Checkpoints: they are read back bit by bit, and an incomplete one is never read."""

import json
import threading
import time
import weakref

import pytest
import torch
from safetensors import SafetensorError

from vitray.errors import ConfigError
from vitray.system import storage
from vitray.training import checkpoints
from vitray.training.checkpoints import META, Checkpoint, Saver


def new_checkpoint(step, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(3, 4, generator=generator), "b": torch.arange(5), "empty": torch.empty(0)}
    # A transposed view shares memory with another tensor; a checkpoint stores values.
    return Checkpoint(step, {"model": weights | {"turned": weights["a"].T}}, {"step": step, "losses": [0.1, 1 / 3]})


@pytest.fixture(params=["path", "s3"])
def run_dir(request, tmp_path):
    if request.param == "path":
        return str(tmp_path / "run")
    request.getfixturevalue("s3_server")
    return f"s3://bucket/{tmp_path.name}"


def write(run_dir, checkpoint):
    saver = Saver(run_dir, keep=9)
    saver.save(checkpoint)
    saver.close()


def test_a_checkpoint_is_read_back_bit_by_bit(run_dir):
    write(run_dir, new_checkpoint(7))
    loaded = checkpoints.read_checkpoint(run_dir, 7)
    assert loaded.state == new_checkpoint(7).state
    for name, tensor in new_checkpoint(7).parts["model"].items():
        assert torch.equal(loaded.parts["model"][name], tensor)
        assert loaded.parts["model"][name].dtype == tensor.dtype


def test_a_folder_without_its_json_is_incomplete(run_dir):
    write(run_dir, new_checkpoint(3))
    write(run_dir, new_checkpoint(12))
    storage.remove(storage.join(checkpoints.folder_of(run_dir, 12), META))
    assert checkpoints.complete_steps(run_dir) == [3]
    write(run_dir, new_checkpoint(12, seed=1))
    assert checkpoints.complete_steps(run_dir) == [3, 12]
    assert torch.equal(
        checkpoints.read_checkpoint(run_dir, 12).parts["model"]["a"], new_checkpoint(12, seed=1).parts["model"]["a"]
    )


def test_a_writer_that_dies_while_overwriting_leaves_no_checkpoint(tmp_path, monkeypatch):
    run_dir = str(tmp_path)
    write(run_dir, new_checkpoint(3))
    write(run_dir, new_checkpoint(12))

    def fail_upload(*_):
        raise RuntimeError("power cut")

    monkeypatch.setattr(storage, "upload", fail_upload)
    with pytest.raises(RuntimeError, match="power cut"):
        checkpoints.write_checkpoint(run_dir, Checkpoint(12, {"model": {"a": torch.ones(2)}}, {}))
    assert checkpoints.complete_steps(run_dir) == [3]


def test_pruning_keeps_the_latest_and_the_protected_checkpoints(run_dir):
    saver = Saver(run_dir, keep=2)
    for step in (10, 20, 30, 40, 50):
        saver.save(new_checkpoint(step), protected={20})
    saver.close()
    assert checkpoints.complete_steps(run_dir) == [20, 40, 50]
    assert all(name.startswith(("step-00000020", "step-0000004", "step-0000005")) for name in listed(run_dir))


def test_a_checkpoint_is_saved_where_the_older_ones_cannot_be_pruned(run_dir, monkeypatch):
    prune, saved, delays = checkpoints.prune, [], []

    def away_once(*arguments):
        if not delays:
            raise ConfigError("the storage is away")
        prune(*arguments)

    monkeypatch.setattr(checkpoints, "prune", away_once)
    saver = Saver(run_dir, keep=1, on_saved=saved.append, on_delay=delays.append)
    for step in (1, 2, 3):
        saver.save(new_checkpoint(step))
    saver.close()
    assert (saved, saver.latest) == ([1, 2, 3], 3)
    assert delays == ["checkpoints before step 1 stay until the next one: the storage is away"]
    assert checkpoints.complete_steps(run_dir) == [3]


def listed(run_dir):
    return storage.list_files(storage.join(run_dir, "checkpoints"))


def test_later_training_does_not_change_a_checkpoint(tmp_path, monkeypatch):
    release, upload = threading.Event(), storage.upload

    def slow_upload(*args):
        release.wait()
        upload(*args)

    monkeypatch.setattr(storage, "upload", slow_upload)
    weights = torch.ones(4)
    saver = Saver(str(tmp_path), keep=1)
    saver.save(Checkpoint(1, {"model": {"w": weights}}, {}))
    weights.add_(1)
    release.set()
    saver.close()
    assert torch.equal(checkpoints.read_checkpoint(str(tmp_path), 1).parts["model"]["w"], torch.ones(4))


def test_a_third_checkpoint_is_copied_when_there_is_memory_for_it(tmp_path, monkeypatch):
    release, upload = threading.Event(), storage.upload

    def slow(*args):
        release.wait()
        upload(*args)

    monkeypatch.setattr(storage, "upload", slow)
    weights = torch.ones(4)
    saver = Saver(str(tmp_path), keep=9)
    for step in (1, 2):
        saver.save(Checkpoint(step, {"model": {"w": weights}}, {}))
    third = threading.Thread(target=saver.save, args=(Checkpoint(3, {"model": {"w": weights}}, {}),))
    third.start()
    third.join(0.5)
    assert third.is_alive()
    weights.add_(1)  # training waits in `save`, so only a test can do this
    release.set()
    third.join()
    saver.close()
    saved = [checkpoints.read_checkpoint(str(tmp_path), step).parts["model"]["w"] for step in (1, 2, 3)]
    assert [tensor.tolist() for tensor in saved] == [[1] * 4, [1] * 4, [2] * 4]


def test_the_memory_of_a_written_checkpoint_is_freed(tmp_path, monkeypatch):
    copies, save_file = [], checkpoints.save_file

    def save_and_remember(tensors, path):
        copies.extend(weakref.ref(tensor) for tensor in tensors.values())
        save_file(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", save_and_remember)
    saver = Saver(str(tmp_path), keep=1)
    saver.save(new_checkpoint(1))
    for _ in range(3000):
        if copies and not any(copy() is not None for copy in copies):
            break
        time.sleep(0.01)
    assert len(copies) == len(new_checkpoint(1).parts["model"])
    assert not any(copy() is not None for copy in copies)
    saver.close()


def test_the_writer_and_not_training_waits_for_the_copies_of_a_gpu(tmp_path, monkeypatch):
    continued = threading.Event()

    class Event:
        def __init__(self, copy):
            self.copy = copy

        def synchronize(self):  # as a GPU would: the values arrive after `save` has returned
            assert continued.wait(60)
            self.copy.fill_(7)

    def copy_later(checkpoint):
        return checkpoints.HostCopy(checkpoint, [Event(checkpoint.parts["model"]["w"])])

    monkeypatch.setattr(checkpoints, "copy_to_host", copy_later)
    saver = Saver(str(tmp_path), keep=9)
    saver.save(Checkpoint(1, {"model": {"w": torch.zeros(3)}}, {}))
    continued.set()
    saver.close()
    assert checkpoints.read_checkpoint(str(tmp_path), 1).parts["model"]["w"].tolist() == [7] * 3


@pytest.mark.gpu
def test_a_save_does_not_wait_for_the_gpu_and_later_training_does_not_change_it(tmp_path):
    square = torch.randn(4096, 4096, device="cuda")
    weights = torch.arange(12.0, device="cuda").view(3, 4)
    tensors = {"w": weights, "turned": weights.T, "half": weights.half(), "host": torch.ones(3)}
    wanted = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    saver = Saver(str(tmp_path), keep=9)
    for step in (1, 2, 3):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                square = (square @ square).tanh()
            saver.save(Checkpoint(step, {"model": tensors}, {}))
            for tensor in tensors.values():
                tensor.add_(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for tensor in tensors.values():
            tensor.sub_(1)
    saver.close()
    for step in (1, 2, 3):
        saved = checkpoints.read_checkpoint(str(tmp_path), step).parts["model"]
        for name, tensor in wanted.items():
            assert torch.equal(saved[name], tensor), name


def test_a_machine_without_a_gpu_locks_no_memory():
    assert checkpoints.page_lock([torch.zeros(3)]) is None


@pytest.mark.gpu
def test_the_first_checkpoint_finds_its_memory_locked():
    tensors = {f"w{size}": torch.ones(size, 100_000, device="cuda") for size in (3, 50, 7)}
    thread = checkpoints.page_lock(tensors.values())
    assert thread is not None
    thread.join()
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    checkpoints.to_host(tensors)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before


def test_a_save_is_retried_until_storage_is_back(tmp_path, monkeypatch):
    upload, failures = storage.upload, iter([True, True, False])

    def fail_twice(*args):
        if next(failures, False):
            raise ConfigError("the storage is away")
        upload(*args)

    monkeypatch.setattr(storage, "upload", fail_twice)
    monkeypatch.setattr(checkpoints, "RETRY_PAUSES", (0.01, 0.01))
    delays: list[str] = []
    saver = Saver(str(tmp_path), keep=9, on_delay=delays.append)
    saver.save(new_checkpoint(4))
    saver.close()
    assert checkpoints.complete_steps(str(tmp_path)) == [4]
    assert delays == ["the checkpoint of step 4 is tried again in 0.01 s: the storage is away"] * 2


def test_a_permanent_storage_error_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "RETRY_PAUSES", (0.01,))
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    saver = Saver(str(tmp_path), keep=1)
    saver.save(new_checkpoint(1))
    with pytest.raises(ConfigError, match="step-00000001"):
        saver.close()


@pytest.mark.parametrize("damage", ["short", "earlier format"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    run_dir = str(tmp_path)
    write(run_dir, new_checkpoint(5))
    folder = tmp_path / "checkpoints" / "step-00000005"
    if damage == "short":
        (folder / "model.safetensors").write_bytes(b"x")
    else:
        content = json.loads((folder / META).read_text())
        (folder / META).write_text(json.dumps(content | {"format": 1}))
    with pytest.raises(ConfigError, match="step-00000005"):
        checkpoints.read_checkpoint(run_dir, 5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_resumed_optimizer_continues_bit_by_bit(tmp_path, kind):
    def train(weights, optimizer, steps):
        for step in range(steps):
            weights.grad = torch.sin(weights.detach() * (step + 1))
            optimizer.step()

    one, other = (torch.nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    first, second = (kind([weights], lr=0.1, **extra) for weights in (one, other))
    train(one, first, 3)
    tensors, rest = checkpoints.split_state(first.state_dict())
    write(str(tmp_path), Checkpoint(3, {"optimizer": tensors, "model": {"w": one}}, json.loads(json.dumps(rest))))
    loaded = checkpoints.read_checkpoint(str(tmp_path), 3)
    with torch.no_grad():
        other.copy_(loaded.parts["model"]["w"])
    second.load_state_dict(checkpoints.join_state(loaded.parts["optimizer"], loaded.state))
    train(one, first, 3)
    train(other, second, 3)
    assert torch.equal(one, other)


def test_a_save_is_retried_while_the_local_disk_is_full(tmp_path, monkeypatch):
    original, full = checkpoints.save_file, [True]

    def save_file(tensors, path):
        if full:
            full.clear()
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        original(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", save_file)
    monkeypatch.setattr(checkpoints, "RETRY_PAUSES", (0.01,))
    delays, saved = [], []
    saver = Saver(str(tmp_path), 2, saved.append, delays.append)
    saver.save(new_checkpoint(7))
    saver.close()
    assert saved == [7] == checkpoints.complete_steps(str(tmp_path))
    assert "step 7 is tried again" in delays[0]
    assert "No space left" in delays[0]
