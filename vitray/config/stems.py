"""The stems of model names, from pixels to tokens, a row each; `vitray/models/stems.py` builds them.

Table 7 of "Three things", and the ResNets of hybrids (ViT paper). Nothing here needs torch: names, settings, sizes and
exports read the rows.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple


class Convolution(NamedTuple):
    """One convolution of a stem."""

    kernel: int
    stride: int
    padding: int
    channels: int
    pool: int = 1
    """The side of the max pool after its norm; 1 for none."""


class PatchRule(NamedTuple):
    """The patches that a stem can have."""

    holds: Callable[[int], bool]
    text: str
    """The rule as a sentence."""


class StemTraits(NamedTuple):
    """The nature of a stem. Its functions take the width of the network and the pixels of a patch's side."""

    convolutions: Callable[[int, int], list[Convolution]] | None
    """Its convolutions, in order; None for a hybrid."""
    norm: Literal["ln", "bn"] | None = None
    """The kind of norm after each convolution."""
    ends_in_gelu: bool = False
    """Whether GELU follows the last convolution too; it always follows the others."""
    patch_rule: PatchRule | None = None
    """None for any patch."""
    is_resizable: bool = False
    """Whether it begins with one product for each patch, whose kernel can be resized to other patches."""
    mixes_patches: bool = False
    """Whether it reads pixels of neighboring patches."""
    libraries: tuple[str, ...] = ("timm",)
    """The libraries that can compute it."""
    spellings: tuple[str, ...] = ()
    """Other spellings in model names."""
    cost: Callable[[int, int], tuple[int, int]] | None = None
    """Parameters, and multiply-adds of a patch, of a stem that has layers of its own in `LAYERS` of
    `vitray/models/stems.py`; None for one of convolutions, norms and GELU."""
    units: tuple[int, ...] | None = None
    """The units of each stage of a hybrid's ResNet."""

    @property
    def is_single_layer(self) -> bool:
        """Whether it is one product for each patch, and nothing else."""
        return self.is_resizable and self.norm is None and not self.ends_in_gelu


# ---- convolutions ----------------------------------------------------------------------------------------------------


def _linear(width: int, patch: int) -> list[Convolution]:
    return [Convolution(patch, patch, 0, width)]


