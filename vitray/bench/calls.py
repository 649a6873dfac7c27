"""Runs trained one after another by one process on one Ray: what a sweep would cost if sweeping cost nothing.

`python -m vitray.bench.calls FOLDER RUN.yaml ...` prints when each began and ended, and how long it trained.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import vitray.waking  # noqa: F401 - as `vitray train` begins, with which it is compared
from vitray import cluster
from vitray.config import load_run
from vitray.loop.driver import train


class Span(NamedTuple):
    """A run in time."""

    began: float
    """By the clock, as its end."""
    ended: float
    training: float
    """Seconds that it took for its steps."""


def call_each(out: str, recipes: Sequence[Path]) -> list[Span]:
    """Train each of these recipes, on a Ray that runs already."""
    spans = []
    with cluster.running():
        for recipe in recipes:
            began = time.time()
            training = train(load_run(recipe), recipe.stem, out).seconds
            spans.append(Span(began, time.time(), training))
    return spans


if __name__ == "__main__":
    print(json.dumps(call_each(sys.argv[1], list(map(Path, sys.argv[2:])))))
