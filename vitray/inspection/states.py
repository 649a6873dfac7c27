"""The tokens of every level, for a few images at a time.

A state is a batch's tokens before the first level or after a level: L levels have L + 1 states.
Shapes: B images, C colours, H x W pixels, N tokens, D width.
"""

from collections.abc import Iterator

from torch import Tensor

from vitray.inspection.levels import grid_of, run_levels
from vitray.models.vit import ViT

# The tokens of the images that pass a level together, in bytes; a level needs about ten times this.
MAX_STATE_BYTES = 2**26


def run_states(vit: ViT, images_BCHW: Tensor) -> Iterator[Tensor]:
    """Yield the tokens of a batch (BND): before the first level, then after each."""
    for level in run_levels(vit, images_BCHW):
        if level.number == 0:
            yield level.input
        yield level.output


def chunks(vit: ViT, images_BCHW: Tensor) -> tuple[Tensor, ...]:
    """Return the batch in parts that pass the network together."""
    rows, columns = grid_of(vit, images_BCHW)
    state_bytes = (rows * columns + vit.num_prefix) * vit.model.shape.size * images_BCHW.element_size()
    return images_BCHW.split(max(1, MAX_STATE_BYTES // state_bytes))
