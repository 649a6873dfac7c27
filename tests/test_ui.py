"""MLflow's pages, opened by `vitray ui` in a real browser: the run, its numbers and its pictures are there."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

from vitray.tracking import Tracker, figures

pytestmark = pytest.mark.slow

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1600,1000"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The address of MLflow's pages of a folder in which one run was tracked, and that run's page."""
    folder = tmp_path_factory.mktemp("ui")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        with Tracker.begin(
            "a" * 32, "shown-run", "shown", {"optim.lr": 1e-3}, {}, "| a | table |\n|---|---|"
        ) as tracker:
            history = {
                "train/loss": [(step, 1 / (step + 1)) for step in range(20)],
                "val/top1": [(10, 0.5), (19, 0.75)],
            }
            for key, points in history.items():
                for step, value in points:
                    tracker.metrics(step, {key: value})
            tracker.figure("curves.png", figures.draw_curves(history))
            tracker.figure("confusion.png", figures.draw_confusion(np.eye(3, dtype=int) * 7, ["one", "two", "three"]))
            assert tracker.flush(120) is None
            run_id = tracker.run_id
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [sys.executable, "-m", "pipelines.ui", "--port", str(port)]
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        log = (folder / "log").open("w")
        server = subprocess.Popen(
            words, env=os.environ | {"PYTHONPATH": root}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_until_up(port, server, folder / "log")
            yield f"http://127.0.0.1:{port}", run_id, folder
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()
            log.close()


def _wait_until_up(port, server, log):
    for _ in range(1800):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())


def page(address, folder, wanted):
    """The page as the browser has built it, once it shows what is wanted."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "needs a browser, which `make test-full` installs"
    for patience in (20_000, 60_000):
        words = [
            browser,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--virtual-time-budget={patience}",
            "--dump-dom",
        ]
        done = subprocess.run([*words, address], capture_output=True, text=True, timeout=240, check=True)
        if all(word in done.stdout for word in wanted):
            break
    return done.stdout


def test_the_run_is_in_the_list(pages):
    address, _, folder = pages
    assert "shown-run" in page(f"{address}/#/experiments/1/runs", folder, ["shown-run"])


def test_the_run_shows_its_numbers_and_its_description(pages):
    address, run_id, folder = pages
    wanted = ["shown-run", "val/top1", "0.75", "optim.lr"]
    found = page(f"{address}/#/experiments/1/runs/{run_id}", folder, wanted)
    assert [word for word in wanted if word not in found] == []


def test_the_run_shows_its_figures(pages):
    address, run_id, folder = pages
    found = page(
        f"{address}/#/experiments/1/runs/{run_id}/artifacts/curves.png", folder, ["curves.png", "confusion.png"]
    )
    assert "curves.png" in found
    assert "confusion.png" in found
