"""Access to MLflow: the tracking URI, the import with bounded timeouts, and clients."""

import fcntl
import logging
import os
import shutil
import sqlite3
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vitray.cluster.session import job_dir
from vitray.errors import ConfigError, redact_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOG = logging.getLogger("vitray.tracking")
T = TypeVar("T")

# Seconds without a write after which no process is still creating a database file.
ABANDONED_SECONDS = 20.0

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
            " that this job runs in would be removed with it; expected a server that all nodes reach, as in"
            " http://10.0.0.5:5000"
        )
    return uri


def has_store() -> bool:
    """Whether the environment names a store, or the working folder has one."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        tracking_uri()  # refuses a store that would be removed with its job
        return True
    return (Path.cwd() / "mlruns.db").exists()


def database_file(uri: str) -> Path | None:
    """Return the database file of an embedded store; None for any other address."""
    path = uri.removeprefix("sqlite:///")
    return Path(path.partition("?")[0]).absolute() if path != uri else None


def artifact_root(uri: str) -> str | None:
    """Return the artifact folder of a database file, `mlruns` in the same folder; None leaves it to the server."""
    file = database_file(uri)
    return str(file.with_name("mlruns")) if file else None


def store_address(uri: str) -> str:
    """Return the address that identifies a store: absolute, without credentials."""
    file = database_file(uri)
    return f"sqlite:///{file}" if file else redact_uri(uri).rstrip("/")


def user_dir() -> Path:
    """Return the folder of the user's vitray files."""
    return Path(os.environ.get("VITRAY_HOME", "~/.vitray")).expanduser()


def import_mlflow() -> None:
    """Import MLflow without its console output, and with short timeouts unless the environment sets others.

    Only one thread imports at a time: concurrent imports may see half-initialized modules. A caller that imports
    MLflow's dependencies (torch, pandas) in another thread must do that first.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
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


def open_client(uri: str) -> "MlflowClient":
    """Return a client of the store at `uri`; only one thread at a time creates and migrates a store."""
    from mlflow import MlflowClient

    file = database_file(uri)
    with _PROCESS_LOCK:
        if file and file.exists():
            with suppress(FileNotFoundError):  # another process has set it aside
                if _is_unusable(file):
                    _set_aside(file)
        if file and not file.exists():
            _create_database(file)
        return MlflowClient(uri)


def in_time(ask: Callable[[], T]) -> T:
    """Return the result of calls to a store, which have the time of one request and its retries; else TimeoutError.

    requests counts its timeout from byte to byte, so a server that sends slowly would hold a call for as long as it
    likes.
    """
    timeout, retries = (float(os.environ[f"MLFLOW_HTTP_REQUEST_{name}"]) for name in ("TIMEOUT", "MAX_RETRIES"))
    seconds, answer = timeout * (1 + retries), in_thread(ask)
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # its own
            raise
        raise TimeoutError(f"no whole answer within {seconds:g} s") from None


def in_thread(function: Callable[[], T]) -> "Future[T]":
    """Call a function in a thread that does not keep the process alive, and return the future of its result."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # belongs to the caller of result()
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def _create_database(file: Path) -> None:
    """Create a database under another name and rename it when complete: MLflow never repairs an incomplete one."""
    from mlflow import MlflowClient

    with _scratch_name(file) as scratch:
        MlflowClient(f"sqlite:///{scratch}")
        try:
            os.link(scratch, file)
        except FileExistsError:  # another process was faster
            pass
        except OSError:  # a file system without links
            scratch.rename(file)


def _set_aside(file: Path) -> None:
    """Rename a database that holds nothing and cannot be opened; of several processes, one does."""
    with file.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # until the block ends
        if os.fstat(opened.fileno()).st_ino == file.stat().st_ino and _is_unusable(file):
            aside = file.with_name(f"{file.name}.incomplete-{uuid.uuid4().hex[:8]}")
            file.rename(aside)
            LOG.warning(
                "tracking: %s cannot be opened and holds no run; it is now %s, and a new one is made", file, aside
            )


def _is_unusable(file: Path) -> bool:
    """Whether MLflow cannot open a database that holds nothing and to which nothing has written for some seconds."""
    from mlflow import MlflowClient

    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("select name from sqlite_master")}
            # A new store has one experiment.
            for table, usual in (("runs", 0), ("registered_models", 0), ("experiments", 1)):
                if table in tables and database.execute(f"select count(*) from {table}").fetchone()[0] > usual:
                    return False
    except sqlite3.Error:  # busy, or not a database
        return False
    if time.time() - file.stat().st_mtime < ABANDONED_SECONDS:
        return False
    with _scratch_name(file) as scratch:  # a copy, because MLflow keeps the files that it has opened
        shutil.copyfile(file, scratch)
        try:
            MlflowClient(f"sqlite:///{scratch}")
        except Exception:
            return True
    return False


@contextmanager
def _scratch_name(file: Path) -> Iterator[Path]:
    """Yield a name beside a file for the length of the block; remove those that killed processes have left."""
    for leftover in file.parent.glob(f"{file.name}.new-*"):
        with suppress(OSError):  # another process removes it, too
            if time.time() - leftover.stat().st_mtime > ABANDONED_SECONDS:
                leftover.unlink()
    scratch = file.with_name(f"{file.name}.new-{uuid.uuid4().hex[:8]}")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


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
