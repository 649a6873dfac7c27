"""The inside of a network: attention maps and attention distance against slow loops in float64."""

import math

import pytest
import torch
from networks import scrambled

from vitray.config import Model
from vitray.errors import ConfigError
from vitray.inspection import attention_distances, attention_maps, gradient_rollout
from vitray.inspection import levels as levels_module
from vitray.inspection.attention import patch_distances, rollout_through, spread_of, sum_of_branches
from vitray.inspection.levels import images_at_once, run_levels
from vitray.models.vit import ViT

# Class token or mean, branches, grid (rows x columns of patches of 8 pixels).
KINDS = [
    pytest.param({}, (2, 3), id="token"),
    pytest.param({"name": "vit_u3x2_8"}, (3, 2), id="branches"),
    pytest.param({"name": "vit_u2x3_8", "pool": "mean"}, (2, 3), id="mean-beside-token"),
    pytest.param({"class_token": False, "pool": "mean_then_norm"}, (1, 4), id="no-token"),
    pytest.param({"name": "vit_u2x2_8", "image_size": 32}, (5, 2), id="other-resolution"),
]


def network(grid, dtype=torch.float64, **settings) -> ViT:
    model = Model.model_validate(
        {"name": "vit_u3x1_8", "image_size": (grid[0] * 8, grid[1] * 8), "num_classes": 5, **settings}
    )
    return scrambled(ViT(model)).to(dtype)


def images(grid, count=3, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, grid[0] * 8, grid[1] * 8, dtype=dtype, generator=generator)


@torch.no_grad()
def slow_weights(vit, x):
    """[level][branch][image][head]: rows of attention, from the definition; and the last output."""
    weights = []
    for block in vit.blocks:
        size = block.width // block.heads
        of_level = []
        for branch in block.attentions:
            of_branch = []
            for image in x:
                normed = (image - image.mean(1, keepdim=True)) / (image.var(1, correction=0)[:, None] + 1e-6).sqrt()
                rows = (normed * branch.norm.weight + branch.norm.bias) @ branch.qkv.weight.T + branch.qkv.bias
                heads = []
                for head in range(block.heads):
                    q, k = (rows[:, part * block.width + head * size :][:, :size] for part in range(2))
                    table = [[math.exp(float(q_i @ k_j) / math.sqrt(size)) for k_j in k] for q_i in q]
                    heads.append([[value / sum(row) for value in row] for row in table])
                of_branch.append(heads)
            of_level.append(of_branch)
        weights.append(of_level)
        x = block(x)
    return weights, x


@torch.no_grad()
def inference(vit, batch):
    return vit(batch)


def first_input(vit, batch):
    x, grid = vit.stem(batch)
    return vit.first_input(vit.positions(x, grid)).detach()


def slow_rollout(vit, weights, image):
    """The rollout of one image by loops over levels, branches, heads, rows and columns."""
    tokens = len(weights[0][0][image][0])
    total = [[float(i == j) for j in range(tokens)] for i in range(tokens)]
    for level in weights:
        table = [[float(i == j) for j in range(tokens)] for i in range(tokens)]
        for branch in level:
            for head in branch[image]:
                for i in range(tokens):
                    for j in range(tokens):
                        table[i][j] += head[i][j] / len(branch[image])
        table = [[value / sum(row) for value in row] for row in table]
        total = [[sum(table[i][k] * total[k][j] for k in range(tokens)) for j in range(tokens)] for i in range(tokens)]
    return total


def of_output(vit, table):
    """The columns of patches, as the pooled output sees them."""
    first = int(vit.class_token is not None)
    rows = table[:1] if vit.model.pool == "token" else table[first:]
    return [sum(row[column] for row in rows) / len(rows) for column in range(first, len(table))]


@pytest.mark.parametrize(("settings", "grid"), KINDS)
def test_attention_maps_equal_slow_loops(settings, grid):
    vit, batch = network(grid, **settings), images(grid)
    maps = attention_maps(vit, batch)
    weights, _ = slow_weights(vit, first_input(vit, batch))
    for image in range(len(batch)):
        wanted = of_output(vit, slow_rollout(vit, weights, image))
        assert maps.rollout[image].flatten().tolist() == pytest.approx(wanted, abs=1e-12)
        heads = [head for branch in weights[-1] for head in branch[image]]
        mean = torch.tensor(heads, dtype=torch.float64).mean(0).tolist()
        assert maps.last_level[image].flatten().tolist() == pytest.approx(of_output(vit, mean), abs=1e-12)
    assert maps.rollout.shape == (3, *grid)
    assert torch.equal(maps.logits, inference(vit, batch))


