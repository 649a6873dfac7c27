"""The tokens of every level, for a few images at a time; their length, and those that stand out.

A state is a batch's tokens before the first level or after a level: L levels have L + 1 states. The levels of a network
of torchvision are its stages, and its tokens the positions of an image. Large networks use a few patches of little
content as registers, with tokens several times as long as others (Darcet et al., "Vision Transformers Need Registers").

Shapes: B images, C colors, H x W pixels, N tokens, M patches, D width, S states.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitray.inspection.levels import check_network, grid_of, run_levels
from vitray.models.network import AnyNetwork
from vitray.models.other_networks import OtherNetwork
from vitray.models.vit import ViT

# The tokens of the images that pass a level together, in bytes; a level needs about ten times this.
MAX_STATE_BYTES = 2**26
# Images that pass a network of torchvision together, whose states exist at the same time.
MOST_AT_STAGES = 8
# A patch of this many times the median length stands out. The registers of published networks have 3 to 10 times.
OUTLIER_FACTOR = 3.0


def has_levels(network: AnyNetwork) -> bool:
    """Whether a network has levels; of one of torchvision, numbered stages."""
    return not isinstance(network, OtherNetwork) or bool(network.stages)


def run_states(vit: AnyNetwork, images_BCHW: Tensor) -> Iterator[Tensor]:
    """Yield the tokens of a batch (BND): before the first level, then after each."""
    if isinstance(vit, OtherNetwork):
        check_network(vit)
        if not has_levels(vit):
            raise ValueError(f"{vit.model.name} has no numbered stages, expected a network with levels")
        with vit.watching_stages() as states:
            vit(images_BCHW)
        yield from (state_BCHW.flatten(2).mT for state_BCHW in states)
        return
    for level in run_levels(vit, images_BCHW):
        if level.number == 0:
            yield level.input
        yield level.output


def chunks(vit: AnyNetwork, images_BCHW: Tensor) -> tuple[Tensor, ...]:
    """Return the batch in parts that pass the network together."""
    if isinstance(vit, OtherNetwork):
        return images_BCHW.split(MOST_AT_STAGES)
    rows, columns = grid_of(vit, images_BCHW)
    state_bytes = (rows * columns + vit.num_prefix) * vit.model.shape.size * images_BCHW.element_size()
    return images_BCHW.split(max(1, MAX_STATE_BYTES // state_bytes))


class TokenNorms(NamedTuple):
    """The lengths of the tokens of a batch at every state."""

    patches: Tensor
    class_token: Tensor | None
    median: Tensor
    """Over the patches of all images."""
    is_outlier: Tensor
    """Whether a patch is longer than `OUTLIER_FACTOR` times the median of its state."""


@torch.no_grad()
def token_norms(vit: ViT, images_BCHW: Tensor, factor: float = OUTLIER_FACTOR) -> TokenNorms:
    """Return the length of every token at every state, and the patches that stand out."""
    prefix = vit.num_prefix
    parts = [torch.stack([x_BND.norm(dim=2) for x_BND in run_states(vit, chunk)]) for chunk in chunks(vit, images_BCHW)]
    norms_SBN = torch.cat(parts, dim=1)
    class_token_SB = norms_SBN[..., 0] if vit.class_token is not None else None
    return _with_outliers(norms_SBN[..., prefix:], class_token_SB, factor)


def join_token_norms(parts: Sequence[TokenNorms], factor: float = OUTLIER_FACTOR) -> TokenNorms:
    """Return the norms of all images from those of parts; the patches of all decide which stand out."""
    tokens = [part.class_token for part in parts if part.class_token is not None]
    return _with_outliers(
        torch.cat([part.patches for part in parts], dim=1), torch.cat(tokens, dim=1) if tokens else None, factor
    )


def _with_outliers(patches_SBM: Tensor, class_token_SB: Tensor | None, factor: float) -> TokenNorms:
    median_S = patches_SBM.flatten(1).median(dim=1).values
    return TokenNorms(patches_SBM, class_token_SB, median_S, patches_SBM > factor * median_S[:, None, None])
