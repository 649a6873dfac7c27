"""Variants of the network: positions, registers, norms, gates; each against a loop over tokens, and off as it was."""

import math
import warnings
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from networks import difference, scrambled
from safetensors.torch import save_file
from timm.layers import RmsNorm, SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import tune_spaces
from pipelines import recipes
from vitray.config import Model, Run, load_run
from vitray.config.classification import TRAINED, Finetune
from vitray.config.training import Optim
from vitray.data.augment.masks import HIDDEN, draw_sources
from vitray.errors import ConfigError
from vitray.inspection import attention_distances, attention_maps, compare_branches, position_similarity, token_norms
from vitray.inspection.levels import run_levels
from vitray.inspection.tensors import named_tensors
from vitray.models import blocks, branches
from vitray.models.patches import gather_patches
from vitray.models.positions import VisiblePatches, axial_rotation, resample, rotate
from vitray.models.sizes import sizes_of
from vitray.models.vit import ViT, regroup
from vitray.sweeps.space import check_space, read_space, run_of
from vitray.tasks.build import build_task
from vitray.training.optim import parameter_groups
from vitray.weights import import_weights, load_model, save_model
from vitray.weights.freezing import freeze, part_of
from vitray.weights.pretrained import adapt

POSITIONS = {
    "learned, levels": {"positions": {"kind": "learned", "where": "levels"}},
    "learned, shared": {"positions": {"kind": "learned", "where": "shared"}, "registers": 2},
    "learned2d": {"positions": "learned2d"},
    "learned2d, levels": {"positions": {"kind": "learned2d", "where": "levels"}},
    "learned2d, shared": {"positions": {"kind": "learned2d", "where": "shared"}},
    "sincos2d, mae": {"positions": "sincos2d"},
    "sincos2d, shared": {"positions": {"kind": "sincos2d", "where": "shared", "frequencies": "big_vision"}},
    "relative": {"positions": "relative", "class_token": False, "pool": "mean"},
    "rope": {"positions": "rope"},
    "none": {"positions": "none"},
}
ALL = {"positions": {"kind": "rope", "base": 10.0}, "registers": True, "qk_norm": True, "norm": "rmsnorm"}
VARIANTS = POSITIONS | {
    "registers": {"registers": 3, "pool": "mean"},
    "distillation token": {"distillation_token": True, "registers": 1},
    "swiglu": {"activation": "swiglu"},
    "rmsnorm": {"norm": "rmsnorm"},
    "bias-free": {"bias": False},
    "adapters": {"adapters": 5},
    "qk_norm": {"qk_norm": True},
    "qk_norm without bias": {"qk_norm": True, "bias": False},
    "all": ALL | {"activation": "swiglu", "bias": False, "layerscale": 0.1, "pool": "mean_then_norm", "adapters": 3},
}
VARIANTS |= {
    "axial": {"attention": "axial", "class_token": False, "pool": "mean"},
    "axial, rope": {"attention": "axial", "positions": "rope", "class_token": False, "pool": "mean", "qk_norm": True},
}
each_position = pytest.mark.parametrize("kind", POSITIONS)
each_variant = pytest.mark.parametrize("kind", VARIANTS)
GRID = (2, 3)


def network(kind: str, dtype=torch.float64, **settings) -> ViT:
    """A network of random parameters, two levels of two branches on 2 x 3 patches of 8 pixels."""
    tiny = {"name": "vit_u2x2_8", "image_size": (16, 24), "num_classes": 5}
    return scrambled(ViT(Model.model_validate(tiny | VARIANTS[kind] | settings))).to(dtype)


def images(count=2, height=16, width=24) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# ---- off: the network as it was --------------------------------------------------------------------------------------


def plain_parts(branches: int, depth: int) -> dict[str, nn.Module | Tensor]:
    """The parts of vit_u<depth>x<branches>_8 with 7 classes, drawn in the order of the network without variants."""
    torch.manual_seed(0)
    stem, table = nn.Conv2d(3, 64, 8, 8), nn.init.trunc_normal_(torch.empty(16, 64), std=0.02)
    levels = [
        [[nn.Linear(64, 192), nn.Linear(64, 64)] for _ in range(branches)]
        + [[nn.Linear(64, 256), nn.Linear(256, 64)] for _ in range(branches)]
        for _ in range(depth)
    ]
    head = nn.Linear(64, 7)
    for linear in [head, *(linear for level in levels for branch in level for linear in branch)]:
        nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
    token = nn.init.trunc_normal_(torch.zeros(64), std=0.02)
    return {"stem": stem, "table": table, "levels": levels, "head": head, "token": token}


