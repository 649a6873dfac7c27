"""Checkpoints: what is written comes back bit by bit, and nothing half-written is ever taken for one."""

import json
import threading

import pytest
import torch
from safetensors import SafetensorError

from vitray import storage
from vitray.errors import ConfigError
from vitray.train import checkpoints
from vitray.train.checkpoints import LAST, Checkpoint, Saver


def made(step, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(3, 4, generator=generator), "b": torch.arange(5), "empty": torch.empty(0)}
    # A transposed view shares memory with another tensor; a checkpoint keeps values, not memory.
    return Checkpoint(step, {"model": weights | {"turned": weights["a"].T}}, {"step": step, "losses": [0.1, 1 / 3]})


@pytest.fixture(params=["path", "s3"])
def home(request, tmp_path):
    if request.param == "path":
        return str(tmp_path / "run")
    request.getfixturevalue("s3_server")
    return f"s3://bucket/{tmp_path.name}"


def write(home, checkpoint):
    saver = Saver(home, keep=9)
    saver.save(checkpoint)
    saver.close()


def test_what_is_written_comes_back(home):
    write(home, made(7))
    back = checkpoints.read_checkpoint(home, 7)
    assert back.state == made(7).state
    for name, tensor in made(7).parts["model"].items():
        assert torch.equal(back.parts["model"][name], tensor)
        assert back.parts["model"][name].dtype == tensor.dtype


def test_a_folder_without_its_json_is_no_checkpoint(home):
    write(home, made(3))
    write(home, made(12))
    storage.remove(storage.join(checkpoints.folder_of(home, 12), LAST))
    assert checkpoints.complete_steps(home) == [3]
    write(home, made(12, seed=1))
    assert checkpoints.complete_steps(home) == [3, 12]
    assert torch.equal(checkpoints.read_checkpoint(home, 12).parts["model"]["a"], made(12, seed=1).parts["model"]["a"])


def test_a_writer_that_dies_over_a_whole_checkpoint_leaves_none(tmp_path, monkeypatch):
    home = str(tmp_path)
    write(home, made(3))
    write(home, made(12))

    def dies(*_):
        raise RuntimeError("power cut")

    monkeypatch.setattr(storage, "upload", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        checkpoints.write_checkpoint(home, Checkpoint(12, {"model": {"a": torch.ones(2)}}, {}))
    assert checkpoints.complete_steps(home) == [3]


def test_the_latest_and_the_best_stay(home):
    saver = Saver(home, keep=2)
    for step in (10, 20, 30, 40, 50):
        saver.save(made(step), spared={20})
    saver.close()
    assert checkpoints.complete_steps(home) == [20, 40, 50]
    assert all(name.startswith(("step-00000020", "step-0000004", "step-0000005")) for name in listed(home))


def listed(home):
    return storage.list_files(storage.join(home, "checkpoints"))


def test_a_checkpoint_holds_the_values_of_its_moment(tmp_path, monkeypatch):
    let_go, upload = threading.Event(), storage.upload

    def slow(*args):
        let_go.wait()
        upload(*args)

    monkeypatch.setattr(storage, "upload", slow)
    weights = torch.ones(4)
    saver = Saver(str(tmp_path), keep=1)
    saver.save(Checkpoint(1, {"model": {"w": weights}}, {}))
    weights.add_(1)
    let_go.set()
    saver.close()
    assert torch.equal(checkpoints.read_checkpoint(str(tmp_path), 1).parts["model"]["w"], torch.ones(4))


def test_a_storage_that_comes_back_is_waited_for(tmp_path, monkeypatch):
    upload, refusals = storage.upload, iter([True, True, False])

    def away_at_first(*args):
        if next(refusals, False):
            raise ConfigError("the storage is away")
        upload(*args)

    monkeypatch.setattr(storage, "upload", away_at_first)
    monkeypatch.setattr(checkpoints, "PAUSES", (0.01, 0.01))
    said: list[str] = []
    saver = Saver(str(tmp_path), keep=9, delayed=said.append)
    saver.save(made(4))
    saver.close()
    assert checkpoints.complete_steps(str(tmp_path)) == [4]
    assert said == ["the checkpoint of step 4 is tried again in 0.01 s: the storage is away"] * 2


def test_what_the_storage_refuses_for_good_reaches_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "PAUSES", (0.01,))
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    saver = Saver(str(tmp_path), keep=1)
    saver.save(made(1))
    with pytest.raises(ConfigError, match="step-00000001"):
        saver.close()


@pytest.mark.parametrize("harm", ["short", "other format"])
def test_a_damaged_checkpoint_is_named(tmp_path, harm):
    home = str(tmp_path)
    write(home, made(5))
    folder = tmp_path / "checkpoints" / "step-00000005"
    if harm == "short":
        (folder / "model.safetensors").write_bytes(b"x")
    else:
        content = json.loads((folder / LAST).read_text())
        (folder / LAST).write_text(json.dumps(content | {"format": 2}))
    with pytest.raises(ConfigError, match="step-00000005"):
        checkpoints.read_checkpoint(home, 5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_goes_on_bit_by_bit(tmp_path, kind):
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
    back = checkpoints.read_checkpoint(str(tmp_path), 3)
    with torch.no_grad():
        other.copy_(back.parts["model"]["w"])
    second.load_state_dict(checkpoints.join_state(back.parts["optimizer"], back.state))
    train(one, first, 3)
    train(other, second, 3)
    assert torch.equal(one, other)


def test_a_full_disk_of_the_node_is_waited_for_as_that_of_the_results(tmp_path, monkeypatch):
    real, full = checkpoints.save_file, [True]

    def save_file(tensors, path):
        if full:
            full.clear()
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", save_file)
    monkeypatch.setattr(checkpoints, "PAUSES", (0.01,))
    said, saved = [], []
    saver = Saver(str(tmp_path), 2, saved.append, said.append)
    saver.save(made(7))
    saver.close()
    assert saved == [7] == checkpoints.complete_steps(str(tmp_path))
    assert "step 7 is tried again" in said[0]
    assert "No space left" in said[0]
