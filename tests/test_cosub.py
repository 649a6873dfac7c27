"""Co-training of submodels: the loss, the two draws of drop path, and settings that do not fit."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import scrambled
from torch import nn

from vitray.config import Run, load_run
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.stream.batches import Share
from vitray.data.stream.epoch_order import positions_of
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.tasks.build import build_task
from vitray.tasks.supervised import Classification
from vitray.training.learner import Learner
from vitray.training.optim import build_optimizer
from vitray.training.schedule import length_of
from vitray.training.step import take_step

CLASSES = 5
MODEL = "model={name: vit_u2x1_8, image_size: 32, num_classes: 5, drop_path: 0.5}"
CPU = torch.device("cpu")
LABELS = torch.tensor([0, 3, 3, 4])
# Each image has the labels of two, as after mixing.
TARGETS = 0.7 * F.one_hot(LABELS, CLASSES).float() + 0.3 * F.one_hot(LABELS.flip(0), CLASSES).float()


def run_of(*overrides: str) -> Run:
    return load_run(None, [MODEL, "task.cosub={}", *overrides])


def task_of(*overrides: str) -> Classification:
    torch.manual_seed(0)
    task = build_task(run_of(*overrides))
    scrambled(task.vit).float()
    return task.train()


def images(count=4) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


# ---- the loss --------------------------------------------------------------------------------------------------------


class Answers(nn.Module):
    """A network whose logits for the first and the second copies of four images are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.logits_SK = nn.Parameter(3 * torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(2)))

    def forward(self, images_SCHW: torch.Tensor) -> torch.Tensor:
        assert torch.equal(images_SCHW[:4], images_SCHW[4:])
        return self.logits_SK


def answering(*overrides: str) -> Classification:
    task = task_of(*overrides)
    task.vit = Answers()
    return task


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(each - max(row)) for each in row]
    return [power / sum(powers) for power in powers]


def sigmoid(row: list[float]) -> list[float]:
    return [1 / (1 + math.exp(-each)) for each in row]


def cross_entropy(row: list[float], target: list[float]) -> float:
    return -sum(q * math.log(p) for q, p in zip(target, softmax(row), strict=True))


def binary(row: list[float], target: list[float]) -> float:
    pairs = zip(target, sigmoid(row), strict=True)
    return -sum(q * math.log(p) + (1 - q) * math.log(1 - p) for q, p in pairs) / CLASSES


@pytest.mark.parametrize(("weight", "smoothing"), [(0.5, 0.0), (0.2, 0.1)])
@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_the_loss_is_that_of_the_labels_and_of_the_other_submodel(loss, weight, smoothing):
    task = answering(f"task.loss={loss}", f"task.cosub.weight={weight}", f"task.smoothing={smoothing}")
    term, answer = (cross_entropy, softmax) if loss == "softmax" else (binary, sigmoid)
    rows, total = task.vit.logits_SK.tolist(), 0.0
    for image, target in enumerate(TARGETS.tolist()):
        present = target if loss == "softmax" else [float(share > 0) for share in target]
        label = [(1 - smoothing) * share + smoothing / CLASSES for share in present]
        for own, other in ((rows[image], rows[image + 4]), (rows[image + 4], rows[image])):
            total += ((1 - weight) * term(own, label) + weight * term(own, answer(other))) / 8
    assert task(images(), TARGETS).item() == pytest.approx(total, rel=1e-5)


