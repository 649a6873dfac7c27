"""The tensor names of other libraries' ViTs: one literal table per layout, used in both directions.

In a name, `{i}` is the level, `{b}` the branch counted from 0, `{s}` DeiT's suffix of a branch ("" or "1"), `{p}` the
layout's name for weight or bias, and `{x}` its names for query, key and value, whose tensors are concatenated in order.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vitray.config import Model
from vitray.config.augmentation import Normalize

Names = dict[str, str]
# Colors from -1 to 1, as Google's networks read them.
MINUS_ONE_TO_ONE = Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


class WeightLayout(NamedTuple):
    """The tensor names of one library, and the fixed settings of its networks."""

    marker: str
    """A tensor unique to this layout."""
    names: Names
    resample: str
    """The library's method to resize positions (`model.positions.resample`)."""
    activation: str = "gelu"
    norm_eps: float = 1e-6
    leaves: tuple[str, str, str] = ("weight", "bias", "weight")
    """Its names for a weight, a bias, and the weight of a norm."""
    qkv: tuple[str, ...] = ()
    """Its names for query, key and value; empty for a fused tensor."""
    resnet: Names | None = None
    """Its names for the ResNet of a hybrid: `{stage}` and `{unit}` count from 0, `{stage1}` and `{unit1}` from 1."""
    resnet_eps: str = "vit"
    """The epsilons of that ResNet (`model.resnet_eps`)."""
    normalize: Normalize | None = None
    """The normalization of all networks that the library publishes; None where they differ."""

    def tensors(self, part: str, kind: str, level: int | str = "", branch: int = 0) -> tuple[str, ...]:
        """Return the names of a part's tensors; empty if the layout lacks the part."""
        if part not in self.names:
            return ()
        name, suffix = self.names[part], str(branch or "")
        weight, bias, norm_weight = self.leaves
        leaf = {"weight": norm_weight if part.endswith("norm") else weight, "bias": bias}.get(kind, kind)
        values = {"i": level, "b": branch, "s": suffix, "_s": suffix and f"_{suffix}", "p": leaf}
        return tuple(name.format(**values, x=vector) for vector in (self.qkv if "{x}" in name else ("",)))


_TIMM_ENDS: Names = {
    "class_token": "cls_token",
    "distillation_token": "dist_token",
    "registers": "reg_token",
    "positions": "pos_embed",
    "stem": "patch_embed.proj.{p}",
    "norm": "norm.{p}",
    "pooled_norm": "fc_norm.{p}",
    "head": "head.{p}",
    "distillation_head": "head_dist.{p}",
    "hidden": "pre_logits.fc.{p}",
}

# The second branch of an x2 block is norm11, attn1, gamma_1_1, norm21, mlp1, gamma_2_1.
_DEIT = WeightLayout(
    marker="blocks.0.gamma_1",
    names=_TIMM_ENDS
    | {
        "attn.norm": "blocks.{i}.norm1{s}.{p}",
        "attn.qkv": "blocks.{i}.attn{s}.qkv.{p}",
        "attn.q_norm": "blocks.{i}.attn{s}.q_norm.{p}",
        "attn.k_norm": "blocks.{i}.attn{s}.k_norm.{p}",
        "attn.out": "blocks.{i}.attn{s}.proj.{p}",
        "attn.scale": "blocks.{i}.gamma_1{_s}",
        "ffn.norm": "blocks.{i}.norm2{s}.{p}",
        "ffn.up": "blocks.{i}.mlp{s}.fc1.{p}",
        "ffn.down": "blocks.{i}.mlp{s}.fc2.{p}",
        "ffn.scale": "blocks.{i}.gamma_2{_s}",
    },
    resample="deit",
    resnet={
        "root": "patch_embed.backbone.stem.conv.{p}",
        "root_norm": "patch_embed.backbone.stem.norm.{p}",
        "alone": "patch_embed.backbone.conv.{p}",
        "alone_norm": "patch_embed.backbone.norm.{p}",
        "unit": "patch_embed.backbone.stages.{stage}.blocks.{unit}.{part}.{p}",
        "norm": "norm",
        "down": "downsample.conv",
        "down_norm": "downsample.norm",
    },
    resnet_eps="timm",
    normalize=Normalize(),
)

