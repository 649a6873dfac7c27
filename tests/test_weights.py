"""Imported and exported weights give the logits of timm, torchvision, Hugging Face, DeiT and Google."""

import json
import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from networks import scrambled
from safetensors.torch import load_file, save_file
from timm.layers import SwiGLUPacked
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from pipelines.__main__ import main
from vitray.config import Model, Run
from vitray.config.augmentation import Normalize
from vitray.errors import ConfigError
from vitray.models.positions import sincos2d
from vitray.models.vit import ViT
from vitray.system import storage
from vitray.system.lease import own_folder
from vitray.weights import export_weights, import_weights, load_model, save_model

WIDTH, PATCH, CLASSES = 64, 8, 5


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def imported(path: object, **settings) -> tuple[Run, ViT]:
    """Import a file, which shows neither its two heads nor always its normalization."""
    return import_weights(str(path), settings={"heads": 2, "normalize": {}} | settings)


def timm_vit(size: int = 32, **settings) -> VisionTransformer:
    sizes = {"img_size": size, "patch_size": PATCH, "embed_dim": WIDTH, "depth": 3, "num_heads": 2}
    return VisionTransformer(**sizes | {"num_classes": CLASSES} | settings)


class DeitAttention(nn.Module):
    """Attention with DeiT's tensor names and an explicit softmax."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, WIDTH // 2).unbind(2)
        weights = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(WIDTH // 2)
        return self.proj(torch.einsum("bhij,bjhd->bihd", weights.softmax(-1), v).flatten(2))


class DeitMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class DeitBlock(nn.Module):
    """DeiT's block with its tensor names: norm1/norm11, attn/attn1, gamma_1/gamma_1_1, norm2/norm21, mlp/mlp1."""

    def __init__(self, branches, scaled):
        super().__init__()
        self.ends = ["", "1"][:branches]
        for end in self.ends:
            self.add_module(f"norm1{end}", nn.LayerNorm(WIDTH, eps=1e-6))
            self.add_module(f"attn{end}", DeitAttention())
            self.add_module(f"norm2{end}", nn.LayerNorm(WIDTH, eps=1e-6))
            self.add_module(f"mlp{end}", DeitMlp())
            for part in ("gamma_1", "gamma_2"):
                if scaled:
                    self.register_parameter(part + (end and "_1"), nn.Parameter(torch.ones(WIDTH)))

    def forward(self, x):
        for norm, part, gamma in (("norm1", "attn", "gamma_1"), ("norm2", "mlp", "gamma_2")):
            scales = [getattr(self, gamma + (end and "_1"), 1.0) for end in self.ends]
            outs = [getattr(self, part + end)(getattr(self, norm + end)(x)) for end in self.ends]
            x = x + sum(scale * out for scale, out in zip(scales, outs, strict=True))
        return x


class Deit(nn.Module):
    """DeiT III: positions without a class slot, added before the class token."""

    def __init__(self, branches=1, scaled=True, hmlp=False):
        super().__init__()
        quarter = WIDTH // 4
        stem = [nn.Conv2d(3, quarter, 4, 4), nn.BatchNorm2d(quarter), nn.GELU()]
        stem += [nn.Conv2d(quarter, WIDTH, 2, 2), nn.BatchNorm2d(WIDTH)]
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Sequential(*stem) if hmlp else nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.blocks = nn.ModuleList(DeitBlock(branches, scaled) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patch_embed.proj(x)
        side = x.shape[-1]
        table = self.pos_embed.reshape(1, 4, 4, WIDTH).permute(0, 3, 1, 2)
        if side != 4:  # main.py of DeiT resizes on load
            table = F.interpolate(table, size=(side, side), mode="bicubic", align_corners=False)
        x = (x + table).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "vit_u3x1_8"),
        ({"init_values": 1e-2}, "vit_u3x1_8"),
        ({"no_embed_class": True}, "vit_u3x1_8"),
        ({"global_pool": "avg"}, "vit_u3x1_8"),
        ({"block_fn": ParallelThingsBlock, "init_values": 1e-2}, "vit_u3x2_8"),
        ({"num_classes_": 0}, "vit_u3x1_8"),
    ],
)
def test_timm(tmp_path, settings, name):
    theirs = scrambled(timm_vit(**{k: v for k, v in settings.items() if not k.endswith("_")}))
    if "num_classes_" in settings:
        theirs.reset_classifier(0)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    run, ours = imported(tmp_path / "w.safetensors")
    assert run.model.name == name
    assert run.model.positions.resample == "timm"
    assert agree(ours(images()), theirs(images()))


