"""Tracking with real MLflow: an embedded store, and a server that is killed, stopped and restarted."""

import fcntl
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import EndpointConnectionError
from hosts import until

from pipelines import sync, ui
from vitray.errors import ConfigError, RunError, one_line, redact, redact_uri
from vitray.system import host_facts, mlflow_client, processes, storage
from vitray.system.mlflow_client import open_client, tracking_uri
from vitray.tracking import model_registry, tracker, ui_server, upload
from vitray.tracking.model_registry import PROMOTION_TAG, VersionScore
from vitray.tracking.spool import Spool, now, spool_dir
from vitray.tracking.tracker import TrackedRun, Tracker
from vitray.tracking.upload import Uploader, close_dead_runs, flush_all
from vitray.weights.addresses import FOLDER_TAG

EXPERIMENT = "vitray"
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, migrated) -> Path:
    """A working folder with an embedded store and its own spools."""
    shutil.copy(migrated, tmp_path / "mlruns.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracker, "END_TIMEOUTS", {"FINISHED": (30, 3), "FAILED": (30, 3), "KILLED": (30, 3)})
    return tmp_path


class Server:
    """An `mlflow server` that a test can kill, stop and restart; its store persists."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = folder
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'mlruns.db'}"]
        store += ["--artifacts-destination", str(self.folder / "artifacts"), "--workers", "1"]
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), *store]
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        log = self.folder / "log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | settings, start_new_session=True
            )
        for _ in range(1800):
            assert self.process.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                # Its first answer from the store takes seconds on a busy machine, and clients of tests wait for two.
                first = "api/2.0/mlflow/experiments/search?max_results=1"
                urllib.request.urlopen(f"{self.uri}/{first}", timeout=60).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"no server within three minutes: {log.read_text()}")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()
        self.process = None


@pytest.fixture(scope="session")
def one_server(tmp_path_factory, migrated) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(migrated, folder / "mlruns.db")
    server = Server(folder)
    try:
        yield server
    finally:
        if server.process is not None:
            server.kill()


@pytest.fixture
def address(one_server, monkeypatch) -> Server:
    """A server, perhaps not started, in MLFLOW_TRACKING_URI with a password."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", one_server.uri.replace("://", "://somebody:geheim@"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    return one_server


@pytest.fixture
def server(address) -> Server:
    """The server, running."""
    if address.process is None:
        address.start()
    return address


def begin(uid="u1", name="run", params=None, tags=None, description="# a run", parent=None, starts=1):
    run = TrackedRun(uid, name, EXPERIMENT, parent, starts)
    return Tracker(run, params or {"optim.lr": 1e-3}, tags or {}, description)


def runs(uid="u1"):
    """Return the MLflow runs of a uid."""
    client = open_client(tracking_uri())
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return client.search_runs([experiment.experiment_id], f"tags.`vitray.uid` = '{uid}'") if experiment else []


def the_run(uid="u1"):
    (run,) = runs(uid)
    return run


def points(key, uid="u1"):
    history = open_client(tracking_uri()).get_metric_history(the_run(uid).info.run_id, key)
    return [(metric.step, metric.value) for metric in history]


def spools():
    return sorted(path.name for path in spool_dir().glob("*"))


def _wait_until_released():
    """Wait for the upload thread of an ended run to release its spool."""
    for name in spools():
        Spool(spool_dir() / name, timeout=60).close()


# The spool


def test_an_incomplete_last_line_is_cut_off(tmp_path):
    spool = Spool(tmp_path / "j")
    spool.append({"step": 1})
    spool.close()
    with (tmp_path / "j" / "records.jsonl").open("ab") as file:
        file.write(b'{"step": 2')
    spool = Spool(tmp_path / "j")
    spool.append({"step": 3})
    assert [record.body for record in spool.records()] == [{"step": 1}, {"step": 3}]
    spool.close()


def test_a_file_of_a_record_lies_in_its_spool(tmp_path):
    spool = Spool(tmp_path / "j")
    assert spool.stored(spool.store_file("a.png", b"1")).read_bytes() == b"1"
    (tmp_path / "key").write_text("secret")
    (tmp_path / "j" / "artifacts" / "link").symlink_to(tmp_path / "key")
    for name in (str(tmp_path / "key"), "../key", "artifacts/link", "records.jsonl"):
        assert spool.stored(name) is None
    spool.close()


def test_a_record_that_a_full_disk_cut_short_is_overwritten(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "j")
    pwrite = os.pwrite
    failures = iter(
        [lambda *to: pwrite(to[0], to[1][:5], to[2]), lambda *_: (_ for _ in ()).throw(OSError("no space"))]
    )
    monkeypatch.setattr(os, "pwrite", lambda *to: next(failures, pwrite)(*to))
    with pytest.raises(OSError, match="no space"):
        spool.append({"step": "a long one"})
    spool.append({"s": 1})
    spool.close()
    spool = Spool(tmp_path / "j")
    assert [record.body for record in spool.records()] == [{"s": 1}]
    spool.close()


def test_records_are_read_from_the_end_of_any_other_and_a_malformed_one_is_empty(tmp_path):
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "records.jsonl").write_bytes(b'{"a": 1}\n{"b": \n[1]\n{"c": 1}\n')
    spool = Spool(tmp_path / "j")
    records = list(spool.records())
    assert [record.body for record in records] == [{"a": 1}, {}, {}, {"c": 1}]
    for place, record in enumerate(records):
        assert list(spool.records(record.end)) == records[place + 1 :]
    spool.close()


def test_one_process_at_a_time_opens_a_spool(tmp_path):
    spool = Spool(tmp_path / "j")
    with pytest.raises(BlockingIOError):
        Spool(tmp_path / "j")
    spool.close()
    Spool(tmp_path / "j").close()


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("http://me:secret@host:5000/a", "http://host:5000/a"),
        ("postgresql://me:p@ss@host/db?sslmode=on", "postgresql://host/db?sslmode=on"),
        ("postgresql://host/db?user=me&password=secret&x=1", "postgresql://host/db?user=me&password=...&x=1"),
        ("failed: https://token@host/path, mail me@host", "failed: https://host/path, mail me@host"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        (json.dumps('GET "http://t/api?token=abc" failed'), json.dumps('GET "http://t/api?token=..." failed')),
        (json.dumps("http://t/api?token=a\u00e9b\\c failed"), json.dumps("http://t/api?token=... failed")),
        ("https://h/a?x=1&access_token=abc&y=2", "https://h/a?x=1&access_token=...&y=2"),
        ("https://h/a?api_key=abc#b", "https://h/a?api_key=..."),
        ("https://h/a?apikey=abc", "https://h/a?apikey=..."),
        ("https://h/c?sv=1&sig=a%2Fb%3D&se=2", "https://h/c?sv=1&sig=...&se=2"),
        (
            "https://h/k?X-Amz-Credential=A%2F1&X-Amz-Signature=0f",
            "https://h/k?X-Amz-Credential=...&X-Amz-Signature=...",
        ),
        (
            "https://h/k?X-Amz-Security-Token=0f&AWSAccessKeyId=A",
            "https://h/k?X-Amz-Security-Token=...&AWSAccessKeyId=...",
        ),
        ("postgresql://host/db?sslpassword=a&sslkey=k", "postgresql://host/db?sslpassword=...&sslkey=k"),
        ("host=h password=a b=c", "host=h password=... b=c"),
        ("PASSWORD=a MLFLOW_TRACKING_PASSWORD=b HF_TOKEN=c", "PASSWORD=... MLFLOW_TRACKING_PASSWORD=... HF_TOKEN=..."),
        ("AWS_SECRET_ACCESS_KEY=a/b+c", "AWS_SECRET_ACCESS_KEY=..."),
        ("postgresql://me:pa/ss@host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://me:p@s/s@host/db", "postgresql://host/db"),
        ("no answer of me:pa/ss@host:5432/db", "no answer of host:5432/db"),
        (json.dumps({"store": "me:secret@host"}), json.dumps({"store": "host"})),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        *[(text, text) for text in ("model.class_token=false", "model.distillation_token=true")],
        ("models:/birds@champion runs:/a/b me@host 12:30", "models:/birds@champion runs:/a/b me@host 12:30"),
        ("rayproject/ray:2.60@sha256:0f git@host:a/b", "rayproject/ray:2.60@sha256:0f git@host:a/b"),
        (json.dumps({"a": "b:c", "d": "e@f"}), json.dumps({"a": "b:c", "d": "e@f"})),
    ],
)
def test_credentials_are_redacted(text, redacted):
    assert redact(text) == redacted