# Files of Hugging Face; transformers 5 reads and writes these names and uses hf5's in memory.
_HF = WeightLayout(
    marker="vit.encoder.layer.0.attention.attention.query.weight",
    names={
        "class_token": "vit.embeddings.cls_token",
        "positions": "vit.embeddings.position_embeddings",
        "stem": "vit.embeddings.patch_embeddings.projection.{p}",
        "attn.norm": "vit.encoder.layer.{i}.layernorm_before.{p}",
        "attn.qkv": "vit.encoder.layer.{i}.attention.attention.{x}.{p}",
        "attn.out": "vit.encoder.layer.{i}.attention.output.dense.{p}",
        "ffn.norm": "vit.encoder.layer.{i}.layernorm_after.{p}",
        "ffn.up": "vit.encoder.layer.{i}.intermediate.dense.{p}",
        "ffn.down": "vit.encoder.layer.{i}.output.dense.{p}",
        "norm": "vit.layernorm.{p}",
        "head": "classifier.{p}",
    },
    resample="deit",
    norm_eps=1e-12,
    qkv=("query", "key", "value"),
)

_HF5 = _HF._replace(
    marker="vit.layers.0.attention.q_proj.weight",
    qkv=("q", "k", "v"),
    names=_HF.names
    | {
        "attn.norm": "vit.layers.{i}.layernorm_before.{p}",
        "attn.qkv": "vit.layers.{i}.attention.{x}_proj.{p}",
        "attn.out": "vit.layers.{i}.attention.o_proj.{p}",
        "ffn.norm": "vit.layers.{i}.layernorm_after.{p}",
        "ffn.up": "vit.layers.{i}.mlp.fc1.{p}",
        "ffn.down": "vit.layers.{i}.mlp.fc2.{p}",
    },
)


def _distilled(layout: WeightLayout) -> WeightLayout:
    """Return the names of Hugging Face's DeiT with two heads."""
    own = {
        "distillation_token": "deit.embeddings.distillation_token",
        "head": "cls_classifier.{p}",
        "distillation_head": "distillation_classifier.{p}",
    }
    names = {part: name.replace("vit.", "deit.") for part, name in layout.names.items()}
    return layout._replace(marker=layout.marker.replace("vit.", "deit."), names=names | own)


_GOOGLE = WeightLayout(
    marker="Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel",
    names={
        "class_token": "cls",
        "positions": "Transformer/posembed_input/pos_embedding",
        "stem": "embedding/{p}",
        "attn.norm": "Transformer/encoderblock_{i}/LayerNorm_0/{p}",
        "attn.qkv": "Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/{x}/{p}",
        "attn.out": "Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/out/{p}",
        "ffn.norm": "Transformer/encoderblock_{i}/LayerNorm_2/{p}",
        "ffn.up": "Transformer/encoderblock_{i}/MlpBlock_3/Dense_0/{p}",
        "ffn.down": "Transformer/encoderblock_{i}/MlpBlock_3/Dense_1/{p}",
        "norm": "Transformer/encoder_norm/{p}",
        "head": "head/{p}",
        "hidden": "pre_logits/{p}",
    },
    resample="google",
    resnet={
        "root": "conv_root/{p}",
        "root_norm": "gn_root/{p}",
        "alone": "conv_root/{p}",
        "alone_norm": "gn_root/{p}",
        "unit": "block{stage1}/unit{unit1}/{part}/{p}",
        "norm": "gn",
        "down": "conv_proj",
        "down_norm": "gn_proj",
    },
    activation="gelu_tanh",
    qkv=("query", "key", "value"),
    leaves=("kernel", "bias", "scale"),
    normalize=MINUS_ONE_TO_ONE,
)