@pytest.mark.parametrize(("settings", "grid"), KINDS)
@pytest.mark.parametrize("classes", [None, [4, 0, 2]])
def test_gradient_rollout_equals_whole_matrices_of_one_graph(settings, grid, classes):
    vit, batch = network(grid, **settings), images(grid)
    trace = {}
    logits = vit(batch, trace)
    chosen = logits.argmax(1).tolist() if classes is None else classes
    gradients = torch.autograd.grad(sum(logits[i, k] for i, k in enumerate(chosen)), list(trace.values()))
    by_level: dict[str, list] = {}
    for (key, weights), gradient in zip(trace.items(), gradients, strict=True):
        by_level.setdefault(key.partition(".")[0], []).append((weights.detach(), gradient))
    maps = gradient_rollout(vit, batch, None if classes is None else torch.tensor(classes))
    for image in range(len(batch)):
        tokens = next(iter(trace.values())).shape[-1]
        relevance = torch.eye(tokens, dtype=torch.float64)
        for branches in by_level.values():
            table = torch.zeros(tokens, tokens, dtype=torch.float64)
            for weights, gradient in branches:
                for head in range(weights.shape[1]):
                    product = weights[image, head] * gradient[image, head]
                    table += torch.where(product > 0, product, 0) / weights.shape[1]
            relevance = relevance + table @ relevance
        wanted = of_output(vit, relevance.tolist())
        assert maps[image].flatten().tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("settings", "grid"), KINDS)
def test_distances_equal_slow_loops(settings, grid):
    vit, batch = network(grid, **settings), images(grid)
    spread = attention_distances(vit, batch)
    weights, _ = slow_weights(vit, first_input(vit, batch))
    first = int(vit.class_token is not None)
    places = [(8 * row, 8 * column) for row in range(grid[0]) for column in range(grid[1])]
    for level, branches in enumerate(weights):
        for branch, of_images in enumerate(branches):
            for image, heads in enumerate(of_images):
                for head, table in enumerate(heads):
                    means = {False: 0.0, True: 0.0}
                    for i, here in enumerate(places):
                        row = table[first + i][first:]
                        distance = sum(value * math.dist(here, there) for value, there in zip(row, places, strict=True))
                        means[False] += distance / len(places)
                        means[True] += distance / sum(row) / len(places)
                    entropy = -sum(value * math.log(value) for row in table for value in row) / len(table)
                    at = level, branch, head, image
                    assert spread.distance[at].item() == pytest.approx(means[False], abs=1e-10)
                    assert spread.renormalized[at].item() == pytest.approx(means[True], abs=1e-10)
                    assert spread.entropy[at].item() == pytest.approx(entropy, abs=1e-10)
    assert spread.entropy.shape == (len(vit.blocks), vit.model.shape.branches, 2, 3)


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_rows_of_rollout_sum_to_one(branches):
    rollout = None
    for level in range(30):
        draws = [torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(level)) for _ in range(branches)]
        rollout = rollout_through(rollout, sum_of_branches(draw.double().mul(5).softmax(-1) for draw in draws))
    assert rollout is not None
    torch.testing.assert_close(rollout.sum(-1), torch.ones(2, 7, dtype=torch.float64), atol=1e-12, rtol=0)


