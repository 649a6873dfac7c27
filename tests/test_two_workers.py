"""A step of two workers is the step of one, for every family of networks and ways to train them."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from networks import scrambled
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitray.config import Run, load_run
from vitray.config.augmentation import Normalize
from vitray.models.network import build_network
from vitray.models.stems import synchronize_norms, use_patch
from vitray.tasks.build import build_task
from vitray.tasks.supervised import Teacher

pytestmark = pytest.mark.slow

MEAN = ["model.class_token=false", "model.pool=mean"]
TUNED = ["task.kind=finetune", "task.weights=unread"]
FAMILIES: dict[str, list[str]] = {
    "learned at levels": ["model.positions={kind: learned, where: levels}"],
    "learned2d, shared": ["model.positions={kind: learned2d, where: shared}"],
    "sincos2d": ["model.positions=sincos2d"],
    "relative": ["model.positions=relative", *MEAN],
    "rope": ["model.positions=rope"],
    "options": [
        "model.registers=2",
        "model.qk_norm=true",
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.bias=false",
    ],
    "axial": ["model.attention=axial", *MEAN],
    "batch norms": ["model.name=vit_u2x1_8_hmlp_bn"],
    "local stem": ["model.name=vit_u2x1_8_local"],
    "hybrid": ["model.name=vit_u2x1_16_r26"],
    "torchvision": ["model.name=torchvision/resnet18"],
    "axial resnet": ["model.name=axial_resnet50_s"],
    "lora": [*TUNED, "task.mode=lora"],
    "adapter": [*TUNED, "task.mode=adapter", "model.adapters=3"],
    "bias": [*TUNED, "task.mode=bias"],
    "last": [*TUNED, "task.mode=last", "task.levels=1"],
    "distillation": ["model.distillation_token=true", "task.distill={teacher: unread, target: soft}"],
    "patch of 4": ["model.patches=[4, 8]"],
}


def task_of(run: Run) -> nn.Module:
    """The task of a run with random weights, in double precision, where the order of sums matters less."""
    teacher = None
    torch.manual_seed(0)
    if run.task.kind == "supervised" and run.task.distill is not None:
        own = run.model.model_copy(update={"distillation_token": False})
        teacher = Teacher(scrambled(build_network(own)).double(), Normalize())
    task = build_task(run, teacher=teacher)
    scrambled(task)
    use_patch(task, 4 if run.model.patches else None)
    return task.double().train()


def images_and_targets() -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, F.one_hot(torch.arange(8) % 5, 5).double()


def run_of(family: str) -> Run:
    changes = ["model.image_size=32", "model.num_classes=5"]
    changes += [] if any("model.name" in each for each in FAMILIES[family]) else ["model.name=vit_u2x1_8"]
    return load_run(None, [*changes, *FAMILIES[family]])


def gradients_of(task: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in task.named_parameters() if each.grad is not None}


def work(rank: int, port: int, folder: Path) -> None:
    """Save the gradients of one of two workers for every family, with four of eight images."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    own = slice(4 * rank, 4 * rank + 4)
    for family in FAMILIES:
        task = task_of(run_of(family))
        synchronize_norms(task, torch.device("cpu"))
        images, targets = images_and_targets()
        wrapped = DistributedDataParallel(task)  # named, as gradients are summed only while it exists
        wrapped(images[own], targets[own]).backward()
        torch.save(gradients_of(task), folder / f"{family}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def workers(tmp_path_factory) -> Path:
    """The folder of both workers' gradients."""
    folder = tmp_path_factory.mktemp("workers")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, folder), nprocs=2)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_two_workers_have_the_gradients_of_one(workers, family):
    task = task_of(run_of(family))
    task(*images_and_targets()).backward()
    alone = gradients_of(task)
    assert alone.keys() == {name for name, each in task.named_parameters() if each.requires_grad}
    assert any(each.abs().max() > 1e-4 for each in alone.values())
    for rank in range(2):
        both = torch.load(workers / f"{family}-{rank}.pt")
        assert both.keys() == alone.keys()
        for name, gradient in alone.items():
            # The loss is computed in float32; biases before batch norms have gradients of rounding errors.
            torch.testing.assert_close(both[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()) + 1e-9)
