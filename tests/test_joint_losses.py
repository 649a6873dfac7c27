"""Losses of whole batches, LeJEPA and self-distillation: independent references in float64, and any number of workers.

The references are transcribed from the papers and their pseudocode, with loops over views, images and patches.
"""

import math
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from image_sets import write_dataset, write_network
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss, LeJEPALoss
from networks import scrambled
from test_serve import png
from test_serve_here import ask
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import vitray
from vitray.config import Run, load_run
from vitray.config.classification import TRAINED
from vitray.config.serving import Serving
from vitray.errors import ConfigError, RunError
from vitray.models.stems import synchronize_norms
from vitray.runs.callback import Callback
from vitray.runs.resolve import plan_of, plan_text, resolve
from vitray.runs.train import train
from vitray.serving.here import serving_from
from vitray.tasks.build import build_task
from vitray.tasks.lejepa import JointPrediction, epps_pulley, wave_sums
from vitray.tasks.self_distillation import SelfDistilled, dino_sum, sinkhorn
from vitray.training import loop
from vitray.training.optim import build_optimizer, parameter_groups
from vitray.training.probes import tensors_of
from vitray.weights import load_model
from vitray.weights.freezing import part_of
from vitray.weights.pretrained import open_initial_weights

BASE = {
    "model.num_classes": None,
    "model.name": "vit_u2x1_8",
    "model.image_size": 32,
    "data.views.local.count": 3,
    "optim.batch": 7,
}
LEJEPA = BASE | {"task": {"kind": "lejepa", "slices": 7, "projection": 5, "hidden": 12, "weight": 0.3}}
DISTILLED = BASE | {
    "task": {"kind": "self_distillation", "prototypes": 12, "hidden": 16, "bottleneck": 8},
    "task.teacher_temperature": [0.05, 0.09],
    "task.freeze_prototypes": "0 steps",
}
OBJECTIVES = {
    "lejepa": LEJEPA,
    "without local views": LEJEPA | {"data.views": {"local": None}},
    "sinkhorn": DISTILLED,
    "center": DISTILLED | {"task.centering": "center"},
    "two heads": DISTILLED | {"task.shared_head": False, "task.compares": "patches", "model.registers": 2},
    "dino alone": DISTILLED | {"task.ibot": 0, "task.koleo": 0, "model.positions": "rope"},
    "ibot alone": DISTILLED | {"task.dino": 0, "task.koleo": 0, "data.views.local": None},
    "batch norms": DISTILLED | {"model.name": "vit_u2x2_8_hmlp_bn"},
}
for changes in OBJECTIVES.values():
    if changes.get("data.views") or "data.views.local" in changes:
        del changes["data.views.local.count"]
IMAGES = 7


def task_of(run: Run) -> JointPrediction | SelfDistilled:
    """The task with random weights in float64, in its third step of forty."""
    torch.manual_seed(0)
    task = scrambled(build_task(run)).double().train()
    task.before_step(3, 10, 40)
    return task


def inputs_of(run: Run, part: slice = slice(None)) -> list:
    rng = torch.Generator().manual_seed(1)
    images = torch.randn(IMAGES, 2, 3, 32, 32, generator=rng, dtype=torch.float64)
    small = torch.randn(IMAGES, 3, 3, 16, 16, generator=rng, dtype=torch.float64)
    masks = torch.rand(IMAGES, 2, 16, generator=rng) < torch.rand(IMAGES, 2, 1, generator=rng) - 0.4
    assert 0 < (masks.sum(2) > 0).sum() < 2 * IMAGES  # some views are not masked
    views = small if run.data.views.small else images.new_empty((IMAGES, 0, 3, 0, 0))  # as a batch has them
    if run.task.kind == "lejepa":
        return [images[part], views[part]]
    return [images[part], views[part], masks[part], int(masks[part].sum())]


# ---- LeJEPA ----------------------------------------------------------------------------------------------------------


