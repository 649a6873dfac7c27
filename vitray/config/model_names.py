"""The model name grammar `vit_<width><depth>x<branches>_<patch>[_<stem>]`, the papers' spellings, and other networks.

A width is a letter of the papers, or any multiple of 64 channels: `vit_w832d12x1_16` has width 832, depth 12.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from vitray.config.stems import RESNETS, STEMS, Convolution, StemTraits, feature_map, stem_traits
from vitray.errors import cut_middle, nearest


class Width(NamedTuple):
    """A width of the grammar: token size, number of heads, and the papers' depth."""

    size: int
    heads: int
    depth: int


# "Three things", Table 1, and ViT paper, Table 1; `m` is DeiT III's; `u` is ours, for tests and demos.
WIDTHS = {
    "u": Width(64, 2, 12),
    "ti": Width(192, 3, 12),
    "s": Width(384, 6, 12),
    "m": Width(512, 8, 12),
    "b": Width(768, 12, 12),
    "l": Width(1024, 16, 24),
    "h": Width(1280, 16, 32),
}
# AxialResNet-50 (Wang et al., 2020) by size, and its channels relative to those of l, whose stages have ResNet-50's.
AXIAL_RESNETS = {"axial_resnet50_s": 0.5, "axial_resnet50_m": 0.75, "axial_resnet50_l": 1.0}
# The papers' networks have at most 240 (S60x4). Each takes milliseconds to build.
MOST_PAIRS = 1000
GRAMMAR = "vit_<width><depth>x<branches>_<patch>[_<stem>], for example vit_b18x2_16 or vit_ti12x1_16_hmlp_bn"
HEAD_SIZE = 64
"""Channels of an attention head of a width without a letter."""


