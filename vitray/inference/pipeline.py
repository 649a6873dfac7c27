"""The pipeline on Ray Data: tasks read and decode, actors run the networks, others write the parts in the plan's order.

One row of Ray Data is one batch of the plan, so Ray decides where and when a batch is computed, never its content.
"""

import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy
from ray.exceptions import RayError

import vitray.data.stream.ray_reader  # quiets the log of Ray Data  # noqa: F401
from vitray.data.augment.views import usable
from vitray.errors import ConfigError, RunError, one_line
from vitray.inference.listing import SCHEMA
from vitray.inference.parts import load_networks, predict_batch, write_part
from vitray.inference.plan import Plan

# Batches of a decoding task, and tasks of one execution: Ray lists them before it starts the first.
BATCHES_OF_A_TASK, TASKS_AT_ONCE = 4, 8192
# Batches that wait for a busy actor beside the one it computes: their pixels arrive meanwhile.
WAITING_BATCHES = 3
Row = dict[str, np.ndarray]


class Bounds(NamedTuple):
    """The numbers of actors between which the pool scales."""

    least: int
    most: int


def pool_bounds(workers: Bounds | None, device: str) -> Bounds:
    """Return the bounds of the pool on this cluster; one CPU is left for decoding."""
    resources = ray.cluster_resources()
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    room = gpus if device == "cuda" else cpus - 1
    if room < 1:
        wanted = "a GPU, as at the first command, or another OUT" if device == "cuda" else "two CPUs at least"
        raise RunError(f"the cluster has {cpus} CPUs and {gpus} GPUs; expected {wanted}")
    if workers is None:
        return Bounds(1, room)
    if workers.least > room:
        raise RunError(f"--workers: got {workers.least} at least, and the cluster has room for {room}")
    return workers


def compute_parts(plan: Plan, parts: Sequence[int], bounds: Bounds) -> Iterator[int]:
    """Compute and write some parts in ascending order; yield each as it is written."""
    at_once = max(1, TASKS_AT_ONCE * BATCHES_OF_A_TASK // plan.batches)
    shared = ray.put(plan)
    for first in range(0, len(parts), at_once):
        yield from _execute(plan, shared, parts[first : first + at_once], bounds)


def _execute(plan: Plan, shared: ray.ObjectRef, parts: Sequence[int], bounds: Bounds) -> Iterator[int]:
    cpus, gpus = (0, 1) if plan.device == "cuda" else (1, 0)
    pool = ActorPoolStrategy(
        min_size=bounds.least, max_size=bounds.most, max_tasks_in_flight_per_actor=1 + WAITING_BATCHES
    )
    tasks = [
        {"part": part, "first": first, "stop": min(first + BATCHES_OF_A_TASK, plan.batches)}
        for part in parts
        for first in range(0, plan.batches, BATCHES_OF_A_TASK)
    ]
    rows = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    decode: Any = partial(_decode_batches, shared=shared)
    rows = rows.map_batches(decode, batch_size=1, num_cpus=1)
    actors: Any = {"compute": pool, "num_cpus": cpus, "num_gpus": gpus}
    # Without the images, which only the decoding tasks need.
    light = plan._replace(images=replace(plan.images, table=SCHEMA.empty_table(), shards={}))
    # memory=1 (a byte) makes the options differ: Ray Data would fuse a task and an actor of equal options.
    rows = rows.map_batches(_Predictor, fn_constructor_args=(light,), batch_size=1, memory=1, **actors)
    # A call gets all batches of a part: rows arrive in order, one per block. Actors, because a task without an idle
    # process starts one, which takes seconds and delays the decoding tasks.
    writers: Any = {"compute": ActorPoolStrategy(min_size=1, max_size=bounds.most), "num_cpus": 0}
    rows = rows.map_batches(_Writer, fn_constructor_args=(shared,), batch_size=plan.batches, **writers)
    context = rows.context
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # smaller than any row, so that each row becomes a block
    context.enable_progress_bars = context.print_on_execution_start = False
    context.issue_detectors_config.detectors = []  # they advise other values for the memory above
    try:
        for row in rows.iter_rows():
            if row["refused"]:
                raise ConfigError(row["refused"])
            yield int(row["part"])
    except RayError as error:
        raise _cause(error) from None


def _cause(error: BaseException) -> Exception:
    """Return the message for the user inside an error of Ray."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError | RunError):
            return cause
        inner = getattr(cause, "cause", None)
        cause = inner if isinstance(inner, BaseException) else cause.__cause__
    return RunError(f"the prediction ended: {one_line(error)}")


def _decode_batches(task: Row, shared: ray.ObjectRef) -> Iterator[Row]:
    """Yield the batches of a task: their views, and the reasons for images without pixels."""
    import torch

    from vitray.data.augment.views import decode_views
    from vitray.inference.networks import views_of

    torch.set_num_threads(1)
    plan: Plan = ray.get(shared)
    part, first, stop = (int(task[name][0]) for name in ("part", "first", "stop"))
    spans = [plan.span(part, batch) for batch in range(first, stop)]
    with ThreadPoolExecutor(1) as reader:  # reads a batch ahead
        reads = [reader.submit(plan.images.read, range(*span)) for span in spans]
        for batch, read in zip(range(first, stop), reads, strict=True):
            contents = [image.content for image in read.result()]
            views, reasons = decode_views(contents, views_of(plan.networks), rows=plan.numerics.batch)
            row: dict[str, Any] = {"part": part, "batch": batch, "reasons": json.dumps(reasons)}
            row |= {f"view{number}": view_BHWC for number, view_BHWC in enumerate(views)}
            yield {name: np.asarray(value)[np.newaxis] for name, value in row.items()}


class _Predictor:
    """The networks of a plan, as an actor of Ray Data."""

    def __init__(self, plan: Plan) -> None:
        import torch

        torch.set_num_threads(plan.numerics.threads)  # 1: actors share the CPUs
        self._plan, self._networks = plan, load_networks(plan)

    def __call__(self, row: Row) -> Row:
        reasons = json.loads(str(row["reasons"][0]))
        views = [row[f"view{number}"][0] for number in range(sum(name.startswith("view") for name in row))]
        table = predict_batch(self._plan, self._networks, views, usable(reasons))
        with pa.ipc.new_stream(content := io.BytesIO(), table.schema) as stream:
            stream.write_table(table)
        outputs = np.array([content.getvalue()], object)
        return {"part": row["part"], "batch": row["batch"], "reasons": row["reasons"], "outputs": outputs}


class _Writer:
    """Writes the part whose batches the rows are."""

    def __init__(self, shared: ray.ObjectRef) -> None:
        self._plan: Plan = ray.get(shared)

    def __call__(self, rows: Row) -> Row:
        part = int(rows["part"][0])
        if set(rows["part"].tolist()) != {part} or rows["batch"].tolist() != list(range(self._plan.batches)):
            raise RuntimeError(
                f"got batches {rows['batch']} of parts {rows['part']}, expected all of one part in order"
            )
        tables = [pa.ipc.open_stream(content).read_all() for content in rows["outputs"].tolist()]
        reasons = [reason for text in rows["reasons"].tolist() for reason in json.loads(text)]
        refused = ""
        try:
            write_part(self._plan, part, tables, reasons)
        except ConfigError as error:  # Ray Data would log an error's stack, and lose its type
            refused = str(error)
        return {"part": np.array([part]), "refused": np.array([refused])}