def test_a_shortened_error_shows_no_part_of_a_password():
    assert "secret" not in one_line(ValueError(f"{'x' * 1970} me:secret@host"))


# The embedded store


def test_the_default_store_is_in_the_working_folder(folder, monkeypatch):
    assert tracking_uri() == f"sqlite:///{folder}/mlruns.db"
    with begin() as run:
        run.text("notes/a.txt", "hello")
    assert (Path(the_run().info.artifact_uri) / "notes" / "a.txt").read_text() == "hello"
    assert the_run().info.artifact_uri.startswith(str(folder / "mlruns"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host:1")
    assert tracking_uri() == "http://me:secret@host:1"
    assert redact_uri(tracking_uri()) == "http://host:1"


def test_a_run_is_uploaded_completely(folder):
    with begin(params={"a": 1, "b": [0.9, 0.999], "c": None, "d": "text"}, tags={"git.commit": "abc"}) as run:
        for step in range(1500):
            run.metrics(step, {"train/loss": 1 / (step + 1), "train/lr": step})
        run.figure("figures/loss.png", b"first")
        run.figure("figures/loss.png", b"second")
        run.tag("stage", "late")
        run.describe("# the result")
    logged = the_run()
    assert logged.info.status == "FINISHED"
    assert logged.info.run_name == "run"
    assert logged.data.params == {"a": "1", "b": "[0.9, 0.999]", "c": "null", "d": "text"}
    assert logged.data.tags["mlflow.note.content"] == "# the result"
    assert logged.data.tags["mlflow.source.git.commit"] == "abc"
    assert logged.data.tags["stage"] == "late"
    assert points("train/loss") == [(step, 1 / (step + 1)) for step in range(1500)]
    assert (Path(logged.info.artifact_uri) / "figures" / "loss.png").read_bytes() == b"second"
    assert spools() == []


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("the loss is nan at step 7"), "FAILED", "ValueError: the loss is nan at step 7"),
        (KeyboardInterrupt(), "KILLED", "KeyboardInterrupt: stopped by Ctrl-C"),
        (SystemExit(15), "KILLED", "SystemExit: 15"),
        (SystemExit(0), "FINISHED", None),
    ],
)
def test_the_end_of_a_run_sets_its_status_and_reason(error, status, reason):
    with pytest.raises(type(error)), begin():
        raise error
    assert the_run().info.status == status
    assert the_run().data.tags.get("vitray.reason") == reason


