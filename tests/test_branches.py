"""The branches of parallel levels: likeness and shares against loops in float64, and the permutation test."""

import itertools

import pytest
import torch
from test_inspection import images, inference, network

from vitray.inspection import branches as branches_module
from vitray.inspection.branches import compare_branches, likeness, update_shares
from vitray.inspection.levels import run_levels


@torch.no_grad()
def outputs_of(vit, batch):
    """[level][half][branch]: outputs, by the definition of a level."""
    for level in run_levels(vit, batch):
        x = level.input
        halves = []
        for branches in (level.block.attentions, level.block.feedforwards):
            outputs = [branch(x, 0.0) for branch in branches]
            x = sum(outputs, x)
            halves.append(outputs)
        torch.testing.assert_close(x, level.output, atol=1e-10, rtol=0)
        yield halves


def slow_hsic(first, second):
    """Unbiased HSIC by the formula of Song et al. (2007), on full Gram matrices."""
    n = len(first)
    k, m = (x.flatten(1) @ x.flatten(1).T for x in (first, second))
    k, m = k - k.diag().diag(), m - m.diag().diag()
    ones = torch.ones(n, dtype=torch.float64)
    total = (
        (k @ m).trace() + (ones @ k @ ones) * (ones @ m @ ones) / (n - 1) / (n - 2) - 2 * ones @ k @ m @ ones / (n - 2)
    )
    return total / n / (n - 3)


@pytest.mark.parametrize("name", ["vit_u2x2_8", "vit_u2x3_8"])
def test_likeness_and_shares_equal_loops(name):
    vit, batch = network((2, 3), name=name), images((2, 3), count=7)
    report = compare_branches(vit, batch)
    pairs = {(each.level, each.half, each.first, each.second): each for each in report.pairs}
    shares = {(each.level, each.half, each.branch): each for each in report.shares}
    count = vit.model.shape.branches
    for level, halves in enumerate(outputs_of(vit, batch)):
        for half, outputs in zip(("attn", "ffn"), halves, strict=True):
            update = sum(outputs)
            for place, h in enumerate(outputs, start=1):
                values = [float((h[i] * update[i]).sum() / (update[i] ** 2).sum()) for i in range(len(batch))]
                own = shares.pop((level, half, place))
                assert own.share == pytest.approx(sum(values) / len(values), abs=1e-9)
                assert own.deviation == pytest.approx(torch.tensor(values, dtype=torch.float64).std().item(), abs=1e-9)
            for (a, first), (b, second) in itertools.combinations(enumerate(outputs, start=1), 2):
                pair = pairs.pop((level, half, a, b))
                tokens = [
                    float(first[i, t] @ second[i, t] / first[i, t].norm() / second[i, t].norm())
                    for i in range(len(batch))
                    for t in range(first.shape[1])
                ]
                assert pair.cosine.value == pytest.approx(sum(tokens) / len(tokens), abs=1e-9)
                wanted = slow_hsic(first, second) / (slow_hsic(first, first) * slow_hsic(second, second)).sqrt()
                assert pair.cka.value == pytest.approx(wanted.item(), abs=1e-8)
    assert (pairs, shares) == ({}, {})
    assert len(report.shares) == 2 * 2 * count


def test_shares_of_a_level_sum_to_one():
    outputs = torch.randn(3, 5, 4, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(update_shares(outputs).sum(0), torch.ones(5, dtype=torch.float64))


def test_equal_branches_are_alike_and_make_half_of_the_update_each():
    vit, batch = network((2, 3), name="vit_u2x2_8"), images((2, 3), count=12)
    for block in vit.blocks:
        block.attn2.load_state_dict(block.attn1.state_dict())
        block.ffn2.load_state_dict(block.ffn1.state_dict())
    report = compare_branches(vit, batch)
    for pair in report.pairs:
        assert pair.cka.value == pytest.approx(1)
        assert pair.cosine.value == pytest.approx(1)
        assert pair.cka.p_value == pair.cosine.p_value == 0.001
        assert abs(pair.cka.chance) < 0.2
    assert {round(each.share, 9) for each in report.shares} == {0.5}


@pytest.mark.parametrize(("count", "batch"), [(13, 6), (9, 100)])
def test_mini_batches_keep_every_image(count, batch):
    vit, images_ = network((2, 2), name="vit_u2x2_8"), images((2, 2), count=count)
    whole, parts = compare_branches(vit, images_, batch=100), compare_branches(vit, images_, batch=batch)
    for one, other in zip(whole.shares, parts.shares, strict=True):
        assert one.share == pytest.approx(other.share, abs=1e-9)
    for one, other in zip(whole.pairs, parts.pairs, strict=True):
        assert one.cosine.value == pytest.approx(other.cosine.value, abs=1e-9)


def test_p_values_of_unrelated_branches_are_uniform():
    """Of 200 tests of noise at 5 %, few are positive; of related outputs, all."""
    generator = torch.Generator().manual_seed(1)
    orders = [torch.stack([torch.randperm(10, generator=generator) for _ in range(199)])]
    positive = {False: 0, True: 0}
    for related in positive:
        for _ in range(200):
            first = torch.randn(10, 40, generator=generator).double()
            second = torch.randn(10, 40, generator=generator).double() + (first if related else 0)
            found = branches_module._cosine([first @ second.T], orders)
            positive[related] += found.p_value <= 0.05
    assert positive[False] <= 20
    assert positive[True] == 200


def test_the_identical_permutation_counts_among_the_permutations():
    assert likeness(torch.tensor(1.0), torch.tensor([1.0, 0.0, 0.0, 0.0])).p_value == pytest.approx(2 / 5)
    assert likeness(torch.tensor(1.0), torch.zeros(99)).p_value == pytest.approx(0.01)


def test_comparing_branches_changes_no_output_and_needs_branches():
    vit, batch = network((2, 2), name="vit_u2x2_8"), images((2, 2), count=4)
    wanted = inference(vit, batch)
    compare_branches(vit, batch)
    assert torch.equal(inference(vit, batch), wanted)
    with pytest.raises(ValueError, match="one branch each, expected at least 2"):
        compare_branches(network((2, 2)), batch)
    with pytest.raises(ValueError, match="got 3 images in 1 mini-batches, expected at least 4 in each"):
        compare_branches(vit, batch[:3])
