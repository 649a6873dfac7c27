"""Networks of one base in mixed batches: equal to each network alone, with the shared tensors in memory once."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_deltas import fresh, save, tuned
from test_variants import VARIANTS

from vitray import load_deltas
from vitray.config import Model, Run
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.weights.family import Family, Member, Plan

# Which tensors a fine-tuning changes.
MODES: dict[str, Callable[[str], bool]] = {
    "attn": lambda name: ".attn" in name,
    "ffn": lambda name: ".ffn" in name and ".scale" not in name,
    "head": lambda name: name.startswith("head"),
    "norms": lambda name: "norm" in name,
    "positions": lambda name: name.startswith(("positions", "class_token")),
    "layerscale": lambda name: name.endswith(".scale"),
    "stem": lambda name: name.startswith("stem"),
    "first_branch": lambda name: "blocks.1.attn1.qkv" in name,
    "registers": lambda name: name == "registers",
    "offsets": lambda name: name.endswith(".relative"),
    "level_positions": lambda name: name.startswith("level_positions"),
    "full": lambda name: True,
}
CLASSES = [3, 5, 7]


def settings(name: str, **more) -> Model:
    return Model.model_validate({"name": name, "image_size": 32, "num_classes": 5, "layerscale": 0.5} | more)


def images(model: Model, count: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(count, 3, *model.image_shape, generator=torch.Generator().manual_seed(seed))


def alone(vit: ViT, batch: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one network in double precision, image by image, as the reference."""
    twin = ViT(vit.model).eval()
    twin.load_state_dict(vit.state_dict())
    twin.execution = "loop"
    with torch.inference_mode():
        return torch.cat([twin.double()(image[None].double()) for image in batch])


def agree(got: list[torch.Tensor], networks: list[ViT], batch: list[torch.Tensor]) -> None:
    for output, vit, image in zip(got, networks, batch, strict=True):
        expected = alone(vit, image[None])[0]
        scale = expected.abs().max().item()
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-5 * max(scale, 1))


PLAIN = [mode for mode in MODES if mode not in ("registers", "offsets", "level_positions")]


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize(
    "model",
    [
        settings("vit_u2x1_8"),
        settings("vit_u2x2_8_hmlp_bn", pool="mean", class_token=False, positions="sincos2d"),
        settings("vit_u2x2_8_hmlp_ln", pool="mean_then_norm", head="mlp"),
        settings("vit_u2x1_16_conv", layerscale=None, positions="none", activation="gelu_tanh"),
        settings("vit_u1x1_16_local"),
    ],
    ids=["sequential", "parallel", "layer norms", "convolutions", "local"],
)
def test_a_mixed_batch_gives_the_outputs_of_each_network_alone(tmp_path, model, mode):
    base = fresh(model)
    save(tmp_path / "base", base)
    networks = {"base": base}
    for number, classes in enumerate(CLASSES):
        networks[f"t{number}"] = tuned(base, MODES[mode], seed=number + 1, num_classes=classes)
        save(tmp_path / f"t{number}", networks[f"t{number}"], tmp_path / "base")
    family = load_deltas(str(tmp_path / "base"), {name: str(tmp_path / name) for name in networks})
    tasks = ["t2", "base", "t0", "t0", "t1", "base", "t2"]
    batch = images(model, len(tasks))
    agree(family(batch, tasks), [networks[name] for name in tasks], list(batch))
    shapes = [len(output) for output in family(batch, tasks)]
    assert shapes == [networks[name].model.num_classes for name in tasks]


def in_memory(networks: dict[str, ViT]) -> Family:
    """Return the family of networks of which the first is the base, without files."""
    base, *_ = (vit.state_dict() for vit in networks.values())
    members = {}
    for name, vit in networks.items():
        state = {
            key: base[key] if key in base and torch.equal(base[key], tensor) else tensor
            for key, tensor in vit.state_dict().items()
        }
        members[name] = Member(Run(model=vit.model), None, state, base)
    return Family(base, members)


