"""A batch script that runs a verb on nodes of a Slurm cluster, and after an interruption goes on where it stopped."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitray.errors import ConfigError, RunError

# Seconds before the time limit at which a run is told to save and to end, which takes 20; Slurm may be a minute early.
NOTICE_SECONDS = 60
# Verbs that go on where they stopped, if their job queues again.
RESUMED = {"train", "sweep", "shard", "predict"}
NAMED = {"train", "sweep"}
# As sbatch reads it: minutes[:seconds], hours:minutes:seconds, or days-hours[:minutes[:seconds]].
TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d(:\d\d)?)?")


class Allocation(NamedTuple):
    """What a job asks Slurm for."""

    nodes: int = 1
    gpus: int = 0
    """Of each node."""
    cpus: int | None = None
    """Of each node; None: all of several nodes, and Slurm's default of one."""
    time: str | None = None
    options: Sequence[str] = ()
    """Further options of sbatch."""
    array: int | None = None
    """Jobs of the same script; None: one, and no array."""

    def check(self) -> None:
        """Raise a ConfigError for what Slurm would not take."""
        least_of = {"nodes": (self.nodes, 1), "gpus": (self.gpus, 0), "cpus": (self.cpus, 1), "array": (self.array, 1)}
        for name, (value, least) in least_of.items():
            if value is not None and value < least:
                raise ConfigError(f"--{name}: got {value}, expected at least {least}")
        if self.time is not None and not TIME.fullmatch(self.time):
            raise ConfigError(f"--time: got {self.time}, expected as in 90 (minutes), 12:00:00 or 3-12:00:00")
        for option in self.options:
            if not re.fullmatch(r"--?\w.*", option):
                raise ConfigError(f"--sbatch: got {option!r}, expected an option of sbatch, as in --sbatch=--qos=high")


def job_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of a job, and its command with that name, by which a job that queues again finds its results."""
    verb, *rest = words
    values = dict(zip(rest, [*rest[1:], ""], strict=True)) | dict(word.split("=", 1) for word in rest if "=" in word)
    subject = next((Path(word).stem for word in rest if not word.startswith("-") and "=" not in word), verb)
    name = values.get("--name") or values.get("--resume")
    if verb not in NAMED or name:
        return (name or f"{verb}-{subject}").replace("/", "-"), list(words)  # part of a file's name
    name = f"{subject}-{time.strftime('%Y%m%d-%H%M%S')}"
    return name, [*words, "--name", name]


def script(allocation: Allocation, name: str, words: Sequence[str], folder: Path) -> str:
    """Return the batch script of `vitray WORDS...`, run in a folder that all nodes see."""
    allocation.check()
    options = [f"--job-name={shlex.quote(name)}", f"--chdir={shlex.quote(str(folder))}"]
    if allocation.array:
        options += [f"--array=1-{allocation.array}", "--output=%x-%A_%a.log"]
    else:
        options.append("--output=%x-%j.log")
    options += [f"--nodes={allocation.nodes}", "--ntasks-per-node=1"]
    if allocation.gpus:
        options.append(f"--gpus-per-node={allocation.gpus}")
    if allocation.cpus:
        options.append(f"--cpus-per-task={allocation.cpus}")
    if allocation.nodes > 1:
        options += ["--exclusive", "--mem=0"]  # Ray has a node's ports, and all of its memory
    if allocation.time:
        options.append(f"--time={allocation.time}")
    if words[0] in RESUMED:
        options += ["--requeue", "--open-mode=append", f"--signal=USR1@{NOTICE_SECONDS}"]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*options, *allocation.options]), ""]
    if allocation.nodes > 1:
        lines += [
            "# Nobody else may use the job's Ray.",
            "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        ]
    # All CPUs of the task: a step does not inherit their number, and its one process starts many.
    cpus = f" --cpus-per-task={allocation.cpus}" if allocation.cpus else ""
    command = shlex.join([sys.executable, "-m", "vitray.cluster.slurm_node", *words])
    return "\n".join([*lines, f"exec srun{cpus} --cpu-bind=none {command}", ""])


def submit(text: str) -> str:
    """Give a script to Slurm, and return the job's id."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        wanted = "expected Slurm's commands on this machine; without --submit the script is printed, for another one"
        raise ConfigError(f"sbatch: not found, {wanted}") from None
    if done.returncode:
        raise RunError(f"sbatch refuses the job: {' '.join(done.stderr.split())[:500]}")
    return done.stdout.strip().partition(";")[0]
