"""Files on a path and on a real S3 server: the same calls, whole or not at all."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from vitray import storage
from vitray.config import Model, Run
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.weights import load_model, save_model


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path, s3_server) -> str:
    """An empty folder of either kind."""
    if request.param == "local":
        return str(tmp_path / "folder")
    return f"s3://bucket/{tmp_path.name}/folder"


def test_what_is_written_is_read(place):
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


def test_what_is_absent_is_said(place):
    with pytest.raises(ConfigError, match=r"absent.bin: no such file"):
        storage.read_bytes(storage.join(place, "absent.bin"))
    with pytest.raises(ConfigError, match=r"absent.bin: no such file"), storage.local_copy(f"{place}/absent.bin"):
        pass


def test_a_server_that_is_away_for_a_moment_is_waited_for(s3_server, tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "here").write_bytes(b"content")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    words = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "KEY,SECRET", "--config", os.devnull]
    words += ["--vfs-cache-mode", "off"]
    servers = []

    def come_back():
        time.sleep(2)
        servers.append(subprocess.Popen([Path(sys.executable).with_name("rclone"), *words, tmp_path]))

    storage._s3.cache_clear()
    coming = threading.Thread(target=come_back)
    coming.start()
    try:
        assert storage.read_bytes("s3://bucket/here") == b"content"
    finally:
        coming.join()
        servers[0].terminate()
        servers[0].wait()
        storage._s3.cache_clear()


def test_uploads_that_were_never_completed_are_aborted(monkeypatch):
    """On a simulated AWS, since the server of the other tests does not list them."""
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
        left = client.list_multipart_uploads(Bucket="bucket")["Uploads"]
        assert [upload["Key"] for upload in left] == ["runs/one-more/model"]
        assert storage.abort_uploads("s3://nowhere/runs/one") == 0
    assert storage.abort_uploads("/a/path") == 0


def test_a_mistyped_bucket_is_said_and_not_created(s3_server):
    with pytest.raises(ConfigError, match="s3://mistyped/a"):
        storage.write_bytes("s3://mistyped/a", b"x")
    assert not (s3_server / "mistyped").exists()


def test_other_addresses_are_refused():
    with pytest.raises(ConfigError, match="gs://bucket/x: wanted a path or s3://bucket/key"):
        storage.read_bytes("gs://bucket/x")


def test_an_address_with_a_secret_in_it_is_refused_and_not_repeated():
    for url in ("s3://key:canary@bucket/a", "s3://bucket/a?access_key=canary"):
        with pytest.raises(ConfigError) as error:
            storage.exists(url)
        assert "canary" not in str(error.value)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    storage.write_bytes(str(target), b"old")

    def full_disk(aside, final):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(ConfigError, match="file: no space left"):
        storage.write_bytes(str(target), b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_model_folder_lives_anywhere(place):
    vit = ViT(Model(name="vit_u2x2_8", image_size=32, num_classes=3)).eval()
    save_model(place, Run(model=vit.model), vit, ["a", "b", "c"])
    assert storage.list_files(place) == ["classes.json", "model.safetensors", "run.yaml"]
    loaded = load_model(place)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded.vit(images), vit(images))
    assert loaded.classes == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="a model is there already"):
        save_model(place, Run(model=vit.model), vit)


def test_a_file_is_created_whole_or_not_at_all(place):
    url = storage.join(place, "made.bin")
    with storage.created(url) as path:
        path.write_bytes(b"whole")
        assert not storage.exists(url)
    assert storage.read_bytes(url) == b"whole"

    def fail_half_way():
        with storage.created(storage.join(place, "half.bin")) as path:
            path.write_bytes(b"half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail_half_way()
    assert storage.file_sizes(place) == {"made.bin": 5}


def test_parts_are_read_and_files_removed(place):
    for name in ("a.bin", "b/c.bin", "b/d.bin"):
        storage.write_bytes(storage.join(place, name), b"0123456789")
    assert storage.read_range(storage.join(place, "b/c.bin"), 3, 4) == b"3456"
    storage.remove(storage.join(place, "a.bin"))
    assert storage.list_files(place) == ["b/c.bin", "b/d.bin"]
    storage.remove(storage.join(place, "b"))
    storage.remove(storage.join(place, "never there"))
    assert storage.list_files(place) == []
