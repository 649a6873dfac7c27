"""HTTP load on `vitray serve`, beside `mlflow models serve` and beside a process per model."""

import base64
import io
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from PIL import Image

from vitray.bench.http_load import HttpRequest, clients
from vitray.bench.rounds import circumstances, progress, write_csv
from vitray.config import Run, load_run
from vitray.errors import RunError
from vitray.models.vit import ViT
from vitray.serving.flavor import log_family, log_model
from vitray.system.mlflow_client import import_mlflow, open_client, tracking_env
from vitray.system.storage import scratch_folder
from vitray.tracking.model_registry import register_model
from vitray.weights import save_model

START_SECONDS = 600
ALIAS = "models:/bench@champion"


class ServeSettings(NamedTuple):
    """Settings of `vitray bench serve`."""

    model: str
    deltas: int = 100
    processes: int = 2
    """MLflow servers of one model each."""
    concurrency: Sequence[int] = (1, 8, 64)
    image_size: int = 224
    seconds: float = 10.0
    rounds: int = 3
    out: Path = Path("bench_out")


class Server(NamedTuple):
    """A server process, and its requests."""

    process: subprocess.Popen[bytes]
    url: str

    def memory(self) -> int:
        """Return the bytes of the process tree, shared memory counted once."""
        tree = psutil.Process(self.process.pid)
        return sum(process.memory_full_info().pss for process in [tree, *tree.children(recursive=True)])


def measure_serve(settings: ServeSettings) -> dict[str, Any]:
    """Measure every server at every concurrency in interleaved rounds, then kill and swap under load."""
    with scratch_folder() as folder, ExitStack() as stack:
        run = load_run(None, [f"model.name={settings.model}", f"model.image_size={settings.image_size}"])
        write_networks(run, settings.deltas, folder)
        stack.enter_context(tracking_env(f"sqlite:///{folder}/mlruns.db"))
        models = log_networks(folder, settings.deltas)
        jpegs = [jpeg(seed, run.model.image_shape) for seed in range(16)]
        vitray, mlflow, *processes = _start_servers(stack, settings, folder, models)
        rows = _measure(loads(settings.deltas, jpegs, (vitray, mlflow, *processes)), settings)
        where = circumstances(torch.device("cpu"))
        print(f"{where}, {os.cpu_count()} CPUs; {settings.model}, {settings.image_size} px; {settings.rounds} rounds\n")
        _print_rows(rows)
        memory = {
            "vitray_bytes": vitray.memory(),
            "mlflow_bytes": mlflow.memory(),
            "process_bytes": sum(map(Server.memory, processes)) // len(processes),
        }
        print(f"\nmemory: vitray serve, {settings.deltas} tasks, 2 replicas: {memory['vitray_bytes'] / 1e6:,.0f} MB;")
        print(f"mlflow models serve, {settings.deltas} tasks: {memory['mlflow_bytes'] / 1e6:,.0f} MB;")
        print(f"a process per model: {memory['process_bytes'] / 1e6:,.0f} MB each")
        lost = _disturb(vitray, jpegs)
        write_csv(table := settings.out / f"serve_{settings.model}_{settings.image_size}.csv", rows)
        return {"circumstances": where, "rows": rows, "files": [str(table)]} | memory | lost


def _start_servers(stack: ExitStack, settings: ServeSettings, folder: Path, models: list[str]) -> list[Server]:
    """Start vitray serve, MLflow's server of the family, and one of each single model."""
    tasks = [f"t{number}={folder}/t{number}" for number in range(settings.deltas)]
    words = ["pipelines.serve", str(folder / "base"), *tasks, f"followed={ALIAS}", "--replicas", "2", "--follow", "1"]
    progress("starting vitray serve")
    servers = [stack.enter_context(_started(words, "/healthz"))]
    family, *single = models
    for number, model in enumerate([family, *(single[each % 2] for each in range(settings.processes))]):
        progress(f"starting mlflow models serve, {number + 1} of {settings.processes + 1}")
        words = ["mlflow", "models", "serve", "--env-manager", "local", "-m", model]
        servers.append(stack.enter_context(_started(words, "/health")))
    return servers


def loads(deltas: int, jpegs: list[bytes], servers: Sequence[Server]) -> dict[str, Callable[[], HttpRequest]]:
    """Return the requests to compare, by name: to vitray, to MLflow's server of the family, and to a process each."""
    vitray, mlflow, *processes = servers
    turn = itertools.count()

    def drawn() -> str:
        return f"t{random.randrange(deltas)}"

    return {
        "vitray serve, 1 task": lambda: _ask(vitray, random.choice(jpegs), "t0"),
        f"vitray serve, {deltas} tasks": lambda: _ask(vitray, random.choice(jpegs), drawn()),
        "mlflow models serve, 1 task": lambda: _ask_mlflow(mlflow, random.choice(jpegs), "t0"),
        f"mlflow models serve, {deltas} tasks": lambda: _ask_mlflow(mlflow, random.choice(jpegs), drawn()),
        f"a process per model, {len(processes)} models": lambda: _ask_mlflow(
            processes[next(turn) % len(processes)], random.choice(jpegs)
        ),
    }


