"""vitray ui: the runs of this folder in a browser."""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelines.__main__ import run_verb
from vitray.errors import ConfigError
from vitray.tracking import artifacts_beside, redact_uri, tracking_uri


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray ui",
        description="Opens MLflow on MLFLOW_TRACKING_URI or else on this folder's mlruns.db, until Ctrl-C. "
        "Where MLFLOW_TRACKING_URI is a server already, its address is printed.",
        epilog="example: vitray ui --port 5001",
    )
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--host", default="127.0.0.1", help="MLflow asks for no password: keep it to this machine")
    parser.add_argument("--json", action="store_true", help="print the result as JSON: url")
    args = parser.parse_args(words)
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        print(f"a server has the runs: open {redact_uri(uri)}")
        return {"url": redact_uri(uri)}
    artifacts = artifacts_beside(uri)
    if artifacts and not Path(uri.removeprefix("sqlite:///")).exists():
        raise ConfigError(
            f"{redact_uri(uri)}: no runs here; wanted the folder that training ran in, or MLFLOW_TRACKING_URI"
        )
    with socket.socket() as knock:
        if knock.connect_ex((args.host, args.port)) == 0:
            raise ConfigError(f"--port: {args.port} is taken; wanted a free one, as in --port {args.port + 1}")

    # The store's address may hold a password, which a command's words would show to everybody. Jobs are seven
    # processes that serve nothing here and take a gigabyte.
    settings = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, *f"-m mlflow server --host {args.host} --port {args.port} --workers 1".split()]
    command += ["--default-artifact-root", artifacts] if artifacts else []
    url = f"http://{args.host}:{args.port}"
    print(f"open {url} in a moment; Ctrl-C ends it", file=sys.stderr)
    with subprocess.Popen(command, env={**os.environ, **settings, "MLFLOW_DISABLE_TELEMETRY": "true"}) as server:
        try:
            status = server.wait()
        except BaseException:
            server.terminate()
            raise
    if status != 0:
        raise ConfigError(f"{redact_uri(uri)}: MLflow ended with status {status}; it said above why")
    return {"url": url}


if __name__ == "__main__":
    sys.exit(run_verb(main, sys.argv[1:]))