def test_nan_and_infinities_are_uploaded():
    with begin() as run:
        run.metrics(1, {"nan": math.nan, "up": math.inf, "down": -math.inf, "top1@ema": 1})
    metrics = the_run().data.metrics
    assert math.isnan(metrics["nan"])
    assert (metrics["up"], metrics["down"]) == (sys.float_info.max, -sys.float_info.max)
    assert metrics["top1_ema"] == 1


@pytest.mark.parametrize("spool_remains", [True, False])
def test_a_resumed_run_continues_and_repeats_no_step(spool_remains):
    with suppress(ValueError), begin(params={"optim.lr": 1, "seed": 0}) as run:
        for step in range(10):
            run.metrics(step, {"train/loss": step})
        if not spool_remains:
            assert run.flush(30) is None
        raise ValueError("crash")
    first = the_run()
    assert (first.info.status, spools()) == ("FAILED", [])
    with begin(params={"optim.lr": 2, "seed": 0, "new": 1}) as run:
        assert run.flush(30) is None
        assert the_run().info.status == "RUNNING"
        for step in range(5, 15):
            run.metrics(step, {"train/loss": 100 + step, "val/top1": step})
    second = the_run()
    assert second.info.run_id == first.info.run_id
    assert (second.info.status, second.data.tags["vitray.reason"]) == ("FINISHED", "")
    assert points("train/loss") == [(step, step if step < 10 else 100 + step) for step in range(15)]
    assert points("val/top1") == [(step, step) for step in range(5, 15)]
    assert second.data.params == {"optim.lr": "1", "seed": "0", "new": "1"}
    assert second.data.tags["vitray.changed"] == "optim.lr: 1 -> 2"


def test_a_clock_that_is_set_back_leaves_the_end_of_the_resumed_run(monkeypatch):
    monkeypatch.setattr(tracker, "now", lambda: now() + 3_600_000)
    with suppress(KeyboardInterrupt), begin():
        raise KeyboardInterrupt
    assert the_run().info.status == "KILLED"
    monkeypatch.setattr(tracker, "now", now)
    with begin(starts=2, tags={"vitray.node": "other"}):
        pass
    run = the_run()
    assert (run.info.status, run.data.tags["vitray.reason"], run.data.tags["vitray.node"]) == ("FINISHED", "", "other")


def test_a_clock_that_is_set_back_delays_no_child_of_a_run(monkeypatch):
    monkeypatch.setattr(tracker, "END_TIMEOUTS", dict.fromkeys(tracker.END_TIMEOUTS, (0.0, 0.0)))
    store = tracking_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with begin("parent"):
        monkeypatch.setattr(tracker, "now", lambda: now() - 3_600_000)
        with begin("child", parent="parent"):
            pass
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    _wait_until_released()
    assert [(each.uid, each.state) for each in flush_all(store)] == [("parent", "complete"), ("child", "complete")]


def test_a_run_continued_elsewhere_keeps_its_status_and_gets_the_missing_records(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlruns.db")
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "here"))
    spool = Spool(spool_dir() / "u1")
    head = {"kind": "begin", "uid": "u1", "name": "run", "experiment": EXPERIMENT, "params": {}, "description": ""}
    clock_ahead = now() + 3_600_000
    spool.append({**head, "starts": 1, "time": clock_ahead, "tags": {}})
    for step in range(3):
        spool.append({"kind": "metrics", "time": 5, "step": step, "values": {"loss": step}})
    uploader = Uploader(spool, tracking_uri())
    while uploader.remaining:
        uploader.send_next()
    for step in range(3, 6):
        spool.append({"kind": "metrics", "time": 5, "step": step, "values": {"loss": step}})
    spool.append({"kind": "end", "time": now(), "status": "KILLED", "reason": "stopped"})
    spool.close()
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "there"))
    with begin(starts=2) as run:
        for step in range(5, 8):
            run.metrics(step, {"loss": -step})
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "here"))
    [waiting] = flush_all()  # an earlier version wrote the records, without their store
    assert (waiting.state, waiting.store) == ("waiting", None)
    assert "--to" in waiting.message
    with pytest.raises(ConfigError, match=r"no store recorded: the records of 1 of 1 runs .*; expected --to ADDRESS"):
        sync.main([])
    with pytest.raises(ConfigError, match="--to: got htp://there, expected an MLflow address"):
        sync.main(["--to", "htp://there"])
    assert [run.state for run in flush_all(tracking_uri())] == ["complete"]
    assert sorted(points("loss")) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, -5), (6, -6), (7, -7)]
    assert the_run().info.status == "FINISHED"


def test_uploading_again_from_any_record_changes_nothing(tmp_path):
    spool = Spool(spool_dir() / "u1")
    head = {"kind": "begin", "uid": "u1", "name": "run", "experiment": EXPERIMENT, "params": {"a": "1"}, "starts": 1}
    spool.append({**head, "time": now(), "tags": {"t": "1"}, "description": "text"})
    for step in range(4):
        spool.append({"kind": "metrics", "time": 5, "step": step, "values": {"loss": step}})
        spool.append({"kind": "tags", "time": 5, "tags": {"t": str(step)}})
    spool.append({"kind": "end", "time": now(), "status": "FINISHED", "reason": None})
    for batches in range(1, 12):
        # A kill between upload and cursor update: the cursor is one batch behind, or missing.
        uploader = Uploader(spool, tracking_uri())
        for _ in range(batches):
            before = spool.cursor
            if uploader.remaining or uploader.run_id is None:
                uploader.send_next()
        if before is not None and batches % 2:
            spool.set_cursor(before)
        else:
            (spool.folder / "mark").unlink()
    # A kill between the last upload and the removal of the spool: nothing remains.
    for _ in range(2):
        uploader = Uploader(spool, tracking_uri())
        while uploader.remaining:
            uploader.send_next()
    assert points("loss") == [(step, step) for step in range(4)]
    assert (the_run().info.status, the_run().data.tags["t"]) == ("FINISHED", "3")
    spool.close()


