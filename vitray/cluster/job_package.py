"""The package of a job: its files, command line and environment, checked before anything is sent."""

import argparse
import os
import shlex
import socket
import subprocess
import urllib.parse
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from vitray.errors import ConfigError, redact
from vitray.system import storage

# Folders that are never sent from a folder outside git.
EXCLUDED_FOLDERS = {".git", ".venv", "venv", "__pycache__", "node_modules"}
MEGABYTE = 1e6
# Bytes of the largest upload that Ray's dashboard accepts (DASHBOARD_CLIENT_MAX_SIZE).
UPLOAD_LIMIT = 100 * 1024**2
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
# Seconds to connect to a tracking server.
CONNECT_SECONDS = 5
# Verbs that need an MLflow, and one that logs to it if there is one.
TRACKED_VERBS, OPTIONALLY_TRACKED = {"train", "sweep", "promote"}, {"evaluate"}
# The default of --out for each verb that has one.
DEFAULT_OUTPUTS = {"train": "runs", "sweep": "sweeps", "evaluate": "evaluations", "promote": "evaluations"}
DEFAULT_OUTPUTS |= {"inspection": "inspect", "bench": "bench_out", "replay": "replays"}


# Names of files, and of folders above them, that hold secrets. A job has those that git tracks, public as they are.
SECRETS = (".env", ".env.*", "*.pem", "*.key", "id_rsa", "id_ed25519", ".netrc", ".aws", ".ssh", ".kube")


class PackageFiles(NamedTuple):
    """The files of a package: their sizes by their names relative to the folder."""

    folder: Path
    sizes: dict[str, int]
    skipped: list[str]
    """Links to folders, submodules and sockets, which a package cannot hold."""
    secrets: list[str]
    """Untracked files with names of secrets, which are not sent."""

    @property
    def total(self) -> int:
        """Size of the package in bytes: zip stores each file uncompressed, and its name twice."""
        return sum(size + 2 * len(name.encode()) + 150 for name, size in self.sizes.items())


def list_files(folder: Path) -> PackageFiles:
    """Return the files to send: tracked files, plus untracked files that git does not ignore."""
    # Ray's own listing reads .gitignore only: it would send files of .git/info/exclude and core.excludesFile.
    names, tracked = _git_files(folder), set[str]()
    if names is None:
        paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
        names = [str(path) for path in paths if not EXCLUDED_FOLDERS & set(path.parts)]
    else:
        tracked = set(_listed(folder, "--cached"))
    sizes: dict[str, int] = {}
    skipped: list[str] = []
    secrets = sorted(name for name in {*names} - tracked if _is_secret(name))
    for name in sorted({*names} - {*secrets}):
        path = folder / name
        if path.is_file():
            sizes[name] = path.stat().st_size
        elif path.exists():  # a tracked file that was deleted needs no mention
            skipped.append(name)
    return PackageFiles(folder, sizes, skipped, secrets)


def _is_secret(name: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in Path(name).parts for pattern in SECRETS)


def _listed(folder: Path, *options: str) -> list[str]:
    command = ["git", "-C", str(folder), "ls-files", "-z", *options]
    return subprocess.run(command, capture_output=True, text=True).stdout.split("\0")


