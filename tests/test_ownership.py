"""One process owns a run folder, on a local path and on a real S3 server, whatever its home or machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitray.config import Run
from vitray.errors import ConfigError, OwnershipLost
from vitray.runs.run_dir import RUN_META, open_run_dir
from vitray.runs.shutdown import GracefulShutdown
from vitray.sweeps.tuning import Interruption
from vitray.system import lease, storage
from vitray.system.lease import FOLDER, Watch, check_owner, check_visible, own_folder
from vitray.training.checkpoints import Checkpoint, Saver, complete_steps

ROOT = Path(__file__).parent.parent
DATA = SimpleNamespace(identity="d")
RESOLVED = SimpleNamespace(run=Run(), dataset=DATA, initial=None, tokenizer=None, teacher=None)

# Twenty processes open a run at the same moment; the owner holds it until all others have ended.
CROWD = """
import os, sys, time
from types import SimpleNamespace
from vitray.config import Run
from vitray.runs.run_dir import open_run_dir
from vitray.system.lease import own_folder
folder, number = sys.argv[1], int(sys.argv[2])
starts, results, ends = os.pipe(), os.pipe(), os.pipe()
def open_run():
    os.close(starts[1]), os.close(ends[1])
    os.read(starts[0], 1)
    try:
        with own_folder(folder, "first"):
            data = SimpleNamespace(identity="d")
            run = SimpleNamespace(run=Run(), dataset=data, initial=None, tokenizer=None, teacher=None)
            os.write(results[1], f"{os.getpid()} {open_run_dir(folder, 'first', run, 'owner').uid}\\n".encode())
            os.read(ends[0], 1)
    except Exception as error:  # without a line, the parent would wait for ever
        os.write(results[1], f"{'refused' if isinstance(error, ValueError) else 'failed'} {error}\\n".encode())
for _ in range(number):
    if os.fork() == 0:
        open_run()
        os._exit(0)
os.close(starts[1])
lines = b""
while lines.count(b"\\n") < number:
    lines += os.read(results[0], 65536)
os.close(ends[1])
for _ in range(number):
    os.wait()
print(lines.decode())
"""
# Owns a folder as a process of the machine in argv[2], until it has lost it.
OWNER = """
import socket, sys, time
from vitray.errors import OwnershipLost
from vitray.system import lease
folder, machine = sys.argv[1:]
if machine:
    socket.gethostname = lambda: machine
lease.RENEW_SECONDS = 0.1
try:
    with lease.own_folder(folder, "first") as held:
        print("owns", flush=True)
        while True:
            held.check()
            time.sleep(0.05)
except OwnershipLost as error:
    print(error, flush=True)
