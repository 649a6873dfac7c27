"""MLflow's model registry: versions, the `champion` alias, and the link from a delta to its base."""

from typing import TYPE_CHECKING

from vitray.tracking.model_uri import NOT_FOUND

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Tags of a logged delta and of its registered version: the address and the hash of its base network.
BASE_TAG, BASE_IDENTITY_TAG = "vitray.base", "vitray.base_identity"


def register_model(client: "MlflowClient", model_uri: str, name: str, top1: float | None) -> None:
    """Register a logged model as the next version of `name`; the best val/top1 so far gets the alias `champion`.

    A version without val/top1 never becomes champion, and a tie changes nothing. The description of a delta names its
    base. Repeated calls register a model once.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        versions = client.search_model_versions(f"name = '{name}'")
    except MlflowException:
        versions = []
    registered = next((version for version in versions if version.tags.get("vitray.model") == model_uri), None)
    model_tags = client.get_logged_model(model_uri.removeprefix("models:/")).tags
    base = {key: model_tags[key] for key in (BASE_TAG, BASE_IDENTITY_TAG) if key in model_tags}
    tags = {"vitray.model": model_uri} | base | ({} if top1 is None else {"val/top1": repr(top1)})
    version = registered or mlflow.register_model(model_uri, name, tags=tags)
    if base:
        link = _markdown_link(client, base[BASE_TAG])
        description = f"A delta of {link} (identity {base[BASE_IDENTITY_TAG][:12]}), which is needed to load it."
        client.update_model_version(name, version.version, description)
    if top1 is None:
        return
    try:
        champion = client.get_model_version_by_alias(name, "champion")
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
        champion = None
    if champion is None or top1 > float(champion.tags.get("val/top1", "-inf")):
        client.set_registered_model_alias(name, "champion", version.version)


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
