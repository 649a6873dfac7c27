"""Masked prediction: losses compared with loops and with transformers, masking, gradients and pictures."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitray.config import Run
from vitray.config.training import Optim
from vitray.data.augment.masks import HIDDEN, VISIBLE, draw_sources
from vitray.errors import ConfigError
from vitray.models.patches import patchify, unpatchify
from vitray.models.vit import ViT
from vitray.tasks.build import build_task, recompute_activations
from vitray.tasks.masked import MaskedPrediction, mask_pixels
from vitray.training.optim import build_optimizer, parameter_groups
from vitray.weights.pretrained import check_tokenizer

PATCH, GRID = 8, (4, 3)
PATCHES = GRID[0] * GRID[1]
MODEL = {"model.name": "vit_u2x2_8_hmlp_ln", "model.image_size": [32, 24], "model.num_classes": None}
DECODER = {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "mean_color": {},
    "small_patch": {},
    "pixels_l2": {},
    "pixels_l1": {},
    "mae": DECODER,
    "beit": {"tokenizer": "runs/tokenizer/model"},
}
each_objective = pytest.mark.parametrize("kind", OBJECTIVES)


def run_of(kind: str, **settings) -> Run:
    changes = {"task": {"kind": "tokenizer", "levels": [5, 4], **DECODER}}
    if kind != "tokenizer":
        objective = {"kind": kind, **OBJECTIVES[kind]}
        changes = {
            "task": {"kind": "masked", "objective": objective, "mask": {"min_patches": 2} if kind == "beit" else None}
        }
    return Run().replace(MODEL | changes | {name.replace("__", "."): value for name, value in settings.items()})


def task(kind: str, **settings) -> Any:
    if kind == "beit":
        tokens = {name: value for name, value in settings.items() if name in ("model__name", "model__image_size")}
        tokenizer = task("tokenizer", **tokens)
    torch.manual_seed(0)
    return build_task(run_of(kind, **settings), tokenizer if kind == "beit" else None)


def images(count=4, height=32, width=24) -> Tensor:
    """Normalized by ImageNet's mean and std, smooth and of many colors."""
    coarse = torch.rand(count, 3, height // 4, width // 4, generator=torch.Generator().manual_seed(1))
    pixels = F.interpolate(coarse, size=(height, width), mode="bilinear")
    mean, std = torch.tensor(Run().data.normalize.mean), torch.tensor(Run().data.normalize.std)
    return (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def sources(kind: str, count=4, **settings) -> Tensor:
    run = run_of(kind, **settings)
    return torch.from_numpy(draw_sources(run.task.mask, run.model.grid, 0, 0, range(count)))


def inputs(kind: str) -> list[Tensor]:
    """What a task of a kind takes."""
    return [images()] if kind == "tokenizer" else [images(), sources(kind)]


# ---- the losses, as loops --------------------------------------------------------------------------------------------


def patch_of(image_CHW: Tensor, index: int) -> Tensor:
    row, column = divmod(index, GRID[1])
    return image_CHW[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]


def token_of(module: MaskedPrediction, image_CHW: Tensor, index: int) -> Tensor:
    """Return the token of a patch, from a stem that is applied to that patch only."""
    return module.vit.stem(patch_of(image_CHW, index)[None])[0][0, 0]


def through(blocks: nn.ModuleList, tokens: list[Tensor | None]) -> list[Tensor]:
    x_1ND = torch.stack([token for token in tokens if token is not None])[None]
    for block in blocks:
        x_1ND = block(x_1ND)
    return list(x_1ND[0])


def predictions(module: MaskedPrediction, image_CHW: Tensor, source: list[int]) -> dict[int, Tensor]:
    """The prediction of each predicted patch of one image."""
    vit, places, first = module.vit, module.vit.positions.table, int(module.vit.class_token is not None)
    tokens = []
    for index in range(PATCHES):
        token = token_of(module, image_CHW, index if source[index] < 0 else source[index])
        tokens.append((module.mask_token if source[index] == HIDDEN else token) + places[index])
    out = [vit.norm(token) for token in through(vit.blocks, [vit.class_token, *tokens])[first:]]
    return {index: module.head(out[index]) for index in range(PATCHES) if source[index] != VISIBLE}


def mae_predictions(module: MaskedPrediction, image_CHW: Tensor, source: list[int]) -> dict[int, Tensor]:
    """Return the predictions of objective mae; its encoder gets only the visible patches."""
    vit, decoder, first = module.vit, module.decoder, int(module.vit.class_token is not None)
    visible = [index for index in range(PATCHES) if source[index] == VISIBLE]
    tokens = [token_of(module, image_CHW, index) + vit.positions.table[index] for index in visible]
    embedded = [decoder.embed(vit.norm(token)) for token in through(vit.blocks, [vit.class_token, *tokens])]
    patches = [module.mask_token] * PATCHES
    for index, token in zip(visible, embedded[first:], strict=True):
        patches[index] = token
    decoder_tokens = [token + decoder.positions.table[index] for index, token in enumerate(patches)]
    out = through(decoder.blocks, [*embedded[:first], *decoder_tokens])[first:]
    return {index: decoder.head(out[index]) for index in range(PATCHES) if source[index] != VISIBLE}


def color_of(pixels_CN: Tensor) -> int:
    """The mean of normalized pixels as one of 512 colors."""
    code, normalize = 0, Run().data.normalize
    for color in range(3):
        values = [value * normalize.std[color] + normalize.mean[color] for value in pixels_CN[color].tolist()]
        code = 8 * code + min(7, int(8 * sum(values) / len(values)))
    return code


def cross_entropy(logits: list[float], target: int) -> float:
    return math.log(sum(math.exp(value) for value in logits)) - logits[target]


def loss_of(kind: str, prediction: list[float], patch_CHW: Tensor, code: int) -> float:
    """The loss of one predicted patch."""
    match kind:
        case "mean_color":
            return cross_entropy(prediction, color_of(patch_CHW.flatten(1)))
        case "small_patch":
            losses = []
            for cell in range(16):
                top, left = (2 * at for at in divmod(cell, 4))
                target = color_of(patch_CHW[:, top : top + 2, left : left + 2].flatten(1))
                losses.append(cross_entropy(prediction[512 * cell : 512 * (cell + 1)], target))
            return sum(losses) / 16
        case "beit":
            return cross_entropy(prediction, code)
    expected = [float(patch_CHW[c, y, x]) for y in range(PATCH) for x in range(PATCH) for c in range(3)]
    if kind == "mae":
        mean = sum(expected) / len(expected)
        variance = sum((value - mean) ** 2 for value in expected) / (len(expected) - 1)
        expected = [(value - mean) / math.sqrt(variance + 1e-6) for value in expected]
    difference = [abs(got - value) for got, value in zip(prediction, expected, strict=True)]
    return sum(each if kind == "pixels_l1" else each**2 for each in difference) / len(expected)


@each_objective
@pytest.mark.parametrize("settings", [{}, {"model__class_token": False, "model__pool": "mean"}])
def test_every_loss_equals_a_slow_loop(kind, settings):
    module, images_BCHW, source_BN = task(kind, **settings).eval(), images(), sources(kind)
    codes_BN = module.targets.tokenizer.encode(images_BCHW) if kind == "beit" else torch.zeros_like(source_BN)
    losses = []
    with torch.no_grad():
        for image_CHW, source, codes in zip(images_BCHW, source_BN.tolist(), codes_BN.tolist(), strict=True):
            predicted = (mae_predictions if kind == "mae" else predictions)(module, image_CHW, source)
            assert len(predicted) == module.predicted
            losses += [
                loss_of(kind, prediction.tolist(), patch_of(image_CHW, index), codes[index])
                for index, prediction in predicted.items()
            ]
        assert float(module(images_BCHW, source_BN)) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@each_objective
def test_equal_parts_of_a_batch_average_to_the_whole(kind):
    module, images_BCHW, source_BN = task(kind), images(), sources(kind)
    parts = [module(images_BCHW[part], source_BN[part]) for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts) / 2, module(images_BCHW, source_BN))


@each_objective
def test_losses_are_computed_in_float32(kind):
    module, images_BCHW, source_BN = task(kind).eval(), images(), sources(kind)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(images_BCHW, source_BN)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, module(images_BCHW, source_BN), rtol=0.02, atol=0)


