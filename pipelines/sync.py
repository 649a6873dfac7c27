"""vitray sync: upload to MLflow the records of runs that ended while it was offline."""

import argparse
from typing import Any
from urllib.parse import urlsplit

from pipelines.__main__ import run_verb
from vitray.errors import ConfigError, RunError, redact_uri

STORES = {"http", "https", "sqlite", "postgresql", "mysql", "mssql"}  # the schemes that MLflow's registry has too


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray sync",
        description="Uploads the records of ended runs, each to the store that its run was started with. They wait on"
        " the disk of a run's driver, below $VITRAY_HOME or ~/.vitray, until MLflow has them. A run whose driver died"
        " on this machine becomes KILLED. A job's driver runs on the head. Those of a sweep's trials run on any node,"
        " and their records end with it, unless VITRAY_HOME is on a shared disk.",
        epilog="examples: vitray sync --to http://tracker:5000; vitray submit --follow sync",
    )
    parser.add_argument("--to", metavar="ADDRESS", help="send all of them to this MLflow, instead of to their own")
    parser.add_argument("--json", action="store_true", help="print JSON: runs (uid, name, state, message, store)")
    options = parser.parse_args(args)

    # Imported late, because MLflow takes seconds.
    from vitray.tracking.upload import flush_all

    if options.to is not None and urlsplit(options.to).scheme.partition("+")[0] not in STORES:
        raise ConfigError(f"--to: got {redact_uri(options.to)}, expected an MLflow address, as in http://tracker:5000")
    results = flush_all(options.to)
    for result in results:
        print(f"{result.name} ({result.uid}), {result.store or 'no store recorded'}: {result.message}")
    if waiting := [result for result in results if result.state == "waiting"]:
        unsent = f"the records of {len(waiting)} of {len(results)} runs are not uploaded"
        if not (stores := sorted({result.store for result in waiting if result.store})):
            raise ConfigError(f"no store recorded: {unsent}; expected --to ADDRESS")
        raise RunError(f"{', '.join(stores)}: {unsent}; expected a reachable MLflow")
    if not results:
        print("nothing waits")
    return {"runs": [result._asdict() for result in results]}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