@pytest.mark.parametrize(
    ("kind", "branches"), [*((kind, 2) for kind in VARIANTS), ("all", 1), ("relative", 1), ("learned, levels", 1)]
)
def test_every_variant_of_the_network_is_a_family(kind, branches):
    base = fresh(settings(f"vit_u2x{branches}_8", **VARIANTS[kind]))
    networks = {"base": base}
    names = list(base.state_dict())
    for number, (mode, changed) in enumerate(MODES.items()):
        if any(map(changed, names)):  # a variant may lack the tensors of a mode
            networks[mode] = tuned(base, changed, seed=number + 1, num_classes=2 + number)
    if base.model.positions.kind != "relative":  # those of one grid do not fit another
        networks["large"] = tuned(base, MODES["attn"], seed=50, image_size=48)
    tasks = [str(task) for task in np.random.default_rng(0).permutation([*networks, "base", "attn"])]
    batch = [images(networks[task].model, 1, seed)[0] for seed, task in enumerate(tasks)]
    agree(in_memory(networks)(batch, tasks), [networks[task] for task in tasks], batch)


def test_registers_of_another_number_mix():
    base = fresh(settings("vit_u2x1_8", registers=3))
    networks = {"base": base, "more": tuned(base, registers=5), "none": tuned(base, registers=0)}
    batch, tasks = images(base.model, 5), ["more", "none", "base", "more", "base"]
    agree(in_memory(networks)(batch, tasks), [networks[task] for task in tasks], list(batch))


def test_modes_image_sizes_and_a_base_without_a_head_mix(tmp_path):
    base = fresh(settings("vit_u2x2_8", num_classes=None))
    save(tmp_path / "base", base)
    networks = {"base": base}
    for number, (mode, changed) in enumerate(MODES.items()):
        size = 48 if number % 2 else 32
        networks[mode] = tuned(base, changed, seed=number + 1, num_classes=2 + number, image_size=size)
        save(tmp_path / mode, networks[mode], tmp_path / "base")
    family = load_deltas(str(tmp_path / "base"), {name: str(tmp_path / name) for name in networks})
    tasks = [str(name) for name in np.random.default_rng(0).permutation([*networks, *networks])]
    batch = [images(networks[name].model, 1, seed)[0] for seed, name in enumerate(tasks)]
    agree(family(batch, tasks), [networks[name] for name in tasks], batch)


def test_a_deeper_chain_of_deltas_is_a_member(tmp_path):
    base = fresh()
    first = tuned(base, MODES["attn"], seed=1)
    second = tuned(first, MODES["head"], seed=2, num_classes=3)
    for name, vit, below in (("base", base, None), ("d1", first, "base"), ("d2", second, "d1")):
        save(tmp_path / name, vit, below and tmp_path / below)
    family = load_deltas(str(tmp_path / "base"), {"d2": str(tmp_path / "d2"), "d1": str(tmp_path / "d1")})
    batch = images(base.model, 3)
    agree(family(batch, ["d2", "d1", "d2"]), [second, first, second], list(batch))


def test_the_memory_is_that_of_the_base_and_of_the_changed_tensors(tmp_path):
    base = fresh()
    save(tmp_path / "base", base)
    own = 0
    for number in range(4):
        vit = tuned(base, MODES["attn"], seed=number + 1)
        save(tmp_path / str(number), vit, tmp_path / "base")
        own += sum(tensor.nbytes for name, tensor in vit.state_dict().items() if ".attn" in name)
    family = load_deltas(str(tmp_path / "base"), {str(number): str(tmp_path / str(number)) for number in range(4)})
    whole = sum(tensor.nbytes for tensor in base.state_dict().values())
    assert family.nbytes == whole + own
    assert family.nbytes_apart == 4 * whole
    before = family.nbytes
    family(images(base.model, 4), ["0", "1", "2", "3"])
    assert family.nbytes == before


