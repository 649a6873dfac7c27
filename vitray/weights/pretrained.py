"""What a run takes from earlier ones: of a fine-tuning settings and tensors, made to fit it; a tokenizer as it is."""

from typing import NamedTuple

import torch
from torch import Tensor

from vitray.config import Run
from vitray.config.pretraining import Beit
from vitray.config.training import Finetune
from vitray.data.shards.manifest import Dataset
from vitray.errors import ConfigError
from vitray.models.tokenizer import VisualTokenizer
from vitray.models.vit import ViT
from vitray.tasks.masked import check_tokenizer
from vitray.tracking.mlflow_client import pin_uri
from vitray.weights import Loaded, identity_of, load_tokenizer, open_weights
from vitray.weights.freezing import FIXED, Audit, adapt, audit, freeze


class Start(NamedTuple):
    """The weights that a run starts from."""

    url: str
    """Where they are, as their address reads in every folder and later."""
    identity: str
    """A hash of them as they are there."""
    state: dict[str, Tensor]
    """Of the run's network: positions at its image size, a head for its classes."""
    audit: Audit
    """What of it trains."""
    adapted: str
    """What was made to fit, in words."""

    @property
    def task_state(self) -> dict[str, Tensor]:
        """The tensors as a task names them."""
        return {f"vit.{name}": tensor for name, tensor in self.state.items()}


def open_start(run: Run, task: Finetune, dataset: Dataset) -> tuple[Run, Start]:
    """The run with what it leaves open as the weights have it, and those weights; or one message why not."""
    try:
        url = pin_uri(task.weights)
        found = open_weights(url)
    except ConfigError as error:
        raise ConfigError(f"task.weights: {error}") from None
    # Of weights without class names, as many classes are taken for the same.
    new_head = found.vit.model.num_classes is None or (
        found.classes is not None and tuple(found.classes) != dataset.classes
    )
    run = _settled(run, found, dataset, new_head)
    state = adapt(found.vit, run.model, f"task.weights {task.weights}", new_head=new_head)
    vit = ViT(run.model)
    freeze(vit, task)
    identity = identity_of(found.vit.state_dict())
    return run, Start(url, identity, state, audit(vit), _adapted(found.vit, run, state))


def _settled(run: Run, found: Loaded, dataset: Dataset, new_head: bool) -> Run:
    old = found.vit.model.model_dump(mode="json")
    taken = [*FIXED, "image_size", *([] if new_head else ["head"])]
    changes = {f"model.{name}": old[name] for name in taken if name not in run.model.model_fields_set}
    if "num_classes" not in run.model.model_fields_set:
        changes["model.num_classes"] = len(dataset.classes)
    if "normalise" not in run.data.model_fields_set:
        changes["data.normalise"] = found.run.data.normalise.model_dump(mode="json")
    return run.replace(changes)


def _adapted(start: ViT, run: Run, state: dict[str, Tensor]) -> str:
    (rows, columns), (new_rows, new_columns) = start.model.grid, run.model.grid
    said = []
    if (rows, columns) != (new_rows, new_columns):
        said.append(f"positions {rows} x {columns} resized to {new_rows} x {new_columns}")
    old = start.state_dict()
    heads = {name: tensor for name, tensor in state.items() if name.startswith("head.")}
    if any(name not in old or not torch.equal(old[name], tensor) for name, tensor in heads.items()):
        said.append(f"a new head of zeros for {run.model.num_classes} classes")
    return ", ".join(said) or "as it is"


class Vocabulary(NamedTuple):
    """The tokenizer whose codes a run predicts."""

    url: str
    """Where it is, as its address reads in every folder and later."""
    identity: str
    """A hash of its tensors."""
    tokenizer: VisualTokenizer


def open_vocabulary(run: Run, objective: Beit) -> Vocabulary:
    """The tokenizer that a run names, or one message why not."""
    try:
        url = pin_uri(objective.tokenizer)
        tokenizer = load_tokenizer(url)
    except ConfigError as error:
        raise ConfigError(f"task.objective.tokenizer: {error}") from None
    check_tokenizer(run, tokenizer.run, objective.tokenizer)
    return Vocabulary(url, identity_of(tokenizer.state_dict()), tokenizer)
