"""The figures of filters, positions, similarity, token lengths, weights and changes: their tables and pictures."""

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from networks import scrambled
from PIL import Image
from sklearn.decomposition import PCA

from vitray.config import Model
from vitray.config.augmentation import Normalize
from vitray.inspection import cka, level_grams, position_similarity, stem_filters, tensor_changes, token_norms
from vitray.inspection.positions import relative_terms
from vitray.inspection.report.drawings import tiled
from vitray.inspection.report.figures import FIGURES, make_figure
from vitray.inspection.report.figures.changes import relative_by_kind
from vitray.inspection.report.figures.components import colors_of, principal_components
from vitray.inspection.report.measuring import joined_values, measure_views
from vitray.inspection.report.subjects import ChosenImages, Subject, View
from vitray.models.vit import ViT
from vitray.pages.plotting import DARK, LIGHT, to_png


def subject(label="base", count=6, seed=0, **settings) -> Subject:
    model = Model.model_validate(
        {"name": "vit_u2x2_8", "image_size": (16, 24), "num_classes": 5, "layerscale": 0.1, **settings}
    )
    pixels = np.random.default_rng(0).integers(0, 256, (count, *model.image_shape, 3), dtype=np.uint8)
    spec = SimpleNamespace(normalize=Normalize(), size=model.image_shape)
    chosen = ChosenImages("noise", "memory", "abcdef01" * 8, [], range(count), [], (), count)
    return Subject(label, spec, scrambled(ViT(model), seed), chosen, pixels)


def measured(*subjects: Subject) -> list[Subject]:
    """Subjects with the values of all their images as one chunk."""
    views = [View(each.vit, each.batch(), None) for each in subjects]
    views = [views[0], *(view._replace(base=views[0]) for view in views[1:])]
    values = measure_views(views, [name for name, figure in FIGURES.items() if figure.measure])
    return [
        each._replace(measured={name: joined_values([parts], place) for name, parts in values.items()})
        for place, each in enumerate(subjects)
    ]


def cells(result, table: int = 0) -> list:
    rows = result.tables[table].rows
    assert len({len(row) for row in rows}) == 1
    return rows


def gray(drawing, theme) -> np.ndarray:
    figure = drawing.draw(theme)
    figure.set_dpi(50)  # faster
    return np.asarray(Image.open(io.BytesIO(to_png(figure))).convert("L"))


def check_pictures(result, number: int) -> None:
    """Each picture is drawn in both themes, in the same size, and shows something."""
    assert len({drawing.file for drawing in result.drawings}) == len(result.drawings) == number
    for drawing in result.drawings:
        light, dark = (gray(drawing, theme) for theme in (LIGHT, DARK))
        assert light.shape == dark.shape
        assert light[0, 0] > 200 > 50 > dark[0, 0]
        assert all((image != image[0, 0]).mean() > 0.01 for image in (light, dark))


def test_filters_are_drawn_and_listed():
    result = make_figure("filters", [subject(), subject("other", name="vit_u2x1_16_hmlp_bn", image_size=32)])
    check_pictures(result, 2)
    assert "28 components of 8 x 8 pixels" in result.drawings[0].caption
    assert "not linear" not in result.drawings[0].caption
    assert "at an image of one color, the mean of noise (identity abcdef01)" in result.drawings[1].caption
    rows = cells(result)
    assert (len(rows), len(rows[0])) == (29, 2 + 3 * 8 * 8)
    wanted = stem_filters(subject().vit).components
    assert float(rows[3][2 + 64 + 8 * 2 + 5]) == pytest.approx(float(wanted.components[2, 1, 2, 5]), rel=1e-5)
    assert rows[0][2 + 64 + 8 * 2 + 5] == "1_2_5"
    without_images = make_figure("filters", [subject(name="vit_u2x1_16_conv", image_size=32)._replace(images=None)])
    assert without_images.drawings[0].caption.endswith("the mean of the normalization.")


def test_positions_are_drawn_where_there_are_any():
    result = make_figure("positions", [subject(), subject("none", positions="none")])
    check_pictures(result, 1)
    assert result.prose.endswith("none has no position embedding.")
    wanted = position_similarity(subject().vit)
    assert float(cells(result)[1 + 3 + 1][3 + 2]) == pytest.approx(float(wanted[1, 1, 0, 2]), abs=1e-6)
    check_pictures(make_figure("positions", [subject(image_size=(160, 240))]), 1)


