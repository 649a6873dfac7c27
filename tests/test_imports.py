"""An imported network has the logits of its own library, or is refused with the reason; nothing is guessed."""

import argparse
import json
import re

import pytest
import timm
import torch
import torchvision
from networks import difference, scrambled
from safetensors.torch import save_file
from timm.layers import GELUTanh
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from vitray.config import load_run
from vitray.config.augmentation import Normalize
from vitray.config.classification import Finetune
from vitray.config.model_names import WIDTHS
from vitray.errors import ConfigError
from vitray.weights import identity_of, import_weights
from vitray.weights.convert import import_state
from vitray.weights.detect import known_width
from vitray.weights.pretrained import open_initial_weights

FAMILIES = ("vit*", "deit*", "beit*", "eva*", "flexivit*")
NAMES = [name for family in FAMILIES for name in timm.list_models(family)]
# The networks of timm that vitray has too; all others are refused.
OURS = re.compile(
    r"(vit|deit3?)_(tiny|small|medium|base|large|huge)_patch\d+_(18x2_|36x1_|plus_)?\d+"
    r"|vit_(base|huge)_patch\d+_gap_\d+|vit_(base|large|giantopt)_patch\d+_siglip_gap_\d+|vit_(small|base|large)_patch14_dinov2"
    r"|vit_(small|mediumd?|betwixt|base|large)_patch\d+_reg\d_(gap_\d+|dinov2|tipsv2)"
    r"|vit_(wee|little|so150m)_patch16_reg\d_gap_\d+|vit_so400m_patch\d+_(siglip_gap_\d+|reg1_tipsv2)"
    r"|vit_giant_patch1(4|6_gap)_224|vit_gigantic_patch14_224"
    r"|eva_large_patch14_\d+|flexivit_(small|base|large)|deit_(tiny|small|base)_distilled_patch16_\d+"
    r"|vit_(tiny|small|base|large)_r\d*_s\d+(_p8)?_\d+"
)
# One name of each kind of network, and those whose tensors have the names and shapes of another network.
SAMPLE = (
    *("vit_tiny_patch16_224", "vit_base_patch16_gap_224", "vit_small_patch16_18x2_224", "vit_small_patch16_36x1_224"),
    *("vit_base_patch16_plus_240", "vit_giantopt_patch16_siglip_gap_256", "vit_small_patch14_dinov2", "flexivit_small"),
    *("deit3_medium_patch16_224", "deit_tiny_patch16_224", "eva_large_patch14_196", "vit_medium_patch16_gap_240"),
    *("vit_small_patch16_rope_224", "vit_small_patch16_rope_ape_224", "vit_small_patch16_rope_mixed_ape_224"),
    *("vit_base_patch16_224_miil", "vit_giant_patch14_224", "vit_base_patch16_clip_224", "vit_intern300m_patch14_448"),
    *("vit_base_patch16_siglip_224", "vit_wee_patch16_reg1_gap_256", "vit_relpos_small_patch16_224"),
    *("vit_tiny_r_s16_p8_224", "deit_tiny_distilled_patch16_224", "beit_base_patch16_224", "beit3_base_patch16_224"),
    *("vit_mediumd_patch16_reg4_gap_256", "vit_base_patch16_rope_reg1_gap_256"),
    *("eva02_tiny_patch14_224", "eva_giant_patch14_224", "vit_small_patch16_dinov3", "vitamin_small_224"),
)


# The class token with its position is rounded to single precision, which leaves 1e-8; the two forms of gelu differ by
# 1e-4 here.
EXACT = 1e-7