@pytest.mark.parametrize(("branches", "depth"), [(1, 3), (2, 2)])
@torch.no_grad()
def test_without_variants_state_and_logits_are_the_bits_of_the_plain_network(branches, depth):
    parts = plain_parts(branches, depth)
    torch.manual_seed(0)
    vit = ViT(Model(name=f"vit_u{depth}x{branches}_8", image_size=32, num_classes=7, execution="loop")).eval()
    part = {"norm.weight": 4 * depth // 2 * branches + 1, "norm.bias": 2 * depth * branches + 1}
    assert {kind: sum(name.endswith(kind) for name in vit.state_dict()) for kind in part} == part
    per_branch = 6  # norm, first and last product: weight and bias
    assert len(vit.state_dict()) == 2 * depth * branches * per_branch + 8

    x = images(height=32, width=32).float()
    h = parts["stem"](x).flatten(2).transpose(1, 2) + parts["table"]
    h = torch.cat([parts["token"].expand(2, 1, -1), h], dim=1)
    for level in parts["levels"]:
        normed, total = F.layer_norm(h, (64,), torch.ones(64), torch.zeros(64), 1e-6), h
        for qkv, out in level[:branches]:
            q, k, v = qkv(normed).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            total = total + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        normed, h = F.layer_norm(total, (64,), torch.ones(64), torch.zeros(64), 1e-6), total
        for up, down in level[branches:]:
            h = h + down(F.gelu(up(normed)))
    expected = parts["head"](F.layer_norm(h[:, 0], (64,), torch.ones(64), torch.zeros(64), 1e-6))
    assert torch.equal(vit(x), expected)


# ---- on: a loop over tokens ------------------------------------------------------------------------------------------


def slow_norm(vector: Tensor, norm: nn.Module) -> Tensor:
    if isinstance(norm, nn.LayerNorm):
        vector = vector - vector.mean()
    vector = vector / torch.sqrt((vector**2).mean() + norm.eps) * norm.weight
    return vector if getattr(norm, "bias", None) is None else vector + norm.bias


def slow_linear(vector: Tensor, linear: nn.Linear) -> Tensor:
    product = linear.weight @ vector
    return product if linear.bias is None else product + linear.bias


def slow_turn(vector: Tensor, row: int, column: int, base: float) -> Tensor:
    """Turn pairs of channels as complex numbers: the first half by the column, the second by the row."""
    pairs, quarter = [], len(vector) // 4
    for pair in range(2 * quarter):
        angle = (column if pair < quarter else row) * base ** -((pair % quarter) / quarter)
        turned = complex(vector[2 * pair], vector[2 * pair + 1]) * complex(math.cos(angle), math.sin(angle))
        pairs += [turned.real, turned.imag]
    return torch.tensor(pairs, dtype=vector.dtype)


def sees(vit: ViT, level: int, query: int | None, key: int | None) -> bool:
    """Whether a query attends to a key: axial ones in their row on even levels, and in their column on odd ones."""
    if vit.model.attention == "global":
        return True
    columns = vit.model.grid[1]
    return query % columns == key % columns if level % 2 else query // columns == key // columns


def slow_attention(vit: ViT, level: int, branch: nn.Module, tokens: list[Tensor], places: list) -> list[Tensor]:
    heads, size, columns = vit.model.num_heads, vit.model.head_size, vit.model.grid[1]
    rows = [slow_linear(slow_norm(token, branch.norm), branch.qkv) for token in tokens]
    outputs = [[] for _ in tokens]
    for head in range(heads):
        q, k, v = ([row[64 * part + size * head :][:size] for row in rows] for part in range(3))
        if branch.q_norm is not None:
            q, k = [slow_norm(each, branch.q_norm) for each in q], [slow_norm(each, branch.k_norm) for each in k]
        if vit.model.positions.kind == "rope":
            base = vit.model.positions.base
            for index, place in enumerate(places):
                if place is not None:
                    q[index] = slow_turn(q[index], *divmod(place, columns), base)
                    k[index] = slow_turn(k[index], *divmod(place, columns), base)
        for i, output in enumerate(outputs):
            logits, values = [], []
            for j in range(len(tokens)):
                if not sees(vit, level, places[i], places[j]):
                    continue
                key = k[j]
                if branch.relative is not None:  # the embeddings of offsets are a second set of keys
                    offset = places[i] - places[j]
                    key = key + branch.relative[offset + math.prod(vit.model.grid) - 1]
                logits.append(q[i] @ key / math.sqrt(size))
                values.append(v[j])
            weights = torch.stack(logits).exp()
            output.append(sum(weight * value for weight, value in zip(weights / weights.sum(), values, strict=True)))
    return [slow_linear(torch.cat(output), branch.out) for output in outputs]


def slow_gelu(h: Tensor) -> Tensor:
    return h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))


