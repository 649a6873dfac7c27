"""MLflow as vitray reaches it: which store this process talks to, and where the model at an MLflow address lies."""

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitray import storage
from vitray.cluster import session
from vitray.errors import ConfigError, nearest, one_line, redact_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

# MLflow keeps the address of a store, and what it reads from the environment, for the whole process.
_AMBIENT = threading.RLock()
_IMPORTING = threading.Lock()


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or else the embedded store `mlruns.db` of the working folder."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlruns.db'}"
    folder, path = session.job_folder(), uri.removeprefix("sqlite:///").partition("?")[0]
    if folder is not None and path != uri and (folder / path).is_relative_to(folder):
        raise ConfigError(
            f"MLFLOW_TRACKING_URI: got {os.environ.get('MLFLOW_TRACKING_URI') or 'nothing'}, and a store in the folder"
            " that this job runs in would be removed with it; wanted a server that all nodes reach, as in"
            " http://10.0.0.5:5000"
        )
    return uri


def user_folder() -> Path:
    """The folder of what vitray keeps for this user."""
    return Path(os.environ.get("VITRAY_HOME", "~/.vitray")).expanduser()


def import_mlflow() -> None:
    """Load MLflow, quiet and with bounded time-outs, unless the environment says otherwise.

    One thread at a time: modules that two import at once may see each other half made. So what else it is made of and a
    caller wants in another thread (torch, pandas) is to be there before.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # MLflow's own 7 retries of 120 s would hold a thread for a quarter of an hour, and may make a run twice.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    with _IMPORTING:
        if "mlflow.store.tracking.sqlalchemy_store" not in sys.modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # MLflow 3.17 uses what SQLAlchemy 2.1 deprecates
                import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    for name in ("mlflow.store.db.utils", "mlflow.pyfunc", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def open_client(uri: str) -> "MlflowClient":
    """A client of the store at `uri`, made and migrated by one thread at a time."""
    from mlflow import MlflowClient

    with _AMBIENT:
        return MlflowClient(uri)


@contextmanager
def ambient(uri: str) -> Iterator[None]:
    """`uri` as the address that MLflow's functions without one use, in this process, for as long as the block."""
    with _AMBIENT:
        before = os.environ.get("MLFLOW_TRACKING_URI")
        os.environ["MLFLOW_TRACKING_URI"] = uri
        try:
            yield
        finally:
            if before is None:
                del os.environ["MLFLOW_TRACKING_URI"]
            else:
                os.environ["MLFLOW_TRACKING_URI"] = before


# ---- addresses of models ---------------------------------------------------------------------------------------------

FORMS = "models:/name@alias, models:/name/3, models:/m-<id> or runs:/<run id>/<path>"

# Where a model that vitray logs keeps its model folder: mlflow.pyfunc puts the artifact `model` there.
INSIDE = "artifacts/model"

# Tags of a logged delta and of its registered version: the address and the hash of the network that it rests on.
BASE, BASE_IDENTITY = "vitray.base", "vitray.base_identity"

# What MLflow answers where something is not there: of an alias, that its name is a wrong parameter.
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


class Address(NamedTuple):
    """The parts of an MLflow address, of which some are given."""

    model_id: str | None
    name: str | None
    alias: str | None
    version: str | None
    run_id: str | None
    path: str | None


_ADDRESS = re.compile(r"models:/(m-[^/@]+)|models:/([^/@]+)(?:@([^/@]+)|/(\d+))|runs:/([^/]+)/(.+?)/?")


def is_address(url: str) -> bool:
    """Whether MLflow has to be asked where this lies."""
    return url.startswith(("models:/", "runs:/"))


def resolve_uri(url: str) -> str:
    """Where the model folder (or the weights) at an MLflow address lies; any other address is returned as it is.

    That is a path, or s3:// where MLflow keeps it there; from a server that hands out artifacts itself it is fetched.
    """
    if not is_address(url):
        return url
    with _asked(url) as (client, address):
        place, model_id = _artifacts(client, address)
        if place.startswith("file:"):
            from mlflow.utils.file_utils import local_file_uri_to_path

            place = local_file_uri_to_path(place)
        elif not storage.is_remote(place) and re.match(r"[a-z][a-z0-9+.-]+:/", place):
            place = str(_fetched(place, model_id))
    inside = storage.join(place, INSIDE)
    return inside if storage.exists(storage.join(inside, "run.yaml")) else place