def refusal(path: object, settings: dict | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        import_weights(str(path), settings={"normalize": {}} | (settings or {}))
    return str(error.value)


# ---- every network of timm -------------------------------------------------------------------------------------------


def small_timm(name: str) -> tuple[nn.Module, int]:
    """A network of timm's, narrow and of two levels if it has such a variant, and its image size."""
    narrow = {"img_size": 56 if "patch14" in name else 64, "depth": 2, "embed_dim": 192, "num_heads": 4}
    reason: Exception | None = None
    for settings in (
        narrow,
        narrow | {"num_kv_heads": 4},  # sapiens2
        narrow | {"img_size": 128},  # a ResNet before the patches
        {"img_size": 64, "depth": 1},  # a stem of a fixed width
    ):
        try:
            return timm.create_model(name, num_classes=5, **settings), settings["img_size"]
        except (AssertionError, TypeError) as error:
            reason = error
    raise ValueError(f"{name}: {reason}")


def loads(name: str, tmp_path) -> bool:
    """Whether a network of timm's loads, with the logits of timm, once its heads and activation are given."""
    network, size = small_timm(name)
    theirs, path = scrambled(network), tmp_path / f"{name}.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in theirs.state_dict().items()}, path)
    assert name in refusal(path)  # at least the heads are missing
    is_tanh = any(isinstance(module, GELUTanh) for module in theirs.modules())
    loaded = False
    for settings in ({}, {"activation": "gelu_tanh" if is_tanh else "gelu"}):
        try:
            _, ours = import_weights(str(path), settings={"heads": 4, "normalize": {}} | settings)
        except ConfigError:
            continue
        assert difference(ours, theirs, size) < EXACT, name
        loaded = True
    path.unlink()
    return loaded


@torch.no_grad()
def test_a_network_of_timm_has_its_logits_or_is_refused(tmp_path):
    assert {name for name in SAMPLE if loads(name, tmp_path)} == set(filter(OURS.fullmatch, SAMPLE))


@pytest.mark.slow
@torch.no_grad()
def test_every_network_of_timm_has_its_logits_or_is_refused(tmp_path):
    assert len(NAMES) > 200
    assert {name for name in NAMES if loads(name, tmp_path)} == set(filter(OURS.fullmatch, NAMES))


def test_a_known_name_of_a_network_has_the_heads_of_its_width():
    known = {name: key for name in NAMES if (key := known_width(name))}
    assert len(known) > 30
    for name, key in known.items():
        with torch.device("meta"):
            theirs = timm.create_model(name, depth=1)
        assert type(theirs) is (VisionTransformerDistilled if "distilled" in name else VisionTransformer), name
        heads = {module.num_heads for module in theirs.modules() if hasattr(module, "num_heads")}
        assert (theirs.embed_dim, heads) == (WIDTHS[key].size, {WIDTHS[key].heads}), name
    for other in ("vit_base_patch16_gap_224", "vit_small_patch16_rope_ape_224", "rope_axial_deit_small_patch16_LS"):
        assert known_width(other) is None
    for theirs, key in {"deit_small_patch16_36_LS": "s", "deit_base_patch16_18x2_LS": "b", "vit_l_32": "l"}.items():
        assert known_width(theirs) == key


# ---- files that show too little --------------------------------------------------------------------------------------


def narrow(**settings) -> VisionTransformer:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 1, "num_heads": 3, "num_classes": 5}
    return scrambled(VisionTransformer(**sizes | settings))


def write(path: object, theirs: nn.Module) -> str:
    save_file({key: tensor.contiguous() for key, tensor in theirs.state_dict().items()}, str(path))
    return str(path)


def test_heads_are_demanded_and_used(tmp_path):
    theirs = narrow(num_heads=12)
    path = write(tmp_path / "w.safetensors", theirs)
    assert "do not show heads (attention heads; 3 in ViT-Ti); add model.heads=... to the run" in refusal(path)
    run, ours = import_weights(path, settings={"heads": 12, "normalize": {}})
    assert (run.model.name, run.model.heads) == ("vit_ti1x1_8", 12)
    assert difference(ours, theirs, 32) < EXACT
    assert "heads 7 do not divide the width of vit_ti1x1_8, 192" in refusal(path, {"heads": 7})


def test_heads_of_torchvision_are_demanded(tmp_path):
    sizes = {"num_layers": 1, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 256, "num_classes": 5}
    theirs = scrambled(torchvision.models.VisionTransformer(image_size=32, patch_size=8, **sizes))
    # The checkpoint of torchvision's training script, for a network that vit_b_16 does not name.
    torch.save({"model": theirs.state_dict(), "args": argparse.Namespace(model="vit_b_16")}, tmp_path / "w.pth")
    assert "of vit_b_16 do not show heads" in refusal(tmp_path / "w.pth")
    _, ours = import_weights(str(tmp_path / "w.pth"), settings={"heads": 4})
    assert difference(ours, theirs, 32) < EXACT


def test_positions_without_a_table_are_demanded(tmp_path):
    path = write(tmp_path / "w.safetensors", narrow(pos_embed="none"))
    message = refusal(path, {"heads": 3})
    assert "do not show positions (none, sincos2d or rope)" in message
    settings = {"heads": 3, "positions": "none", "image_size": 32, "normalize": {}}
    _, ours = import_weights(path, settings=settings)
    assert difference(ours, narrow(pos_embed="none"), 32) < EXACT
    assert "positions.table is missing" in refusal(path, settings | {"positions": "learned"})


def test_a_network_of_rope_is_not_read_as_deit(tmp_path):
    theirs = timm.create_model("vit_small_patch16_rope_ape_224", depth=1, embed_dim=192, num_heads=3)
    torch.save({"model": theirs.state_dict()}, tmp_path / "w.pth")
    message = refusal(tmp_path / "w.pth", {"heads": 3})
    assert "do not show positions (learned, unless the network has rope too, which is not supported)" in message


