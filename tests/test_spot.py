"""The poller of a spot node; tests/test_faults.py has a run that leaves its node."""

import os
import signal
import threading
import time

import pytest
from ec2_metadata import Metadata

from vitray.cluster import spot


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(spot, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_ec2_announces_the_end_of_an_instance(monkeypatch):
    server = Metadata(0, 120, quiet=3)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    try:
        assert 110 < spot.wait_for_notice(None, 30) <= 120
        assert server.quiet == -1  # the fourth question
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_file_announces_the_end_elsewhere(tmp_path):
    threading.Timer(0.3, (tmp_path / "notice").touch).start()
    began = time.monotonic()
    assert spot.wait_for_notice(tmp_path / "notice", 25) == 25
    assert time.monotonic() - began >= 0.3


def test_a_signal_announces_the_end_elsewhere(tmp_path):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    assert spot.wait_for_notice(tmp_path / "none", 25) == 25


def test_the_notice_reaches_ray(monkeypatch, tmp_path, capsys):
    drained = []
    monkeypatch.setattr(spot, "drain", drained.append)
    (tmp_path / "notice").touch()
    spot.main(["--file", str(tmp_path / "notice"), "--seconds", "40"])
    assert drained == [40]
    assert capsys.readouterr().err == "vitray: this node ends in 40 s; its runs leave it\n"
