"""`vitray bench family` and `vitray bench serve`: their tables, and the load that the second one makes."""

import csv
import http.server
import threading
import time
from pathlib import Path

import pytest
import torch

from vitray.bench.families import FamilySettings, build_family, measure_family
from vitray.bench.http_load import Ask, clients
from vitray.bench.servers import ServeSettings, measure_serve
from vitray.config import load_run

MODEL = "vit_u2x1_8"


def test_the_table_of_a_family_has_all_variants_and_the_bytes(tmp_path, capsys):
    result = measure_family(FamilySettings(MODEL, deltas=3, batch=4, image_size=32, rounds=2, out=tmp_path))
    rows = {row["variant"]: row for row in result["rows"]}
    assert list(rows) == ["one model", "family, one task", "family, mixed", "family, task by task"]
    assert rows["one model"]["ratio"] == 1
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in result["rows"])
    [table] = result["files"]
    with Path(table).open() as file:
        assert [row["variant"] for row in csv.DictReader(file)] == list(rows)
    family = build_family(load_run(None, [f"model.name={MODEL}", "model.image_size=32"]), 3, torch.device("cpu"))
    attention = sum(tensor.nbytes for name, tensor in family.base.items() if ".attn" in name)
    assert result["bytes"] == sum(tensor.nbytes for tensor in family.base.values()) + 3 * attention
    assert "memory:" in capsys.readouterr().out


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
        ask = Ask(f"http://127.0.0.1:{server.server_port}/v1/predict?task=a", b"body", "image/png")
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
    settings = ServeSettings(MODEL, deltas=5, processes=1, concurrency=[1, 4], image_size=32, seconds=2, rounds=1)
    result = measure_serve(settings._replace(out=tmp_path))
    assert len(result["rows"]) == 8
    assert {row["errors"] for row in result["rows"]} == {0}
    assert all(row["requests"] > 0 for row in result["rows"])
    assert result["lost"] == 0
    assert result["answered"] > 0
