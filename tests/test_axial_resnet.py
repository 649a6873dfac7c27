"""AxialResNet-50: attention against loops over cells, counts, weights, training, refusals; the bench of figure 13."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import scrambled

from pipelines.__main__ import main
from pipelines.bench import FIGURE_13
from vitray.bench.networks import model_of
from vitray.config import Model, Run, load_run
from vitray.config.augmentation import Normalize
from vitray.config.model_names import AXIAL_RESNETS
from vitray.errors import ConfigError
from vitray.exports.folding import fold
from vitray.exports.writers import trace_program, write_onnx
from vitray.inspection.tokens import run_states
from vitray.models.axial_resnet import HEADS, AxialBottleneck, PositionalAttention
from vitray.models.branches import AXES
from vitray.models.counts import Counts, count, diagram
from vitray.models.network import network_sizes
from vitray.models.other_networks import OtherNetwork, stage_widths
from vitray.weights import import_weights, load_model, save_model
from vitray.weights.export import write_library
from vitray.weights.pretrained import adapt

SMALL = "axial_resnet50_s"


def model(**settings) -> Model:
    return Model.model_validate({"name": SMALL, "image_size": (32, 64), "num_classes": 5} | settings)


def network(**settings) -> OtherNetwork:
    torch.manual_seed(0)
    return OtherNetwork(model(**settings)).eval()


def images(count=2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 64, generator=torch.Generator().manual_seed(1))


# ---- the function ----------------------------------------------------------------------------------------------------


def normalized(norm: torch.nn.BatchNorm2d, value: float, channel: int) -> float:
    mean, variance = norm.running_mean[channel].item(), norm.running_var[channel].item()
    scale, shift = norm.weight[channel].item(), norm.bias[channel].item()
    return (value - mean) / math.sqrt(variance + norm.eps) * scale + shift


def attention_by_loops(layer: PositionalAttention, line_CL: torch.Tensor) -> torch.Tensor:
    """The output of attention along one line: eq. (4) of Wang et al. for each head and cell, a number at a time."""
    channels, length = line_CL.shape
    d = channels // HEADS
    projected = (layer.qkv.weight[:, :, 0, 0] @ line_CL).tolist()
    out_CL = torch.zeros(channels, length, dtype=torch.float64)
    for head in range(HEADS):
        rows = range(2 * d * head, 2 * d * (head + 1))
        of_head = [[normalized(layer.qkv_norm, value, row) for value in projected[row]] for row in rows]
        q, k, v = of_head[: d // 2], of_head[d // 2 : d], of_head[d:]
        for here in range(length):
            logits = []
            for there in range(length):
                learned = layer.relative[here - there + length - 1].tolist()
                r_q, r_k = learned[: d // 2], learned[d // 2 : d]
                terms = [
                    sum(q[c][here] * k[c][there] for c in range(d // 2)),
                    sum(q[c][here] * r_q[c] for c in range(d // 2)),
                    sum(k[c][there] * r_k[c] for c in range(d // 2)),
                ]
                logits.append(sum(normalized(layer.logit_norm, x, HEADS * n + head) for n, x in enumerate(terms)))
            shares = [math.exp(logit) for logit in logits]
            shares = [share / sum(shares) for share in shares]
            for c in range(d):
                content = sum(share * v[c][there] for there, share in enumerate(shares))
                place = sum(
                    share * layer.relative[here - there + length - 1, d + c].item()
                    for there, share in enumerate(shares)
                )
                row = head * d + c
                out_CL[row, here] = normalized(layer.out_norm, content, row) + normalized(
                    layer.out_norm, place, channels + row
                )
    return out_CL


@pytest.mark.parametrize("axis", AXES)
@torch.no_grad()
def test_attention_equals_loops_over_cells(axis):
    height, width = 2, 3
    layer = scrambled(PositionalAttention(4 * HEADS, axis, width if axis == "rows" else height)).double()
    x_BCHW = torch.randn(2, 4 * HEADS, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got_BCHW = layer(x_BCHW)
    for image in range(2):
        for line in range(height if axis == "rows" else width):
            at = (image, slice(None), line) if axis == "rows" else (image, slice(None), slice(None), line)
            torch.testing.assert_close(got_BCHW[at], attention_by_loops(layer, x_BCHW[at]), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_unit_is_a_residual_of_columns_then_rows_and_halves_by_a_mean():
    unit = scrambled(AxialBottleneck(16, 16, 2, (4, 6))).double()
    x = torch.randn(1, 16, 4, 6, dtype=torch.float64)
    h = unit.rows(unit.columns(F.relu(unit.bn1(unit.conv1(x)))))
    h = h.unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5)).relu()
    skip = unit.downsample[1](F.conv2d(x[:, :, ::2, ::2], unit.downsample[0].weight))
    torch.testing.assert_close(unit(x), F.relu(unit.bn2(unit.conv2(h)) + skip))


def test_a_new_unit_is_the_identity():
    unit, x = AxialBottleneck(32, 16, 1, (4, 4)).train(), torch.rand(2, 32, 4, 4)
    assert torch.equal(unit(x), x)


# ---- counts ----------------------------------------------------------------------------------------------------------


def sizes_by_hand(share: float, side: int) -> tuple[int, float]:
    """Parameters, and products of an image: a sum over the units of a ResNet-50."""
    before, params, products = int(64 * share), 0, 0
    params += 3 * 49 * before + 2 * before
    products += 3 * 49 * before * (side // 2) ** 2
    cells = side // 4
    for stage, depth in enumerate((3, 4, 6, 3)):
        inner = int(128 * share) * 2**stage
        for unit in range(depth):
            halves = unit == 0 and stage > 0
            after = cells // 2 if halves else cells
            params += before * inner + 2 * inner + 2 * inner * inner + 4 * inner
            products += before * inner * cells**2 + 2 * inner * inner * after**2
            for _ in range(2):
                params += 2 * inner * inner + 2 * (2 * inner + 3 * HEADS + 2 * inner)
                params += 2 * (inner // HEADS) * (2 * cells - 1)
                # A cell and another of its line: three logits of half the channels, two sums of all of them.
                products += cells**2 * (2 * inner * inner + cells * (3 * inner // 2 + 2 * inner))
            if unit == 0:
                params += before * 2 * inner + 4 * inner
                products += before * 2 * inner * after**2
            before, cells = 2 * inner, after
    return params + 1000 * before + 1000, (products + 1000 * before) / 1e9


@pytest.mark.parametrize("name", AXIAL_RESNETS)
def test_counts_are_those_by_hand(name):
    described = Model(name=name)
    params, gflops = sizes_by_hand(AXIAL_RESNETS[name], 224)
    sizes = network_sizes(described)
    assert (sizes.params, sizes.gflops) == (params, pytest.approx(gflops, rel=1e-12))


def test_it_has_the_stages_of_a_resnet():
    described = model()
    assert stage_widths(described) == {"stage1": 128, "stage2": 256, "stage3": 512, "stage4": 1024}
    built = network()
    parts = built.parts()
    assert parts["body.layer2.0.rows.relative"] == "stage2"
    assert parts["body.layer2.0.rows.logit_norm.weight"] == "norms"
    for part in (SMALL, "image 3 x 32 x 64", "stage4", "head"):
        assert part in diagram(described, Counts(1, 1, 1))
    assert [states.shape[1] for states in run_states(built, images())] == [8 * 16, 8 * 16, 4 * 8, 2 * 4, 1 * 2]


@pytest.mark.slow
def test_memory_is_counted_from_shapes():
    counts = count(model())
    assert counts.params == sum(parameter.numel() for parameter in network().parameters())
    assert counts.activation_bytes > 4 * 32 * 16 * 32


# ---- weights and export ----------------------------------------------------------------------------------------------


def test_a_folder_gives_it_back_and_a_fine_tuning_keeps_its_image_size(tmp_path):
    base = scrambled(network())
    save_model(str(tmp_path / "base"), Run(model=base.model), base, list("abcde"))
    loaded = load_model(str(tmp_path / "base"))
    assert torch.equal(loaded.vit(images()), base(images()))
    tuned = OtherNetwork(model(num_classes=3)).eval()
    tuned.load_state_dict(adapt(base, tuned.model, "w", new_head=False))
    assert not tuned(images()).any()
    with pytest.raises(ConfigError, match=r"w: body\.layer1\.0\.rows\.relative: got 31 x 16, expected 15 x 16"):
        adapt(base, model(image_size=32), "w", new_head=False)


def test_files_of_other_libraries_have_no_such_network(tmp_path):
    with pytest.raises(ConfigError, match="axial_resnet50_s: an export for torchvision has no such network"):
        write_library(network(), "torchvision", tmp_path)
    torch.save({}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=r"(no tensors|weights files of axial_resnet50_s are not read)"):
        import_weights(str(tmp_path / "w.pth"), settings={"name": SMALL})


@pytest.mark.slow
def test_onnx_computes_the_same(tmp_path):
    ours = scrambled(network())
    pixels = torch.randint(0, 256, (3, 3, 32, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    folded = fold(ours, Normalize(), any_size=False, int8_weights=False)
    runner = write_onnx(trace_program(folded, (32, 64)), tmp_path / "m.onnx")
    with torch.no_grad():
        torch.testing.assert_close(runner(pixels), folded(pixels), rtol=1e-3, atol=1e-3)


# ---- names and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("AxialResNet-50", "axial_resnet50_l"),
        ("Axial-ResNet50-S", "axial_resnet50_s"),
        *((name, name) for name in AXIAL_RESNETS),
    ],
)
def test_spellings_of_its_name(text, name):
    assert load_run(None, [f"model.name={text}"]).model.name == name
    assert not load_run(None, [f"model.name={text}"]).model.is_vit


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=axial_resnet50_x"], r"expected one of axial_resnet50_s, .* did you mean axial_resnet50_"),
        (["model.name=axial_resnet101"], "'axial_resnet101': expected one of axial_resnet50_s"),
        ([f"model={{name: {SMALL}, image_size: 48}}"], "48 x 48 does not fit axial_resnet50_s; .* a multiple of 32"),
        ([f"model={{name: {SMALL}, pool: mean}}"], 'axial_resnet50_s has no pool "mean"'),
        ([f"model={{name: {SMALL}, attention: axial}}"], 'axial_resnet50_s has no attention "axial"'),
        ([f"model.name={SMALL}", "task={kind: masked}"], "task.kind: masked needs a Vision Transformer"),
        ([f"model.name={SMALL}", "task={kind: finetune, weights: w, mode: attn}"], r"attn \(not full, head, norm\)"),
        ([f"model.name={SMALL}", "optim.layer_decay=0.7"], "optim.layer_decay: 0.7 needs a Vision"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_run(None, overrides)


# ---- training --------------------------------------------------------------------------------------------------------


def test_under_autocast_a_step_moves_every_parameter():
    # At 64 x 64 pixels no line has one cell alone, whose logits would not matter.
    built, before = (scrambled(network(image_size=64)).train() for _ in range(2))
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(built(images(4).view(2, 3, 64, 64)), torch.arange(2))
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    pairs = zip(built.named_parameters(), before.parameters(), strict=True)
    assert [name for (name, each), old in pairs if torch.equal(old, each)] == []


@pytest.mark.slow
def test_a_few_images_are_learned_within_200_steps():
    built, labels = network().train(), torch.arange(5)
    optimizer = torch.optim.AdamW(built.parameters(), lr=3e-4)
    for _ in range(200):
        loss = F.cross_entropy(built(images(5)), labels)
        if loss.item() < 0.1:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss is {loss.item():.3g} after 200 steps")


# ---- figure 13 -------------------------------------------------------------------------------------------------------


def test_the_networks_of_figure_13_are_the_default():
    models = [model_of(text, 224) for text in FIGURE_13.split(",")]
    assert [each.name for each in models] == [
        "vit_b12x1_32", "vit_b24x1_32", "vit_b12x1_16", "vit_b24x1_16", "torchvision/resnet50", "axial_resnet50_l",
    ]  # fmt: skip
    assert [each.is_vit and each.attention for each in models] == ["global", "axial"] * 2 + [False] * 2


def test_the_table_has_every_network(tmp_path, capsys):
    axial = "vit_u2x1_8:attention=axial:class_token=false:pool=mean"
    args = [
        "--models",
        f"vit_u2x1_8,{axial},torchvision/resnet18",
        "--image-size",
        "32",
        "--batch",
        "2",
        "--rounds",
        "2",
    ]
    args += ["--seconds", "0.01", "--train", "--dtype", "bf16", "--out", str(tmp_path), "--json"]
    assert main(["bench", "networks", *args]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    rows = {row["network"]: row for row in result["rows"]}
    assert list(rows) == ["vit_u2x1_8", axial, "torchvision/resnet18"]
    assert rows["vit_u2x1_8"]["speed"] == 1
    assert rows[axial]["gflops"] == count(model_of(axial, 32)).gflops
    assert all(row["images_per_second"] > 0 and row["accuracy"] is None for row in result["rows"])
    assert all(f"| {name} |" in out for name in rows)
    assert "not measured" in out
    with Path(result["files"][0]).open() as file:
        assert [row["network"] for row in csv.DictReader(file)] == list(rows)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("vit_u2x1_8,vit_u2x1_8", "--models: got a network twice"),
        ("vit_u2x1_8:atention=axial", "model.atention"),
        ("axial_resnet50", "does not fit axial_resnet50_l"),
    ],
)
def test_a_wrong_network_of_the_table_is_rejected(models, message, capsys):
    assert main(["bench", "networks", "--models", models, "--image-size", "40"]) == 2
    assert message in capsys.readouterr().err
