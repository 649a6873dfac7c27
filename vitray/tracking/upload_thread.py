"""The background thread that uploads a spool during a run."""

import logging
import threading
import time
from collections.abc import Callable

from vitray.errors import one_line
from vitray.tracking.mlflow_client import import_mlflow
from vitray.tracking.uploader import Uploader

LOG = logging.getLogger("vitray.tracking")

# Seconds between uploads, so that points are sent in batches, and at most while the server is offline.
PAUSE, MAX_PAUSE = 1.0, 30.0


class UploadThread:
    """Uploads a spool in the background, and never raises.

    After the first complete upload it calls `on_first_upload` in another thread.
    """

    def __init__(self, uploader: Uploader, on_first_upload: Callable[[], object]) -> None:
        self.uploader = uploader
        self._error: str | None = None
        self._failures = 0
        self._is_complete = False
        self._on_first_upload: Callable[[], object] | None = on_first_upload
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitray-tracking", daemon=True)
        self._thread.start()

    def flush(self, timeout: float, offline_timeout: float) -> str | None:
        """Wait until all records are sent; return a description of the unsent rest, or None.

        The wait is limited to `timeout` seconds, or `offline_timeout` if the server does not respond.
        """
        start, last_wake = time.monotonic(), -1
        while remaining := self.uploader.remaining:
            waited = time.monotonic() - start
            if int(waited) > last_wake:  # retry every second, even during a longer pause
                self._wake.set()
                last_wake = int(waited)
            if waited > timeout or (self._error and waited > offline_timeout):
                return f"{remaining} bytes of records: {self._error or 'MLflow answers slowly'}"
            time.sleep(0.05)
        return None

    def close(self, is_complete: bool) -> None:
        """Stop after the current call; remove the spool if it was uploaded completely, else release it."""
        self._is_complete = is_complete
        self._closing.set()
        self._wake.set()
        self._thread.join(5 if is_complete else 0.3)

    def _run(self) -> None:
        pause = 0.0
        try:
            import_mlflow()  # in this thread, because it takes seconds
        except Exception as error:
            LOG.warning("tracking: MLflow cannot be imported, records wait: %s", one_line(error))
        try:
            while not self._closing.is_set():
                self._wake.wait(pause)
                self._wake.clear()
                pause = PAUSE if self._upload_all() else min(MAX_PAUSE, 2 * max(PAUSE, pause))
        finally:
            if self._is_complete:
                self.uploader.spool.remove()
            else:
                self.uploader.spool.close()

    def _upload_all(self) -> bool:
        """Upload all records; return False if MLflow does not accept them."""
        try:
            while self.uploader.remaining and not self._closing.is_set():
                self.uploader.send_next()
                self._note_success()
            if self._on_first_upload is not None and not self._closing.is_set():
                args = [self._on_first_upload]
                threading.Thread(target=_run_quietly, args=args, name="vitray-orphans", daemon=True).start()
                self._on_first_upload = None
        except Exception as error:
            self._note_failure(one_line(error))
            return False
        return True

    def _note_failure(self, error: str) -> None:
        # MLflow's message of a refused connection has four lines; only its start and end are specific.
        self._error = error if len(error) < 300 else f"{error[:110]} ... {error[-150:]}"
        self._failures += 1
        if self._failures == 2:  # ignore a single failure
            folder = self.uploader.spool.folder
            LOG.warning("tracking: MLflow does not take records, which wait in %s: %s", folder, self._error)

    def _note_success(self) -> None:
        if self._failures > 1:
            LOG.warning("tracking: MLflow takes records again")
        self._error, self._failures = None, 0


def _run_quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:
        LOG.debug("tracking: records of dead drivers are not complete: %s", one_line(error))
