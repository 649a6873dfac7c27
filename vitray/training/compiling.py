"""torch.compile, with its results kept in the user's own folder."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vitray.models.blocks import Block
from vitray.system.mlflow_client import user_dir

CACHE = "TORCHINDUCTOR_CACHE_DIR"
# From so many blocks on, one is compiled for all: 24 then compile in a fifth of the time (LOG 2026-11-29).
DEEP = 24
OWN_OF_TORCH = f"{tempfile.gettempdir()}/torchinductor_"


def compiled(network: Callable[..., Any], mode: str | None, *, dynamic: bool | None = None) -> Any:
    """Return a network compiled in a mode of torch.compile; None: the network itself.

    Later starts on this machine load what earlier ones compiled. By itself PyTorch keeps it in a folder of /tmp with a
    known name, which another user might have made, and runs what it finds there.
    """
    if mode is None:
        return network
    if os.environ.get(CACHE, OWN_OF_TORCH).startswith(OWN_OF_TORCH):  # torch sets it as it is imported
        os.environ[CACHE] = str(user_dir().absolute() / "compiled")
    return torch.compile(network, dynamic=dynamic, mode=mode)


def compiled_for_training(model: nn.Module, mode: str | None) -> Any:
    """Return a model compiled in a mode; the blocks of a deep network are compiled in place, by one compilation.

    Blocks with other rates of drop path are other code, and CUDA graphs are of the whole step.
    """
    if mode is not None:
        torch.compiler.reset()  # of the runs of a process before, as torch compiles a function for eight networks
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    is_alike = len({block.drop_path for block in blocks}) == 1
    if mode != "default" or len(blocks) < DEEP or not is_alike:
        return compiled(model, mode)
    for block in blocks:
        block.level = compiled(block.level, mode)
    return model
