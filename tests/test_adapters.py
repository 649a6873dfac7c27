"""Fine-tuning of few parameters: LoRA, adapters, biases, last levels; trained alone, saved as deltas, merged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import scrambled
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.__main__ import main
from vitray import load_deltas
from vitray.bench.finetune import recipe as bench_recipe
from vitray.config import Model, Run
from vitray.config.classification import Finetune, Lora
from vitray.config.training import Ema
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError
from vitray.exports.folding import fold
from vitray.models.adapters import LoraLinear, add_lora, merge_lora
from vitray.models.vit import ViT
from vitray.tasks.build import build_task
from vitray.tasks.supervised import Classification
from vitray.training import checkpoints
from vitray.training.optim import Average, build_optimizer, parameter_groups
from vitray.training.probes import network_weights
from vitray.weights import export_weights, flatten_model, identity_of, load_model, save_model
from vitray.weights.freezing import audit, audit_table, part_of, prepare
from vitray.weights.pretrained import open_initial_weights

TINY = {"name": "vit_u2x2_8", "image_size": 32, "num_classes": 7}
CLASSES = [f"c{label}" for label in range(7)]
ALL = ("q", "k", "v", "out", "up", "down")
# Mode, its settings, those of the network.
MODES: dict[str, tuple[dict, dict]] = {
    "lora": ({"mode": "lora", "lora": {"rank": 3}}, {}),
    "lora everywhere": ({"mode": "lora", "lora": {"rank": 3, "matrices": list(ALL)}}, {}),
    "adapter": ({"mode": "adapter"}, {"adapters": 5}),
    "bias": ({"mode": "bias"}, {}),
    "last": ({"mode": "last", "levels": 1}, {}),
    "attn_norm": ({"mode": "attn_norm"}, {}),
}
each_mode = pytest.mark.parametrize("name", MODES)


def base_network(dtype=torch.float32, **model) -> ViT:
    return scrambled(ViT(Model.model_validate(TINY | model))).to(dtype)


def run_of(name: str, weights: str = "unread", **changes) -> Run:
    task, model = MODES[name]
    return Run().replace({"task": {"kind": "finetune", "weights": weights} | task, "model": TINY | model} | changes)


def tuned(name: str, seed: int = 0) -> Classification:
    """A task of this mode that starts from the base network."""
    torch.manual_seed(seed)
    task = build_task(run_of(name))
    task.vit.load_state_dict(base_network().state_dict(), strict=False)
    return task


def images(count: int = 4, dtype=torch.float32) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


TARGETS = F.one_hot(torch.tensor([0, 3, 3, 6]), 7).float()


def train_steps(task: Classification, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        task(images(), TARGETS).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def optimizer_of(task: Classification, name: str) -> torch.optim.Optimizer:
    return build_optimizer(task, run_of(name, **{"optim.lr": 1e-2}).optim, torch.device("cpu"))


@torch.enable_grad()
def trained(name: str, seed: int = 0, steps: int = 3) -> Classification:
    task = tuned(name, seed)
    train_steps(task, optimizer_of(task, name), steps)
    return task


# ---- what trains -----------------------------------------------------------------------------------------------------

# Width 64, two levels of two branches: four pairs of branches, nine norms.
EXPECTED = {
    "lora": {"lora": 4 * 2 * 3 * (64 + 64), "head": 455},
    "lora everywhere": {"lora": 4 * 3 * (4 * (64 + 64) + 2 * (64 + 256)), "head": 455},
    "adapter": {"adapters": 4 * (2 * 5 * 64 + 5 + 64), "head": 455},
    "bias": {"stem": 64, "norms": 9 * 64, "attn": 4 * (192 + 64), "ffn": 4 * (256 + 64), "head": 455},
    "last": {"norms": 4 * 128 + 128, "attn": 2 * (4 * 64**2 + 4 * 64), "ffn": 2 * (8 * 64**2 + 5 * 64), "head": 455},
    "attn_norm": {"positions": 16 * 64, "norms": 9 * 128, "attn": 4 * (4 * 64**2 + 4 * 64), "head": 455},
}


@each_mode
def test_the_audit_counts_what_the_mode_trains(name):
    audited = audit(tuned(name).vit)
    assert {row.part: row.trained for row in audited.rows if row.trained} == EXPECTED[name]
    assert audited.trained == sum(EXPECTED[name].values())
    added = {part: EXPECTED[name].get(part, 0) for part in ("lora", "adapters")}
    whole = sum(parameter.numel() for parameter in base_network().parameters())
    assert audited.parameters == whole + sum(added.values())
    assert f"{audited.trained:,}" in audit_table(audited).splitlines()[-1]


@each_mode
def test_only_the_trained_parameters_have_gradients_and_change(name):
    task = tuned(name)
    trainable = {key for key, parameter in task.named_parameters() if parameter.requires_grad}
    before = {key: tensor.clone() for key, tensor in task.state_dict().items()}
    task(images(), TARGETS).backward()
    assert {key for key, parameter in task.named_parameters() if parameter.grad is not None} == trainable
    task.zero_grad(set_to_none=True)
    optimizer = optimizer_of(task, name)
    train_steps(task, optimizer, 2)
    assert {key for key, tensor in task.state_dict().items() if not torch.equal(tensor, before[key])} == trainable
    assert len(optimizer.state) == len(trainable)
    buffers = {key for key, _ in task.named_buffers()}
    assert set(Average(task, Ema()).state()) == trainable | buffers


def test_last_levels_are_the_last_and_all_of_them_are_allowed():
    vit = base_network(name="vit_u3x1_8")
    prepare(vit, Finetune(weights="w", mode="last", levels=2))
    names = {name.partition(".attn1")[0] for name, each in vit.named_parameters() if each.requires_grad}
    assert {name for name in names if name.startswith("blocks")} >= {"blocks.1", "blocks.2"}
    assert not any(name.startswith("blocks.0") for name in names)
    prepare(vit, Finetune(weights="w", mode="last", levels=3))
    assert all(each.requires_grad for name, each in vit.named_parameters() if name.startswith("blocks"))


def test_biases_of_a_stem_with_statistics_stay_frozen():
    vit = base_network(name="vit_u2x2_8_hmlp_bn")
    prepare(vit, Finetune(weights="w", mode="bias"))
    assert not any(each.requires_grad for each in vit.stem.parameters())
    assert not any(module.training for module in vit.train().stem.modules())
    layer_norms = base_network(name="vit_u2x2_8_hmlp_ln")
    prepare(layer_norms, Finetune(weights="w", mode="bias"))
    kinds = {name.rpartition(".")[2] for name, each in layer_norms.stem.named_parameters() if each.requires_grad}
    assert kinds == {"bias"}


def test_factors_decay_as_matrices_and_learn_at_the_rate_of_their_level():
    task = tuned("lora")
    optim = run_of("lora", **{"optim.layer_decay": 0.5, "optim.weight_decay": 0.1}).optim
    by_name = {
        name: (group["lr_scale"], group["weight_decay"])
        for name, parameter in task.vit.named_parameters()
        for group in parameter_groups(task, optim)
        if any(parameter is each for each in group["params"])
    }
    assert by_name["blocks.0.attn1.qkv.lora.q.a.weight"] == (0.25, 0.1)
    assert by_name["blocks.1.attn2.qkv.lora.v.b.weight"] == (0.5, 0.1)


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        (
            {"mode": "last", "levels": 3},
            {},
            "task.levels: got 3, expected at most 2, the levels of vit_u2x2_8",
        ),
        (
            {"mode": "lora", "lora": {"rank": 65}},
            {},
            "task.lora.rank: got 65, expected at most 64, the width of vit_u2x2_8",
        ),
        (
            {"mode": "adapter"},
            {},
            "task.mode: got adapter, and model.adapters is null; expected a width, as in model.adapters=16",
        ),
        ({"mode": "attn", "also_train": ["lora"]}, {}, "task.also_train: got lora, expected parts that vit_u2x2_8 has"),
    ],
)
def test_modes_that_the_network_cannot_have_are_refused(task, model, message):
    run = Run().replace({"model": TINY | model, "task": {"kind": "finetune", "weights": "unread"} | task})
    with pytest.raises(ConfigError, match=message) as error:
        build_task(run)
    assert "\n" not in str(error.value)


# ---- the first step is the base's ------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("execution", ["auto", "loop", "fused"])
def test_a_fine_tuning_starts_from_the_bits_of_its_base(name, execution):
    base, task = base_network(), tuned(name)
    base.execution = task.vit.execution = execution
    for mode in (True, False):
        got, expected = task.vit.train(mode)(images()), base.train(mode)(images())
        if (name, execution) == ("adapter", "fused"):  # the second products of branches with adapters are not joined
            torch.testing.assert_close(got, expected)
        else:
            assert torch.equal(got, expected)


# ---- LoRA: merged, unmerged, looped, fused ---------------------------------------------------------------------------


def with_lora(matrices=ALL, rank=3, alpha=5.0, **model) -> ViT:
    vit = base_network(torch.float64, **model)
    add_lora(vit, matrices, rank, alpha)
    return scrambled_factors(vit, alpha / rank)


def scrambled_factors(vit: ViT, scale: float) -> ViT:
    generator = torch.Generator().manual_seed(7)
    for name, tensor in vit.state_dict().items():
        if ".lora." in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.1)
        if name.endswith("lora_scale"):
            assert tensor.item() == pytest.approx(scale)
    return vit


def slowly_merged(vit: ViT, matrices, scale: float) -> dict[str, np.ndarray]:
    """The matrices of a network with its products added, number by number."""
    state, merged = {name: tensor.numpy() for name, tensor in vit.state_dict().items()}, {}
    rows = {"q": range(0, 64), "k": range(64, 128), "v": range(128, 192)}
    for level in range(vit.model.shape.depth):
        for branch in range(1, vit.model.shape.branches + 1):
            for name in matrices:
                part, layer = ("attn", "qkv") if name in rows else ("attn" if name == "out" else "ffn", name)
                key = f"blocks.{level}.{part}{branch}.{layer}"
                weight = merged.setdefault(key, state[f"{key}.weight"].copy())
                a, b = state[f"{key}.lora.{name}.a.weight"], state[f"{key}.lora.{name}.b.weight"]
                for row, place in enumerate(rows.get(name, range(len(weight)))):
                    for column in range(weight.shape[1]):
                        total = sum(b[row, rank] * a[rank, column] for rank in range(len(a)))
                        weight[place, column] += scale * total
    return merged


@pytest.mark.parametrize("matrices", [("v", "q"), ("out", "k"), ("up", "down")])
@torch.no_grad()
def test_merged_unmerged_looped_and_fused_are_one_function(matrices):
    vit = with_lora(matrices, name="vit_u1x2_8", layerscale=0.3)
    x = images(2, torch.float64)
    expected = base_network(torch.float64, name="vit_u1x2_8", layerscale=0.3)
    slow = slowly_merged(vit, matrices, 5 / 3)
    expected.load_state_dict(expected.state_dict() | {f"{key}.weight": torch.from_numpy(w) for key, w in slow.items()})
    expected.execution = "loop"
    logits = expected(x)
    merged = base_network(torch.float64, name="vit_u1x2_8", layerscale=0.3)
    assert (merged(x) - logits).abs().max() > 1e-2  # the products matter
    merged.load_state_dict(merge_lora(vit.state_dict()))
    for network in (vit, merged):
        for execution in ("loop", "fused"):
            network.execution = execution
            torch.testing.assert_close(network(x), logits, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(network(x, trace={}), logits, atol=1e-10, rtol=1e-10)


@settings(deadline=None, max_examples=8)
@given(
    rank=st.integers(1, 64),
    alpha=st.floats(0.1, 100),
    matrices=st.sets(st.sampled_from(ALL), min_size=1),
    model=st.sampled_from([{}, {"activation": "swiglu"}, {"bias": False}, {"norm": "rmsnorm"}, {"adapters": 3}]),
)
@torch.no_grad()
def test_any_products_are_merged_exactly(rank, alpha, matrices, model):
    vit = with_lora(tuple(matrices), rank, alpha, name="vit_u1x2_8", **model)
    state = merge_lora(vit.state_dict())
    merged = base_network(torch.float64, name="vit_u1x2_8", **model)
    assert state.keys() == merged.state_dict().keys()
    merged.load_state_dict(state)
    x = images(1, torch.float64)
    vit.execution = "loop"
    looped = vit(x)
    scale = looped.abs().max().item()
    for network, execution in ((vit, "fused"), (merged, "loop"), (merged, "fused")):
        network.execution = execution
        torch.testing.assert_close(network(x), looped, atol=1e-9 * scale, rtol=1e-9)


def test_looped_and_fused_products_have_the_same_gradients():
    gradients = {}
    for execution in ("loop", "fused"):
        vit = with_lora(layerscale=0.3)
        vit.execution = execution
        vit.train()(images(2, torch.float64)).square().sum().backward()
        gradients[execution] = {name: parameter.grad for name, parameter in vit.named_parameters()}
    assert any(".lora." in name for name in gradients["loop"])
    for name, gradient in gradients["loop"].items():
        torch.testing.assert_close(gradients["fused"][name], gradient, atol=1e-8, rtol=1e-6)


def test_the_bits_of_a_merged_matrix_are_those_of_a_sum_in_float64():
    vit = trained("lora everywhere").vit
    state, merged = vit.state_dict(), merge_lora(vit.state_dict())
    layer = "blocks.1.ffn2.up"
    a, b = (state[f"{layer}.lora.up.{factor}.weight"].double().numpy() for factor in "ab")
    total = np.zeros((256, 64))
    for rank in range(3):
        total = total + b[:, rank, None] * a[None, rank]
    expected = (total * state[f"{layer}.lora_scale"].item() + state[f"{layer}.weight"].double().numpy()).astype("f4")
    assert merged[f"{layer}.weight"].numpy().tobytes() == expected.tobytes()
    assert not np.array_equal(expected, state[f"{layer}.weight"].numpy())


def test_products_reach_every_branch_and_only_the_chosen_matrices():
    vit = base_network()
    add_lora(vit, ("v", "down"), 2, 16.0)
    layers = {name for name, module in vit.named_modules() if isinstance(module, LoraLinear)}
    parts = ("attn1.qkv", "attn2.qkv", "ffn1.down", "ffn2.down")
    assert layers == {f"blocks.{level}.{part}" for level in (0, 1) for part in parts}
    assert set(vit.get_submodule("blocks.0.attn2.qkv.lora")._modules) == {"v"}
    assert Lora().matrices == ("q", "v")


# ---- model folders ---------------------------------------------------------------------------------------------------


def save_base(folder: Path, **model) -> str:
    vit = base_network(**model)
    save_model(str(folder), Run(model=vit.model), vit, CLASSES)
    return str(folder)


def save_tuned(folder: Path, name: str, base: str | None, seed: int = 0) -> Classification:
    task = trained(name, seed)
    task.eval()
    save_model(str(folder), run_of(name, base or "unread"), task.vit, CLASSES, relative_to=base)
    return task


@each_mode
@torch.no_grad()
def test_a_delta_holds_what_was_trained_and_loads_as_the_network(tmp_path, name):
    base = save_base(tmp_path / "base")
    task = save_tuned(tmp_path / "d", name, base)
    own = load_file(tmp_path / "d" / "model.safetensors")
    trainable = {key for key, parameter in task.vit.named_parameters() if parameter.requires_grad}
    assert set(own) == trainable | {key for key, _ in task.vit.named_buffers() if "lora_scale" in key}
    assert all(torch.equal(tensor, task.vit.state_dict()[key]) for key, tensor in own.items())
    loaded = load_model(str(tmp_path / "d"))
    assert loaded.run.task == run_of(name, base).task
    merged = merge_lora(task.vit.state_dict())
    assert identity_of(loaded.vit.state_dict()) == identity_of(merged)
    torch.testing.assert_close(loaded.vit(images()), task.vit(images()), atol=1e-4, rtol=1e-4)

    flatten_model(str(tmp_path / "d"), str(tmp_path / "flat"))
    assert set(load_file(tmp_path / "flat" / "model.safetensors")) == set(merged)
    assert identity_of(load_model(str(tmp_path / "flat")).vit.state_dict()) == identity_of(merged)
    save_tuned(tmp_path / "whole", name, None)
    assert identity_of(load_model(str(tmp_path / "whole")).vit.state_dict()) == identity_of(merged)


@torch.no_grad()
def test_deltas_of_all_modes_are_a_family_with_their_base(tmp_path):
    base = save_base(tmp_path / "base")
    networks = {"base": base_network()}
    for name in MODES:
        save_tuned(tmp_path / name, name, base)
        networks[name] = load_model(str(tmp_path / name)).vit
    family = load_deltas(base, {name: str(tmp_path / name) for name in networks})
    tasks = [*networks, *reversed(networks)]
    x = images(len(tasks))
    for output, task, image in zip(family(x, tasks), tasks, x, strict=True):
        torch.testing.assert_close(output, networks[task](image[None])[0], atol=2e-4, rtol=2e-4)


def test_a_merged_delta_is_the_base_of_another_one(tmp_path):
    base = save_base(tmp_path / "base")
    save_tuned(tmp_path / "first", "lora", base)
    first = load_model(str(tmp_path / "first")).vit
    second = base_network()
    second.load_state_dict(first.state_dict())
    add_lora(second, ("v", "up"), 2, 16.0)
    with torch.no_grad():
        for name, tensor in second.named_parameters():
            if ".lora." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    save_model(str(tmp_path / "second"), run_of("lora"), second, CLASSES, relative_to=str(tmp_path / "first"))
    assert all(".lora" in key for key in load_file(tmp_path / "second" / "model.safetensors"))
    loaded = load_model(str(tmp_path / "second")).vit
    assert identity_of(loaded.state_dict()) == identity_of(merge_lora(second.state_dict()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own, a, b: own.pop(b), "its matrix, its scale or its other factor is missing"),
        (lambda own, a, b: own.pop(a), "lora.q.b.weight: the factor that belongs to it is missing"),
        (lambda own, a, b: own.update({a: own[a][:, 1:].contiguous()}), "do not fit a matrix of (192, 64)"),
        (lambda own, a, b: own.update({b: own[b].new_zeros(65, 3)}), "got factors of (65, 3) and (3, 64)"),
        (lambda own, a, b: own.update({a.replace(".q.", ".x."): own.pop(a)}), "lora.x.a.weight: its matrix"),
    ],
)
def test_factors_that_do_not_fit_are_named(tmp_path, change, message):
    base = save_base(tmp_path / "base")
    save_tuned(tmp_path / "d", "lora", base)
    own = load_file(tmp_path / "d" / "model.safetensors")
    change(own, *(f"blocks.0.attn1.qkv.lora.q.{factor}.weight" for factor in "ab"))
    save_file(own, tmp_path / "d" / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        load_model(str(tmp_path / "d"))
    assert str(tmp_path / "d") in str(error.value)
    assert "blocks.0.attn1.qkv.lora." in str(error.value)
    assert message in str(error.value)


def test_the_verb_shows_factors_and_merges_them(tmp_path, capsys):
    base = save_base(tmp_path / "base")
    task = save_tuned(tmp_path / "d", "lora", base)

    def result(*args: str) -> dict:
        assert main(["weights", *args, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    shown = result("show", str(tmp_path / "d"))
    own = load_file(tmp_path / "d" / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in base_network().state_dict().values())
    assert (shown["kind"], shown["kept"], shown["taken"]) == ("delta", len(own), len(base_network().state_dict()) - 2)
    assert (shown["bytes"], shown["whole"]) == (sum(tensor.nbytes for tensor in own.values()), whole)
    flat = result("flatten", str(tmp_path / "d"), str(tmp_path / "flat"))
    assert (flat["kind"], flat["bytes"]) == ("whole", whole)
    merged = merge_lora(task.vit.state_dict())
    assert identity_of(load_file(tmp_path / "flat" / "model.safetensors")) == identity_of(merged)


# ---- initial weights and checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lora", "adapter", "last"])
def test_a_run_starts_with_the_weights_and_with_additions_of_its_seed(tmp_path, name):
    base = save_base(tmp_path / "base")
    run = run_of(name, base)
    run, start = open_initial_weights(run, run.task, CLASSES)
    task = build_task(run)
    task.load_state_dict(start.task_state(run))
    assert torch.equal(task.vit.eval()(images()), base_network()(images()))
    assert start.audit.trained == sum(EXPECTED[name].values())
    added = {key for key in start.state if part_of(key) in ("lora", "adapters")}
    assert bool(added) == (name != "last")
    other = open_initial_weights(run.replace({"seed": 1}), run.task, CLASSES)[1].state
    again = open_initial_weights(run, run.task, CLASSES)[1].state
    assert all(torch.equal(start.state[key], again[key]) for key in start.state)
    differing = {key for key in start.state if not torch.equal(start.state[key], other[key])}
    assert differing == {key for key in added if key.endswith((".a.weight", ".adapter.down.weight"))}


def test_adapters_of_the_weights_are_kept_and_new_ones_are_trained(tmp_path):
    base = save_base(tmp_path / "base", adapters=5)
    task = {"kind": "finetune", "weights": base, "mode": "norm"}
    run = Run().replace({"task": task})
    run, start = open_initial_weights(run, run.task, CLASSES)
    assert run.model.adapters == 5
    assert all(torch.equal(tensor, start.state[key]) for key, tensor in base_network(adapters=5).state_dict().items())
    wider = Run().replace({"task": task, "model.adapters": 6})
    with pytest.raises(ConfigError, match=r"not the network of this run: model\.adapters: got 5, expected 6"):
        open_initial_weights(wider, wider.task, CLASSES)

    plain = save_base(tmp_path / "plain")
    frozen = Run().replace({"task": task | {"weights": plain}, "model.adapters": 6})
    with pytest.raises(ConfigError, match=r"model.adapters: got 6, but task.weights .*plain has none, and"):
        open_initial_weights(frozen, frozen.task, CLASSES)
    also = frozen.replace({"task.also_train": ["adapters"]})
    assert open_initial_weights(also, also.task, CLASSES)[1].audit.trained == 9 * 128 + 4 * (2 * 6 * 64 + 6 + 64) + 455


@each_mode
def test_a_resumed_fine_tuning_ends_with_the_same_bits(tmp_path, name):
    whole = trained(name, steps=4)
    first, optimizer = tuned(name), None
    optimizer = optimizer_of(first, name)
    train_steps(first, optimizer, 2)
    tensors, rest = checkpoints.split_state(optimizer.state_dict())
    parts = {"model": dict(first.state_dict()), "optimizer": tensors}
    checkpoints.write_checkpoint(str(tmp_path), checkpoints.Checkpoint(2, parts, {"optimizer": rest}))
    loaded = checkpoints.read_checkpoint(str(tmp_path), 2)

    second = tuned(name, seed=9)
    second.load_state_dict(loaded.parts["model"])
    optimizer = optimizer_of(second, name)
    optimizer.load_state_dict(checkpoints.join_state(loaded.parts["optimizer"], loaded.state["optimizer"]))
    train_steps(second, optimizer, 2)
    assert identity_of(second.state_dict()) == identity_of(whole.state_dict())
    # Probes while training read the merged network.
    network = network_weights({"model": second.state_dict()})
    assert network.keys() == ViT(run_of(name).model).state_dict().keys()


# ---- exports and benches ---------------------------------------------------------------------------------------------


def test_products_are_exported_merged_and_adapters_are_refused_by_other_libraries(tmp_path):
    base = save_base(tmp_path / "base")
    save_tuned(tmp_path / "d", "lora", base)
    exported = export_weights(load_model(str(tmp_path / "d")).vit, "timm")
    assert not any("lora" in key for key in exported)
    before = export_weights(base_network(), "timm")
    changed = {key for key in before if not torch.equal(before[key], exported[key])}
    assert {key.split(".")[-2] for key in changed if key.endswith("weight")} == {"qkv", "head"}
    with pytest.raises(ConfigError, match="vit_u2x2_8: an export for timm has no adapters"):
        export_weights(base_network(adapters=5), "timm")


@torch.no_grad()
def test_a_graph_of_adapters_is_the_network():
    vit, run = base_network(adapters=5), Run()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    graph = fold(vit, run.data.normalize, any_size=False, int8_weights=False)
    torch.testing.assert_close(
        graph(pixels), vit(normalized(pixels.permute(0, 2, 3, 1), run.data.normalize)), atol=1e-4, rtol=1e-4
    )


def test_the_bench_takes_settings_of_a_mode():
    sizes = 4, 32, "fp32"
    run = bench_recipe("vit_u2x1_8", "lora+feedforward:task.lora.rank=2:task.lora.matrices=[q,out]", *sizes)
    assert (run.task.mode, run.task.lora.rank, run.compute.activation_checkpointing) == ("lora", 2, "feedforward")
    assert bench_recipe("vit_u2x1_8", "adapter:model.adapters=3", *sizes).model.adapters == 3
    assert build_task(run).vit.blocks[0].attn1.qkv.lora["q"].a.weight.shape == (2, 64)


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_mode
def test_a_few_images_are_learned_in_200_steps(name):
    torch.manual_seed(0)
    run = run_of(name, **{"model.num_classes": 8})
    task = build_task(run).train()
    x, labels = images(8), torch.arange(8)
    optimizer = build_optimizer(task, run.replace({"optim.lr": 1e-2, "optim.weight_decay": 0.0}).optim, x.device)
    for _ in range(200):
        loss = task(x, F.one_hot(labels, 8).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert torch.equal(task.vit.eval()(x).argmax(1), labels)
