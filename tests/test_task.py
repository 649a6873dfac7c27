"""Supervised tasks: losses, activations stored for the backward pass, and activation checkpointing."""

import pickle
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

from vitray.config import Run
from vitray.config.classification import Supervised
from vitray.errors import ConfigError
from vitray.tasks.build import build_task, recompute_activations
from vitray.tasks.supervised import Classification, binary_cross_entropy, soft_cross_entropy


def run(**settings) -> Run:
    tiny = {"model.name": "vit_u2x2_8", "model.image_size": 32, "model.num_classes": 7}
    return Run().replace(tiny | {name.replace("__", "."): value for name, value in settings.items()})


def task(**settings) -> Classification:
    torch.manual_seed(0)
    return build_task(run(**settings))


def tuned(mode: str, **settings) -> Classification:
    return task(task={"kind": "finetune", "weights": "unread", "mode": mode}, **settings)


def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def logits(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64).mul(3).to(dtype)


LABELS = torch.tensor([0, 3, 3, 6])
PARTNERS = torch.tensor([5, 3, 1, 2])


def mixed(share=0.7) -> torch.Tensor:
    """Mixed targets with two classes per row, or one for two images of the same class."""
    return share * F.one_hot(LABELS, 7).float() + (1 - share) * F.one_hot(PARTNERS, 7).float()


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_soft_cross_entropy_equals_timm():
    torch.testing.assert_close(
        soft_cross_entropy(logits(), mixed(), Supervised(smoothing=0.0)), SoftTargetCrossEntropy()(logits(), mixed())
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_equals_torch(smoothing):
    expected = F.cross_entropy(logits(), LABELS, label_smoothing=smoothing)
    torch.testing.assert_close(
        soft_cross_entropy(logits(), F.one_hot(LABELS, 7).float(), Supervised(smoothing=smoothing)), expected
    )


def test_smoothing_of_mixed_targets():
    smoothed = 0.9 * mixed().double() + 0.1 / 7
    expected = -(smoothed * logits(torch.float64).log_softmax(1)).sum(1).mean()
    assert float(soft_cross_entropy(logits(), mixed(), Supervised(smoothing=0.1))) == pytest.approx(
        float(expected), rel=1e-6
    )


def test_binary_cross_entropy_equals_timm():
    expected = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)(logits(), mixed())
    torch.testing.assert_close(binary_cross_entropy(logits(), mixed(), Supervised(smoothing=0.0)), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_equals_its_formula(smoothing):
    present = (mixed() > 0).double() * (1 - smoothing) + smoothing / 7
    probability = logits(torch.float64).sigmoid()
    expected = -(present * probability.log() + (1 - present) * (1 - probability).log()).mean()
    assert float(binary_cross_entropy(logits(), mixed(), Supervised(smoothing=smoothing))) == pytest.approx(
        float(expected), rel=1e-6
    )


@settings(deadline=None)  # a process's first backward pass takes long
@given(smoothing=st.floats(0, 0.99), share=st.floats(0.01, 0.99))
def test_smoothing_makes_no_class_present(smoothing, share):
    zeros = torch.zeros(4, 7, requires_grad=True)
    binary_cross_entropy(zeros, mixed(share), Supervised(smoothing=smoothing)).backward()
    # At logit 0 the gradient is (1/2 - target) / (rows * classes).
    target = 0.5 - zeros.grad * 28
    absent = mixed(share) == 0
    torch.testing.assert_close(target[absent], torch.full_like(target[absent], smoothing / 7), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        target[~absent], torch.full_like(target[~absent], 1 - smoothing + smoothing / 7), rtol=0, atol=1e-5
    )


def test_bce_ignores_the_shares_of_a_mix():
    assert torch.equal(
        binary_cross_entropy(logits(), mixed(0.7), Supervised(smoothing=0.1)),
        binary_cross_entropy(logits(), mixed(0.2), Supervised(smoothing=0.1)),
    )


@pytest.mark.parametrize("loss", [soft_cross_entropy, binary_cross_entropy])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_computed_in_float32(loss, dtype):
    settings = Supervised(smoothing=0.1)
    result = loss(logits(dtype), mixed().to(dtype), settings)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, loss(logits(dtype).float(), mixed().to(dtype).float(), settings), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(logits(dtype), mixed().to(dtype), settings), result)


# ---- the task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "loss"), [("softmax", soft_cross_entropy), ("bce", binary_cross_entropy)])
def test_forward_is_the_loss(kind, loss):
    module = task(task__loss=kind, task__smoothing=0.1)
    expected = loss(module.vit(images()), mixed(), Supervised(smoothing=0.1))
    assert expected.shape == ()
    assert torch.equal(module(images(), mixed()), expected)
    assert {name.partition(".")[0] for name in module.state_dict()} == {"vit"}


@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_finetuning_learns_by_the_same_loss(loss):
    settings = {"loss": loss, "smoothing": 0.1}
    whole, part = task(task=settings), task(task={"kind": "finetune", "weights": "unread", "mode": "attn", **settings})
    assert torch.equal(whole(images(), mixed()), part(images(), mixed()))
    assert list(whole.state_dict()) == list(part.state_dict())
    plain, tuned_gradients = gradients(whole), gradients(part)
    assert 0 < len(tuned_gradients) < len(plain)
    assert all(torch.equal(gradient, plain[name]) for name, gradient in tuned_gradients.items())


def test_equal_parts_of_a_batch_average_to_the_whole():
    module = task()
    parts = [module(images()[part], mixed()[part]) for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts) / 2, module(images(), mixed()))


def test_a_task_needs_classes():
    with pytest.raises(ConfigError, match=r"^model.num_classes: got null, expected how many classes"):
        build_task(run(model__num_classes=None))
    with pytest.raises(ConfigError, match=r"how many classes task finetune learns$"):
        build_task(run(model__num_classes=None, task={"kind": "finetune", "weights": "unread"}))