# ---- compared with transformers --------------------------------------------------------------------------------------

SQUARE = {"model__name": "vit_u2x1_8", "model__image_size": 32, "model__norm_eps": 1e-12}
HF = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256, "patch_size": 8}


def their_blocks(prefix: str, blocks: nn.ModuleList) -> dict[str, Tensor]:
    state = {}
    for level, block in enumerate(blocks):
        level_prefix = f"{prefix}.{level}"
        for kind, ours, theirs in (
            ("attn1", "out", "attention.o_proj"),
            ("ffn1", "up", "mlp.fc1"),
            ("ffn1", "down", "mlp.fc2"),
        ):
            for name, tensor in block.get_submodule(f"{kind}.{ours}").named_parameters():
                state[f"{level_prefix}.{theirs}.{name}"] = tensor
        for name, tensor in block.attn1.qkv.named_parameters():
            for part, chunk in zip("qkv", tensor.chunk(3), strict=True):
                state[f"{level_prefix}.attention.{part}_proj.{name}"] = chunk
        for kind, theirs in (("attn1", "layernorm_before"), ("ffn1", "layernorm_after")):
            for name, tensor in block.get_submodule(f"{kind}.norm").named_parameters():
                state[f"{level_prefix}.{theirs}.{name}"] = tensor
    return state