def test_timm_at_another_resolution(tmp_path):
    theirs = scrambled(timm_vit(dynamic_img_size=True))
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    _, ours = imported(tmp_path / "w.safetensors")
    assert agree(ours(images(48)), theirs(images(48)))


@pytest.mark.parametrize("hidden", [None, 32])
def test_torchvision(tmp_path, hidden):
    sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": WIDTH, "mlp_dim": 4 * WIDTH, "num_classes": CLASSES}
    build = torchvision.models.VisionTransformer
    theirs = scrambled(build(image_size=32, patch_size=PATCH, representation_size=hidden, **sizes))
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    run, ours = imported(tmp_path / "w.pth")
    assert run.model.head.kind == ("mlp" if hidden else "linear")
    assert agree(ours(images()), theirs(images()))
    larger = build(image_size=48, patch_size=PATCH, representation_size=hidden, **sizes).eval()
    resized = torchvision.models.vision_transformer.interpolate_embeddings(48, PATCH, theirs.state_dict())
    larger.load_state_dict(resized)
    assert agree(ours(images(48)), larger(images(48)))


@pytest.mark.parametrize(
    ("ratio", "settings"), [(2.5, {}), (4, {}), (5, {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU})]
)
def test_the_hidden_width_is_that_of_the_file(tmp_path, ratio, settings):
    theirs = scrambled(timm_vit(mlp_ratio=ratio, **settings))
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    run, ours = imported(tmp_path / "w.safetensors", **({"activation": "swiglu"} if settings else {}))
    assert run.model.ffn_ratio == {2.5: 2.5, 4: None, 5: 2.5}[ratio]
    assert agree(ours(images()), theirs(images()))


def hugging_face() -> ViTForImageClassification:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 4 * WIDTH}
    config = ViTConfig(**sizes, image_size=32, patch_size=PATCH, num_labels=CLASSES)
    return scrambled(ViTForImageClassification(config))


def test_hugging_face(tmp_path):
    theirs = hugging_face()
    theirs.save_pretrained(tmp_path)
    run, ours = import_weights(str(tmp_path), settings={"normalize": {}})
    assert run.model.norm_eps == 1e-12
    assert agree(ours(images()), theirs(images()).logits)
    assert agree(ours(images(48)), theirs(images(48), interpolate_pos_encoding=True).logits)


def test_hugging_face_names_in_memory(tmp_path):
    theirs = hugging_face()
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    _, ours = imported(tmp_path / "w.safetensors", activation="gelu", norm_eps=1e-12)
    assert agree(ours(images()), theirs(images()).logits)


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("scaled", [True, False])
def test_deit(tmp_path, branches, scaled):
    theirs = scrambled(Deit(branches, scaled))
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "w.pth")
    run, ours = imported(tmp_path / "w.pth", positions="learned")
    assert run.model.name == f"vit_u3x{branches}_8"
    assert (run.model.layerscale is not None) == scaled
    assert run.model.positions.resample == "deit"
    for size in (32, 48):
        assert agree(ours(images(size)), theirs(images(size)))


def test_deit_with_hmlp_stem(tmp_path):
    theirs = scrambled(Deit(hmlp=True))
    torch.save({"model": theirs.state_dict()}, tmp_path / "w.pth")
    run, ours = imported(tmp_path / "w.pth")
    assert run.model.name == "vit_u3x1_8_hmlp_bn"
    assert agree(ours(images()), theirs(images()))


