"""`vitray.MLflowCallback`: a job of Ray Train is one run of MLflow, whatever fails.

The tests are what people have reported of other integrations: ray#48664 (a run for each restart), #33246 (nested
settings crash), #46569 and #47903 (no checkpoints, no tags of the system), #64253 (a run that stays RUNNING).
"""

import json
import shutil
import threading
import time
from contextlib import suppress

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from test_tracking import Server

from vitray import ConfigError, MLflowCallback

pytestmark = pytest.mark.ray


@pytest.fixture
def store(tmp_path, monkeypatch, migrated, ray_cluster):
    shutil.copy(migrated, tmp_path / "mlruns.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    return mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlruns.db'}")


def training():
    """Return a loop that a worker gets by value."""

    def train(config):
        """Report six steps; the first try ends with an error after the third, unless the job is to fail always."""
        import json
        import tempfile
        from pathlib import Path

        import ray.train
        from ray.train import Checkpoint

        restored, first = ray.train.get_checkpoint(), 1
        if restored:
            with restored.as_directory() as folder:
                first = json.loads((Path(folder) / "step.json").read_text()) + 1
        for step in range(first, 7):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "step.json").write_text(json.dumps(step))
                saved = Checkpoint.from_directory(folder) if step % 2 == 0 else None
                values = {"step": step, "train": {"loss": 1 / step, "lr": 0.1}, "note": "text"}
                ray.train.report(values, checkpoint=saved)
            if step == 3 and (restored is None or config["always"]):
                raise ValueError("a worker fails")

    return train


def fit(tracking, folder, *, always=False, failures=1):
    run = RunConfig(
        name="job", storage_path=str(folder), callbacks=[tracking], failure_config=FailureConfig(max_failures=failures)
    )
    config, scaling = {"always": always}, ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1})
    return TorchTrainer(training(), train_loop_config=config, scaling_config=scaling, run_config=run).fit()


def runs_of(store, experiment):
    return store.search_runs([store.get_experiment_by_name(experiment).experiment_id])


def test_a_job_is_one_run_through_the_failure_of_a_worker(store, tmp_path):
    params = {"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "name": "x"}
    with MLflowCallback("photos", "first", params=params, tags={"team": "us"}, description="A *job*.") as tracking:
        fit(tracking, tmp_path / "out")
    [run] = runs_of(store, "photos")
    assert run.info.run_id == tracking.run_id
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"optim.lr": "0.1", "optim.betas": json.dumps([0.9, 0.95]), "name": "x"}
    losses = store.get_metric_history(run.info.run_id, "train/loss")
    assert {point.step: point.value for point in losses} == {step: 1 / step for step in range(1, 7)}
    assert len(losses) == 6
    assert {"team", "ray.job", "mlflow.user", "mlflow.source.name"} <= run.data.tags.keys()
    assert run.data.tags["mlflow.note.content"].startswith("A *job*.")
    assert (run.data.tags["ray.failures"], run.data.tags["ray.checkpoint_step"]) == ("1", "6")
    assert "a worker fails" in run.data.tags["ray.last_failure"]
    assert str(tmp_path / "out" / "job") in run.data.tags["ray.checkpoint"]
    assert "system/cpu_utilization_percentage" in run.data.metrics


@pytest.mark.slow
def test_a_job_that_fails_is_failed_and_the_same_name_goes_on(store, tmp_path):
    with pytest.raises(Exception, match="a worker fails"), MLflowCallback("photos", "second") as tracking:
        fit(tracking, tmp_path / "out", always=True, failures=0)
    [run] = runs_of(store, "photos")
    assert run.info.status == "FAILED"
    assert "a worker fails" in run.data.tags["vitray.reason"]
    with MLflowCallback("photos", "second") as tracking:
        fit(tracking, tmp_path / "out")
    [run] = runs_of(store, "photos")
    assert run.info.status == "FINISHED"
    steps = [point.step for point in store.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(steps) == list(range(1, 7))


@pytest.mark.slow
def test_records_wait_while_mlflow_is_away(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with MLflowCallback("photos", "away") as tracking:
        fit(tracking, tmp_path / "out")
    assert "`vitray sync` sends them" in caplog.text


def two_workers():
    """Return a loop of two workers, which report eight steps each; the fourth waits for a file."""

    def train(config):
        import time
        from pathlib import Path

        import ray.train

        rank = ray.train.get_context().get_world_rank()
        for step in range(1, 9):
            ray.train.report({"step": step, "loss": step + rank / 2})
            for _ in range(1800):  # bounded, as the test's own limit does not reach a job of Ray
                if step != 4 or Path(config["goes_on"]).exists():
                    break
                time.sleep(0.1)

    return train


@pytest.fixture
def server(tmp_path, migrated, monkeypatch):
    """An MLflow server, running, to which the jobs of a test log."""
    shutil.copy(migrated, tmp_path / "mlruns.db")
    server = Server(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    server.start()
    try:
        yield server
    finally:
        if server.process is not None:
            server.kill()


@pytest.mark.slow
def test_a_server_that_ends_in_a_job_of_two_workers_gets_every_step(server, tmp_path, ray_cluster):
    goes_on, store = tmp_path / "goes on", mlflow.MlflowClient(server.uri)

    def is_logged():
        with suppress(MlflowException):  # on a busy machine an answer takes longer than the two seconds
            known = store.get_experiment_by_name("photos")
            return known and any("loss" in run.data.metrics for run in store.search_runs([known.experiment_id]))

    def end_and_start():
        while not is_logged():
            time.sleep(0.2)
        server.kill()
        goes_on.touch()
        time.sleep(5)  # the job ends its steps meanwhile
        server.start()

    watcher = threading.Thread(target=end_and_start, daemon=True)
    watcher.start()
    run = RunConfig(
        name="job", storage_path=str(tmp_path / "out"), callbacks=[(tracking := MLflowCallback("photos", "two"))]
    )
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    with tracking:
        TorchTrainer(
            two_workers(), train_loop_config={"goes_on": str(goes_on)}, scaling_config=scaling, run_config=run
        ).fit()
        watcher.join()
    [logged] = runs_of(store, "photos")
    assert logged.info.status == "FINISHED"
    losses = store.get_metric_history(logged.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in losses) == [(step, float(step)) for step in range(1, 9)]


def test_its_use_outside_of_its_block_is_refused(store):
    with pytest.raises(ConfigError, match="use it in its block"):
        MLflowCallback("photos", "third").__getstate__()