def their_encoder(vit: ViT) -> dict[str, Tensor]:
    state = their_blocks("vit.layers", vit.blocks)
    for ours, theirs in (("stem.proj.0", "embeddings.patch_embeddings.projection"), ("norm", "layernorm")):
        state |= {f"vit.{theirs}.{name}": tensor for name, tensor in vit.get_submodule(ours).named_parameters()}
    places_ND = torch.cat([torch.zeros(1, 64), vit.positions.table])
    return state | {
        "vit.embeddings.cls_token": vit.class_token[None, None],
        "vit.embeddings.position_embeddings": places_ND[None],
    }


@pytest.mark.parametrize("normalized", [True, False])
def test_mae_equals_transformers(normalized):
    from transformers import ViTMAEConfig, ViTMAEForPreTraining  # slow import, not needed by worker processes

    settings = {"task__objective__normalized": normalized, "model__positions": "sincos2d"}
    module = task("mae", **SQUARE, **settings)
    decoder = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    config = ViTMAEConfig(**HF, **decoder, decoder_intermediate_size=128, image_size=32, norm_pix_loss=normalized)
    theirs = ViTMAEForPreTraining(config)
    theirs.decoder.initialize_weights(16)
    torch.testing.assert_close(theirs.decoder.decoder_pos_embed[0, 1:], module.decoder.positions.table)

    state = their_encoder(module.vit) | their_blocks("decoder.decoder_layers", module.decoder.blocks)
    for ours, name in (("embed", "decoder_embed"), ("head.0", "decoder_norm"), ("head.1", "decoder_pred")):
        state |= {
            f"decoder.{name}.{key}": tensor for key, tensor in module.decoder.get_submodule(ours).named_parameters()
        }
    state["decoder.mask_token"] = module.mask_token[None, None]
    state["decoder.decoder_pos_embed"] = theirs.decoder.decoder_pos_embed
    theirs.load_state_dict(state)

    images_BCHW = images(height=32, width=32)
    source_BN = sources("mae", **SQUARE)
    # transformers keeps the patches with the least noise.
    out = theirs(images_BCHW, noise=(source_BN == HIDDEN).float() + torch.rand(4, 16) / 2)
    assert torch.equal(out.mask, (source_BN == HIDDEN).float())
    loss = module(images_BCHW, source_BN)
    torch.testing.assert_close(loss, out.loss, rtol=1e-5, atol=0)
    loss.backward()
    out.loss.backward()
    for name in ("cls_token", "patch_embeddings.projection.weight"):
        ours = {"cls_token": module.vit.class_token}.get(name, module.vit.stem.proj[0].weight)
        torch.testing.assert_close(
            ours.grad, theirs.get_parameter(f"vit.embeddings.{name}").grad.view_as(ours), rtol=1e-3, atol=1e-7
        )
    torch.testing.assert_close(module.mask_token.grad, theirs.decoder.mask_token.grad[0, 0], rtol=1e-3, atol=1e-7)

    rendered = module.reconstruct(images_BCHW, source_BN)
    if not normalized:
        expected_BNK = torch.where(out.mask[..., None] > 0, out.logits, theirs.patchify(images_BCHW))
        torch.testing.assert_close(rendered, theirs.unpatchify(expected_BNK).detach(), rtol=1e-4, atol=1e-5)