# ---- stored activations ----------------------------------------------------------------------------------------------


def gradients(module: Classification) -> dict[str, torch.Tensor]:
    module.zero_grad()
    torch.manual_seed(5)
    module.train()(images(), mixed()).backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.requires_grad}


def stored_activations(module: Classification) -> int:
    """The number of values that the forward pass stores for the backward pass, without weights."""
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    stored: dict[int, torch.Tensor] = {}  # holding the tensors keeps addresses unique

    def store(tensor):
        if tensor.data_ptr() not in weights:
            stored[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        loss = module(images(), mixed())
    del loss
    return sum(tensor.numel() for tensor in stored.values())


TOKENS, WIDTH, BRANCHES = 4 * 17, 64, 4  # of `images` in two levels of two branches


@pytest.mark.parametrize("layerscale", [None, 0.1])
def test_a_frozen_feed_forward_stores_no_inputs_of_its_linear_layers(layerscale):
    stored = {mode: stored_activations(tuned(mode, model__layerscale=layerscale)) for mode in ("full", "attn", "ffn")}
    # The input of the stem, and the inputs of up and down. LayerScale stores the scaled weight of the output layer,
    # which is smaller than its output, and the output of the larger down.
    scaled = 0 if layerscale is None else BRANCHES * WIDTH * (WIDTH + TOKENS)
    assert stored["full"] - stored["attn"] == images().numel() + BRANCHES * TOKENS * WIDTH * (1 + 4) + scaled
    # For attention only the input of qkv: the input of the output layer is stored by attention itself.
    assert stored["full"] - stored["ffn"] == images().numel() + BRANCHES * TOKENS * WIDTH + scaled


def test_below_a_trained_head_nothing_is_stored():
    module = tuned("head", model__layerscale=0.1)
    # The input of the head, and a few values per class for the loss.
    assert stored_activations(module) <= 4 * WIDTH + 3 * 4 * 7
    assert stored_activations(module) < stored_activations(tuned("full")) / 500


# ---- activation checkpointing ----------------------------------------------------------------------------------------

DROPPING = [{}, {"model__drop_path": 0.4}, {"model__drop_path": 0.4, "model__dropout": 0.2, "model__layerscale": 0.1}]


@pytest.mark.parametrize("part", ["feedforward", "blocks"])
@pytest.mark.parametrize("mode", ["full", "attn", "head"])
@pytest.mark.parametrize("execution", ["loop", "auto", "fused"])
@pytest.mark.parametrize("settings", DROPPING)
def test_recomputed_gradients_are_equal(settings, execution, mode, part):
    if execution == "fused" and "model__dropout" in settings:
        return  # rejected by the configuration
    module = tuned(mode, model__execution=execution, **settings)
    plain = gradients(module)
    names = list(module.state_dict())
    recompute_activations(module, part)
    again = gradients(module)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert list(module.state_dict()) == names


def test_recompute_none_changes_nothing():
    module = task()
    before = stored_activations(module)
    recompute_activations(module, "none")
    assert stored_activations(module) == before


def test_recomputed_blocks_store_little_and_run_twice():
    module = task(model__name="vit_u4x2_8")
    calls = []
    module.vit.blocks[1].attn1.register_forward_hook(lambda *_: calls.append(1))
    plain = stored_activations(module)
    assert len(calls) == 1
    recompute_activations(module, "blocks")
    recompute_activations(module, "blocks")  # idempotent
    assert stored_activations(module) < plain / 4
    calls.clear()
    gradients(module)
    assert len(calls) == 2


@pytest.mark.parametrize("mode", ["full", "attn"])
def test_recomputed_feed_forwards_do_not_store_their_widest_activations(mode):
    module = tuned(mode)
    runs = {"attn1": [], "ffn1": []}
    for branch, calls in runs.items():
        module.vit.blocks[1].get_submodule(branch).norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
    plain = stored_activations(module)
    recompute_activations(module, "feedforward")
    recompute_activations(module, "feedforward")  # idempotent
    # The input of gelu, and with trained weights the inputs of up and down.
    assert plain - stored_activations(module) >= BRANCHES * TOKENS * WIDTH * (4 + (1 + 4) * (mode == "full"))
    for calls in runs.values():
        calls.clear()
    gradients(module)
    assert {branch: len(calls) for branch, calls in runs.items()} == {"attn1": 1, "ffn1": 2}


@pytest.mark.parametrize("part", ["feedforward", "blocks"])
def test_recomputed_tasks_still_trace_and_evaluate(part):
    module = task().eval()
    with torch.no_grad():
        plain = module.vit(images())
    recompute_activations(module, part)
    with torch.no_grad():
        assert torch.equal(module.vit(images()), plain)
    trace: dict[str, torch.Tensor] = {}
    module.vit(images(), trace)
    assert list(trace) == [f"block{level:02d}.attn{branch}" for level in (0, 1) for branch in (1, 2)]


@pytest.mark.parametrize("part", ["feedforward", "blocks"])
@pytest.mark.parametrize("copied", [deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copied_task_recomputes_its_own_activations(copied, part):
    module = task(model__drop_path=0.4)
    recompute_activations(module, part)
    plain, other = gradients(module), copied(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients(other).items())


@pytest.mark.parametrize("part", ["feedforward", "blocks"])
def test_a_compiled_task_recomputes(part):
    torch.compiler.reset()
    module = task(model__name="vit_u1x2_8")
    plain = gradients(module)
    recompute_activations(module, part)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    module.zero_grad()
    compiled(images(), mixed()).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], atol=1e-5, rtol=1e-4)
