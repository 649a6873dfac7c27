"""Summaries of a run: the start and end blocks of the console, and the description in MLflow."""

import platform
import shlex
from collections.abc import Collection
from typing import assert_never

from vitray import storage
from vitray.config import Run
from vitray.config.pretraining import Masked, Tokenizer
from vitray.config.training import Data, Finetune, Supervised
from vitray.data.shards import Dataset
from vitray.data.shares import share_sizes
from vitray.errors import redact_uri
from vitray.evaluation.few_shot import shots_within
from vitray.runs.console import clock
from vitray.runs.placement import Placement
from vitray.runs.plan import Plan, PlannedRun, RunInfo
from vitray.runs.run_dir import Outcome
from vitray.tracking.lineage import TrackedDataset
from vitray.tracking.mlflow_client import tracking_uri
from vitray.training.messages import WorkerResult
from vitray.training.schedule import micro_batches, num_passes
from vitray.weights import SavedModel


def plan_block(name: str, run_dir: str, planned: PlannedRun) -> dict[str, str]:
    """Return what is known before Ray starts, by name."""
    run, plan, start = planned.run, planned.plan, planned.start
    holdout = f", {run.data.holdout:.0%} of train" if run.data.holdout else ""
    return {
        "run": name,
        "model": f"{plan.model}, {plan.params / 1e6:.2f} M parameters, {plan.gflops:.3g} GFLOPs an image",
        "trained": f"{plan.trainable_params / 1e6:.2f} M parameters, {plan.step_gflops:.3g} GFLOPs an image of a step",
        **({"start": f"{start.url}: {start.adaptation}"} if start else {}),
        **({"teacher": f"{plan.teacher}, {plan.teacher_gflops:.3g} GFLOPs an image"} if plan.teacher else {}),
        "data": f"{plan.dataset}: {plan.images:,} images, {plan.classes} classes;"
        f" {plan.val_images:,} to validate on{holdout}",
        "steps": f"{plan.steps:,} of {plan.global_batch} images: {plan.steps_per_epoch:,} an epoch,"
        f" {plan.warmup_steps:,} to warm up",
        "results": run_dir,
        "tracking": redact_uri(tracking_uri()),
    }


def placement_block(info: RunInfo) -> dict[str, str]:
    """Return what the cluster decides, by name."""
    run, plan, placement = info.planned.run, info.planned.plan, info.placement
    lowest, highest = placement.workers
    workers = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
    passes, sizes = num_passes(run, highest), share_sizes(plan.global_batch, highest)
    parts = [part.stop - part.start for part in micro_batches(max(sizes), passes, run)]
    most = "" if highest * passes * parts[0] == plan.global_batch else "up to "
    return {
        "workers": f"{workers} on {'GPU' if placement.use_gpu else 'CPU'}, each with {placement.cpus:g} CPU"
        + "s" * (placement.cpus != 1),
        "batch": f"{plan.global_batch} = {highest} worker{'s' * (highest != 1)} x {most}{max(parts)} images"
        + (f" x {passes} passes" if passes > 1 else ""),
        "augment": _describe_augmentation(run, placement),
        **_describe_prober(run, plan, placement),
    }


def _describe_prober(run: Run, plan: Plan, placement: Placement) -> dict[str, str]:
    evaluate, where = run.evaluate, f"on {'a spare GPU' if placement.probe_gpus else 'one CPU'} beside the workers"
    names = {
        "probes": (evaluate.probes, evaluate.probe_images),
        "figures": (evaluate.figures, evaluate.examples),
    }
    lines = {
        key: f"{', '.join(chosen)} of {images:,} images, {where}" for key, (chosen, images) in names.items() if chosen
    }
    if plan.few_shot_least is not None:
        shots = ", ".join(map(str, shots_within(plan.few_shot_least)))
        lines["probes"] += f"; few_shot of {shots}, as the smallest class has {plan.few_shot_least:,}"
    return lines


def _describe_augmentation(run: Run, placement: Placement) -> str:
    augment = run.data.augment
    place = "in decoding tasks" if augment.resolved(placement.use_gpu).on == "tasks" else "on the workers' device"
    chosen = ", chosen by data.augment.on=auto" if augment.on == "auto" else ""
    return f"{augment.crop.kind} crop, policy {augment.policy.kind}, {place}{chosen}"