def test_shared_layers_are_one_product_and_differing_ones_one_per_network(tmp_path):
    base = fresh()
    save(tmp_path / "base", base)
    for number in range(3):
        save(tmp_path / str(number), tuned(base, MODES["attn"], seed=number + 1), tmp_path / "base")
    save(tmp_path / "3", tuned(base, MODES["head"], seed=9), tmp_path / "base")
    family = load_deltas(str(tmp_path / "base"), {str(number): str(tmp_path / str(number)) for number in range(4)})
    plan = Plan([family.member(name) for name in ("3", "0", "0", "1", "2")])
    assert [(start, stop) for start, stop, _ in plan.segments_of("blocks.0.attn1.qkv")] == [
        (0, 1),
        (1, 3),
        (3, 4),
        (4, 5),
    ]
    assert [(start, stop) for start, stop, _ in plan.segments_of("blocks.0.ffn1.up")] == [(0, 5)]
    assert [(start, stop) for start, stop, _ in plan.segments_of_heads()] == [(0, 1), (1, 5)]


def test_a_replaced_member_answers_the_batches_that_hold_it(tmp_path):
    base = fresh()
    save(tmp_path / "base", base)
    old, new = (tuned(base, MODES["attn"], seed=seed) for seed in (1, 2))
    save(tmp_path / "old", old, tmp_path / "base")
    save(tmp_path / "new", new, tmp_path / "base")
    family = load_deltas(str(tmp_path / "base"), {"task": str(tmp_path / "old")})
    held = family.member("task")
    family.add("task", load_deltas(str(tmp_path / "base"), {"task": str(tmp_path / "new")}).member("task"))
    batch = images(base.model, 2)
    agree(family.outputs(batch, [held, family.member("task")]), [old, new], list(batch))
    assert family.member("task").state["norm.bias"] is family.base["norm.bias"]


@pytest.mark.parametrize("kind", ["learned, shared", "rope"])
def test_bfloat16_agrees_with_a_network_under_the_same_autocast(kind):
    base = fresh(settings("vit_u2x2_8", **VARIANTS[kind]))
    vits = [tuned(base, MODES["attn"], seed=seed) for seed in (1, 2)]
    family = in_memory({"base": base, "0": vits[0], "1": vits[1]})
    batch = images(base.model, 4)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.stack(family(batch, ["0", "1", "1", "0"]))
        with torch.inference_mode():
            expected = torch.stack([vits[task](batch)[row] for row, task in enumerate([0, 1, 1, 0])])
            vits[0].execution = "loop"
            alike = vits[0](batch)
        assert torch.equal(torch.stack(family(batch, ["0"] * 4)), alike)
    torch.testing.assert_close(got.double(), expected.double(), rtol=0.05, atol=0.05 * expected.abs().max().item())


def test_an_unknown_task_names_the_nearest(tmp_path):
    save(tmp_path / "base", fresh())
    save(tmp_path / "birds", tuned(fresh()), tmp_path / "base")
    family = load_deltas(str(tmp_path / "base"), {"birds": str(tmp_path / "birds")})
    with pytest.raises(ConfigError, match=r"task: got 'bird', expected one of birds; did you mean birds"):
        family(images(fresh().model, 1), ["bird"])


def test_a_changed_base_is_refused(tmp_path):
    save(tmp_path / "base", fresh())
    save(tmp_path / "d", tuned(fresh()), tmp_path / "base")
    delta = json.loads((tmp_path / "d" / "delta.json").read_text())
    delta["base"]["identity"] = "0" * 64
    (tmp_path / "d" / "delta.json").write_text(json.dumps(delta))
    with pytest.raises(ConfigError, match=r"d: it is a delta of .*\(000000000000\).*; expected a delta of .*base"):
        load_deltas(str(tmp_path / "base"), {"d": str(tmp_path / "d")})


def test_a_batch_without_images_or_with_too_few_tasks(tmp_path):
    save(tmp_path / "base", fresh())
    family = load_deltas(str(tmp_path / "base"), {"base": str(tmp_path / "base")})
    assert family([], []) == []
    with pytest.raises(ValueError, match="got 2 images and 1 members, expected as many"):
        family(images(fresh().model, 2), ["base"])
