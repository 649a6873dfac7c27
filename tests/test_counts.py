"""Parameters and costs: the papers' tables, and counts by hand."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitray.config import Model
from vitray.models.counts import count, diagram
from vitray.models.sizes import sizes_of
from vitray.models.vit import ViT

LS = {"layerscale": 1e-4}
AXIAL = {"attention": "axial", "class_token": False, "pool": "mean"}
# "Three things", Tables 1, 3 and 7, and ViT paper, Table 1: millions of parameters and GFLOPs, to the printed digit.
# L/16 is printed with its LayerScale (24 x 2 x 1024 parameters raise 304.33 to 304.38).
PAPERS = [
    ("ViT-Ti/16", {}, "5.7", "1.3"),
    ("ViT-S/16", {}, "22.1", "4.6"),
    ("ViT-B/16", {}, "86.6", "17.6"),
    ("ViT-L/16", LS, "304.4", "61.6"),
    ("ViT-H/14", {}, "632.0", None),
    ("S48x1", {}, "85.9", "18.3"),
    ("S24x2", {}, "85.9", "18.3"),
    ("B36x1", LS, "256.7", "52.5"),
    ("B18x2", LS, "256.7", "52.5"),
    ("vit_b12x1_16", {}, None, "17.58"),
    ("vit_b12x1_16_linear_bn", {}, None, "17.58"),
    ("vit_b12x1_16_linear_gelu", {}, None, "17.58"),
    ("vit_b12x1_16_linear_bn_gelu", {}, None, "17.58"),
    ("vit_b12x1_16_hmlp_bn", {}, None, "17.73"),
    ("vit_b12x1_16_hmlp_ln", {}, None, "17.73"),
    ("vit_b12x1_16_conv", {}, None, "19.07"),
    ("vit_b12x1_16_conv_ln", {}, None, "19.07"),
    ("vit_b13x1_16", {}, None, "19.04"),
    ("vit_b12x1_16_local", {}, None, "19.12"),
]


@pytest.mark.parametrize(("name", "settings", "params", "gflops"), PAPERS)
def test_the_papers_tables(name, settings, params, gflops):
    counts = count(Model(name=name, **settings))
    if params is not None:
        assert f"{counts.params / 1e6:.1f}" == params
    if gflops is not None:
        digits = len(gflops.partition(".")[2])
        assert f"{counts.gflops:.{digits}f}" == gflops


@pytest.mark.parametrize("branches", [1, 3])
def test_counts_by_hand(branches):
    model = Model(name=f"vit_u5x{branches}_8", image_size=[32, 48], num_classes=10)
    width, depth, patches = 64, 5, 4 * 6
    n = patches + 1
    pairs = depth * branches
    products = patches * 3 * 64 * width + pairs * (12 * n * width**2 + 2 * n**2 * width) + width * 10
    norms = 5 * (pairs * 2 * n * width + width)  # the last norm sees the class token alone
    assert count(model).gflops == pytest.approx((products + norms) / 1e9, rel=1e-12)
    per_pair = 12 * width**2 + 13 * width
    assert count(model).params == (
        (3 * 64 + 1) * width + patches * width + width + pairs * per_pair + 2 * width + (width + 1) * 10
    )


@pytest.mark.parametrize(("patch", "params", "gflops"), [(32, "173.28", "8.46"), (16, "171.62", "33.55")])
def test_counts_of_axial_vit_by_hand(patch, params, gflops):
    """Of Axial-ViT-B the ViT paper prints no count (D.6): a block is two, and a patch attends to a row or a column."""
    model = Model(name=f"vit_b24x1_{patch}", **AXIAL)
    width, rows, columns = 768, 224 // patch, 224 // patch
    n = rows * columns
    products = n * 3 * patch**2 * width + 24 * 12 * n * width**2 + width * 1000
    products += 12 * 2 * n * columns * width + 12 * 2 * n * rows * width
    norms = 5 * (24 * 2 * n * width + n * width)  # the mean is taken after the last norm
    counts = count(model)
    assert counts.gflops == pytest.approx((products + norms) / 1e9, rel=1e-12)
    per_level = 12 * width**2 + 13 * width
    assert counts.params == (3 * patch**2 + 1 + n + 2 + 1000) * width + 1000 + 24 * per_level
    assert (f"{counts.params / 1e6:.2f}", f"{counts.gflops:.2f}") == (params, gflops)
    assert "12 heads along rows, in the next level along columns" in diagram(model, counts)


@pytest.mark.parametrize("name", ["vit_u2x2_8_hmlp_bn", "vit_u3x1_8"])
def test_activation_memory_equals_that_of_a_real_image(name):
    model = Model(name=name, image_size=32)
    vit = ViT(model.model_copy(update={"execution": "loop"}))
    stored = {}

    def store(tensor):
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        out = vit(torch.zeros(1, 3, 32, 32))
    for parameter in vit.parameters():
        stored.pop(parameter.untyped_storage().data_ptr(), None)
    assert out.shape == (1, 1000)
    assert count(model).activation_bytes == sum(stored.values())


def test_counting_does_not_depend_on_execution():
    counts = {
        execution: count(Model(name="vit_u2x2_8", image_size=32, execution=execution))
        for execution in ("loop", "fused")
    }
    assert counts["loop"] == counts["fused"]


def test_the_diagram_shows_every_branch():
    model = Model(name="vit_u4x3_8_hmlp_ln", image_size=32, layerscale=0.1)
    text = diagram(model, count(model))
    for part in (
        "vit_u4x3_8_hmlp_ln",
        "4 levels on 17 tokens of 64",
        "attn3",
        "ffn3",
        "4x4/4 conv 16 > ln > gelu",
        "scale 0.1",
    ):
        assert part in text


ODD = [
    ("vit_ti2x3_16", {"layerscale": 1e-4, "positions": "sincos2d", "pool": "mean", "class_token": False}),
    ("vit_u2x2_8_hmlp_ln", {"image_size": [32, 48], "pool": "mean_then_norm"}),
    ("vit_u2x1_8", {"image_size": 32, "head": "mlp", "num_classes": 7}),
    ("vit_u2x1_8", {"image_size": 32, "head": {"kind": "mlp", "hidden": 5}, "positions": "none", "pool": "mean"}),
    ("vit_u2x1_32_hmlp_bn", {"image_size": 64, "num_classes": None}),
    ("vit_s2x1_16_conv_ln", {"image_size": 96}),
    ("vit_s2x1_16_local", {"image_size": 32}),
    ("vit_s2x1_16_pooled", {"image_size": [32, 48], "ffn_ratio": 2.3}),
    ("vit_u2x2_4_pooled", {"image_size": 16, "ffn_ratio": 1, "activation": "swiglu"}),
    ("vit_u2x1_8_local", {"image_size": [32, 48], "bias": False}),
    ("vit_u3x2_8", {"image_size": [32, 48], "positions": {"kind": "learned", "where": "levels"}, "registers": True}),
    ("vit_u3x2_8", {"image_size": [32, 48], "positions": {"kind": "learned2d", "where": "levels"}}),
    ("vit_u3x1_8", {"image_size": [32, 48], "positions": {"kind": "learned2d", "where": "shared"}, "bias": False}),
    ("vit_u2x2_8", {"image_size": [32, 48], "positions": "relative", "class_token": False, "pool": "mean"}),
    ("vit_u2x2_8", {"image_size": 32, "positions": "rope", "qk_norm": True, "norm": "rmsnorm"}),
    ("vit_u2x2_8", {"image_size": 32, "qk_norm": True, "bias": False, "activation": "swiglu"}),
    ("vit_u2x1_8", {"image_size": 32, "distillation_token": True, "num_classes": 7}),
    ("vit_u2x2_8", {"image_size": 32, "distillation_token": True, "head": {"kind": "mlp", "hidden": 5}}),
    ("vit_u4x2_8", {"image_size": [32, 48], "qk_norm": True, **AXIAL}),
    ("vit_u2x1_8_hmlp_bn", {"image_size": [48, 32], "positions": "rope", **AXIAL}),
    ("vit_b24x1_32", AXIAL),
    ("vit_w192d2x1_8", {"image_size": 32, "qk_norm": True, "registers": 3, "activation": "swiglu"}),
]


def measured(model):
    """Return the parameters and GFLOPs of the network itself, in one pass on the meta device."""
    with torch.device("meta"):
        vit, images = ViT(model.model_copy(update={"execution": "loop"})), torch.empty(1, 3, *model.image_shape)
    normalized = []
    for module in vit.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.BatchNorm2d):
            module.register_forward_hook(lambda _module, _inputs, output: normalized.append(output.numel()))
    with FlopCounterMode(display=False) as flops:
        vit(images)
    params = sum(parameter.numel() for parameter in vit.parameters())
    return params, (flops.get_total_flops() // 2 + 5 * sum(normalized)) / 1e9


@pytest.mark.parametrize(("name", "settings"), [*((name, settings) for name, settings, *_ in PAPERS), *ODD])
def test_arithmetic_agrees_with_the_network(name, settings):
    model = Model(name=name, **settings)
    params, gflops = measured(model)
    for sizes in (sizes_of(model), count(model)):
        assert sizes.params == params
        assert sizes.gflops == pytest.approx(gflops, rel=1e-12)
