"""A client of the cluster's dashboard, which takes, lists, follows and stops jobs."""

import asyncio
import logging
import os
import secrets
import sys
import time
import urllib.parse
from typing import TYPE_CHECKING, NamedTuple

from vitray.cluster import session
from vitray.cluster.job_package import PackageFiles, write_package
from vitray.errors import ConfigError, RunError, nearest, one_line, redact
from vitray.system.storage import scratch_folder

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# Seconds between SIGTERM and SIGKILL for a job that is stopped; Ray's 3 are too few for a slow tracking server.
STOP_GRACE = 30
# Seconds to wait for the agent that starts jobs: in a new cluster the dashboard answers before it.
AGENT_TIMEOUT = 60
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
# Parts of the dashboard's answers, which Ray's client raises as a RuntimeError.
NO_AGENT = "No available agent"
NO_TOKEN = ("Authentication required", "no authentication token")
WRONG_TOKEN = "Authentication failed"  # noqa: S105
QUIET_LOGGERS = {"ray.dashboard.modules.dashboard_sdk": logging.WARNING}  # a line per upload


class ClusterJob(NamedTuple):
    """A job as listed, without its environment."""

    id: str
    status: str
    command: str
    began: float | None
    """In seconds since 1970."""
    seconds: float | None
    code: int | None
    """The exit status of its command."""


def dashboard_address() -> str:
    """Return the address of the dashboard that takes jobs, from the environment."""
    name = "RAY_API_SERVER_ADDRESS" if os.environ.get("RAY_API_SERVER_ADDRESS") else "RAY_ADDRESS"
    address = os.environ.get(name, "")
    wanted = "expected the cluster's dashboard, as in http://127.0.0.1:8265 at the end of a tunnel (`make tunnel`)"
    if not address:
        raise ConfigError(f"RAY_ADDRESS: not set; {wanted}")
    if redact(address) != address:
        raise ConfigError(f"{name}: has a password in it; {wanted}")
    if urllib.parse.urlsplit(address).scheme not in ("http", "https"):
        raise ConfigError(f"{name}: got {address}; {wanted}")
    return address.rstrip("/")


def connect() -> "JobSubmissionClient":
    """Return a client of the cluster at RAY_ADDRESS; raise a ConfigError if it is away or refuses the token."""
    address = dashboard_address()
    session.check_reachable(address, "`make tunnel` if it is on another network")
    session.send_token()  # first: for a local Ray, prepare_environment disables tokens
    session.prepare_environment()
    from ray.job_submission import JobSubmissionClient

    for name, level in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    try:
        return JobSubmissionClient(address)
    except Exception as error:
        raise ConfigError(f"RAY_ADDRESS: {address}: {_explain_refusal(error)}") from None


def _explain_refusal(error: Exception) -> str:
    text = one_line(error)
    if any(part in text for part in NO_TOKEN):
        return f"asks for a token, and none was sent; expected the cluster's in {session.CREDENTIAL_PLACES}"
    if WRONG_TOKEN in text:
        return f"refuses the token, which is not its own; expected the cluster's in {session.CREDENTIAL_PLACES}"
    return f"does not answer as a cluster's dashboard does ({text[:200]})"


def submit(client: "JobSubmissionClient", command: str, files: PackageFiles, variables: dict[str, str]) -> str:
    """Run `python -m pipelines.VERB ...` on the cluster, in a copy of the files; return the job's id."""
    verb = command.split()[2].removeprefix("pipelines.")
    job_id = f"{verb}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    with scratch_folder() as folder:
        package = folder / "package.zip"
        write_package(files, package)
        # A job installs no packages: the nodes have the project's, in the versions of constraints.txt.
        runtime = {"working_dir": str(package), "env_vars": variables | {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE)}}
        deadline = time.monotonic() + AGENT_TIMEOUT
        while True:
            try:
                return client.submit_job(entrypoint=command, runtime_env=runtime, submission_id=job_id)
            except RuntimeError as error:
                if NO_AGENT not in str(error):
                    raise RunError(f"{dashboard_address()}: refuses the job: {one_line(error)[:500]}") from None
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{dashboard_address()}: the head has no job agent; dashboard_agent.log on the head shows why."
                        " If another Ray has its port: ray start --dashboard-agent-listen-port=PORT"
                    ) from None
            time.sleep(1)


