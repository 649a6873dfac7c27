"""Two workers: a checkpoint is read by one of them, and DDP's gradient buckets change no bit of the training."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from vitray.config import load_run
from vitray.config.augmentation import Normalize
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.stream.batches import Share
from vitray.data.stream.epoch_order import positions_of
from vitray.errors import ConfigError
from vitray.metrics.scores import EvaluationSet, _means, gather_names
from vitray.models.stems import synchronize_norms
from vitray.system import storage
from vitray.tasks.build import build_task
from vitray.training import checkpoints, learner
from vitray.training.checkpoints import META, Checkpoint
from vitray.training.evaluator import Evaluator
from vitray.training.learner import DDP, STRIDES_WARNING, Learner
from vitray.training.loop import all_reduce_metrics
from vitray.training.optim import Average, build_optimizer, set_learning_rate
from vitray.training.schedule import learning_rate, length_of, micro_batches, num_passes
from vitray.training.state import TrainState
from vitray.training.step import prepare_micro_batch, take_step

CPU = torch.device("cpu")
# Frozen parameters, gradient accumulation with an uneven last part, and a gradient that is clipped.
SETTINGS = [
    "model.name=vit_u2x1_8",
    "model.image_size=32",
    "model.num_classes=5",
    "task={kind: finetune, weights: anywhere, mode: attn}",
    "data.mix={mixup: 0.8, cutmix: 1.0}",
    "optim.batch=20",
    "optim.clip=0.001",
    "optim.warmup=0 steps",
    "optim.ema.decay=0.9",
    "compute.local_batch=4",
]


UNEVEN = [
    "model.name=vit_u1x1_8_hmlp_bn",
    "model.image_size=32",
    "model.num_classes=5",
    "optim={batch: 9, lr: 0.01, clip: null, rule: {kind: sgd}, warmup: 0 steps}",
    "compute.local_batch=4",
]


def made():
    generator = torch.Generator().manual_seed(0)
    weights = {
        "matrix": torch.randn(3, 4, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.tensor(2**40),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0),
    }
    return Checkpoint(
        7, {"model": weights, "optimizer": {"0.step": torch.tensor(7.0)}, "none": {}}, {"losses": [1 / 3]}
    )


def trained(share, **ddp):
    """Return the weights, their average and the gradients' norms after some steps of one worker."""
    run = load_run(None, SETTINGS)
    torch.manual_seed(0)
    task = build_task(run)
    model = DistributedDataParallel(task, **ddp) if dist.is_initialized() else task
    learned = Learner(task, model, build_optimizer(task, run.optim, CPU), Average(task, run.optim.ema))
    tensors = {}
    for step in range(3):
        rng = np.random.default_rng(step)
        images, labels = rng.integers(256, size=(20, 32, 32, 3), dtype=np.uint8), rng.integers(5, size=20)
        own = positions_of(0, 20, share.rank, share.workers)
        images, labels = torch.from_numpy(images[own]), torch.from_numpy(labels[own])
        batch = DeviceBatch(images, labels, own, own)
        tensors[f"loss and norm {step}"] = take_step(run, step, batch, share, learned, length_of(run.optim, 10))
    return (
        tensors | dict(task.state_dict()) | {f"average {name}": each for name, each in learned.average.state().items()}
    )


def uneven_run():
    """Five and four images, in two passes each, and a stem whose batch norms meet in each pass."""
    return load_run(None, UNEVEN)


def uneven_batch(step, own):
    rng = np.random.default_rng(step)
    images, labels = rng.integers(256, size=(9, 32, 32, 3), dtype=np.uint8), rng.integers(5, size=9)
    return DeviceBatch(torch.from_numpy(images[own]), torch.from_numpy(labels[own]), own, own)


