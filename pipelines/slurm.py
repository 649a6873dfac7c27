"""vitray slurm [--nodes N] [--gpus N] VERB ...: print or submit a batch script that runs a verb on a Slurm cluster."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pipelines.__main__ import check_remote, run_verb
from vitray.cluster import slurm
from vitray.errors import ConfigError
from vitray.system import storage


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray slurm",
        description="Prints a batch script that runs `vitray VERB ARGS` in this folder, which all nodes must see; on"
        " several nodes on a Ray of its own. Preempted, at its time limit or after a lost node the job queues again and"
        " goes on.",
        epilog="example: vitray slurm --nodes 4 --gpus 8 --time 1-00:00:00 --submit train a2_s16_imagenet --name s16",
    )
    parser.add_argument("verb", metavar="VERB", help="train, sweep, shard, ...; options of slurm go before it")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the verb: vitray VERB -h")
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default: %(default)s); several are used whole")
    text = "jobs of a node each, which share the trials of a sweep; Slurm starts each when a node is free"
    parser.add_argument("--array", type=int, help=text)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each node (default: %(default)s)")
    parser.add_argument("--cpus", type=int, help="CPUs of each node (default: all of several nodes, or Slurm's)")
    parser.add_argument("--time", help="time limit: 90 (minutes), 12:00:00, 3-12:00:00 (default: Slurm's)")
    text = "another option of sbatch, as in --sbatch=--partition=a100; may be repeated"
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=text)
    parser.add_argument("--submit", action="store_true", help="give the script to sbatch instead of printing it")
    parser.add_argument("--json", action="store_true", help="the result as JSON: name, script, and job if submitted")
    options = parser.parse_args(words)
    check_remote(options.verb)
    name, command = slurm.job_words([options.verb, *options.args])
    storage.check_name(name, "--name")
    if options.array is not None and (options.verb != "sweep" or options.nodes != 1):
        raise ConfigError("--array: expected verb sweep and --nodes 1, as each job trains one trial after another")
    command += ["--here"] * (options.array is not None and "--here" not in command)
    allocation = slurm.Allocation(
        options.nodes, options.gpus, options.cpus, options.time, options.sbatch, options.array
    )
    text = slurm.script(allocation, name, command, Path.cwd())
    result = {"name": name, "script": text}
    if not options.submit:
        print(text, end="")
        return result
    job = slurm.submit(text)
    log = f"{name}-{job}.log" if options.array is None else f"{name}-{job}_1.log to {name}-{job}_{options.array}.log"
    print(f"{job} is submitted; its output: {log}; to end it: scancel {job}", file=sys.stderr)
    return result | {"job": job}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