def reference_lejepa(task: JointPrediction, images: Tensor, small: Tensor) -> Tensor:
    """The loss with one frequency at a time, each of the integrals as a sum of trapezoids."""
    views = [images[:, at] for at in range(images.shape[1])] + [small[:, at] for at in range(small.shape[1])]
    features = [task.vit(view) for view in views]
    hidden = torch.cat([features[at][image][None] for at in range(2) for image in range(len(images))])
    projections = task.head(torch.cat(features)).chunk(len(views))  # the same batch norms over all views
    assert len(hidden) == 2 * len(images)
    center = (projections[0] + projections[1]) / 2
    prediction = sum(((each - center) ** 2).mean() for each in projections) / len(views)
    statistics = []
    for each in projections:
        for direction in task.directions.T:
            line = each @ direction
            integrand = []
            for knot in range(17):
                t = 3 * knot / 16
                normal = math.exp(-t * t / 2)
                error = (torch.cos(t * line).mean() - normal) ** 2 + torch.sin(t * line).mean() ** 2
                integrand.append(error * normal)
            half = torch.trapezoid(torch.stack(integrand), dx=3 / 16)
            statistics.append(2 * half * len(images))
    weight = task.settings.weight
    return (1 - weight) * prediction + weight * sum(statistics) / len(statistics)


@pytest.mark.parametrize("name", ["lejepa", "without local views"])
def test_lejepa_is_its_reference(name):
    run = load_run(None, OBJECTIVES[name])
    ours, theirs = task_of(run), task_of(run)
    inputs = inputs_of(run)
    loss, expected = ours(*inputs), reference_lejepa(theirs, *inputs)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
    assert_same_gradients(ours, loss, theirs, expected)


def assert_same_gradients(ours: nn.Module, loss: Tensor, theirs: nn.Module, expected: Tensor, limit=1e-9) -> None:
    loss.backward()
    expected.backward()
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-7, atol=limit)


def test_the_gradient_of_waves_is_that_of_differences():
    x = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert torch.autograd.gradcheck(wave_sums, (x,))


