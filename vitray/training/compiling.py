"""torch.compile, with its results kept in the user's own folder."""

import os
import tempfile
from typing import Any

import torch
from torch import nn

from vitray.system.mlflow_client import user_dir

CACHE = "TORCHINDUCTOR_CACHE_DIR"
OWN_OF_TORCH = f"{tempfile.gettempdir()}/torchinductor_"


def compiled(network: nn.Module, mode: str | None, *, dynamic: bool | None = None) -> Any:
    """Return a network compiled in a mode of torch.compile; None: the network itself.

    Later starts on this machine load what earlier ones compiled. By itself PyTorch keeps it in a folder of /tmp with a
    known name, which another user might have made, and runs what it finds there.
    """
    if mode is None:
        return network
    if os.environ.get(CACHE, OWN_OF_TORCH).startswith(OWN_OF_TORCH):  # torch sets it as it is imported
        os.environ[CACHE] = str(user_dir().absolute() / "compiled")
    return torch.compile(network, dynamic=dynamic, mode=mode)
