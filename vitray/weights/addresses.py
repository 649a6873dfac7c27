"""Addresses of models (`models:/`, `runs:/`, `zoo/`), resolved to the folder that holds the model."""

import atexit
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vitray.config.parsing import short
from vitray.errors import ConfigError, nearest, one_line, redact_uri
from vitray.system import storage
from vitray.system.mlflow_client import import_mlflow, in_thread, in_time, open_client, tracking_uri, user_dir
from vitray.weights.zoo import zoo_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

GRAMMAR = "models:/name@alias, models:/name/3, models:/m-<id> or runs:/<run id>/<path>"

# Tags of a logged model: its folder, of a model and of a checkpoint.
FOLDER_TAG, CHECKPOINT_TAG = "vitray.folder", "vitray.checkpoint"
# Tags of a logged delta and of its registered version: the address and the hash of its base network.
BASE_TAG, BASE_IDENTITY_TAG = "vitray.base", "vitray.base_identity"
# Tag of a logged family: its tasks.
TASKS_TAG = "vitray.tasks"

# The model folder inside a logged model: mlflow.pyfunc stores the artifact `model` there.
MODEL_DIR = "artifacts/model"

# Seconds of a download, and the bytes that arrive in each of its minutes at least.
DOWNLOAD_SECONDS, MINUTE, BYTES_A_MINUTE = 3600.0, 60.0, 2**20

# MLflow's error codes for missing entities; it reports a missing alias as an invalid parameter.
NOT_FOUND = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


# A server names models, and the id of one is the name of a folder here.
_MODEL_ID = re.compile(r"m-[\w-]+")
_MODEL_URI = re.compile(
    r"models:/(?P<model_id>m-[^/@]+)|models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))"
    r"|runs:/(?P<run_id>[^/]+)/(?P<path>.+?)/?"
)


def check_model_name(name: str | None) -> None:
    """Refuse a name that MLflow's registry refuses, or that its addresses cannot hold; None is no name."""
    if set(name or "") & set("/:@"):
        raise ConfigError(f"tracking.register_as: got {name!r}, expected a name without /, : and @")


def is_model_uri(url: str) -> bool:
    """Whether only MLflow can resolve the address."""
    return url.startswith(("models:/", "runs:/"))


def resolve_uri(url: str) -> str:
    """Return the path or s3:// address of the model folder (or weights) at an address.

    Artifacts that are only available through the MLflow server are downloaded.
    """
    if not is_model_uri(url):
        return zoo_folder(url) or url
    with _mlflow_lookup(url) as (client, uri):
        place, model_id = in_time(lambda: _artifact_location(client, uri))
        if place.startswith("file:"):
            from mlflow.utils.file_utils import local_file_uri_to_path

            place = local_file_uri_to_path(place)
        elif not storage.is_remote(place) and re.match(r"[a-z][a-z0-9+.-]+:/", place):
            files, server = urlsplit(place), urlsplit(tracking_uri())
            if files.scheme in ("http", "https") and (files.hostname, files.port) != (server.hostname, server.port):
                # MLflow would send its user and password there.
                raise ConfigError(
                    f"{url}: its files are at {redact_uri(place)}, outside of MLflow at {redact_uri(tracking_uri())};"
                    " expected artifacts of that server, s3:// or a path"
                )
            place = str(_download(place, model_id))
    model_dir = storage.join(place, MODEL_DIR)
    return model_dir if storage.exists(storage.join(model_dir, "run.yaml")) else place


def pin_uri(url: str) -> str:
    """Return an address that stays valid: a path made absolute, an alias replaced by its current version."""
    if not is_model_uri(url):
        return url if zoo_folder(url) else storage.absolute(url)
    with _mlflow_lookup(url) as (client, uri):
        if not uri["alias"]:
            return url
        return f"models:/{uri['name']}/{in_time(lambda: _model_version(client, uri)).version}"


def find_logged_model(client: "MlflowClient", url: str) -> "LoggedModel | None":
    """Return the logged model at an MLflow address; None if there is none, as for a version made from a folder."""
    from mlflow.exceptions import MlflowException

    uri = _MODEL_URI.fullmatch(url)
    try:
        if uri and uri["name"]:  # an embedded store knows only the source
            version = _model_version(client, uri)
            uri = _MODEL_URI.fullmatch(f"models:/{version.model_id}" if version.model_id else version.source or "")
        model_id = uri and _artifact_location(client, uri)[1]
        return client.get_logged_model(model_id) if model_id else None
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
        return None


