"""The request of an export, and its checks before any network is read."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from vitray.config import Model
from vitray.errors import ConfigError, nearest
from vitray.system import storage


class TargetTraits(NamedTuple):
    """What options and checks know of a target of an export."""

    file: str | None = None
    """The file of a graph, which `GRAPHS` of `writers.py` writes: it takes uint8 images and normalizes them. None for
    the files of a library, which `LIBRARIES` of `vitray/weights/export.py` writes."""
    packages: tuple[str, ...] = ()
    """Optional packages that write and check it."""
    int8: tuple[str, ...] = ()
    """Kinds of int8."""
    about: str = ""
    """What its name does not say."""


TARGETS = {
    "onnx": TargetTraits("model.onnx", ("onnx", "onnxruntime", "onnxscript"), ("weights", "dynamic")),  # extra `export`
    "torch_export": TargetTraits("model.pt2", int8=("weights",), about="a .pt2 file"),
    "timm": TargetTraits(packages=("timm",)),
    "torchvision": TargetTraits(),
    "hf": TargetTraits(packages=("transformers",), about="Hugging Face"),
}


def graph_targets() -> list[str]:
    """Return the targets that are graphs."""
    return [name for name, traits in TARGETS.items() if traits.file]


def targets_with(int8: str) -> list[str]:
    """Return the targets that have a kind of int8."""
    return [name for name, traits in TARGETS.items() if int8 in traits.int8]


def listed_targets() -> str:
    """Return the targets as a text of the help."""
    *first, last = (f"{name} ({traits.about})" if traits.about else name for name, traits in TARGETS.items())
    return f"{', '.join(first)} or {last}"


class ExportRequest(NamedTuple):
    """One call of `vitray export`."""

    model: str
    target: str
    settings: Sequence[str] = ()
    """Settings that complete a weights file, as in heads=12."""
    out: str | None = None
    """A new folder; None is exports/MODEL-TARGET."""
    data: str = "demo"
    """The images of the comparison; `demo` draws them."""
    split: str = "val"
    images: int = 1000
    any_size: bool = False
    int8: str | None = None
    """weights: stored as 8-bit integers; dynamic: the products are computed in them too."""
    bound: float = 0.001
    """The largest share of images whose most probable class may change."""
    allow: bool = False
    """Whether to write an export above the bound."""
    rounds: int = 5
    seconds: float = 0.2
    """Rounds of the latency, and the time of one network in one of them."""


def check_request(request: ExportRequest, out: str) -> None:
    """Refuse unknown or unfitting options, missing packages, and a folder that exists."""
    target = request.target
    if target not in TARGETS:
        raise ConfigError(f"--to {target}: expected one of {', '.join(TARGETS)}{nearest(target, TARGETS)}")
    traits = TARGETS[target]
    if request.int8 is not None and request.int8 not in traits.int8:
        others = [name for name, each in TARGETS.items() if each.int8]
        wanted = f"one of {', '.join(traits.int8)}" if traits.int8 else f"--to {' or --to '.join(others)}"
        raise ConfigError(f"--int8 {request.int8} --to {target}: expected {wanted}{nearest(request.int8, traits.int8)}")
    if request.any_size and not traits.file:
        raise ConfigError(f"--any-size --to {target}: expected --to {' or --to '.join(graph_targets())}")
    if missing := [name for name in traits.packages if find_spec(name) is None]:
        install = f"pip install {' '.join(traits.packages)}"
        raise ConfigError(f"--to {target}: needs {', '.join(missing)}, not installed here; run {install}")
    if storage.exists(out) or storage.list_files(out):
        raise ConfigError(f"{out}: exists already; expected a new folder (--out)")


def check_network(request: ExportRequest, model: Model) -> None:
    """Refuse a network that a target cannot hold; those of libraries check further."""
    if model.num_classes is None:
        raise ConfigError(f"{request.model}: {model.name} has no head, so no logits; expected a network with classes")
    if request.any_size:
        model.require_vit(f"{request.model}: --any-size")
    is_at_stem = model.positions.kind == "sincos2d" and model.positions.where == "stem"
    if request.any_size and model.positions.kind not in ("none", "rope") and not is_at_stem:
        raise ConfigError(
            f"{request.model}: --any-size: its {model.positions.kind} positions belong to {model.grid[0]} x"
            f" {model.grid[1]} patches; expected positions none, rope, or sincos2d at the stem"
        )
