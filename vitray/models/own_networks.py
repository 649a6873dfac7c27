"""Networks of the user's own code: `own/<name>` in a recipe, added in a process or declared by an installed package.

A recipe or a model folder only names one. No file that is read decides which code runs.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from torch import Tensor, nn

from vitray.config import Model
from vitray.config.model_names import OWN, check_own
from vitray.errors import ConfigError, nearest, one_line

Build = Callable[[int], nn.Module]
# Of entry points in an installed package: <name> = "<module>:<function>".
GROUP = "vitray.networks"

_ADDED: dict[str, Build] = {}


def add_network(name: str, build: Build) -> None:
    """Make a network of your own available in this process, as `model.name: own/<name>`.

    `build` takes the number of classes and returns a module with new weights, from images, BCHW, to logits, BK. The
    last `nn.Linear` or `nn.Conv2d` is the head. A package that declares it as an entry point of the group
    `vitray.networks` needs no call: so the command line, workers on Ray and a registered model find it.
    """
    if not callable(build):
        raise ConfigError(f"add_network: got {type(build).__name__}, expected a function of the number of classes")
    try:
        check_own(f"{OWN}{name}")
    except ValueError as error:
        raise ConfigError(f"add_network: {error}") from None
    _ADDED[name] = build


def build_own(name: str, classes: int) -> nn.Module:
    """Return the network `own/<name>` with new weights."""
    own = name.removeprefix(OWN)
    declared = entry_points(group=GROUP)
    if own in _ADDED:
        build = _ADDED[own]
    elif own in declared.names:
        try:
            build = declared[own].load()
        except Exception as error:
            text = f"an installed package declares {declared[own].value}: {one_line(error)}"
            raise ConfigError(f"model.name: {name}: {text}") from error
    else:
        raise ConfigError(
            f"model.name: {name} is not known in this process; expected a call of vitray.add_network({own!r}, build)"
            f" before, or an installed package that declares it, by an entry point of the group {GROUP}"
            f"{nearest(own, {*_ADDED, *declared.names})}"
        )
    network = build(classes)
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{name}: its function returned {type(network).__name__}, expected a torch.nn.Module")
    return network


def check_head(model: Model, name: str, head: nn.Module) -> None:
    """Refuse a network of own code whose last layer with weights, of this name, does not give the classes."""
    classes = model.num_classes or 1
    outputs = getattr(head, "out_features", getattr(head, "out_channels", None))
    if outputs != classes:
        got = f"{name!r} with {outputs} outputs" if name else "none"
        raise ConfigError(
            f"{model.name}: its last nn.Linear or nn.Conv2d is {got}, expected a head of {classes} classes"
        )


def checked_output(model: Model, network: nn.Module, images_BCHW: Tensor) -> Tensor:
    """Return the logits, or the features without a head, of a network of own code; refuse another output."""
    rows, _, height, width = images_BCHW.shape
    try:
        output = network(images_BCHW)
    except Exception as error:
        raise ConfigError(f"{model.name}: failed on {height} x {width} pixels: {one_line(error)}") from error
    wanted = (rows, model.num_classes)
    if not isinstance(output, Tensor) or (model.num_classes and output.shape != wanted):
        got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"{model.name}: got {got} of {rows} image, expected logits of the shape {list(wanted)}")
    return output


def is_of_this_process(name: str) -> bool:
    """Whether other processes do not find this network: it was added here, and no package declares it."""
    return name.startswith(OWN) and name.removeprefix(OWN) not in entry_points(group=GROUP).names


def require_declared(name: str) -> None:
    """Refuse a network of this process alone, for workers on Ray."""
    if is_of_this_process(name):
        raise ConfigError(
            f"model.name: {name} is known in this process alone, and not to workers on Ray; expected here=True, or a"
            f" package on all nodes that declares it, by an entry point of the group {GROUP}"
        )
