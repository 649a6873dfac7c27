"""Hybrids, a ResNet before the transformer: the papers' costs, timm's functions, Google's files, both epsilons."""

import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from networks import difference, scrambled
from safetensors.torch import save_file
from torch import nn

from vitray.config import Model, load_run
from vitray.config.classification import Finetune
from vitray.config.model_names import parse_name
from vitray.config.stems import RESNETS, resnet_layers
from vitray.errors import ConfigError
from vitray.inspection.filters import effective_stem
from vitray.models.counts import count, diagram
from vitray.models.resnet import ResNet, StandardizedConv, standardize
from vitray.models.sizes import sizes_of
from vitray.models.vit import ViT
from vitray.weights import import_weights, load_model, save_model
from vitray.weights.freezing import audit, freeze

TIMM = {
    "vit_tiny_r_s16_p8_224": "vit_ti12x1_32_r",
    "vit_small_r26_s32_224": "vit_s12x1_32_r26",
    "vit_base_r50_s16_224": "vit_b12x1_16_r50",
    "vit_large_r50_s32_224": "vit_l24x1_32_r50",
}


# ---- names and costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("R+Ti/16", "vit_ti12x1_32_r"), ("R26+S/32", "vit_s12x1_32_r26"), ("R50+ViT-B/16", "vit_b12x1_16_r50"),
        ("R50+B/32", "vit_b12x1_32_r50"), ("R50x1+ViT-L/32", "vit_l24x1_32_r50"),
        ("vit_b12x1_1_r50", "vit_b12x1_32_r50"), ("vit_u2x2_16_r101", "vit_u2x2_16_r101"),
        ("vit_u2x1_8_r", "vit_u2x1_8_r"),
    ],
)  # fmt: skip
def test_the_papers_spellings(text, name):
    assert str(parse_name(text)) == name
    assert str(parse_name(name)) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vit_b12x1_8_r50", r"have 16 pixels \(three stages\) or a multiple of 32 \(four stages\), not 8"),
        ("vit_b12x1_6_r", "its patch is a multiple of 4, not 6"),
        ("R51+B/32", "stem 'r51' is not one of .*did you mean r50"),
    ],
)
def test_names_without_a_network_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_name(text)


# ViT paper, Table 6: exaFLOPs of 7 epochs on JFT, which has 303 million images. A step costs three forward passes, and
# a multiply-add two operations. Of R50+ViT-L/16 the row of 14 epochs, 1668, contradicts that of 7, 859.
JFT_EPOCHS = 7 * 303e6
EXAFLOPS = [
    ("ViT-B/32", 55), ("ViT-B/16", 224), ("ViT-L/32", 196), ("ViT-L/16", 783), ("R50+ViT-B/32", 106),
    ("R50+ViT-B/16", 274), ("R50+ViT-L/32", 246), ("R50+ViT-L/16", 1668 / 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "printed"), EXAFLOPS)
def test_the_papers_costs(name, printed):
    work = sizes_of(Model(name=name)).gflops * 1e9
    assert 6 * work * JFT_EPOCHS / 1e18 == pytest.approx(printed, rel=0.025)


@pytest.mark.parametrize(("theirs", "ours"), TIMM.items())
def test_parameters_are_those_of_timm(theirs, ours):
    with torch.device("meta"):
        network, reference = ViT(Model(name=ours)), timm.create_model(theirs, num_classes=1000)
    params = sum(parameter.numel() for parameter in reference.parameters())
    # timm's table of positions begins with one of the class token.
    assert sizes_of(network.model).params == params - network.model.shape.size
    assert sum(parameter.numel() for parameter in network.parameters()) == sizes_of(network.model).params


@pytest.mark.parametrize("name", ["vit_u1x1_16_r50", "vit_u1x1_32_r26", "vit_u1x2_64_r26", "vit_u1x1_8_r"])
def test_multiply_adds_are_those_of_the_layers(name):
    described = Model(name=name, image_size=[64, 128], num_classes=3)
    with torch.device("meta"):
        vit = ViT(described)
        work = 0

        def add(layer: nn.Module, _, output: torch.Tensor) -> None:
            nonlocal work
            kernel = layer.weight.numel() // layer.weight.shape[0] if isinstance(layer, nn.Conv2d) else 5
            work += kernel * output.numel()

        for layer in vit.stem.modules():
            if isinstance(layer, nn.Conv2d | nn.GroupNorm):
                layer.register_forward_hook(add)
        vit.stem(torch.empty(1, 3, 64, 128))
    without = described.model_copy(update={"name": name.rpartition("_")[0]})
    linear = 3 * described.shape.patch**2 * 64 * described.grid[0] * described.grid[1]
    assert sizes_of(described).gflops - sizes_of(without).gflops == pytest.approx((work - linear) / 1e9, rel=1e-9)