@settings(max_examples=25, deadline=None)
@given(images=st.integers(2, 60), seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 0.1, 1.0, 30.0]))
def test_waves_in_float32_are_those_of_float64(images, seed, scale):
    x = scale * torch.randn(2, images, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    t = torch.arange(1, 17, dtype=torch.float64) * 3 / 16
    turned = x[None] * t[:, None, None, None]
    expected = torch.stack([turned.cos().sum(2), turned.sin().sum(2)])
    torch.testing.assert_close(wave_sums(x), expected, rtol=0, atol=1e-10)
    # Of 32 bits, a phase of 90 has an error of 4e-6.
    torch.testing.assert_close(wave_sums(x.float()).double(), expected, rtol=0, atol=2e-5 * images * max(scale, 1))


def test_the_statistic_knows_normal_numbers():
    rng = torch.Generator().manual_seed(0)
    count = torch.tensor(4000.0)
    normal = torch.randn(1, 4000, 3, generator=rng)
    others = {"collapsed": 0 * normal, "two values": normal.sign(), "shifted": normal + 0.3, "narrow": 0.5 * normal}
    usual = epps_pulley(wave_sums(normal) / count, count).max()
    assert usual < 2
    for name, numbers in others.items():
        assert epps_pulley(wave_sums(numbers) / count, count).min() > 20 * usual, name


def test_directions_are_of_a_step_and_of_length_1():
    run = load_run(None, LEJEPA)
    first, second = build_task(run), build_task(run)
    fixed = first.fixed_directions.clone()
    first.before_step(5, 10, 40)
    second.before_step(4, 10, 40)
    assert not torch.equal(first.directions, second.directions)
    second.before_step(5, 10, 40)
    assert torch.equal(first.directions, second.directions)
    assert torch.equal(first.fixed_directions, fixed)
    torch.testing.assert_close(first.directions.norm(dim=0), torch.ones(7))
    assert not {"directions", "fixed_directions"} & first.state_dict().keys()


# ---- self-distillation -----------------------------------------------------------------------------------------------


def reference_sinkhorn(logits: Tensor, temperature: float) -> Tensor:
    """Of probabilities, as DINOv2 writes it."""
    q = torch.exp(logits / temperature).T
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdim=True) / len(q)
        q = q / q.sum(0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


def reference_distillation(task: SelfDistilled, images: Tensor, small: Tensor, masks: Tensor) -> Tensor:
    """The sum of the three losses, a pair of views, a masked patch and a pair of images at a time."""
    choice, prefix = task.settings, task.vit.num_prefix

    def vector(vit, tokens):
        if choice.compares == "patches":
            return vit.norm(tokens[:, prefix:]).mean(1)
        return vit.norm(tokens[:, 0])

    def cosines(head, x):
        x = head.last(F.gelu(head.second(F.gelu(head.first(x)))))
        prototypes = head.prototypes.weight
        return (x / x.norm(dim=-1, keepdim=True)) @ (prototypes / prototypes.norm(dim=1, keepdim=True)).T

    def targets(logits, center):
        if choice.centering == "center":
            return F.softmax((logits - center) / task.temperature, dim=-1)
        return reference_sinkhorn(logits, task.temperature)

    vit, teacher = task.vit, task.teacher
    student, taught, seen, patches = [], [], [], []
    for view in range(2):
        with torch.no_grad():
            taught.append(teacher.vit.tokens(images[:, view]))
        x, grid = vit.stem(images[:, view])
        if choice.ibot:
            x = torch.stack(
                [torch.stack([task.mask_token if m else p for p, m in zip(a, b, strict=True)])
                 for a, b in zip(x, masks[:, view], strict=True)]
            )  # fmt: skip
        student.append(vit.encode(vit.positions(x, grid), SimpleNamespace(grid=grid, chosen=None)))
    places = [(at, view, patch) for at in range(len(images)) for view in range(2)
              for patch in range(16) if masks[at, view, patch]]  # fmt: skip
    loss = torch.zeros((), dtype=torch.float64)
    if choice.dino:
        with torch.no_grad():
            said = torch.stack([vector(teacher.vit, each) for each in taught], 1)
            wanted = targets(cosines(teacher.head, said.flatten(0, 1)), task.center).unflatten(0, (-1, 2))
        seen = [vector(vit, each) for each in student] + [vector(vit, vit.tokens(small[:, at])) for at in range(3)]
        pairs = []
        for own, of_view in enumerate(seen):
            p = F.log_softmax(cosines(task.head, of_view) / choice.student_temperature, dim=-1)
            pairs += [-(wanted[:, view] * p).sum(-1).mean() for view in range(2) if view != own]
        loss = loss + choice.dino * sum(pairs) / len(pairs)
    if choice.ibot:
        with torch.no_grad():
            said = torch.stack([teacher.vit.norm(taught[view][at, prefix + patch]) for at, view, patch in places])
            head = teacher.patch_head or teacher.head
            wanted = targets(cosines(head, said), task.patch_center)
        sums = {}
        for number, (at, view, patch) in enumerate(places):
            seen_patch = vit.norm(student[view][at, prefix + patch])
            p = F.log_softmax(cosines(task.patch_head or task.head, seen_patch) / choice.student_temperature, dim=-1)
            patches.append(-(wanted[number] * p).sum())
            sums.setdefault((at, view), []).append(patches[-1])
        loss = loss + choice.ibot * sum(sum(each) / len(each) for each in sums.values()) / len(sums)
    if choice.koleo:
        for view in range(2):
            own = F.normalize(vector(vit, student[view]), dim=-1)
            far = [min((own[a] - own[b]).norm() for b in range(len(own)) if b != a) for a in range(len(own))]
            loss = loss - choice.koleo / 2 * torch.stack(far).log().mean()
    return loss


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if "distillation" in str(OBJECTIVES[name]["task"])])
def test_self_distillation_is_its_reference(name):
    run = load_run(None, OBJECTIVES[name] | {"model.name": "vit_u2x1_8"})  # batch norms see all views at once
    ours, theirs = task_of(run), task_of(run)
    for task in (ours, theirs):
        task.center.copy_(torch.linspace(-0.2, 0.3, 12))
        task.patch_center.copy_(torch.linspace(0.1, -0.3, 12))
    inputs = inputs_of(run)
    expected = reference_distillation(theirs, *inputs[:3])
    loss = ours(*inputs)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
    assert_same_gradients(ours, loss, theirs, expected)


# ---- the same losses of another library, which is a second reference -------------------------------------------------


def parts_of(task: JointPrediction | SelfDistilled, inputs: list) -> dict[str, float]:
    loss = task(*inputs)
    return {"loss": float(loss.detach()), **task.read_metrics(training=True)}


