"""Positions: the published formulas, and tables resized by each library's method."""

import math

import pytest
import torch
import torchvision
from timm.layers import resample_abs_pos_embed

from vitray.config import Learned, NoPositions, SinCos2d, load_run
from vitray.config.classification import Finetune
from vitray.models.positions import RESAMPLE, Positions, resample, sincos2d
from vitray.models.vit import ViT
from vitray.weights import save_model
from vitray.weights.pretrained import open_initial_weights


@pytest.mark.parametrize("frequencies", ["big_vision", "mae"])
def test_sincos2d_equals_its_formula(frequencies):
    rows, columns, width = 3, 5, 16
    table = sincos2d((rows, columns), width, frequencies)
    for row in range(rows):
        for column in range(columns):
            for k in range(width // 4):
                omega = 10000 ** (-k / (width / 4 - (frequencies == "big_vision")))
                expected = [f(at * omega) for at in (column, row) for f in (math.sin, math.cos)]
                got = table[row * columns + column].reshape(4, -1)[:, k]
                torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def table_of(rows, columns, width=8) -> torch.Tensor:
    return torch.randn(rows * columns, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("new", [(7, 7), (24, 24), (10, 21)])
def test_resizing_equals_timms(new):
    table = table_of(14, 14)
    theirs = resample_abs_pos_embed(table[None], list(new), num_prefix_tokens=0)[0]
    torch.testing.assert_close(resample(table, (14, 14), new, "timm"), theirs)


def test_resizing_equals_torchvisions():
    table = table_of(14, 14)
    state = {"encoder.pos_embedding": torch.cat([torch.zeros(1, 8), table])[None]}
    theirs = torchvision.models.vision_transformer.interpolate_embeddings(384, 16, state)
    theirs = theirs["encoder.pos_embedding"][0, 1:]
    torch.testing.assert_close(resample(table, (14, 14), (24, 24), "torchvision"), theirs)


@pytest.mark.parametrize("convention", RESAMPLE)
def test_resizing_keeps_constants_and_rows(convention):
    table = table_of(6, 4)
    assert resample(table, (6, 4), (6, 4), convention) is table
    flat = torch.full((24, 8), 3.0)
    torch.testing.assert_close(resample(flat, (6, 4), (9, 5), convention), torch.full((45, 8), 3.0))
    # A table that depends only on the row is still constant within each row after resizing.
    by_row = torch.arange(6.0).repeat_interleave(4)[:, None].expand(-1, 8)
    resized = resample(by_row, (6, 4), (12, 7), convention).reshape(12, 7, 8)
    torch.testing.assert_close(resized, resized[:, :1].expand(-1, 7, -1))
    assert (resized[1:, 0, 0] > resized[:-1, 0, 0]).all()


def test_the_methods_differ():
    # Prior work measured differences above 1 between some methods, for 14 -> 24 on unit-variance tables.
    table = table_of(14, 14)
    resized = [resample(table, (14, 14), (24, 24), convention) for convention in RESAMPLE]
    for index, one in enumerate(resized):
        for other in resized[index + 1 :]:
            assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize("kind", [Learned(), SinCos2d(), NoPositions()])
def test_positions_are_added_on_any_grid(kind):
    positions = Positions(kind, (4, 4), 16)
    for grid in ((4, 4), (2, 6)):
        x = torch.zeros(2, grid[0] * grid[1], 16)
        out = positions(x, grid)
        assert out.shape == x.shape
        assert out.any() == (kind.kind != "none")
    assert list(positions.state_dict()) == (["table"] if kind.kind == "learned" else [])


def test_a_learned_table_learns_through_resizing():
    positions = Positions(Learned(resample="google"), (4, 4), 16)
    positions(torch.zeros(1, 36, 16), (6, 6)).sum().backward()
    assert (positions.table.grad > 0).all()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("learned", "positions 4 x 4 resized to 6 x 6"),
        ("learned2d", "positions 4 x 4 resized to 6 x 6"),
        ("sincos2d", "positions computed for 6 x 6"),
        ("rope", "positions computed for 6 x 6"),
        ("none", "as it is"),
    ],
)
def test_a_fine_tuning_at_another_size_says_what_becomes_of_the_positions(tmp_path, kind, said):
    tiny = ["model.name=vit_u1x1_8", "model.num_classes=2", "data.url=d"]
    run = load_run(None, [*tiny, "model.image_size=32", f"model.positions={kind}"])
    save_model(str(tmp_path / "m"), run, ViT(run.model), ["a", "b"])
    words = ["task.kind=finetune", f"task.weights={tmp_path / 'm'}", "model.image_size=48", "data.url=d"]
    task = (tuning := load_run(None, words)).task
    assert isinstance(task, Finetune)
    assert open_initial_weights(tuning, task, ["a", "b"])[1].adaptation == said
