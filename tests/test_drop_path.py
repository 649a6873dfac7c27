"""Drop path: samples that a branch leaves out, against the definition, which computes all and multiplies by 0."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitray.config import Model
from vitray.models import blocks
from vitray.models.drop_path import draw_factors, draw_kept
from vitray.models.positions import VisiblePatches
from vitray.models.vit import ViT

DRAWS = ["sample", "share"]
KINDS = {
    "plain": {},
    "layerscale": {"layerscale": 0.1},
    "rope": {"positions": "rope"},
    "relative": {"positions": "relative", "class_token": False, "pool": "mean"},
    "axial": {"attention": "axial", "class_token": False, "pool": "mean"},
    "adapters, fused": {"adapters": 4, "execution": "fused"},
}


def network(draw, rate=0.4, **kind) -> ViT:
    torch.manual_seed(0)
    model = Model(name="vit_u2x2_8", image_size=32, num_classes=3, drop_path=rate, drop_path_draw=draw, **kind)
    return ViT(model).double().train()


def results(vit: ViT, call) -> dict[str, torch.Tensor]:
    """The output of a call and the gradients of its sum of squares, with draws that are the same for each call."""
    vit.zero_grad()
    torch.manual_seed(1)
    out = call()
    out.square().sum().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in vit.named_parameters() if p.grad is not None}


def assert_like_definition(vit, call, monkeypatch):
    skipping = results(vit, call)
    monkeypatch.setattr(blocks.Block, "_draw_kept", drawn_for_all)
    for name, expected in results(vit, call).items():
        torch.testing.assert_close(skipping[name], expected, atol=1e-10, rtol=1e-8, msg=name)


def drawn_for_all(block, x_BND, computes_all=True):
    del computes_all
    return draw_kept(x_BND, block.branches, block.drop_path, block.drop_path_draw, computes_all=True)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_samples_that_are_left_out_count_as_zeros(draw, kind, monkeypatch):
    vit, images = network(draw, **kind), torch.randn(5, 3, 32, 32, dtype=torch.float64)
    assert_like_definition(vit, lambda: vit(images), monkeypatch)


@pytest.mark.parametrize("draw", DRAWS)
def test_rotations_of_chosen_patches_follow_their_sample(draw, monkeypatch):
    vit, chosen_BM = network(draw, positions="rope"), torch.rand(6, 16).argsort(1)[:, :7]
    x_BMD = torch.randn(6, 7, 64, dtype=torch.float64)
    assert_like_definition(vit, lambda: vit.encode(x_BMD, VisiblePatches((4, 4), chosen_BM)), monkeypatch)


@settings(deadline=None, max_examples=30)
@given(batch=st.integers(1, 9), rate=st.floats(0.02, 0.95), draw=st.sampled_from(DRAWS))
def test_each_sample_is_kept_with_its_probability(batch, rate, draw):
    torch.manual_seed(0)
    x_BND = torch.zeros(batch, 1, 1, dtype=torch.float64)
    draws, total = 2000, torch.zeros(batch, 2, dtype=torch.float64)
    for _ in range(draws):
        for branch, kept in enumerate(draw_kept(x_BND, 2, rate, draw)):
            total[:, branch] += kept.add(x_BND, kept.of(torch.ones_like(x_BND)))[:, 0, 0]
    # Five standard deviations of the mean of a factor.
    spread = 5 * (rate / (1 - rate) / draws) ** 0.5
    torch.testing.assert_close(total / draws, torch.ones_like(total), atol=spread, rtol=0)


@pytest.mark.parametrize("draw", DRAWS)
def test_branches_are_drawn_apart(draw):
    torch.manual_seed(0)
    factors_BP = draw_factors(torch.zeros(4000, 1, 1), 2, 0.3, draw)
    assert abs(torch.corrcoef((factors_BP > 0).double().T)[0, 1].item()) < 0.05


@pytest.mark.parametrize(("batch", "rate", "computed"), [(4, 0.1, 4), (10, 0.1, 9), (10, 0.6, 4), (3, 0.9, 1)])
def test_a_share_of_a_batch_has_one_size(batch, rate, computed):
    for kept in draw_kept(torch.zeros(batch, 1, 1), 50, rate, "share"):
        assert len(kept.rows) == len(kept.rows.unique()) == computed


@pytest.mark.parametrize("draw", DRAWS)
def test_a_branch_that_keeps_nothing_has_gradients_of_zero(draw):
    vit = network(draw, rate=0.99)
    gradients = results(vit, lambda: vit(torch.randn(2, 3, 32, 32, dtype=torch.float64)))
    assert len(gradients) == 1 + len([*vit.parameters()])
    assert [name for name in gradients if "ffn" in name and not gradients[name].any()]


@pytest.mark.parametrize("draw", DRAWS)
def test_compiled_training_is_one_graph_for_all_draws(draw):
    torch.compiler.reset()
    vit, images = network(draw), torch.randn(5, 3, 32, 32, dtype=torch.float64)
    compiled: nn.Module = torch.compile(vit, backend="aot_eager", fullgraph=True, dynamic=False)  # pyright: ignore
    eager = results(vit, lambda: vit(images))
    for name, expected in results(vit, lambda: compiled(images)).items():
        torch.testing.assert_close(eager[name], expected, atol=1e-10, rtol=1e-8, msg=name)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            compiled(images)


@pytest.mark.parametrize("draw", DRAWS)
def test_evaluation_drops_nothing(draw):
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(network(draw).eval()(images), network(draw, rate=0.0).eval()(images))