def google_arrays(vit: VisionTransformer, big_vision: bool = False) -> dict[str, np.ndarray]:
    """The weights of a timm network in flax's layout."""
    state = {key: value.numpy() for key, value in vit.state_dict().items()}
    number = vit.blocks[0].attn.num_heads
    attention, norm, mlp = ("_0", "_1", "_0") if big_vision else ("_1", "_2", "_3")
    arrays = {
        "cls": state["cls_token"],
        "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    for level in range(3):
        theirs, ours = f"Transformer/encoderblock_{level}/", f"blocks.{level}."
        for target, source in ((f"{theirs}LayerNorm_0", f"{ours}norm1"), (f"{theirs}LayerNorm{norm}", f"{ours}norm2")):
            arrays |= {f"{target}/scale": state[f"{source}.weight"], f"{target}/bias": state[f"{source}.bias"]}
        for dense, source in (("Dense_0", "fc1"), ("Dense_1", "fc2")):
            arrays[f"{theirs}MlpBlock{mlp}/{dense}/kernel"] = state[f"{ours}mlp.{source}.weight"].T
            arrays[f"{theirs}MlpBlock{mlp}/{dense}/bias"] = state[f"{ours}mlp.{source}.bias"]
        heads = f"{theirs}MultiHeadDotProductAttention{attention}"
        for index, part in enumerate(("query", "key", "value")):
            rows = slice(index * WIDTH, (index + 1) * WIDTH)
            arrays[f"{heads}/{part}/kernel"] = state[f"{ours}attn.qkv.weight"][rows].T.reshape(WIDTH, number, -1)
            arrays[f"{heads}/{part}/bias"] = state[f"{ours}attn.qkv.bias"][rows].reshape(number, -1)
        arrays[f"{heads}/out/kernel"] = state[f"{ours}attn.proj.weight"].T.reshape(number, -1, WIDTH)
        arrays[f"{heads}/out/bias"] = state[f"{ours}attn.proj.bias"]
    return arrays


@pytest.mark.parametrize(("big_vision", "prefix"), [(False, ""), (False, "opt/target/"), (True, "params/")])
def test_google(tmp_path, big_vision, prefix):
    # The reference: timm reads the same file; the activation is that of flax.
    source = scrambled(timm_vit(act_layer="gelu_tanh"), seed=4)
    arrays = {prefix + key: array for key, array in google_arrays(source, big_vision).items()}
    np.savez(tmp_path / "w.npz", **arrays)
    run, ours = import_weights(str(tmp_path / "w.npz"))
    assert run.model.activation == "gelu_tanh"
    assert run.data.normalize == Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert agree(ours(images()), source(images()))
    if not big_vision:
        theirs = timm_vit(act_layer="gelu_tanh").eval()
        theirs.load_pretrained(str(tmp_path / "w.npz"))
        assert agree(ours(images()), theirs(images()))


def test_google_shows_its_heads_and_not_its_fixed_positions(tmp_path):
    source = scrambled(timm_vit(num_heads=8, act_layer="gelu_tanh"))
    arrays = google_arrays(source, big_vision=True)
    np.savez(tmp_path / "w.npz", **arrays)
    run, ours = import_weights(str(tmp_path / "w.npz"))
    assert run.model.num_heads == 8
    assert agree(ours(images()), source(images()))
    del arrays["pos_embedding"]  # big_vision computes sin-cos positions
    np.savez(tmp_path / "w.npz", **arrays)
    with pytest.raises(ConfigError, match=r"do not show positions \(none, sincos2d or rope\)"):
        import_weights(str(tmp_path / "w.npz"))
    source.pos_embed.data.copy_(F.pad(sincos2d((4, 4), WIDTH, "big_vision"), (0, 0, 1, 0)))
    fixed = {"kind": "sincos2d", "frequencies": "big_vision"}
    _, ours = import_weights(str(tmp_path / "w.npz"), settings={"positions": fixed, "image_size": 32})
    assert agree(ours(images()), source(images()))


def test_google_resizes_bilinearly_with_corners_aligned(tmp_path):
    source = scrambled(timm_vit(act_layer="gelu_tanh"))
    np.savez(tmp_path / "w.npz", **google_arrays(source))
    _, ours = import_weights(str(tmp_path / "w.npz"))
    larger = timm_vit(48, act_layer="gelu_tanh")
    state = source.state_dict()
    # Google calls scipy's zoom(order=1): aligned corners, linear in between.
    at = np.linspace(0, 3, 6)
    low, part = np.minimum(at.astype(int), 2), at - np.minimum(at.astype(int), 2)
    table = state["pos_embed"][0, 1:].reshape(4, 4, WIDTH).numpy()
    table = table[low] * (1 - part)[:, None, None] + table[low + 1] * part[:, None, None]
    table = table[:, low] * (1 - part)[None, :, None] + table[:, low + 1] * part[None, :, None]
    table = torch.from_numpy(table.reshape(1, 36, WIDTH)).float()
    larger.load_state_dict(state | {"pos_embed": torch.cat([state["pos_embed"][:, :1], table], dim=1)})
    assert agree(ours(images(48)), larger.eval()(images(48)))


# ---- export ----------------------------------------------------------------------------------------------------------


def our_vit(**settings) -> ViT:
    return scrambled(ViT(Model(**{"name": "vit_u3x1_8", "image_size": 32, "num_classes": CLASSES} | settings)))


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({}, {}),
        ({"layerscale": 0.1}, {"init_values": 0.1}),
        ({"name": "vit_u3x2_8", "layerscale": 0.1}, {"block_fn": ParallelThingsBlock, "init_values": 0.1}),
        ({"pool": "mean_then_norm"}, {"global_pool": "avg"}),
        ({"positions": "sincos2d"}, {}),
    ],
)
def test_export_to_timm(settings, theirs):
    ours = our_vit(**settings)
    model = timm_vit(**theirs).eval()
    model.load_state_dict(export_weights(ours, "timm"))
    assert agree(ours(images()), model(images()))