def test_a_lost_response_creates_no_second_run(monkeypatch):
    from mlflow import MlflowClient

    original, calls = MlflowClient.create_run, []

    def lose_response(*args):
        calls.append(original(*args))
        raise OSError("the response was lost")

    monkeypatch.setattr(MlflowClient, "create_run", lose_response)
    with begin() as run:
        run.metrics(1, {"loss": 1})
    assert len(calls) == 1
    assert points("loss") == [(1, 1)]


def test_a_duplicate_run_of_a_late_request_is_removed(monkeypatch):
    with begin() as run:
        run.metrics(1, {"loss": 1})
        assert run.flush(30) is None
        open_client(tracking_uri()).create_run(the_run().info.experiment_id, tags={"vitray.uid": "u1"})
        assert len(runs()) == 2
    assert points("loss") == [(1, 1)]


def test_a_run_is_nested_under_its_parent():
    with begin("u1", "sweep"), begin("u2", "trial", parent="u1"):
        pass
    assert the_run("u2").data.tags["mlflow.parentRunId"] == the_run("u1").info.run_id


def test_a_run_that_reached_mlflow_before_its_parent_is_nested_at_its_end():
    with begin("u2", "trial", parent="u1") as trial:
        assert trial.flush(30) is None
        with begin("u1", "sweep"):
            pass
    assert the_run("u2").data.tags["mlflow.parentRunId"] == the_run("u1").info.run_id


def test_a_home_that_cannot_be_written_is_one_message(folder):
    (folder / "home").write_text("a file")
    with pytest.raises(
        ConfigError, match=r"home/.*cannot keep the run's records: .*; expected VITRAY_HOME as a folder"
    ):
        begin()


def storage_error() -> ConfigError:
    """Return the message of our storage about a bucket that does not answer."""
    try:
        with storage._as_config_error("s3://bucket"):
            raise OSError("timed out")
    except ConfigError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        OSError("the bucket is offline"),
        storage_error(),
        S3UploadFailedError("the bucket is offline"),
        EndpointConnectionError(endpoint_url="http://10.0.0.5:9000"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_metrics_do_not_wait_for_a_file_that_its_store_rejects(monkeypatch, error):
    from mlflow import MlflowClient

    original, rejecting = MlflowClient.log_artifact, [True]

    def log_artifact(*args):
        if rejecting:
            raise error
        original(*args)

    monkeypatch.setattr(MlflowClient, "log_artifact", log_artifact)
    with begin() as run:
        run.figure("a.png", b"picture")
        run.metrics(1, {"loss": 1})
        until(lambda: runs() and points("loss") == [(1, 1)], 60, "the metrics are logged")
        rejecting.clear()
    assert (Path(the_run().info.artifact_uri) / "a.png").read_bytes() == b"picture"
    assert spools() == []


def test_a_record_that_mlflow_rejects_is_skipped_and_named(caplog):
    with begin() as run:
        for step, key in enumerate(["loss", "a%b", "loss"]):
            run._record("metrics", {"time": 5, "step": step, "values": {key: 1.0}})
    assert points("loss") == [(0, 1), (2, 1)]
    assert "a%b" in the_run().data.tags["vitray.refused"]
    assert "MLflow refuses a record" in caplog.text


def test_a_model_whose_folder_is_gone_is_skipped_and_named(folder):
    with begin() as run:
        run.model(str(folder / "gone"))
        run.metrics(1, {"loss": 1})
    assert f"{folder}/gone" in the_run().data.tags["vitray.refused"]
    assert (points("loss"), spools()) == ([(1, 1)], [])


def test_a_full_disk_does_not_stop_the_run(monkeypatch, caplog):
    def full(*_):
        raise OSError("no space left")

    with begin() as run:
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "append", full)
            patch.setattr(Spool, "store_file", full)
            for step in range(3):
                run.metrics(step, {"loss": step})
                run.text("a", "b")
        run.metrics(5, {"loss": 5})
    assert points("loss") == [(5, 5)]
    assert caplog.text.count("no space left") == 1


def test_an_unusable_store_does_not_stop_the_run(monkeypatch, caplog, tmp_path):
    (tmp_path / "file").touch()  # MLflow would create a missing folder
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlruns.db")
    monkeypatch.setattr(tracker, "END_TIMEOUTS", {"FINISHED": (1, 1)})
    with begin() as run:
        run.metrics(1, {"loss": 1})
    assert "`vitray sync` sends them" in caplog.text
    assert spools() == ["u1"]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    _wait_until_released()
    [waiting] = flush_all()
    assert (waiting.state, waiting.store) == ("waiting", f"sqlite:///{tmp_path}/file/mlruns.db")
    store = tracking_uri()
    assert flush_all(store) == [("u1", "run", "complete", "complete", store)]
    assert points("loss") == [(1, 1)]
    assert the_run().info.status == "FINISHED"


# Models


@pytest.fixture
def logged(monkeypatch):
    """Replace `log_model` with one that logs no files; the fixture is the list of logged folders."""
    folders = []

    def log_model(run_id, folder):
        folders.append(folder)
        client = open_client(os.environ["MLFLOW_TRACKING_URI"])
        model = client.create_logged_model(client.get_run(run_id).info.experiment_id, source_run_id=run_id)
        client.finalize_logged_model(model.model_id, "READY")
        return model.model_uri

    monkeypatch.setitem(sys.modules, "vitray.serving.flavor", SimpleNamespace(log_model=log_model))
    return folders


