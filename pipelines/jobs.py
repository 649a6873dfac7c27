"""vitray jobs [JOB]: list the jobs of the cluster at RAY_ADDRESS, or print the log of one."""

import argparse
import time
from typing import Any

from pipelines.__main__ import run_verb
from vitray.cluster import jobs


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray jobs",
        description="Lists the jobs of the cluster whose dashboard is at RAY_ADDRESS, the latest first; with a job's"
        " id, prints its log.",
        epilog="example: RAY_ADDRESS=http://127.0.0.1:8265 vitray jobs train-20261121-120000-1a2b --follow",
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="its id, as `vitray submit` printed it")
    parser.add_argument("--follow", action="store_true", help="print until the job ends, and exit with its status")
    parser.add_argument("--json", action="store_true", help="the result as JSON: jobs (id, status, command, ...)")
    args = parser.parse_args(words)
    if args.follow and not args.job:
        parser.error("--follow: expected the id of a job too")
    client = jobs.connect()
    if args.follow:
        return {"jobs": [jobs.follow(client, args.job)._asdict()]}
    if args.job:
        job = jobs.find_job(client, args.job)
        print(client.get_job_logs(job.id), end="")
        return {"jobs": [job._asdict()]}
    listed = jobs.list_jobs(client)
    for job in listed:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began)) if job.began else "-"
        duration = f"{job.seconds:,.0f} s" if job.seconds is not None else "-"
        print(f"{job.id:<32} {job.status:<10} {began:<19} {duration:>9}  {job.command}")
    if not listed:
        print(f"{jobs.dashboard_address()}: no jobs")
    return {"jobs": [job._asdict() for job in listed]}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
