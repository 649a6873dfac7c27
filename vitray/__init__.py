"""vitray: Vision Transformers on Ray, from image bytes to registered model. Public names, imported on first use."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitray import inspection as inspection
    from vitray.config import Model as Model
    from vitray.config import Run as Run
    from vitray.config import load_run as load_run
    from vitray.config.model_names import parse_name as parse_name
    from vitray.data.loader import Loader as Loader
    from vitray.errors import ConfigError as ConfigError
    from vitray.errors import RunError as RunError
    from vitray.inference.loaded import load as load
    from vitray.models.counts import count as count
    from vitray.models.own_networks import add_network as add_network
    from vitray.models.vit import ViT as ViT
    from vitray.models.vit import regroup as regroup
    from vitray.runs.callback import Callback as Callback
    from vitray.runs.mlflow_callback import MLflowCallback as MLflowCallback
    from vitray.runs.saved_run import open_run as open_run
    from vitray.runs.train import train as train
    from vitray.sweeps.saved_sweep import open_sweep as open_sweep
    from vitray.verbs import evaluate as evaluate
    from vitray.verbs import export as export
    from vitray.verbs import inspect as inspect
    from vitray.verbs import predict as predict
    from vitray.verbs import replay as replay
    from vitray.verbs import shard as shard
    from vitray.verbs import sweep as sweep
    from vitray.weights import export_weights as export_weights
    from vitray.weights import flatten_model as flatten_model
    from vitray.weights import import_weights as import_weights
    from vitray.weights import load_deltas as load_deltas
    from vitray.weights import load_model as load_model
    from vitray.weights import open_weights as open_weights
    from vitray.weights import save_model as save_model

# The stable API. A table, so that `import vitray` loads neither torch nor ray.
PUBLIC = {
    "ConfigError": "vitray.errors",
    "RunError": "vitray.errors",
    "Model": "vitray.config",
    "Run": "vitray.config",
    "load_run": "vitray.config",
    "Loader": "vitray.data.loader",
    "shard": "vitray.verbs",
    "train": "vitray.runs.train",
    "Callback": "vitray.runs.callback",
    "sweep": "vitray.verbs",
    "evaluate": "vitray.verbs",
    "predict": "vitray.verbs",
    "inspect": "vitray.verbs",
    "export": "vitray.verbs",
    "replay": "vitray.verbs",
    "open_run": "vitray.runs.saved_run",
    "open_sweep": "vitray.sweeps.saved_sweep",
    "load": "vitray.inference.loaded",
    "MLflowCallback": "vitray.runs.mlflow_callback",
    "count": "vitray.models.counts",
    "add_network": "vitray.models.own_networks",
    "parse_name": "vitray.config.model_names",
    "ViT": "vitray.models.vit",
    "regroup": "vitray.models.vit",
    "export_weights": "vitray.weights",
    "flatten_model": "vitray.weights",
    "import_weights": "vitray.weights",
    "load_deltas": "vitray.weights",
    "load_model": "vitray.weights",
    "open_weights": "vitray.weights",
    "save_model": "vitray.weights",
}
# Public modules.
MODULES = ("inspection",)


def __dir__() -> list[str]:
    return [*PUBLIC, *MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("vitray")
    if name in MODULES:
        return importlib.import_module(f"vitray.{name}")
    if name not in PUBLIC:
        raise AttributeError(f"vitray has no {name!r}; it has {', '.join([*PUBLIC, *MODULES])}")
    return getattr(importlib.import_module(PUBLIC[name]), name)
