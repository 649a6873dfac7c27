"""Summaries of a run: the start and end blocks of the console, and the description in MLflow."""

import platform
import shlex
from collections.abc import Collection, Sequence

from vitray.config import Run
from vitray.config.training import Data
from vitray.data.augment.views import view_kinds
from vitray.data.shards import Dataset
from vitray.data.shares import share_sizes
from vitray.data.stream.balance import ClassDraw
from vitray.errors import redact_uri
from vitray.metrics.few_shot import shots_within
from vitray.runs.console import clock
from vitray.runs.placement import Placement
from vitray.runs.run_dir import Outcome
from vitray.system.mlflow_client import tracking_uri
from vitray.tracking.lineage import TrackedDataset
from vitray.training.messages import WorkerResult
from vitray.training.resolved import ResolvedRun
from vitray.training.schedule import micro_batches, num_passes
from vitray.weights import SavedModel


def plan_block(name: str, run_dir: str, resolved: ResolvedRun) -> dict[str, str]:
    """Return what is known before Ray starts, by name."""
    run, length, initial, teacher = resolved.run, resolved.length, resolved.initial, resolved.teacher
    held_out = f", {run.data.held_out} of train" if run.data.held_out else ""
    return {
        "run": name,
        "model": f"{run.model.name}, {_network_size(resolved)}",
        "trained": _trained_size(resolved),
        **({"start": f"{initial.url}: {initial.adaptation}"} if initial else {}),
        **({"teacher": f"{teacher.url}, {teacher.gflops:.3g} GFLOPs an image"} if teacher else {}),
        "data": f"{run.data.url}: {resolved.images:,} images, {len(resolved.dataset.classes)} classes;"
        f" {resolved.val_images:,} to validate on{held_out}",
        **({"balance": _balance_text(resolved.balance, resolved.dataset.classes)} if resolved.balance else {}),
        "steps": f"{length.total:,} of {run.optim.batch} images: {length.epoch:,} an epoch,"
        f" {length.warmup:,} to warm up",
        "results": run_dir,
        "tracking": redact_uri(tracking_uri()),
    }


def _balance_text(draws: Sequence[ClassDraw], classes: Sequence[str]) -> str:
    """How often an epoch shows the rarest and the most frequent class that has images."""
    present = [label for label, each in enumerate(draws) if each.images]
    ends = dict.fromkeys(pick(present, key=lambda label: draws[label].images) for pick in (min, max))
    shown = (f"{draws[label].shown:,} of {classes[label]} from {draws[label].images:,}" for label in ends)
    return f"an epoch shows {' and '.join(shown)} images"


def _network_size(resolved: ResolvedRun) -> str:
    return f"{resolved.sizes.params / 1e6:.2f} M parameters, {resolved.sizes.gflops:.3g} GFLOPs an image"


def _trained_size(resolved: ResolvedRun) -> str:
    costs = resolved.costs
    return f"{costs.trained_params / 1e6:.2f} M parameters, {costs.step_gflops:.3g} GFLOPs an image of a step"


def placement_block(resolved: ResolvedRun, placement: Placement) -> dict[str, str]:
    """Return what the cluster decides, by name."""
    run, batch = resolved.run, resolved.run.optim.batch
    lowest, highest = placement.workers
    workers = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
    passes, sizes = num_passes(run, highest), share_sizes(batch, highest)
    parts = [part.stop - part.start for part in micro_batches(max(sizes), passes, run)]
    most = "" if highest * passes * parts[0] == batch else "up to "
    device = "GPU" if placement.use_gpu else "CPU"
    if placement.is_here:
        where = "this process" if highest == 1 else "processes of torchrun"
        threads = f", {placement.threads} compute thread{'s' * (placement.threads != 1)}"
        own = f"on {device}, {where}" + threads * (not placement.use_gpu)
    else:
        own = f"on {device}, each with {placement.cpus:g} CPU{'s' * (placement.cpus != 1)}"
    facts = {
        "workers": f"{workers} {own}",
        "batch": f"{batch} = {highest} worker{'s' * (highest != 1)} x {most}{max(parts)} images"
        + (f" x {passes} passes" if passes > 1 else "")
        + (", in passes that fit" if run.compute.local_batch == "auto" else ""),
        "augment": _describe_augmentation(run, placement),
    }
    beside = f"on {'a spare GPU' if placement.probe_gpus else 'one CPU'} beside the workers"
    if run.evaluate.probes:
        facts["probes"] = f"{', '.join(run.evaluate.probes)} of {run.evaluate.probe_images:,} images, {beside}"
    if (least := resolved.few_shot_least) is not None:
        shots = ", ".join(map(str, shots_within(least)))
        facts["probes"] += f"; few_shot of {shots}, as the smallest class has {least:,}"
    if run.evaluate.figures:
        facts["figures"] = f"{', '.join(run.evaluate.figures)} of {run.evaluate.examples:,} images, {beside}"
    return facts


def _describe_augmentation(run: Run, placement: Placement) -> str:
    augment = run.data.augment
    place = "in decoding tasks" if augment.resolved(placement.use_gpu).on == "tasks" else "on the workers' device"
    chosen = ", chosen by data.augment.on=auto" if augment.on == "auto" else ""
    if "views" in run.task.traits.needs:
        views, shape = run.data.chosen_views, run.model.image_shape
        kinds = view_kinds(views, shape, run.model.shape.patch, augment)
        policies = [views.large.policy, *([views.small.policy] if views.small else [])]
        texts = [
            f"{kind.number} views of {kind.size[0]} px by {policy.kind}"
            for kind, policy in zip(kinds, policies, strict=True)
        ]
        return f"{' and '.join(texts)}, {place}{chosen}"
    return f"{augment.crop.kind} crop, policy {augment.policy.kind}, {place}{chosen}"