def _hmlp(width: int, patch: int) -> list[Convolution]:
    # "Three things", Algorithm 1: patches of 4 pixels, then doubled, at a quarter of the width until the last step.
    # (The text of the paper starts at 2 x 2, both of its listings at 4 x 4.)
    return _doubled(patch, width // 4, width)


def _levit(width: int, patch: int) -> list[Convolution]:
    del patch
    return [Convolution(3, 2, 1, width // divisor) for divisor in (8, 4, 2, 1)]


def _pooled(width: int, patch: int) -> list[Convolution]:
    # Compact Transformers (Hassani et al., 2021): a max pool halves the sides after each convolution but the last.
    halvings = patch.bit_length() - 1
    inner = [Convolution(3, 1, 1, width // 2**left, pool=2) for left in range(halvings, 0, -1)]
    return [*inner, Convolution(3, 1, 1, width)]


def _local(width: int, patch: int) -> list[Convolution]:
    # The cells of a patch, then their merging; the blocks lie between.
    return _doubled(patch, width // 8, width)


def _doubled(patch: int, inner: int, width: int) -> list[Convolution]:
    doublings = (patch // CELL).bit_length() - 1
    sizes, channels = [CELL] + [2] * doublings, [inner] * doublings + [width]
    return [Convolution(size, size, 0, channel) for size, channel in zip(sizes, channels, strict=True)]


def stem_cost(traits: StemTraits, width: int, patch: int) -> tuple[int, int]:
    """Return the parameters of a stem, and its multiply-adds for a patch."""
    if traits.cost is not None:
        return traits.cost(width, patch)
    assert traits.convolutions is not None, "a stem without convolutions states its cost"
    return _cost_of(traits.convolutions(width, patch), patch, has_norms=traits.norm is not None)


def _cost_of(convolutions: list[Convolution], patch: int, *, has_norms: bool) -> tuple[int, int]:
    params = work = 0
    before, side = 3, patch
    for kernel, stride, _, channels, pool in convolutions:
        side //= stride
        weights = kernel * kernel * before * channels
        params += weights + channels + 2 * channels * has_norms
        work += (weights + 5 * channels * has_norms) * side**2
        before, side = channels, side // pool
    return params, work


# ---- the local transformer (`LocalTransformer` in `vitray/models/stems.py`) ------------------------------------------

# The side of a cell, also of the hMLP stem's first patches; the blocks, and the heads of each.
CELL, LOCAL_DEPTH, LOCAL_HEADS = 4, 4, 4


def _local_cost(width: int, patch: int) -> tuple[int, int]:
    C, n = width // 8, (patch // CELL) ** 2
    block, norms = 12 * C * C, (2 * LOCAL_DEPTH + 1) * C
    linear = 3 * patch**2 * width
    params, work = _cost_of(_local(width, patch), patch, has_norms=False)
    params += LOCAL_DEPTH * (block + 9 * C) + 2 * norms + n * C + linear + width
    return params, work + n * (LOCAL_DEPTH * (block + 2 * n * C) + 5 * norms) + linear


# ---- the ResNets of hybrids (`vitray/models/resnet.py`) --------------------------------------------------------------

# The channels of a ResNet's root, and the stride of its output; each later stage halves the sides.
ROOT, ROOT_STRIDE = 64, 4


def resnet_layers(units: tuple[int, ...], patch: int) -> tuple[int, ...]:
    """Return the units of each stage of a hybrid's ResNet.

    At patch size 16, stage 3 has the units of stage 4 too, so that the feature map keeps stride 16 (ViT paper, 4.1).
    """
    return (*units[:2], sum(units[2:])) if units and patch == 16 else units


def stage_width(number: int) -> int:
    """Return the channels of a stage of a ResNet, counted from 0."""
    return 256 * 2**number


def feature_map(units: tuple[int, ...], patch: int) -> tuple[int, int]:
    """Return the channels of a hybrid's feature map, and the pixels of a cell's side."""
    stages = len(resnet_layers(units, patch))
    return (stage_width(stages - 1), ROOT_STRIDE * 2 ** (stages - 1)) if stages else (ROOT, ROOT_STRIDE)


def _resnet(*units: int) -> StemTraits:
    """Return the row of a ResNet with a projection of its feature map."""

    def cost(width: int, patch: int) -> tuple[int, int]:
        params = work = 0

        def add(kernel: int, before: int, after: int, stride: int) -> None:
            """Add a convolution and its group norm; `stride` is that of the output to the image."""
            nonlocal params, work
            params += kernel * kernel * before * after + 2 * after
            work += (kernel * kernel * before + 5) * after * patch**2 // stride**2

        add(7, 3, ROOT, ROOT_STRIDE // 2)
        before = ROOT
        for number, depth in enumerate(resnet_layers(units, patch)):
            after, stride = stage_width(number), ROOT_STRIDE * 2**number
            inner, earlier = after // 4, stride if number == 0 else stride // 2
            for unit in range(depth):
                add(1, before, inner, earlier if unit == 0 else stride)
                add(3, inner, inner, stride)
                add(1, inner, after, stride)
                if unit == 0:
                    add(1, before, after, stride)
                before = after
        channels, cell = feature_map(units, patch)
        projection = (patch // cell) ** 2 * channels * width
        return params + projection + width, work + projection

    alone = PatchRule(
        lambda patch: patch % 4 == 0, "the root of a ResNet has cells of 4 pixels, so its patch is a multiple of 4"
    )
    staged = PatchRule(
        lambda patch: patch == 16 or patch % 32 == 0,
        "the patches of a hybrid have 16 pixels (three stages) or a multiple of 32 (four stages)",
    )
    rule = staged if units else alone
    return StemTraits(None, patch_rule=rule, mixes_patches=True, libraries=(), cost=cost, units=units)


# ---- the rows --------------------------------------------------------------------------------------------------------


def _is_power_of_two_times_4(patch: int) -> bool:
    quarter = patch // 4
    return patch % 4 == 0 and quarter & (quarter - 1) == 0


_LINEAR = StemTraits(_linear, is_resizable=True)
_HMLP = StemTraits(
    _hmlp,
    # It starts from 4-pixel patches and doubles them ("Three things", Algorithm 1).
    patch_rule=PatchRule(_is_power_of_two_times_4, "the hMLP stem has patches of 4, 8, 16, 32, ... (4 x 2^k)"),
)
_LEVIT = StemTraits(
    _levit,
    mixes_patches=True,
    patch_rule=PatchRule(lambda patch: patch == 16, "the conv stem halves the image four times, so its patch is 16"),
)
STEMS = {
    "linear": _LINEAR._replace(libraries=("timm", "torchvision", "hf"), spellings=("",)),
    "linear_bn": _LINEAR._replace(norm="bn"),
    "linear_gelu": _LINEAR._replace(ends_in_gelu=True),
    "linear_bn_gelu": _LINEAR._replace(norm="bn", ends_in_gelu=True),
    "hmlp_bn": _HMLP._replace(norm="bn", spellings=("hmlp",)),
    "hmlp_ln": _HMLP._replace(norm="ln"),
    "conv": _LEVIT._replace(norm="bn", spellings=("conv_bn",)),
    "conv_ln": _LEVIT._replace(norm="ln"),
    "pooled": StemTraits(
        _pooled,
        norm="bn",
        mixes_patches=True,
        patch_rule=PatchRule(
            lambda patch: patch in (2, 4, 8, 16, 32),
            "the pooled stem halves the image, so its patch is 2, 4, 8, 16 or 32",
        ),
    ),
    "local": StemTraits(
        _local,
        patch_rule=PatchRule(
            lambda patch: patch >= 8 and _is_power_of_two_times_4(patch),
            "the local stem has patches of 8, 16, 32, ... (cells of 4 x 4, merged in pairs)",
        ),
        libraries=(),
        cost=_local_cost,
    ),
}
# ResNets before the transformer: R26 and the like; `r` is the root alone.
RESNETS = {
    "r": _resnet(),
    "r26": _resnet(2, 2, 2, 2),
    "r50": _resnet(3, 4, 6, 3),
    "r101": _resnet(3, 4, 23, 3),
    "r152": _resnet(3, 8, 36, 3),
}


def stem_traits(stem: str) -> StemTraits:
    """Return the row of a stem or of a ResNet."""
    return STEMS[stem] if stem in STEMS else RESNETS[stem]
