"""The tokens of every level, for a few images at a time.

A state is a batch's tokens before the first level or after a level: L levels have L + 1 states. The levels of a network
of torchvision are its stages, and its tokens the positions of an image.
Shapes: B images, C colors, H x W pixels, N tokens, D width.
"""

from collections.abc import Iterator

from torch import Tensor

from vitray.inspection.levels import check_network, grid_of, run_levels
from vitray.models.network import AnyNetwork
from vitray.models.torchvision_networks import TorchvisionNetwork

# The tokens of the images that pass a level together, in bytes; a level needs about ten times this.
MAX_STATE_BYTES = 2**26
# Images that pass a network of torchvision together, whose states exist at the same time.
MOST_AT_STAGES = 8


def has_levels(network: AnyNetwork) -> bool:
    """Whether a network has levels; of one of torchvision, numbered stages."""
    return not isinstance(network, TorchvisionNetwork) or bool(network.stages)


def run_states(vit: AnyNetwork, images_BCHW: Tensor) -> Iterator[Tensor]:
    """Yield the tokens of a batch (BND): before the first level, then after each."""
    if isinstance(vit, TorchvisionNetwork):
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
    if isinstance(vit, TorchvisionNetwork):
        return images_BCHW.split(MOST_AT_STAGES)
    rows, columns = grid_of(vit, images_BCHW)
    state_bytes = (rows * columns + vit.num_prefix) * vit.model.shape.size * images_BCHW.element_size()
    return images_BCHW.split(max(1, MAX_STATE_BYTES // state_bytes))