LAYOUTS: dict[str, WeightLayout] = {
    # Networks of one branch have DeiT's names, except those of LayerScale.
    "timm": _DEIT._replace(
        marker="blocks.0.attn.qkv.weight",
        names=_DEIT.names | {"attn.scale": "blocks.{i}.ls1.gamma", "ffn.scale": "blocks.{i}.ls2.gamma"},
        resample="timm",
        normalize=None,
    ),
    "timm_parallel": WeightLayout(
        marker="blocks.0.attns.0.attn.qkv.weight",
        names=_TIMM_ENDS
        | {
            "attn.norm": "blocks.{i}.attns.{b}.norm.{p}",
            "attn.qkv": "blocks.{i}.attns.{b}.attn.qkv.{p}",
            "attn.q_norm": "blocks.{i}.attns.{b}.attn.q_norm.{p}",
            "attn.k_norm": "blocks.{i}.attns.{b}.attn.k_norm.{p}",
            "attn.out": "blocks.{i}.attns.{b}.attn.proj.{p}",
            "attn.scale": "blocks.{i}.attns.{b}.ls.gamma",
            "ffn.norm": "blocks.{i}.ffns.{b}.norm.{p}",
            "ffn.up": "blocks.{i}.ffns.{b}.mlp.fc1.{p}",
            "ffn.down": "blocks.{i}.ffns.{b}.mlp.fc2.{p}",
            "ffn.scale": "blocks.{i}.ffns.{b}.ls.gamma",
        },
        resample="timm",
    ),
    "deit": _DEIT,
    "torchvision": WeightLayout(
        marker="conv_proj.weight",
        names={
            "class_token": "class_token",
            "positions": "encoder.pos_embedding",
            "stem": "conv_proj.{p}",
            "attn.norm": "encoder.layers.encoder_layer_{i}.ln_1.{p}",
            "attn.qkv": "encoder.layers.encoder_layer_{i}.self_attention.in_proj_{p}",
            "attn.out": "encoder.layers.encoder_layer_{i}.self_attention.out_proj.{p}",
            "ffn.norm": "encoder.layers.encoder_layer_{i}.ln_2.{p}",
            "ffn.up": "encoder.layers.encoder_layer_{i}.mlp.0.{p}",
            "ffn.down": "encoder.layers.encoder_layer_{i}.mlp.3.{p}",
            "norm": "encoder.ln.{p}",
            "head": "heads.head.{p}",
            "hidden": "heads.pre_logits.{p}",
        },
        resample="torchvision",
        normalize=Normalize(),
    ),
    "hf": _HF,
    "hf5": _HF5,
    "hf_distilled": _distilled(_HF),
    "hf5_distilled": _distilled(_HF5),
    "google": _GOOGLE,
    "big_vision": _GOOGLE._replace(
        marker="Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel",
        names=_GOOGLE.names
        | {
            "positions": "pos_embedding",
            "attn.qkv": "Transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/{x}/{p}",
            "attn.out": "Transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/out/{p}",
            "ffn.norm": "Transformer/encoderblock_{i}/LayerNorm_1/{p}",
            "ffn.up": "Transformer/encoderblock_{i}/MlpBlock_0/Dense_0/{p}",
            "ffn.down": "Transformer/encoderblock_{i}/MlpBlock_0/Dense_1/{p}",
        },
    ),
}


def resnet_names(layout: WeightLayout, path: Sequence[str], kind: str, *, is_alone: bool = False) -> tuple[str, ...]:
    """Return a layout's names for a tensor of a hybrid's ResNet; `is_alone`: one without stages."""
    names, (weight, bias, norm_weight) = layout.resnet, layout.leaves
    if names is None:
        return ()
    leaf = bias if kind == "bias" else norm_weight if "norm" in path[-1] else weight
    match path:
        case ["stages", stage, unit, part]:
            spelled = names.get(part) or part.replace("norm", names["norm"])
            numbers = {"stage": stage, "unit": unit, "stage1": int(stage) + 1, "unit1": int(unit) + 1}
            return (names["unit"].format(**numbers, part=spelled, p=leaf),)
        case [part]:
            return (names[part.replace("root", "alone") if is_alone else part].format(p=leaf),)
        case _:
            raise AssertionError(f"a ResNet has no {'.'.join(path)}")


def tensor_names(layout: WeightLayout, key: str, model: Model) -> tuple[str, ...]:
    """Return a layout's names for one of our tensors; empty if the layout lacks the part."""
    level, branch = "", 0
    *path, kind = key.split(".")
    match path:
        case ["blocks", level, part, *rest]:
            branch = int(part.strip("atfn")) - 1
            module = f"{part.rstrip('0123456789')}.{rest[0] if rest else kind}"
        case ["stem", "proj", "0", *inner] if model.shape.is_hybrid:
            return resnet_names(layout, inner, kind, is_alone=model.shape.stem == "r")
        case ["stem", "proj", "1"] if model.shape.is_hybrid:
            module = "stem"
        case ["stem", "proj", index]:
            # The layers of other stems are a numbered sequence.
            module, kind = "stem", kind if model.shape.traits.is_single_layer else f"{index}.{kind}"
        case ["head", "0"]:
            module = "hidden"
        case ["head", "class_token"]:
            module = "head"
        case ["head", "distillation_token"]:
            module = "distillation_head"
        case ["head", *_] if model.distillation_token:
            return ()  # of two layers, which no library has twice
        case ["norm"] if model.pool == "mean_then_norm" and "pooled_norm" in layout.names:
            module = "pooled_norm"
        case []:
            module = key
        case _:
            module = path[0]
    return layout.tensors(module, kind, level, branch)
