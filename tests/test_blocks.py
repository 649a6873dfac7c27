"""The block: eq. (2) of "Three things" for any number of branches and any execution."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import ParallelThingsBlock

from vitray.models import blocks
from vitray.models.blocks import Block, BlockSpec, is_fusing_faster
from vitray.models.branches import MOST_STORED, attend

WIDTH, HEADS = 32, 4


def block(branches=2, seed=0, dtype=torch.float64, **kind) -> Block:
    """Return a block with random parameters; initial values would hide errors in folded norms and scales."""
    module = Block(BlockSpec(WIDTH, HEADS, branches, **kind))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.to(dtype).eval()


def tokens(batch=2, count=5, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(batch, count, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(9))


def slow_block(module: Block, x: torch.Tensor) -> torch.Tensor:
    """Eq. (2) written as loops over images, tokens and heads."""

    def normalize(vector, norm):
        centered = vector - vector.mean()
        return centered / torch.sqrt((centered**2).mean() + norm.eps) * norm.weight + norm.bias

    def attend(branch, image):
        rows = torch.stack([branch.qkv.weight @ normalize(token, branch.norm) + branch.qkv.bias for token in image])
        size = WIDTH // HEADS
        out = torch.zeros_like(image)
        for head in range(HEADS):
            q, k, v = (rows[:, part * WIDTH + head * size :][:, :size] for part in range(3))
            for i in range(len(image)):
                weights = torch.stack([torch.exp(q[i] @ k[j] / math.sqrt(size)) for j in range(len(image))])
                out[i, head * size : (head + 1) * size] = (weights / weights.sum()) @ v
        return torch.stack([branch.out.weight @ token + branch.out.bias for token in out])

    def feed(branch, image):
        rows = []
        for token in image:
            hidden = branch.up.weight @ normalize(token, branch.norm) + branch.up.bias
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
            rows.append(branch.down.weight @ hidden + branch.down.bias)
        return torch.stack(rows)

    def scaled(branch, value):
        return value if branch.scale is None else branch.scale * value

    images = []
    for image in x:
        image = image + sum(scaled(branch, attend(branch, image)) for branch in module.attentions)
        images.append(image + sum(scaled(branch, feed(branch, image)) for branch in module.feedforwards))
    return torch.stack(images)


@pytest.mark.parametrize("count", [1, 40, MOST_STORED + 1])
def test_attention_trained_in_bfloat16_is_exact_up_to_its_rounding(count):
    """In training on a CPU its products are spelled out, as torch's own backward pass is slow there."""
    drawn = torch.randn(4, 2, 3, count, 16, generator=torch.Generator().manual_seed(1)).bfloat16()

    def outputs(function, dtype=torch.bfloat16):
        q, k, v = (each.to(dtype).requires_grad_() for each in drawn[:3])
        h = function(q, k, v)
        h.backward(drawn[3].to(dtype))
        return torch.stack([h.detach(), q.grad, k.grad, v.grad]).double()

    exact = outputs(F.scaled_dot_product_attention, torch.float64)
    own, torchs = (outputs(function) for function in (partial(attend, bias_BHNN=None), F.scaled_dot_product_attention))
    errors = [(each - exact).flatten(1).norm(dim=1) / (exact.flatten(1).norm(dim=1) + 1e-9) for each in (own, torchs)]
    assert max(errors[0]) < 2**-7, f"{errors}"
    assert torch.equal(own, torchs) == (count > MOST_STORED)


@pytest.mark.parametrize("execution", ["loop", "fused"])
@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("layerscale", [None, 0.1])
def test_a_block_equals_equation_2(execution, branches, layerscale):
    module = block(branches, layerscale=layerscale, execution=execution)
    with torch.no_grad():
        torch.testing.assert_close(module(tokens()), slow_block(module, tokens()), atol=1e-10, rtol=1e-10)


