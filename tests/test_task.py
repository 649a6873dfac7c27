"""Tasks: a forward that is the loss, what the losses are, what is kept for the backward pass, and what runs again."""

import pickle
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

from vitray.config import Run
from vitray.errors import ConfigError
from vitray.tasks.supervised import (
    Supervised,
    binary_cross_entropy,
    build_task,
    recompute_activations,
    soft_cross_entropy,
)


def run(**settings) -> Run:
    tiny = {"model.name": "vit_u2x2_8", "model.image_size": 32, "model.num_classes": 7}
    return Run().replace(tiny | {name.replace("__", "."): value for name, value in settings.items()})


def task(**settings) -> Supervised:
    torch.manual_seed(0)
    return build_task(run(**settings))


def tuned(mode: str, **settings) -> Supervised:
    return task(task={"kind": "finetune", "weights": "unread", "mode": mode}, **settings)


def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def logits(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64).mul(3).to(dtype)


LABELS = torch.tensor([0, 3, 3, 6])
PARTNERS = torch.tensor([5, 3, 1, 2])


def mixed(share=0.7) -> torch.Tensor:
    """Targets of two classes a row, or of one where an image met its own class."""
    return share * F.one_hot(LABELS, 7).float() + (1 - share) * F.one_hot(PARTNERS, 7).float()


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_soft_cross_entropy_is_timms():
    torch.testing.assert_close(soft_cross_entropy(logits(), mixed(), 0.0), SoftTargetCrossEntropy()(logits(), mixed()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothing_of_labels_is_torchs(smoothing):
    wanted = F.cross_entropy(logits(), LABELS, label_smoothing=smoothing)
    torch.testing.assert_close(soft_cross_entropy(logits(), F.one_hot(LABELS, 7).float(), smoothing), wanted)


def test_smoothing_of_mixed_targets_spreads_them():
    smoothed = 0.9 * mixed().double() + 0.1 / 7
    wanted = -(smoothed * logits(torch.float64).log_softmax(1)).sum(1).mean()
    assert float(soft_cross_entropy(logits(), mixed(), 0.1)) == pytest.approx(float(wanted), rel=1e-6)


def test_binary_cross_entropy_is_timms():
    wanted = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)(logits(), mixed())
    torch.testing.assert_close(binary_cross_entropy(logits(), mixed(), 0.0), wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_class_is_a_question_of_its_own(smoothing):
    present = (mixed() > 0).double() * (1 - smoothing) + smoothing / 7
    chance = logits(torch.float64).sigmoid()
    wanted = -(present * chance.log() + (1 - present) * (1 - chance).log()).mean()
    assert float(binary_cross_entropy(logits(), mixed(), smoothing)) == pytest.approx(float(wanted), rel=1e-6)


@settings(deadline=None)  # a process's first backward pass takes long
@given(smoothing=st.floats(0, 0.99), share=st.floats(0.01, 0.99))
def test_smoothing_turns_no_class_on(smoothing, share):
    asked = torch.zeros(4, 7, requires_grad=True)
    binary_cross_entropy(asked, mixed(share), smoothing).backward()
    # At logit 0 the slope is (1/2 - target) / (rows * classes).
    target = 0.5 - asked.grad * 28
    absent = mixed(share) == 0
    torch.testing.assert_close(target[absent], torch.full_like(target[absent], smoothing / 7), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        target[~absent], torch.full_like(target[~absent], 1 - smoothing + smoothing / 7), rtol=0, atol=1e-5
    )


def test_how_much_of_a_class_is_mixed_in_does_not_matter_to_bce():
    assert torch.equal(binary_cross_entropy(logits(), mixed(0.7), 0.1), binary_cross_entropy(logits(), mixed(0.2), 0.1))


@pytest.mark.parametrize("loss", [soft_cross_entropy, binary_cross_entropy])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_computed_in_float32(loss, dtype):
    made = loss(logits(dtype), mixed().to(dtype), 0.1)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, loss(logits(dtype).float(), mixed().to(dtype).float(), 0.1), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(logits(dtype), mixed().to(dtype), 0.1), made)


# ---- the task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "loss"), [("softmax", soft_cross_entropy), ("bce", binary_cross_entropy)])
def test_forward_is_the_loss(kind, loss):
    made = task(task__loss=kind, task__smoothing=0.1)
    wanted = loss(made.vit(images()), mixed(), 0.1)
    assert wanted.shape == ()
    assert torch.equal(made(images(), mixed()), wanted)
    assert {name.partition(".")[0] for name in made.state_dict()} == {"vit"}


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
    made = task()
    parts = [made(images()[part], mixed()[part]) for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts) / 2, made(images(), mixed()))


def test_a_task_needs_classes():
    with pytest.raises(ConfigError, match=r"^model.num_classes: got null, wanted how many classes"):
        build_task(run(model__num_classes=None))
    with pytest.raises(ConfigError, match=r"how many classes task finetune learns$"):
        build_task(run(model__num_classes=None, task={"kind": "finetune", "weights": "unread"}))


# ---- what is kept for the backward pass ------------------------------------------------------------------------------


def gradients(made: Supervised) -> dict[str, torch.Tensor]:
    made.zero_grad()
    torch.manual_seed(5)
    made.train()(images(), mixed()).backward()
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters() if parameter.requires_grad}


