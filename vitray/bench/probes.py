"""The cost of evaluate.probes: training steps alone, and beside probes that run without a pause.

A run probes only at its evaluations. Its cost is the one measured here, times the share of the time in which a probe
runs: the seconds of a probe over those between two evaluations.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from vitray.bench.results import Results
from vitray.bench.train import mode_text, random_batch, recipe, training_step
from vitray.cluster import session
from vitray.config import Run
from vitray.config.evaluation import training_probes
from vitray.data.shards import Dataset, read_request, write_dataset
from vitray.errors import ConfigError, RunError
from vitray.runs.ray_host import RayJob, RayStart, start_probe_actor, unfinished
from vitray.runs.resolve import resolve
from vitray.system.storage import scratch_folder
from vitray.system.timing import circumstances, in_rounds, ratio_of, spread_of
from vitray.training.host import Job
from vitray.training.learner import Learner
from vitray.training.messages import Message
from vitray.training.prober import Prober
from vitray.training.resolved import ResolvedRun

# Images of train, and as many of val, that the probes read.
IMAGES = 256
# Seconds between two looks at a probe. A look takes 0.1 ms, which a step of a small network would notice.
POLL_SECONDS = 0.1


class ProbeLoad:
    """Probes of a learner's weights, one after the other."""

    def __init__(self, prober: Prober, learner: Learner) -> None:
        self._prober, self._learner = prober, learner
        self.done = 0

    def look(self) -> None:
        """Start a probe if none runs."""
        self.done += len(list(self._prober.finished()))
        if not self._prober.pending:
            self._prober.start(self.done, self._learner, is_last=False)

    def wait(self) -> None:
        """Wait for the end of the probe that runs."""
        self.done += len(list(self._prober.finished(wait=True)))


class ProbeHost:
    """The part of a host that a prober uses: a probe that fails ends the benchmark."""

    rank = 0

    def __init__(self, resolved: ResolvedRun) -> None:
        self._prober = start_probe_actor(RayStart(resolved, run_dir="", owner="", threads=1))
        self.unfinished = unfinished

    def start_probes(self, step: int, weights: Mapping[str, np.ndarray]) -> Job:
        """Compute probes as training does."""
        return RayJob(self._prober.probe.remote(step, weights))

    def send(self, message: Message) -> None:
        """Raise what training would only report."""
        raise RunError(str(message))


class ProbeCost(NamedTuple):
    """Images per second in each round, and the mean seconds of a probe."""

    probed: list[float]
    alone: list[float]
    probe_seconds: float


def measure_probes(
    models: Sequence[str],
    batch: int,
    image_size: int,
    dtype: str,
    compile_mode: str | bool,
    rounds: int,
    seconds: float,
    out: Path,
) -> dict[str, Any]:
    """Measure every model, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with session.ray_session(), scratch_folder() as folder:
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if cpus < 2:
            raise ConfigError(f"--probes: got a cluster with {cpus} CPU, expected 2: for the steps and for the probes")
        threads = 1 if device.type == "cuda" else cpus - 1
        overrides = [f"images={IMAGES * 5 // 4}", "val_share=0.8", f"image_size={image_size}"]
        dataset = write_dataset(read_request("demo", str(folder / "demo"), overrides=overrides))
        where = circumstances(device, threads)
        about = f"{mode_text(dtype, compile_mode)}, {image_size} px, batches of {batch}"
        print(f"images/s of a training step, median ± half the interquartile range of {rounds} rounds")
        print(f"{where}; {about}")
        print(f"{threads} of {cpus} CPUs for the steps, one for the probes of {IMAGES:,} images, without a pause")
        print(f"\n{'model':<18}{'beside probes':>18}{'alone':>18}{'ratio':>18}{'s a probe':>12}")
        # In a worker of Ray, as in training: it has the priority that the processes of a run have.
        measure: Any = ray.remote(_measure).options(num_cpus=threads, num_gpus=int(device.type == "cuda"))
        stem = f"train_probes_{device.type}_{dtype}"
        results = Results(out / stem, device, {"circumstances": where, "about": about})
        for name in models:
            run = recipe(name, batch, image_size, dtype, compile_mode)
            cost: ProbeCost = ray.get(measure.remote(run, rounds, seconds, dataset, threads))
            probed, alone, ratio = spread_of(cost.probed), spread_of(cost.alone), ratio_of(cost.probed, cost.alone)
            print(f"{name:<18}{probed!s:>18}{alone!s:>18}{ratio!s:>18}{cost.probe_seconds:>12.3g}", flush=True)
            row = {"model": name, **probed.columns("probed"), **alone.columns("alone"), **ratio.columns("ratio")}
            results.add(row | {"probe_seconds": round(cost.probe_seconds, 3)})
    return results.finish()


def _measure(run: Run, rounds: int, seconds: float, dataset: Dataset, threads: int) -> ProbeCost:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(threads)
    changes = {"model.num_classes": len(dataset.classes), "data.url": dataset.url, "evaluate.probe_images": IMAGES}
    run = run.replace(changes | {"evaluate.probes": training_probes()})
    batch = run.optim.batch
    learner, step = training_step(run, random_batch(run, device))
    # The probes use no batch of the run, which may be larger than the dataset.
    host: Any = ProbeHost(resolve(run.replace({"optim.batch": min(batch, IMAGES)}), dataset))
    load = ProbeLoad(Prober(run, "", host), learner)
    load.look()  # the first probe reads the images
    load.wait()
    take_steps(step, 3, device)  # warm-up; the second step may record a CUDA graph
    calls = max(1, int(seconds / take_steps(step, 1, device)))
    busy, before = 0.0, load.done

    def probed(_number: int) -> float:
        nonlocal busy
        start = time.perf_counter()
        speed = calls * batch / take_steps(step, calls, device, load)
        load.wait()
        busy += time.perf_counter() - start
        return speed

    def alone(_number: int) -> float:
        return calls * batch / take_steps(step, calls, device)

    speeds = in_rounds({"probed": probed, "alone": alone}, rounds)
    return ProbeCost(speeds["probed"], speeds["alone"], busy / (load.done - before))


def take_steps(step: Callable[[], object], calls: int, device: torch.device, load: ProbeLoad | None = None) -> float:
    """Return the seconds of some steps, beside a load that runs from the first step to the last if there is one."""
    start, looked = time.perf_counter(), float("-inf")
    for _ in range(calls):
        if load is not None and time.perf_counter() - looked >= POLL_SECONDS:
            load.look()
            looked = time.perf_counter()
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
