"""Networks of torchvision: torchvision's functions, sizes and names; trained, frozen, saved, imported and exported."""

import runpy
import warnings

import pytest
import torch
import torch.nn.functional as F
import torchvision
from networks import scrambled
from torch import nn

from vitray.config import Model, Run, load_run
from vitray.config.augmentation import Normalize
from vitray.config.classification import Finetune
from vitray.config.model_names import TORCHVISION_NETWORKS, check_size
from vitray.errors import ConfigError
from vitray.exports.folding import fold
from vitray.exports.writers import trace_program, write_onnx
from vitray.models.counts import count, diagram
from vitray.models.network import build_network, vit_of
from vitray.models.other_networks import OtherNetwork, other_sizes
from vitray.tasks.build import build_task
from vitray.training.optim import parameter_groups
from vitray.weights import import_weights, load_deltas, load_model, save_model
from vitray.weights.convert import published_normalize
from vitray.weights.export import write_library
from vitray.weights.freezing import audit, freeze
from vitray.weights.layouts import MINUS_ONE_TO_ONE as HALF
from vitray.weights.pretrained import adapt

SMALL = "torchvision/resnet18"
FAMILIES = ("resnet18", "convnext_tiny", "swin_t", "shufflenet_v2_x0_5", "squeezenet1_1", "mobilenet_v3_small")


def model(name=SMALL, **settings) -> Model:
    return Model.model_validate({"name": name, "image_size": 64, "num_classes": 7} | settings)


def network(name=SMALL, **settings) -> OtherNetwork:
    torch.manual_seed(0)
    return OtherNetwork(model(name, **settings)).eval()


def images(count=2, side=64) -> torch.Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


# ---- torchvision's own -----------------------------------------------------------------------------------------------


def test_names_are_those_of_torchvision():
    assert list(TORCHVISION_NETWORKS) == torchvision.models.list_models(torchvision.models)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_and_features_are_those_of_torchvision(name):
    ours, theirs = network(f"torchvision/{name}"), torchvision.models.get_model(name, num_classes=7)
    theirs.load_state_dict({key.removeprefix("body."): tensor for key, tensor in ours.state_dict().items()})
    assert torch.equal(ours(images()), theirs.eval()(images()))
    features, logits = ours.features_and_logits(images())
    assert torch.equal(logits, ours(images()))
    assert features.shape == (2, ours.width)
    if isinstance(ours.head, nn.Linear):
        torch.testing.assert_close(ours.head(features), logits)
    headless = network(f"torchvision/{name}", num_classes=None)
    body = {key: tensor for key, tensor in ours.state_dict().items() if not key.startswith(ours.head_name)}
    headless.load_state_dict(body)
    torch.testing.assert_close(headless(images()).clamp(min=-9), features.clamp(min=-9))


def check_counts(name: str) -> None:
    weights = next(iter(torchvision.models.get_model_weights(name)))
    printed, side = weights.meta, weights.transforms().crop_size[0]
    sizes = other_sizes(Model(name=f"torchvision/{name}", image_size=side))
    auxiliary = {"inception_v3": 27_161_264 - 23_834_568}.get(name, 0)  # printed with its auxiliary head
    assert sizes.params == printed["num_params"] - auxiliary
    assert f"{sizes.gflops:.3f}" == f"{printed['_ops']:.3f}"


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_are_those_that_torchvision_prints(name):
    check_counts(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION_NETWORKS)
def test_counts_of_every_network_are_those_that_torchvision_prints(name):
    check_counts(name)


def test_the_diagram_lists_the_parts():
    described = model()
    counts = count(described)
    assert counts.params == sum(parameter.numel() for parameter in network().parameters())
    assert counts.activation_bytes > 4 * 64 * 32 * 32
    for part in ("torchvision/resnet18", "image 3 x 64 x 64", "norms", "stage4", "body", "head"):
        assert part in diagram(described, counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION_NETWORKS)
def test_the_least_image_of_every_network_is_taken(name):
    def fits(side: int) -> bool:
        try:
            check_size(f"torchvision/{name}", side, side)
        except ValueError:
            return False
        return True

    side = next(side for side in range(1, 1000) if fits(side))
    with torch.device("meta"):
        built = network(f"torchvision/{name}", image_size=side)
        assert built(torch.empty(2, 3, side, side)).shape == (2, 7)