def test_the_diagram_names_the_stages():
    described = Model(name="vit_u1x1_16_r50", image_size=32)
    text = diagram(described, count(described))
    assert "ResNet of 3, 4, 9 units" in text
    assert resnet_layers(RESNETS["r50"].units, 32) == (3, 4, 6, 3)


# ---- functions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "divisor"),
    [
        ("vit", lambda s: s + 1e-5),
        ("bit", lambda s: (s * s + 1e-10) ** 0.5),
        ("timm", lambda s: (s * s + 1e-8) ** 0.5),
    ],
)
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_standardized_kernels_have_the_epsilon_of_their_code(kind, divisor, size):
    weight = size * np.random.default_rng(0).normal(size=(5, 3, 2, 2))
    wanted = np.stack([(kernel - kernel.mean()) / divisor(kernel.std()) for kernel in weight])
    torch.testing.assert_close(standardize(torch.tensor(weight), kind), torch.tensor(wanted), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kernel", "stride"), [(7, 2), (3, 2), (3, 1), (1, 2), (1, 1)])
def test_an_even_side_is_halved_as_in_tensorflow(kernel, stride):
    layer, side = StandardizedConv(3, 4, kernel, stride, "vit").double(), 12
    x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out, weight = layer(x), standardize(layer.weight, "vit")
    before = max((-(-side // stride) - 1) * stride + kernel - side, 0) // 2
    padded = torch.zeros(3, side + 2 * kernel, side + 2 * kernel, dtype=torch.float64)
    padded[:, before : before + side, before : before + side] = x[0]
    for row, column in [(0, 0), (2, 1), (out.shape[2] - 1, out.shape[3] - 1)]:
        window = padded[:, row * stride : row * stride + kernel, column * stride : column * stride + kernel]
        torch.testing.assert_close(out[0, :, row, column], (weight * window).sum(dim=(1, 2, 3)))
    assert out.shape[2] == side // stride


def check_logits(folder: Path, theirs: str, ours: str) -> None:
    reference = scrambled(timm.create_model(theirs, img_size=64, depth=2, num_classes=7))
    reference.pos_embed.data[:, 0] = 0  # added to the class token in float32, which rounds
    save_file(reference.state_dict(), folder / "m.safetensors")
    settings = {"heads": parse_name(ours).heads, "normalize": {}}
    run, vit = import_weights(str(folder / "m.safetensors"), settings=settings)
    assert str(parse_name(run.model.name)) == re.sub(r"\d+x1", "2x1", ours)
    assert (run.model.resnet_eps, run.model.image_size) == ("timm", 64)
    assert difference(vit, reference, 64) < 1e-12


@pytest.mark.parametrize(("theirs", "ours"), [*TIMM.items()][:2])
def test_logits_are_those_of_timm(tmp_path, theirs, ours):
    check_logits(tmp_path, theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "ours"), [*TIMM.items()][2:])
def test_logits_of_large_hybrids_are_those_of_timm(tmp_path, theirs, ours):
    check_logits(tmp_path, theirs, ours)


def google_file(vit: ViT) -> dict[str, np.ndarray]:
    """The tensors of a hybrid under the names and in the shapes of Google's .npz files."""
    file: dict[str, np.ndarray] = {}
    heads = vit.model.num_heads

    def put(name: str, tensor: torch.Tensor) -> None:
        file[name] = tensor.detach().numpy()

    for key, tensor in vit.stem.state_dict().items():
        _, index, *path = key.split(".")
        if index == "1":
            put(
                f"embedding/{'bias' if path == ['bias'] else 'kernel'}",
                tensor.permute(2, 3, 1, 0) if tensor.ndim > 1 else tensor,
            )
            continue
        *path, leaf = path
        place = f"block{int(path[1]) + 1}/unit{int(path[2]) + 1}/" if path[0] == "stages" else ""
        part = path[-1]
        part = {"root": "conv_root", "root_norm": "gn_root", "down": "conv_proj", "down_norm": "gn_proj"}.get(
            part, part.replace("norm", "gn")
        )
        if tensor.ndim == 4:
            put(f"{place}{part}/kernel", tensor.permute(2, 3, 1, 0))
        else:
            put(f"{place}{part}/{'scale' if leaf == 'weight' else leaf}", tensor)
    for level, block in enumerate(vit.blocks):
        place = f"Transformer/encoderblock_{level}"
        attention, feedforward = block.attn1, block.ffn1
        for name, norm in (("LayerNorm_0", attention.norm), ("LayerNorm_2", feedforward.norm)):
            put(f"{place}/{name}/scale", norm.weight)
            put(f"{place}/{name}/bias", norm.bias)
        for name, weight, bias in zip(
            ("query", "key", "value"), attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True
        ):
            put(f"{place}/MultiHeadDotProductAttention_1/{name}/kernel", weight.T.unflatten(1, (heads, -1)))
            put(f"{place}/MultiHeadDotProductAttention_1/{name}/bias", bias.unflatten(0, (heads, -1)))
        put(f"{place}/MultiHeadDotProductAttention_1/out/kernel", attention.out.weight.T.unflatten(0, (heads, -1)))
        put(f"{place}/MultiHeadDotProductAttention_1/out/bias", attention.out.bias)
        for name, linear in (("Dense_0", feedforward.up), ("Dense_1", feedforward.down)):
            put(f"{place}/MlpBlock_3/{name}/kernel", linear.weight.T)
            put(f"{place}/MlpBlock_3/{name}/bias", linear.bias)
    put("Transformer/encoder_norm/scale", vit.norm.weight)
    put("Transformer/encoder_norm/bias", vit.norm.bias)
    put("head/kernel", vit.head.weight.T)
    put("head/bias", vit.head.bias)
    put("cls", vit.class_token[None, None])
    table = torch.cat([torch.zeros(1, vit.model.shape.size), vit.positions.table])
    put("Transformer/posembed_input/pos_embedding", table[None])
    return file


@pytest.mark.parametrize("name", ["vit_u2x1_16_r26", "vit_u1x1_32_r26", "vit_u1x1_16_r"])
def test_hybrids_of_google_are_read(tmp_path, name):
    settings = {"name": name, "image_size": 64, "num_classes": 5, "activation": "gelu_tanh"}
    vit = scrambled(ViT(Model.model_validate(settings)))
    np.savez(tmp_path / "m.npz", **google_file(vit))
    run, read = import_weights(str(tmp_path / "m.npz"))
    assert (run.model.name, run.model.resnet_eps, run.model.image_size) == (name, "vit", 64)
    assert difference(read, vit, 64) < 1e-12


# ---- elsewhere -------------------------------------------------------------------------------------------------------


def small(**settings) -> ViT:
    torch.manual_seed(0)
    return ViT(Model.model_validate({"name": "vit_u2x1_16_r", "image_size": 32, "num_classes": 5} | settings))


def test_a_folder_keeps_the_epsilons_and_the_stem_is_a_part(tmp_path):
    vit = scrambled(small(resnet_eps="bit"))
    save_model(str(tmp_path / "m"), load_run().replace({"model": vit.model.model_dump(mode="json")}), vit)
    loaded = load_model(str(tmp_path / "m")).vit
    x = torch.randn(2, 3, 32, 32)
    assert loaded.model.resnet_eps == "bit"
    assert torch.equal(loaded(x), vit(x))
    freeze(vit, Finetune(weights="w", mode="attn"))
    rows = {row.part: row for row in audit(vit).rows}
    assert rows["stem"].trained == 0 < rows["stem"].parameters


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model={name: vit_u1x1_32_r26, num_classes: null}", "task=masked"],
            "the patches of a hybrid see each other through its ResNet",
        ),
        (["model={name: vit_u1x1_32_r26, image_size: 48}"], "image_size 48 is not a multiple of the patch"),
        (["model={name: vit_u1x1_16, resnet_eps: timm}"], "resnet_eps timm is about hybrids"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_run(None, overrides)


def test_its_tokens_have_no_filters():
    with pytest.raises(ConfigError, match="a token of its ResNet reads the whole image"):
        effective_stem(small().eval(), torch.zeros(3))


def test_a_new_unit_is_its_shortcut():
    resnet = ResNet((2, 2, 2, 2), 16, "vit")
    unit, x = resnet.stages[0][1], torch.randn(1, 256, 4, 4).relu()
    assert torch.equal(unit(x), x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_u2x1_16_r", "vit_u2x1_16_r26"])
def test_a_few_images_are_learned_in_200_steps(name):
    vit, labels = small(name=name), torch.arange(5)
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-3)
    for _ in range(200):
        loss = F.cross_entropy(vit(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
