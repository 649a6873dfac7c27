"""Tracking against real MLflow: an embedded store, and a server that is killed, stopped and started again."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hosts import until

from pipelines import track, ui
from vitray import tracking
from vitray.errors import ConfigError, redact
from vitray.tracking import (
    Tracker,
    close_orphans,
    facts,
    flush_all,
    redact_uri,
    sample,
    system_info,
    tracker,
    tracking_uri,
)
from vitray.tracking.mlflow_client import import_mlflow, open_client
from vitray.tracking.spool import Journal, now, spool
from vitray.tracking.uploader import Delivery

EXPERIMENT = "vitray"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def migrated(tmp_path_factory) -> Path:
    """An empty store: making its tables takes seconds, copying it none."""
    import_mlflow()
    path = tmp_path_factory.mktemp("template") / "mlruns.db"
    open_client(f"sqlite:///{path}")
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, migrated) -> Path:
    """A working folder with an embedded store, and a spool of its own."""
    shutil.copy(migrated, tmp_path / "mlruns.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracker, "PATIENCE", {"FINISHED": (30, 3), "FAILED": (30, 3), "KILLED": (30, 3)})
    return tmp_path


class Server:
    """An `mlflow server` that a test may kill, stop and start again; its store stays."""

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
        with log.open("ab") as told:
            self.process = subprocess.Popen(
                command, stdout=told, stderr=told, env=os.environ | settings, start_new_session=True
            )
        for _ in range(1800):
            assert self.process.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
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
    place = tmp_path_factory.mktemp("server")
    shutil.copy(migrated, place / "mlruns.db")
    server = Server(place)
    try:
        yield server
    finally:
        if server.process is not None:
            server.kill()


@pytest.fixture
def address(one_server, monkeypatch) -> Server:
    """A server that may not run yet, and that the environment names, with a password in its address."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", one_server.uri.replace("://", "://somebody:geheim@"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    return one_server


@pytest.fixture
def server(address) -> Server:
    """The server, running."""
    if address.process is None:
        address.start()
    return address


def begin(uid="u1", name="run", params=None, tags=None, description="# a run", parent=None):
    return Tracker.begin(uid, name, EXPERIMENT, params or {"optim.lr": 1e-3}, tags or {}, description, parent)


def runs(uid="u1"):
    """The runs of a uid, as a person would find them."""
    client = open_client(tracking_uri())
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return client.search_runs([experiment.experiment_id], f"tags.`vitray.uid` = '{uid}'") if experiment else []


def the_run(uid="u1"):
    (run,) = runs(uid)
    return run


def points(key, uid="u1"):
    history = open_client(tracking_uri()).get_metric_history(the_run(uid).info.run_id, key)
    return [(metric.step, metric.value) for metric in history]


def journals():
    return sorted(path.name for path in spool().glob("*"))


def _until_let_go():
    """The thread of an ended run lets go of its journal when its last call has ended."""
    for name in journals():
        Journal(spool() / name, patience=60).close()


# The journal


def test_a_torn_last_line_is_cut(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.append({"step": 1})
    journal.close()
    with (tmp_path / "j" / "records.jsonl").open("ab") as file:
        file.write(b'{"step": 2')
    journal = Journal(tmp_path / "j")
    journal.append({"step": 3})
    assert [entry.body for entry in journal.every()] == [{"step": 1}, {"step": 3}]
    journal.close()


def test_a_write_that_a_full_disk_cut_short_leaves_no_trace(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j")
    real = os.pwrite
    rest = iter([lambda *to: real(to[0], to[1][:5], to[2]), lambda *_: (_ for _ in ()).throw(OSError("no space"))])
    monkeypatch.setattr(os, "pwrite", lambda *to: next(rest, real)(*to))
    with pytest.raises(OSError, match="no space"):
        journal.append({"step": "a long one"})
    journal.append({"s": 1})
    journal.close()
    journal = Journal(tmp_path / "j")
    assert [entry.body for entry in journal.every()] == [{"s": 1}]
    journal.close()


def test_a_line_longer_than_a_block_is_read_whole(tmp_path):
    journal = Journal(tmp_path / "j")
    for body in ({"a": 1}, {"b": "x" * 5000}, {"c": 1}):
        journal.append(body)
    found = journal.read(0, most=100)
    assert [list(entry.body) for entry in found] == [["a"]]
    assert list(journal.read(found[-1].end, most=100)[0].body) == ["b"]
    journal.close()


def test_one_process_at_a_time_has_a_journal(tmp_path):
    journal = Journal(tmp_path / "j")
    with pytest.raises(BlockingIOError):
        Journal(tmp_path / "j")
    journal.close()
    Journal(tmp_path / "j").close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:5000/a", "http://host:5000/a"),
        ("postgresql://me:p@ss@host/db?sslmode=on", "postgresql://host/db?sslmode=on"),
        ("postgresql://host/db?user=me&password=secret&x=1", "postgresql://host/db?user=me&password=...&x=1"),
        ("failed: https://token@host/path, mail me@host", "failed: https://host/path, mail me@host"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_credentials_are_left_out(text, shown):
    assert redact(text) == shown


# The embedded store


def test_the_default_store_lies_in_the_working_folder(folder, monkeypatch):
    assert tracking_uri() == f"sqlite:///{folder}/mlruns.db"
    with begin() as run:
        run.text("notes/a.txt", "hello")
    assert (Path(the_run().info.artifact_uri) / "notes" / "a.txt").read_text() == "hello"
    assert the_run().info.artifact_uri.startswith(str(folder / "mlruns"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host:1")
    assert tracking_uri() == "http://me:secret@host:1"
    assert redact_uri(tracking_uri()) == "http://host:1"


def test_a_run_arrives_whole(folder):
    with begin(params={"a": 1, "b": [0.9, 0.999], "c": None, "d": "words"}, tags={"git.commit": "abc"}) as run:
        for step in range(1500):
            run.metrics(step, {"train/loss": 1 / (step + 1), "train/lr": step}, at=1000 + step)
        run.figure("figures/loss.png", b"first")
        run.figure("figures/loss.png", b"second")
        run.tag("stage", "late")
        run.describe("# what came of it")
    found = the_run()
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.params == {"a": "1", "b": "[0.9, 0.999]", "c": "null", "d": "words"}
    assert found.data.tags["mlflow.note.content"] == "# what came of it"
    assert found.data.tags["mlflow.source.git.commit"] == "abc"
    assert found.data.tags["stage"] == "late"
    assert points("train/loss") == [(step, 1 / (step + 1)) for step in range(1500)]
    assert (Path(found.info.artifact_uri) / "figures" / "loss.png").read_bytes() == b"second"
    assert journals() == []


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("the loss is nan at step 7"), "FAILED", "ValueError: the loss is nan at step 7"),
        (KeyboardInterrupt(), "KILLED", "KeyboardInterrupt: stopped by Ctrl-C"),
        (SystemExit(15), "KILLED", "SystemExit: 15"),
        (SystemExit(0), "FINISHED", None),
    ],
)
def test_how_a_run_ends_is_said(error, status, reason):
    with pytest.raises(type(error)), begin():
        raise error
    assert the_run().info.status == status
    assert the_run().data.tags.get("vitray.reason") == reason


def test_what_is_not_a_number_arrives():
    with begin() as run:
        run.metrics(1, {"nan": math.nan, "up": math.inf, "down": -math.inf, "top1@ema": 1})
    found = the_run().data.metrics
    assert math.isnan(found["nan"])
    assert (found["up"], found["down"]) == (sys.float_info.max, -sys.float_info.max)
    assert found["top1_ema"] == 1


@pytest.mark.parametrize("machine_has_journal", [True, False])
def test_a_resumed_run_continues_and_repeats_no_step(machine_has_journal):
    with suppress(ValueError), begin(params={"optim.lr": 1, "seed": 0}) as run:
        for step in range(10):
            run.metrics(step, {"train/loss": step})
        if not machine_has_journal:
            assert run.flush(30) is None
        raise ValueError("crash")
    first = the_run()
    assert (first.info.status, journals()) == ("FAILED", [])
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


def test_a_run_that_went_on_elsewhere_keeps_its_status_and_gets_what_was_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlruns.db")
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "here"))
    here = Journal(spool() / "u1")
    head = {"kind": "begin", "uid": "u1", "name": "run", "experiment": EXPERIMENT, "params": {}, "description": ""}
    here.append({**head, "time": now() - 1000, "tags": {}})
    for step in range(3):
        here.append({"kind": "metrics", "time": 5, "step": step, "values": {"loss": step}})
    delivery = Delivery(here, tracking_uri())
    while delivery.left:
        delivery.deliver()
    for step in range(3, 6):
        here.append({"kind": "metrics", "time": 5, "step": step, "values": {"loss": step}})
    here.append({"kind": "end", "time": now(), "status": "KILLED", "reason": "stopped"})
    here.close()
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "there"))
    with begin() as run:
        for step in range(5, 8):
            run.metrics(step, {"loss": -step})
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "here"))
    assert [run.state for run in flush_all()] == ["complete"]
    assert sorted(points("loss")) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, -5), (6, -6), (7, -7)]
    assert the_run().info.status == "FINISHED"


