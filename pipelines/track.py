"""vitray track flush: upload the records of runs that ended while MLflow was offline."""

import argparse
from typing import Any

from pipelines.__main__ import run_verb
from vitray.errors import ConfigError, redact_uri


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray track",
        description="The records of a run wait on its driver's disk, below $VITRAY_HOME or ~/.vitray, until MLflow has "
        "them. flush uploads the records of ended runs to MLFLOW_TRACKING_URI, or else to the store of this folder. "
        "A run whose driver died on this machine becomes KILLED.",
        epilog="example: MLFLOW_TRACKING_URI=http://tracker:5000 vitray track flush",
    )
    parser.add_argument("action", choices=["flush"])
    parser.add_argument("--json", action="store_true", help="print the result as JSON: runs (uid, name, state, said)")
    parser.parse_args(args)

    # Imported late, because MLflow takes seconds.
    from vitray.tracking.flush import flush_all
    from vitray.tracking.mlflow_client import tracking_uri

    results, uri = flush_all(), redact_uri(tracking_uri())
    for result in results:
        print(f"{result.name} ({result.uid}): {result.message}")
    waiting = sum(result.state == "waiting" for result in results)
    if waiting:
        raise ConfigError(f"{uri}: {waiting} of {len(results)} runs wait; wanted an MLflow that answers")
    if not results:
        print(f"{uri}: nothing waits")
    return {"runs": [{"uid": r.uid, "name": r.name, "state": r.state, "said": r.message} for r in results]}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