"""


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path, s3_server) -> str:
    """A run folder, local or on S3."""
    return str(tmp_path / "run") if request.param == "local" else f"s3://bucket/{tmp_path.name}/run"


@pytest.fixture
def short_lease(monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)


@pytest.fixture
def owner(place, tmp_path):
    """Start another process that owns the folder, with its own home."""
    started = []

    def start(machine=""):
        command = [sys.executable, "-c", OWNER, place, machine]
        environment = os.environ | {"VITRAY_HOME": str(tmp_path / "another home")}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "owns\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_of_twenty_processes_at_once_one_opens_a_run(place):
    command = [sys.executable, "-c", CROWD, place, "20"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    refused = [line for line in lines if line.startswith("refused")]
    (opened,) = {*lines} - {*refused, ""}
    pid, uid = opened.split()
    assert len(refused) == 19
    wanted = (f"in use by process {pid} on ", "wait for it to end, stop it, or choose another --name")
    assert [line for line in refused if not all(text in line for text in wanted)] == []
    assert json.loads(storage.read_bytes(storage.join(place, RUN_META)))["uid"] == uid
    with own_folder(place, "first"):  # the owner has ended normally
        assert open_run_dir(place, "first", RESOLVED, "owner")[2:4] == (uid, 2)


def test_a_withdrawn_claim_does_not_come_back_under_its_name(place, monkeypatch):
    """Another process that lists it, finds no file and looks again would take it for unreadable."""
    rivals = {"rival": lease.Claim({}, "now", None)}
    looks, live = iter([{}, rivals, {}, rivals]), Watch.live
    monkeypatch.setattr(Watch, "live", lambda watch: look if (look := next(looks, None)) is not None else live(watch))
    written, write = [], storage.write_bytes
    monkeypatch.setattr(storage, "write_bytes", lambda url, content: (written.append(url), write(url, content)))
    with own_folder(place, "first") as held:
        claims = [url for url in written if url.endswith(".json")]
        assert len(claims) == len({*claims}) == 3
        assert {*storage.list_files(storage.join(place, FOLDER))} == {f"{held.id}.json", f"{held.id}.beat"}


def test_a_folder_in_use_is_refused_whatever_the_home(place, owner):
    process = owner()
    with pytest.raises(ConfigError, match=f"first: {place} is in use by process {process.pid} on .*, since 20"):
        with own_folder(place, "first"):
            pass
    assert len([name for name in storage.list_files(place) if name.endswith(".json")]) == 1, "it left no claim"


def test_a_killed_owner_on_this_machine_is_replaced_at_once(place, owner, capsys):
    process = owner()
    process.kill()
    process.wait()
    with own_folder(place, "first"):
        pass
    assert capsys.readouterr().err == "", "it did not wait"


def test_a_killed_owner_on_another_machine_is_replaced_after_its_lease(place, owner, capsys, short_lease):
    process = owner("elsewhere")
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} on elsewhere"):
        with own_folder(place, "first"):  # it renews its lease
            pass
    process.kill()
    process.wait()
    capsys.readouterr()
    with own_folder(place, "first"):
        pass
    assert "vitray: first was last used by process" in capsys.readouterr().err


def test_an_owner_that_was_suspended_ends_with_one_message(place, owner, short_lease):
    process = owner("elsewhere")
    process.send_signal(signal.SIGSTOP)
    with own_folder(place, "first"):
        process.send_signal(signal.SIGCONT)
        message = process.stdout.readline()
        assert process.wait() == 0
        assert message.startswith(f"{place}: taken over by process {os.getpid()} on ")
        names = storage.list_files(storage.join(place, FOLDER))
        assert len([name for name in names if name.endswith(".json")]) == 1


def test_no_checkpoint_is_written_after_another_process_took_over(place, short_lease):
    checkpoint = Checkpoint(1, {"model": {"weight": torch.zeros(2)}}, {})
    with own_folder(place, "first") as first:
        saver = Saver(place, 1, check=partial(check_owner, place, first.id))
        saver.save(checkpoint)
        saver.close()
        with own_folder(place, "first", patience=60.0) as second:  # renews every 20 s, and the lease is 1 s
            for one, steps in ((first, [1]), (second, [1, 2])):
                saver = Saver(place, 9, check=partial(check_owner, place, one.id))
                saver.save(checkpoint._replace(step=2))
                if one is first:
                    with pytest.raises(OwnershipLost, match="taken over by process"):
                        saver.close()
                else:
                    saver.close()
                assert complete_steps(place) == steps
            assert check_owner(place, second.id) is None


def test_a_folder_that_another_node_does_not_see_is_refused_there(tmp_path):
    with own_folder(str(tmp_path / "head"), "first") as owner:
        assert check_visible(str(tmp_path / "head"), owner.id) is None
        with pytest.raises(
            ConfigError, match=r"--out: .* not visible on node \S+; expected s3://bucket/key, or a path that"
        ):
            check_visible(str(tmp_path / "node"), owner.id)
        assert check_visible("s3://bucket/node", owner.id) is None
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("at", ["upload", "prune"])
def test_a_folder_lost_while_a_checkpoint_is_written_is_left_alone(tmp_path, monkeypatch, at):
    run_dir, checkpoint = str(tmp_path), Checkpoint(1, {"model": {"weight": torch.zeros(2)}}, {})
    with own_folder(run_dir, "first") as first:
        saver = Saver(run_dir, 1, check=partial(check_owner, run_dir, first.id))
        saver.save(checkpoint)
        saver.close()

        def take_over(name, call):
            def write(*args):
                call(*args)
                if not name or args[0].endswith(name):
                    storage.remove(storage.join(run_dir, FOLDER))
                    storage.write_bytes(storage.join(run_dir, FOLDER, "b.json"), json.dumps(claim).encode())

            return write

        claim = {"process": {"vitray.host": "elsewhere", "vitray.pid": "1"}, "since": "yesterday"}
        name, ending = {"upload": ("upload", ""), "prune": ("write_bytes", "checkpoint.json")}[at]
        monkeypatch.setattr(storage, name, take_over(ending, getattr(storage, name)))
        saver = Saver(run_dir, 1, check=partial(check_owner, run_dir, first.id))
        saver.save(checkpoint._replace(step=2))
        with pytest.raises(OwnershipLost, match="taken over by process 1 on elsewhere"):
            saver.close()
        monkeypatch.undo()
        assert complete_steps(run_dir) == ([1] if at == "upload" else [1, 2]), "and nothing is pruned"


def test_an_owner_outlives_an_outage_of_its_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.2)
    folder, away, failed = tmp_path / "run", tmp_path / "away", threading.Event()

    def fail(url):
        failed.set()
        raise ConfigError(f"{url}: the storage does not answer")

    with own_folder(str(folder), "first") as held:
        folder.rename(away)  # as an unmounted file system
        time.sleep(1)  # several renewals
        assert not folder.exists()
        away.rename(folder)
        with monkeypatch.context() as patch:
            patch.setattr(storage, "list_files", fail)
            failed.wait()
        (claim,) = Watch(str(folder)).live().values()
        while next(iter(Watch(str(folder)).live().values())).beat == claim.beat:
            time.sleep(0.05)
        held.check()
    assert Watch(str(folder)).live() == {}


def test_an_owner_that_no_longer_beats_is_not_alive(tmp_path, monkeypatch):
    """The process of a trial may beat a few more times after the trial was started elsewhere."""
    claim = {"process": {"vitray.host": "elsewhere", "vitray.pid": "1"}, "since": "yesterday"}
    storage.write_bytes(str(tmp_path / FOLDER / "a.json"), json.dumps(claim).encode())
    watch = Watch(str(tmp_path))
    for beat, is_alive in ((b"7", False), (b"8", True), (b"8", True)):
        storage.write_bytes(str(tmp_path / FOLDER / "a.beat"), beat)
        assert watch.live().keys() == {"a"}
        assert watch.is_alive("a") is is_alive
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.0)  # it has not beaten for twice this time
    assert not watch.is_alive("a")
    assert watch.live().keys() == {"a"}, "its lease has not ended"


def test_a_folder_in_use_after_the_wait_is_no_bad_input(tmp_path):
    """A trial starts again then; bad input would be its end."""
    with own_folder(str(tmp_path), "first"):
        with pytest.raises(OwnershipLost, match="is in use by process"):
            with own_folder(str(tmp_path), "first", patience=0.01):
                pass


def test_a_late_beat_does_not_undo_the_release(tmp_path, monkeypatch):
    """The storage takes longer for a beat than the release waits for the thread."""
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.01)
    began, write = threading.Event(), storage.write_bytes

    def write_late(url, content):
        if content == b"1":
            began.set()
            time.sleep(0.5)
        write(url, content)

    monkeypatch.setattr(storage, "write_bytes", write_late)
    with own_folder(str(tmp_path), "first"):
        began.wait()
    for thread in threading.enumerate():
        if thread.name == "ownership":
            thread.join()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_could_not_be_read_does_not_run_out(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.2)
    claim = {"process": {"vitray.host": "elsewhere", "vitray.pid": "1"}, "since": "yesterday"}
    for suffix, content in ((".json", json.dumps(claim)), (".beat", "7")):
        storage.write_bytes(str(tmp_path / FOLDER / f"a{suffix}"), content.encode())
    watch = Watch(str(tmp_path))
    assert watch.live().keys() == {"a"}
    time.sleep(0.5)  # as long as a storage is away for this process, and perhaps for the owner
    assert watch.live().keys() == {"a"}
    while watch.live():
        time.sleep(0.02)
    assert watch.void == {"a"}


def test_a_run_and_a_sweep_stop_when_their_folder_is_lost(tmp_path):
    def check():
        raise OwnershipLost("taken over")

    ended = threading.Event()
    with pytest.raises(OwnershipLost, match="taken over"):
        GracefulShutdown(check=check).wait_for(ended.wait, None)
    ended.set()
    # The marker of an interruption would stop the other process's trials.
    assert Interruption("", SimpleNamespace(is_lost=True)).stop_all()
    assert not Interruption("", SimpleNamespace(is_lost=False)).stop_all()


def test_a_folder_that_another_process_has_taken_over_and_left_is_lost(tmp_path):
    folder = str(tmp_path / "run")
    with own_folder(folder, "first") as first:
        storage.remove(storage.join(folder, FOLDER))  # as after a pause longer than the lease
        with own_folder(folder, "second"):
            pass
        with pytest.raises(OwnershipLost, match="taken over by another process"):
            check_owner(folder, first.id)