def run_datasets(planned: PlannedRun) -> list[TrackedDataset]:
    """Return the images that a run trains on, and those that it evaluates if there are any, as inputs in MLflow."""
    data, plan, dataset = planned.run.data, planned.plan, planned.dataset
    name, url = dataset.url.rstrip("/").rpartition("/")[2], storage.absolute(dataset.url)
    classes = len(dataset.classes)
    part = [f"without {data.holdout:g}"] if data.holdout else []
    digest = dataset.part_identity(data.train, *part)
    label = f"{name}/{data.train}" + (f", without {data.holdout:.0%}" if part else "")
    inputs = [TrackedDataset(label, digest, url, "training", plan.images, classes)]
    if digest := evaluated_identity(data, dataset):
        label = f"{name}/{data.evaluated}" + (f", {data.holdout:.0%}" if part else "")
        inputs.append(TrackedDataset(label, digest, url, "validation", plan.val_images, classes))
    return inputs


def evaluated_identity(data: Data, dataset: Dataset) -> str | None:
    """Return a hash of the images that a run evaluates, with their labels and classes; None without any."""
    if data.evaluated is None:
        return None
    return dataset.part_identity(data.evaluated, *([f"{data.holdout:g}"] if data.holdout else []))


def end_block(plan: Plan, outcome: Outcome, costs: dict[str, float], saved: SavedModel) -> dict[str, str]:
    """Return score, cost and model folder by name."""
    images = f"{plan.val_images:,} images"
    match outcome.val_top1, outcome.val_loss:
        case None, None:
            score = {"val": "not evaluated"}
        case None, loss:
            score = {"val loss": f"{loss:.4f} of {images}"}
        case top1, _:
            score = {"val top-1": f"{top1:.2%} of {images}"}
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
        facts["left out"] = f"steps {', '.join(map(str, result.skipped))}, whose loss was not finite or spiked"
    return facts


def describe_run(run: Run, plan: Plan, placement: Placement) -> str:
    """Return the run as a Markdown table."""
    data, optim = run.data, run.optim
    size = " x ".join(map(str, run.model.image_shape))
    mixing = f"mixup {data.mix.mixup:g}, cutmix {data.mix.cutmix:g}" if data.mix.is_mixing else "no mixing"
    rows = {
        "Network": f"`{plan.model}`, {plan.params / 1e6:.2f} M parameters, {plan.gflops:.3g} GFLOPs an image",
        "Trained": f"{plan.trainable_params / 1e6:.2f} M parameters, {plan.step_gflops:.3g} GFLOPs an image of a step",
        "Data": f"`{plan.dataset}`, {plan.images:,} images of {plan.classes} classes, {plan.val_images:,} to validate",
        "Views": f"{_describe_augmentation(run, placement)}, {mixing}, at {size} px",
        **_earlier_run(run, plan),
        "Loss": _describe_loss(run.task),
        **({"Teacher": f"`{plan.teacher}`, {plan.teacher_gflops:.3g} GFLOPs an image"} if plan.teacher else {}),
        "Optimizer": f"{optim.rule.kind}, lr {optim.lr:g} {optim.schedule.kind}, weight decay {optim.weight_decay:g}",
        "Length": f"{optim.duration} = {plan.steps:,} steps of {plan.global_batch} images, warm-up {optim.warmup}",
        "Where": f"{placement.workers[1]} {'GPU' if placement.use_gpu else 'CPU'} workers, {run.compute.precision},"
        f" driver on {platform.node()}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])


def _earlier_run(run: Run, plan: Plan) -> dict[str, str]:
    if plan.weights is None:
        return {}
    if isinstance(run.task, Masked):
        return {"Codes": f"of `{plan.weights}`"}
    return {"Start": f"`{plan.weights}`, {plan.trainable_share:.1%} of it trained"}


def _describe_loss(task: Supervised | Finetune | Masked | Tokenizer) -> str:
    match task:
        case Supervised() | Finetune():
            taught = task.distill and f", {task.distill.weight:.0%} {task.distill.target} distillation"
            cotrained = task.cosub and f", {task.cosub.weight:.0%} co-training of two submodels"
            return f"{task.loss}, smoothing {task.smoothing:g}{taught or cotrained or ''}"
        case Masked(objective=objective, mask=mask):
            return f"{objective.kind} of {mask.ratio:.0%} of the patches, {mask.kind}"
        case Tokenizer():
            return f"pixels, from {task.codes} codes"
        case _:
            assert_never(task)
