"""The program beside exported weights builds the same network in its library, or the export is refused."""

import itertools
import runpy
from pathlib import Path

import pytest
import torch
from networks import difference, scrambled

from vitray.config import Model
from vitray.config.model_names import STEMS
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.weights import write_library
from vitray.weights.export import LIBRARIES

CLASSES = 5


def our_vit(**settings) -> ViT:
    """A network with random parameters and buffers."""
    vit = ViT(Model(**{"name": "vit_u2x1_16", "image_size": 32, "num_classes": CLASSES} | settings))
    scrambled(vit)
    return vit


def export_error(ours: ViT, layout: str, folder: Path) -> float:
    """The largest difference between the logits of a network and of its export, loaded as by a script."""
    write_library(ours, layout, folder)
    return difference(ours, runpy.run_path(str(folder / "load.py"))["model"], *ours.model.image_shape)


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != "local"])
def test_timm_has_every_other_stem(tmp_path, stem):
    ours = our_vit(name=f"vit_u2x1_16_{stem}")
    assert export_error(ours, "timm", tmp_path) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "vit_u2x2_16_hmlp_bn", "layerscale": 0.1},
        {"name": "vit_u2x3_16"},
        {"heads": 8, "activation": "gelu_tanh", "norm_eps": 0.1},
        {"pool": "mean", "class_token": False},
        {"pool": "mean"},
        {"pool": "mean_then_norm", "positions": "sincos2d"},
        {"num_classes": None, "positions": "none"},
        {"image_size": [32, 64]},
        {"name": "vit_w128d1x1_16"},
        {"ffn_ratio": 2.5},
    ],
)
def test_timm_has_our_settings(tmp_path, settings):
    assert export_error(our_vit(**settings), "timm", tmp_path) < 1e-4


def test_timm_has_no_local_stem(tmp_path):
    with pytest.raises(ConfigError, match="vit_u1x1_16_local: an export for timm has no stem local"):
        write_library(our_vit(name="vit_u1x1_16_local"), "timm", tmp_path)


def test_timm_has_no_head_of_two_layers(tmp_path):
    with pytest.raises(ConfigError, match="timm has no head of two layers"):
        write_library(our_vit(head="mlp"), "timm", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        *itertools.product(("torchvision", "hf"), ({}, {"heads": 8}, {"norm_eps": 0.1})),
        *itertools.product(("torchvision", "hf"), [{"ffn_ratio": 2.5}]),
        ("torchvision", {"head": "mlp"}),
        ("torchvision", {"head": {"kind": "mlp", "hidden": 24}}),
        ("hf", {"activation": "gelu_tanh"}),
        ("hf", {"image_size": [32, 64]}),
        ("hf", {"num_classes": None}),
    ],
)
def test_torchvision_and_hugging_face_have_our_settings(tmp_path, layout, settings):
    assert export_error(our_vit(**settings), layout, tmp_path) < 1e-4


@pytest.mark.parametrize(
    ("layout", "settings", "reason"),
    [
        *itertools.product(("torchvision", "hf"), [{"name": "vit_u2x1_16_linear_gelu"}], ["has no stem linear_gelu"]),
        *itertools.product(("torchvision", "hf"), [{"name": "vit_u2x1_16_hmlp_bn"}], ["has no stem hmlp_bn"]),
        *itertools.product(
            ("torchvision", "hf"), [{"name": "vit_u2x2_16"}], ["no parallel branches, and this model has 2"]
        ),
        *itertools.product(("torchvision", "hf"), [{"layerscale": 0.1}], ["has no LayerScale"]),
        *itertools.product(
            ("timm", "torchvision", "hf"),
            [{"attention": "axial", "name": "vit_u2x1_16", "class_token": False, "pool": "mean"}],
            ["has no axial attention"],
        ),
        ("torchvision", {"num_classes": None}, "no network without a head"),
        ("torchvision", {"image_size": [32, 64]}, "square images, and this model 32 x 64"),
        ("hf", {"head": "mlp"}, "no place for head.0.weight"),
    ],
)
def test_other_networks_are_refused(tmp_path, layout, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        write_library(our_vit(**settings), layout, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layout", "name", "built"),
    [
        ("timm", "vit_s2x1_32", "timm.create_model('vit_small_patch32_224', "),
        ("timm", "vit_u2x1_8", "timm.create_model('vit_base_patch16_224', "),
        ("torchvision", "vit_b12x1_16", "torchvision.models.vit_b_16("),
        ("torchvision", "vit_b11x1_16", "torchvision.models.VisionTransformer("),
    ],
)
def test_a_known_network_has_its_name_in_the_library(layout, name, built):
    with torch.device("meta"):
        vit = ViT(Model(name=name, image_size=64, num_classes=CLASSES))
    assert built in LIBRARIES[layout].program(vit)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), [("timm", "vit_ti2x1_16"), ("torchvision", "vit_b12x1_32")])
def test_that_name_loads_the_weights(tmp_path, layout, name):
    assert export_error(our_vit(name=name, image_size=64), layout, tmp_path) < 1e-4
