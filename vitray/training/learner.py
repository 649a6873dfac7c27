"""The trained objects of a worker, and how they are saved to and loaded from a checkpoint."""

import inspect
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitray.config import Run
from vitray.data.stream.batches import Share
from vitray.errors import ConfigError
from vitray.models.stems import synchronize_norms
from vitray.system import host_facts
from vitray.tasks.build import Task, build_task, recompute_activations
from vitray.training import checkpoints
from vitray.training.checkpoints import Checkpoint
from vitray.training.compiling import compiled_for_training
from vitray.training.host import Host
from vitray.training.messages import Metrics, Note, Resumed
from vitray.training.optim import Average, build_optimizer, match_layout
from vitray.training.state import TrainState

# Gradients are views of the all-reduce buckets, which saves one copy of them.
DDP: dict[str, Any] = {"gradient_as_bucket_view": True}
# The argument that lets each step copy the first worker's buffers to the others: torch 2.15 deprecates the former name.
NAMES = "forward_sync_buffers", "broadcast_buffers"
COPY_BUFFERS = next(name for name in NAMES if name in inspect.signature(DistributedDataParallel).parameters)
STRIDES_WARNING = "Grad strides do not match bucket view strides"


class Learner(NamedTuple):
    """A task with its optimizer and its weight average."""

    task: Task
    model: nn.Module
    """The task, wrapped by DDP and compiled where the run asks for it."""
    optimizer: torch.optim.Optimizer
    average: Average | None


def build_learner(run: Run, host: Host) -> Learner:
    """Return the task with its initial weights and its optimizer; the model is not wrapped yet."""
    device, tokenizer, teacher = host.device, host.load("tokenizer"), host.load("teacher")
    torch.manual_seed(run.seed)  # equal initial weights on every worker
    task = build_task(run, tokenizer and tokenizer.to(device), teacher and teacher.to(device)).to(device)
    if (initial := host.load("initial")) is not None:
        task.load_state_dict(task.state_dict() | dict(initial))  # a head beside the network keeps its new weights
    recompute_activations(task, run.compute.activation_checkpointing)
    if run.compute.channels_last:
        task.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(task, run.optim, device)
    return Learner(task, task, optimizer, Average(task, run.optim.ema) if run.optim.ema else None)


def wrap_model(learner: Learner, run: Run) -> Learner:
    """Return the learner with its model wrapped by DDP, if there are several workers, and compiled."""
    model: nn.Module = learner.task
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = next(learner.task.parameters()).device
        synchronize_norms(learner.task, device)
        # Of channels-last images, kernels of 1 x 1 get gradients with other strides, which DDP copies: a few megabytes.
        warnings.filterwarnings("ignore", STRIDES_WARNING)
        # Batch norms are synchronized, so that all workers have equal buffers; own code may have others.
        settings: dict[str, Any] = DDP | {COPY_BUFFERS: run.model.is_own}
        if device.type == "cuda":
            settings |= {"device_ids": [device], "output_device": device}
        model = DistributedDataParallel(model, **settings)
    return learner._replace(model=compile_model(model, run))


def compile_model(model: nn.Module, run: Run) -> nn.Module:
    """Return the model compiled for training as the run asks for it."""
    mode = run.compute.compile_on(next(model.parameters()).device.type)
    if mode is None:
        return model
    if run.compute.has_graphs:
        # Otherwise autograd would keep an output of the CUDA graph as the gradient, which the graph overwrites in the
        # next micro-batch. It accumulates into gradients that exist.
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return compiled_for_training(model, mode)


def checkpoint_of(run: Run, learner: Learner, state: TrainState, share: Share) -> Checkpoint:
    """Return everything that the next step depends on."""
    tensors, rest = checkpoints.split_state(learner.optimizer.state_dict())
    parts = {"model": dict(learner.task.state_dict()), "optimizer": tensors}
    if learner.average is not None:
        parts["average"] = learner.average.state()
    content = {
        "train_state": state.as_json(),
        "optimizer": rest,
        "workers": share.workers,
        "threads": _threads(learner),
        "run": run.model_dump(mode="json"),
        "versions": host_facts.versions(),
    }
    return Checkpoint(state.step, parts, content)


def resume(run_dir: str, learner: Learner, host: Host) -> TrainState:
    """Load the last complete checkpoint, if any, and return its state."""
    checkpoint = checkpoints.read_latest(run_dir, next(learner.task.parameters()).device)
    return TrainState() if checkpoint is None else restore(checkpoint, learner, host)


def restore(checkpoint: Checkpoint, learner: Learner, host: Host) -> TrainState:
    """Load a checkpoint, and return its state."""
    # Each part is freed when it is loaded.
    learner.task.load_state_dict(checkpoint.parts.pop("model"))
    rest = checkpoint.state["optimizer"]
    learner.optimizer.load_state_dict(checkpoints.join_state(checkpoint.parts.pop("optimizer"), rest))
    match_layout(learner.optimizer)
    if learner.average is not None:
        learner.average.load(checkpoint.parts.pop("average"))
    host.send(Resumed(checkpoint.step, checkpoint.state["workers"]))
    before, now = checkpoint.state["threads"], _threads(learner)
    if before and now and before != now:
        text = f"{now} compute threads, and {before} until step {checkpoint.step:,}: sums may round differently"
        host.send(Note(f"{text}; compute.cpus={before} keeps them"))
    state = TrainState(**checkpoint.state["train_state"])
    for record in state.records:
        host.send(Metrics(record["step"], record["values"], is_repeated=True))
    return state


def _threads(learner: Learner) -> int | None:
    """Return the compute threads of this worker, which can change the last digits on a CPU; None on a GPU."""
    return torch.get_num_threads() if next(learner.task.parameters()).device.type == "cpu" else None


def rewind(run_dir: str, learner: Learner, host: Host, state: TrainState, broken: int) -> TrainState:
    """Return to the last checkpoint and skip the broken step from now on."""
    earlier = resume(run_dir, learner, host)
    if earlier.step == 0:
        raise ConfigError(
            f"the loss was not finite or spiked at step {broken + 1}, and no checkpoint exists to rewind to; expected a"
            " lower optim.lr, or an earlier checkpoint (checkpoint.every)"
        )
    earlier.skipped, earlier.rewinds = [*state.skipped, broken], state.rewinds + 1
    if state.best_knn_step is not None and state.best_knn_step <= earlier.step:
        earlier.best_knn, earlier.best_knn_step = state.best_knn, state.best_knn_step
    # The best score may be of a separate evaluation that finished after that checkpoint was written.
    if state.best_step is not None and state.best_step <= earlier.step:
        earlier.best, earlier.best_step = state.best, state.best_step
    return earlier
