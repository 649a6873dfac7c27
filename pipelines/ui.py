"""vitray ui: the runs of this folder in a browser."""

import argparse
from pathlib import Path
from typing import Any

from pipelines.__main__ import run_verb
from vitray.config.parsing import count_up_to
from vitray.errors import ConfigError, redact_uri
from vitray.system.mlflow_client import artifact_root, tracking_uri
from vitray.tracking.ui_server import DEFAULT_PORTS, runs_url, serve


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray ui",
        description="Serves MLflow's pages on MLFLOW_TRACKING_URI or else on this folder's mlruns.db, until Ctrl-C, and"
        " prints their address. If MLFLOW_TRACKING_URI is a server already, its address is printed.",
        epilog="example: vitray ui --port 5001",
    )
    text = f"port to listen on (default: the first free one of {DEFAULT_PORTS[0]} to {DEFAULT_PORTS[-1]})"
    parser.add_argument("--port", type=count_up_to(65_535), help=text)
    text = "address to listen on (%(default)s); beyond this machine, anyone can use MLflow without a password"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--json", action="store_true", help="print the result as JSON: url")
    options = parser.parse_args(args)
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        url = runs_url(uri, redact_uri(uri))
        print(f"a server has the runs: open {url}")
        return {"url": url}
    if artifact_root(uri) and not Path(uri.removeprefix("sqlite:///")).exists():
        raise ConfigError(
            f"{redact_uri(uri)}: no runs here; expected the folder that training ran in, or MLFLOW_TRACKING_URI"
        )
    serve(uri, options.host, DEFAULT_PORTS if options.port is None else [options.port])
    return {}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