def test_positions_of_every_level_are_drawn():
    each = subject("each", positions={"kind": "learned", "where": "levels"})
    result = make_figure("positions", [each])
    check_pictures(result, 1)
    assert "learned positions, those of each level, on a grid" in result.drawings[0].caption
    rows, wanted = cells(result), position_similarity(each.vit, level=1)
    patches = wanted.shape[0] * wanted.shape[1]
    assert len(rows) == 1 + len(each.vit.blocks) * patches
    assert [float(cell) for cell in rows[1 + patches + 1][3:]] == pytest.approx(
        wanted[0, 1].flatten().tolist(), abs=1e-6
    )
    shared = make_figure("positions", [subject("shared", positions={"kind": "learned", "where": "shared"})])
    assert "added before every level" in shared.drawings[0].caption


def test_positions_inside_attention_are_drawn_too():
    rotary = subject("rotary", positions="rope")
    result = make_figure("positions", [rotary])
    check_pictures(result, 1)
    assert "a query and a key whose channels are all 1, after their rotation" in result.drawings[0].caption
    assert float(cells(result)[1][3]) == pytest.approx(1)
    relative = subject("relative", positions="relative", class_token=False, pool="mean")
    result = make_figure("positions", [relative])
    check_pictures(result, 1)
    assert "over noise" not in result.drawings[0].caption
    assert "adds to the logit, as the mean over images and all pairs of patches" in result.drawings[0].caption
    rows, terms = cells(result), relative_terms(relative.vit, relative.batch())
    assert (len(rows), rows[0][3], rows[0][-1]) == (1 + 2 * 2 * terms.shape[2], "offset_-5", "offset_5")
    assert rows[1][3:] == pytest.approx(terms[0, 0, 0].tolist())
    without = make_figure("positions", [relative._replace(images=None)])
    check_pictures(without, 1)
    assert "the length of the learned key of each offset" in without.drawings[0].caption


def test_similarity_is_drawn_for_each_network_and_the_pair():
    both = [subject(), subject("other", seed=1, name="vit_u3x1_8")]
    result = make_figure("similarity", measured(*both))
    check_pictures(result, 3)
    wanted = cka(*(level_grams(each.vit, each.batch()) for each in both))
    rows = cells(result, 2)
    assert [len(rows), len(rows[0])] == [1 + 3, 1 + 4]
    assert float(rows[2][3]) == pytest.approx(float(wanted[1, 2]), abs=1e-6)
    few = make_figure("similarity", measured(subject(count=3)))
    assert few.drawings == []
    assert few.prose.endswith("It needs at least 4 images.")


def test_token_lengths_are_drawn_with_the_patches_that_stand_out():
    only = subject(class_token=False, pool="mean")
    only.vit.stem.proj[0].weight.data[:] = 0.2
    only.images[2, :8, 8:16], only.images[only.images > 140] = 255, 140
    only.images[2, :8, 8:16] = 255
    result = make_figure("norms", measured(only))
    check_pictures(result, 1)
    norms = token_norms(only.vit, only.batch())
    assert [int(row[6]) for row in cells(result)[1:]] == norms.is_outlier.sum(dim=(1, 2)).tolist()
    assert norms.is_outlier[0].nonzero().tolist() == [[2, 1]]
    assert float(cells(result)[1][2]) == pytest.approx(float(np.median(norms.patches[0])), rel=1e-6)
    check_pictures(make_figure("norms", measured(subject())), 1)


def test_patches_are_colored_by_their_principal_components():
    only = subject(count=5)
    shown = [SimpleNamespace(key=f"image {place}") for place in range(5)]
    only = only._replace(chosen=replace(only.chosen, shown=shown))
    result = make_figure("components", [only])
    check_pictures(result, 1)
    vit, images = only.vit, only.batch()
    features = vit.norm(vit.tokens(images)[:, vit.num_prefix :]).detach().double().numpy()  # 5 x 6 x 128
    reference = PCA(3).fit(features.reshape(30, -1))
    axes = reference.components_ * np.sign(
        np.take_along_axis(reference.components_, np.abs(reference.components_).argmax(1)[:, None], 1)
    )
    wanted = (features.reshape(30, -1) - reference.mean_) @ axes.T
    rows = cells(result)
    assert rows[1 + 6 + 4][:3] == ["image 1", 1, 1]
    np.testing.assert_allclose([row[3:] for row in rows[1:]], wanted, atol=1e-4)
    shares = ", ".join(f"{share:.0%}" for share in reference.explained_variance_ratio_)
    assert result.drawings[0].caption.endswith(f"the components have {shares} of the variance.")


