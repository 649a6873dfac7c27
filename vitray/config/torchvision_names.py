"""The classification networks of torchvision, by the names `torchvision/<name>`, and the image sizes that they take."""

from vitray.errors import cut_middle, nearest

PREFIX = "torchvision/"
NETWORKS = (
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
    return name.startswith(PREFIX)


def check_torchvision(name: str) -> str:
    """Return the name of a network of torchvision; refuse any other."""
    network = name.removeprefix(PREFIX)
    if network not in NETWORKS:
        raise ValueError(
            f"model name {cut_middle(repr(name), 80)}: torchvision has no classification network {network[:80]!r}"
            f"{nearest(network, NETWORKS)}; expected one of its names, as in torchvision/resnet50"
        )
    return name


def check_size(name: str, height: int, width: int) -> None:
    """Refuse images of a size that a network of torchvision, or an AxialResNet, cannot take."""
    network = name.removeprefix(PREFIX)
    side, is_square = _step(network)
    if height % side or width % side or (is_square and height != width):
        shape = "square, with a side of" if is_square else "sides of"
        multiple = f" a multiple of {side}" if side > 1 else ""
        raise ValueError(f"image_size {height} x {width} does not fit {name}; expected {shape}{multiple} pixels")
    if min(height, width) < (least := _least(network)):
        raise ValueError(f"image_size {height} x {width} is too small for {name}; expected at least {least} pixels")


def _step(network: str) -> tuple[int, bool]:
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


def _least(network: str) -> int:
    """The least side in pixels."""
    families = {"alexnet": 63, "convnext": 32, "densenet": 29, "googlenet": 15, "inception": 75, "swin": 4}
    families |= {"squeezenet": 21, "vgg": 32}
    return next((least for family, least in families.items() if network.startswith(family)), 1)
