"""The code that an export prints builds the same network in its library, or the export is refused."""

import itertools
from pathlib import Path

import pytest
import torch
from networks import difference, scrambled
from torch import nn

from vitray.config import Model, Run
from vitray.config.model_names import STEMS
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.weights import save_model, write_export

CLASSES = 5


def our_vit(**settings) -> ViT:
    """A network with random parameters and buffers."""
    vit = ViT(Model(**{"name": "vit_u2x1_16", "image_size": 32, "num_classes": CLASSES} | settings))
    scrambled(vit)
    return vit


def built_by(code: str) -> nn.Module:
    """Run the printed code in an empty namespace, as a script would."""
    namespace: dict = {}
    exec(code, namespace)
    return namespace["model"].eval()


def export_error(ours: ViT, layout: str, place: Path) -> float:
    """The largest difference between the logits of a network and of its export."""
    return difference(ours, built_by(write_export(ours, layout, str(place))), *ours.model.image_shape)


@pytest.mark.parametrize("stem", STEMS)
def test_timm_has_every_stem(tmp_path, stem):
    ours = our_vit(name=f"vit_u2x1_16_{stem}")
    assert export_error(ours, "timm", tmp_path / "w.safetensors") < 1e-4


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
    ],
)
def test_timm_has_our_settings(tmp_path, settings):
    assert export_error(our_vit(**settings), "timm", tmp_path / "w.safetensors") < 1e-4


def test_timm_has_no_head_of_two_layers(tmp_path):
    with pytest.raises(ConfigError, match="timm has no head of two layers"):
        write_export(our_vit(head="mlp"), "timm", str(tmp_path / "w.safetensors"))
    assert not (tmp_path / "w.safetensors").exists()


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        *itertools.product(("torchvision", "hf"), ({}, {"heads": 8}, {"norm_eps": 0.1})),
        ("torchvision", {"head": "mlp"}),
        ("torchvision", {"head": {"kind": "mlp", "hidden": 24}}),
        ("hf", {"activation": "gelu_tanh"}),
        ("hf", {"image_size": [32, 64]}),
        ("hf", {"num_classes": None}),
    ],
)
def test_torchvision_and_hugging_face_have_our_settings(tmp_path, layout, settings):
    assert export_error(our_vit(**settings), layout, tmp_path / "w.safetensors") < 1e-4


@pytest.mark.parametrize(
    ("layout", "settings", "reason"),
    [
        *itertools.product(("torchvision", "hf"), [{"name": "vit_u2x1_16_linear_gelu"}], ["has no stem linear_gelu"]),
        *itertools.product(("torchvision", "hf"), [{"name": "vit_u2x1_16_hmlp_bn"}], ["has no stem hmlp_bn"]),
        ("torchvision", {"num_classes": None}, "no network without a head"),
        ("torchvision", {"image_size": [32, 64]}, "square images, and this model 32 x 64"),
        ("hf", {"head": "mlp"}, "no place for head.0.weight"),
    ],
)
def test_other_networks_are_refused(tmp_path, layout, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        write_export(our_vit(**settings), layout, str(tmp_path / "w"))
    assert not list(tmp_path.iterdir())


def test_the_command_prints_that_code(tmp_path, capsys):
    from pipelines.model import main

    ours = our_vit(name="vit_u2x2_16_linear_bn")
    save_model(str(tmp_path / "m"), Run(model=ours.model), ours)
    main([str(tmp_path / "m"), "--export", "timm", str(tmp_path / "w.safetensors")])
    first, code = capsys.readouterr().err.split("\n", 1)
    assert first == f"wrote {tmp_path / 'w.safetensors'}; load it by"
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(built_by(code)(x), ours(x), atol=1e-4)