def slow_feed(vit: ViT, branch: nn.Module, token: Tensor) -> Tensor:
    h = slow_linear(slow_norm(token, branch.norm), branch.up)
    if vit.model.activation == "swiglu":
        gate, value = h[: len(h) // 2], h[len(h) // 2 :]
        output = slow_linear(gate / (1 + torch.exp(-gate)) * value, branch.down)
    else:
        output = slow_linear(slow_gelu(h), branch.down)
    if vit.model.adapters:
        output = output + slow_linear(slow_gelu(slow_linear(output, branch.adapter.down)), branch.adapter.up)
    return output


def slow_position(module: nn.Module, kind, place: int, grid) -> Tensor | float:
    """The embedding of one place."""
    row, column = divmod(place, grid[1])
    match kind.kind:
        case "learned":
            return module.table[place]
        case "learned2d":
            return torch.cat([module.x[column], module.y[row]])
        case "sincos2d":
            steps = 15 if kind.frequencies == "big_vision" else 16
            omega = [10000 ** (-k / steps) for k in range(16)]
            values = [f(at * w) for at in (column, row) for f in (math.sin, math.cos) for w in omega]
            return torch.tensor(values, dtype=torch.float32).double()
    return 0.0


def slow_logits(vit: ViT, image_CHW: Tensor) -> Tensor:
    """Logits from the definitions, token by token."""
    model, kind = vit.model, vit.model.positions
    tokens, places = [], []
    if vit.class_token is not None:
        tokens, places = [vit.class_token], [None]
    if vit.distillation_token is not None:
        tokens, places = [*tokens, vit.distillation_token], [*places, None]
    if vit.registers is not None:
        tokens, places = [*tokens, *vit.registers], [*places, *[None] * model.registers]
    for place in range(math.prod(model.grid)):
        row, column = divmod(place, model.grid[1])
        pixels = image_CHW[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].flatten()
        convolution = vit.stem.proj[0]
        token = convolution.weight.flatten(1) @ pixels + convolution.bias
        tokens.append(token + slow_position(vit.positions, kind, place, model.grid))
        places.append(place)
    for level, block in enumerate(vit.blocks):
        if level and getattr(kind, "where", "stem") != "stem":
            module = vit.positions if kind.where == "shared" else vit.level_positions[level - 1]
            added = [0.0 if at is None else slow_position(module, kind, at, model.grid) for at in places]
            tokens = [token + each for token, each in zip(tokens, added, strict=True)]
        sums = [slow_attention(vit, level, branch, tokens, places) for branch in block.attentions]
        scales = [1 if branch.scale is None else branch.scale for branch in block.attentions]
        for parts, scale in zip(sums, scales, strict=True):
            tokens = [token + part * scale for token, part in zip(tokens, parts, strict=True)]
        before = tokens
        for branch in block.feedforwards:
            scale = 1 if branch.scale is None else branch.scale
            tokens = [token + slow_feed(vit, branch, x) * scale for token, x in zip(tokens, before, strict=True)]
    patches = [token for token, place in zip(tokens, places, strict=True) if place is not None]
    if model.distillation_token:
        heads = [vit.head.class_token, vit.head.distillation_token]
        return sum(slow_linear(slow_norm(tokens[index], vit.norm), head) for index, head in enumerate(heads)) / 2
    match model.pool:
        case "token":
            pooled = slow_norm(tokens[0], vit.norm)
        case "mean":
            pooled = torch.stack([slow_norm(token, vit.norm) for token in patches]).mean(0)
        case _:
            pooled = slow_norm(torch.stack(patches).mean(0), vit.norm)
    return slow_linear(pooled, vit.head)


@each_variant
@torch.no_grad()
def test_logits_equal_a_loop_over_tokens(kind):
    vit, x = network(kind), images(1)
    expected = slow_logits(vit, x[0])
    # Sines and cosines are stored in single precision.
    tolerance = 1e-5 if vit.model.positions.kind in ("rope", "sincos2d") else 1e-9
    for execution in ("loop", "fused"):
        vit.execution = execution
        torch.testing.assert_close(vit(x)[0], expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(vit(x, trace={})[0], expected, atol=tolerance, rtol=tolerance)


@each_variant
def test_branches_one_by_one_and_fused_have_the_same_gradients(kind):
    gradients = {}
    for execution in ("loop", "fused"):
        vit = network(kind, drop_path=0.3).train()
        vit.execution = execution
        torch.manual_seed(0)
        vit(images()).square().sum().backward()
        gradients[execution] = {name: parameter.grad for name, parameter in vit.named_parameters()}
    for name, gradient in gradients["loop"].items():
        assert gradient is not None, name
        torch.testing.assert_close(gradients["fused"][name], gradient, atol=1e-8, rtol=1e-6)


@each_position
@torch.no_grad()
def test_the_order_of_the_patches_does_not_matter_where_their_places_are_given(kind):
    vit = network(kind)
    x_BND, _ = vit.stem(images())
    x_BND = vit.positions(x_BND, GRID)
    order_BN = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)])
    first = vit.num_prefix
    expected = gather_patches(vit.encode(x_BND, VisiblePatches(GRID))[:, first:], order_BN)
    got = vit.encode(gather_patches(x_BND, order_BN), VisiblePatches(GRID, order_BN))[:, first:]
    torch.testing.assert_close(got, expected)
    if kind not in ("none", "learned2d", "sincos2d, mae"):  # what is added at the stem is in the tokens
        other = vit.encode(gather_patches(x_BND, order_BN), VisiblePatches(GRID))[:, first:]
        assert (other - expected).abs().max() > 1e-3


