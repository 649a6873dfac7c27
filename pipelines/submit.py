"""vitray submit VERB ...: run a verb as a job of the cluster at RAY_ADDRESS, with the files of this folder."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pipelines.__main__ import FILES, check_remote, run_verb
from vitray.cluster import job_package, jobs
from vitray.errors import ConfigError
from vitray.system.host_facts import commit_variables


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray submit",
        description="Sends this folder's tracked files, plus untracked files that git does not ignore, and runs"
        " `python -m pipelines.VERB ARGS` there, with the cluster's packages. Addresses of stores in the environment"
        " are sent; secrets are not: the nodes have their own.",
        epilog="example: vitray submit --follow train demo data.url=s3://b/demo compute.device=gpu --out s3://b/runs",
    )
    parser.add_argument("verb", metavar="VERB", help="train, sweep, shard, ...; options of submit go before it")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the verb: vitray VERB -h")
    parser.add_argument("--follow", action="store_true", help="print the job's log, and exit with its status")
    parser.add_argument("--dry-run", action="store_true", help="print the command, size and environment, and stop")
    parser.add_argument("--json", action="store_true", help="the result as JSON: id, command, files, bytes, status")
    options = parser.parse_args(words)
    check_remote(options.verb)
    if "--follow" in options.args:
        raise ConfigError(f"--follow: expected before {options.verb}, as in vitray submit --follow {options.verb} ...")
    files = job_package.list_files(Path.cwd())
    command = job_package.command_line(FILES.get(options.verb) or options.verb, options.args, files)
    variables, messages = job_package.job_environment()
    variables |= commit_variables()
    messages += job_package.check_tracking(options.verb, variables)
    job_package.check_size(files)
    if files.skipped:
        messages.append(f"not sent, no plain files: {', '.join(files.skipped)}")
    if files.secrets:
        messages.append(f"not sent, as untracked secrets: {', '.join(files.secrets)}")
    names = ", ".join(sorted(variables)) or "none"
    messages.append(f"{len(files.sizes)} files, {files.total / job_package.MEGABYTE:.1f} MB; environment: {names}")
    print("\n".join(f"vitray: {line}" for line in messages), file=sys.stderr)
    result = {"command": command, "files": len(files.sizes), "bytes": files.total, "environment": sorted(variables)}
    if options.dry_run:
        return result
    client = jobs.connect()
    job_id = jobs.submit(client, command, files, variables)
    commands = f"its log: vitray jobs {job_id} --follow; to end it: vitray stop {job_id}"
    print(f"{job_id} is submitted; {commands}", file=sys.stderr, flush=True)
    if options.follow:
        result |= jobs.follow(client, job_id)._asdict()
    return {"id": job_id} | result


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
