"""vitray stop JOB: end a job of the cluster at RAY_ADDRESS."""

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
    parser.add_argument("job", metavar="JOB", help="its id, as `vitray jobs` lists it")
    parser.add_argument("--json", action="store_true", help="the result as JSON: id, status, command, ...")
    args = parser.parse_args(words)
    job = jobs.stop(jobs.connect(), args.job)
    print(f"{job.id}: {job.status}")
    return job._asdict()


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