def _artifact_location(client: "MlflowClient", uri: re.Match[str]) -> tuple[str, str | None]:
    """Return the location of the artifacts, and the id of the logged model if they are a whole one."""
    model_id, rest = uri["model_id"], ""
    if uri["name"]:
        version = _model_version(client, uri)
        if not version.model_id:  # registered from a folder
            return client.get_model_version_download_uri(uri["name"], version.version), None
        model_id = version.model_id
    if uri["run_id"]:
        run = client.get_run(uri["run_id"])
        name, _, rest = uri["path"].partition("/")
        outputs = run.outputs.model_outputs if run.outputs else []
        matches = [model for output in outputs if (model := client.get_logged_model(output.model_id)).name == name]
        if not matches:
            return storage.join(str(run.info.artifact_uri), uri["path"]), None
        model_id = max(matches, key=lambda model: model.creation_timestamp).model_id
    if not _MODEL_ID.fullmatch(model_id):
        raise ConfigError(f"MLflow at {redact_uri(tracking_uri())} names a model {short(model_id)}, expected m-<id>")
    model = client.get_logged_model(model_id)
    place = model.tags.get(CHECKPOINT_TAG, model.artifact_location)  # the files of a checkpoint stay in the run folder
    return storage.join(place, rest) if rest else place, None if rest else model_id


def _model_version(client: "MlflowClient", uri: re.Match[str]) -> "ModelVersion":
    if uri["alias"]:
        return client.get_model_version_by_alias(uri["name"], uri["alias"])
    return client.get_model_version(uri["name"], uri["version"])


def _download(artifacts: str, model_id: str | None) -> Path:
    """Return a local copy of artifacts: cached for a logged model, which is immutable, else until the process exits."""
    from mlflow.artifacts import download_artifacts

    cache = user_dir() / "models"
    cache.mkdir(parents=True, exist_ok=True)
    if model_id is not None and (cache / model_id).exists():
        return cache / model_id
    temporary = Path(tempfile.mkdtemp(dir=cache, prefix=".fetching-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    download = in_thread(
        lambda: download_artifacts(artifact_uri=artifacts, dst_path=str(temporary), tracking_uri=tracking_uri())
    )
    copy = Path(_arrived(download, temporary))
    if model_id is None or not (copy / "MLmodel").exists():  # deleted artifacts download as an empty folder
        return copy
    try:
        return copy.replace(cache / model_id)
    except OSError:  # another process was faster
        return cache / model_id


def _arrived(download: "Future[str]", folder: Path) -> str:
    """Return the result of a download into a folder; raise TimeoutError for a slow one, which stays in its thread."""
    end, before = time.monotonic() + DOWNLOAD_SECONDS, 0
    while True:
        with suppress(TimeoutError):
            return download.result(MINUTE)
        if download.done():  # its own TimeoutError
            return download.result()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if time.monotonic() > end or size < before + BYTES_A_MINUTE:
            raise TimeoutError(f"only {size:,} bytes arrived, and {size - before:,} of them in the last {MINUTE:g} s")
        before = size


@contextmanager
def _mlflow_lookup(url: str) -> Iterator[tuple["MlflowClient", re.Match[str]]]:
    """Yield a client and the parsed address; turn MLflow's errors into one message."""
    uri = _MODEL_URI.fullmatch(url)
    if uri is None:
        raise ConfigError(f"{url}: not an address of a model; expected {GRAMMAR}")
    store = tracking_uri()
    database = Path(store.removeprefix("sqlite:///").partition("?")[0])
    if store.startswith("sqlite:///") and not database.exists():  # a client would create it
        raise ConfigError(f"{url}: no {database}; expected the folder that training ran in, or MLFLOW_TRACKING_URI")
    import_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        client = open_client(store)
        try:
            yield client, uri
        except MlflowException as error:
            if error.error_code not in NOT_FOUND:
                raise
            missing = in_time(lambda: _describe_missing(client, uri))
            raise ConfigError(f"{url}: at {redact_uri(store)}, {missing}") from None
    except ConfigError:
        raise
    except Exception as error:  # a server's odd answer raises almost anything
        raise ConfigError(f"{url}: MLflow at {redact_uri(store)} cannot find it: {one_line(error)[:300]}") from None


def _describe_missing(client: "MlflowClient", uri: re.Match[str]) -> str:
    """Name the missing part of an address, the existing ones and the nearest of them."""
    name, alias = uri["name"], uri["alias"]
    if uri["run_id"]:
        return f"there is no run {uri['run_id']}, or no {uri['path']} in it"
    names = [model.name for model in client.search_registered_models()]
    registered = f"; registered are {', '.join(names) or 'none'}"
    if uri["model_id"]:
        return f"there is no model {uri['model_id']}{registered}"
    if name not in names:
        return f"no model is registered as {name}{registered}{nearest(name, names)}"
    if alias:
        aliases = client.get_registered_model(name).aliases
        listed = ", ".join(f"{key} (version {version})" for key, version in aliases.items()) or "none"
        return f"{name} has no alias {alias}; it has {listed}{nearest(alias, aliases)}"
    versions = sorted(int(version.version) for version in client.search_model_versions(f"name = '{name}'"))
    return f"{name} has no version {uri['version']}; it has {', '.join(map(str, versions)) or 'none'}"