def test_lejepa_is_that_of_lightly(monkeypatch):
    task, inputs = task_of(load_run(None, LEJEPA)), inputs_of(load_run(None, LEJEPA))
    with torch.no_grad():
        projected = task.head(torch.cat([task.vit(views.flatten(0, 1)) for views in inputs]))
    large = projected[: 2 * IMAGES].unflatten(0, (IMAGES, 2)).transpose(0, 1)
    small = projected[2 * IMAGES :].unflatten(0, (IMAGES, 3)).transpose(0, 1)
    theirs = LeJEPALoss(lambda_param=0.3).double()
    monkeypatch.setattr(theirs.sigreg, "_generate_unit_vectors", lambda *_args: task.directions)
    expected = float(theirs(local_proj=small, global_proj=large))
    assert parts_of(task, inputs)["loss"] == pytest.approx(expected, abs=1e-6)  # its knots are of float32


def test_self_distillation_is_that_of_lightly():
    run = load_run(None, OBJECTIVES["center"])
    task, (images, small, _, _) = task_of(run), inputs_of(run)
    masks = torch.rand(IMAGES, 2, 16, generator=torch.Generator().manual_seed(2)) < 0.4
    assert (masks.sum(2) > 0).all()  # lightly divides by all views, vitray by the masked ones
    center, patch_center = torch.linspace(-0.2, 0.3, 12).double(), torch.linspace(0.1, -0.3, 12).double()
    task.center.copy_(center)
    task.patch_center.copy_(patch_center)

    with torch.no_grad():
        seen = task.teacher.vit.tokens(images.flatten(0, 1))
        taught = task.teacher.head(task.teacher.vit.norm(seen[:, 0])).unflatten(0, (IMAGES, 2))
        tokens = task._masked_tokens(images.flatten(0, 1), masks.flatten(0, 1))
        vectors = task.vit.norm(tokens[:, 0])
        own = [*task.head(vectors).unflatten(0, (IMAGES, 2)).unbind(1)]
        own += [task.head(task.vit(small[:, at])) for at in range(small.shape[1])]
        hidden = masks.flatten()
        taught_patches = task.teacher.head(task.teacher.vit.norm(seen[:, 1:].flatten(0, 1)[hidden]))
        own_patches = task.head(task.vit.norm(tokens[:, 1:].flatten(0, 1)[hidden]))
        dino = DINOLoss(output_dim=12, teacher_temp=float(task.temperature))
        dino.center.copy_(center)
        ibot = IBOTPatchLoss(output_dim=12, teacher_temp=float(task.temperature))
        ibot.center.center.copy_(patch_center)
        views = vectors.unflatten(0, (IMAGES, 2)).unbind(1)
        expected = {
            "dino": float(dino(list(taught.unbind(1)), own)),
            "ibot": float(ibot(taught_patches, own_patches, masks.flatten(0, 1).unflatten(1, (4, 4)))),
            "koleo": sum(float(KoLeoLoss()(each)) for each in views) / 2,
        }
    found = parts_of(task, [images, small, masks, int(masks.sum())])
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    torch.testing.assert_close(task.center, dino.center.flatten().double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(task.patch_center, ibot.center.value.flatten().double(), rtol=0, atol=1e-6)


def test_the_center_follows_the_teachers_outputs_in_training_alone():
    run = load_run(None, OBJECTIVES["center"])
    task, inputs = task_of(run), inputs_of(run)
    task.center.zero_()
    task.patch_center.zero_()
    task.eval()
    task(*inputs)
    assert not task.center.any()
    task.train()
    task(*inputs)
    with torch.no_grad():
        mean = task.teacher.head(task.teacher.vit(inputs[0].flatten(0, 1))).mean(0)
    torch.testing.assert_close(task.center, 0.1 * mean)
    task(*inputs)
    torch.testing.assert_close(task.center, (0.9 * 0.1 + 0.1) * mean)
    assert task.patch_center.any()


def test_sinkhorn_stays_finite_where_probabilities_vanish():
    logits = torch.tensor([[1.0, -1.0, -1.0], [1.0, -1.0, -0.9], [-1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]])
    found = sinkhorn(logits / 0.004)  # exp(-500)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.sum(1), torch.ones(4))
    torch.testing.assert_close(found, reference_sinkhorn(logits.double(), 0.004).float(), rtol=1e-4, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(images=st.integers(1, 5), views=st.integers(1, 3), small=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_each_view_is_compared_with_all_others(images, views, small, seed):
    if views + small < 2:
        return
    rng = torch.Generator().manual_seed(seed)
    targets = torch.rand(images, views, 4, generator=rng, dtype=torch.float64)
    scores = -torch.rand(images, views + small, 4, generator=rng, dtype=torch.float64)
    pairs = [-(targets[:, of] * scores[:, by]).sum() for of in range(views) for by in range(views + small) if of != by]
    flat = torch.cat([scores[:, :views].flatten(0, 1), scores[:, views:].flatten(0, 1)])
    ours = dino_sum(targets.flatten(0, 1), flat, images, views)
    torch.testing.assert_close(ours, sum(pairs) / len(pairs))


def test_equal_images_and_an_image_alone_have_finite_gradients():
    run = load_run(None, DISTILLED)
    task = task_of(run).float()
    images, views, masks, _ = (each.float() if isinstance(each, Tensor) and each.dtype == torch.float64 else each
                               for each in inputs_of(run))  # fmt: skip
    same = images[:1].expand(4, -1, -1, -1, -1), views[:1].expand(4, -1, -1, -1, -1), masks[:1].expand(4, -1, -1)
    for batch in (same, (images[:1], views[:1], masks[:1])):
        task.zero_grad()
        loss = task(*batch, int(batch[2].sum()))
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(each.grad).all() for each in task.parameters() if each.grad is not None)


def test_the_teacher_is_the_average_of_the_student_and_is_never_trained():
    run = load_run(None, OBJECTIVES["batch norms"] | {"optim.rule": "sgd", "task.momentum": 0.9})
    task, inputs = task_of(run), inputs_of(run)
    optimizer = build_optimizer(task, run.optim, torch.device("cpu"))
    learned = {id(each) for group in parameter_groups(task, run.optim) for each in group["params"]}
    assert not learned & {id(each) for each in task.teacher.parameters()}
    before = {name: each.clone() for name, each in task.teacher.state_dict().items()}
    task(*inputs).backward()
    optimizer.step()
    task.after_step()
    own, momentum = task.state_dict(), 1 - 0.1 * (1 + math.cos(math.pi * 3 / 40)) / 2
    assert momentum == task.momentum
    for name, average in task.teacher.state_dict().items():
        if average.is_floating_point():
            torch.testing.assert_close(average, momentum * before[name] + (1 - momentum) * own[name], rtol=1e-9, atol=0)
    assert not task.teacher.training
    assert not any(module.training for module in task.train().teacher.modules())


def test_schedules_begin_and_end_where_they_say():
    lengths = {"task.momentum": 0.99, "task.temperature_warmup": "2 epochs", "task.freeze_prototypes": "1 epoch"}
    run = load_run(None, DISTILLED | lengths)
    task = build_task(run)
    found = []
    for step in (0, 9, 10, 20, 99):
        task.before_step(step, 10, 100)
        found.append((float(task.temperature), round(task.momentum, 5), task.holds_prototypes))
    assert [each[0] for each in found] == pytest.approx([0.05, 0.068, 0.07, 0.09, 0.09])
    assert [each[1] for each in found] == sorted(each[1] for each in found)
    assert found[0][1] == 0.99
    assert found[-1][1] == pytest.approx(1, abs=1e-5)
    assert [each[2] for each in found] == [True, True, False, False, False]


def test_held_prototypes_have_no_gradient():
    run = load_run(None, DISTILLED | {"task.freeze_prototypes": "1 epoch", "task.shared_head": False})
    task = task_of(run)
    task(*inputs_of(run)).backward()
    task.after_backward()
    held = {name for name, each in task.named_parameters() if each.requires_grad and each.grad is None}
    assert held == {"head.prototypes.weight", "patch_head.prototypes.weight"}


def test_the_parts_of_the_loss_and_the_prototypes_are_reported():
    run = load_run(None, DISTILLED)
    task = task_of(run)
    losses = [float(task(*inputs_of(run)).detach()) for _ in range(2)]
    found = task.read_metrics(training=True)
    assert {*found} == {"dino", "ibot", "koleo", "entropy", "prototypes_used"}
    assert found["dino"] + found["ibot"] + 0.1 * found["koleo"] == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert 0 < found["entropy"] < math.log(12)
    assert found["prototypes_used"] in range(1, 13)
    assert task.read_metrics(training=True) == {}
    assert task.read_metrics(training=False) == {}


# ---- workers ---------------------------------------------------------------------------------------------------------

SHARES = {2: [4, 3], 3: [3, 2, 2]}


def work(rank: int, workers: int, port: int, folder: Path) -> None:
    """Save loss, gradients and buffers of one worker for every objective, with its share of seven images."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers)
    first = sum(SHARES[workers][:rank])
    own = slice(first, first + SHARES[workers][rank])
    for name, changes in OBJECTIVES.items():
        run = load_run(None, changes)
        task = task_of(run)
        synchronize_norms(task, torch.device("cpu"))
        model = DistributedDataParallel(task, broadcast_buffers=False)
        loss = model(*inputs_of(run, own))
        weight = SHARES[workers][rank] * workers / IMAGES  # as the loop weighs a worker's share
        (loss * weight).backward()
        metrics = task.read_metrics(training=True)
        task.eval()
        evaluated = task(*inputs_of(run, own if rank else slice(0, IMAGES - sum(SHARES[workers][1:]))))
        gradients = {key: each.grad for key, each in task.named_parameters() if each.grad is not None}
        torch.save((loss.detach(), gradients, dict(task.named_buffers()), metrics, evaluated.detach()),
                   folder / f"{name}-{rank}.pt")  # fmt: skip
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def workers(request, tmp_path_factory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("workers")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (request.param, port, folder), nprocs=request.param)
    return request.param, folder


@pytest.mark.parametrize("name", OBJECTIVES)
def test_workers_have_the_loss_and_gradients_of_one(workers, name):
    number, folder = workers
    run = load_run(None, OBJECTIVES[name])
    task, inputs = task_of(run), inputs_of(run)
    loss = task(*inputs)
    loss.backward()
    alone = {key: each.grad for key, each in task.named_parameters() if each.grad is not None}
    assert any(each.abs().max() > 1e-4 for each in alone.values())
    metrics = task.read_metrics(training=True)
    evaluated = task.eval()(*inputs)
    for rank in range(number):
        both, gradients, buffers, known, scored = torch.load(folder / f"{name}-{rank}.pt")
        assert float(both) == pytest.approx(float(loss.detach()), abs=1e-9)
        assert float(scored) == pytest.approx(float(evaluated.detach()), abs=1e-9)
        assert known == pytest.approx(metrics, rel=1e-6)
        assert gradients.keys() == alone.keys()
        for key, gradient in alone.items():
            limit = 1e-6 * float(gradient.abs().max()) + 1e-9
            torch.testing.assert_close(gradients[key], gradient, rtol=1e-5, atol=limit)
        for key, buffer in task.named_buffers():
            torch.testing.assert_close(buffers[key], buffer, rtol=1e-8, atol=1e-10)


# ---- from given weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [LEJEPA, DISTILLED], ids=["lejepa", "self_distillation"])
@pytest.mark.parametrize("mode", ["full", "attn", "lora"])
def test_given_weights_go_on_after_the_head_has_learned_alone(tmp_path, settings, mode):
    folder = write_network(tmp_path / "model")
    changes = {"task.weights": str(folder), "task.mode": mode, "task.head_first": "2 steps", "optim.rule": "adamw"}
    run, initial = open_initial_weights(start := load_run(None, settings | changes), start.task, ())
    assert run.model.num_classes is None
    task = build_task(run)
    task.load_state_dict(task.state_dict() | initial.task_state(run))
    given = load_model(str(folder)).vit.state_dict()
    for module in ("vit", *(["teacher.vit"] if run.task.traits.network != "vit" else [])):
        own = tensors_of(module, task.state_dict())
        assert all(torch.equal(own[name], given[name]) for name in given if name in own and not name.startswith("head"))
    optimizer, inputs = build_optimizer(task, run.optim, torch.device("cpu")), inputs_of(run)
    inputs = [each.float() if isinstance(each, Tensor) and each.dtype == torch.float64 else each for each in inputs]
    changed = []
    for step in range(3):
        before = {name: each.clone() for name, each in task.state_dict().items()}
        task.before_step(step, 10, 40)
        task(*inputs).backward()
        task.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        changed.append({name for name, each in task.state_dict().items() if not torch.equal(each, before[name])})
    assert not any(name.startswith("vit.") for names in changed[:2] for name in names)
    assert all(any(name.startswith("head.") for name in names) for names in changed)
    learned = {name.removeprefix("vit.") for name in changed[2] if name.startswith("vit.")}
    assert {part_of(name) for name in learned} <= set(TRAINED[mode]) - {"head"}
    assert learned


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task.mode": "attn"}, "task.mode: got attn without task.weights, expected full: all weights are new"),
        ({"task.head_first": "1 epoch"}, "task.head_first: got a length without task.weights, expected null"),
        ({"guard.on_collapse": "stop"}, "guard.on_collapse stop needs evaluate.probes with knn or rank, and its bound"),
        ({"task.weights": "w", "task.lora.rank": 3}, "task.lora.rank is about mode lora alone; got mode full"),
        ({"task.weights": "w", "task.mode": "head"}, "task.mode: got 'head', expected 'full', 'attn', 'attn_norm'"),
    ],
)
def test_bad_starts_get_one_message(changes, message):
    with pytest.raises(ConfigError) as error:
        load_run(None, LEJEPA | changes)
    assert message in str(error.value)


def test_one_view_alone_predicts_nothing():
    alone = {key: value for key, value in LEJEPA.items() if key != "data.views.local.count"}
    with pytest.raises(ConfigError, match=r"data.views: got one view, expected at least two: task lejepa predicts"):
        load_run(None, alone | {"data.views": {"global": {"count": 1}, "local": None}})


def test_a_run_in_which_only_the_head_learns_is_refused(tmp_path):
    write_dataset(tmp_path / "data", {"train": 40, "val": 10})
    start = {"task.weights": str(write_network(tmp_path / "model")), "data.url": str(tmp_path / "data")}
    run = load_run(None, DISTILLED | start | {"optim.duration": "5 steps", "optim.warmup": "0 steps", "optim.batch": 8})
    with pytest.raises(ConfigError, match=r"task.head_first: got 1 epoch, which is 5 steps, expected fewer than the 5"):
        resolve(run)
    run = run.replace({"task.head_first": "4 steps"})
    resolved = resolve(run)
    assert resolved.length.total == 5
    shown = {"prototypes": "12", "teacher_temperature": "[0.05, 0.09]", "momentum": "0.99"}  # the last by 40 images
    assert {name: plan_of(resolved)[name] for name in shown} == shown
    assert "prototypes         12" in plan_text(resolved)
    lejepa = load_run(None, LEJEPA | {"data.url": start["data.url"], "optim.batch": 8, "optim.warmup": "0 steps"})
    assert resolve(lejepa).length.total == 800 * 5
    with pytest.raises(
        ConfigError, match=r"task.freeze_prototypes: got 5 steps, which is 5 steps, expected fewer than"
    ):
        resolve(run.replace({"task.freeze_prototypes": "5 steps"}))


def test_weights_are_scored_with_the_temperature_of_their_step():
    run = load_run(None, DISTILLED)
    first, second = build_task(run), build_task(run)
    first.before_step(8, 10, 40)
    assert float(first.temperature) != float(second.temperature)
    second.load_state_dict(first.state_dict())
    assert float(first.temperature) == float(second.temperature)


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [pytest.param(LEJEPA, marks=pytest.mark.slow), DISTILLED], ids=["lejepa", "self_distillation"]
)
def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path, monkeypatch, settings):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    write_dataset(tmp_path / "data", {"train": 40, "val": 13})
    short = {"optim.duration": "8 steps", "optim.warmup": "2 steps", "checkpoint.every": "3 steps", "optim.batch": 8}
    where = {"data.url": str(tmp_path / "data"), "compute.workers": 1, "compute.cpus": 1, "evaluate.every": "4 steps"}
    run, scores = load_run(None, settings | short | where), []
    whole = train(run, "whole", str(tmp_path / "runs"), here=True, callback=Callback(on_evaluation=note(scores)))
    take_step, taken = loop.take_step, []

    def fail(*arguments):
        taken.append(arguments)
        if len(taken) == 6:
            raise KeyError("a fault of this machine")
        return take_step(*arguments)

    monkeypatch.setattr(loop, "take_step", fail)
    with pytest.raises(KeyError):
        train(run, "broken", str(tmp_path / "runs"), here=True)
    monkeypatch.setattr(loop, "take_step", take_step)
    resumed = train(run, "broken", str(tmp_path / "runs"), here=True)
    folders = ("model", "student") if settings is DISTILLED else ("model",)
    for folder in folders:
        first, second = (load_model(f"{each.home}/{folder}").vit.state_dict() for each in (whole, resumed))
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert (Path(whole.home) / "student").exists() == (settings is DISTILLED)
    own = {"prediction", "normality"} if settings is LEJEPA else {"dino", "ibot", "koleo", "entropy", "prototypes_used"}
    assert own | {"loss"} == {name.removeprefix("val/") for name in scores[-1] if name.startswith("val/")}
    assert len(scores) == 2


@pytest.mark.slow
def test_teacher_and_student_are_fine_tuned_scored_inspected_predicted_and_served(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    write_dataset(tmp_path / "data", {"train": 60, "val": 20})
    short = {"data.url": str(tmp_path / "data"), "compute.workers": 1, "optim.warmup": "0 steps", "optim.batch": 8}
    short["optim.duration"] = "6 steps"
    start = write_network(tmp_path / "start")
    pretrained = train(
        load_run(None, DISTILLED | short | {"task.weights": str(start), "task.head_first": "2 steps"}),
        "pretrained",
        str(tmp_path / "runs"),
        here=True,
    )
    folders = [f"{pretrained.home}/{name}" for name in ("model", "student")]
    for folder in folders:
        assert vitray.open_weights(folder).run.task.weights == str(start)  # where it comes from
    data, out = short["data.url"], str(tmp_path / "scores")
    scores = vitray.evaluate(folders, data, probes=["knn", "rank"], out=out, workers=1)
    one, other = scores.values["models"]
    assert one["identity"] != other["identity"]
    assert {pair["score"] for pair in scores.values["comparisons"]} == {"knn10"}
    for number, folder in enumerate(folders):
        page = vitray.inspect(folder, data, most=4, out=str(tmp_path / f"page-{number}"), workers=1)
        assert "components" in (tmp_path / f"page-{number}/index.html").read_text()
        assert page.values
        vitray.predict(folder, data, str(tmp_path / f"part-{number}"), embedding=True, splits=["val"])
        tuning = {"task": {"kind": "finetune", "weights": folder, "mode": "attn"}, "model.image_size": 32}
        tuned = train(load_run(None, short | tuning), f"tuned-{number}", str(tmp_path / "runs"), here=True)
        [alone] = vitray.load(tuned.model).predict(png(3))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with serving_from(Serving(base=folder, tasks={"shapes": tuned.model}), "127.0.0.1", port):
            status, answer = ask(port, "/v1/predict?task=shapes", png(3))
        assert (status, answer["predictions"][0]["class"]) == (200, alone.name)


def test_a_planted_collapse_ends_the_run_with_its_likely_cause(tmp_path, monkeypatch):
    """A teacher that is the student itself, a center that stays, and a hundred times the rate."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    write_dataset(tmp_path / "data", {"train": 64, "val": 32})
    length = {"optim.duration": "30 steps", "optim.warmup": "0 steps", "optim.batch": 16, "evaluate.every": "10 steps"}
    where = {"data.url": str(tmp_path / "data"), "compute.workers": 1, "compute.cpus": 1}
    sound = DISTILLED | length | where | {"optim.lr": 1e-3, "guard.on_collapse": "stop", "task.prototypes": 64}
    planted = {"task.momentum": 0.0, "task.centering": "center", "task.center_momentum": 0.9999, "optim.lr": 0.1}
    message = (
        r"guard.on_collapse: at step (10|20) all images share [123] prototypes, below guard.min_prototypes, 4; likely"
        r" cause: task.momentum 0: the teacher is not an average of many steps; or task.center_momentum 0.9999: "
    )
    with pytest.raises(RunError, match=message):
        train(load_run(None, sound | planted), "planted", str(tmp_path / "runs"), here=True)
    assert train(load_run(None, sound), "sound", str(tmp_path / "runs"), here=True).state == "finished"


def note(scores: list) -> Callable[[int, dict[str, float]], None]:
    return lambda _, values: scores.append(values)
