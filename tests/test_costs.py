"""Costs of tasks: each counts the products of its training step and its trained parameters, as torch counts them."""

import math
import subprocess
import sys
from typing import get_args

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitray.config import Run, load_run
from vitray.config.augmentation import Normalize
from vitray.config.classification import Mode
from vitray.config.pretraining import Masked, Tokenizer
from vitray.config.self_supervised import Lejepa, SelfDistillation
from vitray.data.augment.masks import draw_sources
from vitray.data.augment.views import view_kinds
from vitray.models.network import build_network
from vitray.models.tokenizer import VisualTokenizer
from vitray.tasks.build import Task, TaskCosts, build_task, task_costs
from vitray.tasks.supervised import Teacher

TINY = {"model.name": "vit_u2x2_8", "model.image_size": 32, "model.num_classes": 10}
FINETUNED = {"task.kind": "finetune", "task.weights": "w"}
IMAGES = 2


def run_of(settings):
    return load_run().replace(TINY | settings)


def masked(**objective):
    return {"model.num_classes": None, "task": {"kind": "masked", "objective": objective}}


def counted(run: Run, task: Task) -> float:
    """Return what torch counts in a training step of a task for one image, in billions of multiply-adds."""
    images = torch.randn(IMAGES, 3, *run.model.image_shape)
    match run.task:
        case Masked():
            targets = torch.as_tensor(draw_sources(run.task.mask, run.model.grid, 0, 0, range(IMAGES)))
        case Tokenizer():
            targets = torch.zeros(IMAGES, dtype=torch.int64)
        case Lejepa() | SelfDistillation():
            return counted_of_views(run, task)
        case _:
            targets = torch.eye(run.model.num_classes)[:IMAGES]
    # The plain kernel: a fused one computes the logits once more in its backward pass.
    with FlopCounterMode(display=False) as flops, sdpa_kernel(SDPBackend.MATH):
        task(images, *[targets] * len(run.task.traits.needs)).backward()
    return flops.get_total_flops() / IMAGES / 2e9


def counted_of_views(run: Run, task: Task) -> float:
    """The same for a task that compares views, with as many masked patches as there are on average."""
    large, small = view_kinds(run.data.chosen_views, run.model.image_shape, run.model.shape.patch, run.data.augment)
    images, views = (torch.randn(IMAGES, kind.number, 3, *kind.size) for kind in (large, small))
    task.before_step(5, 4, 10)
    inputs = [images, views]
    if run.task.kind == "self_distillation":
        masks = torch.zeros(IMAGES, large.number, math.prod(run.model.grid), dtype=torch.bool)
        hidden = round(run.task.mask.chance * sum(run.task.mask.ratio) / 2 * masks[0].numel()) * IMAGES
        masks.flatten()[torch.randperm(masks.numel(), generator=torch.Generator().manual_seed(0))[:hidden]] = True
        inputs += [masks, hidden]
    with FlopCounterMode(display=False) as flops, sdpa_kernel(SDPBackend.MATH):
        task(*inputs).backward()
    return flops.get_total_flops() / IMAGES / 2e9


def assert_counted(run, tokenizer=None, teacher=None):
    task = build_task(run, tokenizer, teacher).train()
    costs = task_costs(run, tokenizer, teacher)
    assert costs.step_gflops == counted(run, task)
    parameters = [*task.parameters()]
    assert costs.params == sum(each.numel() for each in parameters)
    assert costs.trained_params == sum(each.numel() for each in parameters if each.grad is not None)
    return costs