def run_datasets(resolved: ResolvedRun) -> list[TrackedDataset]:
    """Return the images that a run trains on, and those that it evaluates if there are any, as inputs in MLflow."""
    data, dataset = resolved.run.data, resolved.dataset
    name, url = dataset.url.rstrip("/").rpartition("/")[2], dataset.url
    classes = len(dataset.classes)
    digest = dataset.part_identity(data.train, *(f"without {part}" for part in _part(data)))
    label = f"{name}/{data.train}" + (f", without {data.held_out}" if data.held_out else "")
    inputs = [TrackedDataset(label, digest, url, "training", resolved.images, classes)]
    if digest := evaluated_identity(data, dataset):
        label = f"{name}/{data.evaluated}" + (f", {data.held_out}" if data.held_out else "")
        inputs.append(TrackedDataset(label, digest, url, "validation", resolved.val_images, classes))
    return inputs


def evaluated_identity(data: Data, dataset: Dataset) -> str | None:
    """Return a hash of the images that a run evaluates, with their labels and classes; None without any."""
    if data.evaluated is None:
        return None
    return dataset.part_identity(data.evaluated, *_part(data))


def _part(data: Data) -> list[str]:
    """The part of train that is held out, for its hash: a share in full."""
    return [f"{data.holdout:g}"] if data.holdout else [data.held_out] if data.held_out else []


def end_block(val_images: int, outcome: Outcome, costs: dict[str, float], saved: SavedModel) -> dict[str, str]:
    """Return score, cost and model folder by name."""
    images = f"{val_images:,} images"
    if outcome.val_top1 is not None:
        score = {"val top-1": f"{outcome.val_top1:.2%} of {images}"}
    elif outcome.val_map is not None:
        score = {"val mAP": f"{outcome.val_map:.2%} of {images}"}
    elif outcome.val_loss is not None:
        score = {"val loss": f"{outcome.val_loss:.4f} of {images}"}
    else:
        score = {"val": "not evaluated"}
    cost = f"{clock(costs['cost/device_seconds'])} of device time, {costs['cost/flops']:.2e} FLOPs"
    delta = f", a delta: {saved.bytes / 1e6:.3g} MB, {saved.share:.1%} of the network"
    return {
        **score,
        "cost": cost + (f", MFU {costs['cost/mfu']:.1%}" if "cost/mfu" in costs else ""),
        "model": f"{outcome.model}{'' if saved.share == 1 else delta}",
    }


def best_block(outcome: Outcome, complete: Collection[int]) -> dict[str, str]:
    """Return the command that writes the best evaluation's weights, if it was not that of the last step."""
    if outcome.best_step == outcome.steps or outcome.best_step not in complete:
        return {}
    command = shlex.join(["vitray", "weights", "checkpoint", outcome.home, "TARGET"])
    return {"best": f"step {outcome.best_step:,}: {command}"}


def incident_block(result: WorkerResult) -> dict[str, str]:
    """Return the corrupt images and skipped steps of a run, if any."""
    facts = {}
    if result.corrupt:
        names = ", ".join(result.corrupt)
        facts["corrupt"] = f"{len(result.corrupt)} images were replaced by their neighbors: {names}"
    if result.skipped:
        facts["left out"] = (
            f"steps {', '.join(str(step + 1) for step in result.skipped)}, whose loss was not finite or spiked"
        )
    return facts


def describe_run(resolved: ResolvedRun, placement: Placement) -> str:
    """Return the run as a Markdown table."""
    run, teacher, initial, costs = resolved.run, resolved.teacher, resolved.initial, resolved.costs
    data, optim = run.data, run.optim
    size = " x ".join(map(str, run.model.image_shape))
    mixing = f"mixup {data.mix.mixup:g}, cutmix {data.mix.cutmix:g}" if data.mix.is_mixing else "no mixing"
    rows = {
        "Network": f"`{run.model.name}`, {_network_size(resolved)}",
        "Trained": _trained_size(resolved),
        "Data": f"`{data.url}`, {resolved.images:,} images of {len(resolved.dataset.classes)} classes,"
        f" {resolved.val_images:,} to validate",
        "Views": f"{_describe_augmentation(run, placement)}, {mixing}, at {size} px",
        **({"Codes": f"of `{resolved.tokenizer.url}`"} if resolved.tokenizer else {}),
        **({"Start": f"`{initial.url}`, {costs.trained_params / costs.params:.1%} of it trained"} if initial else {}),
        "Loss": run.task.describe(),
        **({"Teacher": f"`{teacher.url}`, {teacher.gflops:.3g} GFLOPs an image"} if teacher else {}),
        "Optimizer": f"{optim.rule.kind}, lr {optim.lr:g} {optim.schedule.kind}, weight decay {optim.weight_decay:g}",
        "Length": f"{optim.duration} = {resolved.length.total:,} steps of {optim.batch} images, warm-up {optim.warmup}",
        "Where": f"{placement.workers[1]} {'GPU' if placement.use_gpu else 'CPU'} workers, driver on {platform.node()}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])
