"""MLflow's server on the runs of a store, for as long as this process lives."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from vitray.errors import ConfigError, one_line, redact_uri
from vitray.system.mlflow_client import artifact_root, import_mlflow, open_client
from vitray.tracking.lineage import WORKFLOW

# The page of an experiment that lists its runs; without the query MLflow 3.17 may open that of traces.
RUNS_PAGE = f"#/experiments/{{}}/runs?{WORKFLOW}"
# Ports that are tried where none is asked for.
DEFAULT_PORTS = range(5000, 5010)
# Seconds for the server to end: a browser may keep a connection.
STOP_SECONDS = 5
# Seconds for a connection to a port that may be taken.
CONNECT_SECONDS = 2


def runs_url(uri: str, address: str) -> str:
    """Return the page at a server's address with the latest run of a store, or the address where there is none."""
    try:
        import_mlflow()
        client = open_client(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        latest = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    except Exception as error:  # the pages may still open
        print(f"vitray: {redact_uri(uri)}: its runs are not listed ({one_line(error)[:120]})", file=sys.stderr)
        return address
    return f"{address.rstrip('/')}/{RUNS_PAGE.format(latest[0].info.experiment_id)}" if latest else address


def serve(uri: str, host: str, ports: Sequence[int]) -> None:
    """Serve a store at the first free port until Ctrl-C or SIGTERM; raise a ConfigError if no port is free."""
    previous = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for port in ports:
            if not _is_taken(host, port):
                _serve_at(uri, host, port)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    taken = f"{ports[0]} is" if len(ports) == 1 else f"{ports[0]} to {ports[-1]} are"
    raise ConfigError(f"--port: {taken} taken; expected a free one, as in --port {ports[-1] + 1}")


def _serve_at(uri: str, host: str, port: int) -> None:
    """Serve until a signal ends this process; return if another server takes the port first."""
    # In the environment, as command lines are public. MLflow's job runner, unused here, takes a gigabyte.
    settings = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, *f"-m mlflow server --host {host} --port {port} --workers 1".split()]
    if artifacts := artifact_root(uri):
        command += ["--default-artifact-root", artifacts]
        import_mlflow()
        open_client(uri)  # replaces a store that a kill has left incomplete
    environment = {**os.environ, **settings, "MLFLOW_DISABLE_TELEMETRY": "true"}
    # A session of its own: MLflow starts further processes, which all end with this one.
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            while server.poll() is None and not _listens(server.pid, port):
                time.sleep(0.2)
            if server.poll() is None:
                address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                print(f"open {runs_url(uri, address)}   (Ctrl-C ends it)", file=sys.stderr, flush=True)
            status = server.wait()
        finally:
            _end_session(server)
    if not _is_taken(host, port):
        raise ConfigError(f"{redact_uri(uri)}: MLflow ended with status {status}; its output is above")


def _exit(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)


def _is_taken(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS):
            return True
    except (socket.gaierror, UnicodeError):  # the latter for a name with an empty or overlong part
        raise ConfigError(f"--host: got {host!r}, expected an address of this machine, as in 127.0.0.1") from None
    except OSError:  # also an address of another machine: MLflow rejects it
        return False


def _listens(pid: int, port: int) -> bool:
    """Return whether a process, or one that it has started, listens on a port."""
    try:
        process = psutil.Process(pid)
        connections = [each for one in (process, *process.children(True)) for each in one.net_connections("tcp")]
    except psutil.Error:  # one has just ended
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)


def _end_session(server: subprocess.Popen[bytes]) -> None:
    """End all processes of the server; the second signal ends those that the first did not."""
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(seconds)