def write_networks(run: Run, deltas: int, folder: Path) -> None:
    """Write a drawn base, and deltas of it with attention of their own."""
    torch.manual_seed(0)
    vit = ViT(run.model).eval()
    save_model(str(folder / "base"), run, vit)
    attention = [tensor for name, tensor in vit.state_dict().items() if ".attn" in name]
    for number in range(deltas):
        for tensor in attention:
            tensor.normal_(std=0.02)
        save_model(str(folder / f"t{number}"), run, vit, relative_to=str(folder / "base"))


def log_networks(folder: Path, deltas: int) -> list[str]:
    """Log the family and two deltas, versions of a model with an alias; return their addresses."""
    import_mlflow()
    client = open_client(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.create_experiment("bench", artifact_location=str(folder / "artifacts"))
    tasks = {f"t{number}": str(folder / f"t{number}") for number in range(deltas)}
    models = [log_family("bench", "family", str(folder / "base"), tasks)]
    for number in range(2):
        run_id = client.create_run(experiment).info.run_id
        models.append(log_model(run_id, str(folder / f"t{number % deltas}")))
        register_model(client, models[-1], "bench", None, None)
    client.set_registered_model_alias("bench", "champion", "1")
    return models


def _measure(draws: dict[str, Callable[[], HttpRequest]], settings: ServeSettings) -> list[dict[str, Any]]:
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(settings.rounds + 1):  # the first one warms up
        for name, draw in draws.items():
            for concurrency in settings.concurrency:
                began = time.perf_counter()
                with clients(concurrency, draw) as load:
                    time.sleep(settings.seconds if number else min(settings.seconds, 3))
                row = load.row(time.perf_counter() - began)
                if number:
                    measured.setdefault((name, concurrency), []).append(row)
                progress(f"round {number} of {settings.rounds}: {name}, {concurrency} clients")
    return medians(measured)


def medians(measured: Mapping[tuple[str, int], Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each server and concurrency: medians over the rounds, and sums of requests and errors."""
    rows = []
    for (name, concurrency), results in measured.items():
        row: dict[str, Any] = {"server": name, "clients": concurrency}
        for column in ("requests_per_second", "p50_ms", "p99_ms"):
            row[column] = float(np.median([result[column] for result in results]))
        row |= {column: sum(result[column] for result in results) for column in ("requests", "errors")}
        rows.append(row)
    return rows


def _print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'':<36}{'clients':>8}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'errors':>8}")
    for row in rows:
        speed = f"{row['clients']:>8}{row['requests_per_second']:>12.1f}"
        print(f"{row['server']:<36}{speed}{row['p50_ms']:>9.1f}{row['p99_ms']:>9.1f}{row['errors']:>8}")


def _disturb(server: Server, jpegs: list[bytes]) -> dict[str, int]:
    """Kill a replica and move the alias while eight clients ask; return the numbers of requests and of lost ones."""
    with clients(8, lambda: _ask(server, random.choice(jpegs), "followed")) as load:
        time.sleep(2)
        tree = psutil.Process(server.process.pid).children(recursive=True)
        replicas = [process for process in tree if "ServeReplica:vitray:network" in " ".join(process.cmdline())]
        replicas[0].kill()
        time.sleep(5)
        open_client(os.environ["MLFLOW_TRACKING_URI"]).set_registered_model_alias("bench", "champion", "2")
        deadline = time.monotonic() + START_SECONDS
        while _models(server) != {"models:/bench/2"} and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(2)
    lines = urllib.request.urlopen(f"{server.url}/metrics").read().decode().splitlines()
    retries = sum(int(float(line.split()[-1])) for line in lines if line.startswith("vitray_retries_total"))
    answered, lost = len(load.seconds), len(load.errors)
    print(
        f"\na replica killed, an alias moved, 8 clients: {answered} answered, {lost} lost, {retries} sent again inside"
    )
    return {"answered": len(load.seconds), "lost": len(load.errors), "retries": retries}


def _models(server: Server) -> set[str]:
    """Return the networks that answer for the followed task at the moment."""
    listings = [json.load(urllib.request.urlopen(f"{server.url}/v1/tasks")) for _ in range(8)]
    return {row["model"] for listing in listings for row in listing["tasks"] if row["task"] == "followed"}


def _ask(server: Server, jpeg: bytes, task: str) -> HttpRequest:
    return HttpRequest(f"{server.url}/v1/predict?task={task}&top_k=5", jpeg, "image/jpeg")


def _ask_mlflow(server: Server, jpeg: bytes, task: str | None = None) -> HttpRequest:
    records = [{"image": base64.b64encode(jpeg).decode()} | ({"task": task} if task else {})]
    body = json.dumps({"dataframe_records": records, "params": {"top_k": 5}}).encode()
    return HttpRequest(f"{server.url}/invocations", body, "application/json")


def jpeg(seed: int, size: tuple[int, int]) -> bytes:
    """Return a drawn image of twice this size."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((2 * size[1], 2 * size[0])).save(file, "JPEG")
    return file.getvalue()


@contextmanager
def _started(words: list[str], health: str) -> Iterator[Server]:
    """Start a server on a free port, wait until it answers, and end it with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *words, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    # MLflow starts uvicorn by its name.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(command, env=environment, start_new_session=True, stdout=sys.stderr) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(f"{url}{health}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RunError(f"{words[0]} did not start within {START_SECONDS} seconds; its output is above")
                time.sleep(0.5)
            yield Server(process, url)
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status == 200
    except OSError:
        return False