def test_a_fine_tuning_states_the_heads_of_its_weights(tmp_path):
    path = write(tmp_path / "w.safetensors", narrow(num_heads=6))
    started = {}
    for stated, heads in (("model.name=vit_ti1x1_8", 3), ("model.heads=6", 6)):
        run = load_run(None, [stated, "data.normalize={}", "data.url=d", "task.kind=finetune", f"task.weights={path}"])
        assert isinstance(run.task, Finetune)
        run, started[heads] = open_initial_weights(run, run.task, list("abcde"))
        assert (run.model.name, run.model.num_heads, run.model.image_size) == ("vit_ti1x1_8", heads, 32)
    assert started[3].identity == started[6].identity == identity_of(import_state(path))
    run = load_run(None, ["data.url=d", "task.kind=finetune", f"task.weights={path}"])
    with pytest.raises(ConfigError, match=r"task.weights: .* do not show heads"):
        open_initial_weights(run, run.task, list("abcde"))


def test_the_activation_of_a_network_without_class_token_is_demanded(tmp_path):
    theirs = narrow(class_token=False, global_pool="avg", fc_norm=False, act_layer="gelu_tanh")
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    for path in (write(tmp_path / "w.safetensors", theirs), str(tmp_path / "w.pth")):
        assert "do not show activation (gelu or gelu_tanh);" in refusal(path, {"heads": 3})
        _, ours = import_weights(path, settings={"heads": 3, "activation": "gelu_tanh", "normalize": {}})
        assert difference(ours, theirs, 32) < EXACT


