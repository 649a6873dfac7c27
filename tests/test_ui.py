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

from vitray.data.augment.contact_sheets import Prediction, prediction_sheet
from vitray.system.host_facts import SystemSampler
from vitray.tracking import figures
from vitray.tracking.lineage import ModelScores, TrackedDataset
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
        patch.setattr(sys, "argv", ["/bin/vitray", "train", "recipe.yaml"])
        tracked = TrackedRun("a" * 32, "shown-run", "shown")
        facts = {"git.commit": "c0ffee1234567890"}
        with Tracker(tracked, {"optim.lr": 1e-3}, facts, "| a | table |\n|---|---|") as tracker:
            train = TrackedDataset("demo/train", "1d" * 32, "/data/demo", "training", 4000, 10)
            val = TrackedDataset("demo/val", "2e" * 32, "/data/demo", "validation", 500, 10)
            tracker.datasets([train, val])
            history = {
                "train/loss": [(step, 1 / (step + 1)) for step in range(20)],
                "val/top1": [(10, 0.5), (19, 0.75)],
            }
            for key, points in history.items():
                for step, value in points:
                    tracker.metrics(step, {key: value})
            sampler, pixels = SystemSampler(), np.zeros((32, 32, 3), np.uint8)
            known = Prediction(pixels, "one", None, 0.5, np.ones((4, 4)))
            tracker.image("examples/predictions", 0, prediction_sheet([known] * 3, "step 0"))  # as a run does
            for step in (10, 19):
                tracker.metrics(step, sampler.sample())
                example = Prediction(pixels + step, "one", "two", 0.5, np.ones((4, 4)))
                tracker.image("examples/predictions", step, prediction_sheet([example] * 3, f"step {step}"))
                scores = ModelScores(step, {"val/top1": dict(history["val/top1"])[step]}, val)
                tracker.checkpoint(f"/runs/shown/checkpoints/step-{step:08d}", "vit-best", scores)
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
    for time_budget in (20_000, 60_000, 120_000):
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
    html = page(printed, folder, ["shown-run"])
    assert "shown-run" in html
    assert "Model training" in html
    assert "Judges" not in html, "of the pages of language models"


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


def test_the_run_shows_its_datasets_its_source_and_its_best_checkpoint(pages):
    address, run_id, folder = pages
    expected = ["demo/train", "demo/val", "vitray train", "c0ffee", "vit-best"]
    html = page(f"{address}/#/experiments/1/runs/{run_id}?workflowType=machine_learning", folder, expected)
    assert [text for text in expected if text not in html] == []
    assert "Judges" not in html, "of the pages of language models"


def test_the_run_shows_system_metrics_under_mlflows_names(pages):
    address, run_id, folder = pages
    expected = ["cpu_utilization_percentage", "disk_usage_megabytes"]
    html = page(f"{address}/#/experiments/1/runs/{run_id}/system-metrics", folder, expected)
    assert [text for text in expected if text not in html] == []
    assert "system/system/" not in html


def test_the_run_shows_its_example_pictures_by_step(pages):
    address, run_id, folder = pages
    # The address of the picture at which the grid opens.
    expected = ["examples/predictions", "Step", "examples~predictions%2Bstep%2B0%2B"]
    html = page(f"{address}/#/experiments/1/runs/{run_id}/model-metrics", folder, expected)
    assert [text for text in expected if text not in html] == []
