"""The ViT: pool, head, drop-path rule, regrouping, execution."""

import pytest
import torch

from vitray.config import Model
from vitray.config.model_names import STEMS, WIDTHS
from vitray.models.vit import ViT, drop_path_rates, regroup


def vit(name="vit_u3x2_8", **settings) -> ViT:
    torch.manual_seed(0)
    return ViT(Model(name=name, **({"image_size": 32, "num_classes": 7} | settings))).eval()


def images(height=32, width=32) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stem", STEMS)
def test_every_name_builds_and_runs_on_the_meta_device(width, stem):
    for branches in (1, 2):
        with torch.device("meta"):
            network = ViT(Model(name=f"vit_{width}2x{branches}_16_{stem}", image_size=[32, 48], layerscale=1e-4))
            assert network(torch.empty(2, 3, 32, 48)).shape == (2, 1000)


@pytest.mark.parametrize("execution", ["loop", "fused", "auto"])
@pytest.mark.parametrize("pool", ["token", "mean", "mean_then_norm"])
def test_pools_read_the_patches(pool, execution):
    network = vit(pool=pool, execution=execution, num_classes=None)
    with torch.no_grad():
        x = network.tokens(images())
        expected = {
            "token": network.norm(x)[:, 0],
            "mean": network.norm(x)[:, 1:].mean(1),
            "mean_then_norm": network.norm(x[:, 1:].mean(1)),
        }[pool]
        torch.testing.assert_close(network(images()), expected)


def test_without_a_class_token_all_tokens_are_patches():
    network = vit(pool="mean", class_token=False)
    assert network.tokens(images()).shape == (2, 16, 64)
    assert "class_token" not in network.state_dict()


def test_positions_are_added_before_the_class_token():
    network = vit("vit_u1x1_8")
    with torch.no_grad():
        network.positions.table.fill_(100.0)
        block_inputs = []
        network.blocks[0].register_forward_pre_hook(lambda module, inputs: block_inputs.append(inputs[0]))
        network(images())
    torch.testing.assert_close(block_inputs[0][:, 0], network.class_token.expand(2, -1))
    assert (block_inputs[0][:, 1:] > 50).all()


def test_other_image_sizes_and_shapes_run():
    network = vit()
    for height, width in ((32, 32), (64, 40), (8, 16)):
        assert network(images(height, width)).shape == (2, 7)
    with pytest.raises(ValueError, match="30 x 32 pixels do not divide"):
        network(images(30))


def test_heads():
    assert not vit(head={"kind": "linear", "init": "zeros"}).head.weight.any()
    mlp = vit(head={"kind": "mlp", "hidden": 24})
    pooled = mlp.pooled(mlp.tokens(images()))
    first, last = mlp.head[0], mlp.head[2]
    torch.testing.assert_close(
        mlp(images()), torch.tanh(pooled @ first.weight.T + first.bias) @ last.weight.T + last.bias
    )
    assert vit(num_classes=None)(images()).shape == (2, 64)


def test_initial_weights_match_the_recipe():
    network = vit("vit_s4x1_16", image_size=224)
    weights = torch.cat([block.attn1.qkv.weight.flatten() for block in network.blocks])
    assert abs(weights.std().item() - 0.02) < 0.001
    assert not any(block.ffn1.up.bias.any() for block in network.blocks)
    assert abs(network.positions.table.std().item() - 0.02) < 0.002


def test_drop_path_over_depth():
    assert drop_path_rates(Model(name="vit_u3x1_8", image_size=32, drop_path=0.2)) == [0.2, 0.2, 0.2]
    ramp = Model(name="vit_u3x1_8", image_size=32, drop_path=0.2, drop_path_schedule="linear")
    assert drop_path_rates(ramp) == [0.0, 0.1, 0.2]
    assert drop_path_rates(ramp.model_copy(update={"name": "vit_u1x1_8"})) == [0.0]


@pytest.mark.parametrize(
    ("old", "branches", "name"), [("vit_u6x1_8", 2, "vit_u3x2_8"), ("vit_u2x3_8_hmlp_ln", 1, "vit_u6x1_8_hmlp_ln")]
)
def test_regrouping_keeps_every_weight(old, branches, name):
    network = vit(old, layerscale=0.1)
    other = regroup(network, branches)
    assert other.model.name == name
    restored = regroup(other, network.model.shape.branches)
    assert restored.model == network.model
    assert all(torch.equal(restored.state_dict()[key], value) for key, value in network.state_dict().items())
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in network.parameters())


def test_regrouping_keeps_the_bits_of_float64():
    network = vit("vit_u6x1_8").double()
    with torch.no_grad():
        network.norm.weight.fill_(1 / 3)
    restored = regroup(regroup(network, 2), 1).state_dict()
    assert all(tensor.dtype == torch.float64 for tensor in restored.values())
    assert all(torch.equal(restored[key], tensor) for key, tensor in network.state_dict().items())


def test_regrouping_orders_pairs_by_level_then_branch():
    network = vit("vit_u4x1_8")
    other = regroup(network, 2)
    for pair in range(4):
        theirs = other.blocks[pair // 2].get_submodule(f"ffn{pair % 2 + 1}").up.weight
        assert torch.equal(theirs, network.blocks[pair].ffn1.up.weight)


def test_regrouping_changes_little_for_small_residuals():
    # "Three things": r'(x + r(x)) = r'(x) as residuals shrink, so the two groupings converge.
    differences = []
    for scale in (1e-1, 1e-2, 1e-3):
        network = vit("vit_u4x1_8", layerscale=scale)
        with torch.no_grad():
            differences.append((network(images()) - regroup(network, 2)(images())).abs().max().item())
    assert differences[2] < differences[1] / 20 < differences[0] / 400


def test_indivisible_regrouping_is_refused():
    with pytest.raises(ValueError, match=r"vit_u3x2_8 has 6 pairs of layers, which do not divide into 4 branches"):
        regroup(vit(), 4)


def test_execution_is_switched_on_a_loaded_model():
    network = vit(layerscale=0.1)
    outs = {}
    keys = list(network.state_dict())
    with torch.no_grad():
        for execution in ("loop", "fused", "auto"):
            network.execution = execution
            outs[execution] = network(images())
    assert network.execution == "auto"
    assert list(network.state_dict()) == keys
    torch.testing.assert_close(outs["loop"], outs["fused"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outs["loop"], outs["auto"], atol=1e-5, rtol=1e-5)


def test_a_trace_names_levels_and_branches():
    network = vit("vit_u9x2_8")
    trace = {}
    torch.testing.assert_close(network(images(), trace), network(images()), atol=1e-5, rtol=1e-5)
    assert len(trace) == 18
    assert trace["block07.attn1"].shape == (2, 2, 17, 17)


@pytest.mark.parametrize("positions", ["learned", "none", "rope"])
def test_the_residual_stream_is_float32_under_autocast(positions):
    vit = ViT(Model(name="vit_u2x1_8", image_size=32, num_classes=None, positions=positions)).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert vit.tokens(torch.randn(2, 3, 32, 32)).dtype == torch.float32