def test_rotated_products_depend_on_the_offset_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator, dtype=torch.float64).expand(2, 1, 1, 20, 16)
    rotation = axial_rotation((4, 5), 16, 100.0).double()[:, None, None]
    logits = (rotate(q, rotation) @ rotate(k, rotation).mT)[0, 0].view(4, 5, 4, 5)
    torch.testing.assert_close(logits[1:, 1:, 1:, 1:], logits[:-1, :-1, :-1, :-1], atol=1e-5, rtol=1e-5)
    assert (logits[0, 0, 0, 1] - logits[0, 0, 1, 0]).abs() > 1e-3
    lengths = rotate(q, rotation).norm(dim=-1)
    torch.testing.assert_close(lengths, q.norm(dim=-1), atol=1e-5, rtol=1e-5)


# ---- other libraries -------------------------------------------------------------------------------------------------

TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 5}


@pytest.mark.parametrize(
    ("theirs", "given"),
    [
        ({"reg_tokens": 4}, {}),
        ({"reg_tokens": 4, "no_embed_class": True, "global_pool": "avg"}, {}),
        ({"reg_tokens": 1, "class_token": False, "global_pool": "avg"}, {"activation": "gelu"}),
        ({"qk_norm": True}, {}),
        ({"mlp_layer": SwiGLUPacked, "mlp_ratio": 16 / 3, "act_layer": nn.SiLU}, {"activation": "swiglu"}),
        ({"norm_layer": partial(RmsNorm, eps=1e-6)}, {"norm": "rmsnorm"}),
        (
            {"qkv_bias": False, "proj_bias": False, "norm_layer": partial(nn.LayerNorm, eps=1e-6, bias=False)},
            {"bias": False},
        ),
    ],
)
@torch.no_grad()
def test_timm_has_the_same_variants(tmp_path, theirs, given):
    network = scrambled(VisionTransformer(**TIMM | theirs))
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    if "activation" in given and "mlp_layer" in theirs:
        with pytest.raises(ConfigError, match=r"do not show activation \(swiglu, if its gates have SiLU\)"):
            import_weights(str(tmp_path / "w.safetensors"), settings={"heads": 3})
    _, ours = import_weights(str(tmp_path / "w.safetensors"), settings={"heads": 3, "normalize": {}} | given)
    assert difference(ours, network, 32) < 1e-7