def test_delivering_again_from_any_point_changes_nothing(tmp_path):
    journal = Journal(spool() / "u1")
    head = {"kind": "begin", "uid": "u1", "name": "run", "experiment": EXPERIMENT, "params": {"a": "1"}}
    journal.append({**head, "time": now(), "tags": {"t": "1"}, "description": "text"})
    for step in range(4):
        journal.append({"kind": "metrics", "time": 5, "step": step, "values": {"loss": step}})
        journal.append({"kind": "tags", "time": 5, "tags": {"t": str(step)}})
    journal.append({"kind": "end", "time": now(), "status": "FINISHED", "reason": None})
    for portions in range(1, 12):
        # A kill between what was sent and the note of it: the mark stays behind by one, or is not there at all.
        delivery = Delivery(journal, tracking_uri())
        for _ in range(portions):
            before = journal.mark
            if delivery.left or delivery.run_id is None:
                delivery.deliver()
        if before is not None and portions % 2:
            journal.set_mark(before)
        else:
            (journal.folder / "mark").unlink()
    assert points("loss") == [(step, step) for step in range(4)]
    assert (the_run().info.status, the_run().data.tags["t"]) == ("FINISHED", "3")
    journal.close()


def test_a_lost_answer_makes_no_second_run(monkeypatch):
    from mlflow import MlflowClient

    real, calls = MlflowClient.create_run, []

    def lost(*words):
        calls.append(real(*words))
        raise OSError("the answer was lost")

    monkeypatch.setattr(MlflowClient, "create_run", lost)
    with begin() as run:
        run.metrics(1, {"loss": 1})
    assert len(calls) == 1
    assert points("loss") == [(1, 1)]