def trained_unevenly(share):
    """Return the task after two steps of one of two workers whose shares differ."""
    run = uneven_run()
    torch.manual_seed(0)
    task = build_task(run)
    synchronize_norms(task, CPU)
    learned = Learner(task, DistributedDataParallel(task, **DDP), build_optimizer(task, run.optim, CPU), None)
    for step in range(2):
        own = positions_of(0, 9, share.rank, share.workers)
        take_step(run, step, uneven_batch(step, own), share, learned, length_of(run.optim, 10))
    return dict(task.state_dict())


def work(rank: int, folder: str) -> None:
    """Save the results of one of two workers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    # Only rank 0 has the files.
    read = {}
    for name in ("whole", "no", "damaged", "unreadable"):
        try:
            read[name] = checkpoints.read_latest(f"{folder}/{name if rank == 0 else 'elsewhere'}", CPU)
        except Exception as error:
            read[name] = type(error).__name__, str(error)
    torch.save(read, f"{folder}/read-{rank}")
    share = Share(rank, 2)
    torch.save((trained(share), trained(share, **DDP)), f"{folder}/trained-{rank}")
    torch.save(trained_unevenly(share), f"{folder}/uneven-{rank}")
    sums = all_reduce_metrics({rank: torch.tensor([0.5, rank])}, CPU, [rank, 7 * (rank == 0), rank])
    data = EvaluationSet([], 3, Normalize(), lambda: [f"corrupt {1 - rank}"])
    nothing = torch.zeros(1, dtype=torch.float64)
    counted = _means(1 - rank, nothing, data)
    torch.save((sums, gather_names(["b", "c"][: rank + 1]), counted), f"{folder}/sums-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder with the results of two workers."""
    folder = tmp_path_factory.mktemp("two")
    for name in ("whole", "damaged", "unreadable"):
        checkpoints.write_checkpoint(str(folder / name), made())
    saved = Path(checkpoints.folder_of(str(folder / "damaged"), 7))
    (saved / "model.safetensors").write_bytes(b"x")
    (Path(checkpoints.folder_of(str(folder / "unreadable"), 7)) / META).write_text("{")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return folder


def test_a_checkpoint_that_one_worker_reads_arrives_bit_by_bit(folder):
    for rank in range(2):
        whole = torch.load(folder / f"read-{rank}", weights_only=False)["whole"]
        assert (whole.step, whole.state, whole.parts.keys()) == (7, made().state, made().parts.keys())
        for part, tensors in made().parts.items():
            assert whole.parts[part].keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(whole.parts[part][name], tensor)
                assert whole.parts[part][name].dtype == tensor.dtype


def test_an_error_of_the_reading_worker_is_raised_on_all(folder):
    first, second = (torch.load(folder / f"read-{rank}", weights_only=False) for rank in range(2))
    assert first["no"] is second["no"] is None
    assert first["damaged"] == second["damaged"]
    kind, text = first["damaged"]
    assert kind == "ConfigError"
    assert text.startswith(f"{folder}/damaged/checkpoints/step-00000007/model.safetensors: got 1 bytes, expected ")
    assert first["unreadable"] == second["unreadable"]
    assert first["unreadable"][0] == "RuntimeError"


def test_counts_and_names_are_those_of_all_workers(folder):
    for rank in range(2):
        sums, names, (images, corrupt, _) = torch.load(folder / f"sums-{rank}", weights_only=False)
        assert sums == ([[1.0, 1.0]], [1, 7, 1])
        assert names == ["b", "b", "c"]
        assert (images, corrupt) == (1, ["corrupt 0", "corrupt 1"])


def test_without_other_workers_the_checkpoint_is_read_here(tmp_path):
    assert checkpoints.read_latest(str(tmp_path), CPU) is None
    checkpoints.write_checkpoint(str(tmp_path), made())
    assert torch.equal(
        checkpoints.read_latest(str(tmp_path), CPU).parts["model"]["matrix"], made().parts["model"]["matrix"]
    )
    storage.remove(storage.join(checkpoints.folder_of(str(tmp_path), 7), "model.safetensors"))
    with pytest.raises(ConfigError, match="step-00000007"):
        checkpoints.read_latest(str(tmp_path), CPU)