# ---- parts, modes, optimizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("resnet18", "1234"), ("convnext_tiny", "1234"), ("swin_v2_t", "1234"), ("densenet121", "1234"),
        ("regnet_x_400mf", "1234"), ("shufflenet_v2_x0_5", "234"), ("maxvit_t", "1234"), ("vgg11", ""),
        ("vit_b_16", ""),
    ],
)  # fmt: skip
def test_every_parameter_has_a_part(name, stages):
    with torch.device("meta"):
        built = OtherNetwork(model(f"torchvision/{name}", image_size=224))
    parts = built.parts()
    assert set(parts) == {name for name, _ in built.named_parameters()}
    assert {part for part in parts.values() if part.startswith("stage")} == {f"stage{stage}" for stage in stages}
    owners = {name: built.get_submodule(name.rpartition(".")[0]) for name in parts}
    norms = (nn.BatchNorm2d, nn.LayerNorm)
    assert {name for name, part in parts.items() if part == "norms"} == {
        name for name, owner in owners.items() if isinstance(owner, norms)
    }
    head = [name for name, part in parts.items() if part == "head"]
    assert sum(parameter.numel() for name, parameter in built.named_parameters() if name in head) in (
        built.width * 7 + 7,
        built.width * 7,
    )


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"mode": "full"}, {"body", "stage1", "stage2", "stage3", "stage4", "norms", "head"}),
        ({"mode": "head"}, {"head"}),
        ({"mode": "norm"}, {"norms", "head"}),
        ({"mode": "head", "also_train": ["stage4", "norms"]}, {"stage4", "norms", "head"}),
    ],
)
def test_modes_train_their_parts_and_frozen_batch_norms_keep_their_statistics(settings, trained):
    built, task = network(), Finetune.model_validate({"weights": "w", **settings})
    freeze(built, task)
    parts = built.parts()
    assert {parts[name] for name, each in built.named_parameters() if each.requires_grad} == trained
    assert {row.part for row in audit(built).rows if row.trained} == trained
    before = {key: tensor.clone() for key, tensor in built.state_dict().items()}
    built.train()(images(4)).sum().backward()
    moved = {key for key, tensor in built.state_dict().items() if not torch.equal(before[key], tensor)}
    assert bool(moved) == ("norms" in trained)
    assert all("running" in key or key.endswith("num_batches_tracked") for key in moved)


def test_kernels_decay_and_nothing_else_does():
    run = load_run(None, [f"model={{name: {SMALL}, image_size: 64, num_classes: 7}}", "optim.weight_decay=0.3"])
    task = build_task(run)
    groups = parameter_groups(task, run.optim)
    assert {group["lr_scale"] for group in groups} == {1.0}
    decays = {id(each) for group in groups if group["weight_decay"] for each in group["params"]}
    assert all((id(each) in decays) == (each.ndim > 1) for each in task.parameters())


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_model_folder_gives_the_same_network_back_and_a_delta_holds_its_head(tmp_path):
    base = scrambled(network())
    save_model(str(tmp_path / "base"), Run(model=base.model), base, list("abcdefg"))
    loaded = load_model(str(tmp_path / "base"))
    assert torch.equal(loaded.vit(images()), base(images()))
    assert loaded.classes == list("abcdefg")
    other = scrambled(network())
    other.head.weight.data += 1
    saved = save_model(str(tmp_path / "d"), Run(model=base.model), other, list("abcdefg"), str(tmp_path / "base"))
    assert saved.bytes == other.head.weight.nbytes
    assert torch.equal(load_model(str(tmp_path / "d")).vit(images()), other(images()))
    family = load_deltas(str(tmp_path / "base"), {name: str(tmp_path / name) for name in ("base", "d")})
    mixed = family(images(5), ["d", "base", "d", "base", "d"])
    for wanted, rows in ((base, [1, 3]), (other, [0, 2, 4])):
        torch.testing.assert_close(torch.stack([mixed[row] for row in rows]), wanted(images(5))[rows])
    assert family.nbytes == sum(tensor.nbytes for tensor in base.state_dict().values()) + saved.bytes