def test_a_run_that_was_made_late_is_removed(monkeypatch):
    with begin() as run:
        run.metrics(1, {"loss": 1})
        assert run.flush(30) is None
        open_client(tracking_uri()).create_run(the_run().info.experiment_id, tags={"vitray.uid": "u1"})
        assert len(runs()) == 2
    assert points("loss") == [(1, 1)]


def test_a_run_shows_below_its_parent():
    with begin("u1", "sweep"), begin("u2", "trial", parent="u1"):
        pass
    assert the_run("u2").data.tags["mlflow.parentRunId"] == the_run("u1").info.run_id


def test_numbers_do_not_wait_for_a_file_that_its_store_refuses(monkeypatch):
    from mlflow import MlflowClient

    real, refusing = MlflowClient.log_artifact, [True]

    def log_artifact(*words):
        if refusing:
            raise OSError("the bucket is away")
        real(*words)

    monkeypatch.setattr(MlflowClient, "log_artifact", log_artifact)
    with begin() as run:
        run.figure("a.png", b"picture")
        run.metrics(1, {"loss": 1})
        until(lambda: runs() and points("loss") == [(1, 1)], 60, "the numbers are there")
        refusing.clear()
    assert (Path(the_run().info.artifact_uri) / "a.png").read_bytes() == b"picture"
    assert journals() == []


def test_a_record_that_mlflow_never_takes_is_left_out_and_named(caplog):
    with begin() as run:
        for step, key in enumerate(["loss", "a%b", "loss"]):
            run._note({"kind": "metrics", "time": 5, "step": step, "values": {key: 1.0}})
    assert points("loss") == [(0, 1), (2, 1)]
    assert "a%b" in the_run().data.tags["vitray.refused"]
    assert "MLflow refuses a record" in caplog.text


def test_a_full_disk_stops_nothing(monkeypatch, caplog):
    def full(*_):
        raise OSError("no space left")

    with begin() as run:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", full)
            patch.setattr(Journal, "store", full)
            for step in range(3):
                run.metrics(step, {"loss": step})
                run.text("a", "b")
        run.metrics(5, {"loss": 5})
    assert points("loss") == [(5, 5)]
    assert caplog.text.count("no space left") == 1


