"""Storage on a local path and on a real S3 server: same functions, atomic writes."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from vitray.config import Model, Run
from vitray.errors import ConfigError, RunError
from vitray.models.vit import ViT
from vitray.system import scratch, storage
from vitray.weights import load_model, save_model


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path, s3_server) -> str:
    """An empty folder, local or on S3."""
    if request.param == "local":
        return str(tmp_path / "folder")
    return f"s3://bucket/{tmp_path.name}/folder"


def test_written_files_are_read_back(place):
    url = storage.join(place, "a", "b.bin")
    assert not storage.exists(url)
    assert storage.list_files(place) == []
    for content in (b"one", b"", b"x" * 200_000):
        storage.write_bytes(url, content)
        assert storage.read_bytes(url) == content
    storage.write_bytes(storage.join(place, "c.bin"), b"two")
    assert storage.exists(url)
    assert storage.list_files(place) == ["a/b.bin", "c.bin"]


def test_files_are_uploaded_and_copied_back(place, tmp_path):
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(range(256)) * 1000)
    url = storage.join(place, "target.bin")
    storage.upload(source, url)
    with storage.local_copy(url) as copy:
        assert copy.read_bytes() == source.read_bytes()
    assert storage.list_files(place) == ["target.bin"]


def test_a_missing_file_is_named(place):
    with pytest.raises(ConfigError, match=r"absent.bin: no such file"):
        storage.read_bytes(storage.join(place, "absent.bin"))
    with pytest.raises(ConfigError, match=r"absent.bin: no such file"), storage.local_copy(f"{place}/absent.bin"):
        pass


def test_a_short_server_outage_is_retried(s3_server, tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "here").write_bytes(b"content")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    args = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "KEY,SECRET", "--config", os.devnull]
    args += ["--vfs-cache-mode", "off"]
    servers = []

    def restart():
        time.sleep(2)
        servers.append(subprocess.Popen([Path(sys.executable).with_name("rclone"), *args, tmp_path]))

    storage._s3.cache_clear()
    restarting = threading.Thread(target=restart)
    restarting.start()
    try:
        assert storage.read_bytes("s3://bucket/here") == b"content"
    finally:
        restarting.join()
        servers[0].terminate()
        servers[0].wait()
        storage._s3.cache_clear()


def test_incomplete_uploads_are_aborted(monkeypatch):
    """On a simulated AWS, because the S3 server of the other tests cannot list uploads."""
    import boto3
    from moto import mock_aws

    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        for key in ("runs/one/model", "runs/one/a/b", "runs/one-more/model"):
            client.create_multipart_upload(Bucket="bucket", Key=key)
        assert storage.abort_uploads("s3://bucket/runs/one") == 2
        remaining = client.list_multipart_uploads(Bucket="bucket")["Uploads"]
        assert [upload["Key"] for upload in remaining] == ["runs/one-more/model"]
        assert storage.abort_uploads("s3://nowhere/runs/one") == 0
    assert storage.abort_uploads("/a/path") == 0


def test_a_mistyped_bucket_is_named_and_not_created(s3_server):
    with pytest.raises(ConfigError, match="s3://mistyped/a"):
        storage.write_bytes("s3://mistyped/a", b"x")
    assert not (s3_server / "mistyped").exists()


def test_other_address_schemes_are_rejected():
    with pytest.raises(ConfigError, match="gs://bucket/x: expected a path or s3://bucket/key"):
        storage.read_bytes("gs://bucket/x")


def test_an_address_with_a_secret_is_rejected_without_repeating_it():
    for url in ("s3://key:canary@bucket/a", "s3://bucket/a?access_key=canary"):
        with pytest.raises(ConfigError) as error:
            storage.exists(url)
        assert "canary" not in str(error.value)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    storage.write_bytes(str(target), b"old")

    def full_disk(temporary, final):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(ConfigError, match="file: no space left"):
        storage.write_bytes(str(target), b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_model_folder_is_saved_and_loaded_on_both_storages(place):
    vit = ViT(Model(name="vit_u2x2_8", image_size=32, num_classes=3)).eval()
    save_model(place, Run(model=vit.model), vit, ["a", "b", "c"])
    assert storage.list_files(place) == ["classes.json", "model.safetensors", "run.yaml"]
    loaded = load_model(place)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded.vit(images), vit(images))
    assert loaded.classes == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="a model is there already"):
        save_model(place, Run(model=vit.model), vit)


def test_a_file_is_created_atomically(place):
    url = storage.join(place, "made.bin")
    with storage.atomic_write(url) as path:
        path.write_bytes(b"whole")
        assert not storage.exists(url)
    assert storage.read_bytes(url) == b"whole"

    def fail_during_write():
        with storage.atomic_write(storage.join(place, "half.bin")) as path:
            path.write_bytes(b"half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail_during_write()
    assert storage.file_sizes(place) == {"made.bin": 5}


def test_a_temporary_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    code = (
        "import sys, time; from vitray.system.storage import scratch_folder\n"
        "with scratch_folder() as folder:\n    (folder / 'file').touch(); print(folder, flush=True); sys.stdin.read()"
    )

    def start():
        environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
        return process, Path(process.stdout.readline().strip())

    killed, left = start()
    killed.kill()
    killed.communicate()
    assert (left / "file").exists()
    (other := tmp_path / "vitray-other").mkdir()  # nobody's, and without a lock
    (tmp_path / "vitray-link").symlink_to(left)
    living, kept = start()
    assert not left.exists()
    last, _ = start()
    assert (kept / "file").exists(), "its process lives"
    for process in (living, last):
        process.communicate("")
    assert {path.name for path in tmp_path.iterdir()} == {other.name, "vitray-link"}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_temporary_folder_needs_no_locks(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(scratch.fcntl, "flock", flock)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with storage.scratch_folder() as folder:
        scratch._remove_abandoned.__wrapped__()  # as another process does
        assert folder.is_dir(), "a folder without a lock may be in use"
    assert not folder.exists()


def test_ranges_are_read_and_files_removed(place):
    for name in ("a.bin", "b/c.bin", "b/d.bin"):
        storage.write_bytes(storage.join(place, name), b"0123456789")
    assert storage.read_range(storage.join(place, "b/c.bin"), 3, 4) == b"3456"
    storage.remove(storage.join(place, "a.bin"))
    assert storage.list_files(place) == ["b/c.bin", "b/d.bin"]
    storage.remove(storage.join(place, "b"))
    storage.remove(storage.join(place, "never there"))
    assert storage.list_files(place) == []


def test_a_full_disk_is_named_by_the_address_and_not_by_a_temporary_file(tmp_path):
    url = str(tmp_path / "runs/first/model")
    with pytest.raises(ConfigError) as error, storage.atomic_write(url) as temporary:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/scratch/model", None, str(temporary))
    assert str(error.value) == f"{url}: No space left on device"


@pytest.mark.parametrize("text", ["[Errno 28] No space left on device", "Error: No space left on device (os error 28)"])
def test_a_full_temporary_folder_is_named_with_its_variable(text):
    with pytest.raises(ConfigError) as error, storage.scratch_folder() as folder:
        raise RuntimeError(f"{text}: {folder}/model.safetensors")
    assert str(error.value).startswith(f"TMPDIR: the temporary folder {tempfile.gettempdir()}: No space left on device")
    assert folder.name not in str(error.value)
    assert not folder.exists()


def test_other_errors_pass_a_temporary_folder_unchanged():
    full = "s3://bucket: No space left on device"
    for error in (ValueError("another"), ConfigError(full), RunError(full)):
        with pytest.raises(type(error), match=str(error)), storage.scratch_folder():
            raise error