def test_loss_and_gradients_are_those_of_deits_four_terms():
    task = answering("task.loss=bce")
    loss = task(images(), TARGETS)
    loss.backward()
    criterion, logits_SK = nn.BCEWithLogitsLoss(), task.vit.logits_SK.detach().double().requires_grad_()
    one, two = logits_SK[:4], logits_SK[4:]
    present = TARGETS.gt(0).double()
    expected = 0.25 * (criterion(one, present) + criterion(two, present))
    expected = expected + 0.25 * criterion(one, two.detach().sigmoid())
    expected = expected + 0.25 * criterion(two, one.detach().sigmoid())
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(task.vit.logits_SK.grad.double(), logits_SK.grad, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_submodels_that_agree_change_nothing_by_their_answers(loss):
    gradients = []
    for weight in (0.25, 0.75):
        task = answering(f"task.loss={loss}", f"task.cosub.weight={weight}")
        with torch.no_grad():
            task.vit.logits_SK[4:] = task.vit.logits_SK[:4]
        task(images(), TARGETS).backward()
        gradients.append(task.vit.logits_SK.grad / (1 - weight))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


# ---- the submodels ---------------------------------------------------------------------------------------------------


def submodel(vit: ViT, kept: tuple[bool, ...]) -> ViT:
    """The network without some branches, the others doubled: those that drop path with rate 0.5 may choose."""
    one = copy.deepcopy(vit).eval()
    ends = [end for block in one.blocks for end in (block.attn1.out, block.ffn1.down)]
    for end, is_kept in zip(ends, kept, strict=True):
        end.weight.data *= 2.0 * is_kept
        end.bias.data *= 2.0 * is_kept
    return one


@torch.no_grad()
def test_each_copy_of_an_image_passes_through_one_of_the_submodels_drawn_anew():
    task, seen = task_of(), []
    every_16BK = torch.stack(
        [submodel(task.vit, kept)(images()) for kept in itertools.product([False, True], repeat=4)]
    )
    task.vit.register_forward_hook(lambda *each: seen.append(each[2]))
    task(images(), TARGETS)
    copies_2BK = seen[0].unflatten(0, (2, 4))
    far_16_2B = (every_16BK[:, None] - copies_2BK).abs().amax(dim=-1)
    assert far_16_2B.amin(dim=0).max() < 1e-4
    chosen_2B = far_16_2B.argmin(dim=0)
    assert (chosen_2B[0] != chosen_2B[1]).any()
    assert len(chosen_2B.unique()) > 2
    task.eval()(images(), TARGETS)
    assert torch.equal(seen[1][:4], seen[1][4:])


def stepped(run: Run, share: Share) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The weights after a step of one worker, and the images of its passes."""
    torch.manual_seed(0)
    task, seen = build_task(run).train(), []
    task.vit.stem.register_forward_hook(lambda *each: seen.append(each[1][0]))
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(256, size=(8, 32, 32, 3), dtype=np.uint8))
    rows = positions_of(0, 8, share.rank, share.workers)
    batch = DeviceBatch(pixels[rows], torch.arange(8)[rows] % 5, rows, rows)
    learner = Learner(task, task, build_optimizer(task, run.optim, CPU), None)
    take_step(run, 3, batch, share, learner, length_of(run.optim, 10))
    return nn.utils.parameters_to_vector(task.parameters()).detach(), seen


STEP = ("optim.batch=8", "optim.warmup=0 steps", "data.mix={mixup: 0.8, cutmix: 1.0}")


@pytest.mark.parametrize("share", [Share(0, 1), Share(0, 2), Share(1, 2)])
def test_a_step_is_a_function_of_seed_step_and_worker(share):
    weights = stepped(run_of(*STEP), share)[0]
    torch.manual_seed(99)  # the draws of a step do not follow from those before it
    assert torch.equal(weights, stepped(run_of(*STEP), share)[0])
    assert not torch.equal(weights, stepped(run_of(*STEP, "seed=1"), share)[0])


def test_any_number_of_workers_passes_every_image_twice():
    (alone,) = stepped(run_of(*STEP), Share(0, 1))[1]
    first, second = alone.chunk(2)
    assert torch.equal(first, second)
    parts = [stepped(run_of(*STEP), Share(rank, 2))[1][0].chunk(2) for rank in range(2)]
    for copies in zip(*parts, strict=True):
        together = torch.empty_like(first)
        for rank, part in enumerate(copies):
            together[positions_of(0, 8, rank, 2)] = part
        assert torch.equal(together, first)
    passes = stepped(run_of(*STEP, "compute.local_batch=4"), Share(0, 1))[1]
    assert [len(each) for each in passes] == [8, 8]


def test_two_submodels_learn_16_images_in_200_steps():
    run = run_of("model.drop_path=0.1", "optim.lr=2e-3", "optim.weight_decay=0")
    torch.manual_seed(0)
    task = build_task(run).train()
    optimizer = build_optimizer(task, run.optim, CPU)
    labels = torch.arange(16) % CLASSES
    for _ in range(200):
        task(images(16), F.one_hot(labels, CLASSES).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    logits = task.vit.eval()(images(16))
    assert torch.equal(logits.argmax(1), labels)
    assert F.cross_entropy(logits, labels) < 0.1


@pytest.mark.slow
def test_a_co_training_task_compiles():
    torch.compiler.reset()
    task, losses = task_of(), []
    for module in (task, torch.compile(task, backend="aot_eager")):
        torch.manual_seed(5)
        losses.append(module(images(), TARGETS))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-4, rtol=1e-4)


# ---- settings and cost -----------------------------------------------------------------------------------------------


def test_fine_tuning_co_trains_too_and_a_run_is_its_recipe():
    run = run_of("task={kind: finetune, weights: anywhere, mode: attn}", "task.cosub.weight=0.3")
    assert (run.submodels, run.task.cosub.weight) == (2, 0.3)
    assert Run.model_validate(run.model_dump(mode="json")) == run
    task = build_task(run).train()
    task(images(), TARGETS).backward()
    trained = {name for name, each in task.named_parameters() if each.grad is not None}
    assert trained == {name for name, each in task.named_parameters() if each.requires_grad}


@torch.no_grad()
def test_without_cosub_each_image_passes_once():
    task = build_task(run_of().replace({"task.cosub": None})).eval()
    torch.testing.assert_close(task(images(), TARGETS), F.cross_entropy(task.vit(images()), TARGETS))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.drop_path=0"], "task.cosub needs model.drop_path > 0, because the two submodels"),
        (
            ["model.name=vit_u1x2_8", "model.drop_path_schedule=linear"],
            "task.cosub needs drop path in some block, where linear is 0 in the only one",
        ),
        (["task.distill.teacher=t"], "task.cosub and task.distill cannot be combined"),
        (["task.cosub.weight=1"], "task.cosub.weight: got 1, expected less than 1"),
        (["task.cosub.weight=0"], "task.cosub.weight: got 0, expected greater than 0"),
        (["task.cosub.wieght=0.1"], "task.cosub.wieght: unknown setting, expected one of weight; did you mean weight"),
        (["task.cosub=true"], "task.cosub: got True, expected settings as `key: value`"),
        (["model={name: torchvision/resnet18}"], "task.cosub needs a Vision Transformer: got torchvision/resnet18"),
        (["task={kind: masked, cosub: {}}", "model.num_classes=null"], "task.cosub: unknown setting"),
        (["task={kind: tokenizer, cosub: {}}", "model.num_classes=null"], "task.cosub: unknown setting"),
    ],
)
def test_bad_settings_are_one_message(overrides, message):
    kept = [MODEL] if not overrides[0].startswith("model={") else []
    cosub = ["task.cosub={}"] if not any(each.startswith(("task.cosub", "task={")) for each in overrides) else []
    with pytest.raises(ConfigError) as error:
        load_run(None, [*kept, *cosub, *overrides])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_rates_that_grow_with_depth_are_enough():
    assert run_of("model.drop_path_schedule=linear").submodels == 2