def test_a_store_that_cannot_be_used_stops_nothing(monkeypatch, caplog, tmp_path):
    (tmp_path / "file").touch()  # a folder that is missing MLflow would make
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlruns.db")
    monkeypatch.setattr(tracker, "PATIENCE", {"FINISHED": (1, 1)})
    with begin() as run:
        run.metrics(1, {"loss": 1})
    assert "`vitray track flush` sends them" in caplog.text
    assert journals() == ["u1"]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    _until_let_go()
    assert flush_all() == [("u1", "run", "complete", "complete")]
    assert points("loss") == [(1, 1)]
    assert the_run().info.status == "FINISHED"


# Models


@pytest.fixture
def logged(monkeypatch):
    """A double of `log_model`: an MLflow model without files; and the folders that were logged."""
    folders = []

    def log_model(run_id, folder):
        folders.append(folder)
        client = open_client(os.environ["MLFLOW_TRACKING_URI"])
        model = client.create_logged_model(client.get_run(run_id).info.experiment_id, source_run_id=run_id)
        client.finalize_logged_model(model.model_id, "READY")
        return model.model_uri

    monkeypatch.setitem(sys.modules, "vitray.tracking.model_flavour", SimpleNamespace(log_model=log_model))
    return folders


def test_the_champion_moves_only_for_a_better_top1(logged):
    champions = []
    for number, top1 in enumerate([None, 0.5, 0.4, 0.5, 0.6, None]):
        with begin(f"u{number}") as run:
            run.model(f"folder{number}", "vit", top1)
        client = open_client(tracking_uri())
        aliases = client.get_registered_model("vit").aliases
        champions.append(int(aliases.get("champion", 0)))
    assert champions == [0, 2, 2, 2, 5, 5]
    assert client.get_model_version_by_alias("vit", "champion").tags["val/top1"] == "0.6"
    assert logged == [f"folder{number}" for number in range(6)]
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_a_model_is_logged_and_registered_once(logged):
    with begin() as run:
        run.model("folder", "vit", 0.5)
        run.model("unregistered")
        assert run.flush(30) is None
        (run._journal.folder / "mark").unlink()
        again = Delivery(run._journal, tracking_uri())
        again.deliver()
        while again.left:
            again.deliver()
    assert logged == ["folder", "unregistered"]
    assert len(open_client(tracking_uri()).search_model_versions("name = 'vit'")) == 1


def test_a_run_begins_while_mlflow_is_still_loaded(monkeypatch):
    loading = threading.Event()
    monkeypatch.setattr(tracker, "import_mlflow", lambda: loading.wait(60))
    with begin() as run:
        run.metrics(1, {"loss": 1.5})
        assert runs() == []
        loading.set()
    assert points("loss") == [(1, 1.5)]
    assert the_run().info.status == "FINISHED"


def test_an_mlflow_that_does_not_load_is_said_and_no_end_of_the_run(monkeypatch, caplog):
    def missing():
        raise ImportError("no MLflow")

    monkeypatch.setattr(tracker, "import_mlflow", missing)
    with begin() as run:
        until(lambda: "records wait: ImportError: no MLflow" in caplog.text, 30, "MLflow is missed")
        run.metrics(1, {"loss": 1.5})


# Dead drivers