def kept_between(made: Supervised) -> int:
    """How many numbers the forward pass keeps for the backward pass, weights left out."""
    weights = {parameter.data_ptr() for parameter in made.parameters()}
    kept: dict[int, torch.Tensor] = {}  # held, so that no two have one address

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = made(images(), mixed())
    del loss
    return sum(tensor.numel() for tensor in kept.values())


TOKENS, WIDTH, BRANCHES = 4 * 17, 64, 4  # of `images` in two levels of two branches


@pytest.mark.parametrize("layerscale", [None, 0.1])
def test_a_frozen_feed_forward_keeps_no_input_of_its_products(layerscale):
    kept = {mode: kept_between(tuned(mode, model__layerscale=layerscale)) for mode in ("full", "attn", "ffn")}
    # The stem's input, the inputs of up and down, and where there is LayerScale what it scales in both kinds of branch.
    scaled = 0 if layerscale is None else 2
    assert kept["full"] - kept["attn"] == images().numel() + BRANCHES * TOKENS * WIDTH * (1 + 4 + scaled)
    # Of an attention, the input of qkv alone: that of the output product is kept by attention itself.
    assert kept["full"] - kept["ffn"] == images().numel() + BRANCHES * TOKENS * WIDTH * (1 + scaled)


def test_below_a_head_that_trains_alone_nothing_is_kept():
    made = tuned("head", model__layerscale=0.1)
    # Its input, and the loss's few numbers per class.
    assert kept_between(made) <= 4 * WIDTH + 3 * 4 * 7
    assert kept_between(made) < kept_between(tuned("full")) / 500


# ---- activation checkpointing ----------------------------------------------------------------------------------------

DROPPING = [{}, {"model__drop_path": 0.4}, {"model__drop_path": 0.4, "model__dropout": 0.2, "model__layerscale": 0.1}]


@pytest.mark.parametrize("what", ["feedforward", "blocks"])
@pytest.mark.parametrize("mode", ["full", "attn", "head"])
@pytest.mark.parametrize("execution", ["loop", "auto", "fused"])
@pytest.mark.parametrize("settings", DROPPING)
def test_recomputed_gradients_are_equal(settings, execution, mode, what):
    if execution == "fused" and "model__dropout" in settings:
        return  # which the configuration refuses
    made = tuned(mode, model__execution=execution, **settings)
    plain = gradients(made)
    names = list(made.state_dict())
    recompute_activations(made, what)
    again = gradients(made)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert list(made.state_dict()) == names


def test_nothing_recomputed_is_nothing_changed():
    made = task()
    before = kept_between(made)
    recompute_activations(made, "none")
    assert kept_between(made) == before


def test_recomputed_blocks_keep_little_and_run_twice():
    made = task(model__name="vit_u4x2_8")
    calls = []
    made.vit.blocks[1].attn1.register_forward_hook(lambda *_: calls.append(1))
    plain = kept_between(made)
    assert len(calls) == 1
    recompute_activations(made, "blocks")
    recompute_activations(made, "blocks")  # twice is once
    assert kept_between(made) < plain / 4
    calls.clear()
    gradients(made)
    assert len(calls) == 2


@pytest.mark.parametrize("mode", ["full", "attn"])
def test_recomputed_feed_forwards_give_up_their_widest_activations(mode):
    made = tuned(mode)
    runs = {"attn1": [], "ffn1": []}
    for branch, calls in runs.items():
        made.vit.blocks[1].get_submodule(branch).norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
    plain = kept_between(made)
    recompute_activations(made, "feedforward")
    recompute_activations(made, "feedforward")  # twice is once
    # What gelu reads, and with trained weights what up and down read.
    assert plain - kept_between(made) >= BRANCHES * TOKENS * WIDTH * (4 + (1 + 4) * (mode == "full"))
    for calls in runs.values():
        calls.clear()
    gradients(made)
    assert {branch: len(calls) for branch, calls in runs.items()} == {"attn1": 1, "ffn1": 2}


@pytest.mark.parametrize("what", ["feedforward", "blocks"])
def test_what_is_recomputed_shows_its_attention_and_evaluates(what):
    made = task().eval()
    with torch.no_grad():
        plain = made.vit(images())
    recompute_activations(made, what)
    with torch.no_grad():
        assert torch.equal(made.vit(images()), plain)
    trace: dict[str, torch.Tensor] = {}
    made.vit(images(), trace)
    assert list(trace) == [f"block{level:02d}.attn{branch}" for level in (0, 1) for branch in (1, 2)]


@pytest.mark.parametrize("what", ["feedforward", "blocks"])
@pytest.mark.parametrize("copied", [deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_recomputes_itself(copied, what):
    made = task(model__drop_path=0.4)
    recompute_activations(made, what)
    plain, other = gradients(made), copied(made)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients(other).items())


@pytest.mark.parametrize("what", ["feedforward", "blocks"])
def test_a_compiled_task_recomputes(what):
    torch.compiler.reset()
    made = task(model__name="vit_u1x2_8")
    plain = gradients(made)
    recompute_activations(made, what)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    made.zero_grad()
    compiled(images(), mixed()).backward()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], atol=1e-5, rtol=1e-4)
