"""MLflow's pages, opened by `vitray ui` in a real browser: they show the run, its metrics and its figures."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

from vitray.tracking import figures
from vitray.tracking.tracker import TrackedRun, Tracker

pytestmark = pytest.mark.slow

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1600,1000"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The address of an MLflow server with one run, the id of the run, and the server's folder."""
    folder = tmp_path_factory.mktemp("ui")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("VITRAY_HOME", str(folder / "home"))
        tracked = TrackedRun("a" * 32, "shown-run", "shown")
        with Tracker(tracked, {"optim.lr": 1e-3}, {}, "| a | table |\n|---|---|") as tracker:
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
        command = [sys.executable, "-m", "pipelines.ui", "--port", str(port)]
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        log = (folder / "log").open("w")
        server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": root}, stdout=log, stderr=log)
        try:
            _wait_until_up(port, server, folder / "log")
            yield f"http://127.0.0.1:{port}", run_id, folder
        finally:
            server.terminate()
            server.wait()
            log.close()


def _wait_until_up(port, server, log):
    for _ in range(1800):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                if "open http" in log.read_text():
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def page(address, folder, expected):
    """Return the rendered page, once it contains the expected texts."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "needs a browser, which `make test-full` installs"
    for time_budget in (20_000, 60_000):
        options = [f"--user-data-dir={folder / 'profile'}", f"--virtual-time-budget={time_budget}", "--dump-dom"]
        done = subprocess.run(
            [browser, *FLAGS, *options, address], capture_output=True, text=True, timeout=240, check=True
        )
        if all(text in done.stdout for text in expected):
            break
    return done.stdout


def test_the_printed_page_lists_the_run(pages):
    address, _, folder = pages
    printed = re.search(r"open (\S+)", (folder / "log").read_text())[1]
    assert printed == f"{address}/#/experiments/1/runs?workflowType=machine_learning"
    assert "shown-run" in page(printed, folder, ["shown-run"])


def test_the_run_shows_its_metrics_and_its_description(pages):
    address, run_id, folder = pages
    expected = ["shown-run", "val/top1", "0.75", "optim.lr"]
    html = page(f"{address}/#/experiments/1/runs/{run_id}", folder, expected)
    assert [text for text in expected if text not in html] == []


def test_the_run_shows_its_figures(pages):
    address, run_id, folder = pages
    html = page(
        f"{address}/#/experiments/1/runs/{run_id}/artifacts/curves.png", folder, ["curves.png", "confusion.png"]
    )
    assert "curves.png" in html
    assert "confusion.png" in html