DRIVER = """
import sys, time
from vitray.tracking import Tracker
run = Tracker.begin("u1", "run", "vitray", {"a": 1}, {}, "")
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
    assert close_orphans(EXPERIMENT) == []
    assert [run.state for run in flush_all()] == ["running"]
    monkeypatch.setattr(tracker, "JOURNAL_PATIENCE", 0.2)
    with pytest.raises(ConfigError, match="another process tracks this run"):
        begin()
    assert the_run().info.status == "RUNNING"
    driver.kill()
    driver.wait()
    driver.stdout.close()
    shutil.copytree(spool(), folder / "copy")
    # Without a journal, what the run itself says of its driver is proof enough.
    shutil.rmtree(spool())
    assert close_orphans(EXPERIMENT) == ["run"]
    assert the_run().info.status == "KILLED"
    assert "died without a word" in the_run().data.tags["vitray.reason"]
    assert close_orphans(EXPERIMENT) == []
    # With it, what had not been sent arrives as well.
    open_client(tracking_uri()).update_run(the_run().info.run_id, status="RUNNING")
    shutil.copytree(folder / "copy", spool())
    with begin("u2"):
        for _ in range(600):
            if journals() == ["u2"]:
                break
            time.sleep(0.1)
    assert (the_run().info.status, points("loss")) == ("KILLED", [(1, 1), (2, 2)])
    assert journals() == []


def test_only_what_is_proved_dead_is_dead():
    alive = system_info.identity()
    machine_id, boot, space, born = alive["vitray.pid_started"].split()
    assert not system_info.has_died(alive)
    assert not system_info.has_died({})
    gone = {**alive, "vitray.pid_started": f"{machine_id} {boot} {space} {int(born) - 1}"}
    assert system_info.has_died(gone), "the number of a dead process, given out again"
    assert not system_info.has_died({**gone, "vitray.host": "elsewhere"})
    container = {**gone, "vitray.pid_started": f"{machine_id} {boot} pid:[1] {int(born) - 1}"}
    assert not system_info.has_died(container)
    unknown = {**gone, "vitray.pid_started": f"{machine_id} {boot} {space} ?"}
    assert not system_info.has_died(unknown)


def test_a_machine_is_said_in_numbers_and_facts():
    numbers = sample()
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= set(numbers)
    assert all(math.isfinite(value) for value in numbers.values())
    told = facts()
    assert {"version.torch", "version.ray", "version.mlflow", "hardware.cpu", "hardware.cores"} <= set(told)
    assert all(told.values())


# A server


@pytest.mark.slow
def test_a_killed_server_stops_nothing_and_gets_all_of_it_once(server, caplog):
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
    assert journals() == []
    assert "MLflow does not take records" in caplog.text


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
                run.text(f"texts/{step % 3}.txt", "words")
                run.tag("step", str(step))
                done += 1
            assert run.flush(3) is not None, "the server is stopped: nothing can have arrived"
            with begin(f"{uid}-2") as second:  # nor does the start of a run wait for it
                second.metrics(1, {"loss": 1})
                started = time.monotonic()
                second.flush(1, 1)
                assert time.monotonic() - started < 10
                server.send(signal.SIGCONT)
        finally:
            server.send(signal.SIGCONT)
        assert done == 199
    assert points("loss", uid) == [(step, step) for step in range(200)]
    assert points("loss", f"{uid}-2") == [(1, 1)]
    assert the_run(uid).data.tags["step"] == "199"


def test_a_run_that_ended_without_the_server_is_completed_by_flush(address, monkeypatch, capsys):
    server, uid = address, uuid.uuid4().hex
    if server.process is not None:
        server.kill()
    monkeypatch.setattr(tracker, "PATIENCE", {"FAILED": (1, 1)})
    with suppress(ValueError), begin(uid) as run:
        run.metrics(1, {"loss": 1, "not": math.nan, "infinite": math.inf})
        assert run.run_url() == server.uri
        raise ValueError("it broke")
    _until_let_go()
    with pytest.raises(ConfigError, match="1 of 1 runs wait"):
        track.main(["flush"])
    assert "still waits" in capsys.readouterr().out
    server.start()
    assert track.main(["flush"])["runs"] == [{"uid": uid, "name": "run", "state": "complete", "said": "complete"}]
    assert (the_run(uid).info.status, the_run(uid).data.tags["vitray.reason"]) == ("FAILED", "ValueError: it broke")
    assert math.isnan(the_run(uid).data.metrics["not"])
    assert the_run(uid).data.metrics["infinite"] == sys.float_info.max
    assert track.main(["flush"]) == {"runs": []}
    assert f"{server.uri}: nothing waits" in capsys.readouterr().out


def test_no_credential_is_written_or_said(server, caplog, capsys, monkeypatch, folder):
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
    assert ui.main([]) == {"url": server.uri}
    found = the_run(uid)
    assert found.data.params["uri"] == found.data.tags["uri"] == server.uri
    client = open_client(uri)
    text = Path(client.download_artifacts(found.info.run_id, "a.txt")).read_text()
    said = capsys.readouterr()
    told = [on_disk.decode(), text, json.dumps(found.to_dictionary()), said.out, said.err, caplog.text]
    assert len(on_disk) > 100
    assert "does not take records" in caplog.text
    assert [part for part in told if "geheim" in part] == []


# The verbs


def test_the_ui_says_what_it_lacks(folder, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--port: {port} is taken"):
            ui.main(["--port", port])
    (folder / "mlruns.db").unlink()
    with pytest.raises(ConfigError, match="no runs here"):
        ui.main([])


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


def test_the_public_names_are_there():
    for name in ("Tracker", "close_orphans", "flush_all", "tracking_uri", "shown", "sample", "facts"):
        assert callable(getattr(tracking, name))
