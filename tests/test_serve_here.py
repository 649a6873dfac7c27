"""A server in this process: real HTTP clients, without Ray."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from test_layers import ROOT
from test_serve import folder as folder
from test_serve import logged_answer, png
from test_serve_gateway import TOKEN, check_answer

from vitray.config.serving import Limits, Serving
from vitray.errors import RunError
from vitray.serving import replica as replica_module
from vitray.serving.here import Running, serving_from
from vitray.serving.serve import computes_here


@pytest.fixture(scope="module")
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def running(folder, free_port):
    tasks = {"a": str(folder / "a"), "b": str(folder / "b")}
    limits = Limits(queue=4, body_bytes=50_000)
    with serving_from(
        Serving(base=str(folder / "base"), tasks=tasks, limits=limits, batch=2), "127.0.0.1", free_port
    ) as server:
        yield server


def ask(port: int, path: str, body: bytes = b"", method: str = "POST", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = response.headers["content-type"] == "application/json"
    return response.status, json.loads(content) if is_json else content.decode()


@pytest.mark.parametrize("task", ["base", "a", "b"])
def test_a_request_is_answered_by_its_network(running, folder, free_port, task):
    status, answer = ask(free_port, f"/v1/predict?task={task}", png(3))
    assert (status, answer["task"], answer["model"]) == (200, task, str(folder / task))
    check_answer(answer["predictions"][0], logged_answer(folder / task, png(3)))
    running.check()


def test_more_requests_than_the_queue_holds_are_refused_at_once_and_the_others_answered(running, folder, free_port):
    with ThreadPoolExecutor(32) as clients:
        replies = list(clients.map(lambda value: ask(free_port, "/v1/predict", png(value)), range(64)))
    assert {status for status, _ in replies} <= {200, 503}
    for value, (status, answer) in enumerate(replies):
        if status == 200:
            check_answer(answer["predictions"][0], logged_answer(folder / "base", png(value)))
        else:
            assert answer["error"] == "the queue is full: 4 requests wait already"
    assert [status for status, _ in replies].count(200) >= 8  # two batches and the queue
    assert ask(free_port, "/healthz", method="GET")[0] == 200


def test_errors_and_counts_are_those_of_the_gateway(running, free_port):
    assert ask(free_port, "/v1/predict", b"x") == (400, {"error": "image 0: not an image"})
    assert ask(free_port, "/v1/predict", bytes(50_001))[0] == 413
    status, page = ask(free_port, "/metrics", method="GET")
    assert (status, 'vitray_requests_total{status="400",task=""}' in page) == (200, True)


def test_headers_without_end_are_read_no_further_than_a_limit(running, free_port):
    sent = 0
    with socket.create_connection(("127.0.0.1", free_port), timeout=60) as client, suppress(OSError):
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Name: ")
        while sent < 2**26:
            client.sendall(b"a" * 2**16)
            sent += 2**16
    assert sent < 2**26
    assert ask(free_port, "/healthz", method="GET")[0] == 200


def test_the_description_names_each_path(running, free_port):
    status, described = ask(free_port, "/openapi.json", method="GET")
    assert (status, described["openapi"]) == (200, "3.1.0")
    status, page = ask(free_port, "/docs", method="GET")
    assert status == 200
    for path, methods in described["paths"].items():
        assert path in page
        [method] = methods
        assert ask(free_port, path, png() if method == "post" else b"", method.upper())[0] == 200


def test_a_replica_that_is_broken_ends_the_server(folder, free_port, monkeypatch):
    monkeypatch.setattr(replica_module, "MOST_FAILURES", 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with serving_from(Serving(base=str(folder / "base")), "127.0.0.1", port) as server:
        assert ask(port, "/v1/predict", png())[0] == ask(port, "/healthz", method="GET")[0] == 503
        with pytest.raises(RunError, match="the network does not answer any more, so the server ends"):
            server.check()
    assert isinstance(server, Running)
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/healthz", method="GET")


def test_the_command_serves_without_ray_and_ends_by_a_signal(folder, free_port, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from pipelines.__main__ import main; status = main(sys.argv[1:]);"]
    command[-1] += "print({'ray', 'mlflow'} & {*sys.modules}); sys.exit(status)"
    command += ["serve", str(folder / "base"), "--port", str(port)]
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables | {"VITRAY_SERVE_TOKEN": TOKEN, "VITRAY_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == f"serving http://127.0.0.1:{port}   (Ctrl-C ends it)\n"
    assert ask(port, "/v1/predict", png())[0] == 401
    assert ask(port, "/v1/predict", png(), Authorization=f"Bearer {TOKEN}")[0] == 200
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "set()\n", "vitray: stopped\n")


@pytest.mark.parametrize(
    ("address", "replicas", "here"), [(None, (1, 1), True), (None, (2, 2), False), ("127.0.0.1:6379", (1, 1), False)]
)
def test_several_replicas_and_a_cluster_are_on_ray(monkeypatch, address, replicas, here):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert computes_here(Serving(base="b", replicas=replicas)) == here
