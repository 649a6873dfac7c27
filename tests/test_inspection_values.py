"""Filters, positions, similarity, token norms, spectra and changes against independent definitions in float64."""

import cmath
import itertools
import math

import numpy as np
import pytest
import torch
from networks import scrambled
from sklearn.decomposition import PCA
from transformers import ViTConfig, ViTForImageClassification

from vitray.config import Model
from vitray.errors import ConfigError
from vitray.inspection import levels
from vitray.inspection import similarity as similarity_module
from vitray.inspection import tokens as tokens_module
from vitray.inspection.changes import feature_changes, tensor_changes
from vitray.inspection.filters import (
    effective_stem,
    first_filters,
    linear_share,
    principal_components,
    receptive_field,
    stem_filters,
)
from vitray.inspection.levels import run_levels
from vitray.inspection.positions import position_similarity, relative_lengths, relative_terms
from vitray.inspection.similarity import cka, gram, hsic, level_grams, u_centered
from vitray.inspection.tensors import KINDS, layerscales, named_tensors, spectra
from vitray.inspection.tokens import chunks, run_states, token_norms
from vitray.models.positions import resample
from vitray.models.vit import ViT, regroup
from vitray.tasks.build import recompute_activations
from vitray.weights import import_weights

STEMS = ("linear", "linear_bn", "linear_gelu", "linear_bn_gelu", "hmlp_bn", "hmlp_ln", "conv", "conv_ln", "local")


def network(name="vit_u2x1_8", seed=0, dtype=torch.float64, **settings) -> ViT:
    model = Model.model_validate({"name": name, "image_size": (16, 24), "num_classes": 5, **settings})
    return scrambled(ViT(model), seed).to(dtype)