def test_a_block_equals_timm():
    module = block(3, layerscale=0.1, execution="loop")
    theirs = ParallelThingsBlock(WIDTH, HEADS, num_parallel=3, qkv_bias=True, init_values=0.1).double().eval()
    theirs_state = theirs.state_dict()
    for index, (attention, feed) in enumerate(zip(module.attentions, module.feedforwards, strict=True)):
        pairs = {"norm": attention.norm, "attn.qkv": attention.qkv, "attn.proj": attention.out}
        for name, layer in pairs.items():
            for kind, value in layer.state_dict().items():
                theirs_state[f"attns.{index}.{name}.{kind}"].copy_(value)
        pairs = {"norm": feed.norm, "mlp.fc1": feed.up, "mlp.fc2": feed.down}
        for name, layer in pairs.items():
            for kind, value in layer.state_dict().items():
                theirs_state[f"ffns.{index}.{name}.{kind}"].copy_(value)
        theirs_state[f"attns.{index}.ls.gamma"].copy_(attention.scale.detach())
        theirs_state[f"ffns.{index}.ls.gamma"].copy_(feed.scale.detach())
    eps = {layer.eps for layer in theirs.modules() if isinstance(layer, torch.nn.LayerNorm)}
    module.norm_eps = eps.pop()
    for branch in (*module.attentions, *module.feedforwards):
        branch.norm.eps = module.norm_eps
    for module.execution in ("loop", "fused"):
        torch.testing.assert_close(module(tokens()), theirs(tokens()), atol=1e-12, rtol=1e-12)


@settings(deadline=None, max_examples=12)
@given(
    branches=st.integers(2, 4),
    batch=st.integers(1, 3),
    count=st.integers(1, 6),
    layerscale=st.sampled_from([None, 0.1]),
    drop_path=st.sampled_from([{}, {"drop_path": 0.4}, {"drop_path": 0.4, "drop_path_draw": "share"}]),
    activation=st.sampled_from(["gelu", "gelu_tanh"]),
)
def test_fused_training_equals_loop_training(branches, batch, count, layerscale, drop_path, activation):
    module = block(branches, layerscale=layerscale, activation=activation, **drop_path).train()
    results = {}
    for execution in ("loop", "fused"):
        module.execution = execution
        module.zero_grad()
        x = tokens(batch, count).requires_grad_()
        torch.manual_seed(5)
        out = module(x)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        results[execution] = {"out": out.detach(), "x": x.grad, **gradients}
    assert results["loop"].keys() == results["fused"].keys()
    for name, value in results["loop"].items():
        torch.testing.assert_close(results["fused"][name], value, atol=1e-9, rtol=1e-9, msg=name)


def test_fused_in_bfloat16_and_autocast_stays_within_rounding():
    exact = block(2, layerscale=0.1, dtype=torch.float32)
    expected = exact(tokens(dtype=torch.float32))
    for module, x in (
        (exact, tokens(dtype=torch.float32)),
        (copy.deepcopy(exact).bfloat16(), tokens(dtype=torch.float32).bfloat16()),
    ):
        errors = {}
        for module.execution in ("loop", "fused"):
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, x.dtype == torch.float32):
                    out = module(x).float()
                errors[module.execution, gradients] = ((out - expected).norm() / expected.norm()).item()
        assert max(errors.values()) < 0.02
        assert errors["fused", False] < 2 * errors["loop", False] + 1e-3


