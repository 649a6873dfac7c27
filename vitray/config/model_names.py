"""The name grammar `vit_<width><depth>x<branches>_<patch>[_<stem>]`, and the papers' spellings of the same models."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from vitray.errors import nearest


class Width(NamedTuple):
    """One letter of the grammar: its vector size, its heads, and the depth the papers give it."""

    size: int
    heads: int
    depth: int


# Seed 000 Table 1 and seed 002 Table 1; `u` is ours, for tests and demos.
WIDTHS = {
    "u": Width(64, 2, 12),
    "ti": Width(192, 3, 12),
    "s": Width(384, 6, 12),
    "b": Width(768, 12, 12),
    "l": Width(1024, 16, 24),
    "h": Width(1280, 16, 32),
}
STEMS = ("linear", "linear_bn", "linear_gelu", "linear_bn_gelu", "hmlp_bn", "hmlp_ln", "conv", "conv_ln")
STEM_SPELLINGS = {"": "linear", "hmlp": "hmlp_bn", "conv_bn": "conv"}
GRAMMAR = "vit_<width><depth>x<branches>_<patch>[_<stem>], for example vit_b18x2_16 or vit_ti12x1_16_hmlp_bn"


@dataclass(frozen=True)
class Name:
    """What a model's name says; `str` of it is the canonical name."""

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
        """The width as a number: the length of a token's vector."""
        return WIDTHS[self.width].size

    @property
    def heads(self) -> int:
        """The attention heads of one branch."""
        return WIDTHS[self.width].heads

    @property
    def leaks(self) -> bool:
        """Whether the stem looks beyond a patch at its neighbours."""
        return self.stem.startswith("conv")

    @property
    def paper_spelling(self) -> str:
        """The name as the papers print it, stem left out: ViT-B18x2/16."""
        return f"ViT-{self.width.capitalize()}{self.depth}x{self.branches}/{self.patch}"


def parse_name(text: str) -> Name:
    """The model that `text` names, in our grammar or in the papers' (`ViT-B18x2/16`, `S36x1`, `ViT-L/16`)."""
    words = re.split(r"[-_/]", text.strip().lower().replace("×", "x"))
    body, *rest = words[1:] if words[0] == "vit" and len(words) > 1 else words
    shape = re.fullmatch(r"([a-z]+?)(\d*)(?:x(\d+))?", body)
    if shape is None:
        raise ValueError(f"model name {text!r}: cannot read {body!r}, wanted {GRAMMAR}")
    width, depth, branches = shape.groups()
    if width not in WIDTHS:
        known = ", ".join(f"{key} ({value.size})" for key, value in WIDTHS.items())
        raise ValueError(
            f"model name {text!r}: width {width!r} is not one of {known}{nearest(width, WIDTHS)}; wanted {GRAMMAR}"
        )
    patch = rest.pop(0) if rest and not rest[0].isalpha() else "16"
    if not patch.isdecimal():
        raise ValueError(f"model name {text!r}: patch {patch!r} is not a whole number of pixels, as in {GRAMMAR}")
    name = Name(width, int(depth or WIDTHS[width].depth), int(branches or 1), int(patch), _stem(text, "_".join(rest)))
    for part in ("depth", "branches", "patch"):
        if getattr(name, part) < 1:
            raise ValueError(f"model name {text!r}: {part} is {getattr(name, part)}, wanted at least 1")
    _check_patch_suits_stem(text, name)
    return name


def _stem(text: str, word: str) -> str:
    stem = STEM_SPELLINGS.get(word, word)
    if stem not in STEMS:
        raise ValueError(f"model name {text!r}: stem {word!r} is not one of {', '.join(STEMS)}{nearest(word, STEMS)}")
    return stem


def _check_patch_suits_stem(text: str, name: Name) -> None:
    quarter = name.patch // 4
    if name.stem.startswith("hmlp") and (name.patch % 4 or quarter & (quarter - 1)):
        # The hMLP grows patches from 4 pixels by doubling (seed 000, Algorithm 1).
        raise ValueError(
            f"model name {text!r}: the hMLP stem has patches of 4, 8, 16, 32, ... (4 x 2^k), not {name.patch}"
        )
    if name.stem.startswith("conv") and name.patch != 16:
        raise ValueError(
            f"model name {text!r}: the conv stem halves the image four times, so its patch is 16, not {name.patch}"
        )