@torch.no_grad()
def test_timm_has_the_same_rope(tmp_path):
    theirs = scrambled(
        timm.create_model("vit_small_patch16_rope_224", img_size=64, depth=2, embed_dim=192, num_heads=3, num_classes=5)
    )
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    settings = {"heads": 3, "positions": "rope", "image_size": 64, "normalize": {}}
    _, ours = import_weights(str(tmp_path / "w.safetensors"), settings=settings)
    assert difference(ours, theirs, 64) < 1e-5  # angles in single precision


# ---- settings --------------------------------------------------------------------------------------------------------


AXIAL = ["model.attention=axial", "model.class_token=false", "model.pool=mean"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.positions=roppe"], "model.positions: got 'roppe', expected .* did you mean rope"),
        (["model.positions.where=level"], "model.positions.where: got 'level', expected .* did you mean levels"),
        (["model.positions=relative"], "relative positions are offsets between patches: got class_token true"),
        (
            ["model.positions=relative", "model.class_token=false", "model.pool=mean", "model.registers=2"],
            "got class_token false and registers 2, expected false and 0",
        ),
        (["model.positions=rope", "model.heads=32"], "need a head size divisible by 4, .* with 32 heads has 6"),
        (["model.positions=rope", "model.heads=64"], "need a head size divisible by 4, .* with 64 heads has 3"),
        (["model.positions={kind: sincos2d, where: levels}"], "where: got 'levels', expected 'stem' or 'shared'"),
        (["model.registers=-1"], "model.registers: got -1"),
        (["model.norm=rms"], "model.norm: got 'rms', expected .*rmsnorm"),
        (["model.activation=swigl"], "did you mean swiglu"),
        (["model.attention=axail"], "model.attention: got 'axail', expected 'global' or 'axial'; did you mean axial"),
        (["model.attention=axial"], "attention axial .* got class_token true and registers 0, expected false and 0"),
        (
            [*AXIAL, "model.registers=2"],
            "attention axial is along rows and columns of patches: got class_token false and registers 2",
        ),
        ([*AXIAL, "model.name=vit_s3x2_16"], "got vit_s3x2_16 of depth 3, expected an even depth, as in vit_s4x2_16"),
        ([*AXIAL, "model.positions=relative"], "positions relative and attention axial cannot be combined"),
        (
            ["model.name=Axial-ViT-B/32"],
            "expected vit_b24x1_32 with model.attention=axial, model.class_token=false and",
        ),
        (["model.name=axial_s18x2_16_hmlp"], "expected vit_s36x2_16_hmlp_bn with model.attention=axial"),
        (["model.name=vit_axial_q/16"], "width 'q' is not one of"),
        (["model.name=axial"], "width 'axial' is not one of"),
        (["model.name=torchvision/resnet50", "model.attention=axial"], 'resnet50 has no attention "axial"'),
        (
            [*AXIAL, "model.num_classes=null", "task.kind=masked", "task.objective=mae"],
            "task.objective mae and model.attention axial cannot be combined",
        ),
    ],
)
def test_combinations_without_meaning_are_one_message(overrides, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_run(None, overrides)
    assert "\n" not in str(error.value)


def test_registers_are_four_when_on():
    assert [load_run(None, [f"model.registers={on}"]).model.registers for on in ("true", "false", "7")] == [4, 0, 7]


# ---- parts, decay, folders, resolutions ------------------------------------------------------------------------------


def test_fine_tuning_modes_own_the_parameters_of_variants():
    relative = {"positions": "relative", "class_token": False, "pool": "mean"}
    for settings in ({"registers": 2, "qk_norm": True, "positions": {"kind": "learned", "where": "levels"}}, relative):
        vit = network("none", **settings)
        for mode in ("full", "attn", "attn_norm", "ffn", "norm", "head"):
            parts = TRAINED[mode]
            freeze(vit, Finetune(weights="w", mode=mode))
            trained = {name for name, parameter in vit.named_parameters() if parameter.requires_grad}
            for name, _ in vit.named_parameters():
                part = part_of(name)
                if "q_norm" in name or "k_norm" in name or name.endswith("relative"):
                    assert part == "attn"
                if name.startswith("level_positions."):
                    assert part == "positions"
                assert (name in trained) == (part in parts), (mode, name)
        assert part_of("registers") == "registers"


def test_positions_and_registers_have_the_rate_of_the_stem_and_no_decay():
    settings = {"registers": 2, "qk_norm": True, "positions": {"kind": "learned", "where": "levels"}}
    task = nn.Module()
    task.vit = network("none", **settings)
    groups = parameter_groups(task, Optim(layer_decay=0.5, weight_decay=0.1))
    by_name = {
        name: (group["lr_scale"], group["weight_decay"])
        for name, parameter in task.vit.named_parameters()
        for group in groups
        if any(parameter is each for each in group["params"])
    }
    assert by_name["registers"] == by_name["level_positions.0.table"] == by_name["positions.table"] == (0.125, 0.0)
    assert by_name["blocks.0.attn1.q_norm.weight"] == (0.25, 0.0)


@each_variant
def test_a_model_folder_keeps_every_variant(kind, tmp_path):
    vit = network(kind, torch.float32)
    run = Run().replace({"model": vit.model.model_dump(mode="json")})
    save_model(str(tmp_path / "m"), run, vit)
    loaded = load_model(str(tmp_path / "m")).vit
    assert loaded.model == vit.model
    assert torch.equal(loaded(images().float()), vit(images().float()))


@each_position
def test_positions_are_resized_or_refused_at_another_resolution(kind):
    vit = network(kind, torch.float32)
    larger = vit.model.model_copy(update={"image_size": (32, 40)})
    x = images(height=32, width=40).float()
    if kind == "relative":
        with pytest.raises(ConfigError, match="relative positions of 2 x 3 patches cannot be resized"):
            adapt(vit, larger, "w", new_head=False)
        with pytest.raises(ValueError, match="relative positions"):
            vit(x)
        return
    other = ViT(larger).eval()
    other.load_state_dict(adapt(vit, larger, "w", new_head=False))
    torch.testing.assert_close(other(x), vit(x))  # resized once or in every pass


def test_tables_of_column_and_row_are_resized_as_the_table_of_both():
    vit = network("learned2d", torch.float32)
    whole = vit.positions.embedding(GRID)
    for convention in ("google", "deit", "timm", "torchvision"):
        kind = vit.positions.kind.model_copy(update={"resample": convention})
        vit.positions.kind = kind
        torch.testing.assert_close(vit.positions.embedding((5, 4)), resample(whole, GRID, (5, 4), convention))


def test_regrouping_keeps_every_variant_whose_levels_are_alike():
    for kind in VARIANTS:
        vit = network(kind)
        if vit.positions_added_at == "levels" or vit.model.attention == "axial":
            with pytest.raises(ValueError, match=r"each level has its own positions|along columns in turn"):
                regroup(vit, 1)
            continue
        restored = regroup(regroup(vit, 1), 2)
        assert all(torch.equal(restored.state_dict()[key], value) for key, value in vit.state_dict().items())


# ---- masked training -------------------------------------------------------------------------------------------------

DECODER = {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2}


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        (kind, objective)
        for kind in VARIANTS
        for objective in ({"kind": "mae"} | DECODER, {"kind": "pixels_l2"})
        if kind != "distillation token" and (objective["kind"] != "mae" or "axial" not in kind)  # refused
    ],
)
def test_masked_training_reaches_every_parameter_and_sees_no_hidden_patch(kind, objective):
    pool = {} if "pool" in VARIANTS[kind] else {"pool": "mean"}
    model = {"name": "vit_u2x1_8", "image_size": [16, 24], "num_classes": None} | VARIANTS[kind] | pool
    mask = {"kind": "random", "ratio": 0.5, "other": 0.0, "kept": 0.0}
    run = Run().replace({"model": model, "task": {"kind": "masked", "objective": objective, "mask": mask}})
    task = build_task(run)
    scrambled(task)
    source_BN = torch.from_numpy(draw_sources(run.task.mask, run.model.grid, 0, 0, range(2)))
    x = images().float()
    task(x, source_BN).backward()
    assert [name for name, each in task.named_parameters() if each.grad is None] == []
    noise_BN = (source_BN == HIDDEN).float().view(2, 1, *GRID)
    hidden = F.interpolate(noise_BN, scale_factor=8) * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(task.predict(x + hidden, source_BN)[1], task.predict(x, source_BN)[1])