def test_fused_weights_follow_their_parameters():
    module = block(2, layerscale=0.1)
    reference = copy.deepcopy(module)
    reference.execution = "loop"
    module.execution = "fused"

    def agree():
        with torch.no_grad():
            torch.testing.assert_close(module(tokens()), reference(tokens()), atol=1e-10, rtol=1e-10)

    agree()
    cached = module._fused
    agree()
    assert module._fused is cached
    for each in (module, reference):
        torch.optim.SGD(each.parameters(), lr=0.1)
        each(tokens()).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.01).step()
    agree()
    other = block(2, seed=3, layerscale=0.1).state_dict()
    module.load_state_dict(other)
    reference.load_state_dict(other)
    agree()
    for each in (module, reference):
        each.attn2.qkv.weight.data = each.attn2.qkv.weight.data * 2
    agree()
    for each in (module, reference):
        each.ffn1.up.bias.data.add_(1)  # no version counts this; eval() clears the cache
        each.eval()
    agree()
    module.float()
    reference.float()
    with torch.no_grad():
        torch.testing.assert_close(module(tokens().float()), reference(tokens().float()), atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        module(tokens().float())


def test_execution_changes_no_name_and_no_state():
    module = block(2, execution="fused")
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with torch.no_grad():
        module(tokens())
    assert before.keys() == module.state_dict().keys() == block(2, execution="loop").state_dict().keys()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied._fused == {}
        assert torch.equal(copied(tokens()), module(tokens()))
        assert copied.attentions[1] is copied.attn2


@pytest.mark.parametrize("branches", [1, 2])
def test_a_trace_holds_the_attention_of_every_branch(branches):
    module = block(branches, dtype=torch.float32)
    trace = {}
    x = tokens(dtype=torch.float32)
    torch.testing.assert_close(module(x, trace, "block07"), module(x), atol=1e-5, rtol=1e-5)
    assert list(trace) == [f"block07.attn{branch + 1}" for branch in range(branches)]
    for weights in trace.values():
        assert weights.shape == (2, HEADS, 5, 5)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 5))


def test_dropout_follows_every_dense_layer_but_qkv(monkeypatch):
    module = block(1, dropout=0.25, execution="loop").train()
    calls = []

    def watch(x, p, training):
        calls.append((tuple(x.shape[2:]), p, training))
        return x

    monkeypatch.setattr(blocks.F, "dropout", watch)
    module(tokens())
    assert calls == [((WIDTH,), 0.25, True), ((4 * WIDTH,), 0.25, True), ((WIDTH,), 0.25, True)]


def test_active_dropout_is_never_fused():
    module = block(2, dropout=0.1, execution="fused")
    module(tokens())  # inactive in evaluation
    with pytest.raises(ValueError, match="execution fused is not exact while dropout is active"):
        module.train()(tokens())
    module.execution = "auto"
    assert not module._is_fused(tokens())


def test_auto_fuses_only_small_inputs():
    module = block(2, execution="auto")
    with torch.no_grad():
        assert module._is_fused(tokens(1, 5))
        assert not module._is_fused(torch.zeros(64, 64, WIDTH))
        assert not block(1)._is_fused(tokens(1, 5))
        assert is_fusing_faster(1_000_000, "cuda")
        assert not is_fusing_faster(1_000_000, "cpu")
        assert not is_fusing_faster(1, "a device nobody measured")
    # Under autograd the weights would be fused again in each step.
    assert not module._is_fused(tokens(1, 5))


@pytest.mark.parametrize("execution", ["loop", "fused", "auto"])
def test_a_compiled_block_equals_the_block(execution):
    # aot_eager traces and differentiates like inductor, without minutes of C++ compilation.
    check_compiled(execution, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["loop", "fused"])
def test_an_inductor_block_equals_the_block(execution):
    check_compiled(execution, "inductor")


def check_compiled(execution, backend):
    torch.compiler.reset()  # each test would count as a recompilation of the same code
    module = block(2, layerscale=0.1, dtype=torch.float32, execution=execution)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    x = tokens(dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), atol=1e-4, rtol=1e-4)
        module.attn1.qkv.weight.mul_(0.5)
        torch.testing.assert_close(compiled(x), module(x), atol=1e-4, rtol=1e-4)
    gradients = []
    for run in (module, compiled):
        module.zero_grad()
        F.mse_loss(run(x), torch.zeros_like(x)).backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
