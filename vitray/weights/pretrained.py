"""Networks that a run names: the initial weights of a fine-tuning, a tokenizer, a teacher; and their adaptation."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitray.config import Model, Run
from vitray.config.augmentation import Normalize
from vitray.config.classification import Distillation
from vitray.config.pretraining import Beit
from vitray.errors import ConfigError, nearest
from vitray.models.network import AnyNetwork, build_network
from vitray.models.other_networks import OtherNetwork
from vitray.models.products import Products
from vitray.models.tokenizer import VisualTokenizer
from vitray.models.vit import TwoHeads, ViT, build_head
from vitray.weights import LoadedModel, identity_of, load_tokenizer, open_weights
from vitray.weights.addresses import pin_uri
from vitray.weights.freezing import Audit, Tuned, audit, part_of, prepare

# Settings that only affect execution or training, or are adapted. All others define the function of a network.
FREE_SETTINGS = {"image_size", "patches", "num_classes", "head", "drop_path", "drop_path_draw", "drop_path_schedule"}
FREE_SETTINGS |= {"dropout", "batch_momentum", "execution", "residual"}
FUNCTION_SETTINGS = tuple(name for name in Model.model_fields if name not in FREE_SETTINGS)
# The settings that define the function of a network of torchvision; its name decides the rest.
OTHER_SETTINGS = ["name", "image_size"]


class InitialWeights(NamedTuple):
    """The weights that a fine-tuning starts from."""

    url: str
    """Their permanent address, readable from any folder."""
    identity: str
    """A hash of the original tensors."""
    state: dict[str, Tensor]
    """The tensors adapted to the run: its image size, its classes."""
    audit: Audit
    """Trained and frozen parameters of each part."""
    adaptation: str
    """The changes to positions and head, for the log."""

    def task_state(self, run: Run) -> dict[str, Tensor]:
        """Return the tensors by their names in a task; a teacher begins as its student does."""
        modules = dict.fromkeys(("vit", run.task.traits.network))
        return {f"{module}.{name}": tensor for module in modules for name, tensor in self.state.items()}


def open_initial_weights(run: Run, task: Tuned, classes: Sequence[str]) -> tuple[Run, InitialWeights]:
    """Return the run, completed with the settings of its initial weights, and those weights."""
    try:
        assert task.weights is not None
        url = pin_uri(task.weights)
        loaded = open_weights(url, fallback=_stated(run))
    except ConfigError as error:
        raise ConfigError(f"task.weights: {error}") from None
    # Without class names, an equal number of classes counts as the same classes.
    new_head = loaded.vit.model.num_classes is None or (
        loaded.classes is not None and tuple(loaded.classes) != tuple(classes)
    )
    run = _completed(run, loaded, classes, new_head)
    if run.model.adapters and not loaded.vit.model.adapters and "adapters" not in task.trained:
        raise ConfigError(
            f"model.adapters: got {run.model.adapters}, but task.weights {task.weights} has none, and"
            f" task.mode {task.mode} trains none; expected null, task.mode adapter, or adapters in task.also_train"
        )
    state = adapt(loaded.vit, run.model, f"task.weights {task.weights}", new_head=new_head)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        vit = build_network(run.model)
        prepare(vit, task)
    if isinstance(vit, ViT):
        added = {name: tensor for name, tensor in vit.state_dict().items() if part_of(name) in ("lora", "adapters")}
        state = added | state
    identity = identity_of(loaded.vit.state_dict())
    return run, InitialWeights(url, identity, state, audit(vit), _describe_adaptation(loaded.vit, run, state))


def _stated(run: Run) -> dict[str, Any]:
    """The run's own settings that another library's file may lack."""
    stated = run.model.model_fields_set
    if not run.model.is_vit:
        return run.model.model_dump(mode="json", include={"name", "image_size"})
    settings = run.model.model_dump(mode="json", include=stated & {"positions", "activation", "norm_eps"})
    if "normalize" in run.data.model_fields_set:
        settings["normalize"] = run.data.normalize.model_dump(mode="json")
    return settings | ({"heads": run.model.num_heads} if stated & {"name", "heads"} else {})


def _completed(run: Run, loaded: LoadedModel, classes: Sequence[str], new_head: bool) -> Run:
    """The run with its omitted settings taken from the weights."""
    old = loaded.vit.model.model_dump(mode="json")
    inherited = (
        [*FUNCTION_SETTINGS, "batch_momentum", "image_size", *([] if new_head else ["head"])]
        if loaded.vit.model.is_vit
        else OTHER_SETTINGS
    )
    changes = {f"model.{name}": old[name] for name in inherited if name not in run.model.model_fields_set}
    if "num_classes" not in run.model.model_fields_set:
        changes["model.num_classes"] = len(classes)
    if "normalize" not in run.data.model_fields_set:
        changes["data.normalize"] = loaded.run.data.normalize.model_dump(mode="json")
    return run.replace(changes)


def _describe_adaptation(initial: AnyNetwork, run: Run, state: dict[str, Tensor]) -> str:
    changes, head = [], "head."
    if isinstance(initial, ViT):
        (rows, columns), (new_rows, new_columns) = initial.model.grid, run.model.grid
        kind = "none" if initial.model.grid == run.model.grid else run.model.positions.kind
        if kind in ("learned", "learned2d"):
            changes.append(f"positions {rows} x {columns} resized to {new_rows} x {new_columns}")
        elif kind in ("sincos2d", "rope"):
            changes.append(f"positions computed for {new_rows} x {new_columns}")
    else:
        head = initial.head_name
    old = initial.state_dict()
    heads = {name: tensor for name, tensor in state.items() if name.startswith(head)}
    if any(name not in old or not torch.equal(old[name], tensor) for name, tensor in heads.items()):
        changes.append(f"a new head of zeros for {run.model.num_classes} classes")
    return ", ".join(changes) or "as it is"


# ---- adaptation to another image size and other classes --------------------------------------------------------------


def adapt(initial: AnyNetwork, model: Model, where: str, *, new_head: bool) -> dict[str, Tensor]:
    """Return the tensors of `initial` at the image size and with the classes of `model`.

    Positions are resized by the recorded convention of `initial`. `new_head` forces a new head even for an equal
    number of classes. A new head ends in a layer of zeros (ViT paper, B.1.1). `where` starts an error message.
    """
    if not isinstance(initial, ViT):
        return _adapt_other(initial, model, where, new_head=new_head)
    if not model.is_vit:
        raise ConfigError(f"{where}: not the network of this run: got {initial.model.name}, expected {model.name}")
    (rows, columns), (new_rows, new_columns) = initial.model.grid, model.grid
    if initial.model.positions.kind == model.positions.kind == "relative" and initial.model.grid != model.grid:
        raise ConfigError(
            f"{where}: relative positions of {rows} x {columns} patches cannot be resized to the run's {new_rows} x"
            f" {new_columns}; expected the model.image_size of the weights"
        )
    if differences := [*_other_settings(initial.model, model), *_other_tensors(initial, model)]:
        raise ConfigError(f"{where}: not the network of this run: {'; '.join(differences)}")
    state = {name: tensor for name, tensor in initial.state_dict().items() if part_of(name) != "head"}
    state |= initial.positions_at(model.grid)
    head = build_head(model)
    if new_head or _shapes(head) != _shapes(initial.head):
        for each in head.children() if isinstance(head, TwoHeads) else [head]:
            for tensor in [*each.parameters()][-2:]:
                nn.init.zeros_(tensor)
    else:
        head = initial.head
    return state | {f"head.{name}": tensor for name, tensor in head.state_dict().items()}


def _adapt_other(initial: OtherNetwork, model: Model, where: str, *, new_head: bool) -> dict[str, Tensor]:
    if initial.model.name != model.name:
        raise ConfigError(f"{where}: not the network of this run: got {initial.model.name}, expected {model.name}")
    network, head = OtherNetwork(model), initial.head_name
    got, wanted = _shapes(initial), _shapes(network)
    names = [name for name in wanted if not name.startswith(head) and got.get(name) != wanted[name]]
    if names:
        raise ConfigError(f"{where}: {names[0]}: got {got.get(names[0], 'none')}, expected {wanted[names[0]]}")
    state = dict(initial.state_dict())
    if new_head or any(got.get(name) != wanted[name] for name in wanted if name.startswith(head)):
        zeros = {name: torch.zeros_like(tensor) for name, tensor in network.state_dict().items()}
        state |= {name: tensor for name, tensor in zeros.items() if name.startswith(head)}
    return {name: state[name] for name in wanted}


def _other_settings(old: Model, new: Model) -> list[str]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    before["heads"], after["heads"] = old.num_heads, new.num_heads
    if old.adapters is None:
        after["adapters"] = None  # added ones start as the identity
    for settings in (before, after):
        settings["positions"].pop("resample", None)
    if old.layerscale and new.layerscale:
        after["layerscale"] = old.layerscale  # the initial value has no effect on loaded weights
    return [
        f"model.{setting}: got {json.dumps(before[setting])}, expected {json.dumps(after[setting])}"
        for setting in FUNCTION_SETTINGS
        if before[setting] != after[setting]
    ]


def _other_tensors(initial: ViT, model: Model) -> list[str]:
    """The first few missing, additional or differently shaped tensors, without those that are adapted or added."""
    free = ("head", "positions", *(["adapters"] if initial.model.adapters is None else []))
    with torch.device("meta"):
        wanted = _shapes(ViT(model))
    got = _shapes(initial)
    names = [name for name in {**wanted, **got} if wanted.get(name) != got.get(name) and part_of(name) not in free]
    lines = [f"{name}: got {got.get(name, 'none')}, expected {wanted.get(name, 'none')}" for name in names[:3]]
    return [*lines, f"and {len(names) - 3} tensors more"] if len(names) > 3 else lines


def _shapes(module: nn.Module) -> dict[str, str]:
    return {name: " x ".join(map(str, tensor.shape)) for name, tensor in module.state_dict().items()}


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


class TokenizerSource(NamedTuple):
    """The tokenizer that supplies the target codes, and its origin."""

    url: str
    """Its permanent address, readable from any folder."""
    identity: str
    """A hash of its tensors."""
    tokenizer: VisualTokenizer


def open_tokenizer_source(run: Run, objective: Beit) -> TokenizerSource:
    """Return the tokenizer named by a run, checked against the run's patches and normalization."""
    try:
        url = pin_uri(objective.tokenizer)
        tokenizer = load_tokenizer(url)
    except ConfigError as error:
        raise ConfigError(f"task.objective.tokenizer: {error}") from None
    check_tokenizer(run, tokenizer.run, objective.tokenizer)
    return TokenizerSource(url, identity_of(tokenizer.state_dict()), tokenizer)


