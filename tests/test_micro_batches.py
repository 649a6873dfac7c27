"""Gradient accumulation, the sums of a record, and the peak of a device: arithmetic of the training loop."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from vitray.config import load_run
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.shares import dealt_unit, share_sizes
from vitray.data.stream.batches import Share
from vitray.data.stream.epoch_order import positions_of
from vitray.errors import ConfigError
from vitray.tasks.build import build_task
from vitray.training.learner import Learner
from vitray.training.loop import all_reduce_metrics
from vitray.training.profiling import peak_flops
from vitray.training.schedule import check_shares, length_of, micro_batches, num_passes
from vitray.training.step import take_step

TINY = ["model.name=vit_u1x1_8", "model.image_size=16", "model.num_classes=3", "optim.clip=null"]


def settings(batch, local, mixed):
    limit = "null" if local is None else local
    mix = "{mixup: 0.8}" if mixed else "{}"
    return load_run(None, [*TINY, f"optim.batch={batch}", f"compute.local_batch={limit}", f"data.mix={mix}"])


@st.composite
def shared_batches(draw, most=400):
    """A run, its number of workers, and the images that each of them takes of a step, by rank."""
    batch = draw(st.integers(1, most))
    mixed = batch % 2 == 0 and draw(st.booleans())
    workers = draw(st.integers(1, min(batch, 48)))
    if mixed:  # such shares separate pairs, and are refused
        assume(dealt_unit(batch, workers) == 2)
    run = settings(batch, draw(st.none() | st.integers(1, most)), mixed)
    return run, workers, [positions_of(0, batch, rank, workers) for rank in range(workers)]


@given(shared_batches())
def test_every_worker_takes_the_same_passes_of_nearly_equal_size_within_the_local_batch(shared):
    run, workers, shares = shared
    local, unit = run.compute.local_batch or run.optim.batch, 2 if run.data.mix.is_mixing else 1
    assert share_sizes(run.optim.batch, workers) == [len(share) for share in shares]
    try:
        passes = num_passes(run, workers)
    except ConfigError:
        # The largest share needs so many passes that the smallest has no image, or pair, for one of them.
        assert -(-max(map(len, shares)) // max(unit, local // unit * unit)) * unit > min(map(len, shares))
        return
    for share in shares:
        parts = micro_batches(len(share), passes, run)
        assert [number for part in parts for number in range(part.start, part.stop)] == list(range(len(share)))
        sizes = [part.stop - part.start for part in parts]
        assert len(sizes) == passes
        assert max(sizes) <= max(unit, local)
        assert min(sizes) > 0
        assert max(sizes) - min(sizes) <= unit
        assert all(size % unit == 0 for size in sizes)
    fewest = max(-(-len(share) // max(unit, local // unit * unit)) for share in shares)
    assert passes == fewest


@pytest.mark.parametrize(
    ("batch", "workers", "local", "passes"),
    [(1024, 6, 170, 2), (2048, 7, 292, 2), (64, 3, 20, 2), (4096, 48, 85, 2), (1024, 12, 85, 2), (9, 2, 4, 2)],
)
def test_the_largest_share_decides_how_many_passes_all_workers_take(batch, workers, local, passes):
    assert num_passes(settings(batch, local, False), workers) == passes


@pytest.mark.parametrize("workers", [2, "2..3", "1..2"])
def test_a_share_of_fewer_images_than_passes_is_refused(workers):
    run = settings(9, 1, False).replace({"compute.workers": workers})
    with pytest.raises(ConfigError) as error:
        check_shares(run, *run.compute.worker_range)
    assert str(error.value) == (
        "compute.local_batch 1 does not fit optim.batch 9 on 2 workers, because each takes as many passes as the"
        " largest share, 5 for 5 images, and the smallest share has 4; increase compute.local_batch, or change"
        " optim.batch or compute.workers"
    )
    check_shares(run, 3, 3)


class Recorder:
    """In place of an optimizer: keeps the gradient of a step."""

    param_groups: tuple[()] = ()

    def __init__(self, task):
        self.task, self.gradient = task, {}

    def step(self):
        self.gradient = {name: each.grad.clone() for name, each in self.task.named_parameters()}

    def zero_grad(self, set_to_none):
        self.task.zero_grad(set_to_none)


class Alone(torch.nn.Module):
    """In place of DDP: each worker keeps its own gradient."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def no_sync(self):
        return nullcontext()

    def forward(self, images, targets):
        return self.task(images, targets)


def gradient_of(run, workers):
    """Return the mean of the workers' gradients of a step, and the sum of their losses."""
    torch.manual_seed(0)
    task = build_task(run)
    rng = np.random.default_rng(0)
    batch = run.optim.batch
    images = torch.from_numpy(rng.integers(256, size=(batch, 16, 16, 3), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(3, size=batch))
    total, losses = {}, 0.0
    for rank in range(workers):
        own, recorder = positions_of(0, batch, rank, workers), Recorder(task)
        learner = Learner(task, Alone(task), recorder, None)
        images_of_rank = DeviceBatch(images[own], labels[own], own, own)
        loss, _ = take_step(run, 0, images_of_rank, Share(rank, workers), learner, length_of(run.optim, 10))
        losses += float(loss)
        for name, gradient in recorder.gradient.items():
            total[name] = total.get(name, 0) + gradient / workers
    return total, losses


@settings_of_hypothesis(max_examples=15, deadline=None)
@given(shared_batches(most=24))
def test_the_gradient_of_uneven_shares_is_the_mean_over_the_global_batch(shared):
    run, workers, _ = shared
    try:
        num_passes(run, workers)
    except ConfigError:
        return
    gradient, loss = gradient_of(run, workers)
    alone, loss_alone = gradient_of(run.replace({"compute.local_batch": None}), 1)
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    for name, each in alone.items():
        torch.testing.assert_close(gradient[name], each, rtol=1e-3, atol=1e-5)


def test_losses_and_counts_are_summed_together():
    unread = {4: torch.tensor([0.5, 2.0]), 5: torch.tensor([0.25, 3.0])}
    assert all_reduce_metrics(unread, torch.device("cpu"), [True, 7, 0]) == ([[0.5, 2.0], [0.25, 3.0]], [1, 7, 0])
    assert all_reduce_metrics({}, torch.device("cpu"), [False, 0, 3]) == ([], [0, 0, 3])


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", None),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("CPU", None),
    ],
)
def test_a_device_has_the_peak_of_its_whole_name(device, peak):
    assert peak_flops(device, "bf16") == peak
