"""A network by its settings: a Vision Transformer of vitray, or a network of torchvision."""

from vitray.config import Model
from vitray.models.torchvision_networks import TorchvisionNetwork
from vitray.models.vit import ViT

AnyNetwork = ViT | TorchvisionNetwork


def build_network(model: Model) -> AnyNetwork:
    """Return the network of these settings, with new weights."""
    return ViT(model) if model.is_vit else TorchvisionNetwork(model)


def vit_of(network: AnyNetwork, what: str) -> ViT:
    """Return the network as a Vision Transformer; refuse another for something that only they have."""
    network.model.require_vit(what)
    assert isinstance(network, ViT)
    return network
