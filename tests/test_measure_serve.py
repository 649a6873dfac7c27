"""experiments/measure_serve.py: its table, and the load that it makes."""

import base64
import http.server
import json
import sys
import threading
import time

import pytest
from test_layers import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
from measure_serve import HttpRequest, Server, clients, jpeg, loads, main, medians

MODEL = "vit_u2x1_8"


def test_a_row_holds_medians_over_rounds_and_sums_of_requests():
    results = [
        {"requests_per_second": speed, "p50_ms": 1.0, "p99_ms": 9.0, "requests": 10, "errors": 1}
        for speed in (5.0, 7, 30)
    ]
    [row] = medians({("vitray serve, 1 task", 8): results})
    assert (row["server"], row["clients"], row["requests_per_second"]) == ("vitray serve, 1 task", 8, 7)
    assert (row["requests"], row["errors"]) == (30, 3)


def test_requests_go_to_each_server_in_its_own_form():
    addresses = ["http://vitray", "http://here", "http://family", "http://one", "http://two"]
    servers = [Server(None, url) for url in addresses]
    picture = jpeg(0, (32, 32))
    draws = loads(3, [picture], servers)
    assert list(draws) == [
        "vitray serve, 1 task",
        "vitray serve, 3 tasks",
        "vitray serve, one process, 1 task",
        "vitray serve, one process, 3 tasks",
        "mlflow models serve, 1 task",
        "mlflow models serve, 3 tasks",
        "a process per model, 2 models",
    ]
    asked = {name: [draw() for _ in range(60)] for name, draw in draws.items()}
    assert {ask.url for ask in asked["vitray serve, 1 task"]} == {"http://vitray/v1/predict?task=t0&top_k=5"}
    assert len({ask.url for ask in asked["vitray serve, 3 tasks"]}) == 3
    assert asked["vitray serve, 1 task"][0].body == picture
    [record] = json.loads(asked["mlflow models serve, 1 task"][0].body)["dataframe_records"]
    assert (record["task"], base64.b64decode(record["image"])) == ("t0", picture)
    assert len({ask.body for ask in asked["mlflow models serve, 3 tasks"]}) == 3
    assert [ask.url for ask in asked["a process per model, 2 models"][:2]] == [
        f"{url}/invocations" for url in addresses[3:]
    ]


class Answers(http.server.BaseHTTPRequestHandler):
    """A server that answers all but every fifth request."""

    protocol_version = "HTTP/1.1"
    count = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        with Answers.lock:
            Answers.count += 1
            is_fifth = Answers.count % 5 == 0
        self.send_response(503 if is_fifth else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def test_the_clients_count_answers_and_errors():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ask = HttpRequest(f"http://127.0.0.1:{server.server_port}/v1/predict?task=a", b"body", "image/png")
        with clients(3, lambda: ask) as load:
            while len(load.seconds) < 20:
                time.sleep(0.01)
        server.shutdown()
    row = load.row(2.0)
    assert len(load.seconds) + len(load.errors) == Answers.count
    assert len(load.errors) == Answers.count // 5
    assert row["requests_per_second"] == len(load.seconds) / 2
    assert row["errors"] == len(load.errors)
    assert 0 < row["p50_ms"] <= row["p99_ms"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_load_test_compares_servers_and_loses_no_request(tmp_path):
    sizes = ["--deltas=5", "--processes=1", "--image-size=32", "--seconds=2", "--rounds=1"]
    result = main(["--model", MODEL, *sizes, "--concurrency", "1", "4", "--out", str(tmp_path)])
    assert len(result["rows"]) == 14
    assert {row["errors"] for row in result["rows"]} == {0}
    assert all(row["requests"] > 0 for row in result["rows"])
    assert result["lost"] == 0
    assert result["answered"] > 0
