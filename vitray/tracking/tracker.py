"""What a driver tells MLflow: it writes into the journal and returns; a thread sends it."""

import getpass
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from vitray.errors import ConfigError, one_line, redact, redact_uri
from vitray.tracking.mlflow_client import import_mlflow, open_client, tracking_uri
from vitray.tracking.spool import RECORDS, Journal, now, spool
from vitray.tracking.system_info import has_died, identity
from vitray.tracking.uploader import REASON, UID, Delivery

LOG = logging.getLogger("vitray.tracking")

Status = Literal["FINISHED", "FAILED", "KILLED"]

# Seconds that the end of a run waits for MLflow: at most, and where it is away. What is killed meanwhile, as `ray job
# stop` does after 3 s unless told otherwise, keeps its journal; and a run that has just begun still loads MLflow.
PATIENCE: dict[Status, tuple[float, float]] = {"FINISHED": (600, 10), "FAILED": (30, 5), "KILLED": (8, 1)}

# Seconds for `vitray track flush`, or another run's start, to send what an earlier attempt of a run left.
JOURNAL_PATIENCE = 30.0

# Pauses in seconds: between portions, so that points travel together, and the longest while the server is away.
PAUSE, LONGEST_PAUSE = 1.0, 30.0


class Tracker:
    """One run's records; nothing here waits for MLflow but the end, which is bounded, and nothing raises for its sake.

    As a context it ends the run: FINISHED, FAILED with what was raised, or KILLED on Ctrl-C and SystemExit.
    """

    @classmethod
    def begin(
        cls,
        uid: str,
        name: str,
        experiment: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        description: str,
        parent: str | None = None,
    ) -> Self:
        """Begin the run of this uid, or continue it where there is one; `parent` is the uid of the run it shows below.

        Continued, it is the same MLflow run: RUNNING again, and a step that a metric already has is not recorded again.
        """
        tracker = cls(uid, name, experiment)
        commit = {"mlflow.source.git.commit": tags["git.commit"]} if "git.commit" in tags else {}
        tracker._note(
            {
                "kind": "begin",
                "uid": uid,
                "name": name,
                "experiment": experiment,
                "parent": parent,
                "time": now(),
                "params": {
                    _clean(key): value if isinstance(value, str) else json.dumps(value) for key, value in params.items()
                },
                "tags": {"mlflow.user": _user()}
                | commit
                | {_clean(key): str(value) for key, value in tags.items()}
                | identity(),
                "description": description,
            }
        )
        tracker._shipper = Shipper(Delivery(tracker._journal, tracker.uri), lambda: _close(experiment, tracker.uri))
        return tracker

    def __init__(self, uid: str, name: str, experiment: str) -> None:
        self.uid = uid
        self.name = name
        self.experiment = experiment
        self.uri = tracking_uri()
        self._shipper: Shipper | None = None
        self._complained = False
        self._ended = False
        try:
            self._journal = Journal(spool() / uid, JOURNAL_PATIENCE)
        except BlockingIOError:
            raise ConfigError(f"{spool() / uid}: another process tracks this run; wanted that it ends first") from None

    def metrics(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Record numbers of a step, at a time in seconds since 1970 (None: now)."""
        numbers = {_clean(key): float(value) for key, value in values.items()}
        made = now() if at is None else int(at * 1000)
        self._note({"kind": "metrics", "step": int(step), "time": made, "values": numbers})

    def figure(self, path: str, png: bytes) -> None:
        """Record a picture as the artifact `path`, as in `figures/loss.png`."""
        self._keep(path, png)

    def text(self, path: str, text: str) -> None:
        """Record a text as the artifact `path`."""
        self._keep(path, redact(text).encode())

    def tag(self, key: str, value: str) -> None:
        """Set a tag of the run."""
        self._note({"kind": "tags", "time": now(), "tags": {_clean(key): str(value)}})

    def describe(self, markdown: str) -> None:
        """Replace the description, which MLflow shows above everything else."""
        self._note({"kind": "tags", "time": now(), "tags": {"mlflow.note.content": markdown}})

    def model(self, folder: str, register_as: str | None = None, top1: float | None = None) -> None:
        """Log the model folder at an address, and register it: `champion` where `top1` is above the champion's."""
        body = {"kind": "model", "time": now(), "id": uuid.uuid4().hex, "folder": folder}
        self._note(body | {"register_as": register_as, "top1": top1})

    @property
    def run_id(self) -> str | None:
        """MLflow's name of the run; None until it has heard of it."""
        return self._shipper.delivery.run_id if self._shipper else None

    def run_url(self) -> str:
        """Where a person finds the run: an address, or the command that opens it."""
        where = redact_uri(self.uri).rstrip("/")
        if where.startswith("http"):
            return (self.run_id and self.url_of(self.run_id)) or where
        prefix = f"MLFLOW_TRACKING_URI={where} " if "MLFLOW_TRACKING_URI" in os.environ else ""
        return f"{prefix}vitray ui   (experiment {self.experiment}, run {self.name})"

    def url_of(self, run_id: str) -> str | None:
        """The address of the page of a run of the same experiment; None where no server shows it."""
        where = redact_uri(self.uri).rstrip("/")
        experiment = self._shipper.delivery.experiment_id if self._shipper else None
        is_shown = where.startswith("http") and experiment is not None
        return f"{where}/#/experiments/{experiment}/runs/{run_id}" if is_shown else None

    def kill(self, uid: str, reason: str) -> None:
        """End another run of the experiment, whose driver is gone without having said so."""
        self._note({"kind": "kill", "time": now(), "uid": uid, "reason": reason})

    def flush(self, seconds: float, away: float | None = None) -> str | None:
        """Wait until all is with MLflow, at most so long (`away`: where it does not answer); what remains, or None."""
        assert self._shipper is not None
        return self._shipper.flush(seconds, seconds if away is None else away)

    def end(self, status: Status, reason: str | None = None) -> None:
        """End the run, and wait a bounded time for MLflow; what remains waits for `vitray track flush`."""
        if self._ended or self._shipper is None:
            return
        self._ended = True
        said = None if reason is None else redact(reason)
        self._note({"kind": "end", "time": now(), "status": status, "reason": said})
        left = self._shipper.flush(*PATIENCE[status])
        self._shipper.close(is_whole=left is None)
        if left is not None:
            LOG.warning("tracking: %s; `vitray track flush` sends them from %s", left, self._journal.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        match error:
            case None | SystemExit(code=None | 0):
                self.end("FINISHED")
            case KeyboardInterrupt():
                self.end("KILLED", "KeyboardInterrupt: stopped by Ctrl-C")
            case SystemExit():
                self.end("KILLED", f"SystemExit: {error}")
            case _:
                self.end("FAILED", one_line(error))

    def _keep(self, path: str, content: bytes) -> None:
        try:
            file = self._journal.store(path.rpartition("/")[2], content)
        except OSError as error:
            self._complain(error)
        else:
            self._note({"kind": "artifact", "time": now(), "path": path, "file": file})

    def _note(self, body: dict[str, Any]) -> None:
        try:
            self._journal.append(body)
        except (OSError, ValueError) as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        """Say once that records are lost."""
        if not self._complained:
            LOG.warning("tracking: records are lost: %s: %s", self._journal.folder, one_line(error))
        self._complained = True


class Shipper:
    """A thread that delivers a journal while the run goes on, and never raises."""

    def __init__(self, delivery: Delivery, then: Callable[[], object]) -> None:
        self.delivery = delivery
        self.trouble: str | None = None
        self._failures = 0
        self._is_whole = False
        self._then: Callable[[], object] | None = then
        self._stir = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vitray-tracking", daemon=True)
        self._thread.start()

    def flush(self, seconds: float, away: float) -> str | None:
        """Wait until all is sent, at most so long, and less where the server is away; what remains, or None."""
        start, stirred = time.monotonic(), -1
        while left := self.delivery.left:
            waited = time.monotonic() - start
            if int(waited) > stirred:  # once a second even while it pauses longer
                self._stir.set()
                stirred = int(waited)
            if waited > seconds or (self.trouble and waited > away):
                return f"{left} bytes of records: {self.trouble or 'MLflow answers slowly'}"
            time.sleep(0.05)
        return None

    def close(self, is_whole: bool) -> None:
        """Stop after the call that is under way, and let go of the journal, which is removed if it arrived whole."""
        self._is_whole = is_whole
        self._closing.set()
        self._stir.set()
        self._thread.join(5 if is_whole else 0.3)

    def _work(self) -> None:
        pause = 0.0
        try:
            import_mlflow()  # here, since it takes seconds that a run need not wait for
        except Exception as error:
            LOG.warning("tracking: MLflow cannot be imported, records wait: %s", one_line(error))
        try:
            while not self._closing.is_set():
                self._stir.wait(pause)
                self._stir.clear()
                pause = PAUSE if self._deliver_all() else min(LONGEST_PAUSE, 2 * max(PAUSE, pause))
        finally:
            if self._is_whole:
                self.delivery.journal.remove()
            else:
                self.delivery.journal.close()

    def _deliver_all(self) -> bool:
        """Send what there is; False where MLflow did not take it."""
        try:
            while self.delivery.left and not self._closing.is_set():
                self.delivery.deliver()
                self._is_back()
            if self._then is not None and not self._closing.is_set():
                # In a thread of its own: a run does not wait for what others left.
                threading.Thread(target=_quietly, args=[self._then], name="vitray-orphans", daemon=True).start()
                self._then = None
        except Exception as error:
            self._is_away(one_line(error))
            return False
        return True

    def _is_away(self, why: str) -> None:
        # A refused connection takes MLflow four lines; what is new in them comes first and last.
        why = why if len(why) < 300 else f"{why[:110]} ... {why[-150:]}"
        self._failures += 1
        if self._failures == 2:  # once is a blip
            LOG.warning(
                "tracking: MLflow does not take records, which wait in %s: %s", self.delivery.journal.folder, why
            )
        self.trouble = why

    def _is_back(self) -> None:
        if self._failures > 1:
            LOG.warning("tracking: MLflow takes records again")
        self.trouble, self._failures = None, 0


def _quietly(then: Callable[[], object]) -> None:
    try:
        then()
    except Exception as error:
        LOG.debug("tracking: what dead drivers left is not complete: %s", one_line(error))


class Flushed(NamedTuple):
    """What became of a journal that a driver had left behind."""

    uid: str
    name: str
    state: Literal["complete", "waiting", "running"]
    said: str


def flush_all() -> list[Flushed]:
    """Send every journal that no driver has open, and remove those that arrived whole."""
    import_mlflow()
    return [_settle(folder, tracking_uri()) for folder in _folders()]


def close_orphans(experiment: str) -> list[str]:
    """Complete what dead drivers of this machine left; the names of the runs that are now KILLED.

    A run of another machine, or whose driver cannot be proved dead, is left alone.
    """
    import_mlflow()
    return _close(experiment, tracking_uri())


def _close(experiment: str, uri: str) -> list[str]:
    for folder in _folders():
        _settle(folder, uri)
    client = open_client(uri)
    found = client.get_experiment_by_name(experiment)
    closed = []
    for run in client.search_runs([found.experiment_id], "attributes.status = 'RUNNING'") if found else []:
        tags = run.data.tags
        # What has a journal here was settled above, or is being continued at this moment.
        if UID in tags and not (spool() / tags[UID]).exists() and has_died(tags):
            client.set_tag(run.info.run_id, REASON, _died(tags))
            client.set_terminated(run.info.run_id, "KILLED")
            closed.append(str(run.info.run_name))
    return closed


def _folders() -> list[Path]:
    """The journals, the oldest first: a run is made before those below it."""
    return sorted((path.parent for path in spool().glob(f"*/{RECORDS}")), key=_birth)


def _birth(folder: Path) -> int:
    try:
        with (folder / RECORDS).open() as lines:
            return json.loads(lines.readline())["time"]
    except (OSError, ValueError, KeyError):
        return 0


def _settle(folder: Path, uri: str) -> Flushed:
    """Send a journal that nobody has open; one whose driver is proved dead ends as KILLED."""
    try:
        journal = Journal(folder)
    except BlockingIOError:
        return Flushed(folder.name, folder.name, "running", "its driver sends its records itself")
    try:
        begin, ended, latest = journal.last()
        if begin is None:
            journal.remove()
            return Flushed(folder.name, folder.name, "complete", "nothing was recorded")
        if not ended and has_died(begin["tags"]):
            journal.append({"kind": "end", "time": latest, "status": "KILLED", "reason": _died(begin["tags"])})
            ended = True
        delivery = Delivery(journal, uri)
        while delivery.left:
            delivery.deliver()
        if not ended:
            return Flushed(begin["uid"], begin["name"], "running", "sent; its driver cannot be proved dead")
        journal.remove()
        return Flushed(begin["uid"], begin["name"], "complete", "complete")
    except Exception as error:
        return Flushed(folder.name, folder.name, "waiting", f"still waits: {one_line(error)}")
    finally:
        journal.close()


def _died(tags: Mapping[str, str]) -> str:
    return f"its driver, process {tags['vitray.pid']} on {tags['vitray.host']}, died without a word"


def _clean(key: str) -> str:
    """A key as MLflow takes it: other characters than letters, digits and `_-. :/` become `_`."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return str(os.getuid())