# ---- the inside ------------------------------------------------------------------------------------------------------


@each_variant
@torch.no_grad()
def test_inspection_sees_what_the_network_computes(kind):
    vit, x = network(kind), images()
    trace: dict[str, Tensor] = {}
    logits = vit(x, trace)
    for level in run_levels(vit, x):
        for branch, weights in enumerate(level.attention(), start=1):
            torch.testing.assert_close(weights, trace[f"block{level.number:02d}.attn{branch}"])
    maps = attention_maps(vit, x)
    torch.testing.assert_close(maps.logits, logits)
    assert maps.rollout.shape == (2, *GRID)
    assert attention_distances(vit, x).distance.shape == (2, 2, vit.model.num_heads, 2)
    norms = token_norms(vit, x)
    assert norms.patches.shape == (3, 2, 6)
    assert (norms.class_token is None) == (vit.class_token is None)
    assert len(compare_branches(vit, torch.cat([x, x.flip(0), -x])).pairs) == 4
    assert {each.name.partition(" ")[0] for each in named_tensors(vit.state_dict())} == set(vit.state_dict())
    similarity = position_similarity(vit)
    assert (similarity is None) == (vit.model.positions.kind in ("none", "relative"))
    if similarity is not None:
        torch.testing.assert_close(similarity.reshape(6, 6).diag(), torch.ones(6, dtype=torch.float64))


