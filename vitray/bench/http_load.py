"""HTTP clients that ask without a pause, and the latency of their answers."""

import http.client
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np


class HttpRequest(NamedTuple):
    """One request."""

    url: str
    body: bytes
    kind: str


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