PLAIN = {"model.class_token": False, "model.pool": "mean"}
AXIAL = PLAIN | {"model.attention": "axial", "model.image_size": [32, 48], "model.positions": "learned2d"}
NETWORKS = {
    "plain": {},
    "rectangular": {"model.image_size": [32, 48], "model.positions": "sincos2d", "model.layerscale": 0.1},
    "hmlp": {"model.name": "vit_u3x1_16_hmlp_bn"},
    "conv": {"model.name": "vit_u2x1_16_conv_ln", "model.registers": 2},
    "pooled": {"model.name": "vit_u2x1_8_pooled", "model.ffn_ratio": 1.5},
    "local": {"model.name": "vit_u2x1_8_local"},
    "hybrid": {"model.name": "vit_u1x1_16_r26", "model.image_size": 64},
    "root": {"model.name": "vit_u1x1_8_r"},
    "relative": PLAIN | {"model.positions": "relative"},
    "axial": AXIAL | {"model.name": "vit_u4x2_8", "model.qk_norm": True},
    "levels": {"model.positions": {"kind": "learned", "where": "levels"}},
    "shared": {"model.positions": {"kind": "learned2d", "where": "shared"}},
    "rope": {"model.positions": "rope", "model.qk_norm": True, "model.norm": "rmsnorm", "model.bias": False},
    "swiglu": {"model.activation": "swiglu", "model.head": {"kind": "mlp", "hidden": 5}},
    "two heads": {"model.distillation_token": True, "model.head": {"kind": "mlp", "hidden": 5}},
    "fused": {"model.execution": "fused"},
    "adapters": {"model.adapters": 4},
    "drop path": {"model.drop_path": 0.5, "model.drop_path_draw": "share", "model.dropout": 0.1},
}


@pytest.mark.parametrize("settings", NETWORKS.values(), ids=NETWORKS.keys())
def test_a_supervised_step_costs_what_torch_counts(settings):
    assert_counted(run_of(settings))


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("network", ["plain", "rectangular", "hybrid", "local", "relative", "rope", "two heads"])
def test_a_fine_tuning_costs_its_trained_weights_and_the_way_down_to_the_lowest(mode, network):
    settings = NETWORKS[network] | FINETUNED
    if mode == "adapter":
        settings |= {"model.adapters": 4}
    assert_counted(run_of(settings | {"task.mode": mode}))


@pytest.mark.parametrize(
    "settings",
    [
        {"task.mode": "head", "task.also_train": ["stem"]},
        {"task.mode": "head", "task.also_train": ["class_token"]},
        {"task.mode": "head", "task.also_train": ["layerscale"], "model.layerscale": 0.1},
        {"task.mode": "attn", "task.first_branch": True},
        {"task.mode": "last", "model.name": "vit_u4x1_8", "task.levels": 2},
        {"task.mode": "lora", "task.lora.matrices": ["q", "k", "v", "out", "up", "down"], "task.lora.rank": 3},
        {"task.mode": "ffn", "model.drop_path": 0.5, "model.drop_path_draw": "share", "task.cosub.weight": 0.5},
    ],
    ids=str,
)
def test_further_trained_parts_of_a_fine_tuning_cost_what_torch_counts(settings):
    assert_counted(run_of(FINETUNED | settings))


def test_a_fine_tuning_of_the_last_level_costs_little_more_than_a_forward_pass():
    costs = {mode: task_costs(run_of(FINETUNED | {"model.name": "vit_u12x1_8", "task.mode": mode})) for mode in LEVELS}
    assert costs["head"].step_gflops < costs["last"].step_gflops < 1.2 * costs["head"].step_gflops
    assert costs["full"].step_gflops > 2.9 * costs["head"].step_gflops


LEVELS = ("head", "last", "full")


@pytest.mark.parametrize("objective", ["mean_color", "small_patch", "pixels_l2", "pixels_l1"])
def test_a_masked_step_costs_its_network_and_its_head_on_hidden_patches(objective):
    assert_counted(run_of(masked(kind=objective)))


