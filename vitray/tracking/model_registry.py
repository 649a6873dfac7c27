"""MLflow's model registry: versions, aliases and their promotion, and the link from a delta to its base."""

import fcntl
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from vitray.errors import ConfigError, one_line, redact_uri
from vitray.system.mlflow_client import database_file, import_mlflow, in_time, open_client, tracking_uri, user_dir
from vitray.weights.addresses import BASE_IDENTITY_TAG, BASE_TAG, NOT_FOUND

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

# Tag of a run: its identity in vitray.
UID_TAG = "vitray.uid"
# Tags of a version: its score at the end of training, and a hash of the images and classes that it was scored on.
SCORE_TAGS = {"val/top1": "top-1", "val/map": "mAP"}
SCORED_ON_TAG = "vitray.scored_on"
# Tag of a version: the result of its last comparison with the holder of an alias.
PROMOTION_TAG = "vitray.promotion"
# Seconds between an alias's move and the check that no other machine has moved it meanwhile.
SETTLE_SECONDS = 1.0


class VersionScore(NamedTuple):
    """The score at the end of training by which versions are compared."""

    tag: str
    value: float

    @classmethod
    def of(cls, top1: float | None, mean_precision: float | None) -> "VersionScore | None":
        """Return the score of a run, which has one of the two; None without labels."""
        if mean_precision is not None:
            return cls("val/map", mean_precision)
        return None if top1 is None else cls("val/top1", top1)


def register_model(
    client: "MlflowClient", model_uri: str, name: str, score: VersionScore | None, scored_on: str | None
) -> "ModelVersion":
    """Register a logged model as the next version of `name`, and return the version.

    Its description has the network, its score and the base of a delta. Repeated calls register a model once.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        versions = client.search_model_versions(f"name = '{name}'")
    except MlflowException:
        versions = []
    registered = next((version for version in versions if version.tags.get("vitray.model") == model_uri), None)
    model = client.get_logged_model(model_uri.removeprefix("models:/"))
    base = {key: model.tags[key] for key in (BASE_TAG, BASE_IDENTITY_TAG) if key in model.tags}
    scores = {} if score is None or scored_on is None else {score.tag: repr(score.value), SCORED_ON_TAG: scored_on}
    tags = {"vitray.model": model_uri} | base | scores
    version = registered or mlflow.register_model(model_uri, name, tags=tags)
    params = client.get_run(model.source_run_id).data.params if model.source_run_id else {}
    lines = []
    if network := params.get("model.name"):
        reached = f", {SCORE_TAGS[score.tag]} {score.value:.2%} at the end of training" if score else ""
        lines.append(f"`{network}` on `{params.get('plan.dataset', '')}`{reached}.")
    if base:
        link = _markdown_link(client, base[BASE_TAG])
        lines.append(f"A delta of {link} (identity {base[BASE_IDENTITY_TAG][:12]}), which is needed to load it.")
    if lines:
        client.update_model_version(name, version.version, "\n\n".join(lines))
    return version


def move_champion(client: "MlflowClient", version: "ModelVersion") -> str | None:
    """Give a version the alias `champion` if its top-1 or mAP is the best so far.

    A version without either never becomes champion, and a tie changes nothing. If the champion was not scored on the
    same images and classes, the alias stays, and a line says so, which also becomes a tag of the version.
    """
    tag = next((tag for tag in SCORE_TAGS if tag in version.tags), None)
    if tag is None:
        return None
    with _turn():  # two runs may end at once
        champion = _version_with(client, version.name, "champion")
        is_comparable = champion is None or (
            tag in champion.tags and champion.tags.get(SCORED_ON_TAG) == version.tags[SCORED_ON_TAG]
        )
        if champion is None or (is_comparable and float(version.tags[tag]) > float(champion.tags[tag])):
            client.set_registered_model_alias(version.name, "champion", version.version)
    if is_comparable:
        return None
    address = f"{version.name}/{version.version}"
    line = (
        f"version {version.version} of {version.name} does not become champion: version {_number(champion)}, which has"
        f" the alias, was not scored on the same images and classes; `vitray promote {shlex.quote(address)}` compares"
        " the two on one dataset, and `vitray ui` sets an alias by hand"
    )
    client.set_model_version_tag(version.name, version.version, PROMOTION_TAG, line)
    return line


# ---- promotion -------------------------------------------------------------------------------------------------------


def holder_of(name: str, alias: str) -> str | None:
    """Return the number of the model's version that has the alias; None if none has."""
    with _registry(name) as client:
        return in_time(lambda: _number(_version_with(client, name, alias)))