@pytest.mark.parametrize(("best", "kept"), [(4, (0.5, 4)), (8, (0.3, 2)), (None, (0.3, 2))])
def test_a_rewind_keeps_the_best_score_up_to_its_checkpoint(best, kept, monkeypatch):
    """A separate evaluation of step 4 may end after the checkpoint of step 6 is written."""
    monkeypatch.setattr(learner, "resume", lambda *_: TrainState(step=6, best={"top1": 0.3}, best_step=2))
    earlier = learner.rewind(
        None, None, None, TrainState(step=9, best={"top1": 0.5} if best else {}, best_step=best), 8
    )
    assert (earlier.best.get("top1"), earlier.best_step) == kept
    assert (earlier.skipped, earlier.rewinds) == ([8], 1)


def test_a_rewind_cancels_the_separate_evaluations_of_later_steps(monkeypatch):
    cancelled, each = [], Evaluator.__new__(Evaluator)
    each._scorer = None
    each._started = {step: SimpleNamespace(cancel=lambda step=step: cancelled.append(step)) for step in (2, 4, 6)}
    each.discard_after(3)
    assert (each.pending, cancelled) == ([2], [4, 6])


def test_gradients_in_the_buckets_of_ddp_change_no_bit(folder):
    alone = trained(Share(0, 1))
    both = [torch.load(folder / f"trained-{rank}") for rank in range(2)]
    for plain, views in both:
        assert plain.keys() == views.keys() == alone.keys()
        assert [name for name in plain if not torch.equal(plain[name], views[name])] == []
    norms = torch.stack([views["loss and norm 1"] for _, views in both]).sum(0)
    torch.testing.assert_close(norms, alone["loss and norm 1"], rtol=1e-4, atol=1e-6)
    assert norms[1] > 0.001  # clipped
    assert torch.equal(both[0][1]["vit.head.weight"], both[1][1]["vit.head.weight"])
    for name, tensor in alone.items():
        if not name.startswith("loss"):
            torch.testing.assert_close(both[0][1][name], tensor, rtol=1e-3, atol=1e-4)


def test_batch_norms_of_uneven_shares_meet_in_every_pass(folder):
    """One process that takes the images of both workers' passes together has the same network afterwards."""
    run = uneven_run()
    torch.manual_seed(0)
    task = build_task(run)
    optimizer = build_optimizer(task, run.optim, CPU)
    shares = [positions_of(0, 9, rank, 2) for rank in range(2)]
    slices = [micro_batches(len(share), num_passes(run, 2), run) for share in shares]
    assert [[part.stop - part.start for part in parts] for parts in slices] == [[2, 3], [2, 2]]
    for step in range(2):
        set_learning_rate(optimizer, learning_rate(run.optim, length_of(run.optim, 10), step))
        for parts in zip(*slices, strict=True):
            own = np.concatenate([share[part] for share, part in zip(shares, parts, strict=True)])
            images, targets = prepare_micro_batch(
                uneven_batch(step, own), slice(None), run, step, length_of(run.optim, 10)
            )
            (task(images, targets) * len(own) / 9).backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = (torch.load(folder / f"uneven-{rank}") for rank in range(2))
    for name, tensor in task.state_dict().items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(first[name], second[name])


def test_the_ignored_warning_is_that_of_ddp_for_kernels_of_one_pixel():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3), torch.nn.Conv2d(16, 32, 1, stride=2))
        model = DistributedDataParallel(network, **DDP)
        images = torch.rand(16, 16, 8, 8).to(memory_format=torch.channels_last)
        with pytest.warns(UserWarning, match=f"^{STRIDES_WARNING}"):
            model(images).sum().backward()
    finally:
        dist.destroy_process_group()
