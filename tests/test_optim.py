"""Parameter groups, LAMB, clipping and averages, compared with independent references."""

import io
import math
from copy import deepcopy

import numpy as np
import pytest
import timm.optim
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay
from timm.utils import ModelEmaV3
from torch import nn

from vitray.config import Model, load_run
from vitray.config.training import Ema, Optim
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.tasks.build import build_task
from vitray.training.optim import (
    Average,
    LambOptimizer,
    MuonOptimizer,
    average_decay,
    build_optimizer,
    clip_gradients,
    parameter_groups,
    set_learning_rate,
)

CPU = torch.device("cpu")


class Task(nn.Module):
    """A task: a ViT, and possibly another module."""

    def __init__(self, name="vit_u2x1_8", extra=None, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.vit = ViT(Model(name=name, **({"image_size": 32, "num_classes": 7} | settings)))
        if extra is not None:
            self.extra = extra


def optim(**settings) -> Optim:
    return Optim.model_validate({"duration": "40 steps", "warmup": "8 steps", "lr": 0.1} | settings)


def images(seed=1) -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


# ---- parameter groups ------------------------------------------------------------------------------------------------


def by_name(task: nn.Module, settings: Optim) -> dict[str, tuple[float, float]]:
    """{parameter: (lr_scale, weight_decay)}; each parameter is in one group, once."""
    groups = parameter_groups(task, settings)
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(listed) == len(set(listed))
    scales = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    names = {name: scales.pop(id(parameter)) for name, parameter in task.named_parameters() if id(parameter) in scales}
    assert not scales
    return names


def test_only_matrices_and_kernels_decay():
    names = by_name(Task(layerscale=1e-4), optim(weight_decay=0.3))
    branches = [f"vit.blocks.{block}.{branch}" for block in (0, 1) for branch in ("attn1", "ffn1")]
    layers = {"attn1": ("qkv", "out"), "ffn1": ("up", "down")}
    not_decaying = {"vit.class_token", "vit.positions.table", "vit.stem.proj.0.bias"}
    not_decaying |= {"vit.norm.weight", "vit.norm.bias", "vit.head.bias"}
    for branch in branches:
        not_decaying |= {f"{branch}.scale", f"{branch}.norm.weight", f"{branch}.norm.bias"}
        not_decaying |= {f"{branch}.{layer}.bias" for layer in layers[branch.rpartition(".")[2]]}
    assert {name for name, (_, decay) in names.items() if decay == 0} == not_decaying
    decaying = {"vit.stem.proj.0.weight", "vit.head.weight"}
    decaying |= {f"{branch}.{layer}.weight" for branch in branches for layer in layers[branch.rpartition(".")[2]]}
    assert {name for name, (_, decay) in names.items() if decay == 0.3} == decaying


@pytest.mark.parametrize("objective", ["mae", "mean_color"])
def test_class_and_mask_tokens_do_not_decay(objective):
    tiny = ["model.name=vit_u1x1_8", "model.image_size=32", "model.num_classes=null"]
    run = load_run(None, [*tiny, "task=masked", f"task.objective={objective}", "optim.weight_decay=0.3"])
    names = by_name(build_task(run), run.optim)
    assert {names[name][1] for name in ("mask_token", "vit.class_token", "vit.positions.table")} == {0.0}
    assert 0.3 in {decay for _, decay in names.values()}


@pytest.mark.parametrize("norm", ["bn", "ln"])
def test_only_the_kernels_of_an_hmlp_stem_decay(norm):
    names = by_name(Task(f"vit_u1x2_8_hmlp_{norm}", positions="sincos2d"), optim(weight_decay=0.3))
    stem = {name.removeprefix("vit.stem.proj."): decay for name, (_, decay) in names.items() if ".stem." in name}
    not_decaying = {"0.bias": 0, "1.weight": 0, "1.bias": 0, "3.bias": 0, "4.weight": 0, "4.bias": 0}
    assert stem == not_decaying | {"0.weight": 0.3, "3.weight": 0.3}


def test_frozen_parameters_are_left_out_and_shared_ones_counted_once():
    task = Task(extra=nn.Linear(64, 7))
    task.extra.weight = task.vit.head.weight
    task.vit.stem.requires_grad_(False)
    names = by_name(task, optim())
    assert set(names) == {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    assert not any(".stem." in name for name in names)


def test_parallel_branches_share_a_level():
    extra = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    names = by_name(Task("vit_u3x2_8", extra=extra), optim(layer_decay=0.5))
    scales = {name: scale for name, (scale, _) in names.items()}
    assert {scales[name] for name in scales if name.startswith("extra.")} == {1.0}
    assert {scales[name] for name in scales if name.startswith(("vit.norm.", "vit.head."))} == {1.0}
    for level, scale in enumerate([1 / 8, 1 / 4, 1 / 2]):
        assert {scales[name] for name in scales if name.startswith(f"vit.blocks.{level}.")} == {scale}
    below = ("vit.stem.", "vit.positions.", "vit.class_token")
    assert {scales[name] for name in scales if name.startswith(below)} == {1 / 16}


def test_layer_decay_equals_timms_except_for_the_last_norm():
    theirs = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=2, num_classes=7, no_embed_class=True
    )
    # timm puts the last norm in the last block's level; ours is in the head's, as in MAE and BEiT.
    theirs.norm.requires_grad_(False)
    task = Task("vit_u3x1_8")
    norm = by_name(task, optim(layer_decay=0.7))["vit.norm.weight"]
    assert norm == (1.0, 0.0)
    task.vit.norm.requires_grad_(False)

    def sizes(groups):
        return {
            (round(group["lr_scale"], 9), group["weight_decay"]): sum(p.numel() for p in group["params"])
            for group in groups
        }

    expected = param_groups_layer_decay(theirs, 0.1, theirs.no_weight_decay(), layer_decay=0.7)
    assert sizes(parameter_groups(task, optim(weight_decay=0.1, layer_decay=0.7))) == sizes(expected)


def test_without_layer_decay_there_are_two_groups():
    assert len(parameter_groups(Task("vit_u3x2_8"), optim())) == 2
    assert len(parameter_groups(Task("vit_u3x2_8"), optim(weight_decay=0.0))) == 1


# ---- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [{"kind": "adamw"}, {"kind": "sgd", "momentum": 0.0}])
def test_without_gradients_the_decay_shrinks_weights_by_lr(rule):
    task = Task()
    settings = optim(rule=rule, weight_decay=0.3, layer_decay=0.5)
    optimizer = build_optimizer(task, settings, CPU)
    set_learning_rate(optimizer, 0.02)
    before = deepcopy(dict(task.named_parameters()))
    for parameter in task.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, (scale, decay) in by_name(task, settings).items():
        shrunk = before[name] * (1 - 0.02 * scale * decay)
        torch.testing.assert_close(task.get_parameter(name), shrunk, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("rule", "reference"),
    [
        ({"kind": "adamw", "betas": [0.9, 0.95], "eps": 1e-6}, torch.optim.AdamW),
        ({"kind": "sgd", "momentum": 0.8, "nesterov": True}, torch.optim.SGD),
        ({"kind": "lamb", "betas": [0.8, 0.99], "eps": 1e-5}, LambOptimizer),
        ({"kind": "muon", "momentum": 0.9, "iterations": 4, "betas": [0.8, 0.99], "eps": 1e-5}, MuonOptimizer),
    ],
)
def test_a_rule_builds_its_optimizer(rule, reference):
    optimizer = build_optimizer(Task(), optim(rule=rule, layer_decay=0.5), CPU)
    assert type(optimizer) is reference
    for group in optimizer.param_groups:
        assert {key: group[key] for key in rule if key != "kind"} == {
            key: tuple(value) if isinstance(value, list) else value for key, value in rule.items() if key != "kind"
        }
        assert group["lr"] == 0.1 * group["lr_scale"]


def test_nesterov_needs_momentum():
    rule = {"kind": "sgd", "momentum": 0.0, "nesterov": True}
    with pytest.raises(ConfigError, match=r"optim.rule.nesterov: got true, expected false where"):
        build_optimizer(Task(), optim(rule=rule), CPU)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lamb", "muon"])
def test_every_optimizer_learns_and_resumes_exactly(kind):
    settings = optim(rule=kind if kind != "adamw" else {"kind": kind}, weight_decay=0.05, layer_decay=0.8)

    def take_steps(task, optimizer, steps):
        losses = []
        for step in steps:
            set_learning_rate(optimizer, 0.02 / (1 + step))
            loss = nn.functional.cross_entropy(task.vit(images()), torch.tensor([0, 1, 2, 3]))
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(task.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    task = Task("vit_u1x1_8")
    optimizer = build_optimizer(task, settings, CPU)
    losses = take_steps(task, optimizer, range(4))
    assert losses[-1] < losses[0]
    stored = io.BytesIO()
    torch.save({"task": task.state_dict(), "optimizer": optimizer.state_dict()}, stored)
    stored.seek(0)
    state = torch.load(stored, weights_only=True)
    other = Task("vit_u1x1_8")
    other.load_state_dict(state["task"])
    resumed = build_optimizer(other, settings, CPU)
    resumed.load_state_dict(state["optimizer"])
    assert take_steps(task, optimizer, range(4, 7)) == take_steps(other, resumed, range(4, 7))
    for name, parameter in task.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


SHAPES = [(5, 3), (4,), (2, 3, 2, 2), (3, 3)]


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    tensors[3].zero_()  # a norm of 0, for which the ratio is 1
    return [nn.Parameter(tensor) for tensor in tensors]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def lamb_groups(parameters, decays):
    return [
        {"params": [parameter], "weight_decay": decay, "lr_scale": 1.0}
        for parameter, decay in zip(parameters, decays, strict=True)
    ]


DECAYS = [(0.0,) * 4, (0.3,) * 4, (0.3, 0.0, 0.1, 0.3)]


@pytest.mark.parametrize("decays", DECAYS)
def test_lamb_equals_timms(decays):
    ours, theirs = weights(), weights()
    our_lamb = LambOptimizer(lamb_groups(ours, decays), lr=0.1, betas=(0.8, 0.9), eps=1e-3)
    reference = timm.optim.Lamb(lamb_groups(theirs, decays), lr=0.1, betas=(0.8, 0.9), eps=1e-3, max_grad_norm=None)
    for step in range(6):
        for optimizer, parameters in ((our_lamb, ours), (reference, theirs)):
            set_learning_rate(optimizer, 0.1 / (1 + step))
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        for parameter, reference_parameter in zip(ours, theirs, strict=True):
            torch.testing.assert_close(parameter, reference_parameter, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decays", DECAYS)
def test_lamb_equals_its_formula(decays):
    parameters = weights()
    optimizer = LambOptimizer(lamb_groups(parameters, decays), lr=0.1, betas=(0.8, 0.9), eps=1e-3)
    slow = [[float(value) for value in parameter.detach().flatten()] for parameter in parameters]
    m = [[0.0] * len(values) for values in slow]
    v = [[0.0] * len(values) for values in slow]
    for step in range(1, 6):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        for index, gradient in enumerate(gradients(step)):
            update = []
            for place, slope in enumerate(gradient.flatten().tolist()):
                m[index][place] = 0.8 * m[index][place] + 0.2 * slope
                v[index][place] = 0.9 * v[index][place] + 0.1 * slope**2
                direction = m[index][place] / (1 - 0.8**step)
                direction /= math.sqrt(v[index][place] / (1 - 0.9**step)) + 1e-3
                update.append(direction + decays[index] * slow[index][place])
            lengths = math.hypot(*slow[index]), math.hypot(*update)
            ratio = lengths[0] / lengths[1] if decays[index] and all(lengths) else 1.0
            slow[index] = [w - 0.1 * ratio * u for w, u in zip(slow[index], update, strict=True)]
            expected = torch.tensor(slow[index], dtype=torch.float64).view(SHAPES[index])
            torch.testing.assert_close(parameters[index].detach(), expected, rtol=1e-11, atol=1e-12)


def test_lamb_does_not_move_if_gradient_and_decay_cancel():
    parameter = nn.Parameter(torch.full((3,), -0.5, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    LambOptimizer([{"params": [parameter], "weight_decay": 1.0}], lr=0.1, eps=1.0).step()  # u = 1 / (1 + 1) - 1 * 0.5
    assert parameter.tolist() == [-0.5] * 3


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_lamb_scales_each_tensor_of_a_group_separately(decay, foreach):
    separate, grouped = weights(), weights()
    one_each = LambOptimizer(lamb_groups(separate, (decay,) * 4), lr=0.1)
    one = LambOptimizer([{"params": grouped, "weight_decay": decay}], lr=0.1, foreach=foreach)
    for step in range(3):
        for optimizer, parameters in ((one_each, separate), (one, grouped)):
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = gradient.clone()
            parameters[1].grad = None
            optimizer.step()
    assert torch.equal(grouped[1], weights()[1])
    for left, right in zip(separate, grouped, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-14, atol=0)


def test_muon_is_for_the_matrices_of_the_blocks():
    task = Task("vit_u1x2_8")
    rule = {"kind": "muon", "matrix_lr": 5.0}
    parts = {
        name: (group["parts"], group["lr_scale"], group["weight_decay"])
        for group in parameter_groups(task, optim(rule=rule, layer_decay=0.5, weight_decay=0.3))
        for name, parameter in task.named_parameters()
        if any(parameter is member for member in group["params"])
    }
    matrices = {name: value for name, value in parts.items() if value[0]}
    blocks = [name for name, value in task.named_parameters() if name.startswith("vit.blocks.") and value.ndim == 2]
    assert sorted(matrices) == sorted(blocks)
    assert matrices["vit.blocks.0.attn2.qkv.weight"] == (3, 2.5, 0.3)
    assert matrices["vit.blocks.0.ffn1.up.weight"] == (1, 2.5, 0.3)
    assert parts["vit.head.weight"] == (0, 1.0, 0.3)


@pytest.mark.parametrize(("parts", "shape"), [(1, (5, 3)), (1, (3, 5)), (3, (6, 2)), (3, (6, 4))])
def test_muon_equals_the_quintic_of_singular_values(parts, shape):
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    ours = nn.Parameter(start.clone())
    group = {"params": [ours], "weight_decay": 0.3, "parts": parts}
    # One more of the same shape, which is made orthogonal beside it.
    other = {"params": [nn.Parameter(start.clone())], "weight_decay": 0.0, "parts": parts}
    optimizer = MuonOptimizer([group, other], lr=0.1, momentum=0.9, iterations=4)
    expected, momentum = start.numpy().copy(), np.zeros(shape)
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        for each in (ours, *other["params"]):
            each.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + gradient.numpy()
        expected *= 1 - 0.1 * 0.3
        rows = shape[0] // parts
        for part in range(parts):
            these = slice(rows * part, rows * (part + 1))
            left, values, right = np.linalg.svd((gradient.numpy() + 0.9 * momentum)[these], full_matrices=False)
            values = values / np.sqrt((values**2).sum())
            for _ in range(4):
                values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
            expected[these] -= 0.1 * max(1, rows / shape[1]) ** 0.5 * (left * values) @ right
        np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=1e-6, atol=1e-7)


def test_muon_equals_torchs_but_for_its_bfloat16():
    start = torch.randn(16, 8, generator=torch.Generator().manual_seed(6))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = MuonOptimizer([{"params": [ours], "weight_decay": 0.1, "parts": 1}], lr=0.1)
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original")
    for step in range(4):
        for each in (ours, theirs):
            each.grad = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        reference.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.01 * moved


def test_the_other_parameters_of_muon_are_adamws():
    ours, theirs = weights(), weights()
    groups = [{"params": ours, "weight_decay": 0.3}]
    optimizer = MuonOptimizer(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-3, fused=True)
    reference = torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3)
    for step in range(5):
        for each, parameters in ((optimizer, ours), (reference, theirs)):
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = gradient.clone()
            each.step()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


# ---- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [None, 0.5, 1e6])
def test_clipping_shortens_long_gradients(longest):
    parameters = weights()
    for parameter, gradient in zip(parameters, gradients(0), strict=True):
        parameter.grad = gradient.clone()
    parameters[1].grad = None
    present = [gradient for index, gradient in enumerate(gradients(0)) if index != 1]
    length = math.sqrt(sum(float((gradient**2).sum()) for gradient in present))
    assert float(clip_gradients(iter(parameters), longest)) == pytest.approx(length, rel=1e-12)
    factor = min(1.0, (longest or math.inf) / length)
    for parameter, gradient in zip([p for p in parameters if p.grad is not None], present, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", ["lamb", "muon"])
def test_a_step_never_waits_for_the_device(rule):
    # A meta tensor has no values: reading one, as waiting for a GPU does, raises.
    with torch.device("meta"):
        task = Task("vit_u1x2_8_hmlp_bn")
    optimizer = build_optimizer(task, optim(rule=rule, layer_decay=0.5), torch.device("meta"))
    average = Average(task, Ema())
    for parameter in task.parameters():
        parameter.grad = torch.empty_like(parameter)
    assert clip_gradients(task.parameters(), 1.0).is_meta
    optimizer.step()
    average.update(0)


# ---- moving average --------------------------------------------------------------------------------------------------


def perturb(module: nn.Module, seed: int) -> None:
    """Change weights and batch statistics, like a step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator)
    module.train()(images(seed))


def test_the_decay_of_the_average_is_lower_in_the_first_steps():
    assert [average_decay(Ema(decay=0.5), step) for step in (0, 1, 8, 1000)] == [0.1, 2 / 11, 0.5, 0.5]
    assert average_decay(Ema(decay=0.5, warmup=False), 0) == 0.5


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_equals_the_explicit_sum(warmup):
    task = Task("vit_u1x1_8_hmlp_bn").vit
    average = Average(task, Ema(decay=0.7, warmup=warmup))
    slow = {name: tensor.double() for name, tensor in task.state_dict().items()}
    for step in range(6):
        perturb(task, step)
        average.update(step)
        decay = min(0.7, (1 + step) / (10 + step)) if warmup else 0.7
        for name, tensor in task.state_dict().items():
            slow[name] = decay * slow[name] + (1 - decay) * tensor.double()
    counts = [name for name in slow if name.endswith("num_batches_tracked")]
    assert len(counts) == 2
    assert any(name.endswith("running_var") for name in average.state())
    for name, tensor in average.state().items():
        if name in counts:
            assert tensor == 6
        else:
            torch.testing.assert_close(tensor, slow[name].float(), rtol=1e-5, atol=1e-6)
    assert set(average.state()) == set(slow)


def test_the_average_equals_timms():
    task = Task("vit_u1x1_8_hmlp_bn").vit
    average, reference = Average(task, Ema(decay=0.9, warmup=False)), ModelEmaV3(task, decay=0.9)
    for step in range(4):
        perturb(task, step)
        average.update(step)
        reference.update(task)
    for name, tensor in reference.module.state_dict().items():
        torch.testing.assert_close(average.state()[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("execution", ["loop", "fused"])
def test_the_average_is_applied_and_removed_bit_by_bit(execution):
    task = Task("vit_u1x2_8_hmlp_bn", execution=execution, layerscale=0.1).vit
    average = Average(task, Ema(decay=0.5))
    perturb(task, 1)
    average.update(100)
    task.eval()
    copy = deepcopy(task)
    copy.load_state_dict(average.state())

    def evaluate_until_interrupted():
        with average.applied_to(task):
            assert torch.equal(task(images()), copy(images()))
            assert not torch.equal(task(images()), own)
            raise KeyboardInterrupt

    with torch.no_grad():
        own, before = task(images()), deepcopy(task.state_dict())
        with pytest.raises(KeyboardInterrupt):
            evaluate_until_interrupted()
        assert torch.equal(task(images()), own)
    for name, tensor in task.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_frozen_parameters_and_constants_have_no_average():
    task = Task(positions="sincos2d")
    task.vit.stem.requires_grad_(False)
    names = set(Average(task, Ema()).state())
    assert names == {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    assert "vit.stem.proj.0.weight" not in names


def test_the_average_is_kept_in_float32():
    task = Task().to(torch.bfloat16)
    average = Average(task, Ema(decay=0.999, warmup=False))
    assert {tensor.dtype for tensor in average.state().values()} == {torch.float32}
    start = task.vit.head.weight.float()
    with torch.no_grad():
        task.vit.head.weight += 1
    for step in range(10):
        average.update(step)
    # In bfloat16 every one of these steps would round to nothing.
    expected = start + (1 - 0.999**10) * (task.vit.head.weight.float() - start)
    torch.testing.assert_close(average.state()["vit.head.weight"], expected, rtol=1e-4, atol=1e-6)
    with average.applied_to(task):
        assert task.vit.head.weight.dtype == torch.bfloat16


def test_a_resumed_average_continues_exactly():
    task = Task("vit_u1x1_8_hmlp_bn").vit
    average = Average(task, Ema())
    perturb(task, 0)
    average.update(0)
    other = Average(task, Ema())
    other.load(deepcopy(average.state()))
    for step in (1, 2):
        perturb(task, step)
        average.update(step)
        other.update(step)
    for name, tensor in average.state().items():
        assert torch.equal(tensor, other.state()[name]), name


def test_a_state_of_another_module_is_refused():
    average = Average(Task(), Ema())
    state = average.state()
    with pytest.raises(ValueError, match=r"the average of vit.class_token is missing"):
        average.load({name: tensor for name, tensor in state.items() if name != "vit.class_token"})
    with pytest.raises(ValueError, match="the average of other is not tracked here"):
        average.load(state | {"other": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"vit.head.bias: got a tensor of shape \(8,\), expected \(7,\)"):
        average.load(state | {"vit.head.bias": torch.zeros(8)})
