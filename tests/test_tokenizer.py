"""The tokenizer: its loss compared with a slow loop, its codes, their perplexity, and its model folder."""

import math
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitray.config import Run, load_run
from vitray.config.augmentation import Normalize
from vitray.config.sections import TaskTraits
from vitray.config.training import Optim
from vitray.data.augment.mixing import DeviceBatch
from vitray.errors import ConfigError
from vitray.metrics.scores import EvaluationSet, evaluate_loss
from vitray.models.patches import patchify
from vitray.models.tokenizer import VisualTokenizer
from vitray.tasks.build import build_task
from vitray.training.optim import parameter_groups
from vitray.weights import identity_of, load_model, load_tokenizer, open_weights, save_model, save_tokenizer
from vitray.weights.pretrained import open_tokenizer_source

LEVELS = (5, 4, 3)
PATCH, PATCHES = 8, 12


def run(**settings) -> Run:
    task = {"kind": "tokenizer", "levels": LEVELS, "decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2}
    tiny = {"model.name": "vit_u2x2_8", "model.image_size": [32, 24], "model.num_classes": None, "task": task}
    return Run().replace(tiny | {name.replace("__", "."): value for name, value in settings.items()})


def tokenizer(**settings) -> Any:
    torch.manual_seed(0)
    return build_task(run(**settings))


def images(count=4) -> Tensor:
    coarse = torch.randn(count, 3, 8, 6, generator=torch.Generator().manual_seed(1))
    return F.interpolate(coarse, size=(32, 24), mode="bilinear")


# ---- the loss --------------------------------------------------------------------------------------------------------


def levels_of(module: VisualTokenizer, image_CHW: Tensor) -> list[list[int]]:
    """The levels of each patch of one image."""
    tokens_ND = module.vit.norm(module.vit.tokens(image_CHW[None]))[0, -PATCHES:]
    shares = [[1 / (1 + math.exp(-number)) for number in row] for row in module.squeeze(tokens_ND).tolist()]
    return [[min(int(x * count), count - 1) for x, count in zip(row, LEVELS, strict=True)] for row in shares]


def decoded_from(module: VisualTokenizer, levels: list[list[int]]) -> list[Tensor]:
    """The decoded pixels of each patch."""
    decoder = module.decoder
    middles = [[2 * (level + 0.5) / count - 1 for level, count in zip(row, LEVELS, strict=True)] for row in levels]
    placed = [decoder.embed(torch.tensor(row)) + decoder.positions.table[at] for at, row in enumerate(middles)]
    x_1ND = torch.stack(placed)[None]
    for block in decoder.blocks:
        x_1ND = block(x_1ND)
    return [decoder.head(token) for token in x_1ND[0]]


@pytest.mark.parametrize("settings", [{}, {"model__class_token": False, "model__pool": "mean"}])
@torch.no_grad()
def test_the_loss_equals_a_slow_loop(settings):
    module, errors = tokenizer(**settings), []
    for image_CHW in images():
        for at, decoded_K in enumerate(decoded_from(module, levels_of(module, image_CHW))):
            top, left = (PATCH * place for place in divmod(at, 3))
            expected = [float(image_CHW[c, top + y, left + x]) for y in range(8) for x in range(8) for c in range(3)]
            errors += [(got - value) ** 2 for got, value in zip(decoded_K.tolist(), expected, strict=True)]
    assert float(module(images())) == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_equal_parts_of_a_batch_average_to_the_whole():
    module = tokenizer()
    parts = [module(images()[part]) for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts) / 2, module(images()))


def test_the_loss_is_computed_in_float32():
    module = tokenizer()
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(images())
        assert loss.dtype == torch.float32
        assert torch.equal(module.encode(images()), tokenizer().encode(images()))
    torch.testing.assert_close(loss, module(images()), rtol=0.05, atol=0)


def test_every_parameter_gets_a_gradient():
    module = tokenizer(model__layerscale=0.1).train()
    module(images()).backward()
    assert [name for name, each in module.named_parameters() if each.grad is None or not each.grad.any()] == []