def test_pixels_l1_equals_transformers():
    from transformers import ViTConfig, ViTForMaskedImageModeling

    module = task("pixels_l1", **SQUARE)
    theirs = ViTForMaskedImageModeling(ViTConfig(**HF, encoder_stride=8, image_size=32)).eval()
    # The order of transformers: color, row, column.
    order = torch.arange(192).view(8, 8, 3).permute(2, 0, 1).flatten()
    state = their_encoder(module.vit) | {"vit.embeddings.mask_token": module.mask_token[None, None]}
    state |= {"decoder.0.weight": module.head.weight[order, :, None, None], "decoder.0.bias": module.head.bias[order]}
    theirs.load_state_dict(state)
    images_BCHW, source_BN = images(height=32, width=32), sources("pixels_l1", **SQUARE)
    out = theirs(images_BCHW, bool_masked_pos=source_BN == HIDDEN)
    torch.testing.assert_close(module(images_BCHW, source_BN), out.loss, rtol=1e-5, atol=0)


# ---- hidden patches stay hidden --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["", "_hmlp_ln", "_hmlp_bn", "_linear_bn_gelu", "_local"])
def test_masking_after_the_stem_equals_masking_before_it(stem):
    vit = task("pixels_l2", model__name=f"vit_u2x1_8{stem}").vit
    images_BCHW, source_BN = images(), sources("pixels_l2")
    vit.train()
    vit.stem(images_BCHW)  # gives batch norms their statistics
    vit.eval()
    before_BND = vit.stem(mask_pixels(images_BCHW, source_BN, PATCH))[0]
    after_BND = vit.stem(images_BCHW)[0]
    for row, source in enumerate(source_BN.tolist()):
        for index, origin in enumerate(source):
            expected = after_BND[row, index if origin == VISIBLE else origin]
            if origin != HIDDEN:
                torch.testing.assert_close(before_BND[row, index], expected, rtol=0, atol=1e-5)
    # All masked patches have the same token, so nothing of the hidden pixels leaks.
    masked_MD = before_BND[source_BN == HIDDEN]
    torch.testing.assert_close(masked_MD, masked_MD[:1].expand_as(masked_MD), rtol=0, atol=1e-5)


@each_objective
@pytest.mark.parametrize("stem", ["hmlp_ln", "hmlp_bn"])
def test_a_prediction_does_not_depend_on_hidden_patches(kind, stem):
    module = task(kind, model__name=f"vit_u2x1_8_{stem}").eval()
    images_BCHW, source_BN = images(), sources(kind)
    # A hidden patch must not replace another one.
    source_BN = torch.where(source_BN >= 0, HIDDEN, source_BN)
    noise_BNK = torch.randn(4, PATCHES, 3 * PATCH**2) * (source_BN == HIDDEN)[..., None]
    other_BCHW = images_BCHW + unpatchify(noise_BNK, GRID, PATCH)
    with torch.no_grad():
        index_BM, one = module.predict(images_BCHW, source_BN)
        torch.testing.assert_close(module.predict(other_BCHW, source_BN)[1], one, rtol=0, atol=1e-5)
    assert torch.equal(index_BM, (source_BN == HIDDEN).nonzero()[:, 1].view(4, -1))


@pytest.mark.parametrize(("name", "leaks"), [("vit_u1x1_16_conv_ln", True), ("vit_u1x1_16_hmlp_ln", False)])
def test_a_convolutional_stem_leaks(name, leaks):
    settings = {"model__name": name, "model__image_size": 64, "task__allow_leak": True}
    module, source_BN, images_BCHW = task("mae", **settings), sources("mae", **settings), images(height=64, width=64)
    noise_BNK = torch.randn(4, 16, 768) * (source_BN == HIDDEN)[..., None]
    with torch.no_grad():
        other_BCHW = images_BCHW + unpatchify(noise_BNK, (4, 4), 16)
        one_BND, other_BND = (module.vit.stem(each)[0] for each in (images_BCHW, other_BCHW))
    difference = (one_BND - other_BND)[source_BN == VISIBLE].abs().max()
    assert difference > 0.1 if leaks else difference < 1e-5


