"""Fine-tuning: parts, freezing, the cost of frozen weights, the audit, and adapted initial weights."""

from collections import Counter
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitray.config import Model, Run
from vitray.config.classification import TRAINED, Finetune, Part
from vitray.config.model_names import STEMS
from vitray.config.training import Ema, Optim
from vitray.errors import ConfigError
from vitray.models.positions import resample
from vitray.models.sizes import sizes_of
from vitray.models.vit import ViT
from vitray.tasks.build import build_task
from vitray.tasks.supervised import Classification
from vitray.training.optim import Average, build_optimizer, clip_gradients, parameter_groups
from vitray.weights.freezing import audit, audit_table, freeze, part_of, parts_of, prepare
from vitray.weights.pretrained import adapt

MODES = ("full", "attn", "attn_norm", "ffn", "norm", "head")  # of whole parts; test_adapters has the others
# The others are of networks of torchvision.
VIT_PARTS = [part for part in get_args(Part) if part != "body" and not part.startswith("stage")]
TINY = {"name": "vit_u2x2_8_hmlp_bn", "image_size": 32, "num_classes": 7, "layerscale": 0.1}


def model(**settings) -> Model:
    return Model(**{**TINY, **settings})


def vit(**settings) -> ViT:
    torch.manual_seed(0)
    return ViT(model(**settings))


def tuned(mode: str, model_settings=None, **settings) -> Classification:
    torch.manual_seed(0)
    task = {"kind": "finetune", "weights": "unread", "mode": mode, **settings}
    return build_task(Run().replace({"model": {**TINY, **(model_settings or {})}, "task": task}))


def images(size=32) -> torch.Tensor:
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1))


TARGETS = nn.functional.one_hot(torch.tensor([0, 3, 3, 6]), 7).float()


def train_steps(task: Classification, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = build_optimizer(task, Optim(lr=0.05, weight_decay=0.1), torch.device("cpu"))
    for _ in range(steps):
        task(images(), TARGETS).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layerscale": 0.1, "head": {"kind": "mlp", "hidden": 24}},
        {"num_classes": None, "pool": "mean", "class_token": False, "positions": "none"},
        {"positions": "sincos2d", "pool": "mean_then_norm"},
        {"positions": {"kind": "learned2d", "where": "levels"}, "registers": 4, "qk_norm": True},
        {"positions": "relative", "class_token": False, "pool": "mean", "norm": "rmsnorm", "activation": "swiglu"},
        {"adapters": 5},
        {"adapters": 3, "bias": False},
    ],
)
def test_every_parameter_is_of_one_part(stem, branches, settings):
    described = Model(name=f"vit_u2x{branches}_16_{stem}", image_size=32, **settings)
    with torch.device("meta"):
        network = ViT(described)
    counted: Counter[Part] = Counter()
    for name, part in parts_of(network).items():
        counted[part] += network.get_parameter(name).numel()
    assert counted == {part: count for part, count in sizes_of(described).parts.items() if count}
    assert sum(counted.values()) == sum(parameter.numel() for parameter in network.parameters())


def test_parts_of_representative_names():
    network = vit(head={"kind": "mlp"}, registers=4, qk_norm=True, adapters=3, distillation_token=True)
    prepare(network, Finetune(weights="unread", mode="lora"))
    parts = parts_of(network)
    for name, part in {
        "stem.proj.1.weight": "stem",  # a norm inside the stem
        "class_token": "class_token",
        "distillation_token": "distillation_token",
        "registers": "registers",
        "positions.table": "positions",
        "norm.bias": "norms",
        "blocks.1.attn2.norm.weight": "norms",
        "blocks.0.ffn1.norm.bias": "norms",
        "blocks.0.attn1.qkv.bias": "attn",
        "blocks.1.attn2.out.weight": "attn",
        "blocks.1.attn2.q_norm.bias": "attn",
        "blocks.0.ffn2.up.weight": "ffn",
        "blocks.0.ffn2.down.bias": "ffn",
        "blocks.0.ffn2.scale": "layerscale",
        "blocks.0.ffn2.adapter.down.weight": "adapters",
        "blocks.1.attn2.qkv.lora.q.a.weight": "lora",
        "head.distillation_token.0.weight": "head",
    }.items():
        assert parts[name] == part
    assert set(parts.values()) == set(VIT_PARTS)


