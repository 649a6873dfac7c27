"""A training step never waits for its device: neither for a value on it, nor for a copy to it.

Without a GPU, meta tensors stand for those on the device: they have no values, so reading one raises. The copies of
host tensors, which they would accept, are checked by `HostCopies`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitray.config import Run, load_run
from vitray.data.augment.draws import OPERATIONS, Draws
from vitray.data.augment.masks import draw_sources
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.augment.ops_tensor import apply_draws
from vitray.data.stream.batches import Share
from vitray.tasks.build import build_task
from vitray.training import step as one_step
from vitray.training.learner import Learner, compile_model
from vitray.training.optim import Average, build_optimizer
from vitray.training.schedule import length_of

META = torch.device("meta")
# Calls that copy numbers of the host to the device and wait, or that read the device in their CUDA implementation.
WAITING_CALLS = {torch.tensor, torch.as_tensor, Tensor.new_tensor, torch.nn.functional.one_hot}


class HostCopies(TorchFunctionMode):
    """Raises at a call that mixes host tensors with meta tensors, except for non-blocking copies."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = list(tensors_in([result, *args, *kwargs.values()]))
        if any(tensor.is_meta for tensor in tensors):
            has_host_tensor = any(not tensor.is_meta for tensor in tensors)
            if func in WAITING_CALLS or (has_host_tensor and not kwargs.get("non_blocking")):
                raise RuntimeError(f"{func.__name__} waits for the device")
            if func is Tensor.__setitem__ and any(tensor.dtype == torch.bool for tensor in tensors_in([args[1]])):
                raise RuntimeError("assigning to a mask waits for the number of its elements")
        return result


