"""python experiments/measure_sweep.py: what Tune's loop and the starts of trials cost, with 200 trials of one second.

A stand-in keeps a trial's record and sleeps in place of training; Ray, Tune, the trial store, the report and MLflow are
real.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ray import tune

import vitray.sweeps.trial
from vitray.cluster.session import ray_session
from vitray.config import load_run
from vitray.data.shards import read_request, write_dataset
from vitray.sweeps.plan import Recipe
from vitray.sweeps.space import read_space
from vitray.sweeps.sweep import sweep
from vitray.sweeps.trial_store import TrialRecord, write_record
from vitray.system import storage

TRIALS = 200
STEPS = 5
STEP_SECONDS = 0.2
SPACES = {
    "grid": f"space: {{optim.lr: {{grid: {[round(1e-3 + 1e-5 * trial, 5) for trial in range(TRIALS)]}}}}}\n",
    "tpe": f"space: {{optim.lr: {{loguniform: [1.0e-3, 0.1]}}}}\nsearch: {{kind: tpe, trials: {TRIALS}}}\n",
}
RECIPE = """
model: {name: vit_u2x1_8, image_size: 32, num_classes: 10}
optim: {batch: 16, duration: 5 steps, warmup: 0 steps, rule: sgd, clip: null}
evaluate: {every: 1 step}
compute: {workers: 1}
"""


class StandIn(tune.Trainable):
    """A trial that keeps its record as a training run does, and trains nothing."""

    def setup(self, config: dict[str, Any], context: Any = None) -> None:  # type: ignore[override]
        """Keep the context and begin."""
        self.context = context
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin the trial of these settings."""
        self.run_dir = f"{self.context.sweep_dir}/{new_config['name']}"
        self.score = -abs(new_config["optim.lr"] - 0.01)
        self.record = TrialRecord("running", began=time.time(), steps=STEPS)
        return True

    def step(self) -> dict[str, Any]:
        """Sleep, and return a score."""
        time.sleep(STEP_SECONDS)
        step = len(self.record.scores) + 1
        is_done = step == STEPS
        self.record = self.record._replace(scores=(*self.record.scores, (step, self.score)))
        result: dict[str, Any] = {"step": step, "steps": STEPS, "share": step, "goal": self.score, "done": is_done}
        if is_done:
            outcome = {"device_seconds": 1.0, "curves": {}, "state": "finished"}
            storage.write_bytes(f"{self.run_dir}/outcome.json", json.dumps(outcome).encode())
            self.record = self.record._replace(state="finished")
            result |= {"state": "finished", "device_seconds": 1.0}
        write_record(self.run_dir, self.record)
        return result


def main() -> None:
    """Print a table."""
    vitray.sweeps.trial.TrialTrainable = StandIn  # type: ignore[misc, assignment]
    rows = []
    with tempfile.TemporaryDirectory(prefix="vitray-") as name, ray_session(cpus=4):
        folder = Path(name)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlruns.db'}"
        os.environ["VITRAY_HOME"] = str(folder / "home")
        write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=100", "image_size=32"]))
        (folder / "tiny.yaml").write_text(f"{RECIPE}data: {{url: {folder / 'demo'}}}\n")
        for search, space in SPACES.items():
            (folder / f"{search}.yaml").write_text(f"{space}goal: {{metric: val/loss, mode: max}}\n")
            rows.append(measure(folder, search))
    print("| search | trials | at once | wall, s | steps alone, s | main thread's CPU a trial, s | rest a trial, s |")
    print("|---|---|---|---|---|---|---|\n" + "\n".join(rows))


def measure(folder: Path, search: str) -> str:
    """Run one sweep and return its row of the table."""
    recipe = Recipe(load_run(folder / "tiny.yaml", []), ["tiny"])
    start, cpu = time.monotonic(), time.thread_time()
    outcome = sweep(recipe, read_space(folder / f"{search}.yaml"), search, str(folder / "sweeps"), "measure")
    wall, cpu = time.monotonic() - start, time.thread_time() - cpu
    assert outcome.finished == TRIALS, outcome
    records = [json.loads(path.read_text()) for path in Path(outcome.home).glob("*/trial.json")]
    at_once = most_at_once(records)
    alone = TRIALS * STEPS * STEP_SECONDS / at_once
    rest = (wall - alone) / TRIALS
    return f"| {search} | {TRIALS} | {at_once} | {wall:.0f} | {alone:.0f} | {cpu / TRIALS:.3f} | {rest:.3f} |"


def most_at_once(records: list[dict[str, Any]]) -> int:
    """Return the highest number of trials that overlap, from their starts."""
    starts = sorted(record["began"] for record in records)
    seconds = STEPS * STEP_SECONDS
    return max(sum(start <= other < start + seconds for other in starts) for start in starts)


if __name__ == "__main__":
    sys.exit(main())
