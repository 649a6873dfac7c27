"""Whether the images keep up with training: the stream alone, the step alone, and both, on the workers of a run.

Nothing is predicted. Each worker is an actor with the resources that training gives it; it opens the run's stream and
takes the run's steps. The three measurements take turns in interleaved rounds.
"""

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError

from vitray.config import Run
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.stream.batches import HostBatch
from vitray.data.stream.prefetch import Prefetcher, all_reduce_max, new_share
from vitray.errors import ConfigError, RunError
from vitray.runs.placement import await_nodes, place_workers
from vitray.runs.ray_host import ENVIRONMENT, RayStart
from vitray.system.timing import circumstances, in_rounds, ratio_of, spread_of
from vitray.tasks.supervised import Teacher
from vitray.training.data import training_spec, with_masks
from vitray.training.learner import build_learner, wrap_model
from vitray.training.loop import prepared
from vitray.training.resolved import ResolvedRun
from vitray.training.step import take_step

# Seconds for the workers to start, which import torch, and for a stream to give its first batch.
START_SECONDS = 300.0
# The part of a measurement that is not counted: caches fill, and clocks of GPUs rise.
WARM_UP = 0.1
# Several workers agree on the time about as often, as they take the same number of steps.
MEET_SECONDS = 0.1
# A wait of more than this part of a measurement: images come in bursts.
LONG = 0.05
# More than are taken in a measurement.
MOST_STEPS = 100_000
# Share of the time that workers wait for images, from which they, not the step, limit training.
LARGE_WAIT = 0.05
# Stream and step share CPUs if together they reach less than this part of the slower one alone.
SLOWED = 0.9

Part = Literal["stream", "step", "both"]


class Mark(NamedTuple):
    """A moment of a measurement."""

    seconds: float
    steps: int
    waited: float
    """Seconds spent waiting for images so far."""


class Measured(NamedTuple):
    """One worker's part of one measurement."""

    steps_per_second: float
    wait_share: float


# ---- on a worker -----------------------------------------------------------------------------------------------------


