"""python experiments/measure_data_check.py [--minutes 30] [--out FILE]: `vitray doctor data` against 16 trainings.

Each is checked, and then trained at demo size for the steps of 32 seconds at the measured speed, of which the last two
thirds count: the others include the start. Where images limit, it trains three times as long and the last third counts:
images that were decoded during the start last for a while, although Ray's object store is small. The results are in one
JSON: a later call measures those that are missing. Run it on a machine without other work.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vitray.bench.data_check import check_data
from vitray.cluster.session import ray_session
from vitray.config import Run, load_run
from vitray.data.shards import read_request, write_dataset
from vitray.runs.resolve import resolve
from vitray.runs.run_dir import OUTCOME
from vitray.runs.train import train
from vitray.system import host_facts, storage

# Seconds of each of the check's measurements, and of the training beside it.
CHECKING, TRAINING = 12.0, 32.0
RECORDS, COUNTED = 9, 6
# Of a run that waits for data: how many times as long it trains, and its records that count.
LONGER, COUNTED_LAST = 3, 3
STORE_BYTES = 640 * 2**20
SIZES, POLICIES, WORKERS, NETWORKS = (64, 96), ("none", "three_augment"), (1, 2), ("vit_u2x1_8", "vit_u6x2_8")


def configurations() -> dict[str, Run]:
    """Return the runs by name."""
    return {
        f"{network}, {size} px, {policy}, {workers} workers": load_run().replace(
            {
                "model.name": network,
                "model.image_size": size,
                "model.num_classes": 10,
                "data.augment.policy": policy,
                "data.val": None,
                "optim.batch": 64,
                "optim.warmup": "10 steps",
                "compute.workers": workers,
            }
        )
        for size, policy, workers, network in product(SIZES, POLICIES, WORKERS, NETWORKS)
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="no other one begins after them (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench_out/data_check.json"), help="the results (%(default)s)")
    options = parser.parse_args(words)
    end, runs = time.monotonic() + 60 * options.minutes, configurations()
    rows: list[dict[str, Any]] = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    missing = [name for name in runs if name not in {row["name"] for row in rows}]
    with tempfile.TemporaryDirectory(prefix="vitray-") as name:
        folder = Path(name)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlruns.db'}"
        os.environ["VITRAY_HOME"] = str(folder / "home")
        with ray_session(object_store_bytes=STORE_BYTES):
            write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=2000", "image_size=96"]))
            for each in missing:
                if time.monotonic() > end:
                    break
                rows.append({"name": each} | measure(runs[each].replace({"data.url": str(folder / "demo")}), folder))
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps({"facts": host_facts.facts(), "rows": rows}, indent=1) + "\n")
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))


def measure(run: Run, folder: Path) -> dict[str, Any]:
    """Return the check of a run on this machine, and what its training gave."""
    checked = check_data(resolve(run), CHECKING, rounds=3)
    longer, counted = (1, COUNTED) if checked["bottleneck"] == "step" else (LONGER, COUNTED_LAST)
    every = max(5, round(longer * TRAINING * checked["images_per_second"] / run.optim.batch / RECORDS))
    changes = {"optim.duration": f"{RECORDS * every} steps", "tracking.every": f"{every} steps"}
    home = train(run.replace(changes), f"run{len(list(folder.iterdir()))}{time.time_ns()}", str(folder / "runs")).home
    outcome = json.loads(storage.read_bytes(storage.join(home, OUTCOME)))
    speeds, waits = (
        np.array([value for _, value in outcome["curves"][name][-counted:]])
        for name in ("train/images_per_second", "train/data_wait_share")
    )
    times = 1 / speeds / (1 / speeds).sum()
    return {
        "checked": checked,
        "load": os.getloadavg()[0],
        "images_per_second": len(speeds) / float((1 / speeds).sum()),
        "speeds": speeds.tolist(),
        "wait_share": float(times @ waits),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| configuration | bottleneck | checked images/s | in training | error | checked wait | in training | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        checked, speed = row["checked"], row["images_per_second"]
        error = checked["images_per_second"] / speed - 1
        lines.append(
            f"| {row['name']} | {checked['bottleneck']} | {checked['images_per_second']:.0f} | {speed:.0f}"
            f" | {error:+.0%} | {checked['wait_share']:.0%} | {row['wait_share']:.0%} | {row['load']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