def test_an_unknown_parameter_has_no_part():
    with pytest.raises(AssertionError, match=r"parameter blocks\.0\.attn1\.gate belongs to no part"):
        part_of("blocks.0.attn1.gate")


# ---- freezing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("also", [(), ("norms",), ("stem", "layerscale", "class_token")])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_trains_only_its_parts(mode, also):
    also = tuple(part for part in also if part not in TRAINED[mode])
    task = tuned(mode, also_train=also)
    before = {name: tensor.clone() for name, tensor in task.vit.state_dict().items()}
    train_steps(task)
    changed = {name for name, tensor in task.vit.state_dict().items() if not torch.equal(tensor, before[name])}
    trained_parts = {*TRAINED[mode], *also}
    # Running statistics change with their stem.
    assert changed == {name for name in before if part_of(name) in trained_parts}


def test_first_branch_trains_one_attention_of_two_like_deit():
    task = tuned("attn", first_branch=True)
    trained = {name for name, parameter in task.vit.named_parameters() if parameter.requires_grad}
    # DeiT trains names with ".attn.", the head and the positions; its second branch is named attn1.
    branch = {f"blocks.{level}.attn1.{layer}" for level in (0, 1) for layer in ("qkv", "out")}
    assert trained == {
        *(f"{layer}.{kind}" for layer in branch for kind in ("weight", "bias")),
        "head.weight",
        "head.bias",
        "positions.table",
    }


@pytest.mark.parametrize(
    ("settings", "mode", "also", "message"),
    [
        (
            {"num_classes": None},
            "head",
            (),
            r"task.mode: got head, which leaves nothing to train of .* model.num_classes null",
        ),
        (
            {"layerscale": None},
            "attn",
            ("layerscale",),
            r"task.also_train: got layerscale, expected parts that vit_u2x2_8_hmlp_bn has",
        ),
        (
            {"positions": "sincos2d"},
            "head",
            ("stem", "positions"),
            r"task.also_train: got positions, expected parts that",
        ),
    ],
)
def test_modes_without_parameters_are_refused(settings, mode, also, message):
    with pytest.raises(ConfigError, match=message):
        freeze(vit(**settings), Finetune(weights="unread", mode=mode, also_train=also))


def test_another_mode_unfreezes_the_previous_one():
    network = vit()
    freeze(network, Finetune(weights="unread", mode="head"))
    freeze(network, Finetune(weights="unread"))
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert all(module.training for module in network.modules())


def statistics(task: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in task.named_buffers()}


@pytest.mark.parametrize("also", [(), ("stem",)])
def test_frozen_batch_norms_keep_their_statistics(also):
    task = tuned("attn", also_train=also)
    before = statistics(task)
    # Like evaluation: it switches the mode of the network, not of the task.
    task.vit.eval()
    task.vit.train()
    assert task.vit.blocks[0].training
    task.train()(images(), TARGETS).backward()
    unchanged = all(torch.equal(buffer, before[name]) for name, buffer in statistics(task).items())
    assert unchanged == (also == ())


def test_a_frozen_stem_stays_in_evaluation_mode():
    task = tuned("head")
    with torch.no_grad():
        trained = task.train().vit.stem(images())[0]
        assert torch.equal(trained, task.eval().vit.stem(images())[0])


def test_frozen_parts_stay_frozen_on_several_workers():
    task = tuned("attn")
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(task).train()
        model(images(), TARGETS).backward()
        model.eval()
        model.train()
        model(images(), TARGETS).backward()
    finally:
        dist.destroy_process_group()
    assert {name for name, parameter in task.named_parameters() if parameter.grad is not None} == {
        name for name, parameter in task.named_parameters() if parameter.requires_grad
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.state_dict().items())