class DataWorker:
    """A worker of the run, as an actor, with the part of a host that `build_learner` needs."""

    def __init__(self, start: RayStart, rank: int, workers: int, *, use_gpu: bool) -> None:
        os.environ.update(ENVIRONMENT)
        logging.disable(logging.INFO)
        self.device = torch.device("cuda" if use_gpu else "cpu")
        self.load = start.load
        self._start, self._rank, self.workers, self.threads = start, rank, workers, start.threads
        self._resolved = start.resolved
        self._step, self._batch = 0, None

    def address(self) -> str:
        """Return an address at which the workers can meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def build(self, address: str) -> str:
        """Meet the other workers, build the network, and return the hardware and versions."""
        run = self._resolved.run
        if self.workers > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=address, rank=self._rank, world_size=self.workers)
        host: Any = self
        self._resolved = prepared(self._resolved, host)
        self._learner = wrap_model(build_learner(run, host), run)
        self._share = new_share(self._rank, self.workers, ray.get_runtime_context().get_node_id())
        self._agreed = new_share(self._rank, self.workers).broadcast
        return circumstances(self.device, self._start.threads)

    def measure(self, part: Part, seconds: float) -> Measured:
        """Read images, take steps, or both, for some seconds; all workers call this together."""
        resolved, share = self._resolved, self._share
        if part == "step":
            assert self._batch is not None, "the stream is measured first, and leaves a batch"
            marks = self._paced(partial(self._take_step, self._batch), seconds, lambda: 0.0)
        else:
            stream = self._start.open_stream(training_spec(resolved, self.device.type))
            images: Iterator[HostBatch] = stream.train(self._step, self._step + MOST_STEPS, share)
            images = (with_masks(batch, resolved.run, batch.epoch) for batch in images)
            batches = Prefetcher(images, self.device, lambda number: all_reduce_max(number, self.device))
            take = self._take_step if part == "both" else lambda _: None

            def next_one() -> None:
                self._batch = next(batches)
                take(self._batch)

            marks = self._paced(next_one, seconds, lambda: batches.waited)
            batches.close()
            self._step += marks[-1].steps  # other images next time, as those of before are in memory
            del stream, images, batches, next_one
            gc.collect()  # ends the execution before the next measurement
        return rates(marks, seconds)

    def _take_step(self, batch: DeviceBatch) -> None:
        resolved = self._resolved
        step = self._step % resolved.length.total
        take_step(resolved.run, step, batch, self._share, self._learner, resolved.length)

    def _paced(self, call: Callable[[], None], seconds: float, waited: Callable[[], float]) -> list[Mark]:
        """Repeat a call, as often on all workers, and return marks of its progress after the first one."""
        # A single worker on CPUs reads images in bursts, whose ends are marks.
        every = 0.0 if self.workers == 1 and self.device.type == "cpu" else MEET_SECONDS
        call()  # starts the tasks of a stream; compiles a step
        self._synchronize()
        start, marks, calls = time.perf_counter(), [Mark(0.0, 0, waited())], 1
        waits: list[tuple[Mark, Mark]] = []
        while calls:
            for _ in range(calls):
                call()
            self._synchronize()
            marks.append(Mark(time.perf_counter() - start, marks[-1].steps + calls, waited()))
            if is_long(marks[-2], marks[-1], seconds):
                waits.append((marks[-2], marks[-1]))
            each = (marks[-1].seconds - marks[-2].seconds) / calls
            following = max(1, min(2 * calls, int(every / max(each, 1e-6))))
            calls = self._agreed(0 if is_over(marks[-1].seconds, seconds, waits) else following)
        return marks

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def is_long(before: Mark, after: Mark, seconds: float) -> bool:
    """Whether a wait between two marks is more than the end of a burst shows in a measurement of these seconds."""
    return after.waited - before.waited > LONG * seconds


def is_over(passed: float, seconds: float, waits: Sequence[tuple[Mark, Mark]]) -> bool:
    """Whether to end: in time, but not between two bursts, unless the second one does not come.

    `waits` are the marks before and after each long wait.
    """
    if passed < seconds or len(waits) != 1:
        return passed >= seconds
    [(before, after)] = waits  # a second burst like the first one ends after as long again
    return passed >= after.seconds + max(1.25 * after.seconds, 4 * (after.waited - before.waited))


def rates(marks: Sequence[Mark], seconds: float) -> Measured:
    """Return the speed and the wait, without the warm-up.

    A worker may get a thousand images at once, and a single one on CPUs still more, twice as many each time. Their
    decoding lies before them, so bursts are counted from the end of one to the end of another.
    """
    ends = [mark for mark, after in pairwise(marks) if is_long(mark, after, seconds)]
    if len(ends) > 1:
        begin, end = ends[0], ends[-1]
    else:
        begin = [mark for mark in marks[:-1] if mark.seconds <= WARM_UP * seconds][-1]
        end = marks[-1]
    taken = end.seconds - begin.seconds
    return Measured((end.steps - begin.steps) / taken, min(1.0, (end.waited - begin.waited) / taken))


# ---- on the driver ---------------------------------------------------------------------------------------------------


def check_data(
    resolved: ResolvedRun, seconds: float, rounds: int, gpu_hour: float | None = None, cpu_hour: float | None = None
) -> dict[str, Any]:
    """Measure on the running Ray, and return the JSON of `vitray doctor data`.

    `seconds` is the time of each of the three measurements over all rounds; the prices are of an hour.
    """
    run, teacher, initial = resolved.run, resolved.teacher, resolved.initial
    await_nodes(run)
    placement = place_workers(run)
    workers = placement.workers[1]
    start = RayStart(
        resolved=resolved.without_networks(),
        run_dir="",
        owner="",
        threads=placement.threads,
        data_cpus=placement.data_cpus,
        initial=None if initial is None else ray.put(initial.task_state(run)),
        tokenizer=resolved.tokenizer and ray.put(resolved.tokenizer.tokenizer),
        teacher=teacher and ray.put(Teacher.of(teacher)),
    )
    gpus = run.compute.gpus if placement.use_gpu else 0
    actor: Any = ray.remote(DataWorker).options(num_cpus=placement.cpus, num_gpus=gpus)
    actors = [actor.remote(start, rank, workers, use_gpu=placement.use_gpu) for rank in range(workers)]

    def together(method: str, *arguments: Any) -> list[Any]:
        pending = [getattr(each, method).remote(*arguments) for each in actors]
        return _results(pending, START_SECONDS + 10 * seconds / rounds)

    def measured(part: Part, _round: int) -> Measured:
        speeds, waits = zip(*together("measure", part, seconds / rounds), strict=True)
        return Measured(sum(speeds) / workers, sum(waits) / workers)

    try:
        (address,) = _results([actors[0].address.remote()], START_SECONDS)
        where = together("build", address)[0]
        parts: list[Part] = ["stream", "step", "both"]
        found = in_rounds({part: partial(measured, part) for part in parts}, rounds, shown=True)
    finally:
        for each in actors:
            ray.kill(each)
    speeds = {part: [run.optim.batch * each.steps_per_second for each in found[part]] for part in parts}
    result: dict[str, Any] = {"circumstances": where, "rounds": rounds, "workers": workers}
    result |= {"cpus": ray.cluster_resources()["CPU"], "gpus": workers * gpus}
    result["decoding_cpus"] = result["cpus"] - workers * placement.cpus
    for part in parts:
        result |= spread_of(speeds[part]).columns(f"{part}_images_per_second", 2)
    result |= ratio_of(speeds["stream"], speeds["step"]).columns("stream_over_step", 4)
    result |= spread_of([each.wait_share for each in found["both"]]).columns("wait_share", 4)
    return verdict(run, result, gpu_hour, cpu_hour)


def _results(pending: list[Any], seconds: float) -> list[Any]:
    try:
        return ray.get(pending, timeout=seconds)
    except GetTimeoutError:
        raise RunError(
            f"no result within {seconds:.0f} seconds: other jobs hold a node's CPUs, or its GPUs; see `ray status`"
        ) from None
    except (ConfigError, RunError) as error:  # of a node, with Ray's traceback in its text
        raise getattr(error, "cause", error) from None


def verdict(run: Run, measured: dict[str, Any], gpu_hour: float | None, cpu_hour: float | None) -> dict[str, Any]:
    """Return the measurements with the bottleneck, what to change, and the cost of a million images."""
    stream, step, both = (measured[f"{part}_images_per_second"] for part in ("stream", "step", "both"))
    # Images that were decoded during the start may last for all of a short measurement.
    bottleneck = "images" if measured["wait_share"] >= LARGE_WAIT or stream < step else "step"
    advice, data, compute = [], run.data, run.compute
    if both < SLOWED * min(stream, step):
        share = f"{both / min(stream, step):.0%} of the slower one alone"
        advice.append(f"stream and step share CPUs, and together reach {share}: more CPUs, or fewer compute.workers")
    if bottleneck == "images":
        if stream < step:
            needed = measured["decoding_cpus"] * step / stream
            advice.append(f"about {needed:.2g} CPUs to decode, in place of {measured['decoding_cpus']:g}")
        if data.cache == "none":
            advice.append("data.cache=decoded: each image is decoded once")
            if data.augment.decode == "full":
                advice.append("data.augment.decode=scaled: fewer pixels of large JPEGs are decoded")
        if measured["gpus"] and data.augment.resolved(True).on != "device":
            advice.append("data.augment.on=device: the GPUs augment")
        advice.append("`vitray shard ... resize=SIZE`: smaller stored images")
    else:
        advice.append("more compute.workers, or faster ones, train faster; more CPUs to decode do not")
        if measured["gpus"] and compute.precision == "fp32":
            advice.append("compute.precision=bf16: a faster step")
        if measured["gpus"] and not compute.compile:
            advice.append("compute.compile=default: mostly a faster step")
    result = {"bottleneck": bottleneck, "images_per_second": both, **measured, "advice": advice}
    hourly = measured["gpus"] * (gpu_hour or 0.0) + measured["cpus"] * (cpu_hour or 0.0)
    has_price = gpu_hour is not None or cpu_hour is not None
    return result | {"cost_per_million_images": hourly * 1e6 / both / 3600 if has_price else None}


def verdict_text(result: dict[str, Any]) -> str:
    """Return a verdict as text."""
    workers = "one worker" if result["workers"] == 1 else f"{result['workers']} workers"
    where = f"{workers}, {result['decoding_cpus']:g} of {result['cpus']:g} CPUs to decode"
    lines = [f"{result['circumstances']}", f"{where}; {result['rounds']} interleaved rounds, median ± half the IQR\n"]
    for part, name in {"stream": "stream alone", "step": "step alone", "both": "both"}.items():
        speed, spread = (result[f"{part}_images_per_second{end}"] for end in ("", "_spread"))
        lines.append(f"{name:<14}{speed:>10,.0f} ± {spread:,.0f} images/s")
    lines.append(
        f"{'data wait':<14}{result['wait_share']:>10.0%} ± {result['wait_share_spread']:.0%} of the time of both"
    )
    if result["bottleneck"] == "images":
        lines.append(f"\nbottleneck: images; training waits {result['wait_share']:.0%} of the time for them")
    else:
        lines.append(f"\nbottleneck: step; the stream alone gives {result['stream_over_step']:.1f} times its images")
    lines += [f"  {text}" for text in result["advice"]]
    if (cost := result["cost_per_million_images"]) is not None:
        lines.append(f"cost: {cost:,.2f} for a million images")
    return "\n".join(lines)