OBJECTIVES = {
    "lejepa": {"kind": "lejepa", "slices": 4},
    "dino": {"kind": "self_distillation", "ibot": 0, "koleo": 0, "prototypes": 40},
    "ibot": {"kind": "self_distillation", "dino": 0, "koleo": 0, "mask.chance": 1.0, "mask.ratio": [0.5, 0.5]},
    "both": {
        "kind": "self_distillation",
        "koleo": 0,
        "shared_head": False,
        "mask": {"chance": 0.5, "ratio": [0.5, 0.5]},
    },
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("network", ["plain", "hmlp", "rope"])
def test_a_step_of_views_costs_each_of_them_and_its_teacher(name, network):
    settings = {"model.num_classes": None, "data.views.local.count": 3}
    settings |= {f"task.{name}": value for name, value in OBJECTIVES[name].items()}
    run = run_of(NETWORKS[network] | settings)
    costs = assert_counted_of(run)
    assert (costs.params > 1.9 * costs.trained_params) == (name != "lejepa")


def assert_counted_of(run: Run) -> TaskCosts:
    """As `assert_counted`, where products of activations alone are no part of the costs: a slice, a neighbor."""
    task = build_task(run).train()
    costs = task_costs(run)
    assert costs.step_gflops == pytest.approx(counted(run, task), rel=0.01)
    parameters = [*task.parameters()]
    assert costs.params == sum(each.numel() for each in parameters)
    assert costs.trained_params == sum(each.numel() for each in parameters if each.requires_grad)
    return costs


@pytest.mark.parametrize("network", ["plain", "rectangular", "local", "relative", "rope"])
def test_a_masked_autoencoder_costs_its_encoder_on_visible_patches_and_its_decoder_on_all(network):
    decoder = {"decoder_width": 32, "decoder_depth": 3, "decoder_heads": 4}
    assert_counted(run_of(NETWORKS[network] | masked(kind="mae", **decoder)))


def tokenizer_run(**settings):
    task = {"kind": "tokenizer", "levels": [4, 3], "decoder_width": 32, "decoder_depth": 3, "decoder_heads": 4}
    return run_of({"model.num_classes": None, "task": task} | settings)


def test_a_tokenizer_costs_its_encoder_and_its_decoder():
    assert_counted(tokenizer_run())


def test_predicting_codes_costs_the_tokenizers_encoder_too():
    tokenizer = VisualTokenizer(tokenizer_run(**{"model.name": "vit_u3x1_8"}))
    run = run_of(masked(kind="beit", tokenizer="t") | {"task.mask": {"min_patches": 2}})
    assert_counted(run, tokenizer)


@pytest.mark.parametrize("teacher", ["vit_u3x1_8", "torchvision/resnet18"])
def test_a_distillation_costs_its_teachers_forward_pass_too(teacher):
    run = run_of({"model.distillation_token": True, "task.distill.teacher": "t"})
    network = build_network(run_of({"model.name": teacher}).model)
    costs = assert_counted(run, teacher=Teacher(network, Normalize()))
    assert costs.step_gflops > task_costs(run).step_gflops


def test_co_training_costs_two_passes():
    settings = {"model.drop_path": 0.5, "model.drop_path_draw": "share"}
    alone, both = run_of(settings), run_of(settings | {"task.cosub.weight": 0.5})
    assert assert_counted(both).step_gflops == 2 * task_costs(alone).step_gflops


@pytest.mark.parametrize("mode", ["full", "head", "norm"])
@pytest.mark.parametrize("name", ["torchvision/resnet18", "torchvision/swin_t"])
def test_a_network_of_torchvision_costs_what_torch_counts(name, mode):
    assert_counted(run_of(FINETUNED | {"model.name": name, "model.image_size": 64, "task.mode": mode}))


def test_grouped_convolutions_cost_no_more_backward_than_dense_ones():
    """torch's formula counts the gradient of a grouped kernel as if it were dense."""
    run = run_of({"model.name": "torchvision/convnext_tiny", "model.image_size": 64})
    forward = task_costs(
        run_of(FINETUNED | {"model.name": run.model.name, "model.image_size": 64, "task.mode": "head"})
    )
    assert 2.9 < task_costs(run).step_gflops / forward.step_gflops < 3
    assert counted(run, build_task(run)) > 2 * task_costs(run).step_gflops


def test_a_step_of_drawn_patch_sizes_costs_their_mean():
    run = run_of({"model.patches": [4, 8, 16]})
    each = [task_costs(run_of({"model.name": f"vit_u2x2_{patch}"})).step_gflops for patch in (4, 8, 16)]
    assert task_costs(run).step_gflops == pytest.approx(sum(each) / 3, rel=1e-12)
    assert each[0] > each[1] > each[2]


def test_the_costs_of_learning_classes_are_counted_without_torch_compile():
    """Its import takes two seconds, for which the plan of each run would wait."""
    code = (
        "import sys; from vitray.config import load_run; from vitray.tasks.build import task_costs\n"
        f"for settings in {[TINY | each for each in NETWORKS.values()]!r}: task_costs(load_run().replace(settings))\n"
        "print({'torch._dynamo', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
