"""Model folders, whole or as deltas, and the import and export of other libraries' weights."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitray.weights.convert import import_weights as import_weights
    from vitray.weights.delta import identity_of as identity_of
    from vitray.weights.delta import read_delta as read_delta
    from vitray.weights.export import export_weights as export_weights
    from vitray.weights.export import write_library as write_library
    from vitray.weights.folder import LoadedModel as LoadedModel
    from vitray.weights.folder import SavedModel as SavedModel
    from vitray.weights.folder import describe_weights as describe_weights
    from vitray.weights.folder import flatten_model as flatten_model
    from vitray.weights.folder import load_deltas as load_deltas
    from vitray.weights.folder import load_model as load_model
    from vitray.weights.folder import load_tokenizer as load_tokenizer
    from vitray.weights.folder import open_weights as open_weights
    from vitray.weights.folder import repatch_model as repatch_model
    from vitray.weights.folder import save_model as save_model
    from vitray.weights.folder import save_tokenizer as save_tokenizer

# A table, so that `vitray.weights.addresses` loads no torch.
NAMES = {
    "convert": ("import_weights",),
    "delta": ("identity_of", "read_delta"),
    "export": ("export_weights", "write_library"),
    "folder": (
        "LoadedModel",
        "SavedModel",
        "describe_weights",
        "flatten_model",
        "load_deltas",
        "load_model",
        "load_tokenizer",
        "open_weights",
        "repatch_model",
        "save_model",
        "save_tokenizer",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"vitray.weights.{module}"), name)
    raise AttributeError(f"vitray.weights has no {name!r}")
