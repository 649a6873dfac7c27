"""vitray stop JOB: end a job, or all jobs, of the cluster at RAY_ADDRESS."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray.cluster import jobs


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray stop",
        description="Ends a job: its run becomes KILLED in MLflow, and resumes from its last checkpoint when you submit"
        " a job with the same --name.",
        epilog="example: vitray stop train-20261121-120000-1a2b",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("job", metavar="JOB", nargs="?", help="its id, as `vitray jobs` lists it")
    which.add_argument("--all", action="store_true", help="every job of the cluster, as before its end")
    parser.add_argument("--json", action="store_true", help="the result as JSON: id, status, command, ...")
    args = parser.parse_args(words)
    client = jobs.connect()
    running = [job.id for job in jobs.list_jobs(client) if job.status not in jobs.ENDED] if args.all else [args.job]
    stopped = jobs.stop(client, *running)
    print("\n".join(f"{job.id}: {job.status}" for job in stopped) or "no job is running")
    return {"jobs": [job._asdict() for job in stopped]} if args.all else stopped[0]._asdict()


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
