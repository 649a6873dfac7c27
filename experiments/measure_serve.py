"""python experiments/measure_serve.py: HTTP load on `vitray serve`, beside MLflow's servers; see experiments/LOG.md.

The alternatives are `mlflow models serve` of the whole family and a process per model. At the end a replica is killed
and an alias moves under load.
"""

import argparse
import base64
import http.client
import io
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from PIL import Image

from vitray.bench.results import Results
from vitray.config import Run, load_run
from vitray.errors import RunError
from vitray.models.vit import ViT
from vitray.serving.flavor import log_family, log_model
from vitray.system.mlflow_client import import_mlflow, open_client, tracking_env
from vitray.system.storage import scratch_folder
from vitray.system.timing import circumstances, in_rounds, progress
from vitray.tracking.model_registry import register_model
from vitray.weights import save_model

START_SECONDS = 600
ALIAS = "models:/bench@champion"


class HttpRequest(NamedTuple):
    """One request."""

    url: str
    body: bytes
    kind: str


class Server(NamedTuple):
    """A server process, and its requests."""

    process: subprocess.Popen[bytes]
    url: str

    def memory(self) -> int:
        """Return the bytes of the process tree, shared memory counted once."""
        tree = psutil.Process(self.process.pid)
        return sum(process.memory_full_info().pss for process in [tree, *tree.children(recursive=True)])


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Measure every server at every concurrency in interleaved rounds, then kill and swap under load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_b12x1_16", help="a model name (%(default)s)")
    parser.add_argument("--deltas", type=int, default=100, help="attention deltas (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="MLflow servers of one model each (%(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64], help="clients (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of a load in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the results (%(default)s)")
    options = parser.parse_args(words)
    with scratch_folder() as folder, ExitStack() as stack:
        run = load_run(None, [f"model.name={options.model}", f"model.image_size={options.image_size}"])
        write_networks(run, options.deltas, folder)
        stack.enter_context(tracking_env(f"sqlite:///{folder}/mlruns.db"))
        models = log_networks(folder, options.deltas)
        jpegs = [jpeg(seed, run.model.image_shape) for seed in range(16)]
        vitray, here, mlflow, *processes = start_servers(stack, options.deltas, options.processes, folder, models)
        draws = loads(options.deltas, jpegs, (vitray, here, mlflow, *processes))
        variants = {
            (name, concurrency): partial(load_of, draw, concurrency, options.seconds)
            for name, draw in draws.items()
            for concurrency in options.concurrency
        }
        rows = medians(in_rounds(variants, options.rounds, warm_up=1, shown=True))
        device = torch.device("cpu")
        about = f"{os.cpu_count()} CPUs; {options.model}, {options.image_size} px; {options.rounds} rounds"
        print(f"{circumstances(device)}, {about}\n")
        stem = f"serve_{options.model}_{options.image_size}"
        results = Results(options.out / stem, device, {"circumstances": circumstances(device), "about": about})
        print(f"{'':<36}{'clients':>8}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'errors':>8}")
        for row in rows:
            speed = f"{row['clients']:>8}{row['requests_per_second']:>12.1f}"
            print(f"{row['server']:<36}{speed}{row['p50_ms']:>9.1f}{row['p99_ms']:>9.1f}{row['errors']:>8}")
            results.add(row)
        memory = {
            "vitray_bytes": vitray.memory(),
            "here_bytes": here.memory(),
            "mlflow_bytes": mlflow.memory(),
            "process_bytes": sum(map(Server.memory, processes)) // len(processes),
        }
        print(f"\nmemory: vitray serve, {options.deltas} tasks, 2 replicas: {memory['vitray_bytes'] / 1e6:,.0f} MB;")
        print(f"in one process: {memory['here_bytes'] / 1e6:,.0f} MB;")
        print(f"mlflow models serve, {options.deltas} tasks: {memory['mlflow_bytes'] / 1e6:,.0f} MB;")
        print(f"a process per model: {memory['process_bytes'] / 1e6:,.0f} MB each")
        return results.finish(memory | disturb(vitray, jpegs))


def start_servers(stack: ExitStack, deltas: int, processes: int, folder: Path, models: list[str]) -> list[Server]:
    """Start vitray serve, MLflow's server of the family, and one of each single model."""
    tasks = [f"t{number}={folder}/t{number}" for number in range(deltas)]
    words = ["pipelines.serve", str(folder / "base"), *tasks, f"followed={ALIAS}", "--follow", "1"]
    servers = []
    for more in (["--replicas", "2"], ["--cpus", str(os.cpu_count())]):
        progress(f"starting vitray serve {' '.join(more)}")
        servers.append(stack.enter_context(_started([*words, *more], "/healthz")))
    family, *single = models
    for number, model in enumerate([family, *(single[each % 2] for each in range(processes))]):
        progress(f"starting mlflow models serve, {number + 1} of {processes + 1}")
        words = ["mlflow", "models", "serve", "--env-manager", "local", "-m", model]
        servers.append(stack.enter_context(_started(words, "/health")))
    return servers


def loads(deltas: int, jpegs: list[bytes], servers: Sequence[Server]) -> dict[str, Callable[[], HttpRequest]]:
    """Return the requests to compare, by name: to vitray, to MLflow's server of the family, and to a process each."""
    vitray, here, mlflow, *processes = servers
    turn = itertools.count()

    def drawn() -> str:
        return f"t{random.randrange(deltas)}"

    return {
        "vitray serve, 1 task": lambda: _ask(vitray, random.choice(jpegs), "t0"),
        f"vitray serve, {deltas} tasks": lambda: _ask(vitray, random.choice(jpegs), drawn()),
        "vitray serve, one process, 1 task": lambda: _ask(here, random.choice(jpegs), "t0"),
        f"vitray serve, one process, {deltas} tasks": lambda: _ask(here, random.choice(jpegs), drawn()),
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


def load_of(draw: Callable[[], HttpRequest], concurrency: int, seconds: float, _number: int) -> dict[str, Any]:
    """Return throughput and latency of some clients."""
    began = time.perf_counter()
    with clients(concurrency, draw) as load:
        time.sleep(seconds)
    return load.row(time.perf_counter() - began)


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


def disturb(server: Server, jpegs: list[bytes]) -> dict[str, int]:
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


# ---- clients ---------------------------------------------------------------------------------------------------------


class Load:
    """The answers of some clients: their times, and the errors."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.errors: list[str] = []

    def row(self, elapsed: float) -> dict[str, Any]:
        """Return throughput and latency as columns."""
        p50, p99 = np.percentile(self.seconds or [float("nan")], [50, 99]).tolist()
        speed = {"requests_per_second": round(len(self.seconds) / elapsed, 2), "requests": len(self.seconds)}
        return speed | {"p50_ms": round(1e3 * p50, 1), "p99_ms": round(1e3 * p99, 1), "errors": len(self.errors)}


@contextmanager
def clients(count: int, next_request: Callable[[], HttpRequest]) -> Iterator[Load]:
    """Keep clients asking during the block, each on its own connection; a refused or lost request is an error."""
    load, ended = Load(), threading.Event()

    def work() -> None:
        connections: dict[str, http.client.HTTPConnection] = {}
        while not ended.is_set():
            send_once(connections)
        for connection in connections.values():
            connection.close()

    def send_once(connections: dict[str, http.client.HTTPConnection]) -> None:
        request = next_request()
        address = urllib.parse.urlsplit(request.url)
        began = time.perf_counter()
        try:
            if address.netloc not in connections:
                connections[address.netloc] = http.client.HTTPConnection(address.netloc, timeout=120)
            connection = connections[address.netloc]
            connection.request("POST", f"{address.path}?{address.query}", request.body, {"Content-Type": request.kind})
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise OSError(f"{response.status} {content[:200]!r}")
            load.seconds.append(time.perf_counter() - began)
        except (OSError, http.client.HTTPException) as error:
            connections.pop(address.netloc).close()
            load.errors.append(repr(error))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
