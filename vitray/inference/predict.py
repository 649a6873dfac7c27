"""One prediction from addresses to its folder: check everything, compute the missing parts, count and write."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TextIO

import torch

from vitray.cluster import session
from vitray.cluster.storage_check import check_writable
from vitray.data.shards.tasks import ProgressLine
from vitray.errors import ConfigError, RunError
from vitray.inference.engine import Job, needs_actors, numerics_of, run_job, workers_for
from vitray.inference.listing import ImageList, check_some_decode, list_images
from vitray.inference.models import named_networks
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.parts import Counts, Lines, count_images, predict_batch, print_part, write_part
from vitray.inference.plan import (
    PLAN,
    RESULT,
    Options,
    Plan,
    check_options,
    check_still_ours,
    column_widths,
    missing_parts,
    open_plan,
    write_plan,
)
from vitray.models.own_networks import is_of_this_process
from vitray.system import storage


class Request(NamedTuple):
    """One call of `vitray predict`."""

    models: Sequence[str]
    images: str
    out: str
    options: Options = Options()
    splits: Sequence[str] = ()
    """Of a dataset of ours; none for all."""
    workers: tuple[int, int] | None = None
    """The bounds of the pool of actors on Ray. None is one to all GPUs, or to all CPUs but one, on a cluster and where
    there are several GPUs; otherwise this process computes, without Ray."""
    precision: str | None = None
    """None is that of each network's run."""
    follow: Lines | None = None


class Prediction(NamedTuple):
    """The result of `vitray predict`."""

    plan: Plan
    counts: Counts
    images_per_second: float
    """Of the images that this command computed; 0 if all parts were there."""

    def flat(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {
            "images": len(self.plan.images),
            "written": self.counts.written,
            "skipped": self.counts.skipped,
            "parts": self.plan.parts,
            "images_per_second": round(self.images_per_second, 2),
            "out": self.plan.out,
        }


def predict(request: Request, to: TextIO | None = None) -> Prediction:
    """Compute the parts that are missing, and return the counts over all parts."""
    plan = open_plan(_plan_of(request))
    missing = missing_parts(plan)
    speed = 0.0
    if missing:
        check_some_decode(plan.images)
        check_writable(plan.out)
        workers = workers_for(plan.networks, request.workers and max(request.workers))
        is_own = any(is_of_this_process(network.network) for network in plan.networks)
        is_here = (request.workers is None or is_own) and not needs_actors(workers)
        with nullcontext() if is_here else session.ray_session():
            plan = _placed(plan, is_here)
            began = time.monotonic()
            speed = _compute(plan, missing, request, is_here, to or sys.stdout) / (time.monotonic() - began)
    elif request.follow:
        for part in range(plan.parts):
            print_part(plan, part, request.follow, to or sys.stdout)
    check_still_ours(plan)
    counts = count_images(plan)
    if not counts.written:
        key, reason = counts.named[0]
        raise ConfigError(f"{plan.images.url}: none of {len(plan.images)} images can be decoded: {key}: {reason}")
    storage.write_bytes(storage.join(plan.out, RESULT), f"{json.dumps(_result(plan, counts), indent=1)}\n".encode())
    return Prediction(plan, counts, speed)


def _plan_of(request: Request) -> Plan:
    out = storage.absolute(request.out).rstrip("/")
    networks = _networks(request)
    options = check_options(networks, request.options)
    images = list_images(request.images, request.splits)
    if f"{out}/".startswith(f"{images.url.rstrip('/')}/"):
        raise ConfigError(
            f"{request.out}: lies in {request.images}, whose images it would join; expected another folder"
        )
    _note(images)
    return Plan(networks, images, options, out)


def _networks(request: Request) -> tuple[NetworkSpec, ...]:
    # fp32, if asked for, is that of matrix products on a GPU, too.
    changes = {"precision": request.precision, "tf32": False} if request.precision else {}
    return tuple(spec._replace(name=name, **changes) for name, spec, _ in named_networks(request.models))


def _note(images: ImageList) -> None:
    if images.other_files:
        few = ", ".join(images.other_files[:3])
        print(f"vitray: {len(images.other_files):,} files are no images, such as {few}", file=sys.stderr)
    if images.repeated:
        print(f"vitray: {images.repeated:,} images repeat the key of an earlier one, and are left out", file=sys.stderr)


def _placed(plan: Plan, is_here: bool) -> Plan:
    """Write the plan unless it exists, and return it with its device: the existing one's, or else the GPUs, if any."""
    if not storage.exists(storage.join(plan.out, PLAN)):
        numerics = numerics_of(1 if is_here else None, plan.options.batch)
        plan = plan._replace(device=numerics.device, threads=numerics.threads)
        write_plan(plan)
    # Another command may have written its plan meanwhile: another one is refused, an equal one sets the device.
    return open_plan(plan)


def _compute(plan: Plan, missing: Sequence[int], request: Request, is_here: bool, to: TextIO) -> int:
    """Compute the missing parts, and print all in order if asked; return the number of images computed."""
    sizes = {part: plan.span(part, plan.batches - 1)[1] - plan.span(part, 0)[0] for part in missing}
    total = sum(sizes.values())
    if total < len(plan.images):
        print(f"{len(plan.images) - total:,} of {len(plan.images):,} images are done already", file=sys.stderr)
    progress = ProgressLine("predict:", total)
    written = _compute_here(plan, missing) if is_here else _compute_on_ray(plan, missing, request.workers)
    for part in range(plan.parts) if request.follow else missing:
        if part in sizes:
            done = next(written)
            if done != part:
                raise RuntimeError(f"got part {done}, expected {part}")
            progress.add(sizes[part])
        if request.follow:
            print_part(plan, part, request.follow, to)
    progress.end()
    return total


def _compute_here(plan: Plan, parts: Sequence[int]) -> Iterator[int]:
    """Compute and write some parts in this process; yield each as it is written."""
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise RunError("this machine has no GPU; expected one, as at the first command, or another OUT")
    job = Job(plan.images, plan.networks, partial(predict_batch, plan), plan.numerics, plan.wanted)
    spans = [(plan.span(part, 0)[0], plan.span(part, plan.batches - 1)[1]) for part in parts]
    for part, chunk in zip(parts, run_job(job, spans, workers=1), strict=True):
        write_part(plan, part, chunk.values, chunk.reasons)
        yield part


def _compute_on_ray(plan: Plan, parts: Sequence[int], workers: tuple[int, int] | None) -> Iterator[int]:
    from vitray.inference.pipeline import Bounds, compute_parts, pool_bounds

    return compute_parts(plan, parts, pool_bounds(Bounds(*workers) if workers else None, plan.device))


def _result(plan: Plan, counts: Counts) -> dict[str, Any]:
    """Return the content of predictions.json: a function of the plan and the images, without times."""
    return {
        "images": len(plan.images),
        "written": counts.written,
        "skipped": counts.skipped,
        "parts": plan.parts,
        "networks": {spec.name: {"url": spec.url, "network": spec.network} for spec in plan.networks},
        "source": plan.images.url,
        "columns": column_widths(plan),
        "plan": plan.identity,
        "reasons": counts.reasons,
        "skipped_images": [{"key": key, "reason": reason} for key, reason in counts.named],
        "other_files": len(plan.images.other_files),
        "repeated": plan.images.repeated,
    }
