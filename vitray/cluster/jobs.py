"""Jobs: a folder and one verb sent to the head of a cluster, which are listed, followed and stopped from anywhere."""

import asyncio
import logging
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitray import storage
from vitray.cluster import session
from vitray.errors import ConfigError, RunError, nearest, one_line, redact

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

# What a job hears of the environment that it is sent from: where stores are and how they want to be spoken to. Whoever
# may list the cluster's jobs reads these values, so that no name of a secret can be among them.
SENT = (
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
# Secrets that somebody might expect to be sent. The nodes have their own: a role, or files that only their user reads.
KEPT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
)
# Seconds that a job has between the wish to stop it and its death; Ray's own 3 are few for a slow tracking server.
GRACE = 30
# Seconds in which a cluster that has only just started may say that it cannot start jobs: its dashboard answers first.
PATIENCE = 60

# Where the verbs put what they make, unless they are told.
OUTPUTS = {"train": "runs", "sweep": "sweeps", "bench": "bench_out"}
# Folders that are never sent where git does not say what is.
LEFT = {".git", ".venv", "venv", "__pycache__", "node_modules"}
MEGABYTE = 1e6


class Files(NamedTuple):
    """What is sent: a folder's files by their names in it, and their sizes."""

    folder: Path
    sizes: dict[str, int]
    left: list[str]
    """Links to folders, submodules, sockets: what cannot be sent as a file."""

    @property
    def total(self) -> int:
        """Bytes of the package, which holds every file as it is, and its name twice."""
        return sum(size + 2 * len(name.encode()) + 150 for name, size in self.sizes.items())


class Job(NamedTuple):
    """A job as it is listed; without its environment."""

    id: str
    status: str
    command: str
    began: float | None
    """In seconds since 1970."""
    seconds: float | None
    code: int | None
    """The exit status of its command."""


# ---- what is sent ----------------------------------------------------------------------------------------------------


def list_files(folder: Path) -> Files:
    """The files of a folder that git has or would take; of one that git does not know, all but environments."""
    names = _git_files(folder)
    if names is None:
        walked = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
        names = [str(path) for path in walked if not LEFT & set(path.parts)]
    sizes: dict[str, int] = {}
    left: list[str] = []
    for name in sorted(set(names)):
        path = folder / name
        if path.is_file():
            sizes[name] = path.stat().st_size
        elif path.exists():  # what git still has and the folder no longer is not worth a word
            left.append(name)
    return Files(folder, sizes, left)


def _git_files(folder: Path) -> list[str] | None:
    """Tracked files and those that git does not ignore, less what .rayignore names; None where git has no word."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others"]
    try:
        done = subprocess.run([*command, "--exclude-standard"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if done.returncode:
        if "not a git repository" in done.stderr:
            return None
        raise ConfigError(f"{folder}: git cannot list it: {' '.join(done.stderr.split())[:300]}")
    names = [name for name in done.stdout.split("\0") if name]
    if not (folder / ".rayignore").is_file():
        return names
    # As Ray does: for what git has to keep, and a cluster need not see.
    named = subprocess.run([*command, "--ignored", "--exclude-from=.rayignore"], capture_output=True, text=True)
    return [name for name in names if name not in set(named.stdout.split("\0"))]


def check_size(files: Files) -> None:
    """Refuse, before anything is sent, what the cluster would not take."""
    _prepare()
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE  # what a dashboard reads of one upload

    if files.total < DASHBOARD_CLIENT_MAX_SIZE:
        return
    sums: Counter[str] = Counter()
    for name, size in files.sizes.items():
        top, slash, _ = name.partition("/")
        sums[top + slash] += size
    largest = ", ".join(f"{name} ({size / MEGABYTE:,.1f} MB)" for name, size in sums.most_common(5))
    raise ConfigError(
        f"{files.folder}: {files.total / MEGABYTE:,.1f} MB in {len(files.sizes)} files, and a cluster takes"
        f" {DASHBOARD_CLIENT_MAX_SIZE / MEGABYTE:,.0f} MB; the largest: {largest}; wanted data on s3://, and what a job"
        " does not need in .gitignore, or in .rayignore where git has it"
    )


def pack(files: Files, target: Path) -> None:
    """Write the package: the same files give the same bytes, which a cluster that has them is not sent again."""
    with zipfile.ZipFile(target, "w") as package:
        for name in files.sizes:
            path = files.folder / name
            entry = zipfile.ZipInfo(name)  # of 1980: when a file was written says nothing
            entry.external_attr = (path.stat().st_mode & 0o777 | 0o100000) << 16
            package.writestr(entry, path.read_bytes())


def environment() -> tuple[dict[str, str], list[str]]:
    """What a job's environment is given, and what is worth saying about the rest."""
    found = {name: os.environ[name] for name in SENT if os.environ.get(name)}
    if hidden := [name for name, value in found.items() if redact(value) != value]:
        raise ConfigError(
            f"{hidden[0]}: has a password in it, which everybody could read who may list jobs; wanted the address"
            " alone: the nodes have their own credentials"
        )
    here = [name for name, value in found.items() if _is_of_this_machine(name, value)]
    said = [f"{name} names something of this machine alone: not sent, the cluster's own counts" for name in here]
    if kept := [name for name in KEPT if os.environ.get(name)]:
        said.append(f"not sent, since whoever lists jobs would read it: {', '.join(kept)}; the nodes have their own")
    return {name: value for name, value in found.items() if name not in here}, said


