"""The model folder of a finished run, and the last weights of any run."""

from collections.abc import Sequence

from torch import Tensor

from vitray import storage
from vitray.config import Run
from vitray.config.pretraining import Tokenizer
from vitray.config.training import Finetune
from vitray.models.network import build_network
from vitray.models.tokenizer import VisualTokenizer
from vitray.training import checkpoints
from vitray.weights import SavedModel, save_model, save_tokenizer
from vitray.weights.freezing import prepare
from vitray.weights.pretrained import InitialWeights


def last_weights(run_dir: str) -> dict[str, Tensor]:
    """Return the task's weights at the last checkpoint, averaged where the run averages."""
    parts = checkpoints.read_checkpoint(run_dir, checkpoints.complete_steps(run_dir)[-1]).parts
    return parts["model"] | parts.get("average", {})  # frozen weights have no average


def save_weights(run: Run, run_dir: str, classes: Sequence[str], start: InitialWeights | None) -> SavedModel:
    """Write the model folder: a network without decoder, a delta for partial fine-tuning, or a whole tokenizer."""
    weights, url = last_weights(run_dir), storage.join(run_dir, "model")
    if isinstance(run.task, Tokenizer):
        tokenizer = VisualTokenizer(run)
        tokenizer.load_state_dict(weights)
        storage.remove(url)
        return save_tokenizer(url, tokenizer)
    vit = build_network(run.model)
    if isinstance(run.task, Finetune):
        prepare(vit, run.task)
    vit.load_state_dict({name.removeprefix("vit."): tensor for name, tensor in weights.items() if name[:4] == "vit."})
    is_delta = start is not None and isinstance(run.task, Finetune) and run.task.delta and run.task.mode != "full"
    base = start.url if start and is_delta else None
    storage.remove(url)
    class_names = classes if run.model.num_classes is not None else None
    return save_model(url, run, vit, class_names, relative_to=base)