def _git_files(folder: Path) -> list[str] | None:
    """Return the names that git lists, less those in .rayignore; None outside a repository or without git."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others"]
    english = os.environ | {"LC_ALL": "C"}  # one of git's messages is parsed below
    try:
        listing = subprocess.run([*command, "--exclude-standard"], capture_output=True, text=True, env=english)
    except FileNotFoundError:
        return None
    if listing.returncode:
        if "not a git repository" in listing.stderr:
            return None
        raise ConfigError(f"{folder}: git cannot list it: {' '.join(listing.stderr.split())[:300]}")
    ignored = {""}
    if (folder / ".rayignore").is_file():  # Ray's own file for tracked files that a job does not need
        command += ["--ignored", "--exclude-from=.rayignore"]
        ignored |= set(subprocess.run(command, capture_output=True, text=True).stdout.split("\0"))
    return [name for name in listing.stdout.split("\0") if name not in ignored]


def check_size(files: PackageFiles) -> None:
    """Raise a ConfigError if the package is larger than a cluster accepts."""
    if files.total < UPLOAD_LIMIT:
        return
    totals: Counter[str] = Counter()
    for name, size in files.sizes.items():
        top, slash, _ = name.partition("/")
        totals[top + slash] += size
    largest = ", ".join(f"{name} ({size / MEGABYTE:,.1f} MB)" for name, size in totals.most_common(5))
    raise ConfigError(
        f"{files.folder}: {files.total / MEGABYTE:,.1f} MB in {len(files.sizes)} files, and a cluster takes"
        f" {UPLOAD_LIMIT / MEGABYTE:,.0f} MB; the largest: {largest}; put data on s3://, and name files"
        " that a job does not need in .gitignore, or in .rayignore if git tracks them"
    )


def write_package(files: PackageFiles, target: Path) -> None:
    """Write the zip file; the same files give the same bytes, so a cluster that has them gets no second upload."""
    with zipfile.ZipFile(target, "w") as package:
        for name in files.sizes:
            path = files.folder / name
            entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            entry.date_time = (1980, 1, 1, 0, 0, 0)  # modification times would change the bytes
            package.writestr(entry, path.read_bytes())


def command_line(verb: str, args: Sequence[str], files: PackageFiles) -> str:
    """Return the command of a job; raise a ConfigError for arguments that cannot work on a cluster."""
    if any(redact(arg) != arg for arg in args):
        raise ConfigError(f"{verb}: an argument has a password in it, which everyone who may list jobs could read")
    if verb in DEFAULT_OUTPUTS and not {"-h", "--help"} & set(args):
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--out", nargs="?")
        out = parser.parse_known_args(args)[0].out or DEFAULT_OUTPUTS[verb]
        if not storage.is_remote(out) and not Path(out).is_absolute():
            raise ConfigError(
                f"--out: got {out}, in the job's own folder, which is removed after it; expected --out"
                f" s3://bucket/{DEFAULT_OUTPUTS[verb]}, or an absolute path that all nodes share"
            )
    for arg in args:
        setting, _, url = arg.partition("=")
        if setting == "data.url" and url != "null" and "://" not in url and not Path(url).is_absolute():
            folder = f"{os.path.normpath(url)}/"
            if not any(name.startswith(folder) for name in files.sizes):
                raise ConfigError(
                    f"{arg}: would not be sent, as git ignores it or it is missing; expected data on s3://"
                )
    return shlex.join(["python", "-m", f"pipelines.{verb}", *args, "--json"])


def job_environment() -> tuple[dict[str, str], list[str]]:
    """Return the variables to send, and a message for each kind that is not sent."""
    variables = {name: os.environ[name] for name in SENT_VARIABLES if os.environ.get(name)}
    if with_password := [name for name, value in variables.items() if redact(value) != value]:
        raise ConfigError(
            f"{with_password[0]}: has a password in it, which everyone who may list jobs could read; expected the"
            " address alone: the nodes have their own credentials"
        )
    local = [name for name, value in variables.items() if _is_local_address(name, value)]
    messages = [f"{name}: an address of this machine, not sent; the job uses the cluster's own" for name in local]
    if secrets := [name for name in SECRET_VARIABLES if os.environ.get(name)]:
        messages.append(f"not sent, since job listings show it: {', '.join(secrets)}; the nodes have their own")
    return {name: value for name, value in variables.items() if name not in local}, messages


def check_tracking(verb: str, variables: Mapping[str, str]) -> list[str]:
    """Return a message about the MLflow of a job; raise a ConfigError if nothing listens at an address that is sent.

    An address that this machine cannot reach may still be one of the nodes' own network.
    """
    address = variables.get("MLFLOW_TRACKING_URI")
    if verb not in TRACKED_VERBS | OPTIONALLY_TRACKED:
        return []
    if address is None:
        if verb in OPTIONALLY_TRACKED:
            return []
        return ["MLFLOW_TRACKING_URI: none is sent; the job uses the cluster's own, and ends if there is none"]
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https"):
        return []
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        raise ConfigError(f"MLFLOW_TRACKING_URI: {address}: nothing listens there; expected a running MLflow") from None
    except (OSError, ValueError) as error:
        return [f"MLFLOW_TRACKING_URI: {address}: not reached from here ({error}); the nodes may reach it"]
    return []


def _is_local_address(name: str, value: str) -> bool:
    """Whether an address is a file or a port of this machine, such as the near end of a tunnel."""
    if "URI" not in name and "URL" not in name:
        return False
    host = urllib.parse.urlsplit(value).hostname
    return host in (None, "localhost", "::1") or str(host).startswith("127.")
