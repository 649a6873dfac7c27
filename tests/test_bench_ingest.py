"""The ingest benchmark's further modes: other formats, a slow object store, a slow consumer."""

import http.client
import http.server
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from pipelines.__main__ import main
from vitray.bench.ingest.formats import other_formats
from vitray.bench.ingest.latency import Proxy, copy_to_store
from vitray.bench.ingest.measuring import CROP
from vitray.config import ConfigError
from vitray.shards import open_dataset
from vitray.stream import Stream


@pytest.fixture(scope="module")
def demo(tmp_path_factory, ray_cluster) -> str:
    folder = str(tmp_path_factory.mktemp("bench") / "demo")
    assert main(["shard", "demo", folder, "images=200", "image_size=32", "val_share=0.1"]) == 0
    return folder


class Hello(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_):
        """Say nothing."""


def test_the_proxy_lets_every_request_wait():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = Proxy(server.server_port)
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port)
    try:
        for delay in (0.0, 0.3, 0.0):
            proxy.delay = delay
            start = time.perf_counter()
            for _ in range(3):
                connection.request("GET", "/")
                assert connection.getresponse().read() == b"hello"
            took = time.perf_counter() - start
            assert took > 0.9 if delay else took < 0.9
    finally:
        connection.close()
        proxy.close()
        server.shutdown()
        server.server_close()


@pytest.mark.ray
def test_files_left_in_place_are_not_copied(demo, tmp_path):
    dataset = open_dataset(demo)
    shard = dataset.splits["train"].shards[0].model_copy(update={"name": f"{demo}/elsewhere.parquet"})
    split = dataset.splits["train"].model_copy(update={"shards": (shard,)})
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "dataset.json").write_text(
        dataset.model_copy(update={"splits": {"train": split}}).model_dump_json()
    )
    with pytest.raises(ConfigError, match="left in place cannot be copied"):
        copy_to_store(str(tmp_path / "index"), "train", tmp_path)


@pytest.mark.ray
@pytest.mark.parametrize("library", ["webdataset", "streaming"])
@pytest.mark.filterwarnings("ignore")  # another library's
def test_another_format_gives_every_image_once(library, demo, tmp_path, monkeypatch):
    pytest.importorskip(
        library, reason=f"{library} is not installed: it is no dependency, `bench ingest` can do without"
    )
    stream = Stream(open_dataset(demo), "train", batch=20, size=(16, 16), crop=CROP)
    pipelines = other_formats(stream, 200, 2, tmp_path)
    name = {"webdataset": "webdataset", "streaming": "mosaicml-streaming"}[library]
    assert [sum(pipelines[name](epoch)) for epoch in range(2)] == [200, 200]


@pytest.mark.ray
def test_a_slow_store_needs_a_ray_of_its_own(demo, capsys):
    assert main(["bench", "ingest", demo, "--simulate-object-store-latency", "5"]) == 2
    assert "wanted no Ray running yet" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["--simulate-object-store-latency", "30", "--rounds", "1"], ["object store", "object store + 30 ms"]),
        (["--slow-consumer", "0.02", "--object-store", "100"], [None]),
    ],
)
def test_a_mode_that_starts_its_own_ray_measures(words, rows, demo, tmp_path):
    command = [sys.executable, "-m", "pipelines", "bench", "ingest", demo, "--image-size", "16", "--batch", "20"]
    done = subprocess.run([*command, *words, "--out", str(tmp_path), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row.get("pipeline") for row in found] == rows
    numbers = [value for row in found for value in row.values() if not isinstance(value, str)]
    assert np.isfinite(numbers).all()