def images(count=6, height=16, width=24, dtype=torch.float64, seed=3) -> torch.Tensor:
    return torch.randn(count, 3, height, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def array(tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


# ---- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
def test_effective_filters_are_the_jacobian_of_the_stem(stem):
    vit, color = network(f"vit_u1x1_16_{stem}", image_size=48), torch.tensor([0.3, -0.2, 0.1])
    image = color.double()[:, None, None].expand(3, 48, 48).clone()
    middle = 4  # of 3 x 3 patches

    # Two copies: torch 2.15's batch norm has wrong gradients on a CPU for one image and transposed gradients.
    jacobian = torch.autograd.functional.jacobian(
        lambda pixels: vit.stem(pixels.expand(2, 3, 48, 48))[0][0, middle], image
    )
    effective = effective_stem(vit, color)
    start, size = effective.field
    inside = slice(16 + start, 16 + start + size)
    torch.testing.assert_close(effective.filters, jacobian[..., inside, inside])
    outside = jacobian.clone()
    outside[..., inside, inside] = 0
    assert not outside.any()
    torch.testing.assert_close(
        effective.bias + (jacobian * image).sum(dim=(1, 2, 3)), vit.stem(image[None])[0][0, middle]
    )
    # The image is so constructed that no derivative is zero by chance, so the field is as small as possible.
    assert all(jacobian[..., row, :].any() and jacobian[..., :, row].any() for row in (inside.start, inside.stop - 1))


def test_a_stem_with_max_pools_has_only_the_filters_of_its_first_convolution():
    vit = network("vit_u1x1_8_pooled")
    with pytest.raises(ConfigError, match="its max pools choose among equal values"):
        effective_stem(vit, torch.zeros(3))
    assert torch.equal(first_filters(vit), vit.stem.proj[0].weight)
    # The receptive field from the pixels that change a token: all but its borders, of 3 x 3 patches.
    image = torch.zeros(1, 3, 72, 72, dtype=torch.float64)
    start, size = receptive_field(vit)
    for pixel, reaches in ((start - 1, False), (start, True), (start + size - 1, True), (start + size, False)):
        changed = image.clone()
        changed[..., 32 + pixel, 32 + pixel] = 1e3
        assert bool((vit.stem(changed)[0][0, 40] - vit.stem(image)[0][0, 40]).any()) == reaches, pixel


def test_effective_filters_equal_finite_differences():
    vit = network("vit_u1x1_16_conv", image_size=48)
    effective, image = effective_stem(vit, torch.zeros(3)), torch.zeros(1, 3, 48, 48, dtype=torch.float64)
    for channel, row, column in [(0, 1, 1), (1, 16, 20), (2, 31, 30)]:
        image[0, channel, row, column] = 1e-4
        slope = (vit.stem(image)[0][0, 4] - vit.stem(-image)[0][0, 4]) / 2e-4
        image.zero_()
        torch.testing.assert_close(effective.filters[:, channel, row - 1, column - 1], slope, rtol=1e-6, atol=1e-9)


def test_filters_of_a_linear_stem_are_its_weights_at_any_color():
    vit = network("vit_u1x1_8")
    for color in (torch.zeros(3), torch.tensor([1.0, -1.0, 0.5])):
        effective = effective_stem(vit, color)
        torch.testing.assert_close(effective.filters, vit.stem.proj[0].weight.detach())
        torch.testing.assert_close(effective.bias, vit.stem.proj[0].bias.detach())
    assert receptive_field(vit) == (0, 8)
    assert linear_share(vit, images(), effective) == pytest.approx(1)
    assert stem_filters(vit).linear_share is None


def test_filters_leave_no_gradient_behind():
    vit = network("vit_u1x1_16_hmlp_bn", image_size=48)
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    stem_filters(vit, images(2, 48, 48))
    assert all(parameter.grad is None for parameter in vit.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in vit.state_dict().items())


@pytest.mark.parametrize("stem", ["linear_gelu", "hmlp_ln", "conv"])
def test_the_linear_share_is_that_of_a_loop_over_tokens(stem, monkeypatch):
    monkeypatch.setattr(tokens_module, "MAX_STATE_BYTES", 1)  # image by image
    vit, batch = network(f"vit_u1x1_16_{stem}", image_size=48), 0.05 * images(3, 48, 64)
    effective = effective_stem(vit, batch.mean(dim=(0, 2, 3)))
    start, size = effective.field
    padded = torch.zeros(3, 3, 48 + 64, 64 + 64, dtype=torch.float64)
    padded[..., 32:80, 32:96] = batch
    wanted, got = [], []
    for image, tokens in zip(padded, vit.stem(batch)[0].detach(), strict=True):
        for place, token in enumerate(tokens):
            row, column = 32 + start + 16 * (place // 4), 32 + start + 16 * (place % 4)
            window = image[:, row : row + size, column : column + size]
            got.append(array(effective.bias + (effective.filters * window).sum(dim=(1, 2, 3))))
            wanted.append(array(token))
    error = ((np.array(wanted) - np.array(got)) ** 2).sum()
    share = 1 - error / ((np.array(wanted) - np.mean(wanted, axis=0)) ** 2).sum()
    assert linear_share(vit, batch, effective) == pytest.approx(share)
    assert share < 1


@pytest.mark.parametrize("shape", [(64, 3, 4, 4), (20, 3, 8, 8)])
def test_components_equal_those_of_the_covariance(shape):
    filters = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    got = principal_components(filters, 10)
    wanted = PCA(10, svd_solver="full").fit(array(filters.flatten(1)))
    flat = array(got.components.flatten(1))
    assert got.shares.tolist() == pytest.approx(wanted.explained_variance_ratio_)
    assert np.abs((flat * wanted.components_).sum(1)) == pytest.approx(1)
    covariance = np.cov(array(filters.flatten(1)).T)
    assert (flat @ covariance @ flat.T).diagonal() == pytest.approx(np.linalg.eigvalsh(covariance)[::-1][:10])
    assert (flat[np.arange(10), np.abs(flat).argmax(1)] > 0).all()


# ---- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "positions", ["learned", {"kind": "sincos2d"}, {"kind": "sincos2d", "frequencies": "big_vision"}]
)
@pytest.mark.parametrize("grid", [None, (4, 2)])
def test_position_similarity_equals_a_loop_over_pairs(positions, grid):
    vit = network(positions=positions)
    got = position_similarity(vit, grid)
    rows, columns = grid or (2, 3)
    table = vit.positions.table.detach()
    if grid and positions == "learned":
        table = resample(table, (2, 3), grid, "deit")
    elif grid:
        table = network(positions=positions, image_size=(32, 16)).positions.table
    table = table.tolist()
    assert got.shape == (rows, columns, rows, columns)
    for a in range(rows * columns):
        for b in range(rows * columns):
            dot = math.fsum(x * y for x, y in zip(table[a], table[b], strict=True))
            lengths = [math.sqrt(math.fsum(x * x for x in table[place])) for place in (a, b)]
            cell = got[a // columns, a % columns, b // columns, b % columns]
            assert float(cell) == pytest.approx(dot / lengths[0] / lengths[1], abs=1e-6)


@pytest.mark.parametrize("where", ["stem", "shared", "levels"])
def test_position_similarity_of_a_level_is_of_the_table_added_before_it(where):
    vit = network(positions={"kind": "learned", "where": where})
    own = vit.level_positions[0] if where == "levels" else vit.positions
    table = own.table.detach().double()
    got = position_similarity(vit, level=1).view(len(table), len(table))
    assert torch.allclose(got, torch.nn.functional.cosine_similarity(table[:, None], table[None], dim=2))
    with pytest.raises(ValueError, match=f"got level {len(vit.blocks)}, expected 0 to {len(vit.blocks) - 1}"):
        position_similarity(vit, level=len(vit.blocks))


def test_a_network_without_positions_has_no_similarity():
    assert position_similarity(network(positions="none")) is None


@pytest.mark.parametrize("grid", [None, (4, 2)])
def test_rotary_similarity_is_that_of_turned_numbers(grid):
    """Two channels are a complex number, turned by angles of its column or its row."""
    vit = network(positions={"kind": "rope", "base": 50})
    got, (rows, columns) = position_similarity(vit, grid), grid or (2, 3)
    omega = [50 ** (-4 * k / vit.model.head_size) for k in range(vit.model.head_size // 4)]

    def turned(row, column):
        return [(1 + 1j) * cmath.exp(1j * at * w) for at in (column, row) for w in omega]

    for a in range(rows * columns):
        for b in range(rows * columns):
            first, second = turned(*divmod(a, columns)), turned(*divmod(b, columns))
            dot = sum((x * y.conjugate()).real for x, y in zip(first, second, strict=True))
            cell = got[a // columns, a % columns, b // columns, b % columns]
            assert float(cell) == pytest.approx(dot / vit.model.head_size, abs=1e-6)


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_relative_terms_equal_a_loop_over_pairs(qk_norm, monkeypatch):
    monkeypatch.setattr(levels, "MAX_ATTENTION_BYTES", 2 * 8 * 36 * 2)  # two images at a time
    vit = network("vit_u2x2_8", positions="relative", class_token=False, pool="mean", qk_norm=qk_norm)
    batch = images(5)
    got = relative_terms(vit, batch)
    inputs = []
    for block in vit.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    vit(batch)
    assert got.shape == (2, 2, vit.model.num_heads, 11)
    size, sums, counts = vit.model.head_size, np.zeros(got.shape), np.zeros(got.shape)
    for level, branch, image in itertools.product(range(2), range(2), range(5)):
        own = vit.blocks[level].attentions[branch]
        query_ND = own.qkv(own.norm(inputs[level][image]))[:, :64]
        for head, query, key in itertools.product(range(vit.model.num_heads), range(6), range(6)):
            q_d = query_ND[query, head * size : (head + 1) * size]
            q_d = own.q_norm(q_d) if qk_norm else q_d
            place = level, branch, head, query - key + 5
            sums[place] += float(q_d @ own.relative[query - key + 5]) / math.sqrt(size)
            counts[place] += 1
    np.testing.assert_allclose(got, sums / counts, atol=1e-9)
    lengths = relative_lengths(vit)
    assert float(lengths[1, 0, 3]) == pytest.approx(np.linalg.norm(array(vit.blocks[1].attn1.relative)[3]))
    assert relative_terms(network(), batch) is relative_lengths(network()) is None


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"class_token": False, "pool": "mean"}, {"name": "vit_u2x3_8"}])
def test_states_lead_to_the_same_bits_as_the_network(settings):
    vit, batch = network(dtype=torch.float32, **settings), images(dtype=torch.float32)
    with torch.no_grad():
        passed = list(run_states(vit, batch))
        assert torch.equal(passed[-1], vit.tokens(batch))
    assert len(passed) == len(vit.blocks) + 1


@pytest.mark.parametrize("part", ["blocks", "feedforward"])
def test_a_network_that_recomputes_its_blocks_has_the_same_states(part):
    plain, recomputing = network(), network()
    recompute_activations(recomputing, part)
    for one, other in zip(run_levels(plain, images()), run_levels(recomputing, images()), strict=True):
        assert torch.equal(one.output, other.output)


def test_training_mode_is_rejected():
    for function in (token_norms, level_grams, stem_filters):
        with pytest.raises(ValueError, match="training mode"):
            function(network().train(), images())


# ---- similarity ------------------------------------------------------------------------------------------------------


def song_hsic(x, y):
    """The unbiased estimator of Song et al. (2007), from full Gram matrices."""
    n, one = len(x), np.ones(len(x))
    x, y = x - np.diag(np.diag(x)), y - np.diag(np.diag(y))
    sums = one @ x @ one * (one @ y @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ x @ y @ one)
    return (np.trace(x @ y) + sums) / (n * (n - 3))


def features_of(vit, batch, reading) -> list[np.ndarray]:
    with torch.no_grad():
        passed = list(run_states(vit, batch))
    if reading == "tokens":
        return [array(state.flatten(1)) for state in passed]
    first = 0 if vit.class_token is None else 1
    return [array(state[:, 0] if vit.model.pool == "token" else state[:, first:].mean(1)) for state in passed]


@pytest.mark.parametrize("reading", ["tokens", "pooled"])
@pytest.mark.parametrize("at_once", [1, 10**9])
def test_cka_equals_its_definition_with_full_gram_matrices(reading, at_once, monkeypatch):
    monkeypatch.setattr(tokens_module, "MAX_STATE_BYTES", at_once)
    monkeypatch.setattr(similarity_module, "TOKENS_AT_ONCE", 4)
    batch, of_other = images(11), images(11, 32, 16, seed=9)
    first, second = network("vit_u3x1_8", class_token=False, pool="mean"), network("vit_s2x2_8", 1, image_size=(32, 16))
    sums = np.zeros((3, 4, 3))
    for start, stop in [(0, 6), (6, 11)]:
        x = [f @ f.T for f in features_of(first, batch[start:stop], reading)]
        y = [f @ f.T for f in features_of(second, of_other[start:stop], reading)]
        for j, k in np.ndindex(4, 3):
            sums[:, j, k] += song_hsic(x[j], y[k]), song_hsic(x[j], x[j]), song_hsic(y[k], y[k])
    with np.errstate(invalid="ignore"):  # the class token before the first level has a variance of about zero
        wanted = sums[0] / np.sqrt(sums[1] * sums[2])
    grams = level_grams(first, batch, reading, 6), level_grams(second, of_other, reading, 6)
    got = cka(*grams)
    if reading == "pooled":  # the class token before the first level
        assert got[:, 0].isnan().all()
        got, wanted = got[:, 1:], wanted[:, 1:]
    np.testing.assert_allclose(array(got), wanted, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(array(cka(grams[0], grams[0]).diagonal()), 1)


def test_mini_batches_estimate_the_cka_of_all_images():
    # Kornblith's CKA with centered features, of so many images that its bias is small.
    generator = np.random.default_rng(0)
    x = generator.normal(size=(6000, 8))
    y = np.concatenate([x[:, :5] @ generator.normal(size=(5, 5)), generator.normal(size=(6000, 4))], axis=1)
    a, b = x - x.mean(0), y - y.mean(0)
    wanted = np.linalg.norm(a.T @ b) ** 2 / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
    for size in (5, 50):
        parts = [
            [torch.tensor(each[start : start + size])[:, None] for start in range(0, 6000, size)] for each in (x, y)
        ]
        grams = [[u_centered(gram([part]))[None] for part in each] for each in parts]
        assert float(cka(*grams)) == pytest.approx(wanted, abs=0.02)


def test_cka_does_not_depend_on_rotation_scale_and_shift():
    x = torch.randn(12, 1, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotation = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    grams = [[u_centered(gram([each]))[None]] for each in (x, 3 * x @ rotation + 100)]
    assert float(cka(*grams)) == pytest.approx(1)
    assert u_centered(gram([x])).sum(dim=1).tolist() == pytest.approx([0] * 12)


def test_hsic_of_independent_features_is_zero_on_average():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 2000, 5, 1, 3, dtype=torch.float64, generator=generator)
    values = torch.stack([hsic(*(u_centered(gram([x]))[None] for x in pair)) for pair in zip(*draws, strict=True)])
    assert abs(float(values.mean())) < 4 * float(values.std()) / 2000**0.5


def test_too_few_images_are_one_message():
    with pytest.raises(ValueError, match="got 7 images in 2 mini-batches, expected at least 4 in each"):
        level_grams(network(), images(7), batch=6)
    with pytest.raises(ValueError, match="got 0 images"):
        level_grams(network(), images(0))


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_norms_are_those_of_each_token_in_parts_of_any_size(monkeypatch):
    vit, batch = network("vit_u2x2_8"), images()
    whole = token_norms(vit, batch)
    monkeypatch.setattr(tokens_module, "MAX_STATE_BYTES", 1)
    assert len(chunks(vit, batch)) == 6
    with torch.no_grad():
        passed = list(run_states(vit, batch))
    for got in (whole, token_norms(vit, batch)):
        for state, image, patch in np.ndindex(3, 6, 6):
            wanted = np.linalg.norm(array(passed[state][image, 1 + patch]))
            assert float(got.patches[state, image, patch]) == pytest.approx(wanted)
        assert array(got.class_token) == pytest.approx(np.linalg.norm(array(torch.stack(passed)[:, :, 0]), axis=2))
    assert token_norms(network(class_token=False, pool="mean"), batch).class_token is None


def test_planted_registers_stand_out():
    vit, batch = network(dtype=torch.float32), 0.1 * images(dtype=torch.float32)
    vit.stem.proj[0].bias.data += 1
    batch[2, :, 8:16, 0:8] *= 200  # the fourth patch
    batch[4, :, 0:8, 16:24] *= 200
    got = token_norms(vit, batch)
    assert got.is_outlier[0].nonzero().tolist() == [[2, 3], [4, 2]]
    wanted = np.median(array(got.patches[0]))
    assert float(got.median[0]) == pytest.approx(wanted, rel=0.05)  # torch takes the lower of two in the middle


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_every_tensor_has_a_kind():
    settings = {"layerscale": 0.1, "head": "mlp", "registers": 2, "qk_norm": True, "adapters": 4}
    vit = network("vit_u2x2_8_hmlp_bn", **settings, distillation_token=True)
    found = list(named_tensors(vit.state_dict()))
    assert {each.kind for each in found} == set(KINDS) - {"convolution", "linear", "statistics", "other"}
    assert len({each.name for each in found}) == len(found)
    floats = [tensor.numel() for tensor in vit.state_dict().values() if tensor.is_floating_point()]
    assert sum(each.values.numel() for each in found) == sum(floats)


def test_layerscales_are_those_of_each_branch():
    vit = network("vit_u2x2_8", layerscale=0.1)
    found = {(each.level, each.branch): each.values for each in layerscales(vit)}
    assert set(found) == {
        (level, f"{kind}{branch}") for level in (0, 1) for kind in ("attn", "ffn") for branch in (1, 2)
    }
    assert torch.equal(found[1, "ffn2"], vit.blocks[1].ffn2.scale)
    assert layerscales(network()) is None


def test_spectra_are_those_of_each_matrix():
    vit = network("vit_u1x2_8")
    found = {each.name: each for each in spectra(vit)}
    assert len(found) == 2 * 6
    query, key, _ = array(vit.blocks[0].attn2.qkv.weight).reshape(3, 64, 64)
    for name, matrix in [("query", query), ("key", key)]:
        values = np.sqrt(np.maximum(np.linalg.eigvalsh(matrix.T @ matrix)[::-1], 0))
        np.testing.assert_allclose(found[f"blocks.0.attn2.qkv.weight ({name})"].values, values, atol=1e-6)


def test_ranks_of_known_spectra():
    vit = network("vit_u1x1_8")
    out, up = vit.blocks[0].attn1.out.weight, vit.blocks[0].ffn1.up.weight
    out.data = torch.linalg.qr(out)[0].detach()
    up.data = torch.outer(torch.arange(256), torch.ones(64)).double()
    vit.blocks[0].ffn1.down.weight.data.zero_()
    found = {each.kind: each for each in spectra(vit)}
    assert (found["output"].effective_rank, found["output"].stable_rank) == pytest.approx((64, 64))
    assert (found["up"].effective_rank, found["up"].stable_rank) == pytest.approx((1, 1), abs=1e-6)
    assert (found["down"].effective_rank, found["down"].stable_rank) == (0, 0)


# ---- changes ---------------------------------------------------------------------------------------------------------


def copy_of(vit, **settings) -> ViT:
    new = ViT(Model.model_validate({**vit.model.model_dump(), **settings})).double().eval()
    new.load_state_dict(vit.state_dict(), strict=False)
    return new


def test_a_low_rank_change_of_one_matrix_is_found_alone():
    base = network("vit_u2x2_8", layerscale=0.1)
    other = copy_of(base)
    left, right = torch.randn(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other.blocks[1].attn2.qkv.weight.data[64:128] += torch.outer(left, right)
    changed = [each for each in tensor_changes(base, other) if each.status != "equal"]
    assert [each.name for each in changed] == ["blocks.1.attn2.qkv.weight (key)"]
    old = array(base.blocks[1].attn2.qkv.weight)[64:128]
    wanted = np.linalg.norm(left) * np.linalg.norm(right) / np.linalg.norm(old)
    assert changed[0].relative == pytest.approx(wanted)
    (spectrum,) = spectra(other, base)
    assert (spectrum.name, spectrum.level, spectrum.branch) == (changed[0].name, 1, "attn2")
    assert spectrum.effective_rank == pytest.approx(1, abs=1e-6)


def test_tensors_that_only_one_network_has_or_of_another_shape_are_named():
    base = network("vit_u2x1_8", class_token=True)
    other = network("vit_u1x1_8", layerscale=0.1, num_classes=7, class_token=False, pool="mean")
    other.blocks[0].ffn1.up.load_state_dict(base.blocks[0].ffn1.up.state_dict())
    statuses = {each.name: each.status for each in tensor_changes(base, other)}
    assert statuses["head.weight"] == "reshaped"
    assert statuses["class_token"] == "gone"
    assert statuses["blocks.0.attn1.scale"] == "new"
    assert statuses["blocks.1.ffn1.up.weight"] == "gone"
    assert statuses["blocks.0.ffn1.up.weight"] == "equal"
    assert {each.relative for each in tensor_changes(base, other) if each.status in ("new", "gone", "reshaped")} == {
        None
    }


def test_layers_in_parallel_are_compared_with_the_same_layers_one_after_the_other():
    """Level 1 of 4x1 is branch 2 of level 0 of 2x2, although both networks have a blocks.1.attn1."""
    base = network("vit_u4x1_8", layerscale=0.1)
    other = regroup(base, 2)
    assert {each.status for each in tensor_changes(base, other)} == {"equal"}
    assert spectra(other, base) == []
    base.blocks[1].ffn1.up.weight.data += 1
    for first, second, name in ((base, other, "blocks.0.ffn2.up.weight"), (other, base, "blocks.1.ffn1.up.weight")):
        [changed] = [each for each in tensor_changes(first, second) if each.status != "equal"]
        assert changed.name == name
        assert changed.change == pytest.approx((256 * 64) ** 0.5)
        assert [each.name for each in spectra(second, first)] == [name]
    assert {each.status for each in tensor_changes(network("vit_u4x1_8"), network("vit_u4x2_8"))} > {"new", "equal"}


def test_positions_of_another_grid_are_compared_with_those_resized():
    base = network()
    other = copy_of(network(seed=1, image_size=(32, 48)))
    wanted, table = resample(base.positions.table, (2, 3), (4, 6), "deit").detach(), other.positions.table.detach()
    found = {each.name: each for each in tensor_changes(base, other)}["positions.table"]
    assert found.relative == pytest.approx(float((table - wanted).norm() / wanted.norm()))


def test_a_change_from_zeros_has_no_relative_size():
    base, other = network(), network(seed=1)
    base.head.bias.data.zero_()
    found = {each.name: each for each in tensor_changes(base, other)}["head.bias"]
    assert (found.base, found.relative) == (0, None)
    assert found.change == pytest.approx(np.linalg.norm(array(other.head.bias)))


def test_feature_changes_equal_a_loop_over_images(monkeypatch):
    base, other = network(), network(seed=1)
    monkeypatch.setattr(tokens_module, "MAX_STATE_BYTES", 1)
    batch, of_other = images(), images(seed=4)
    got = feature_changes(base, other, batch, of_other)
    with torch.no_grad():
        before, after = (array(torch.stack(list(run_states(*pair)))) for pair in ((base, batch), (other, of_other)))
    for state, image in np.ndindex(3, 6):
        old, new = before[state, image], after[state, image]
        assert float(got.relative[state, image]) == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))
        cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(old, new, strict=True)]
        assert float(got.cosine[state, image]) == pytest.approx(np.mean(cosines))


def test_a_network_does_not_change_from_itself():
    vit, batch = network("vit_u2x2_8"), images()
    change = feature_changes(vit, vit, batch)
    assert not change.relative.any()
    torch.testing.assert_close(change.cosine, torch.ones_like(change.cosine))
    assert {each.status for each in tensor_changes(vit, vit)} == {"equal"}
    assert spectra(vit, vit) == []


def test_features_of_other_tokens_are_one_message():
    with pytest.raises(ValueError, match="got 2 levels with a class token and 2 x 3 patches of width 64 and 1 levels"):
        feature_changes(network("vit_u2x2_8"), regroup(network("vit_u2x2_8"), 4), images())


# ---- imported networks -----------------------------------------------------------------------------------------------


def test_an_imported_network_has_the_states_of_its_own_library(tmp_path):
    settings = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, image_size=16, patch_size=8
    )
    theirs = scrambled(ViTForImageClassification(settings))
    theirs.save_pretrained(tmp_path)
    _, vit = import_weights(str(tmp_path / "model.safetensors"), settings={"normalize": {}})
    batch = images(5, 16, 16, torch.float32)
    with torch.no_grad():
        hidden = theirs(batch, output_hidden_states=True).hidden_states
    norms, grams = token_norms(vit, batch), level_grams(vit, batch)
    for state, wanted in enumerate(hidden):
        torch.testing.assert_close(norms.patches[state], wanted[:, 1:].norm(dim=2), rtol=1e-4, atol=1e-5)
        flat = array(wanted.flatten(1))
        similar = song_hsic(flat @ flat.T, flat @ flat.T)
        assert float(hsic(grams[0][state : state + 1], grams[0][state : state + 1])) == pytest.approx(similar, rel=1e-3)
    kernel = theirs.vit.embeddings.patch_embeddings.projection.weight
    wanted = PCA(8, svd_solver="full").fit(array(kernel.flatten(1)))
    assert stem_filters(vit).components.shares[:8].tolist() == pytest.approx(wanted.explained_variance_ratio_, rel=1e-4)