def check_tokenizer(run: Run, source: Run, url: str) -> None:
    """Reject a tokenizer, trained by the run `source`, whose patches or normalization differ from the run's."""
    (rows, columns), patch = run.model.grid, run.model.shape.patch
    (source_rows, source_columns), source_patch = source.model.grid, source.model.shape.patch
    if (rows, columns, patch) != (source_rows, source_columns, source_patch):
        raise ConfigError(
            f"task.objective.tokenizer: got {url}, which has codes for {source_rows} x {source_columns} patches of"
            f" {source_patch} pixels, expected {rows} x {columns} of {patch}, as {run.model.name} at"
            f" {run.model.image_size}"
        )
    if source.data.normalize != run.data.normalize:
        raise ConfigError(
            f"data.normalize: got mean {list(run.data.normalize.mean)}, std {list(run.data.normalize.std)}, expected"
            f" those of the tokenizer {url}, {list(source.data.normalize.mean)} and {list(source.data.normalize.std)}"
        )


# ---- the teacher of a distillation -----------------------------------------------------------------------------------

TEACHER = "task.distill.teacher"


class TeacherSource(NamedTuple):
    """A teacher and its origin."""

    url: str
    """Its permanent address, readable from any folder."""
    identity: str
    """A hash of its tensors."""
    name: str
    network: AnyNetwork
    """From normalized images to logits."""
    normalize: Normalize
    """The normalization of its images."""
    gflops: float
    """Of the matrix products of one image's forward pass; a multiply-add counts once."""


