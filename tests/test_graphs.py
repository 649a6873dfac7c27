"""Networks as CUDA graphs: any number of images gives what the network gives, on the graph of the next power of two.

Without a GPU, a graph is a call that computes on the same memory each time.
"""

import pytest
import torch
from test_deltas import fresh, tuned
from test_family import MODES, images, in_memory, settings
from test_variants import VARIANTS
from torch import nn

from vitray.models.graphs import GraphedNetwork, capture
from vitray.weights.family import Family


def test_each_power_of_two_is_captured_once():
    sizes = []

    def record(call):
        call()
        sizes.append(len(calls[-1]))
        return call

    calls = []

    class Double(nn.Module):
        def forward(self, x_BCHW):
            calls.append(x_BCHW)
            return 2 * x_BCHW.flatten(1)

    graphed = GraphedNetwork(Double(), record)
    generator = torch.Generator().manual_seed(0)
    for count in (3, 1, 4, 2, 5, 3, 8, 1):
        batch = torch.randn(count, 3, 2, 2, generator=generator)
        assert torch.equal(graphed(batch), 2 * batch.flatten(1))
    assert sizes == [4, 1, 2, 8]
    batch = torch.randn(1, 3, 4, 4, generator=generator)  # another size of images
    before = graphed(batch)
    graphed(torch.zeros_like(batch))
    assert torch.equal(before, 2 * batch.flatten(1)), "a later batch has overwritten an answer"
    assert sizes == [4, 1, 2, 8, 1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_member_of_a_family_gives_the_same_as_a_graph(kind, precision):
    base = fresh(settings("vit_u2x2_8", execution="loop", **VARIANTS[kind]))
    member = in_memory({"base": base, "task": tuned(base, MODES["attn"])}).member("task")
    batch = images(base.model, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = torch.stack(Family(member.base, {"task": member})(batch, ["task"] * 4))
        graphed = GraphedNetwork(member.graphed._network, lambda call: call)
        assert torch.equal(graphed(batch), expected)


@pytest.mark.gpu
def test_a_captured_call_repeats_its_kernels():
    x = torch.ones(4, device="cuda")
    y = torch.zeros(4, device="cuda")
    with torch.inference_mode():
        replay = capture(lambda: y.copy_(x * 2))
        x.fill_(3)
        replay()
    torch.cuda.synchronize()
    assert y.tolist() == [6.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_of_a_gpu_give_what_the_network_gives(precision):
    base = fresh(settings("vit_u2x2_8"))
    plain = in_memory({"base": base, "task": tuned(base, MODES["attn"])})
    members = plain.members
    families = [Family(plain.base, members, "cuda", graphs=graphs) for graphs in (False, True)]
    for count in (1, 3, 8, 3):
        batch = images(base.model, count, seed=count)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            expected, got = (torch.stack(family(batch, ["task"] * count)) for family in families)
        tolerance = 0.05 if precision == "bf16" else 1e-4
        torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)