BASES = {"positions": "vit_b16_imagenet", "stems": "a2_b16_imagenet", "demo_positions": "demo", "demo_stems": "demo"}


@pytest.mark.parametrize("name", BASES)
def test_every_point_of_a_space_builds_and_steps_at_toy_size(name):
    base = load_run(recipes.path_of(BASES[name]))
    runs = {
        run.model: run
        for run in (run_of(base, point) for point in check_space(read_space(tune_spaces.path_of(name)), base))
    }
    for run in runs.values():
        with torch.device("meta"):
            assert sum(each.numel() for each in ViT(run.model).parameters()) == sizes_of(run.model).params
        patch, stem = run.model.shape.patch, run.model.shape.stem
        toy = run.replace(
            {"model.name": f"vit_u2x1_{patch}_{stem}", "model.image_size": 2 * patch, "model.num_classes": 5}
        )
        task = build_task(toy).train()
        before = {name: each.detach().clone() for name, each in task.named_parameters()}
        optimizer = torch.optim.AdamW(task.parameters(), lr=1e-2)
        task(torch.randn(4, 3, 2 * patch, 2 * patch), F.one_hot(torch.arange(4), 5).float()).backward()
        optimizer.step()
        assert [name for name, each in task.named_parameters() if torch.equal(before[name], each)] == []


# ---- learning --------------------------------------------------------------------------------------------------------


LEARNT = VARIANTS | {"local stem": {"name": "vit_u2x1_8_local"}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEARNT)
def test_a_few_images_are_learned_in_200_steps(kind):
    torch.manual_seed(0)
    vit = ViT(Model.model_validate({"name": "vit_u2x2_8", "image_size": (16, 24), "num_classes": 8} | LEARNT[kind]))
    x, labels = images(8).float(), torch.arange(8)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-3)
    for _ in range(200):
        loss = F.cross_entropy(vit(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert torch.equal(vit.eval()(x).argmax(1), labels)


# ---- torch.compile and autocast --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["learned, levels", "relative", "rope", "axial", "all"])
def test_a_network_compiles_into_one_graph(kind):
    vit, images_BCHW = network(kind, torch.float32), torch.randn(2, 3, 16, 24)
    torch.compiler.reset()
    compiled = torch.compile(vit, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images_BCHW), vit(images_BCHW))


@pytest.mark.parametrize("execution", ["loop", "fused"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_of_queries_and_keys_mix_no_types_under_autocast(norm, execution, monkeypatch):
    vit = network("qk_norm", torch.float32, norm=norm, execution=execution)
    images_BCHW, attended, normalized, attend = torch.randn(2, 3, 16, 24), [], [], branches.attend
    for module in vit.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_hook(lambda _module, _inputs, output: normalized.append(output.dtype))

    def watched(q, k, v, *rest):
        attended.append((q.dtype, k.dtype, v.dtype))
        return attend(q, k, v, *rest)

    for module in (blocks, branches):
        monkeypatch.setattr(module, "attend", watched)
    torch.set_warn_always(True)  # torch warns of an unfused RMSNorm once in a process
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("error")
            rounded = vit(images_BCHW)
    finally:
        torch.set_warn_always(False)
    assert attended == [(torch.bfloat16,) * 3] * (4 if execution == "loop" else 2)
    assert set(normalized) <= {torch.float32}
    with torch.no_grad():
        exact = vit(images_BCHW)
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))
