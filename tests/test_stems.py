"""Stems: only convolutional ones mix neighboring patches; norms, and their conventions; batch norms of all workers."""

import runpy
import socket
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import yaml
from networks import scrambled
from torch import nn

from vitray.config import Model, Run, load_run
from vitray.config.classification import Finetune
from vitray.config.model_names import STEMS, parse_name
from vitray.errors import ConfigError
from vitray.inference.models import describe_network
from vitray.models.stems import Stem, synchronize_norms
from vitray.models.vit import ViT
from vitray.weights import load_model, save_model
from vitray.weights.export import write_library
from vitray.weights.family import Member
from vitray.weights.pretrained import adapt, open_initial_weights


def stem(name: str, seed: int = 0) -> Stem:
    module = Stem(parse_name(name))
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * 0.2
            tensor.copy_(noise.abs() + 0.5 if key.endswith("running_var") else noise)
    return module


def images(batch=2, height=64, width=48) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def perturbed(module: Stem) -> set[int]:
    """The tokens of the second image that change with the pixels of its patch (1, 2) = token 5."""
    changed = images()
    changed[1, :, 16:32, 32:48] += 1
    with torch.no_grad():
        difference = (module(changed)[0] - module(images())[0]).abs().amax(-1)
    assert module.training or not difference[0].any()
    return set(difference[1].nonzero().flatten().tolist())


@pytest.mark.parametrize("kind", [kind for kind, traits in STEMS.items() if not traits.mixes_patches])
def test_a_patch_changes_only_its_own_token(kind):
    assert perturbed(stem(f"vit_u1x1_16_{kind}").eval()) == {5}


@pytest.mark.parametrize("kind", ["linear", "linear_gelu", "hmlp_ln", "local"])
def test_without_batch_statistics_a_patch_changes_only_its_own_token_in_training_too(kind):
    assert perturbed(stem(f"vit_u1x1_16_{kind}").train()) == {5}


def test_mixing_between_patches_is_detected():
    assert len(perturbed(stem("vit_u1x1_16_hmlp_bn").train())) == 12  # through the batch's mean
    assert len(perturbed(stem("vit_u1x1_16_conv").eval())) > 1  # through overlapping windows
    assert len(perturbed(stem("vit_u1x1_16_conv_ln").eval())) > 1
    assert len(perturbed(stem("vit_u1x1_16_pooled").eval())) > 1


@pytest.mark.parametrize("kind", ["linear", "hmlp_ln", "hmlp_bn", "linear_bn_gelu", "local"])
def test_masking_before_and_after_the_stem_is_the_same(kind):
    module = stem(f"vit_u1x1_16_{kind}").eval()
    keep = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(2)) > 0.5
    pixels = keep.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None]
    with torch.no_grad():
        before, _ = module(images() * pixels)
        after, _ = module(images())
    torch.testing.assert_close(before[keep.flatten(1)], after[keep.flatten(1)])