def test_export_to_torchvision():
    ours = our_vit(head={"kind": "mlp", "hidden": 32})
    sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": WIDTH, "mlp_dim": 4 * WIDTH, "num_classes": CLASSES}
    theirs = torchvision.models.VisionTransformer(image_size=32, patch_size=PATCH, representation_size=32, **sizes)
    theirs.load_state_dict(export_weights(ours, "torchvision"))
    assert agree(ours(images()), theirs.eval()(images()))


def test_export_to_hugging_face_loads_from_a_folder(tmp_path):
    ours = our_vit(norm_eps=1e-12)
    hugging_face().config.save_pretrained(tmp_path)
    save_file(export_weights(ours, "hf"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = ViTForImageClassification.from_pretrained(tmp_path).eval()
    assert agree(ours(images()), theirs(images()).logits)


def test_an_export_is_imported_bit_for_bit(tmp_path):
    for layout, settings in (("timm", {"name": "vit_u3x2_8"}), ("torchvision", {}), ("hf", {})):
        ours = our_vit(**settings)
        lacking = {"activation": "gelu", "norm_eps": 1e-6} if layout == "hf" else {}
        save_file(export_weights(ours, layout), tmp_path / f"{layout}.safetensors")
        _, back = imported(tmp_path / f"{layout}.safetensors", **lacking)
        for key, tensor in ours.state_dict().items():
            assert torch.equal(back.state_dict()[key], tensor), (layout, key)


@pytest.mark.parametrize(
    ("settings", "layout", "named"),
    [
        ({"name": "vit_u3x2_8"}, "hf", "hf has no parallel branches, and this model has 2"),
        ({"layerscale": 0.1}, "torchvision", "torchvision has no LayerScale"),
        ({}, "jax", "expected timm, torchvision or hf"),
        ({"pool": "mean"}, "hf", "hf reads the class token, and this model's pool is mean"),
        ({"pool": "mean_then_norm"}, "torchvision", "torchvision reads the class token"),
        ({"activation": "gelu_tanh"}, "torchvision", "torchvision computes the exact gelu"),
    ],
)
def test_networks_outside_a_layout_are_refused(settings, layout, named):
    with pytest.raises(ConfigError, match=named):
        export_weights(our_vit(**settings), layout)


# ---- bad files -------------------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self):
        return (exec, ("print('ran')",))  # Ray Data replaces `print`


@pytest.mark.parametrize(("is_zip", "named"), [(True, "builtins.exec"), (False, "more than tensors")])
def test_a_pickle_cannot_run_code(tmp_path, capsys, is_zip, named):
    torch.save({"model": {"x": Harmful()}}, tmp_path / "w.pth", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ConfigError, match=f"{named}, which only running code could load"):
        import_weights(str(tmp_path / "w.pth"))
    assert "ran" not in capsys.readouterr().out


def test_files_that_do_not_fit_name_the_tensors(tmp_path):
    state = timm_vit().state_dict()
    path = str(tmp_path / "w.safetensors")
    cases = {
        "blocks.1.attn1.qkv.bias is missing": {k: v for k, v in state.items() if k != "blocks.1.attn.qkv.bias"},
        "extra_token has no place": state | {"extra_token": torch.zeros(1)},
        r"distillation_token is \(1,\), expected \(64,\)": state | {"dist_token": torch.zeros(1)},
        r"blocks.2.ffn1.up.weight is \(64, 64\), expected \(256, 64\)": state
        | {"blocks.2.mlp.fc1.weight": torch.zeros(64, 64)},
        "width 48 is none of u 64": state | {"norm.weight": torch.zeros(48)},
        "a layout we do not know, with x.y": {"x.y": torch.zeros(1)},
    }
    for message, tensors in cases.items():
        save_file(tensors, path)
        with pytest.raises(ConfigError, match=message):
            imported(path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.npz", "w.pth"])
def test_broken_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\x03\x04 not what it says")
    with pytest.raises(ConfigError, match=f"{name}: not a"):
        import_weights(str(tmp_path / name))
    with pytest.raises(ConfigError, match="no such file"):
        import_weights(str(tmp_path / f"absent_{name}"))


# ---- model folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"name": "vit_u2x2_8_hmlp_bn", "layerscale": 0.1}, {"num_classes": None}])
def test_a_model_folder_keeps_everything(tmp_path, settings):
    vit = our_vit(**settings)
    classes = None if vit.model.num_classes is None else list("abcde")
    save_model(str(tmp_path / "m"), Run(seed=3, model=vit.model), vit, classes)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["classes.json", "model.safetensors", "run.yaml"]
    loaded = load_model(str(tmp_path / "m"))
    assert loaded.run == Run(seed=3, model=vit.model)
    assert loaded.classes == classes
    assert torch.equal(loaded.vit(images()), vit(images()))


def test_a_model_folder_is_never_overwritten_nor_half_read(tmp_path):
    vit = our_vit()
    folder = tmp_path / "m"
    save_model(str(folder), Run(model=vit.model), vit)
    with pytest.raises(ConfigError, match="a model is there already"):
        save_model(str(folder), Run(model=vit.model), vit)
    with pytest.raises(ConfigError, match="2 class names for 5 classes"):
        save_model(str(tmp_path / "n"), Run(model=vit.model), vit, ["a", "b"])
    state = load_file(folder / "model.safetensors")
    del state["norm.bias"]
    save_file(state | {"extra": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"extra has no place; norm.bias is missing"):
        load_model(str(folder))
    (folder / "run.yaml").unlink()
    with pytest.raises(ConfigError, match=r"no run\.yaml"):
        load_model(str(folder))


@pytest.mark.parametrize("place", ["local", "s3"])
def test_of_two_writers_of_a_model_folder_the_second_is_refused(tmp_path, s3_server, capsys, place):
    vit, source = our_vit(), str(tmp_path / "m")
    save_model(source, Run(model=vit.model), vit)
    target = str(tmp_path / "n") if place == "local" else f"s3://bucket/{tmp_path.name}"
    with own_folder(target, "model"):
        assert main(["weights", "flatten", source, target]) == 2
    message = capsys.readouterr().err
    assert f"model: {target} is in use by process " in message
    assert message.endswith("wait for it to end, stop it, or choose another folder\n")
    assert storage.list_files(target) == []
    assert main(["weights", "flatten", source, target]) == 0
    assert storage.list_files(target) == ["classes.json", "model.safetensors", "run.yaml"]


def test_a_model_folder_keeps_nothing_of_a_killed_write(tmp_path):
    vit, folder = our_vit(), tmp_path / "m"
    folder.mkdir()
    (folder / f"{storage.UNFINISHED}0123").write_bytes(b"half of the weights")
    save_model(str(folder), Run(model=vit.model), vit)
    assert sorted(path.name for path in folder.iterdir()) == ["classes.json", "model.safetensors", "run.yaml"]


def test_settings_that_shapes_cannot_show_are_given(tmp_path):
    source = our_vit(image_size=[16, 64])
    save_file(export_weights(source, "timm"), tmp_path / "w.safetensors")
    cropped = images(64)[:, :, :16]
    _, ours = imported(tmp_path / "w.safetensors", image_size=[16, 64])
    assert agree(ours(cropped), source(cropped))


def test_every_timm_vit_of_the_papers_has_our_shape():
    # Shapes only: the registered 18x2 models of timm and ours have the same tensors.
    for theirs, name in (("vit_small_patch16_18x2_224", "vit_s18x2_16"), ("vit_large_patch16_224", "vit_l24x1_16")):
        with torch.device("meta"):
            model = timm.create_model(theirs)
            ours = ViT(Model(name=name, layerscale=1e-5 if "18x2" in theirs else None))
        with torch.device("meta"):
            exported = export_weights(ours, "timm")
        assert {k: v.shape for k, v in exported.items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_classes_are_plain_json(tmp_path):
    vit = our_vit()
    save_model(str(tmp_path / "m"), Run(model=vit.model), vit, list("abcde"))
    assert json.loads((tmp_path / "m" / "classes.json").read_text()) == list("abcde")
