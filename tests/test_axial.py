"""Axial attention: patches within their row, then within their column."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import scrambled

from vitray.config import Model, Run
from vitray.errors import ConfigError
from vitray.inspection import attention_distances, tensor_changes
from vitray.inspection.levels import run_levels
from vitray.models.branches import AXES, join_lines, split_lines, spread_weights
from vitray.models.positions import VisiblePatches
from vitray.models.vit import ViT
from vitray.tasks.build import build_task
from vitray.weights.folder import LoadedModel, repatched
from vitray.weights.pretrained import adapt

AXIAL = {"attention": "axial", "class_token": False, "pool": "mean"}
GRID = (2, 3)
each_axis = pytest.mark.parametrize("axis", AXES)


def network(**settings) -> ViT:
    """A network of random parameters on 2 x 3 patches of 8 pixels, in float64."""
    tiny = {"name": "vit_u2x1_8", "image_size": (16, 24), "num_classes": 5}
    return scrambled(ViT(Model.model_validate(tiny | AXIAL | settings))).double()


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 16, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@each_axis
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), batch=st.integers(1, 3), heads=st.integers(1, 2))
def test_lines_hold_the_patches_of_a_row_or_column(axis, rows, columns, batch, heads):
    grid = rows, columns
    x_BHNd = torch.randn(batch, heads, rows * columns, 2)
    lines = split_lines(x_BHNd, axis, grid)
    assert torch.equal(join_lines(lines, axis, grid), x_BHNd)
    count, length = grid if axis == "rows" else grid[::-1]
    assert lines.shape == (batch * count, heads, length, 2)
    for image in range(batch):
        for row in range(rows):
            for column in range(columns):
                line, place = (row, column) if axis == "rows" else (column, row)
                patch = x_BHNd[image, :, row * columns + column]
                assert torch.equal(lines[image * count + line, :, place], patch)


@each_axis
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), batch=st.integers(1, 3))
def test_spread_weights_act_on_all_patches_as_the_weights_of_lines_do(axis, rows, columns, batch):
    grid = rows, columns
    v_BHNd = torch.randn(batch, 2, rows * columns, 3, dtype=torch.float64)
    v_XHLd = split_lines(v_BHNd, axis, grid)
    weights_XHLL = torch.randn(*v_XHLd.shape[:3], v_XHLd.shape[2], dtype=torch.float64).softmax(-1)
    weights_BHNN = spread_weights(weights_XHLL, axis, grid)
    torch.testing.assert_close(weights_BHNN @ v_BHNd, join_lines(weights_XHLL @ v_XHLd, axis, grid))
    torch.testing.assert_close(weights_BHNN.sum(-1), torch.ones(v_BHNd.shape[:3], dtype=torch.float64))
    assert int((weights_BHNN > 0).sum()) == weights_XHLL.numel()


@pytest.mark.parametrize("execution", ["loop", "fused"])
@torch.no_grad()
def test_a_patch_reaches_its_row_in_one_level_and_all_patches_in_two(execution):
    vit, x = network(name="vit_u2x2_8"), images(1)
    vit.execution = execution
    other = x.clone()
    other[:, :, 8:16, 16:24] += 1  # row 1, column 2
    reached = [
        (first.output - second.output).abs().amax(dim=(0, 2)).view(GRID) > 1e-9
        for first, second in zip(run_levels(vit, x), run_levels(vit, other), strict=True)
    ]
    assert reached[0].tolist() == [[False] * 3, [True] * 3]
    assert reached[1].all()


def test_entropy_and_distance_are_those_of_lines():
    vit = network(positions="none")
    for branch in (block.attn1 for block in vit.blocks):
        torch.nn.init.zeros_(branch.qkv.weight)
    spread = attention_distances(vit, images(2))
    # Uniform within a row of 3 and a column of 2. The mean distance of two patches of 3 is (2 x 0 ... 2) 8 pixels / 9.
    for level, (length, distance) in enumerate([(3, 8 * 8 / 9), (2, 8 / 2)]):
        torch.testing.assert_close(spread.entropy[level], torch.full_like(spread.entropy[level], length).log())
        torch.testing.assert_close(spread.distance[level], torch.full_like(spread.distance[level], distance))


def test_some_of_the_patches_are_no_rows_and_columns():
    vit = network()
    with pytest.raises(ValueError, match="axial attention needs whole rows and columns"):
        vit.encode(torch.randn(1, 4, 64).double(), VisiblePatches(GRID, torch.arange(4)[None]))


def test_weights_do_not_fit_another_attention():
    vit = network()
    plain = Model.model_validate(vit.model.model_dump() | {"attention": "global"})
    with pytest.raises(ConfigError, match=r'model\.attention: got "axial", expected "global"'):
        adapt(vit, plain, "w", new_head=False)


def test_another_patch_size_has_the_rows_and_columns_of_its_grid():
    vit = network()
    run = Run().replace({"model": vit.model.model_dump(mode="json")})
    loaded = repatched(LoadedModel(run, vit.float(), ()), 4, "w")
    assert loaded.vit.model.grid == (4, 6)
    assert loaded.vit(images(2).float()).shape == (2, 5)


def test_changes_of_axial_networks_compare_no_level_with_a_branch():
    changes = tensor_changes(network(name="vit_u4x1_8"), network(name="vit_u2x2_8"))
    statuses = {each.name: each.status for each in changes}
    assert statuses["blocks.0.attn2.out.weight"] == "new"
    assert statuses["blocks.3.attn1.out.weight"] == "gone"


# ---- training --------------------------------------------------------------------------------------------------------


def task_of_a_worker() -> torch.nn.Module:
    torch.manual_seed(0)
    model = {"name": "vit_u2x1_8", "image_size": (16, 24), "num_classes": 5} | AXIAL
    return build_task(Run().replace({"model": Model.model_validate(model).model_dump(mode="json")})).train()


def step(task: torch.nn.Module, rows: slice) -> dict[str, torch.Tensor]:
    """Return the parameters after one step on some of eight images."""
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    labels = torch.nn.functional.one_hot(torch.arange(8) % 5, 5).float()
    task(images(8).float()[rows], labels[rows]).backward()
    optimizer.step()
    return {name.removeprefix("module."): each.detach() for name, each in task.named_parameters()}


def test_a_step_moves_every_parameter():
    before = {name: each.detach().clone() for name, each in task_of_a_worker().named_parameters()}
    after = step(task_of_a_worker(), slice(None))
    assert [name for name, each in after.items() if torch.equal(before[name], each)] == []
