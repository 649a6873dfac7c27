"""`vitray train ...` with a record of the images of each step, for the harness; nothing else is changed."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import vitray.runs.ray_host
from pipelines.__main__ import main

PACE = json.loads(os.environ["FAULTS_SETTINGS"])["pace"]
RECORD = os.environ["FAULTS_RECORD"]


def recorded_worker(config: dict[str, Any]) -> Any:
    """Train as one worker; Ray sends this function to the worker's process by value."""
    from vitray.runs import ray_host
    from vitray.training import loop

    file, plain_step, last = os.open(RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT), loop.take_step, [0.0]

    def take_step(run: Any, step: int, batch: Any, share: Any, learner: Any, steps_per_epoch: int) -> Any:
        result = plain_step(run, step, batch, share, learner, steps_per_epoch)
        line = " ".join(map(str, [f"{time.time():.3f}", os.getpid(), share.rank, step, *batch.rows.tolist()]))
        os.write(file, f"{line}\n".encode())
        time.sleep(max(0.0, last[0] + PACE - time.monotonic()))
        last[0] = time.monotonic()
        return result

    loop.take_step = take_step
    return ray_host.worker(config)


if __name__ == "__main__":
    Path(RECORD).touch()
    vitray.runs.ray_host.worker = recorded_worker
    sys.exit(main())
