"""Access to MLflow: the tracking URI, the import with bounded timeouts, and clients."""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vitray.cluster.session import job_dir
from vitray.errors import ConfigError

if TYPE_CHECKING:
    from mlflow import MlflowClient

# MLflow keeps the tracking URI, and the settings it reads from the environment, per process.
_PROCESS_LOCK = threading.RLock()
_IMPORT_LOCK = threading.Lock()


def tracking_uri() -> str:
    """Return MLFLOW_TRACKING_URI, or the address of the embedded store `mlruns.db` in the working folder."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlruns.db'}"
    folder, path = job_dir(), uri.removeprefix("sqlite:///").partition("?")[0]
    if folder is not None and path != uri and (folder / path).is_relative_to(folder):
        raise ConfigError(
            f"MLFLOW_TRACKING_URI: got {os.environ.get('MLFLOW_TRACKING_URI') or 'nothing'}, and a store in the folder"
            " that this job runs in would be removed with it; wanted a server that all nodes reach, as in"
            " http://10.0.0.5:5000"
        )
    return uri


def artifact_root(uri: str) -> str | None:
    """Return the artifact folder of a database file, `mlruns` in the same folder; None leaves it to the server."""
    path = uri.removeprefix("sqlite:///")
    return str(Path(path).absolute().with_name("mlruns")) if path != uri else None


def user_dir() -> Path:
    """Return the folder of the user's vitray files."""
    return Path(os.environ.get("VITRAY_HOME", "~/.vitray")).expanduser()


def import_mlflow() -> None:
    """Import MLflow without its console output, and with short timeouts unless the environment sets others.

    Only one thread imports at a time: concurrent imports may see half-initialised modules. A caller that imports
    MLflow's dependencies (torch, pandas) in another thread must do that first.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # MLflow's default of 7 retries of 120 s blocks a thread for 15 minutes, and may create a run twice.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    with _IMPORT_LOCK:
        if "mlflow.store.tracking.sqlalchemy_store" not in sys.modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # MLflow 3.17 uses functions that SQLAlchemy 2.1 deprecates
                import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    for name in ("mlflow.store.db.utils", "mlflow.pyfunc", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def open_client(uri: str) -> "MlflowClient":
    """Return a client of the store at `uri`; only one thread at a time creates and migrates a store."""
    from mlflow import MlflowClient

    with _PROCESS_LOCK:
        return MlflowClient(uri)


@contextmanager
def tracking_env(uri: str) -> Iterator[None]:
    """Set the process's default tracking URI for the length of the block."""
    with _PROCESS_LOCK:
        before = os.environ.get("MLFLOW_TRACKING_URI")
        os.environ["MLFLOW_TRACKING_URI"] = uri
        try:
            yield
        finally:
            if before is None:
                del os.environ["MLFLOW_TRACKING_URI"]
            else:
                os.environ["MLFLOW_TRACKING_URI"] = before