def tensors_in(values) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise where the host waits for the device."""
    if device == META:
        with HostCopies():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


RUN = {
    "model.name": "vit_u1x2_8_hmlp_bn",
    "model.image_size": 32,
    "model.num_classes": 10,
    "optim.batch": 8,
    "optim.duration": "200 steps",
    "optim.warmup": "10 steps",
    "optim.ema": {},
    "compute.workers": 1,
    "compute.local_batch": 4,
}
MIXING = {"data.mix.mixup": 0.8, "data.mix.cutmix": 1.0, "data.augment.erase": 0.9, "model.drop_path": 0.1}
UNLABELED = {"model.num_classes": None, "model.name": "vit_u1x1_8"}
JOINT = UNLABELED | {"compute.local_batch": None, "optim.ema": None, "data.views.local.count": 1}
RUNS = {
    "adamw": MIXING,
    "sgd": MIXING | {"optim.rule": "sgd", "task.loss": "bce", "data.mix.per": "pair"},
    "lamb": MIXING | {"optim.rule": "lamb"},
    "mae": UNLABELED | {"task": {"kind": "masked", "objective": {"kind": "mae", "decoder_depth": 1}}},
    "mean_color": UNLABELED | {"task": {"kind": "masked", "objective": "mean_color"}},
    "pixels_l1": UNLABELED | {"task": {"kind": "masked", "objective": "pixels_l1"}},
    "tokenizer": UNLABELED | {"task": {"kind": "tokenizer", "decoder_depth": 1}},
    "lejepa": JOINT | {"task": {"kind": "lejepa", "slices": 8}},
    "sinkhorn": JOINT | {"task": {"kind": "self_distillation", "prototypes": 16}},
    "center": JOINT | {"task": {"kind": "self_distillation", "prototypes": 16, "centering": "center"}},
}


def run_of(name: str) -> Run:
    return load_run().replace(RUN | RUNS[name])


def learner_on(device: torch.device, run: Run) -> Learner:
    with torch.device(device):
        task = build_task(run)
    average = Average(task, run.optim.ema) if run.optim.ema else None
    return Learner(task, task, build_optimizer(task, run.optim, device), average)


def take_steps(run: Run, learner: Learner, device: torch.device, first: int = 1) -> None:
    """Take some steps without waiting, after the first ones, which may copy constants."""
    places = np.arange(run.optim.batch)
    labels, masks = torch.from_numpy(places), None
    if run.task.kind == "masked":
        sources = draw_sources(run.task.mask, run.model.grid, run.seed, 0, places.tolist())
        masks = torch.from_numpy(sources).to(device)
    images = torch.zeros(len(places), 32, 32, 3, dtype=torch.uint8)
    batch = DeviceBatch(images.to(device), labels.to(device), places, places, masks)
    if run.task.traits.joint:
        masks = torch.arange(len(places) * 2 * 16).view(len(places), 2, 16) % 3 == 0
        views = torch.zeros(len(places), 1, 16, 16, 3, dtype=torch.uint8)
        batch = batch._replace(
            images=images[:, None].expand(-1, 2, -1, -1, -1).to(device),
            masks=masks.to(device),
            views=views.to(device),
            hidden=masks.sum((1, 2)).numpy(),
        )
    # Mixing needs more steps, to blend and to cut.
    for step in range(first + (2 if run.data.mix.is_mixing else 1)):
        with no_waits(device) if step >= first else nullcontext():
            one_step.take_step(run, step, batch, Share(0, 1), learner, length_of(run.optim, 100))


@pytest.mark.parametrize("name", RUNS)
def test_a_step_never_waits_for_the_device(name, monkeypatch):
    monkeypatch.setattr(one_step, "autocast", lambda *_: nullcontext())  # torch.autocast rejects meta
    run = run_of(name)
    take_steps(run, learner_on(META, run), META)


def augment_without_waiting(device: torch.device) -> None:
    """Apply each operation to a batch without waiting."""
    rng = np.random.default_rng(0)
    for interpolation in ("bicubic", "bilinear"):
        for code in range(len(OPERATIONS)):
            codes, amounts = np.full((6, 1), code, np.uint8), rng.uniform(0.1, 2.0, (6, 1))
            images = torch.empty(6, 16, 16, 3, dtype=torch.uint8, device=device)
            draws = Draws(np.arange(6) % 2 == 0, codes, amounts, interpolation, (1, 2, 3))
            with no_waits(device):
                apply_draws(images, draws)


def test_augmentation_never_waits_for_the_device():
    augment_without_waiting(META)


@pytest.mark.gpu
def test_augmentation_never_waits_for_the_gpu():
    augment_without_waiting(torch.device("cuda"))


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (lambda logits: logits.sum().item(), "item"),
        (lambda logits: torch.ones(10).to(logits.device), "to waits for the device"),
    ],
)
def test_a_wait_inside_the_model_is_noticed(wait, message, monkeypatch):
    monkeypatch.setattr(one_step, "autocast", lambda *_: nullcontext())
    run = run_of("adamw")
    learner = learner_on(META, run)

    def hook(_module, _inputs, logits):
        wait(logits)

    learner.task.vit.register_forward_hook(hook)
    with pytest.raises(RuntimeError, match=message):
        take_steps(run, learner, META)


@pytest.mark.parametrize(
    "wait",
    [
        lambda values: values[0].item(),
        lambda values: values.tolist(),
        lambda values: bool(values.any()),
        lambda values: values.cpu(),
        lambda values: values.to("cpu", non_blocking=True).tolist(),
        lambda values: values[values > 0],
        lambda values: values.nonzero(),
        lambda values: values.__setitem__(values > 0, values[:2]),
        lambda values: torch.repeat_interleave(values.long()),
        lambda values: torch.bincount(values.long()),
        lambda values: torch.nn.functional.one_hot(values.long(), 5),
        lambda values: torch.ones(3).to(values.device),
        lambda values: values.copy_(torch.ones(3)),
        lambda values: values[torch.tensor([0, 1])],
        lambda values: torch.where(values > 0, values, torch.tensor(1.0)),
        lambda values: torch.tensor([1.0, 2.0], device=values.device),
        lambda values: values.new_tensor([1.0, 2.0]),
    ],
)
def test_each_kind_of_wait_is_noticed(wait):
    with no_waits(META), pytest.raises(RuntimeError):
        wait(torch.empty(3, device=META))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RUNS)
def test_a_step_never_waits_for_the_gpu(name, precision):
    run, device = run_of(name).replace({"compute.precision": precision}), torch.device("cuda")
    take_steps(run, learner_on(device, run), device)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_compiled_step_never_waits_for_the_gpu(mode):
    torch.compiler.reset()
    options = {"compute.compile": mode, "compute.channels_last": True, "compute.precision": "bf16"}
    run, device = run_of("adamw").replace(options), torch.device("cuda")
    learner = learner_on(device, run)
    # The first steps compile, warm up, and record the graphs.
    take_steps(run, learner._replace(model=compile_model(learner.model, run)), device, first=4)