def _is_of_this_machine(name: str, value: str) -> bool:
    """Whether an address means this machine, as the near end of a tunnel does, or a file of it."""
    if "URI" not in name and "URL" not in name:
        return False
    host = urllib.parse.urlsplit(value).hostname
    return host in (None, "localhost", "::1") or str(host).startswith("127.")


def command_of(verb: str, words: Sequence[str], files: Files) -> str:
    """The command of a job, which everybody reads who may list jobs; words that cannot work there are refused here."""
    for word in words:
        if redact(word) != word:
            raise ConfigError(f"{verb}: a word has a password in it, which everybody could read who may list jobs")
    if verb in OUTPUTS and not {"-h", "--help"} & set(words):
        out = _option("--out", words) or OUTPUTS[verb]
        if not storage.is_remote(out) and not Path(out).is_absolute():
            raise ConfigError(
                f"--out: got {out}, a folder of the job's own, which is removed after it; wanted --out"
                f" s3://bucket/{OUTPUTS[verb]}, or an absolute path that all nodes share"
            )
    for word in words:
        setting, _, url = word.partition("=")
        if setting == "data.url" and url != "null" and "://" not in url and not Path(url).is_absolute():
            folder = f"{os.path.normpath(url)}/"
            if not any(name.startswith(folder) for name in files.sizes):
                raise ConfigError(f"{word}: stays here, as git ignores it or it is not there; wanted data on s3://")
    return shlex.join(["python", "-m", f"pipelines.{verb}", *words, "--json"])


def _option(name: str, words: Sequence[str]) -> str | None:
    found = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            found = after
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


# ---- the cluster -----------------------------------------------------------------------------------------------------


def address() -> str:
    """The dashboard that takes jobs."""
    name = "RAY_API_SERVER_ADDRESS" if os.environ.get("RAY_API_SERVER_ADDRESS") else "RAY_ADDRESS"
    found = os.environ.get(name, "")
    wanted = "wanted the cluster's dashboard, as in http://127.0.0.1:8265 at the end of a tunnel (`make tunnel`)"
    if not found:
        raise ConfigError(f"RAY_ADDRESS: not set; {wanted}")
    if redact(found) != found:
        raise ConfigError(f"{name}: has a password in it; {wanted}")
    if urllib.parse.urlsplit(found).scheme not in ("http", "https"):
        raise ConfigError(f"{name}: got {found}; {wanted}")
    return found.rstrip("/")


def connect() -> "JobSubmissionClient":
    """A client of the cluster at RAY_ADDRESS, or one message: not there, not a cluster, not let in."""
    where = address()
    parts = urllib.parse.urlsplit(where)
    try:  # the client would wait for minutes
        socket.create_connection(
            (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), 5
        ).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"RAY_ADDRESS: {where}: cannot be reached ({error}); wanted a running cluster, and a tunnel to it where it"
            " is elsewhere (`make tunnel`)"
        ) from None
    _prepare()
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)  # it tells of each upload
    try:
        return JobSubmissionClient(where)
    except Exception as error:
        raise ConfigError(f"RAY_ADDRESS: {where}: {_refused(error)}") from None


def _prepare() -> None:
    """Set what Ray reads as it is imported, and never again: it sends a token only where it is told to."""
    session.prepare_environment()
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if "RAY_AUTH_MODE" not in os.environ and (named or (Path.home() / ".ray" / "auth_token").exists()):
        os.environ["RAY_AUTH_MODE"] = "token"


def _refused(error: Exception) -> str:
    said = one_line(error)
    places = "RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN or ~/.ray/auth_token, and RAY_AUTH_MODE=token"
    if "Authentication required" in said or "no authentication token" in said:
        return f"asks for a token, and none was sent; wanted the cluster's in {places}"
    if "Authentication failed" in said:
        return f"refuses the token, which is not its own; wanted the cluster's in {places}"
    return f"does not answer as a cluster's dashboard does ({said[:200]})"


