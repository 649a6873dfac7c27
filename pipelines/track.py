"""vitray track flush: complete in MLflow what runs recorded while it was away."""

import argparse
import sys
from typing import Any

from pipelines.__main__ import run_verb
from vitray.errors import ConfigError


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray track",
        description="A run's records wait on the disk of its driver, below $VITRAY_HOME or ~/.vitray, until MLflow has "
        "them. flush sends what runs left there that ended without it, to MLFLOW_TRACKING_URI or the store of this "
        "folder. A run whose driver died on this machine becomes KILLED.",
        epilog="example: MLFLOW_TRACKING_URI=http://tracker:5000 vitray track flush",
    )
    parser.add_argument("action", choices=["flush"])
    parser.add_argument("--json", action="store_true", help="print the result as JSON: runs (uid, name, state, said)")
    parser.parse_args(words)

    # Only after the words were found good: MLflow takes seconds to load.
    from vitray.tracking import flush_all, redact_uri, tracking_uri

    runs = flush_all()
    for run in runs:
        print(f"{run.name} ({run.uid}): {run.said}")
    waiting = sum(run.state == "waiting" for run in runs)
    if waiting:
        raise ConfigError(
            f"{redact_uri(tracking_uri())}: {waiting} of {len(runs)} runs wait; wanted an MLflow that answers"
        )
    if not runs:
        print(f"{redact_uri(tracking_uri())}: nothing waits")
    return {"runs": [run._asdict() for run in runs]}


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
