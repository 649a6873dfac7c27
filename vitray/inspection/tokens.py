"""The length of tokens at every level, and those that stand out.

Large networks use a few patches of little content as registers, with tokens several times as long as others
(Darcet et al., "Vision Transformers Need Registers").

Shapes: S states (before the first level, then after each), B images, M patches, N tokens, D width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitray.inspection.states import chunks, run_states
from vitray.models.vit import ViT

# A patch of this many times the median length stands out. The registers of published networks have 3 to 10 times.
OUTLIER_FACTOR = 3.0


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