@pytest.mark.parametrize("norm", ["bn", "ln"])
def test_hmlp_equals_algorithm_1(norm):
    module = stem(f"vit_u1x1_16_hmlp_{norm}").eval()
    width = 64

    class Channels(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def normalize(channels):
        return nn.BatchNorm2d(channels) if norm == "bn" else Channels(channels, eps=1e-6)

    listing = nn.Sequential(
        nn.Conv2d(3, width // 4, kernel_size=4, stride=4),
        normalize(width // 4),
        nn.GELU(),
        nn.Conv2d(width // 4, width // 4, kernel_size=2, stride=2),
        normalize(width // 4),
        nn.GELU(),
        nn.Conv2d(width // 4, width, kernel_size=2, stride=2),
        normalize(width),
    ).eval()
    listing.load_state_dict(module.proj.state_dict())
    with torch.no_grad():
        assert torch.equal(module(images())[0], listing(images()).flatten(2).transpose(1, 2))


def test_the_pooled_stem_halves_the_image_after_each_convolution_but_the_last():
    module = stem("vit_u1x1_4_pooled").eval()
    x, parts = images(), dict(module.proj.named_parameters()) | dict(module.proj.named_buffers())
    for convolution, norm, is_last in (("0", "1", False), ("4", "5", False), ("8", "9", True)):
        x = nn.functional.conv2d(x, parts[f"{convolution}.weight"], parts[f"{convolution}.bias"], padding=1)
        scale = parts[f"{norm}.weight"] / (parts[f"{norm}.running_var"] + 1e-5).sqrt()
        shift = parts[f"{norm}.bias"] - parts[f"{norm}.running_mean"] * scale
        x = x * scale[:, None, None] + shift[:, None, None]
        if not is_last:
            x = nn.functional.gelu(x.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2)))
    tokens, grid = module(images())
    assert grid == (16, 12)
    torch.testing.assert_close(tokens, x.flatten(2).transpose(1, 2))


@pytest.mark.parametrize(("patch", "convolutions"), [(4, 1), (8, 2), (16, 3), (32, 4)])
def test_hmlp_doubles_its_patches(patch, convolutions):
    module = stem(f"vit_u1x1_{patch}_hmlp_ln")
    kernels = [layer.kernel_size[0] for layer in module.proj if isinstance(layer, nn.Conv2d)]
    assert kernels == [4] + [2] * (convolutions - 1)
    assert not isinstance(module.proj[-1], nn.GELU)
    x, grid = module(torch.zeros(1, 3, 2 * patch, patch))
    assert (x.shape, grid) == ((1, 2, 64), (2, 1))


def cell_by_cell(weights: dict[str, torch.Tensor], patch: torch.Tensor) -> torch.Tensor:
    """The token of one patch (3 x 16 x 16) by loops over cells and heads, in float64."""

    def get(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return weights[f"proj.0.{name}.weight"].double(), weights[f"proj.0.{name}.bias"].double()

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = get(name)
        return weight.flatten(1) @ x.flatten() + bias

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = get(name)
        return (x - x.mean()) / (x.var(correction=0) + 1e-6).sqrt() * weight + bias

    patch, positions = patch.double(), weights["proj.0.positions"].double()
    cells = [
        linear(patch[:, row : row + 4, column : column + 4], "cells")
        for row in range(0, 16, 4)
        for column in range(0, 16, 4)
    ]
    cells = [cell + position for cell, position in zip(cells, positions, strict=True)]
    width, size = len(cells[0]), len(cells[0]) // 4
    for level in range(4):
        branch = f"blocks.{level}.attn1"
        vectors = [linear(norm(cell, f"{branch}.norm"), f"{branch}.qkv").split(width) for cell in cells]
        attended = []
        for query, _, _ in vectors:
            heads = []
            for head in range(4):
                part = slice(head * size, (head + 1) * size)
                weight = torch.stack([query[part] @ key[part] / size**0.5 for _, key, _ in vectors]).softmax(0)
                heads.append(sum(w * value[part] for w, (_, _, value) in zip(weight, vectors, strict=True)))
            attended.append(linear(torch.cat(heads), f"{branch}.out"))
        cells = [cell + output for cell, output in zip(cells, attended, strict=True)]
        branch = f"blocks.{level}.ffn1"
        hidden = [nn.functional.gelu(linear(norm(cell, f"{branch}.norm"), f"{branch}.up")) for cell in cells]
        cells = [cell + linear(h, f"{branch}.down") for cell, h in zip(cells, hidden, strict=True)]
    cells = [norm(cell, "norm") for cell in cells]
    corners = []
    for corner in (0, 2, 8, 10):  # of 2 x 2 cells each, in 4 x 4 row by row
        square = torch.stack([cells[corner + step] for step in (0, 1, 4, 5)], dim=1)
        corners.append(nn.functional.gelu(linear(square, "merge.0")))
    return linear(patch, "linear") + linear(torch.stack(corners, dim=1), "merge.2")


def test_the_local_stem_equals_loops_over_cells_and_heads():
    module = stem("vit_u1x1_16_local").eval()
    with torch.no_grad():
        tokens = module(images())[0]
    for image, got in zip(images(), tokens, strict=True):
        for number, token in enumerate(got):
            row, column = 16 * (number // 3), 16 * (number % 3)
            wanted = cell_by_cell(module.state_dict(), image[:, row : row + 16, column : column + 16])
            torch.testing.assert_close(token.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", STEMS)
def test_tokens_are_row_by_row(kind):
    x, grid = stem(f"vit_u1x1_16_{kind}").eval()(images())
    assert (x.shape, grid) == ((2, 12, 64), (4, 3))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_images_not_divisible_into_patches_are_refused(kind):
    with pytest.raises(ValueError, match="images of 60 x 48 pixels do not divide into patches of 16"):
        stem(f"vit_u1x1_16_{kind}")(images(height=60))


def step_of_a_worker(rank: int, port: int, folder: Path) -> None:
    """Save outputs, gradients and statistics of one of two workers, with five and three of eight images."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # as of functions that torch deprecates
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    module = stem("vit_u1x1_16_hmlp_bn").train()
    synchronize_norms(module, torch.device("cpu"))
    own = images(batch=8).split([5, 3])[rank]
    tokens = module(own)[0]
    tokens.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    torch.save({"tokens": tokens.detach(), "gradients": gradients, "state": module.state_dict()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_one_worker_and_two_agree_on_batch_norms(tmp_path):
    one_worker = stem("vit_u1x1_16_hmlp_bn").train()
    tokens = one_worker(images(batch=8))[0]
    tokens.square().sum().backward()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(step_of_a_worker, (port, tmp_path), nprocs=2)
    workers = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    torch.testing.assert_close(torch.cat([worker["tokens"] for worker in workers]), tokens.detach())
    for worker in workers:
        for name, parameter in one_worker.named_parameters():
            torch.testing.assert_close(worker["gradients"][name], parameter.grad, rtol=1e-3, atol=1e-4)
        assert list(worker["state"]) == list(one_worker.state_dict())
        for name, tensor in one_worker.state_dict().items():
            torch.testing.assert_close(worker["state"][name], tensor)


@pytest.fixture
def one_gloo_worker(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_batch_norms_of_cpu_workers_keep_no_graph(one_gloo_worker):
    """Their statistics would hold the activations of every step."""
    module = stem("vit_u1x1_16_hmlp_bn").train()
    synchronize_norms(module, torch.device("cpu"))
    module(images(batch=8))[0].sum().backward()
    assert [name for name, buffer in module.named_buffers() if buffer.requires_grad] == []


def test_a_batch_norm_of_cpu_workers_takes_bfloat16_and_keeps_float64(one_gloo_worker):
    """The sums over images and the running statistics are at least float32."""
    exact, rounded = (stem("vit_u1x1_16_hmlp_bn").train() for _ in range(2))
    synchronize_norms(exact, torch.device("cpu"))
    synchronize_norms(rounded, torch.device("cpu"))
    tokens = exact(images(batch=8))[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = rounded(images(batch=8))[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), tokens, rtol=0.05, atol=0.05)
    got.float().square().sum().backward()
    for name, tensor in exact.state_dict().items():
        torch.testing.assert_close(rounded.state_dict()[name], tensor, rtol=0.05, atol=0.01)
    double = stem("vit_u1x1_16_hmlp_bn").train().double()
    synchronize_norms(double, torch.device("cpu"))
    torch.testing.assert_close(double(images(batch=8).double())[0].float(), tokens)


# ---- conventions of the norms, recorded with the weights -------------------------------------------------------------

NORMS = [("hmlp_bn", 1e-3, 1e-5), ("linear_bn", 0.1, 1e-5), ("hmlp_ln", 1e-2, 1e-6)]


def vit(kind: str, **settings) -> ViT:
    base = {"name": f"vit_u1x1_8_{kind}", "image_size": 16, "num_classes": 3}
    return scrambled(ViT(Model.model_validate(base | settings)))


@pytest.mark.parametrize(("kind", "eps", "usual"), NORMS)
@torch.no_grad()
def test_norms_of_a_stem_have_their_epsilon(kind, eps, usual):
    for given, wanted in ((eps, eps), (None, usual)):
        norm = vit(kind, stem_norm_eps=given).stem.proj[1].double()
        channels = norm.weight.numel()
        x = 0.1 * torch.randn(2, channels, 2, 2, dtype=torch.float64)
        along = (slice(None), None, None)
        if kind.endswith("bn"):
            mean, variance = norm.running_mean[along], norm.running_var[along]
        else:
            mean, variance = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
        expected = (x - mean) / (variance + wanted).sqrt() * norm.weight[along] + norm.bias[along]
        torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_running_statistics_follow_batches_at_their_momentum():
    stem = vit("hmlp_bn", batch_momentum=0.01).stem.train()
    norm, before = stem.proj[1], stem.proj[1].running_mean.clone()
    with torch.no_grad():
        batch = stem.proj[0](images(2, 16, 16)).mean(dim=(0, 2, 3))
    stem(images(2, 16, 16))
    torch.testing.assert_close(norm.running_mean, 0.99 * before + 0.01 * batch)


@torch.no_grad()
def test_a_folder_and_its_delta_keep_the_conventions_and_one_without_them_has_the_usual_ones(tmp_path):
    settings = {"stem_norm_eps": 1e-3, "batch_momentum": 0.01, "activation": "gelu_tanh", "norm_eps": 1e-5}
    base, x = vit("hmlp_bn", **settings), images(2, 16, 16)
    run = Run(model=base.model)
    save_model(str(tmp_path / "base"), run, base)
    other = vit("hmlp_bn", **settings)
    other.head.bias.data += 1
    save_model(str(tmp_path / "delta"), run, other, None, str(tmp_path / "base"))
    for name, network in (("base", base), ("delta", other)):
        loaded = load_model(str(tmp_path / name))
        assert loaded.run.model.model_dump() == base.model.model_dump()
        assert torch.equal(loaded.vit(x), network(x))
    saved = yaml.safe_load((tmp_path / "base" / "run.yaml").read_text())
    for name in settings:
        del saved["model"][name]
    (tmp_path / "base" / "run.yaml").write_text(yaml.safe_dump(saved))
    old = load_model(str(tmp_path / "base")).vit
    usual = vit("hmlp_bn")
    assert old.model == usual.model
    assert torch.equal(old(x), usual(x))
    assert not torch.equal(old(x), base(x))


def test_a_fine_tuning_takes_the_conventions_of_its_weights_and_cannot_change_the_function(tmp_path):
    base = vit("hmlp_bn", stem_norm_eps=1e-3, batch_momentum=0.01)
    save_model(str(tmp_path / "base"), Run(model=base.model), base)
    task = {"kind": "finetune", "weights": str(tmp_path / "base")}
    run, _ = open_initial_weights(Run().replace({"task": task}), Finetune.model_validate(task), "abc")
    assert (run.model.stem_norm_eps, run.model.batch_momentum) == (1e-3, 0.01)
    other = Model.model_validate(base.model.model_dump() | {"batch_momentum": 0.2})
    adapt(base, other, "w", new_head=False)  # statistics of training alone
    with pytest.raises(ConfigError, match=r"model\.stem_norm_eps: got 0\.001, expected null"):
        adapt(base, Model.model_validate(base.model.model_dump() | {"stem_norm_eps": None}), "w", new_head=False)


def test_the_momentum_of_training_changes_neither_outputs_nor_the_family(tmp_path):
    networks = {momentum: vit("hmlp_bn", batch_momentum=momentum) for momentum in (0.1, 0.01)}
    for momentum, network in networks.items():
        save_model(str(tmp_path / f"{momentum}"), Run(model=network.model), network, list("abc"))
    one, other = (describe_network(str(tmp_path / f"{momentum}"))[0] for momentum in networks)
    assert one.key == other.key
    members = [Member(Run(model=each.model), None, each.state_dict(), {}) for each in networks.values()]
    assert members[0].trunk == members[1].trunk


@torch.no_grad()
def test_an_export_for_timm_has_the_epsilons(tmp_path):
    ours, x = vit("hmlp_bn", stem_norm_eps=0.1), images(2, 16, 16)
    write_library(ours, "timm", tmp_path)
    theirs = runpy.run_path(str(tmp_path / "load.py"))["model"]
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: vit_u1x1_8, stem_norm_eps: 0.1}", "the stem of vit_u1x1_8 has no norms"),
        ("{name: vit_u1x1_16_r, stem_norm_eps: 0.1}", "the stem of vit_u1x1_16_r has no norms"),
        ("{name: vit_u1x1_8_hmlp_ln, batch_momentum: 0.2}", "has no batch norms"),
        ("{name: vit_u1x1_8_hmlp_bn, batch_momentum: 0}", "batch_momentum: got 0"),
        ("{name: torchvision/resnet18, batch_momentum: 0.2}", "torchvision/resnet18 has no batch_momentum 0.2"),
    ],
)
def test_conventions_of_norms_that_a_stem_lacks_are_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        load_run(None, [f"model={model}"])


def test_gpu_workers_use_torchs_own_batch_norm():
    module = stem("vit_u1x1_16_hmlp_bn")
    names = list(module.state_dict())
    synchronize_norms(module, torch.device("cuda"))
    assert sum(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()) == 3
    assert list(module.state_dict()) == names