def test_mae_computes_a_quarter_of_the_patches():
    module, lengths = task("mae"), []
    module.vit.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    module(images(), sources("mae"))
    assert lengths == [1 + PATCHES // 4]


# ---- training --------------------------------------------------------------------------------------------------------


@each_objective
@pytest.mark.parametrize("settings", [{}, {"model__layerscale": 0.1, "model__pool": "mean_then_norm"}])
def test_every_parameter_gets_a_gradient(kind, settings):
    module = task(kind, **settings).train()
    module(images(), sources(kind)).backward()
    assert [name for name, each in module.named_parameters() if each.grad is None or not each.grad.any()] == []
    assert all(parameter.requires_grad for parameter in module.parameters())


@each_objective
def test_the_network_is_an_unchanged_vit(kind):
    module = task(kind)
    vit = ViT(run_of(kind).model)
    names = [name for name in module.state_dict() if not name.startswith("vit.")]
    assert [f"vit.{name}" for name in vit.state_dict()] == [name for name in module.state_dict() if name not in names]
    assert "mask_token" in names
    assert {name.partition(".")[0] for name in names} == {"mask_token", "decoder" if kind == "mae" else "head"}


@each_objective
def test_layer_decay_and_weight_decay_of_heads_and_tokens(kind):
    module = task(kind)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = parameter_groups(module, Optim(weight_decay=0.05, layer_decay=0.5))
    rates = {
        names[id(each)]: (group["lr_scale"], group["weight_decay"]) for group in groups for each in group["params"]
    }
    assert len(rates) == len(names)
    assert rates["mask_token"] == (1.0, 0.0)
    outside = {name for name in rates if not name.startswith("vit.")}
    assert {rates[name][0] for name in outside} == {1.0}
    assert {name for name in outside if rates[name][1]} == {
        name for name in outside if name.endswith("weight") and module.get_parameter(name).ndim == 2
    }
    # Two levels of two branches.
    assert rates["vit.class_token"] == rates["vit.positions.table"] == (0.125, 0.0)
    assert rates["vit.blocks.0.attn2.qkv.weight"] == (0.25, 0.05)
    assert rates["vit.blocks.1.ffn1.up.weight"] == (0.5, 0.05)


def test_beit_scales_the_initial_weights_of_deeper_levels():
    module, plain = task("beit", model__name="vit_u3x2_8"), task("pixels_l2", model__name="vit_u3x2_8")
    for level in range(3):
        for name, weight in module.vit.blocks[level].named_parameters():
            expected = plain.vit.blocks[level].get_parameter(name)
            if name.rpartition(".")[0] in ("attn1.out", "attn2.out", "ffn1.down", "ffn2.down"):
                expected = expected / math.sqrt(2 * (level + 1))
            torch.testing.assert_close(weight, expected)


def test_a_tokenizer_is_neither_trained_nor_owned_by_the_task():
    module = task("beit").train()
    tokenizer = module.targets.tokenizer
    before = {name: tensor.clone() for name, tensor in tokenizer.state_dict().items()}
    optimizer = build_optimizer(module, Optim(lr=0.1), torch.device("cpu"))
    module(images(), sources("beit")).backward()
    optimizer.step()
    assert not tokenizer.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in tokenizer.state_dict().items())
    owned = {id(parameter) for parameter in module.parameters()}
    assert not owned & {id(parameter) for parameter in tokenizer.parameters()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model__image_size": 32},
            "task.objective.tokenizer: got runs/tokenizer/model, which has codes for 4 x 3 patches of 8 pixels,"
            " expected 4 x 4 of 8, as vit_u2x2_8_hmlp_ln at 32",
        ),
        (
            {"model__name": "vit_u2x2_16", "model__image_size": [64, 48]},
            "which has codes for 4 x 3 patches of 8 pixels, expected 4 x 3 of 16",
        ),
        (
            {"data__normalize": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}},
            "data.normalize: got mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5], expected those of the tokenizer",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        check_tokenizer(run_of("beit", **settings), task("tokenizer").run, "runs/tokenizer/model")
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["beit", "mae"])
def test_recomputed_and_compiled_gradients_are_the_same(kind):
    module, images_BCHW, source_BN = task(kind, model__name="vit_u1x1_8"), images(), sources(kind)

    def gradients(forward: Any) -> list[Tensor]:
        module.zero_grad()
        forward(images_BCHW, source_BN).backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    plain = gradients(module)
    torch.compiler.reset()
    compiled = gradients(torch.compile(module, backend="aot_eager", fullgraph=True))
    recompute_activations(module, "blocks")
    again = gradients(module)
    for one, two, three in zip(plain, compiled, again, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
        assert torch.equal(three, one)


# ---- two workers -----------------------------------------------------------------------------------------------------


def worker(rank: int, workers: int, folder: str) -> None:
    """Train every task for two steps on this worker's images; the first worker saves the gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=workers)
    for kind in (*OBJECTIVES, "tokenizer"):
        module = task(kind).train()
        model = DistributedDataParallel(module)  # raises in the second step if a parameter had no gradient in the first
        for _ in range(2):
            module.zero_grad()
            model(*(each[rank::workers] for each in inputs(kind))).backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        if kind == "tokenizer":
            gradients["perplexity"] = torch.tensor(module.read_metrics(training=True)["perplexity"])
        if rank == 0:
            torch.save(gradients, f"{folder}/{kind}.pt")
    dist.barrier()  # a worker that ends before the others has aborted at its exit
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_workers_get_the_gradients_of_one(tmp_path):
    torch.multiprocessing.spawn(worker, (2, str(tmp_path)), nprocs=2)
    for kind in (*OBJECTIVES, "tokenizer"):
        module = task(kind).train()
        gradients = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        module(*inputs(kind)).backward()
        if kind == "tokenizer":
            assert float(gradients.pop("perplexity")) == pytest.approx(module.read_metrics(training=True)["perplexity"])
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=f"{kind}: {name}")


# ---- learning and pictures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("mean_color", 100), ("small_patch", 100), ("pixels_l2", 1000), ("pixels_l1", 50), ("mae", 5), ("beit", 100)],
)
def test_a_few_images_are_learned(kind, factor):
    module, images_BCHW, source_BN = task(kind, model__name="vit_u2x1_8").train(), images(), sources(kind)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20, (200 - step) / 100)
        loss = module(images_BCHW, source_BN)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / factor, losses[::20]


@each_objective
def test_a_reconstruction_shows_the_prediction(kind):
    module, images_BCHW, source_BN = task(kind).eval(), images(), sources(kind)
    rendered_BNK, own_BNK = (
        patchify(each, PATCH) for each in (module.reconstruct(images_BCHW, source_BN), images_BCHW)
    )
    predicted_BN = source_BN != VISIBLE
    assert torch.equal(rendered_BNK[~predicted_BN], own_BNK[~predicted_BN])
    assert (rendered_BNK[predicted_BN] != own_BNK[predicted_BN]).any(dim=1).all()

    # A correct prediction gives the true picture, up to the resolution of the target.
    index_BM = module.predict(images_BCHW, source_BN)[0]
    targets_BMK = patchify(images_BCHW, PATCH).gather(1, index_BM[..., None].expand(-1, -1, 192))
    match kind:
        case "mean_color" | "small_patch":
            cells = {"mean_color": 1, "small_patch": 4}[kind]
            classes_BMS = module.targets.classes(images_BCHW).gather(1, index_BM[..., None].expand(-1, -1, cells**2))
            rendered = module.targets.render(F.one_hot(classes_BMS, 512).flatten(2).float(), images_BCHW, index_BM)
            mean, std = torch.tensor(Run().data.normalize.mean), torch.tensor(Run().data.normalize.std)
            error_BMssC = (
                (rendered - targets_BMK).unflatten(2, (cells, PATCH // cells, cells, PATCH // cells, 3)).mean((3, 5))
            )
            assert (error_BMssC * std).abs().max() <= 1 / 16 + 1e-6  # half of a level of three bits
            assert mean.shape == (3,)
        case "pixels_l2" | "pixels_l1":
            torch.testing.assert_close(module.targets.render(targets_BMK, images_BCHW, index_BM), targets_BMK)
        case "mae":
            spread = (targets_BMK.var(-1, keepdim=True) + 1e-6).sqrt()
            normal = (targets_BMK - targets_BMK.mean(-1, keepdim=True)) / spread
            torch.testing.assert_close(module.targets.render(normal, images_BCHW, index_BM), targets_BMK)
        case "beit":
            tokenizer = module.targets.tokenizer
            codes_BM = tokenizer.encode(images_BCHW).gather(1, index_BM)
            rendered = module.targets.render(F.one_hot(codes_BM, tokenizer.codes).float(), images_BCHW, index_BM)
            expected = patchify(tokenizer.reconstruct(images_BCHW), PATCH)
            torch.testing.assert_close(rendered, expected.gather(1, index_BM[..., None].expand(-1, -1, 192)))


def test_masked_pixels_show_the_input_of_the_network():
    images_BCHW = images(1)
    source_BN = torch.full((1, PATCHES), VISIBLE)
    source_BN[0, :3] = torch.tensor([HIDDEN, 5, 2])
    masked_CHW = mask_pixels(images_BCHW, source_BN, PATCH)[0]
    assert not patch_of(masked_CHW, 0).any()
    for index, expected in [(1, 5), (2, 2), *((index, index) for index in range(3, PATCHES))]:
        assert torch.equal(patch_of(masked_CHW, index), patch_of(images_BCHW[0], expected))
    assert torch.equal(unpatchify(patchify(images_BCHW, PATCH), GRID, PATCH), images_BCHW)