# ---- the cost of frozen weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_frozen_weights_have_no_gradient_no_state_and_no_average(mode):
    task = tuned(mode)
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    task(images(), TARGETS).backward()
    assert {name for name, parameter in task.named_parameters() if parameter.grad is not None} == trained
    gradients = [parameter.grad.flatten().double() for parameter in task.parameters() if parameter.grad is not None]
    norm = clip_gradients(task.parameters(), None)
    assert float(norm) == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-4)

    groups = parameter_groups(task, Optim())
    assert {names[id(parameter)] for group in groups for parameter in group["params"]} == trained
    optimizer = train_steps(task)
    assert {names[id(parameter)] for parameter in optimizer.state} == trained
    buffers = {name for name, _ in task.named_buffers()}
    assert set(Average(task, Ema()).state()) - buffers == trained


def test_the_average_of_a_frozen_buffer_is_the_buffer():
    task = tuned("attn")
    average = Average(task, Ema())
    before = statistics(task)
    train_steps(task)
    average.update(step=3)
    assert all(torch.equal(average.state()[name], buffer) for name, buffer in before.items())


# ---- the audit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_branch", "trained", "share"), [(False, 85_045_248, "33.1 %"), (True, 42_522_624, "16.6 %")]
)
def test_the_audit_matches_the_paper(first_branch, trained, share):
    with torch.device("meta"):
        network = ViT(Model(name="ViT-B18x2/16", layerscale=1e-4))
    freeze(network, Finetune(weights="unread", mode="attn", first_branch=first_branch))
    audited = audit(network)
    row = next(row for row in audited.rows if row.part == "attn")
    assert (row.parameters, row.trained, row.bytes_trained) == (85_045_248, trained, 4 * trained)
    assert f"{audited.parameters / 1e6:.2f}" == "256.73"
    assert audited.trained == trained + 150_528 + 769_000  # and positions and head
    lines = {line.split("|")[1].strip(): line for line in audit_table(audited).splitlines()}
    assert f"{trained:,} | {share} |" in lines["attn"]
    assert f" | {100 * audited.share:.1f} % |" in lines["total"]


