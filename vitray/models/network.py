"""A network by its settings: a Vision Transformer of vitray, or a network of torchvision."""

from vitray.config import Model, Run
from vitray.models.other_networks import OtherNetwork, other_sizes
from vitray.models.sizes import Sizes, sizes_of
from vitray.models.vit import ViT

AnyNetwork = ViT | OtherNetwork


def build_network(model: Model) -> AnyNetwork:
    """Return the network of these settings, with new weights."""
    return ViT(model) if model.is_vit else OtherNetwork(model)


def network_sizes(model: Model) -> Sizes:
    """Return the sizes of the network of these settings."""
    return sizes_of(model) if model.is_vit else other_sizes(model)


def training_gflops(run: Run) -> float:
    """Return the gflops of one image's forward pass in training: the mean over the patch and image sizes."""
    return sum(share * network_sizes(model).gflops for model, share in run.trained_models)


def vit_of(network: AnyNetwork, what: str) -> ViT:
    """Return the network as a ViT; refuse any other network, for a feature that only ViTs have."""
    network.model.require_vit(what)
    assert isinstance(network, ViT)
    return network