def submit(client: "JobSubmissionClient", verb: str, command: str, files: Files, sent: dict[str, str]) -> str:
    """Send a folder and a command that runs in a copy of it; the job's name."""
    name = f"{verb}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    with tempfile.TemporaryDirectory(prefix="vitray-") as aside:
        package = Path(aside) / "package.zip"
        pack(files, package)
        # No packages are installed for a job: the nodes have the project's, in the versions of constraints.txt.
        runtime = {"working_dir": str(package), "env_vars": sent | {"RAY_JOB_STOP_WAIT_TIME_S": str(GRACE)}}
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return client.submit_job(entrypoint=command, runtime_env=dict(runtime), submission_id=name)
            except RuntimeError as error:
                if "No available agent" not in str(error):
                    raise RunError(f"{address()}: does not take the job: {one_line(error)[:500]}") from None
                if time.monotonic() > until:
                    raise RunError(
                        f"{address()}: its head starts no jobs; the file dashboard_agent.log there says why: often"
                        " another Ray of that machine has its port, --dashboard-agent-listen-port of `ray start`"
                    ) from None
            time.sleep(1)


def list_jobs(client: "JobSubmissionClient") -> list[Job]:
    """The jobs that were sent to a cluster, the latest first."""
    found = [_job(each) for each in client.list_jobs() if each.submission_id]
    return sorted(found, key=lambda job: job.began or 0, reverse=True)


def find_job(client: "JobSubmissionClient", name: str) -> Job:
    """A job by its name."""
    known = {job.id: job for job in list_jobs(client)}
    if name not in known:
        raise ConfigError(f"{name}: no such job at {address()}{nearest(name, known)}; `vitray jobs` lists them")
    return known[name]


def _job(details: "JobDetails") -> Job:
    began, ended = details.start_time, details.end_time
    return Job(
        id=details.submission_id or "",
        status=str(details.status.value),
        command=details.entrypoint,
        began=began / 1000 if began else None,
        seconds=((ended or time.time() * 1000) - began) / 1000 if began else None,
        code=details.driver_exit_code,
    )


def is_over(job: Job) -> bool:
    """Whether a job has ended."""
    return job.status in ("SUCCEEDED", "FAILED", "STOPPED")


def stop(client: "JobSubmissionClient", name: str) -> Job:
    """Ask a job to end, and wait until it has: its run is then KILLED in MLflow."""
    job = find_job(client, name)
    if is_over(job):
        return job
    client.stop_job(name)
    for _ in range(2 * (GRACE + 15)):
        if is_over(job := find_job(client, name)):
            return job
        time.sleep(0.5)
    raise RunError(f"{name}: has not ended within {GRACE + 15} seconds; its logs: vitray jobs {name}")


def follow(client: "JobSubmissionClient", name: str) -> Job:
    """Print what a job prints until it ends, through broken connections too; how it ended."""
    told = 0

    async def print_more() -> None:
        nonlocal told
        position = 0  # a log is told from its beginning each time
        async for text in client.tail_job_logs(name):
            print(text[max(0, told - position) :], end="", flush=True)
            position += len(text)
            told = max(told, position)

    failures = 0
    while True:
        before = told
        try:
            asyncio.run(print_more())
            if is_over(job := find_job(client, name)):
                return job
        except ConfigError:
            raise
        except Exception as error:
            failures = 0 if told > before else failures + 1
            if failures == 60:
                said = one_line(error)[:200]
                raise RunError(f"{address()}: no answer for minutes ({said}); the job may go on: vitray jobs") from None
        time.sleep(2)


def followed(client: "JobSubmissionClient", name: str) -> Job:
    """A job that was followed to its good end; any other end is this process's too, with the job's exit status."""
    find_job(client, name)
    try:
        job = follow(client, name)
    except KeyboardInterrupt:
        print(f"vitray: {name} goes on; to end it: vitray stop {name}", file=sys.stderr)
        raise
    if status := exit_status(job):
        print(f"vitray: {name}: {job.status}, exit status {status}", file=sys.stderr)
        raise SystemExit(status)
    return job


def log_of(client: "JobSubmissionClient", name: str) -> str:
    """What a job has printed by now."""
    return client.get_job_logs(find_job(client, name).id)


def exit_status(job: Job) -> int:
    """The exit status of a command that waited for the job: the job's own, or what a shell would say of it."""
    match job.status, job.code:
        case "SUCCEEDED", _:
            return 0
        case "STOPPED", _:
            return 143
        case _, int(code) if code:
            return code if code > 0 else 128 - code
    return 1
