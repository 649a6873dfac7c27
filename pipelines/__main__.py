"""The command line: `vitray VERB ...`, the same as `python -m pipelines.VERB ...`."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vitray.errors import ConfigError, RunError, nearest

VERBS = {
    "train": "train a network on Ray, tracked by MLflow; resume and fork runs",
    "sweep": "train many that differ in what a space says: depth x branches, learning rate, fine-tuning mode",
    "model": "say what a network costs and draw it; convert weights between layouts",
    "weights": "say what a model folder holds; write a delta as a whole model",
    "shard": "write images as a dataset of Parquet shards: shuffled, checked and counted",
    "ui": "show the runs of this folder in a browser",
    "track": "complete in MLflow what runs recorded while it was away",
    "submit": "send a verb to a cluster, where it runs as a job",
    "doctor": "look at a cluster before a long run: versions, GPUs, disks, clocks, storage, MLflow, network",
    "jobs": "list a cluster's jobs, or print what one has to say",
    "stop": "end a job",
    "bench": "measure vitray against a named alternative on this machine",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    verb, *rest = list(sys.argv[1:] if words is None else words) or ["-h"]
    if verb in ("-h", "--help"):
        listed = "\n".join(f"  {name:<10} {text}" for name, text in VERBS.items())
        print(f"usage: vitray VERB ...   (vitray VERB -h says more)\n\n{__doc__}\n\nverbs:\n{listed}\n")
        print(
            "Every verb takes --json: the last line of stdout is then one JSON object. Exit status: 0 done, 1 failed,"
        )
        print("2 bad input (one message on stderr says where, what was wanted and the nearest legal word), 130 Ctrl-C.")
        return 0
    if verb not in VERBS:
        print(
            f"vitray: unknown verb {verb!r}, wanted one of {', '.join(VERBS)}{nearest(verb, VERBS)}",
            file=sys.stderr,
        )
        return 2
    return run_verb(importlib.import_module(f"pipelines.{verb}").main, rest)


def run_verb(verb: Callable[[list[str]], dict[str, Any]], words: Sequence[str]) -> int:
    """Call a verb, print its result as JSON where asked, and turn how it ended into an exit status."""
    words = list(words)
    as_json = "--json" in words
    try:
        result = verb([word for word in words if word != "--json"])
    except ConfigError as error:
        print(f"vitray: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"vitray: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vitray: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing is left to tell it, and Python must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if as_json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
