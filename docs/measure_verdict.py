"""python docs/measure_verdict.py [N]: `vitray doctor data` against training, over N configurations (all 16).

Each is predicted before Ray starts and then trained at demo size. Run it on a quiet machine with at least 4 CPUs.
"""

import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

from vitray import storage
from vitray.bench.recipe_stages import measure_stages, plan_machines
from vitray.bench.verdict import Prediction, predict
from vitray.cluster.session import ray_session
from vitray.config import Run, load_run
from vitray.data.shards import read_request, write_dataset
from vitray.runs.driver import train
from vitray.runs.run_dir import OUTCOME

SECONDS = 10.0
SIZES, POLICIES, WORKERS, NETWORKS = (32, 64), ("none", "three_augment"), (1, 2), ("vit_u2x1_8", "vit_u6x2_8")


def main() -> None:
    """Print a table."""
    runs = {
        f"{network}, {size} px, {policy}, {workers} workers": load_run().replace(
            {
                "model.name": network,
                "model.image_size": size,
                "model.num_classes": 10,
                "data.augment.policy": policy,
                "data.val": None,
                "optim.batch": 64,
                "optim.duration": "240 steps",
                "optim.warmup": "10 steps",
                "compute.workers": workers,
                "tracking.every": "20 steps",
            }
        )
        for size, policy, workers, network in product(SIZES, POLICIES, WORKERS, NETWORKS)
    }
    # A part of them is spread over all sizes, policies, workers and networks.
    count = int(sys.argv[1]) if len(sys.argv) > 1 else len(runs)
    chosen = [list(runs)[at * len(runs) // count] for at in range(min(count, len(runs)))]
    with tempfile.TemporaryDirectory(prefix="vitray-") as name:
        folder = Path(name)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlruns.db'}"
        os.environ["VITRAY_HOME"] = str(folder / "home")
        with ray_session():
            write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=2000", "image_size=96"]))
        configured = {each: runs[each].replace({"data.url": str(folder / "demo")}) for each in chosen}
        predicted = {each: predict_run(run) for each, run in configured.items()}
        print("| configuration | bottleneck | predicted images/s | measured | error | predicted wait | measured |")
        print("|---|---|---|---|---|---|---|")
        with ray_session():
            for number, (each, run) in enumerate(configured.items()):
                print(row(each, predicted[each], train(run, f"run{number}", str(folder / "runs")).home), flush=True)


def predict_run(run: Run) -> Prediction:
    """Return the prediction of a run on this machine."""
    machines = plan_machines(run, None)
    return predict(measure_stages(run, machines, SECONDS), machines)


def row(name: str, predicted: Prediction, run_dir: str) -> str:
    """Return a row of the table."""
    outcome = json.loads(storage.read_bytes(storage.join(run_dir, OUTCOME)))
    speed = outcome["images_per_second"]
    wait = median(share for _, share in outcome["curves"]["train/data_wait_share"][1:])
    error = predicted.images_per_second / speed - 1
    return (
        f"| {name} | {predicted.bottleneck} | {predicted.images_per_second:.0f} | {speed:.0f} | {error:+.0%}"
        f" | {predicted.wait_share:.0%} | {wait:.0%} |"
    )


if __name__ == "__main__":
    sys.exit(main())
