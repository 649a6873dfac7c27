"""FlexiViT: kernels resized by the pseudo-inverse, networks at other patch sizes, and patch sizes drawn in training."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from networks import scrambled
from safetensors.torch import save_file
from timm.layers.patch_embed import resample_patch_embed
from timm.models.vision_transformer import VisionTransformer
from torch.nn.parallel import DistributedDataParallel

from pipelines.__main__ import main
from vitray.config import Model, Run, load_run
from vitray.data.augment.mixing import DeviceBatch, normalized
from vitray.data.stream.batches import Share
from vitray.data.stream.epoch_order import positions_of
from vitray.errors import ConfigError
from vitray.models.network import training_gflops
from vitray.models.sizes import sizes_of
from vitray.models.stems import resize_kernel, resize_matrix
from vitray.models.vit import ViT
from vitray.tasks.build import build_task
from vitray.training.learner import Learner
from vitray.training.optim import build_optimizer
from vitray.training.schedule import length_of
from vitray.training.step import drawn_patch, take_step
from vitray.weights import LoadedModel, load_model, save_model
from vitray.weights.folder import repatched

TINY = {"name": "vit_u2x1_8", "image_size": 48, "num_classes": 5}


def network(**settings) -> ViT:
    return scrambled(ViT(Model.model_validate(TINY | settings)))


def kernel(side: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=dtype)


def patches(side: int, count=200) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def resized(x: torch.Tensor, side: int) -> torch.Tensor:
    return F.interpolate(x, size=(side, side), mode="bilinear")


def embedded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.flatten(1) @ weight.flatten(1).T


# ---- the kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(8, 5), (8, 12), (16, 14), (4, 16), (6, 1)])
def test_a_kernel_is_resized_by_the_formula_and_as_by_timm(old, new):
    got = resize_kernel(kernel(old), new)
    theirs = resample_patch_embed(kernel(old), [new, new], interpolation="bilinear", antialias=False)
    torch.testing.assert_close(got, theirs.double(), atol=1e-4, rtol=1e-3)  # timm inverts in single precision
    # (B^T)^+ of numpy, from patches that are resized one pixel after the other.
    columns = []
    for pixel in range(old**2):
        image = torch.zeros(old**2, dtype=torch.float64)
        image[pixel] = 1
        columns.append(resized(image.view(1, 1, old, old), new).flatten().numpy())
    inverse = np.linalg.pinv(np.stack(columns, axis=1).T)
    expected = np.array([[inverse @ color for color in row] for row in kernel(old).flatten(2).numpy()])
    np.testing.assert_allclose(got.flatten(2).numpy(), expected, atol=1e-10)


@pytest.mark.parametrize(("old", "new"), [(8, 9), (8, 12), (8, 16), (3, 7), (14, 16)])
def test_embeddings_of_enlarged_patches_are_exact(old, new):
    x, weight = patches(old), kernel(old)
    torch.testing.assert_close(
        embedded(resized(x, new), resize_kernel(weight, new)), embedded(x, weight), atol=1e-9, rtol=1e-9
    )
    assert (embedded(resized(x, new), resize_kernel(weight, new) * 1.01) - embedded(x, weight)).abs().max() > 1e-3


@pytest.mark.parametrize(("old", "new"), [(8, 5), (16, 12)])
def test_a_kernel_of_smaller_patches_has_the_least_error(old, new):
    weight, B = kernel(old).flatten(2), resize_matrix(old, new)
    best = resize_kernel(kernel(old), new).flatten(2)

    def error(small):  # the mean square of <B x, small> - <x, weight> over x of independent pixels
        return (small @ B - weight).square().sum()

    generator = torch.Generator().manual_seed(2)
    for scale in (1e-3, 1e-1):
        other = best + scale * torch.randn(best.shape, generator=generator, dtype=torch.float64)
        assert error(other) > error(best)
    averaged = F.interpolate(kernel(old), size=(new, new), mode="bilinear").flatten(2) * (old / new) ** 2
    assert error(averaged) > error(best)


def test_a_kernel_of_its_own_size_is_itself():
    weight = kernel(8)
    assert resize_kernel(weight, 8) is weight


# ---- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", [4, 6, 12, 16])
@torch.no_grad()
def test_a_repatched_network_is_the_network_at_that_patch(patch):
    vit, x = network(distillation_token=True), torch.randn(2, 3, 48, 48)
    run = Run().replace({"model": vit.model.model_dump(mode="json")})
    new = repatched(LoadedModel(run, vit, None), patch, "m").vit
    assert new.model.name == f"vit_u2x1_{patch}"
    assert new.model.grid == (48 // patch, 48 // patch)
    vit.stem.use_patch(patch)
    torch.testing.assert_close(new(x), vit(x), atol=1e-4, rtol=1e-4)


def test_a_compiled_stem_has_one_graph_per_patch_size_and_inverts_no_matrix():
    stem, graphs = network().stem, []
    names = list(stem.state_dict())

    def backend(module, _inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op != "placeholder"])
        return module

    compiled = torch.compile(stem, backend=backend)
    for patch in (8, 12, 4, 12, 8, 4):
        stem.use_patch(patch)
        assert compiled(torch.zeros(1, 3, 48, 48))[1] == (48 // patch, 48 // patch)
    assert len(graphs) == 3
    assert not any("pinv" in target for graph in graphs for target in graph)
    assert list(stem.state_dict()) == names


@torch.no_grad()
def test_tokens_of_an_enlarged_image_are_the_tokens_of_the_image():
    vit, image = network().double(), patches(48, 2)
    tokens, _ = vit.stem(image)
    by_patch = image.unflatten(3, (6, 8)).unflatten(2, (6, 8)).movedim(4, 3)
    big = resized(by_patch.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 8, 8), 12)
    big = big.view(2, 6, 6, 3, 12, 12).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 72, 72)
    vit.stem.use_patch(12)
    got, grid = vit.stem(big)
    assert grid == (6, 6)
    torch.testing.assert_close(got, tokens, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_repatch_is_timms_resize_of_stem_and_positions(tmp_path, capsys):
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5, "class_token": False, "global_pool": "avg"}
    theirs = scrambled(VisionTransformer(img_size=48, patch_size=8, **sizes))
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    source, target = str(tmp_path / "w.safetensors"), str(tmp_path / "out")
    whole = str(tmp_path / "whole")
    assert main(["model", source, "heads=2", "activation=gelu", "normalize={}", "--save", whole]) == 0
    assert main(["weights", "repatch", whole, "12", target]) == 0
    run, ours, _ = load_model(target)
    assert (run.model.name, run.model.image_size) == ("vit_u2x1_12", 48)
    weight = resample_patch_embed(theirs.patch_embed.proj.weight, [12, 12], interpolation="bilinear", antialias=False)
    torch.testing.assert_close(ours.stem.proj[0].weight, weight, atol=1e-5, rtol=1e-5)
    table = theirs.pos_embed.view(1, 6, 6, 64).permute(0, 3, 1, 2)
    table = F.interpolate(table, size=(4, 4), mode="bicubic", antialias=True).flatten(2)[0].T
    torch.testing.assert_close(ours.positions.table, table, atol=1e-5, rtol=1e-5)
    assert "vit_u2x1_12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        (
            {},
            ["14"],
            "got patches of 14 for images of 48 x 48 px, expected a size that divides them, or --image-size 42",
        ),
        ({"name": "vit_u2x1_8_hmlp_ln"}, ["12"], "got vit_u2x1_8_hmlp_ln, expected a linear stem"),
        (
            {"positions": "relative", "class_token": False, "pool": "mean"},
            ["12"],
            "relative positions are those of",
        ),
        ({}, ["twelve"], "repatch: expected MODEL PATCH TARGET, PATCH in pixels"),
    ],
)
def test_what_cannot_be_repatched_is_one_message(settings, words, message, tmp_path, capsys):
    vit = network(**settings)
    save_model(str(tmp_path / "m"), Run().replace({"model": vit.model.model_dump(mode="json")}), vit)
    with pytest.raises(SystemExit) if words == ["twelve"] else pytest.MonkeyPatch.context():
        assert main(["weights", "repatch", str(tmp_path / "m"), *words, str(tmp_path / "o")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_repatch_takes_another_image_size(tmp_path):
    vit = network()
    save_model(str(tmp_path / "m"), Run().replace({"model": vit.model.model_dump(mode="json")}), vit)
    args = ["weights", "repatch", str(tmp_path / "m"), "14", str(tmp_path / "o"), "--image-size", "56"]
    assert main(args) == 0
    assert load_model(str(tmp_path / "o")).vit.model.grid == (4, 4)


# ---- training --------------------------------------------------------------------------------------------------------

FLEXIBLE = ["model={name: vit_u2x1_8, image_size: 48, num_classes: 5, patches: [4, 8, 12]}", "optim.warmup=0 steps"]
FLEXIBLE += ["optim.batch=8", "optim.lr=2e-3", "optim.weight_decay=0", "data.augment.flip=0"]


def steps(run: Run, share: Share, count: int, seen: list[int] | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    task = build_task(run).train()
    if seen is not None:
        task.vit.stem.register_forward_hook(lambda module, *_: seen.append(module.patch))
    model = DistributedDataParallel(task) if share.workers > 1 else task
    learner = Learner(task, model, build_optimizer(task, run.optim, torch.device("cpu")), None)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(256, size=(8, 48, 48, 3), dtype=np.uint8))
    rows = positions_of(0, 8, share.rank, share.workers)
    batch = DeviceBatch(images[rows], torch.arange(8)[rows] % 5, rows, rows)
    losses = [float(take_step(run, step, batch, share, learner, length_of(run.optim, 10))[0]) for step in range(count)]
    assert all(np.isfinite(losses))
    return task


def test_a_patch_size_is_drawn_by_seed_and_step():
    run = load_run(None, FLEXIBLE)
    drawn = [drawn_patch(run, step) for step in range(300)]
    assert drawn == [drawn_patch(run, step) for step in range(300)]
    assert drawn != [drawn_patch(run.replace({"seed": 1}), step) for step in range(300)]
    assert all(60 < drawn.count(patch) < 140 for patch in (4, 8, 12))
    assert drawn_patch(run.replace({"model.patches": []}), 0) is None


def test_each_step_trains_at_its_patch_size_and_the_network_keeps_its_own():
    run, seen = load_run(None, [*FLEXIBLE, "compute.local_batch=4"]), []
    task = steps(run, Share(0, 1), 6, seen)
    assert seen == [patch for step in range(6) for patch in 2 * [drawn_patch(run, step)]]
    assert len(set(seen)) > 1
    assert task.vit.stem.patch == 8


def work(rank: int, folder: str) -> None:
    """Save the weights of one of two workers after four steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(steps(load_run(None, FLEXIBLE), Share(rank, 2), 4).state_dict(), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_workers_draw_the_same_sizes_and_learn_as_one(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    alone = steps(load_run(None, FLEXIBLE), Share(0, 1), 4).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        torch.testing.assert_close(tensor, alone[name], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_200_steps_learn_the_images_at_every_patch_size():
    run = load_run(None, FLEXIBLE)
    task = steps(run, Share(0, 1), 200).eval()
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(256, size=(8, 48, 48, 3), dtype=np.uint8))
    for patch in (4, 8, 12):
        task.vit.stem.use_patch(patch)
        with torch.no_grad():
            predicted = task.vit(normalized(images, run.data.normalize)).argmax(1)
        assert predicted.tolist() == [index % 5 for index in range(8)], patch


def test_the_cost_of_a_step_is_the_mean_over_the_patch_sizes():
    run = load_run(None, FLEXIBLE)
    each = [sizes_of(run.model.at_patch(patch)).gflops for patch in (4, 8, 12)]
    assert training_gflops(run) == pytest.approx(sum(each) / 3)
    assert each[0] > each[1] > each[2]
    fixed = run.model_copy(update={"model": run.model.at_patch(8)})
    assert training_gflops(fixed) == sizes_of(fixed.model).gflops


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.patches=[7]"], "patches: got 7, expected sizes that divide the image, 48 x 48"),
        (["model.patches=[8, 8]"], "patches: got 8 more than once"),
        (
            ["model.name=vit_u2x1_8_hmlp_ln"],
            "patches needs a linear stem, whose kernel can be resized; vit_u2",
        ),
        (
            ["model.positions=relative", "model.class_token=false", "model.pool=mean"],
            "patches and relative positions cannot be combined",
        ),
        (["compute.compile=true", "model.patches=[1,2,3,4,6,8,12,16,24]"], "compute.compile: got default with 9"),
        (["task=masked", "model.num_classes=null"], "model.patches does not apply to task masked"),
    ],
)
def test_bad_patch_sizes_are_one_message(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_run(None, [*FLEXIBLE, *overrides])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