def top1_of(value):
    return VersionScore("val/top1", value)


@pytest.mark.parametrize("tag", ["val/top1", "val/map"])
def test_the_champion_moves_only_for_a_better_score(logged, tag):
    champions = []
    for number, value in enumerate([None, 0.5, 0.4, 0.5, 0.6, None]):
        with begin(f"u{number}") as run:
            run.model(f"folder{number}", "vit", value and VersionScore(tag, value), value and "val")
        client = open_client(tracking_uri())
        aliases = client.get_registered_model("vit").aliases
        champions.append(int(aliases.get("champion", 0)))
    assert champions == [0, 2, 2, 2, 5, 5]
    champion = client.get_model_version_by_alias("vit", "champion")
    # Stored names: with others, a model of an earlier version would be logged and registered twice.
    assert champion.tags == {tag: "0.6", "vitray.scored_on": "val", "vitray.model": champion.source}
    assert [key for key in client.get_run(champion.run_id).data.tags if key.startswith("vitray.model.")]
    assert logged == [f"folder{number}" for number in range(6)]
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_a_champion_of_other_images_or_classes_stays_and_a_line_says_so(logged, caplog):
    for number, (top1, scored_on) in enumerate(
        [(0.95, "shapes"), (0.97, "clothes"), (0.96, "shapes"), (0.9, "clothes")]
    ):
        with begin(f"u{number}") as run:
            run.model(f"folder{number}", "vit", top1_of(top1), scored_on)
    client = open_client(tracking_uri())
    assert client.get_model_version_by_alias("vit", "champion").version == 3
    [other, worse] = [record.getMessage() for record in caplog.records if "champion" in record.getMessage()]
    for version, champion, line in ((2, 1, other), (4, 3, worse)):
        assert (
            f"version {version} of vit does not become champion: version {champion}, which has the alias, was" in line
        )
        assert f"`vitray promote vit/{version}` compares the two on one dataset" in line
        assert client.get_model_version("vit", str(version)).tags[PROMOTION_TAG] in line


def test_a_champion_of_unknown_images_stays(logged):
    for number, scored_on in enumerate(["shapes", "shapes"]):
        with begin(f"u{number}") as run:
            run.model(f"folder{number}", "vit", top1_of(0.5 + number / 10), scored_on, moves_champion=False)
    client = open_client(tracking_uri())
    foreign = client.create_model_version("vit", "a/folder")
    client.set_registered_model_alias("vit", "champion", foreign.version)
    with begin("u2") as run:
        run.model("folder2", "vit", top1_of(0.9), "shapes")
    assert client.get_model_version_by_alias("vit", "champion").version == foreign.version


def test_the_best_of_two_runs_that_end_at_once_is_the_champion(logged, monkeypatch):
    """The second run reads the champion before the first has moved the alias, and moves it a moment later."""
    for number, top1 in enumerate([0.5, 0.7, 0.6]):
        with begin(f"u{number}") as run:
            run.model(f"folder{number}", "vit", top1_of(top1), "val", moves_champion=number == 0)
    client = open_client(tracking_uri())
    versions = [client.get_model_version("vit", number) for number in ("2", "3")]
    version_with, has_read = model_registry._version_with, threading.Event()

    def read_slowly(*args):
        champion = version_with(*args)
        if not has_read.is_set():
            has_read.set()
            time.sleep(0.3)
        return champion

    monkeypatch.setattr(model_registry, "_version_with", read_slowly)
    slow = threading.Thread(target=model_registry.move_champion, args=(client, versions[1]))
    slow.start()
    assert has_read.wait(10)
    model_registry.move_champion(open_client(tracking_uri()), versions[0])
    slow.join()
    assert client.get_model_version_by_alias("vit", "champion").version == 2


def test_a_version_that_is_compared_first_moves_no_alias(logged):
    for number, top1 in enumerate([0.5, 0.6]):
        with begin(f"u{number}") as run:
            run.model("folder", "vit", top1_of(top1), "val", moves_champion=number == 0)
    aliases = open_client(tracking_uri()).get_registered_model("vit").aliases
    assert {name: int(version) for name, version in aliases.items()} == {"champion": 1}


def test_a_model_is_logged_and_registered_once(logged):
    with begin() as run:
        run.model("folder", "vit", top1_of(0.5), "val")
        run.model("unregistered")
        assert run.flush(30) is None
        (run._spool.folder / "mark").unlink()
        second = Uploader(run._spool, tracking_uri())
        second.send_next()
        while second.remaining:
            second.send_next()
    assert logged == ["folder", "unregistered"]
    assert len(open_client(tracking_uri()).search_model_versions("name = 'vit'")) == 1


@pytest.mark.parametrize("is_complete", [False, True])
def test_an_upload_that_is_killed_leaves_no_second_model(monkeypatch, is_complete):
    """Killed within the upload of the model, or before the run's tag names the model."""

    def log_model(run_id, folder):
        client = open_client(tracking_uri())
        experiment_id, tags = client.get_run(run_id).info.experiment_id, {FOLDER_TAG: folder}
        model = client.create_logged_model(experiment_id, source_run_id=run_id, tags=tags)
        is_killed = not killed
        killed.append(True)
        if is_complete or not is_killed:
            client.finalize_logged_model(model.model_id, "READY")
        if is_killed:
            raise OSError("killed")
        return model.model_uri

    killed = []
    monkeypatch.setitem(sys.modules, "vitray.serving.flavor", SimpleNamespace(log_model=log_model))
    with begin() as run:
        run.model("folder", "vit", top1_of(0.5), "val")
        run.model("other")
        assert run.flush(30) is None
    client = open_client(tracking_uri())
    models = client.search_logged_models([the_run().info.experiment_id])
    assert sorted((model.tags[FOLDER_TAG], model.status) for model in models) == [
        ("folder", "READY"),
        ("other", "READY"),
    ]
    [version] = client.search_model_versions("name = 'vit'")
    assert version.source in [model.model_uri for model in models]