def test_colors_of_components_share_a_scale_and_equal_patches_are_gray():
    values = np.zeros((2, 2, 2, 3))
    values[1, :, :, 0] = [[1, 2], [3, 400]]
    colors = colors_of(values)
    assert (colors[..., 1:] == 0.5).all()
    assert (colors[0, ..., 0] == 0).all()
    assert colors[1, 1, 1, 0] == 1
    few = principal_components(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    np.testing.assert_allclose(few.values, [[1, 0, 0], [-1, 0, 0]])
    np.testing.assert_allclose(few.shares, [1, 0, 0])


def test_weights_are_drawn_and_listed():
    result = make_figure("layerscale", [subject(), subject("plain", layerscale=None)])
    check_pictures(result, 1)
    assert result.prose.endswith("plain has no LayerScale.")
    scale = np.abs(subject().vit.blocks[1].attn2.scale.detach().numpy())
    found = {tuple(row[:2]): row for row in cells(result)}
    assert float(found[1, "attn2"][3]) == pytest.approx(np.median(scale), rel=1e-5)
    result = make_figure("spectra", [subject()])
    check_pictures(result, 1)
    values = np.linalg.svd(subject().vit.blocks[0].ffn2.up.weight.detach().numpy(), compute_uv=False)
    found = {row[0]: row for row in cells(result)}
    assert [float(cell) for cell in found["blocks.0.ffn2.up.weight"][6:]] == pytest.approx(values, rel=1e-4)


def test_changes_of_fine_tuned_attention_are_drawn_and_listed():
    base, tuned = subject(), subject("tuned")
    for block in tuned.vit.blocks:
        block.attn1.qkv.weight.data += 0.1
    result = make_figure("changes", [base, tuned])
    check_pictures(result, 2)
    assert "6 tensors changed" in result.drawings[0].caption
    found = {row[0]: row for row in cells(result)}
    row = found["blocks.1.attn1.qkv.weight (value)"]
    wanted = 0.1 * 64 / float(base.vit.blocks[1].attn1.qkv.weight.detach()[128:].norm())
    assert row[4] == "changed"
    assert float(row[7]) == pytest.approx(wanted, rel=1e-4)
    features = make_figure("features", measured(base, tuned))
    check_pictures(features, 1)
    assert [float(cell) for cell in cells(features)[1][1:]] == pytest.approx([0, 0, 0, 1, 1, 1])


def test_changes_of_equal_networks_and_of_other_shapes():
    result = make_figure("changes", [subject(), subject("same")])
    check_pictures(result, 1)
    assert {row[4] for row in cells(result)[1:]} == {"equal"}
    other = subject("other", name="vit_ti1x1_8")
    assert make_figure("changes", [subject(), other]).prose.endswith(
        "The levels of the two networks have no tensor in common."
    )
    assert "other has 1 levels with a class token" in make_figure("features", measured(subject(), other)).prose


def test_changes_of_a_kind_join_the_branches_of_a_level():
    base, other = subject().vit, subject(seed=1).vit
    squares = [0.0, 0.0]
    for branch in ("attn1", "attn2"):
        old, new = (getattr(vit.blocks[1], branch).out for vit in (base, other))
        for name in ("weight", "bias"):
            a, b = (getattr(layer, name).detach().double().numpy() for layer in (old, new))
            squares = [squares[0] + ((b - a) ** 2).sum(), squares[1] + (a**2).sum()]
    found = relative_by_kind(tensor_changes(base, other))
    assert found[1, "output"] == pytest.approx((squares[0] / squares[1]) ** 0.5)
    base.head.bias.data.zero_()
    base.head.weight.data.zero_()
    assert np.isnan(relative_by_kind(tensor_changes(base, other))[None, "head"])


def test_tiles_lie_in_rows_and_columns_with_gaps():
    tiles = np.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2, 1)
    image = tiled(tiles, -1)[..., 0]
    assert image.shape == (5, 8)
    assert (image[2] == -1).all()
    assert (image[:, [2, 5]] == -1).all()
    assert image[3:, 6:].tolist() == tiles[1, 2, ..., 0].tolist()
