"""vitray ui: the runs of this folder in a browser."""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelines.__main__ import run_verb
from vitray.config.parsing import count_up_to
from vitray.errors import ConfigError, redact_uri
from vitray.tracking.mlflow_client import artifact_root, import_mlflow, open_client, tracking_uri


def main(args: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="vitray ui",
        description="Opens MLflow on MLFLOW_TRACKING_URI or else on this folder's mlruns.db, until Ctrl-C. "
        "If MLFLOW_TRACKING_URI is a server already, its address is printed.",
        epilog="example: vitray ui --port 5001",
    )
    parser.add_argument("--port", type=count_up_to(65_535), default=5000)
    parser.add_argument("--host", default="127.0.0.1", help="MLflow asks for no password: keep it to this machine")
    parser.add_argument("--json", action="store_true", help="print the result as JSON: url")
    options = parser.parse_args(args)
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        print(f"a server has the runs: open {redact_uri(uri)}")
        return {"url": redact_uri(uri)}
    artifacts = artifact_root(uri)
    if artifacts and not Path(uri.removeprefix("sqlite:///")).exists():
        raise ConfigError(
            f"{redact_uri(uri)}: no runs here; wanted the folder that training ran in, or MLFLOW_TRACKING_URI"
        )
    with socket.socket() as probe:
        if probe.connect_ex((options.host, options.port)) == 0:
            raise ConfigError(f"--port: {options.port} is taken; wanted a free one, as in --port {options.port + 1}")
    if artifacts:
        import_mlflow()
        open_client(uri)  # replaces a store that a kill has left incomplete
    # In the environment, as command lines are public. MLflow's job runner, unused here, takes a gigabyte.
    settings = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, *f"-m mlflow server --host {options.host} --port {options.port} --workers 1".split()]
    command += ["--default-artifact-root", artifacts] if artifacts else []
    print(f"open {(url := f'http://{options.host}:{options.port}')} in a moment; Ctrl-C ends it", file=sys.stderr)
    with subprocess.Popen(command, env={**os.environ, **settings, "MLFLOW_DISABLE_TELEMETRY": "true"}) as server:
        try:
            status = server.wait()
        except BaseException:
            server.terminate()
            raise
    if status != 0:
        raise ConfigError(f"{redact_uri(uri)}: MLflow ended with status {status}; its output is above")
    return {"url": url}


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