@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_weights_files_of_torchvision_are_read(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of googlenet's initial weights
        theirs = scrambled(torchvision.models.get_model(name, num_classes=5))
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    settings = {"name": f"torchvision/{name}", "image_size": 64}
    run, ours = import_weights(str(tmp_path / "w.pth"), settings=settings)
    assert (run.model.num_classes, run.model.image_size) == (5, 64)
    assert run.data.normalize == (HALF if name == "googlenet" else Normalize())
    with torch.no_grad():
        assert torch.equal(ours(images()), theirs(images()))
    with pytest.raises(ConfigError, match=r"read as torchvision/resnet34, but .*(no place here|is missing)"):
        import_weights(str(tmp_path / "w.pth"), settings={"name": "torchvision/resnet34"})


def test_all_matrices_of_a_vit_of_torchvision_decay():
    with torch.device("meta"):
        task = nn.ModuleDict({"vit": OtherNetwork(model("torchvision/vit_b_32"))})
    groups = parameter_groups(task, load_run(None, ["optim.weight_decay=0.3"]).optim)
    decaying = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    names = {name for name, parameter in task.named_parameters() if id(parameter) in decaying}
    tables = {"vit.body.class_token", "vit.body.encoder.pos_embedding"}
    assert names == {name for name, parameter in task.named_parameters() if parameter.ndim > 1} - tables


@pytest.mark.parametrize("name", TORCHVISION_NETWORKS)
def test_published_weights_are_read_with_their_normalization(name):
    published = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    wanted = Normalize(mean=tuple(published.mean), std=tuple(published.std))
    # torchvision builds these with transform_input=True for published weights, which turns one into the other.
    assert published_normalize(f"torchvision/{name}") == (HALF if name in ("googlenet", "inception_v3") else wanted)


def test_a_fine_tuning_gets_a_head_of_zeros_or_is_refused():
    base, changed = scrambled(network()), model(num_classes=3)
    state = adapt(base, changed, "task.weights w", new_head=False)
    tuned = OtherNetwork(changed)
    tuned.load_state_dict(state)
    assert not tuned.eval()(images()).any()
    same = adapt(base, model(), "task.weights w", new_head=False)
    assert all(torch.equal(same[key], tensor) for key, tensor in base.state_dict().items())
    with pytest.raises(ConfigError, match="got torchvision/resnet18, expected torchvision/resnet34"):
        adapt(base, model("torchvision/resnet34"), "task.weights w", new_head=False)
    with pytest.raises(ConfigError, match="got torchvision/resnet18, expected vit_u1x1_8"):
        adapt(base, model("vit_u1x1_8"), "task.weights w", new_head=False)


# ---- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "maxvit_t"])
def test_the_torchvision_program_loads_the_same_network(tmp_path, name):
    side = 224 if name == "maxvit_t" else 64
    ours = network(f"torchvision/{name}", image_size=side)
    write_library(ours, "torchvision", tmp_path)
    theirs = runpy.run_path(str(tmp_path / "load.py"))["model"]
    with torch.no_grad():
        assert torch.equal(theirs(images(1, side)), ours(images(1, side)))
    with pytest.raises(ConfigError, match="an export for timm has no such network"):
        write_library(ours, "timm", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "swin_t"])
def test_onnx_computes_the_same(tmp_path, name):
    ours, side = network(f"torchvision/{name}"), 64
    pixels = torch.randint(0, 256, (3, 3, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    folded = fold(ours, Normalize(), any_size=False, int8_weights=False)
    runner = write_onnx(trace_program(folded, (side, side)), tmp_path / "m.onnx")
    with torch.no_grad():
        torch.testing.assert_close(runner(pixels), folded(pixels), rtol=1e-3, atol=1e-3)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=torchvision/resnet5"], "no classification network 'resnet5'"),
        (["model.name=torchvision/resnet5"], "did you mean resnet50"),
        ([f"model={{name: {SMALL}, pool: mean}}"], 'torchvision/resnet18 has no pool "mean"'),
        ([f"model={{name: {SMALL}, layerscale: 0.1}}"], "only image_size and num_classes can be set"),
        (["model={name: torchvision/vit_b_16, image_size: 100}"], "square, with a side of a multiple of 16 pixels"),
        (["model={name: torchvision/vit_b_16, image_size: [32, 64]}"], "image_size 32 x 64 does not fit"),
        (["model={name: torchvision/inception_v3, image_size: 64}"], "too small .* at least 75 pixels"),
        ([f"model.name={SMALL}", "task={kind: masked}"], "task.kind: masked needs a Vision Transformer"),
        ([f"model.name={SMALL}", "task={kind: finetune, weights: w, mode: attn}"], r"attn \(not full, head, norm\)"),
        ([f"model.name={SMALL}", "optim.layer_decay=0.7"], "optim.layer_decay: 0.7 needs a Vision"),
        (
            [f"model.name={SMALL}", "compute.activation_checkpointing=blocks"],
            "compute.activation_checkpointing: blocks needs a Vision",
        ),
        ([f"model.name={SMALL}", "evaluate.probes=[attention_distance]"], "attention_distance needs a Vision"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_run(None, overrides)


def test_code_for_transformers_refuses_it_by_name():
    with pytest.raises(ConfigError, match="vitray inspect needs a Vision Transformer: got torchvision/resnet18"):
        vit_of(network(), "vitray inspect")
    with pytest.raises(ConfigError, match="needs a Vision Transformer: got torchvision/resnet18"):
        _ = model().shape
    vit = build_network(model("vit_u1x1_8"))
    assert vit_of(vit, "vitray inspect") is vit


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)  # swin_t with other tests beside it
@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "swin_t", "mobilenet_v3_small"])
def test_a_few_images_are_learned_in_200_steps(name):
    torch.manual_seed(0)
    built, x, labels = OtherNetwork(model(f"torchvision/{name}", image_size=32)), images(7, 32), torch.arange(7)
    optimizer = torch.optim.AdamW(built.parameters(), lr=3e-4)
    for _ in range(200):
        loss = F.cross_entropy(built(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
