"""vitray jobs [JOB]: the jobs of the cluster at RAY_ADDRESS, or what one of them has printed."""

import argparse
import sys
import time
from typing import Any

from pipelines.__main__ import run_verb
from vitray.cluster import jobs


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray jobs",
        description="Lists the jobs that were sent to the cluster whose dashboard is at RAY_ADDRESS, the latest first;"
        " with a job's name, prints its log.",
        epilog="example: RAY_ADDRESS=http://127.0.0.1:8265 vitray jobs train-20261121-120000-1a2b --follow",
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="its name, as `vitray submit` said it")
    parser.add_argument("--follow", action="store_true", help="go on printing, and end as the job ends")
    parser.add_argument("--json", action="store_true", help="the result as JSON: jobs (id, status, command, ...)")
    args = parser.parse_args(words)
    if args.follow and not args.job:
        parser.error("--follow: wanted the name of a job too")
    client = jobs.connect()
    if args.follow:
        return {"jobs": [jobs.followed(client, args.job)._asdict()]}
    if args.job:
        print(jobs.log_of(client, args.job), end="")
        return {"jobs": [jobs.find_job(client, args.job)._asdict()]}
    found = jobs.list_jobs(client)
    for job in found:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began)) if job.began else "-"
        took = f"{job.seconds:,.0f} s" if job.seconds is not None else "-"
        print(f"{job.id:<32} {job.status:<10} {began:<19} {took:>9}  {job.command}")
    if not found:
        print(f"{jobs.address()}: no jobs")
    return {"jobs": [job._asdict() for job in found]}


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
