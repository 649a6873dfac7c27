"""vitray submit VERB ...: send this folder and a verb to the cluster at RAY_ADDRESS, where it runs as a job."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pipelines.__main__ import VERBS, run_verb
from vitray.cluster import jobs
from vitray.errors import ConfigError, nearest

HERE = {"submit", "jobs", "stop", "ui"}  # verbs of the machine that one sits at


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray submit",
        description="Sends the files of this folder that git has or would take, without .git and what it ignores, and"
        " runs `python -m pipelines.VERB WORDS` there. Packages are the cluster's. Addresses of stores in the"
        " environment are sent, secrets are not: the nodes have their own.",
        epilog="example: vitray submit --follow train demo data.url=s3://b/demo compute.device=gpu --out s3://b/runs",
    )
    parser.add_argument("verb", metavar="VERB", help="train, sweep, shard, ... with its words; ours go before it")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="WORDS", help="as `vitray VERB -h` says")
    parser.add_argument("--follow", action="store_true", help="print its log, and end as it ends")
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent, and stop")
    parser.add_argument("--json", action="store_true", help="the result as JSON: id, command, files, bytes, status")
    args = parser.parse_args(words)
    if args.verb not in VERBS or args.verb in HERE:
        known = [verb for verb in VERBS if verb not in HERE]
        raise ConfigError(f"got {args.verb!r}, wanted one of {', '.join(known)}{nearest(args.verb, known)}")
    if "--follow" in args.words:
        raise ConfigError(f"--follow: wanted before {args.verb}, as in vitray submit --follow {args.verb} ...")
    files = jobs.list_files(Path.cwd())
    command = jobs.command_of(args.verb, args.words, files)
    sent, said = jobs.environment()
    said += [f"left out, no plain files: {', '.join(files.left)}"] if files.left else []
    jobs.check_size(files)
    told = {"command": command, "files": len(files.sizes), "bytes": files.total, "environment": sorted(sent)}
    said.append(
        f"{len(files.sizes)} files, {files.total / 1e6:.1f} MB; environment: {', '.join(sorted(sent)) or 'none'}"
    )
    print("\n".join(f"vitray: {line}" for line in said), file=sys.stderr)
    if args.dry_run:
        return told
    client = jobs.connect()
    name = jobs.submit(client, args.verb, command, files, sent)
    nexts = [f"vitray jobs {name} --follow", f"vitray stop {name}"]
    print(f"{name} is sent; its log: {nexts[0]}; its end: {nexts[1]}", file=sys.stderr, flush=True)
    if args.follow:
        told |= jobs.followed(client, name)._asdict()
    return {"id": name} | told


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
