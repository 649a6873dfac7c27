"""The command line: `vitray VERB ...`, the same as `python -m pipelines.VERB ...`."""

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from vitray.errors import ConfigError, OwnershipLost, RunError, nearest

VERBS = {
    "demo": "draw a dataset, train a small network on it and register it, in this folder",
    "train": "train a network on Ray, tracked by MLflow; resume and fork runs",
    "sweep": "train many variants from a search space: depth x branches, learning rate, fine-tuning mode",
    "evaluate": "score and compare networks on a set of images: intervals, calibration, mistakes, a page",
    "predict": "write classes, features and embeddings of any number of images as Parquet, each exactly once",
    "promote": "give a registered model version an alias, if it is better than the alias's version",
    "serve": "answer HTTP requests with a network and its deltas",
    "inspect": "show the inside of a network: attention over images, attention distance, branches, as a page",
    "export": "write a network for ONNX, torch.export, timm, torchvision or Hugging Face, and check that outputs match",
    "replay": "take a past step of a run again, and show the loss of each of its images",
    "model": "show a network's costs and draw it; read weights of other libraries",
    "weights": "describe a model folder; write a whole one from a delta or from a run's best checkpoint",
    "shard": "write images as a dataset of Parquet shards: shuffled, checked and counted",
    "ui": "show the runs of this folder in a browser",
    "sync": "upload to MLflow the records that wait on this machine, after an outage",
    "submit": "run a verb as a job on a cluster",
    "slurm": "run a verb as a job of a Slurm cluster, which goes on after preemption and its time limit",
    "doctor": "check a cluster before a long run: versions, GPUs, disks, clocks, storage, MLflow, network",
    "jobs": "list a cluster's jobs, or print the log of one",
    "stop": "stop a job",
    "bench": "measure vitray against a named alternative on this machine",
}
# A verb whose file cannot have its name: a runnable file shadows a module of the standard library.
FILES = {"inspect": "inspection"}
# Verbs of the machine where one works.
LOCAL_VERBS = {"demo", "submit", "slurm", "jobs", "stop", "ui"}
# Words of other tools, and the verb that does it here.
MEANT = {
    **dict.fromkeys(("finetune", "fine-tune", "fit", "pretrain", "resume"), "train"),
    **dict.fromkeys(("eval", "test", "validate", "score"), "evaluate"),
    **dict.fromkeys(("infer", "inference", "embed"), "predict"),
    **dict.fromkeys(("tune", "search", "hpo"), "sweep"),
    **dict.fromkeys(("data", "dataset", "convert", "prepare"), "shard"),
    **dict.fromkeys(("explain", "visualize", "attention"), "inspect"),
    **dict.fromkeys(("mlflow", "dashboard"), "ui"),
    **dict.fromkeys(("track", "flush", "upload"), "sync"),
    **dict.fromkeys(("benchmark", "profile"), "bench"),
}
# What an installation may lack, and the requirement that brings it.
OPTIONAL = {
    "ray": "ray[data,train,tune,serve,default]",
    "prometheus_client": "ray[serve]",
    "starlette": "ray[serve]",
    "uvicorn": "ray[serve]",
    "optuna": "optuna",
    "boto3": "boto3",
    "botocore": "boto3",
}
NOTES = """\
Every verb takes --json: the last line of stdout is then one JSON object. Exit status: 0 done, 1 failed,
2 bad input (one line on stderr: where, what was given, what is expected), 130 Ctrl-C, 143 SIGTERM."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    verb, *rest = list(sys.argv[1:] if args is None else args) or ["-h"]
    if verb in ("-h", "--help"):
        verbs = "\n".join(f"  {name:<10} {text}" for name, text in VERBS.items())
        print(f"usage: vitray VERB ...   (vitray VERB -h for details)\n\n{__doc__}\n\nverbs:\n{verbs}\n\n{NOTES}")
        return 0
    if verb == "--version":
        print(f"vitray {version('vitray')}")
        return 0
    if verb not in VERBS:
        close = f"; did you mean {MEANT[verb]}?" if verb in MEANT else nearest(verb, VERBS)
        print(f"vitray: unknown verb {verb!r}, expected one of {', '.join(VERBS)}{close}", file=sys.stderr)
        return 2
    return run_verb(importlib.import_module(f"pipelines.{FILES.get(verb, verb)}").main, rest)


def run_verb(verb: Callable[[list[str]], dict[str, Any]], args: Sequence[str] | None = None) -> int:
    """Call a verb, print its result as JSON if asked, and return its exit status."""
    args = sys.argv[1:] if args is None else args
    is_main = threading.current_thread() is threading.main_thread()  # others cannot set a handler
    handler = signal.signal(signal.SIGTERM, _end) if is_main else None
    try:
        result = verb([arg for arg in args if arg != "--json"])
    except ConfigError as error:
        print(f"vitray: {error}", file=sys.stderr)
        return 2
    except (RunError, OwnershipLost) as error:
        print(f"vitray: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in OPTIONAL:
            raise
        without = "; shard, train --here, evaluate, inspect and predict work without it" if name == "ray" else ""
        print(
            f"vitray: needs {name}, expected it to be installed: pip install '{OPTIONAL[name]}'{without}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("vitray: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe: keep Python from flushing it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # None is one that Python did not set
    if "--json" in args:
        print(json.dumps(result))
    return 0


def check_remote(verb: str) -> None:
    """Refuse a verb that does not run as a job."""
    known = [verb for verb in VERBS if verb not in LOCAL_VERBS]
    if verb not in known:
        raise ConfigError(f"got {verb!r}, expected one of {', '.join(known)}{nearest(verb, known)}")


def _end(number: int, _frame: Any) -> None:
    """Raise an exception, so that leases are released and child processes end."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