def test_a_run_begins_while_mlflow_is_imported(monkeypatch):
    loading = threading.Event()
    monkeypatch.setattr(upload, "import_mlflow", lambda: loading.wait(60))
    with begin() as run:
        run.metrics(1, {"loss": 1.5})
        assert runs() == []
        loading.set()
    assert points("loss") == [(1, 1.5)]
    assert the_run().info.status == "FINISHED"


def test_a_failed_import_of_mlflow_is_logged_and_does_not_end_the_run(monkeypatch, caplog):
    def missing():
        raise ImportError("no MLflow")

    monkeypatch.setattr(upload, "import_mlflow", missing)
    with begin() as run:
        until(lambda: "records wait: ImportError: no MLflow" in caplog.text, 30, "the failed import is logged")
        run.metrics(1, {"loss": 1.5})


# Dead drivers

DRIVER = """
import sys, time
from vitray.tracking.tracker import TrackedRun, Tracker
run = Tracker(TrackedRun("u1", "run", "vitray"), {"a": 1}, {}, "")
run.metrics(1, {"loss": 1})
assert run.flush(120) is None
run.metrics(2, {"loss": 2})
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_driver_is_proved_dead_and_its_run_closed(folder, monkeypatch):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"ready\n"
    close_dead_runs(EXPERIMENT, tracking_uri())
    assert [run.state for run in flush_all()] == ["running"]
    monkeypatch.setattr(tracker, "LOCK_TIMEOUT", 0.2)
    with pytest.raises(ConfigError, match="another process is tracking this run"):
        begin()
    assert the_run().info.status == "RUNNING"
    driver.kill()
    driver.wait()
    driver.stdout.close()
    shutil.copytree(spool_dir(), folder / "copy")
    # Without a spool, the tags of the run are the proof.
    shutil.rmtree(spool_dir())
    close_dead_runs(EXPERIMENT, tracking_uri())
    assert the_run().info.status == "KILLED"
    assert ", died" in the_run().data.tags["vitray.reason"]
    # With the spool, the unsent records are uploaded too.
    open_client(tracking_uri()).update_run(the_run().info.run_id, status="RUNNING")
    shutil.copytree(folder / "copy", spool_dir())
    with begin("u2"):
        for _ in range(600):
            if spools() == ["u2"]:
                break
            time.sleep(0.1)
    assert (the_run().info.status, points("loss")) == ("KILLED", [(1, 1), (2, 2)])
    assert spools() == []


def test_only_a_provably_dead_process_is_dead():
    alive = processes.process_tags()
    machine_id, boot, space, born = alive["vitray.pid_started"].split()
    assert not processes.is_dead(alive)
    assert not processes.is_dead({})
    gone = {**alive, "vitray.pid_started": f"{machine_id} {boot} {space} {int(born) - 1}"}
    assert processes.is_dead(gone), "the id of a dead process, used again"
    assert not processes.is_dead({**gone, "vitray.host": "elsewhere"})
    container = {**gone, "vitray.pid_started": f"{machine_id} {boot} pid:[1] {int(born) - 1}"}
    assert not processes.is_dead(container)
    unknown = {**gone, "vitray.pid_started": f"{machine_id} {boot} {space} ?"}
    assert not processes.is_dead(unknown)


def test_a_machine_has_metrics_and_facts():
    metrics = host_facts.SystemSampler().sample()
    assert all(math.isfinite(value) for value in metrics.values())
    facts = host_facts.facts()
    assert {"version.torch", "version.ray", "version.mlflow", "hardware.cpu", "hardware.cores"} <= set(facts)
    assert all(facts.values())


# A server


@pytest.mark.slow
def test_a_killed_server_does_not_stop_the_run_and_gets_every_record_once(server, caplog):
    with begin() as run:
        for step in range(20):
            run.metrics(step, {"loss": step})
        assert run.flush(60) is None
        server.kill()
        for step in range(20, 40):
            run.metrics(step, {"loss": step})
            run.figure(f"figures/{step}.png", b"picture")
        assert run.flush(3) is not None
        server.start()
        for step in range(40, 60):
            run.metrics(step, {"loss": step})
    assert points("loss") == [(step, step) for step in range(60)]
    artifacts = open_client(tracking_uri()).list_artifacts(the_run().info.run_id, "figures")
    assert len(artifacts) == 20
    assert the_run().info.status == "FINISHED"
    assert spools() == []
    assert "MLflow does not accept records" in caplog.text


@pytest.mark.slow
def test_a_stopped_server_blocks_no_call(server):
    uid = uuid.uuid4().hex
    with begin(uid) as run:
        run.metrics(0, {"loss": 0})
        assert run.flush(60) is None
        server.send(signal.SIGSTOP)
        try:
            done = 0
            for step in range(1, 200):
                run.metrics(step, {"loss": step})
                run.text(f"texts/{step % 3}.txt", "text")
                run.tag("step", str(step))
                done += 1
            assert run.flush(3) is not None, "a stopped server cannot receive records"
            with begin(f"{uid}-2") as second:  # the start of a run does not wait for it either
                second.metrics(1, {"loss": 1})
                started = time.monotonic()
                second.flush(1)
                assert time.monotonic() - started < 10
                server.send(signal.SIGCONT)
        finally:
            server.send(signal.SIGCONT)
        assert done == 199
    assert points("loss", uid) == [(step, step) for step in range(200)]
    assert points("loss", f"{uid}-2") == [(1, 1)]
    assert the_run(uid).data.tags["step"] == "199"


def test_flush_completes_a_run_that_ended_while_the_server_was_offline(address, monkeypatch, capsys):
    server, uid = address, uuid.uuid4().hex
    if server.process is not None:
        server.kill()
    monkeypatch.setattr(tracker, "END_TIMEOUTS", {"FAILED": (1, 1)})
    with suppress(ValueError), begin(uid) as run:
        run.metrics(1, {"loss": 1, "not": math.nan, "infinite": math.inf})
        assert run.run_url() == server.uri
        raise ValueError("it broke")
    _wait_until_released()
    with pytest.raises(RunError, match="the records of 1 of 1 runs are not uploaded"):
        sync.main([])
    assert "still waits" in capsys.readouterr().out
    server.start()
    [flushed] = sync.main([])["runs"]
    expected = {"name": "run", "state": "complete", "message": "complete", "store": server.uri}
    assert flushed == {"uid": uid} | expected
    assert (the_run(uid).info.status, the_run(uid).data.tags["vitray.reason"]) == ("FAILED", "ValueError: it broke")
    assert math.isnan(the_run(uid).data.metrics["not"])
    assert the_run(uid).data.metrics["infinite"] == sys.float_info.max
    assert sync.main([]) == {"runs": []}
    assert "nothing waits" in capsys.readouterr().out


def test_no_credential_is_written_or_logged(server, caplog, capsys, monkeypatch, folder):
    uid = uuid.uuid4().hex
    uri = tracking_uri()
    server.send(signal.SIGSTOP)
    with (
        suppress(ValueError),
        begin(uid, params={"uri": uri}, tags={"uri": uri}, description=uri) as run,
    ):
        run.text("a.txt", f"see {uri}")
        run.tag("uri", uri)
        run.flush(8)
        print(run.run_url())
        on_disk = b"".join(path.read_bytes() for path in (folder / "home").rglob("*") if path.is_file())
        server.send(signal.SIGCONT)
        raise ValueError(f"no answer from {uri}")
    assert ui.main([])["url"].startswith(f"{server.uri}/#/experiments/")
    logged = the_run(uid)
    assert logged.data.params["uri"] == logged.data.tags["uri"] == server.uri
    client = open_client(uri)
    text = Path(client.download_artifacts(logged.info.run_id, "a.txt")).read_text()
    console = capsys.readouterr()
    outputs = [on_disk.decode(), text, json.dumps(logged.to_dictionary()), console.out, console.err, caplog.text]
    assert len(on_disk) > 100
    assert "does not accept records" in caplog.text
    assert [part for part in outputs if "geheim" in part] == []


def test_waiting_records_go_to_their_own_store_only(folder, monkeypatch, migrated):
    """Two projects of one user share the folder of waiting records."""
    ours, theirs = tracking_uri(), f"sqlite:///{folder}/theirs/mlruns.db"
    (folder / "theirs").touch()  # a store that cannot be reached now
    monkeypatch.setenv("MLFLOW_TRACKING_URI", theirs)
    monkeypatch.setattr(tracker, "END_TIMEOUTS", {"FINISHED": (1, 1)})
    with begin("waits") as run:
        run.metrics(1, {"loss": 1})
    _wait_until_released()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ours)
    close_dead_runs(EXPERIMENT, ours)  # as at the start of any run
    assert spools() == ["waits"]
    [flushed] = flush_all()
    assert (flushed.state, flushed.store) == ("waiting", theirs)
    assert runs("waits") == []
    (folder / "theirs").unlink()
    (folder / "theirs").mkdir()
    shutil.copy(migrated, folder / "theirs" / "mlruns.db")
    [flushed] = flush_all()  # still with the address of our store
    assert (flushed.state, flushed.store) == ("complete", theirs)
    assert runs("waits") == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", theirs)
    assert points("loss", "waits") == [(1, 1)]


# The creation of the embedded store


def test_a_kill_while_the_store_is_created_leaves_no_store(tmp_path):
    file = tmp_path / "new" / "mlruns.db"
    code = (
        "from vitray.system.mlflow_client import import_mlflow, open_client;"
        f"import_mlflow(); open_client('sqlite:///{file}')"
    )
    creator = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)})
    # The database itself: its journal comes and goes.
    until(lambda: any(path.stat().st_size for path in file.parent.glob("mlruns.db.new-????????")), 120, "tables")
    creator.kill()
    creator.wait()
    leftovers = list(file.parent.iterdir())  # the database, and its journal
    assert all(leftover.name.startswith("mlruns.db.new-") for leftover in leftovers)
    for leftover in leftovers:
        os.utime(leftover, (0, 0))
    assert open_client(f"sqlite:///{file}").search_experiments()
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.slow
def test_two_processes_that_create_a_store_get_the_same_one(tmp_path):
    file = tmp_path / "mlruns.db"
    file.unlink()
    code = (
        "from vitray.system.mlflow_client import import_mlflow, open_client;"
        f"import_mlflow(); open_client('sqlite:///{file}').create_experiment(__import__('sys').argv[1])"
    )
    creators = [
        subprocess.Popen([sys.executable, "-c", code, name], env=os.environ | {"PYTHONPATH": str(ROOT)})
        for name in ("first", "second")
    ]
    assert [creator.wait() for creator in creators] == [0, 0]
    names = {experiment.name for experiment in open_client(f"sqlite:///{file}").search_experiments()}
    assert names >= {"first", "second"}
    assert not list(tmp_path.glob("mlruns.db.*"))


def damage(file):
    """Make a store as a kill during MLflow's migrations leaves it, long ago."""
    with closing(sqlite3.connect(file)) as database:
        database.execute("delete from alembic_version")
        database.execute("drop table runs")
        database.commit()
    os.utime(file, (0, 0))


