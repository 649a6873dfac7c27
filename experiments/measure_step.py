"""python experiments/measure_step.py [--models ...]: a training step with each of our ways, and without it, in turns.

Drop path leaves samples out, LayerScale is part of a branch's last weight, queries, keys and values are chunks, and
attention in bfloat16 on a CPU is spelled out. Each is replaced by the plain way; the ratio of both times is taken
within rounds. The counts are of all operations that torch dispatches in a step, and of the bytes that those which are
no products read and write. Then a step of LAMB alone, tensor by tensor and together. The time is that of all threads on
a CPU.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitray.bench.train import random_batch, recipe, training_step
from vitray.config import Run
from vitray.models import blocks, branches
from vitray.models.drop_path import draw_kept
from vitray.system.timing import circumstances, in_rounds, ratio_of, spread_of
from vitray.tasks.build import build_task
from vitray.training.optim import LambOptimizer

# Views, products and new memory: what else is dispatched reads and writes elements.
NOT_ELEMENTWISE = ("view", "t", "transpose", "permute", "expand", "detach", "select", "slice", "unsqueeze", "unbind")
NOT_ELEMENTWISE += ("alias", "split", "as_strided", "empty", "squeeze", "mm", "addmm", "bmm", "convolution", "chunk")
NOT_ELEMENTWISE += ("new_empty", "zeros", "empty_like", "_scaled_dot_product", "_unsafe_view")


class Dispatches(TorchDispatchMode):
    """Counts operations, and the bytes of those that are neither views nor products."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.number += 1
        if not function.overloadpacket.__name__.startswith(NOT_ELEMENTWISE):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.bytes += sum(each.nbytes for each in leaves if isinstance(each, Tensor))
        return result


# ---- the plain ways --------------------------------------------------------------------------------------------------


def _all_samples(block: blocks.Block, x_BND: Tensor, computes_all: bool = True) -> list[Any]:
    del computes_all
    if not (block.training and block.drop_path):
        return [blocks.ALL] * block.branches
    return draw_kept(x_BND, block.branches, block.drop_path, block.drop_path_draw, computes_all=True)


def _scaled_activations(layer: Any, scale_D: Tensor | None, h_BNK: Tensor) -> Tensor:
    return layer(h_BNK) if scale_D is None else layer(h_BNK) * scale_D


def _permuted(qkv_BNK: Tensor, heads: int) -> Any:
    return qkv_BNK.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)


PLAIN: dict[str, Callable[[], Any]] = {
    "drop path": lambda: patch.object(blocks.Block, "_draw_kept", _all_samples),
    "LayerScale": lambda: patch.object(branches, "scaled_output", _scaled_activations),
    "qkv": lambda: patch.object(branches, "split_heads", _permuted),
    "attention": lambda: patch.object(branches, "MOST_STORED", 0),
}


@contextmanager
def plainly(*ways: str) -> Iterator[None]:
    """Replace some of our ways by the plain ones inside the block."""
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(PLAIN[way]())
        yield


# ---- measuring -------------------------------------------------------------------------------------------------------


def run_of(name: str, batch: int, image_size: int, rate: float, draw: str, dtype: str) -> Run:
    """Return a run as in DeiT III: LAMB, LayerScale and drop path."""
    changes = {"model.layerscale": 1e-4, "model.drop_path": rate, "model.drop_path_draw": draw, "optim.rule": "lamb"}
    return recipe(name, batch, image_size, dtype, False).replace(changes)


def measure(calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> Iterator[list[str]]:
    """Yield the name of each call, its dispatches and bytes, its time, and that over the first call's."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def seconds(call: Callable[[], object], _number: int) -> float:
        began = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - began

    times = in_rounds({name: partial(seconds, call) for name, call in calls.items()}, rounds, warm_up=1)
    for name, call in calls.items():
        with Dispatches() as counted:
            call()
        ratio = ratio_of(times[name], next(iter(times.values())))
        yield [name, f"{counted.number:,}", f"{counted.bytes / 1e9:.2f}", str(spread_of(times[name])), str(ratio)]


def with_plain(step: Callable[[], object], *ways: str) -> Callable[[], object]:
    """Return a step with some of our ways replaced by the plain ones."""

    def call() -> None:
        with plainly(*ways):
            step()

    return call


def lamb_steps(run: Run, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return a step of LAMB alone, tensor by tensor and together."""
    steps: dict[str, Callable[[], object]] = {}
    for way, foreach in (("LAMB one by one", False), ("LAMB together", True)):
        parameters = [*build_task(run).to(device).parameters()]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        groups = [{"params": parameters, "weight_decay": 0.05}]
        steps[way] = LambOptimizer(groups, lr=1e-3, foreach=foreach).step
    return steps


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="vit_s12x1_16,vit_b12x1_16,vit_s18x2_16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rates", default="0.1,0.4")
    parser.add_argument("--draw", default="sample", choices=("sample", "share"))
    parser.add_argument("--dtype", default="bf16" if torch.cuda.is_available() else "fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{circumstances(device)}; {options.dtype}, {options.image_size} px, batches of {options.batch}")
    print("\n| network | drop path | way | dispatches | GB | s | over the first |\n|---|---|---|---|---|---|---|")
    for name in options.models.split(","):
        for rate in map(float, options.rates.split(",")):
            run = run_of(name, options.batch, options.image_size, rate, options.draw, options.dtype)
            step = training_step(run, random_batch(run, device))[1]
            calls = {"ours": step} | {f"plain {way}": with_plain(step, way) for way in PLAIN}
            for cells in measure(calls | {"all plain": with_plain(step, *PLAIN)}, options.rounds, device):
                print(f"| {name} | {rate} | {' | '.join(cells)} |", flush=True)
        run = run_of(name, options.batch, options.image_size, 0.0, options.draw, options.dtype)
        for cells in measure(lamb_steps(run, device), options.rounds, device):
            print(f"| {name} | | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