def test_a_map_of_mean_pooled_patches_sums_to_one():
    vit, batch = network((2, 3), class_token=False, pool="mean"), images((2, 3))
    maps = attention_maps(vit, batch)
    for each in (maps.rollout, maps.last_level):
        torch.testing.assert_close(each.sum((1, 2)), torch.ones(3, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (3, 7), (14, 14)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_uniform_attention_has_the_mean_distance_of_the_grid(grid, prefix):
    rows, columns = grid
    # Of all pairs of patches, (rows - |dr|) (columns - |dc|) lie dr rows and dc columns apart.
    total = sum(
        (rows - abs(dr)) * (columns - abs(dc)) * math.hypot(dr, dc)
        for dr in range(1 - rows, rows)
        for dc in range(1 - columns, columns)
    )
    patches = rows * columns
    mean, tokens = 16 * total / patches**2, patches + prefix
    uniform = torch.full((2, 3, tokens, tokens), 1 / tokens, dtype=torch.float64)
    distance, renormalized, entropy = spread_of(uniform, patch_distances(grid, 16), prefix)
    torch.testing.assert_close(renormalized, torch.full((3, 2), mean, dtype=torch.float64))
    torch.testing.assert_close(distance, torch.full((3, 2), mean * patches / tokens, dtype=torch.float64))
    torch.testing.assert_close(entropy, torch.full((3, 2), math.log(tokens), dtype=torch.float64))


@pytest.mark.parametrize("prefix", [0, 1])
def test_attention_to_itself_has_distance_and_entropy_zero(prefix):
    own = torch.eye(6 + prefix, dtype=torch.float64).expand(2, 3, -1, -1)
    assert spread_of(own, patch_distances((2, 3), 16), prefix).abs().max() == 0


def test_a_query_that_sees_only_the_class_token_is_left_out_of_the_renormalized_mean():
    weights = torch.full((1, 1, 5, 5), 0.2, dtype=torch.float64)
    weights[..., 1, :] = torch.tensor([1.0, 0, 0, 0, 0])
    _, renormalized, _ = spread_of(weights, patch_distances((1, 4), 1), 1)
    assert renormalized.item() == pytest.approx((1 + 1 + 1.5) / 3)


@pytest.mark.parametrize("name", ["vit_u3x1_8", "vit_u3x2_8"])
@pytest.mark.parametrize("execution", ["loop", "fused", "auto"])
def test_an_inspected_network_computes_the_same_bits(name, execution):
    grid = (4, 4)
    vit, batch = network(grid, torch.float32, name=name, execution=execution), images(grid, dtype=torch.float32)
    before = {key: tensor.clone() for key, tensor in vit.state_dict().items()}
    with torch.no_grad():
        wanted = vit(batch)
        assert torch.equal(attention_maps(vit, batch).logits, wanted)
        attention_distances(vit, batch)
        gradient_rollout(vit, batch)
        assert torch.equal(vit(batch), wanted)
    assert all(torch.equal(before[key], tensor) for key, tensor in vit.state_dict().items())
    assert all(parameter.grad is None for parameter in vit.parameters())


def test_explicit_attention_of_a_branch_is_that_of_a_trace():
    vit, batch, trace = network((2, 3), name="vit_u2x2_8"), images((2, 3)), {}
    with torch.no_grad():
        vit(batch, trace)
        for level in run_levels(vit, batch):
            for number, weights in enumerate(level.attention(), start=1):
                torch.testing.assert_close(weights, trace[f"block{level.number:02d}.attn{number}"], atol=1e-12, rtol=0)


def test_chunks_of_images_have_the_same_maps(monkeypatch):
    vit, batch = network((2, 3), name="vit_u2x2_8"), images((2, 3), count=5)
    whole = [attention_maps(vit, batch).rollout, attention_distances(vit, batch)[0], gradient_rollout(vit, batch)]
    monkeypatch.setattr(levels_module, "MAX_ATTENTION_BYTES", 2 * 2 * 7 * 7 * 8)
    assert images_at_once(vit, batch) == 2
    parts = [attention_maps(vit, batch).rollout, attention_distances(vit, batch)[0], gradient_rollout(vit, batch)]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_one_image_is_inspected_whatever_its_size():
    vit = network((4, 4))
    assert images_at_once(vit, torch.empty(1, 3, 32_000, 32_000, device="meta")) == 1


def test_networks_that_cannot_be_inspected_are_refused():
    vit, batch = network((2, 2)), images((2, 2))
    with pytest.raises(ValueError, match=r"training mode, expected evaluation mode: call \.eval\(\) first"):
        attention_maps(vit.train(), batch)
    with pytest.raises(ValueError, match="no head"):
        gradient_rollout(network((2, 2), num_classes=None), batch)


def test_chosen_levels_are_inspected_alone():
    vit, batch = network((2, 3), name="vit_u4x2_8"), images((2, 3))
    whole, chosen = attention_distances(vit, batch), attention_distances(vit, batch, [0, 3])
    assert torch.equal(whole.distance[[0, 3]], chosen.distance)
    for levels in ([4], [-1], [1, 1], [2, 0], []):
        with pytest.raises(ConfigError, match="expected some of 0 to 3 in ascending order, as vit_u4x2_8 has 4 levels"):
            attention_distances(vit, batch, levels)
