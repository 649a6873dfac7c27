"""The command line and the environment of a job, checked before anything is sent."""

import os
import shlex
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from vitray import storage
from vitray.cluster.package_files import PackageFiles
from vitray.errors import ConfigError, redact

# The variables that a job inherits: addresses of stores and the options of their clients. Everyone who may list the
# cluster's jobs can read the values, so no variable here holds a secret.
SENT_VARIABLES = (
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_REQUEST_CHECKSUM_CALCULATION",
    "AWS_RESPONSE_CHECKSUM_VALIDATION",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
    "MLFLOW_HTTP_REQUEST_TIMEOUT",
    "MLFLOW_S3_ENDPOINT_URL",
    "MLFLOW_TRACKING_URI",
)
# Secrets that a user might expect to be sent. Nodes have their own: a role, or files that only their user can read.
SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
)
# The default of --out for each verb that has one.
DEFAULT_OUTPUTS = {"train": "runs", "sweep": "sweeps", "bench": "bench_out"}


def job_environment() -> tuple[dict[str, str], list[str]]:
    """Return the variables to send, and a message for each kind that is not sent."""
    variables = {name: os.environ[name] for name in SENT_VARIABLES if os.environ.get(name)}
    if with_password := [name for name, value in variables.items() if redact(value) != value]:
        raise ConfigError(
            f"{with_password[0]}: has a password in it, which everyone who may list jobs could read; wanted the address"
            " alone: the nodes have their own credentials"
        )
    local = [name for name, value in variables.items() if _is_local_address(name, value)]
    messages = [f"{name}: an address of this machine, not sent; the job uses the cluster's own" for name in local]
    if secrets := [name for name in SECRET_VARIABLES if os.environ.get(name)]:
        messages.append(f"not sent, since job listings show it: {', '.join(secrets)}; the nodes have their own")
    return {name: value for name, value in variables.items() if name not in local}, messages


def _is_local_address(name: str, value: str) -> bool:
    """Whether an address is a file or a port of this machine, such as the near end of a tunnel."""
    if "URI" not in name and "URL" not in name:
        return False
    host = urllib.parse.urlsplit(value).hostname
    return host in (None, "localhost", "::1") or str(host).startswith("127.")


def command_line(verb: str, args: Sequence[str], files: PackageFiles) -> str:
    """Return the command of a job; raise a ConfigError for arguments that cannot work on a cluster."""
    if any(redact(arg) != arg for arg in args):
        raise ConfigError(f"{verb}: an argument has a password in it, which everyone who may list jobs could read")
    if verb in DEFAULT_OUTPUTS and not {"-h", "--help"} & set(args):
        out = _option_value("--out", args) or DEFAULT_OUTPUTS[verb]
        if not storage.is_remote(out) and not Path(out).is_absolute():
            raise ConfigError(
                f"--out: got {out}, in the job's own folder, which is removed after it; wanted --out"
                f" s3://bucket/{DEFAULT_OUTPUTS[verb]}, or an absolute path that all nodes share"
            )
    for arg in args:
        setting, _, url = arg.partition("=")
        if setting == "data.url" and url != "null" and "://" not in url and not Path(url).is_absolute():
            folder = f"{os.path.normpath(url)}/"
            if not any(name.startswith(folder) for name in files.sizes):
                raise ConfigError(f"{arg}: would not be sent, as git ignores it or it is missing; wanted data on s3://")
    return shlex.join(["python", "-m", f"pipelines.{verb}", *args, "--json"])


def _option_value(option: str, args: Sequence[str]) -> str | None:
    value = None
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        if arg == option:
            value = following
        elif arg.startswith(f"{option}="):
            value = arg.partition("=")[2]
    return value