def width_of(key: str) -> Width | None:
    """Return the width of a letter of `WIDTHS`, or of `w<channels>d`; None for anything else."""
    if key in WIDTHS:
        return WIDTHS[key]
    channels = re.fullmatch(r"w([1-9]\d{1,5})d", key)
    if channels is None or int(channels[1]) % HEAD_SIZE:
        return None
    return Width(int(channels[1]), int(channels[1]) // HEAD_SIZE, 12)


def width_key(size: int, heads: int | None = None) -> str | None:
    """Return the shortest key of a width, one with this number of heads if there is one; None if there is no name."""
    numbered = f"w{size}d"
    keys = [*(key for key, width in WIDTHS.items() if width.size == size), *([numbered] if width_of(numbered) else [])]
    fitting = [key for key in keys if (width := width_of(key)) and width.heads == heads]
    return next(iter(fitting + keys), None)


def canonical_name(text: str) -> str:
    """Return the one spelling of a model's name; refuse the name of no model."""
    if is_torchvision(text):
        return check_torchvision(text)
    return check_own(text) if text.startswith(OWN) else axial_resnet(text) or str(parse_name(text))


def is_vit(name: str) -> bool:
    """Whether a canonical name is that of a Vision Transformer of vitray."""
    return name.startswith("vit_")


def axial_resnet(text: str) -> str | None:
    """Return the canonical name of an AxialResNet; None for other names. `AxialResNet-50` without a size is l."""
    parts = re.fullmatch(r"axial[-_ ]?resnet[-_]?(.*)", text.strip().lower())
    if parts is None:
        return None
    name = f"axial_resnet{parts[1].replace('-', '_')}"
    name = f"{name}_l" if name == "axial_resnet50" else name
    if name not in AXIAL_RESNETS:
        raise ValueError(
            f"model name {cut_middle(repr(text), 80)}: expected one of {', '.join(AXIAL_RESNETS)}"
            f"{nearest(name, AXIAL_RESNETS)}"
        )
    return name


@dataclass(frozen=True)
class Name:
    """A parsed model name; `str` of it is the canonical name."""

    width: str
    depth: int
    branches: int
    patch: int
    stem: str = "linear"

    def __str__(self) -> str:
        stem = "" if self.stem == "linear" else f"_{self.stem}"
        return f"vit_{self.width}{self.depth}x{self.branches}_{self.patch}{stem}"

    @property
    def size(self) -> int:
        """The length of a token's vector."""
        return _known_width(self.width).size

    @property
    def heads(self) -> int:
        """The number of attention heads of a branch; `model.heads` may set another."""
        return _known_width(self.width).heads

    @property
    def traits(self) -> StemTraits:
        """The row of the stem."""
        return stem_traits(self.stem)

    @property
    def is_hybrid(self) -> bool:
        """Whether a ResNet computes the feature map whose cells are the patches."""
        return self.traits.units is not None

    @property
    def convolutions(self) -> list[Convolution]:
        """The convolutions of a stem that is not a ResNet."""
        assert self.traits.convolutions is not None, f"{self} is a hybrid"
        return self.traits.convolutions(self.size, self.patch)

    @property
    def has_pools(self) -> bool:
        """Whether the stem has max pools."""
        return not self.is_hybrid and any(each.pool > 1 for each in self.convolutions)

    @property
    def paper_spelling(self) -> str:
        """The name as the papers print it, without the stem: ViT-B18x2/16."""
        return f"ViT-{self.width.capitalize()}{self.depth}x{self.branches}/{self.patch}"


@lru_cache
def parse_name(text: str) -> Name:
    """Return the model that a name spells, in our grammar or in the papers' (`ViT-B18x2/16`, `S36x1`, `ViT-L/16`).

    Of hybrids, `R50+ViT-B/32` and `vit_b12x1_1_r50`, a patch of one cell, are the papers' spellings.
    """
    if len(text) > 100:
        raise ValueError(f"model name {cut_middle(repr(text), 80)}: expected at most 100 characters, as in {GRAMMAR}")
    resnet, plus, spelled = text.strip().lower().replace("×", "x").rpartition("+")
    parts = re.split(r"[-_/]", spelled)
    body, *rest = parts[1:] if parts[0] == "vit" and len(parts) > 1 else parts
    shape = re.fullmatch(r"(w\d+d|[a-z]+?)(\d*)(?:x(\d+))?", body)
    if body == "axial" and rest:
        plain = parse_name("_".join(rest))
        raise ValueError(
            f"model name {text!r}: axial attention is a setting, and a block is two levels: expected"
            f" {replace(plain, depth=2 * plain.depth)} with model.attention=axial, model.class_token=false and"
            " model.pool=mean"
        )
    if shape is None:
        raise ValueError(f"model name {text!r}: cannot read {body!r}, expected {GRAMMAR}")
    width, depth, branches = shape.groups()
    known_width = width_of(width)
    if known_width is None:
        # timm's spelling: vit_base_patch16_224.
        if theirs := re.match(r"(?:vit|deit)3?_(tiny|small|medium|base|large|huge)_patch(\d+)_(\d+)", text):
            ours = {"tiny": "ti"}.get(theirs[1], theirs[1][0])
            name = f"vit_{ours}{WIDTHS[ours].depth}x1_{theirs[2]}"
            raise ValueError(f"model name {text!r}: did you mean {name}, with model.image_size={theirs[3]}?")
        known = ", ".join(f"{key} ({value.size})" for key, value in WIDTHS.items())
        raise ValueError(
            f"model name {text!r}: width {width!r} is not one of {known}{nearest(width, WIDTHS)}, nor w<channels>d with"
            f" a multiple of {HEAD_SIZE}, as in vit_w832d12x1_16; expected {GRAMMAR}"
        )
    width = width_key(*known_width[:2]) or width
    patch = rest.pop(0) if rest and not rest[0].isalpha() else "16"
    if not patch.isdecimal():
        raise ValueError(f"model name {text!r}: patch {patch!r} is not a whole number of pixels, as in {GRAMMAR}")
    spelling = "_".join([*rest, *([resnet.removesuffix("x1")] if plus else [])])
    spellings = {other: stem for stem, traits in STEMS.items() for other in traits.spellings}
    stem = spellings.get(spelling, spelling)
    if stem not in (known := (*STEMS, *RESNETS)):
        listed = ", ".join(known)
        raise ValueError(f"model name {text!r}: stem {spelling!r} is not one of {listed}{nearest(spelling, known)}")
    traits = stem_traits(stem)
    if traits.units is not None and patch == "1":
        patch = str(feature_map(traits.units, 32)[1])
    if plus and stem == "r" and patch == "16":
        patch = "32"  # the papers' R+Ti/16 has patches of 8 x 8 cells of 4 pixels
    name = Name(width, int(depth or known_width.depth), int(branches or 1), int(patch), stem)
    for part in ("depth", "branches", "patch"):
        if getattr(name, part) < 1:
            raise ValueError(f"model name {text!r}: {part} is {getattr(name, part)}, expected at least 1")
    pairs = name.depth * name.branches
    if pairs > MOST_PAIRS:
        # 12 D^2 parameters in each pair.
        raise ValueError(
            f"model name {text!r}: depth x branches is {pairs:,}, expected at most {MOST_PAIRS:,} pairs of attention"
            f" and feedforward; it has {12.0 * pairs * name.size**2:.2g} parameters"
        )
    if traits.patch_rule and not traits.patch_rule.holds(name.patch):
        raise ValueError(f"model name {text!r}: {traits.patch_rule.text}, not {name.patch}")
    return name


def _known_width(key: str) -> Width:
    width = width_of(key)
    if width is None:
        raise ValueError(f"width {key!r} is neither one of {', '.join(WIDTHS)} nor w<channels>d")
    return width


# ---- networks of own code --------------------------------------------------------------------------------------------

OWN = "own/"


def check_own(name: str) -> str:
    """Return the name of a network of the user's code, which is known when it is built; refuse an unusable one."""
    if not re.fullmatch(r"[a-zA-Z0-9][\w.-]{0,79}", name.removeprefix(OWN), re.ASCII):
        raise ValueError(
            f"model name {cut_middle(repr(name), 80)}: expected own/ and at most 80 letters, digits, _, . and -"
        )
    return name


# ---- torchvision -----------------------------------------------------------------------------------------------------

TORCHVISION = "torchvision/"
TORCHVISION_NETWORKS = (
    "alexnet", "convnext_base", "convnext_large", "convnext_small", "convnext_tiny", "densenet121",
    "densenet161", "densenet169", "densenet201", "efficientnet_b0", "efficientnet_b1", "efficientnet_b2",
    "efficientnet_b3", "efficientnet_b4", "efficientnet_b5", "efficientnet_b6", "efficientnet_b7",
    "efficientnet_v2_l", "efficientnet_v2_m", "efficientnet_v2_s", "googlenet", "inception_v3", "maxvit_t",
    "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "mobilenet_v2", "mobilenet_v3_large",
    "mobilenet_v3_small", "regnet_x_16gf", "regnet_x_1_6gf", "regnet_x_32gf", "regnet_x_3_2gf",
    "regnet_x_400mf", "regnet_x_800mf", "regnet_x_8gf", "regnet_y_128gf", "regnet_y_16gf", "regnet_y_1_6gf",
    "regnet_y_32gf", "regnet_y_3_2gf", "regnet_y_400mf", "regnet_y_800mf", "regnet_y_8gf", "resnet101",
    "resnet152", "resnet18", "resnet34", "resnet50", "resnext101_32x8d", "resnext101_64x4d", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "squeezenet1_0",
    "squeezenet1_1", "swin_b", "swin_s", "swin_t", "swin_v2_b", "swin_v2_s", "swin_v2_t", "vgg11", "vgg11_bn",
    "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn", "vit_b_16", "vit_b_32", "vit_h_14",
    "vit_l_16", "vit_l_32", "wide_resnet101_2", "wide_resnet50_2",
)  # fmt: skip


def is_torchvision(name: str) -> bool:
    """Whether a model name is one of torchvision's."""
    return name.startswith(TORCHVISION)


def check_torchvision(name: str) -> str:
    """Return the name of a network of torchvision; refuse any other."""
    network = name.removeprefix(TORCHVISION)
    if network not in TORCHVISION_NETWORKS:
        raise ValueError(
            f"model name {cut_middle(repr(name), 80)}: torchvision has no classification network {network[:80]!r}"
            f"{nearest(network, TORCHVISION_NETWORKS)}; expected one of its names, as in torchvision/resnet50"
        )
    return name


def check_size(name: str, height: int, width: int) -> None:
    """Refuse images of a size that a network of torchvision, or an AxialResNet, cannot take."""
    if name.startswith(OWN):
        return
    network = name.removeprefix(TORCHVISION)
    side, is_square = _side_multiple(network)
    if height % side or width % side or (is_square and height != width):
        shape = "square, with a side of" if is_square else "sides of"
        multiple = f" a multiple of {side}" if side > 1 else ""
        raise ValueError(f"image_size {height} x {width} does not fit {name}; expected {shape}{multiple} pixels")
    if min(height, width) < (least := _smallest_side(network)):
        raise ValueError(f"image_size {height} x {width} is too small for {name}; expected at least {least} pixels")


def _side_multiple(network: str) -> tuple[int, bool]:
    """The number that the sides divide by, and whether images are square."""
    match network.split("_"):
        case ["vit", _, patch]:
            return int(patch), True
        case ["axial", *_]:  # attention has a place for each cell, and four halvings follow cells of 2 pixels
            return 32, False
        case ["maxvit", _]:  # 7 x 7 windows at a thirty-second of the side
            return 224, True
        case _:
            return 1, False


def _smallest_side(network: str) -> int:
    """The least side in pixels."""
    families = {"alexnet": 63, "convnext": 32, "densenet": 29, "googlenet": 15, "inception": 75, "swin": 4}
    families |= {"squeezenet": 21, "vgg": 32}
    return next((least for family, least in families.items() if network.startswith(family)), 1)