def open_teacher(run: Run, distill: Distillation, classes: Sequence[str]) -> TeacherSource:
    """Return the teacher that a run names, checked against the run's classes and image size."""
    try:
        url = pin_uri(distill.teacher)
        loaded = open_weights(url)
    except ConfigError as error:
        raise ConfigError(f"{TEACHER}: {error}") from None
    _check_classes(loaded, distill.teacher, classes)
    model = loaded.vit.model
    if model.image_shape != run.model.image_shape:
        (height, width), (own_height, own_width) = model.image_shape, run.model.image_shape
        raise ConfigError(
            f"{TEACHER}: got {distill.teacher}, which reads images of {height} x {width} pixels, expected {own_height}"
            f" x {own_width}, as model.image_size: fine-tune the teacher at that size, or train at its own"
        )
    identity = identity_of(loaded.vit.state_dict())
    network = loaded.vit.requires_grad_(False)
    network.count(products := Products())
    return TeacherSource(url, identity, model.name, network, loaded.run.data.normalize, products.gflops)


def _check_classes(loaded: LoadedModel, url: str, classes: Sequence[str]) -> None:
    number, names = loaded.vit.model.num_classes, loaded.classes
    if number is None:
        raise ConfigError(f"{TEACHER}: got {url}, a network without a head, expected a classifier")
    if number != len(classes):
        raise ConfigError(
            f"{TEACHER}: got {url}, which knows {number} classes, expected the {len(classes)} of the data"
        )
    # A weights file of another library has no names: an equal number counts as the same classes.
    for label, (name, wanted) in enumerate(zip(names or classes, classes, strict=True)):
        if name != wanted:
            raise ConfigError(
                f"{TEACHER}: got {url}, whose class {label} is {name}, expected {wanted}, as in the data"
                f"{nearest(wanted, names or ())}"
            )