def test_the_gradient_bypasses_the_rounding():
    # With so many levels rounding has no effect, so the gradient equals that of the autoencoder without rounding.
    module = tokenizer(task__levels=[2**20])
    plain = deepcopy(module)
    module(images()).backward()
    decoded_BNK = plain._decode_patches(plain._numbers(images()))
    F.mse_loss(decoded_BNK, patchify(images(), PATCH)).backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-7)
    assert plain.squeeze.weight.grad.any()


def test_a_few_images_are_learned():
    module = tokenizer().train()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20, (200 - step) / 100)
        loss = module(images())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5, losses[::20]


# ---- codes -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_code_is_the_index_of_its_levels():
    module = tokenizer()
    codes_BN = module.encode(images())
    assert codes_BN.shape == (4, PATCHES)
    for codes, image_CHW in zip(codes_BN.tolist(), images(), strict=True):
        assert codes == [a + 5 * b + 20 * c for a, b, c in levels_of(module, image_CHW)]


@torch.no_grad()
def test_codes_decode_to_images():
    module = tokenizer().eval()
    for row in torch.arange(60).view(5, PATCHES):  # every code
        levels = [[int(code) % 5, int(code) // 5 % 4, int(code) // 20] for code in row]
        wanted_NK = torch.stack(decoded_from(module, levels))
        torch.testing.assert_close(patchify(module.decode(row[None]), PATCH)[0], wanted_NK)
    decoded = module.reconstruct(images())
    assert decoded.shape == images().shape
    assert float(F.mse_loss(decoded, images())) == pytest.approx(float(module(images())), rel=1e-5)


def test_initial_levels_are_about_equally_likely():
    module = tokenizer(task__levels=[8, 8, 8, 4, 4], model__name="vit_u4x1_8")
    noise_BCHW = torch.randn(64, 3, 32, 24, generator=torch.Generator().manual_seed(2))
    codes = module.encode(noise_BCHW).flatten()
    for number, levels in enumerate([8, 8, 8, 4, 4]):
        shares = torch.bincount(codes // int(module.strides[number]) % levels, minlength=levels) / len(codes)
        assert shares.min() > 0.4 / levels
        assert shares.max() < 2 / levels


def test_perplexity_counts_equally_used_codes():
    module = tokenizer()
    level_BNL = torch.zeros(2, 6, 3, dtype=torch.int64)
    module._count(level_BNL)
    assert module.read_metrics(training=True)["perplexity"] == pytest.approx(1)
    level_BNL[..., 1] = torch.arange(12).view(2, 6) % 4
    module._count(level_BNL[:1])
    module._count(level_BNL[1:])
    assert module.read_metrics(training=True)["perplexity"] == pytest.approx(4)
    assert math.isnan(module.read_metrics(training=True)["perplexity"])  # no codes since the last call
    module(images())
    share_V = torch.bincount(module.encode(images()).flatten(), minlength=60) / 48
    expected = math.exp(-sum(share * math.log(share) for share in share_V.tolist() if share))
    assert module.read_metrics(training=True)["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_leaves_the_counts_of_training():
    once, interrupted = tokenizer(), tokenizer()
    interrupted.load_state_dict(once.state_dict())
    for module in (once, interrupted):
        module(images())
    pixels, rows = torch.arange(2 * 32 * 24 * 3, dtype=torch.uint8).view(2, 32, 24, 3), np.arange(2)
    data = EvaluationSet([DeviceBatch(pixels, torch.zeros(2), rows, rows)], 2, Normalize())
    score = evaluate_loss(interrupted, TaskTraits(()), data, torch.device("cpu"), nullcontext())
    assert score.others["perplexity"] > 0
    assert interrupted.read_metrics(training=True)["perplexity"] == once.read_metrics(training=True)["perplexity"]


def test_code_counts_are_not_in_the_state_dict():
    module = tokenizer()
    names = list(module.state_dict())
    module(images())
    assert list(module.state_dict()) == names
    assert {name.partition(".")[0] for name in names} == {"vit", "squeeze", "decoder"}
    groups = parameter_groups(module, Optim())
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


# ---- the model folder ------------------------------------------------------------------------------------------------


def beit(url: str, **settings) -> Run:
    objective = {"kind": "beit", "tokenizer": url}
    return run(task={"kind": "masked", "objective": objective, "mask": {"min_patches": 2}}, **settings)


@pytest.mark.parametrize("stem", ["", "_hmlp_bn"])
def test_a_tokenizer_round_trips_through_its_folder(tmp_path, stem):
    module = tokenizer(model__name=f"vit_u2x2_8{stem}")
    module.train()(images())
    saved = save_tokenizer(str(tmp_path / "model"), module)
    assert saved.share == 1
    loaded = load_tokenizer(str(tmp_path / "model"))
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.run == module.run
    module.eval()
    codes_BN = module.encode(images())
    assert torch.equal(loaded.encode(images()), codes_BN)
    assert torch.equal(loaded.decode(codes_BN), module.decode(codes_BN))

    expected = beit(str(tmp_path / "model"), model__name="vit_u3x1_8_hmlp_ln")
    source = open_tokenizer_source(expected, expected.task.objective)
    assert source.url == str(tmp_path / "model")
    assert source.identity == identity_of(module.state_dict())
    task: Any = build_task(expected, source.tokenizer)
    assert task.targets.width == 60
    with pytest.raises(ConfigError, match="a model is there already"):
        save_tokenizer(str(tmp_path / "model"), module)


def test_tokenizers_and_networks_are_not_interchangeable(tmp_path):
    module = tokenizer()
    save_tokenizer(str(tmp_path / "tokenizer"), module)
    for load in (load_model, open_weights):
        with pytest.raises(
            ConfigError, match=r"tokenizer: got a tokenizer, expected the network of a run of another task$"
        ):
            load(str(tmp_path / "tokenizer"))
    save_model(
        str(tmp_path / "network"), Run().replace({"model": module.vit.model.model_dump(), "task": "masked"}), module.vit
    )
    url = str(tmp_path / "network")
    with pytest.raises(ConfigError) as error:
        open_tokenizer_source(beit(url), beit(url).task.objective)
    assert str(error.value) == (
        f"task.objective.tokenizer: {url}: got the network of a run of task masked, expected that of task tokenizer"
    )
    gone = str(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"^task.objective.tokenizer: .*gone: no run.yaml, so no model folder"):
        open_tokenizer_source(beit(gone), beit(gone).task.objective)


def test_a_tokenizer_with_another_grid_is_refused(tmp_path):
    url = str(tmp_path / "model")
    save_tokenizer(url, tokenizer())
    expected = beit(url, model__image_size=32)
    with pytest.raises(ConfigError, match=r"has codes for 4 x 3 patches of 8 pixels, expected 4 x 4 of 8") as error:
        open_tokenizer_source(expected, expected.task.objective)
    assert str(error.value).startswith(f"task.objective.tokenizer: got {url}, which")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.levels=[8,1]", "task.levels: got 1, expected greater than or equal to 2"),
        ("task.levels=[]", "task.levels: got [], expected a longer list"),
        ("task.levels=8", "task.levels: got 8, expected a list"),
        ("task.levels=[1024,1025]", "task: levels: got 1,049,600 codes, expected at most 1,048,576"),
        ("task.decoder_heads=5", "task: decoder_width: got 384, expected a multiple of its 5 heads, and of 4"),
        ("task.mask=blocks", "task.mask: unknown setting, expected one of kind, levels, decoder_width"),
        ("model.num_classes=10", "model.num_classes: got 10, expected null: task tokenizer learns no classes"),
        ("data.mix.cutmix=1.0", "data.mix: got mixup 0, cutmix 1, expected 0: no labels to mix"),
        ("model.image_size=100", "model: image_size 100 is not a multiple of the patch of vit_ti12x1_16, 16"),
    ],
)
def test_bad_input_gets_one_message(override, message):
    is_classes = override.startswith("model.num_classes")
    overrides = [override] if is_classes else ["model.num_classes=null", override]
    with pytest.raises(ConfigError) as error:
        load_run(None, ["task=tokenizer", *overrides])
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_vocabulary_has_the_size_of_beit():
    assert load_run(None, ["task=tokenizer", "model.num_classes=null"]).task.codes == 8192