@pytest.mark.parametrize("width", [512, 832])
def test_any_width_of_whole_heads_has_a_name(tmp_path, width):
    theirs = narrow(embed_dim=width, num_heads=width // 64)
    run, ours = import_weights(
        write(tmp_path / "w.safetensors", theirs), settings={"heads": width // 64, "normalize": {}}
    )
    assert (run.model.name, run.model.heads) == ({512: "vit_m1x1_8", 832: "vit_w832d1x1_8"}[width], None)
    assert difference(ours, theirs, 32) < EXACT


# ---- config.json -----------------------------------------------------------------------------------------------------


def hugging_face(folder, **settings) -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    config = ViTConfig(**sizes | {"image_size": 32, "patch_size": 8, "num_labels": 5} | settings)
    theirs = scrambled(ViTForImageClassification(config))
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    "settings",
    [
        {"num_attention_heads": 8},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu_new", "layer_norm_eps": 0.1},
        {"image_size": [16, 64]},
    ],
)
def test_a_hugging_face_folder_is_read_by_its_config(tmp_path, settings):
    theirs = hugging_face(tmp_path, **settings)
    size = settings.get("image_size", (32, 32))
    for url in (str(tmp_path), str(tmp_path / "model.safetensors")):
        _, ours = import_weights(url, settings={"normalize": {}})
        assert difference(ours, theirs, *size) < EXACT
    message = refusal(tmp_path, {"heads": 4})
    assert f"heads: got 4, and the network of the file has {settings.get('num_attention_heads', 2)}" in message


def test_other_networks_of_hugging_face_are_refused(tmp_path):
    hugging_face(tmp_path / "relu", hidden_act="relu")
    assert "hidden_act relu, expected one of gelu, " in refusal(tmp_path / "relu")
    hugging_face(tmp_path / "plain", qkv_bias=False)
    assert "qkv.bias is missing" in refusal(tmp_path / "plain")
    (tmp_path / "relu" / "config.json").unlink()
    assert "do not show activation (gelu or gelu_tanh), heads " in refusal(tmp_path / "relu")
    (tmp_path / "plain" / "config.json").write_text("{")
    assert "config.json: not JSON" in refusal(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "vit", "num_attention_heads": null}')
    assert "do not show heads " in refusal(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text('{"model_type": "vit_msn"}')
    assert "model_type vit_msn, expected vit" in refusal(tmp_path / "plain")


def timm_folder(folder, theirs: nn.Module, config: dict) -> str:
    """A folder as timm writes it for the Hugging Face hub."""
    folder.mkdir()
    write(folder / "model.safetensors", theirs)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_timm_folder_names_its_network(tmp_path):
    name = "vit_tiny_patch8_224.augreg_in1k"
    config = {"architecture": name, "num_classes": 5, "global_pool": "token", "model_args": {"img_size": 32}}
    for folder, theirs, changes in (
        ("named", narrow(), {}),
        ("heads", narrow(num_heads=12), {"architecture": "vit_mine", "model_args": {"num_heads": 12}}),
        ("pool", narrow(global_pool="avg", fc_norm=False), {"global_pool": "avg"}),
        ("wide", narrow(img_size=(16, 64)), {"model_args": {"img_size": [16, 64]}}),
    ):
        run, ours = import_weights(timm_folder(tmp_path / folder, theirs, config | changes), settings={"normalize": {}})
        assert difference(ours, theirs, *run.model.image_shape) < EXACT, folder
    for folder, changes, reason in (
        ("unnamed", {"architecture": "vit_base_patch16_gap_224"}, "of vit_base_patch16_gap_224 do not show heads"),
        ("wider", {"architecture": "vit_small_patch8_224"}, "of vit_small_patch8_224 do not show heads"),
        ("rope", {"architecture": "vit_tiny_patch8_rope_ape_32"}, "of timm's networks with rope vitray has vit_small"),
        ("map", {"global_pool": "map"}, "config.json: global_pool map"),
        ("other", {"model_args": {"act_layer": "relu"}}, "config.json: model_args has act_layer"),
    ):
        assert reason in refusal(timm_folder(tmp_path / folder, narrow(), config | changes))


# ---- normalization ---------------------------------------------------------------------------------------------------

IMAGENET = Normalize()
OTHER = Normalize(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
TIMM_SETTINGS = {"architecture": "vit_tiny_patch8_32", "global_pool": "token"}


def test_the_normalization_is_that_beside_the_tensors(tmp_path):
    stated = {"mean": OTHER.mean, "std": OTHER.std}
    for folder, config in (("nested", {"pretrained_cfg": stated}), ("flat", stated)):
        run, _ = import_weights(timm_folder(tmp_path / folder, narrow(), TIMM_SETTINGS | config))
        assert run.data.normalize == OTHER
    hugging_face(tmp_path / "hf")
    for processor, wanted in (
        ({"do_normalize": True, "image_mean": OTHER.mean, "image_std": OTHER.std}, OTHER),
        ({"do_normalize": False}, Normalize(mean=(0, 0, 0), std=(1, 1, 1))),
    ):
        (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps(processor))
        assert import_weights(str(tmp_path / "hf"))[0].data.normalize == wanted


def test_a_normalization_that_no_file_shows_is_demanded_and_used(tmp_path):
    folder = timm_folder(tmp_path / "m", narrow(), TIMM_SETTINGS)
    with pytest.raises(ConfigError, match=r"do not show normalize .*; add data.normalize=... to the run, or save"):
        import_weights(folder)
    given = OTHER.model_dump(mode="json")
    assert import_weights(folder, settings={"normalize": given})[0].data.normalize == OTHER
    words = ["data.url=d", "task.kind=finetune", f"task.weights={folder}"]
    run = load_run(None, [*words, f"data.normalize={json.dumps(given)}"])
    assert isinstance(run.task, Finetune)
    assert open_initial_weights(run, run.task, list("abcde"))[0].data.normalize == OTHER
    run = load_run(None, words)
    with pytest.raises(ConfigError, match=r"task.weights: .* do not show normalize"):
        open_initial_weights(run, run.task, list("abcde"))


# ---- checkpoints of training scripts ---------------------------------------------------------------------------------


def deit_checkpoint(path, theirs: nn.Module, **args) -> str:
    """A checkpoint as DeiT's main.py writes it."""
    optimizer = torch.optim.AdamW(theirs.parameters())
    args = argparse.Namespace(**{"model": "deit_tiny_patch8_32", "lr": 5e-4, "eval": False, "aa": None} | args)
    content = {"model": theirs.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "args": args}
    torch.save(content | {"model_ema": theirs.state_dict(), "scaler": {"scale": 65536.0}}, path)
    return str(path)


def test_a_checkpoint_of_deit_loads_with_its_arguments(tmp_path):
    theirs = narrow()
    run, ours = import_weights(deit_checkpoint(tmp_path / "checkpoint.pth", theirs))
    assert (run.model.name, run.data.normalize) == ("vit_ti1x1_8", IMAGENET)
    assert difference(ours, theirs, 32) < EXACT
    assert argparse.Namespace not in torch.serialization.get_safe_globals()
    other = deit_checkpoint(tmp_path / "other.pth", theirs, model="mine")
    assert "of mine do not show heads" in refusal(other)


class Harmful:
    def __reduce__(self):
        return (print, ("ran",))


class HarmfulNamespace(argparse.Namespace):
    def __setstate__(self, state):
        print("ran")


def test_arguments_cannot_run_code(tmp_path, capsys):
    for args in ({"aa": Harmful()}, {"aa": HarmfulNamespace(a=1)}, {"output_dir": tmp_path}):
        path = deit_checkpoint(tmp_path / "checkpoint.pth", narrow(), **args)
        assert "which only running code could load" in refusal(path)
    assert "ran" not in capsys.readouterr().out