def version_of_run(name: str, experiment: str, uid: str) -> str:
    """Return the number of the latest version of a model that a run has registered."""

    def versions_of(client: "MlflowClient") -> list[int]:
        entity = client.get_experiment_by_name(experiment)
        runs = client.search_runs([entity.experiment_id], f"tags.`{UID_TAG}` = '{uid}'") if entity else []
        ids = {run.info.run_id for run in runs}
        return [int(each.version) for each in client.search_model_versions(f"name = '{name}'") if each.run_id in ids]

    with _registry(name) as client:
        versions = in_time(lambda: versions_of(client))
    if not versions:
        raise ConfigError(f"{name}: MLflow at {redact_uri(tracking_uri())} has no version of this run yet")
    return str(max(versions))


def move_alias(name: str, alias: str, version: str, holder: str | None) -> bool:
    """Move the alias to a version if `holder` (None: no version) still has it; return whether the version keeps it.

    MLflow has no compare-and-swap. The processes of a user on a machine take turns. A process on another machine may
    have read the alias before this move. It then moves the alias within SETTLE_SECONDS, and the later move counts.
    """
    with _registry(name) as client:
        with _turn():
            if in_time(lambda: _number(_version_with(client, name, alias))) != holder:
                return False
            in_time(lambda: client.set_registered_model_alias(name, alias, version))
        time.sleep(SETTLE_SECONDS)
        return in_time(lambda: _number(_version_with(client, name, alias))) == version


def tag_promotion(name: str, version: str, text: str) -> None:
    """Write the result of a comparison to a version."""
    with _registry(name) as client:
        in_time(lambda: client.set_model_version_tag(name, version, PROMOTION_TAG, text))


@contextmanager
def _registry(name: str) -> "Iterator[MlflowClient]":
    """Yield a client of a store that exists; turn MLflow's errors into one message."""
    store = tracking_uri()
    file = database_file(store)
    if file and not file.exists():  # a client would create it
        raise ConfigError(f"{name}: no {file}; expected the folder that training ran in, or MLFLOW_TRACKING_URI")
    import_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        yield open_client(store)
    except (MlflowException, OSError) as error:
        raise ConfigError(f"{name}: MLflow at {redact_uri(store)} does not answer: {one_line(error)[:300]}") from None


@contextmanager
def _turn() -> Iterator[None]:
    """Wait until no other process of this user on this machine is inside such a block."""
    user_dir().mkdir(parents=True, exist_ok=True)
    with (user_dir() / "promotion.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


def _version_with(client: "MlflowClient", name: str, alias: str) -> "ModelVersion | None":
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
        return None


def _number(version: "ModelVersion | None") -> str | None:
    return version and str(version.version)


# ---- descriptions ----------------------------------------------------------------------------------------------------


def _markdown_link(client: "MlflowClient", url: str) -> str:
    """Return an address as Markdown, linked to the page of its registered model or run if this server has one."""
    kind, _, rest = url.partition(":/")
    name, _, version = rest.strip("/").partition("/")
    if kind == "models":
        page = f"#/models/{name.partition('@')[0]}{f'/versions/{version}' if version else ''}"
        return f"[{url}]({page})"
    run_dir = url.rstrip("/").removesuffix("/model")
    if '"' not in run_dir:  # MLflow's filters cannot escape a quote
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        for run in client.search_runs(experiments, f'tags.`vitray.home` = "{run_dir}"', max_results=1):
            return f"[{url}](#/experiments/{run.info.experiment_id}/runs/{run.info.run_id})"
    return f"[{url}]({url})" if kind.startswith("http") else f"`{url}`"