def test_an_audit_table_is_aligned_markdown():
    network = vit(registers=4, adapters=3, distillation_token=True)
    prepare(network, Finetune(weights="unread", mode="lora"))
    lines = audit_table(audit(network)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert {line.count("|") for line in lines} == {6}
    assert set(lines[1]) == {"|", "-", ":"}
    assert [line.split("|")[1].strip() for line in lines[2:]] == [*VIT_PARTS, "total"]


def test_the_audit_counts_trained_parameters():
    task = tuned("ffn", {"layerscale": None})
    audited = audit(task.vit)
    assert audited.parameters == sum(parameter.numel() for parameter in task.parameters())
    assert audited.trained == sum(parameter.numel() for parameter in task.parameters() if parameter.requires_grad)
    assert audited.bytes_trained == 4 * audited.trained
    assert {row.part for row in audited.rows if row.trained} == {"ffn", "positions", "head"}
    assert "layerscale" not in {row.part for row in audited.rows}


# ---- initial weights -------------------------------------------------------------------------------------------------


def adapted(initial: ViT, expected: Model, new_head: bool = False) -> ViT:
    network = ViT(expected)
    network.load_state_dict(adapt(initial, expected, "task.weights models/a", new_head=new_head))
    return network.eval()


@pytest.mark.parametrize("positions", ["learned", "sincos2d", "none"])
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_the_same_network_keeps_its_weights(positions, head):
    initial = vit(positions=positions, head=head).eval()
    update_statistics(initial)
    # Settings of execution and training may differ.
    free = {"drop_path": 0.3, "drop_path_draw": "share", "dropout": 0.1, "execution": "loop", "layerscale": 1e-6}
    network = adapted(initial, model(positions=positions, head=head, **free))
    assert all(torch.equal(tensor, initial.state_dict()[name]) for name, tensor in network.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(network(images()), initial(images()))


def update_statistics(network: ViT) -> None:
    network.train()(images())
    network.eval()


@pytest.mark.parametrize("convention", ["google", "deit", "timm", "torchvision"])
def test_positions_are_resized_by_the_recorded_method(convention):
    initial = vit(positions={"kind": "learned", "resample": convention}).eval()
    expected = model(image_size=[48, 64], positions={"kind": "learned", "resample": "deit"})
    network = adapted(initial, expected)
    table = resample(initial.positions.table, (4, 4), (6, 8), convention)
    torch.testing.assert_close(network.positions.table, table)
    pictures = torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(network(pictures), initial(pictures))


@pytest.mark.parametrize("positions", ["sincos2d", "none"])
def test_positions_without_a_table_fit_every_grid(positions):
    initial = vit(positions=positions).eval()
    network = adapted(initial, model(positions=positions, image_size=48))
    with torch.no_grad():
        torch.testing.assert_close(network(images(48)), initial(images(48)))


@pytest.mark.parametrize(
    ("old", "new", "new_head", "is_kept"),
    [
        ({}, {}, False, True),
        ({}, {}, True, False),  # the same number of other classes
        ({}, {"num_classes": 5}, False, False),
        ({"num_classes": None}, {}, False, False),
        ({"head": "mlp"}, {"head": "linear"}, False, False),
        ({"head": "mlp"}, {"head": "mlp"}, False, True),
        ({"head": "mlp"}, {"head": "mlp", "num_classes": 5}, False, False),
        ({}, {"head": {"kind": "linear", "init": "zeros"}}, False, True),
        ({}, {"num_classes": None}, False, True),
    ],
)
def test_a_head_is_kept_or_ends_in_zeros(old, new, new_head, is_kept):
    initial, expected = vit(**old), model(**new)
    network = adapted(initial, expected, new_head)
    kept = {name: tensor for name, tensor in initial.head.state_dict().items() if expected.num_classes}
    if is_kept:
        assert all(torch.equal(tensor, kept[name]) for name, tensor in network.head.state_dict().items())
        return
    assert not network(images()).any()
    # The head still learns.
    network.train()
    nn.functional.cross_entropy(network(images()), torch.tensor([0, 3, 3, 4])).backward()
    assert [*network.head.parameters()][-2].grad.any()


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"name": "vit_s2x2_8_hmlp_bn"}, ['name: got "vit_u2x2_8_hmlp_bn", expected "vit_s2x2_8_hmlp_bn"', "384"]),
        ({"name": "vit_u3x2_8_hmlp_bn"}, ["model.name", "blocks.2.attn1.scale: got none, expected 64"]),
        ({"name": "vit_u2x1_8_hmlp_bn"}, ["blocks.0.attn2.scale: got 64, expected none", "tensors more"]),
        ({"name": "vit_u2x2_8_hmlp_ln"}, ["model.name", "running_mean: got 16, expected none"]),
        ({"name": "vit_u2x2_16_hmlp_bn"}, ["model.name"]),
        (
            {"class_token": False, "pool": "mean"},
            ["class_token: got true, expected false", "class_token: got 64, expected"],
        ),
        ({"pool": "mean"}, ['model.pool: got "token", expected "mean"']),
        (
            {"positions": "none"},
            ['model.positions: got {"kind": "learned", "where": "stem"}, expected {"kind": "none"}'],
        ),
        (
            {"layerscale": None},
            ["model.layerscale: got 0.1, expected null", "blocks.0.attn1.scale: got 64, expected none"],
        ),
        ({"activation": "gelu_tanh"}, ['model.activation: got "gelu", expected "gelu_tanh"']),
        ({"norm_eps": 1e-5}, ["model.norm_eps: got 1e-06, expected 1e-05"]),
    ],
)
def test_another_network_is_refused(settings, parts):
    with pytest.raises(ConfigError) as error:
        adapt(vit(), model(**settings), "task.weights models/a", new_head=False)
    message = str(error.value)
    assert message.startswith("task.weights models/a: not the network of this run: model.")
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message


def test_frequencies_of_sincos_are_the_network():
    initial = vit(positions={"kind": "sincos2d", "frequencies": "big_vision"})
    with pytest.raises(
        ConfigError, match=r'got {"kind": "sincos2d", "where": "stem", "frequencies": "big_vision"}, expected'
    ):
        adapt(initial, model(positions="sincos2d"), "task.weights models/a", new_head=False)