def test_an_incomplete_store_is_set_aside_by_name(folder, caplog):
    file = folder / "mlruns.db"
    damage(file)
    uri = f"sqlite:///{folder}/young.db"  # MLflow opens a store once per address and process
    shutil.copy(file, folder / "young.db")
    with pytest.raises(Exception, match="duplicate column"):  # another process may still be creating it
        open_client(uri)
    assert open_client(tracking_uri()).search_experiments()
    [aside] = folder.glob("mlruns.db.incomplete-*")
    assert str(aside) in caplog.text


@pytest.mark.parametrize("moment", ["_is_unusable", "flock"])
def test_a_store_that_another_process_sets_aside_meanwhile_is_made_anew(tmp_path, monkeypatch, moment):
    file, owner = tmp_path / "mlruns.db", mlflow_client if moment == "_is_unusable" else fcntl
    damage(file)
    real = getattr(owner, moment)

    def call_and_set_aside(*args):
        answer = real(*args)
        if file.exists():
            file.rename(tmp_path / "aside")
        return answer

    monkeypatch.setattr(owner, moment, call_and_set_aside)
    assert open_client(f"sqlite:///{file}").search_experiments()
    assert {path.name for path in tmp_path.iterdir()} >= {"aside", "mlruns.db"}


@pytest.mark.slow
def test_two_processes_that_set_a_store_aside_get_the_same_new_one(tmp_path):
    file = tmp_path / "mlruns.db"
    damage(file)
    inode = f":{file.stat().st_ino} "
    code = (
        "from vitray.system.mlflow_client import import_mlflow, open_client;"
        f"import_mlflow(); open_client('sqlite:///{file}').search_experiments()"
    )
    with file.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        openers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
        while sum("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()) < 2:
            assert [opener.poll() for opener in openers] == [None, None]
            time.sleep(0.05)
    assert [opener.wait() for opener in openers] == [0, 0]
    assert len(list(tmp_path.glob("mlruns.db.incomplete-*"))) == 1
    assert open_client(f"sqlite:///{file}").search_experiments()


def test_a_broken_store_with_runs_stays_where_it_is(folder):
    with begin() as run:
        run.metrics(1, {"loss": 1})
    with closing(sqlite3.connect(folder / "mlruns.db")) as database:
        database.execute("delete from alembic_version")
        database.commit()
    shutil.copy(folder / "mlruns.db", folder / "broken.db")
    os.utime(folder / "broken.db", (0, 0))
    with pytest.raises(Exception, match=r".+"):
        open_client(f"sqlite:///{folder}/broken.db")
    assert {path.name for path in folder.glob("*.db*")} == {"mlruns.db", "broken.db"}


# The verbs


def test_the_ui_reports_a_taken_port_and_a_missing_store(folder, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--port: {port} is taken"):
            ui.main(["--port", port])
    (folder / "mlruns.db").unlink()
    with pytest.raises(ConfigError, match="no runs here"):
        ui.main([])


@pytest.mark.parametrize("host", ["vitray.invalid", "a..b"])
def test_the_ui_refuses_a_mistyped_host(folder, host):
    with pytest.raises(ConfigError, match=f"--host: got '{host}', expected an address"):
        ui.main(["--host", host])


def test_a_port_of_an_ipv6_address_may_be_free():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert not ui_server._is_taken("::1", port)


@pytest.mark.slow
def test_the_ui_serves_the_runs_until_it_is_stopped(folder):
    with begin() as run:
        run.text("a.txt", "hello")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pipelines.ui", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/get-artifact?path=a.txt&run_uuid={the_run().info.run_id}"
    for _ in range(1800):
        try:
            with urllib.request.urlopen(address, timeout=2) as answer:
                assert answer.read() == b"hello"
            break
        except OSError:
            assert process.poll() is None
            time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


@pytest.mark.slow
def test_of_two_uis_at_one_port_one_is_refused_and_sigterm_frees_the_port(folder):
    with begin() as run:
        run.metrics(1, {"loss": 1})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, logs = (
        [sys.executable, "-m", "pipelines.ui", "--port", str(port)],
        [folder / "one.log", folder / "two.log"],
    )
    both = []
    for log in logs:
        with log.open("w") as output:
            both.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=output))
    page = f"open http://127.0.0.1:{port}/#/experiments/1/runs?workflowType=machine_learning"
    for _ in range(1800):
        ended = [process for process in both if process.poll() is not None]
        if len(ended) == 1 and any(page in log.read_text() for log in logs):
            break
        time.sleep(0.1)
    lost, won = sorted(both, key=lambda process: process.poll() is None)
    assert lost.poll() == 2
    assert f"--port: {port} is taken" in logs[both.index(lost)].read_text()
    assert page in logs[both.index(won)].read_text()
    won.terminate()
    assert won.wait(60) == 143
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


def test_weights_load_without_the_tracker():
    """A served model resolves addresses, but records nothing."""
    code = "import sys, vitray.weights; print([name for name in sys.modules if name == 'vitray.tracking.tracker'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