def list_jobs(client: "JobSubmissionClient") -> list[ClusterJob]:
    """Return the jobs that were submitted to a cluster, the latest first."""
    submitted = [details for details in client.list_jobs() if details.submission_id]
    jobs = []
    for details in sorted(submitted, key=lambda details: details.start_time or 0, reverse=True):
        began, ended = details.start_time, details.end_time
        job = ClusterJob(
            id=details.submission_id or "",
            status=details.status.value,
            command=details.entrypoint,
            began=began / 1000 if began else None,
            seconds=((ended or time.time() * 1000) - began) / 1000 if began else None,
            code=details.driver_exit_code,
        )
        jobs.append(job)
    return jobs


def find_job(client: "JobSubmissionClient", job_id: str) -> ClusterJob:
    """Return one job; raise a ConfigError with the nearest id if there is none."""
    jobs = {job.id: job for job in list_jobs(client)}
    if job_id not in jobs:
        raise ConfigError(
            f"{job_id}: no such job at {dashboard_address()}{nearest(job_id, jobs)}; `vitray jobs` lists them"
        )
    return jobs[job_id]


def stop(client: "JobSubmissionClient", *job_ids: str) -> list[ClusterJob]:
    """Stop jobs and wait until they have ended; their runs become KILLED in MLflow."""
    jobs = [find_job(client, job_id) for job_id in job_ids]
    for job in jobs:
        if job.status not in ENDED:
            client.stop_job(job.id)
    seconds = STOP_GRACE + 15
    deadline = time.monotonic() + seconds
    while running := [job.id for job in jobs if job.status not in ENDED]:
        if time.monotonic() > deadline:
            raise RunError(f"{', '.join(running)}: not ended within {seconds} s; a log: vitray jobs {running[0]}")
        time.sleep(0.5)
        jobs = [job for job in list_jobs(client) if job.id in job_ids]
    return jobs


def follow(client: "JobSubmissionClient", job_id: str) -> ClusterJob:
    """Print a job's output until it succeeds; if it fails, exit this process with the job's exit status."""
    find_job(client, job_id)
    try:
        job = asyncio.run(_print_until_end(client, job_id))
    except KeyboardInterrupt:
        print(f"vitray: {job_id} continues; to end it: vitray stop {job_id}", file=sys.stderr)
        raise
    if status := exit_status(job):
        print(f"vitray: {job_id}: {job.status}, exit status {status}", file=sys.stderr)
        raise SystemExit(status)
    return job


async def _print_until_end(client: "JobSubmissionClient", job_id: str) -> ClusterJob:
    """Print a job's output until it ends, and reconnect when the connection breaks."""
    printed = failures = 0
    while True:
        before, position = printed, 0  # each connection sends the log from its beginning
        try:
            async for text in client.tail_job_logs(job_id):
                print(text[max(0, printed - position) :], end="", flush=True)
                position += len(text)
                printed = max(printed, position)
            if (job := find_job(client, job_id)).status in ENDED:
                return job
        except ConfigError:
            raise
        except Exception as error:
            failures = 0 if printed > before else failures + 1
            if failures == 60:
                raise RunError(
                    f"{dashboard_address()}: no answer for minutes ({one_line(error)[:200]}); the job may still run:"
                    " vitray jobs"
                ) from None
        await asyncio.sleep(2)


def exit_status(job: ClusterJob) -> int:
    """Return the exit status for a command that waited for the job: the job's own, or that of a shell for a signal."""
    match job.status, job.code:
        case "SUCCEEDED", _:
            return 0
        case "STOPPED", _:
            return 143
        case _, int(code) if code:
            return code if code > 0 else 128 - code
    return 1
