"""Tells Ray that this node is about to be preempted: python -m vitray.cluster.spot, beside `ray start`.

Runs then save and leave the node while it still runs. The news come from EC2's metadata service, or, of other clouds,
by a file or by SIGUSR1 from what hears them.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from vitray.cluster import session

# As AWS recommends; the notice comes two minutes ahead.
POLL_SECONDS = 5.0
# Where boto3 looks for the metadata service, and its address unless the variable is set.
ENDPOINT, METADATA = "AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254"
TIMEOUT = 2.0


def main(words: list[str]) -> None:
    """Wait for the notice, and pass it on."""
    parser = argparse.ArgumentParser(prog="python -m vitray.cluster.spot", description=__doc__)
    parser.add_argument("--file", type=Path, help="announces the preemption once it exists")
    text = "from a file or SIGUSR1 to the node's end (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=30.0, help=text)
    options = parser.parse_args(words)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    seconds = wait_for_notice(options.file, options.seconds)
    print(f"vitray: this node ends in {seconds:.0f} s; its runs leave it", file=sys.stderr, flush=True)
    drain(seconds)


def wait_for_notice(file: Path | None, seconds: float) -> float:
    """Return the seconds that this node has left, once it hears of its end."""
    for left in ec2_notices():
        if left is not None:
            return left
        if file is not None and file.exists():
            return seconds
        if signal.sigtimedwait({signal.SIGUSR1}, POLL_SECONDS):
            return seconds
    raise AssertionError("the notices end")


def ec2_notices() -> Iterator[float | None]:
    """Yield the seconds to the end of this instance that EC2 announces; None: nothing is announced."""
    address, token, until = os.environ.get(ENDPOINT, METADATA).rstrip("/"), "", 0.0
    while True:
        left = None
        # Elsewhere than on EC2, and while the service is away.
        with suppress(OSError, ValueError, KeyError):
            if time.monotonic() > until:
                hours = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
                token = _ask(f"{address}/latest/api/token", hours, "PUT")
                until = time.monotonic() + 21_000
            headers = {"X-aws-ec2-metadata-token": token}
            notice = json.loads(_ask(f"{address}/latest/meta-data/spot/instance-action", headers, "GET"))
            end = datetime.fromisoformat(notice["time"])
            left = max(0.0, (end - datetime.now(UTC)).total_seconds())
        yield left


def _ask(url: str, headers: dict[str, str], method: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would ask its own machine
    with opener.open(urllib.request.Request(url, headers=headers, method=method), timeout=TIMEOUT) as answer:
        return answer.read(65_536).decode()


def drain(seconds: float) -> None:
    """Have Ray move the work of this node to others."""
    os.environ.setdefault("RAY_ADDRESS", "auto")  # the Ray of this node
    session.prepare_environment()
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    context = ray.get_runtime_context()
    node, address = context.get_node_id(), context.gcs_address
    ray.shutdown()
    options = ["--address", address, "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    options += ["--reason-message", "announced", "--deadline-remaining-seconds", str(int(seconds))]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "drain-node", *options], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