def pin_uri(url: str) -> str:
    """The address as it reads in every folder and later: an alias, which moves, as the version that it stands for."""
    if not is_address(url):
        return storage.absolute(url)
    with _asked(url) as (client, address):
        return url if address.alias is None else f"models:/{address.name}/{_version(client, address).version}"


def _artifacts(client: "MlflowClient", address: Address) -> tuple[str, str | None]:
    """Where MLflow has the artifacts, and the id of the logged model that they are."""
    model_id, rest = address.model_id, ""
    if address.name is not None:
        version = _version(client, address)
        if not version.model_id:  # registered from a folder
            return client.get_model_version_download_uri(address.name, version.version), None
        model_id = version.model_id
    if address.run_id is not None and address.path is not None:
        run = client.get_run(address.run_id)
        name, _, rest = address.path.partition("/")
        outputs = run.outputs.model_outputs if run.outputs else []
        named = [model for output in outputs if (model := client.get_logged_model(output.model_id)).name == name]
        if not named:
            return storage.join(str(run.info.artifact_uri), address.path), None
        model_id = max(named, key=lambda model: model.creation_timestamp).model_id
    assert model_id is not None
    place = client.get_logged_model(model_id).artifact_location
    return storage.join(place, rest) if rest else place, None if rest else model_id


def _version(client: "MlflowClient", address: Address) -> "ModelVersion":
    assert address.name is not None
    if address.alias is not None:
        return client.get_model_version_by_alias(address.name, address.alias)
    assert address.version is not None
    return client.get_model_version(address.name, address.version)


def _fetched(artifacts: str, model_id: str | None) -> Path:
    """A local copy of artifacts: kept where they are a logged model, which never changes, else for this process."""
    from mlflow.artifacts import download_artifacts

    kept = user_folder() / "models"
    kept.mkdir(parents=True, exist_ok=True)
    if model_id is not None and (kept / model_id).exists():
        return kept / model_id
    aside = Path(tempfile.mkdtemp(dir=kept, prefix=".fetching-"))
    atexit.register(shutil.rmtree, aside, ignore_errors=True)
    copy = Path(download_artifacts(artifact_uri=artifacts, dst_path=str(aside), tracking_uri=tracking_uri()))
    if model_id is None or not (copy / "MLmodel").exists():  # of artifacts that were deleted, it may be an empty folder
        return copy
    try:
        return copy.replace(kept / model_id)
    except OSError:  # another process was faster
        return kept / model_id


@contextmanager
def _asked(url: str) -> Iterator[tuple["MlflowClient", Address]]:
    """A client to ask about an address; what MLflow refuses is one message."""
    parts = _ADDRESS.fullmatch(url)
    if parts is None:
        raise ConfigError(f"{url}: not an address of a model; wanted {FORMS}")
    uri, address = tracking_uri(), Address(*parts.groups())
    database = Path(uri.removeprefix("sqlite:///").partition("?")[0])
    if uri.startswith("sqlite:///") and not database.exists():  # a client would make it
        raise ConfigError(f"{url}: no {database}; wanted the folder that training ran in, or MLFLOW_TRACKING_URI")
    import_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        client = open_client(uri)
        try:
            yield client, address
        except MlflowException as error:
            if error.error_code not in _ABSENT:
                raise
            raise ConfigError(f"{url}: at {redact_uri(uri)}, {_what_there_is(client, address)}") from None
    except (MlflowException, OSError) as error:
        raise ConfigError(
            f"{url}: MLflow at {redact_uri(uri)} cannot say where it lies: {one_line(error)[:300]}"
        ) from None


def _what_there_is(client: "MlflowClient", address: Address) -> str:
    """What is not there, and what is nearest."""
    if address.run_id is not None:
        return f"there is no run {address.run_id}, or no {address.path} in it"
    names = [model.name for model in client.search_registered_models()]
    there = f"; registered are {', '.join(names) or 'none'}"
    if address.name is None:
        return f"there is no model {address.model_id}{there}"
    if address.name not in names:
        return f"no model is registered as {address.name}{there}{nearest(address.name, names)}"
    if address.alias is not None:
        aliases = client.get_registered_model(address.name).aliases
        listed = ", ".join(f"{alias} (version {version})" for alias, version in aliases.items()) or "none"
        return f"{address.name} has no alias {address.alias}; it has {listed}{nearest(address.alias, aliases)}"
    numbers = sorted(int(version.version) for version in client.search_model_versions(f"name = '{address.name}'"))
    return f"{address.name} has no version {address.version}; it has {', '.join(map(str, numbers)) or 'none'}"
