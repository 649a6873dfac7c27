"""`resolve`: all that follows from a run's settings, data and weights, checked before Ray starts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitray.cluster import session
from vitray.cluster.storage_check import check_readable, check_writable
from vitray.config import Run
from vitray.config.classification import Finetune
from vitray.config.evaluation import PROBE_TRAITS
from vitray.config.parsing import spelled
from vitray.config.pretraining import Beit, Masked
from vitray.config.sections import in_steps
from vitray.config.self_supervised import BY_DATA, Lejepa, SelfDistillation, by_data, length_alone
from vitray.data.shards import held_out, open_dataset
from vitray.data.shards.checking import check_sizes
from vitray.data.shards.manifest import MANIFEST, Dataset
from vitray.data.stream.balance import ClassDraw, class_draws, loss_weights
from vitray.errors import ConfigError, nearest
from vitray.runs.placement import check_batch
from vitray.system import storage
from vitray.system.mlflow_client import tracking_uri
from vitray.training.resolved import ResolvedRun
from vitray.training.schedule import Intervals, Length, intervals_of, length_of
from vitray.weights.addresses import check_model_name

if TYPE_CHECKING:
    from vitray.weights.pretrained import InitialWeights, TeacherSource, TokenizerSource


def resolve(run: Run, known: Dataset | None = None) -> ResolvedRun:
    """Return a run with all that its data and weights decide, checked against both.

    `known` is an open dataset, used in place of the run's own if both have the same address.
    """
    if run.data.url is None:
        raise ConfigError("data.url: got null, expected a dataset that `vitray shard` wrote, as in data.url=data/demo")
    is_known = known is not None and storage.absolute(known.url) == storage.absolute(run.data.url)
    if not is_known:
        check_readable(run.data.url, MANIFEST)
    dataset = known if known and is_known else open_dataset(run.data.url)
    run, initial, tokenizer = _open_weights(run, dataset)
    teacher = _open_teacher(run, dataset)
    images, val_images, mask = _split_images(run, dataset)
    run = _completed_by_data(run, dataset, mask, images)
    _check_settings(run, dataset, images)
    if not is_known:
        check_sizes(dataset, dict.fromkeys([run.data.train, run.data.evaluated or run.data.train]))
    length, intervals = resolve_schedule(run, images)
    if isinstance(run.task, Lejepa | SelfDistillation):
        _check_held(run.task, length)
    from vitray.models.network import network_sizes  # imports torch, which takes seconds
    from vitray.tasks.build import task_costs
    from vitray.tasks.supervised import Teacher

    return ResolvedRun(
        run=run,
        dataset=dataset.model_copy(update={"url": storage.absolute(dataset.url)}),
        holdout_mask=mask,
        images=images,
        val_images=val_images,
        few_shot_least=_few_shot_least(run, dataset, mask) if "few_shot" in run.evaluate.probes else None,
        length=length,
        intervals=intervals,
        balance=_balance(run, dataset, mask) if run.data.balance != "none" else None,
        sizes=network_sizes(run.model),
        costs=task_costs(run, tokenizer and tokenizer.tokenizer, teacher and Teacher.of(teacher)),
        initial=initial,
        tokenizer=tokenizer,
        teacher=teacher,
    )


def _check_held(task: Lejepa | SelfDistillation, length: Length) -> None:
    """Refuse a run that ends before the network, or the prototypes, begin to learn."""
    held = {"head_first": (length_alone(task), "network does not")}
    if isinstance(task, SelfDistillation):
        held["freeze_prototypes"] = task.freeze_prototypes, "prototypes do not"
    for name, (duration, what) in held.items():
        if (steps := in_steps(duration, length.epoch)) >= length.total:
            raise ConfigError(
                f"task.{name}: got {duration}, which is {steps:,} steps, expected fewer than the {length.total:,} steps"
                f" of optim.duration: until then the {what} learn"
            )


def plan_of(resolved: ResolvedRun) -> dict[str, int | float | str | None]:
    """Return the numbers and identities of a run by name, for the dry run and for MLflow."""
    run, dataset, length, costs = resolved.run, resolved.dataset, resolved.length, resolved.costs
    weights, teacher = resolved.initial or resolved.tokenizer, resolved.teacher
    return {
        "model": run.model.name,
        "params": resolved.sizes.params,
        "trainable_params": costs.trained_params,
        "trainable_share": costs.trained_params / costs.params,
        "gflops": resolved.sizes.gflops,
        "step_gflops": costs.step_gflops,
        "dataset": run.data.url,
        "dataset_identity": dataset.identity,
        "images": resolved.images,
        "val_images": resolved.val_images,
        "classes": len(dataset.classes),
        "weights": weights and weights.url,
        "weights_identity": weights and weights.identity,
        "global_batch": run.optim.batch,
        "workers": run.compute.workers,
        "steps_per_epoch": length.epoch,
        "steps": length.total,
        "warmup_steps": length.warmup,
        "evaluate_every": resolved.intervals.evaluate if run.data.evaluated else None,
        "record_every": resolved.intervals.record,
        "few_shot_least": resolved.few_shot_least,
        **{name: spelled(getattr(run.task, name)) for name in BY_DATA[0].of_task(run.task.kind)},
        "teacher": teacher and teacher.url,
        "teacher_identity": teacher and teacher.identity,
        "teacher_gflops": teacher and teacher.gflops,
    }


def resolve_schedule(run: Run, images: int) -> tuple[Length, Intervals]:
    """Return the length and the intervals of a run in steps; refuse a duration or an interval without a step."""
    batch = run.optim.batch
    if batch > images:
        raise ConfigError(f"optim.batch: got {batch}, expected at most the {images} images of {run.data.train}")
    length = length_of(run.optim, images // batch)
    return length, intervals_of(run, length)


def _open_weights(run: Run, dataset: Dataset) -> "tuple[Run, InitialWeights | None, TokenizerSource | None]":
    """Return the run completed by its initial weights and classes, these weights, and the tokenizer, if any."""
    if run.weights is not None:
        from vitray.weights.pretrained import open_initial_weights  # imports torch, which takes seconds

        assert isinstance(run.task, Finetune | Lejepa | SelfDistillation)
        return *open_initial_weights(run, run.task, dataset.classes), None
    if isinstance(run.task, Masked) and isinstance(run.task.objective, Beit):
        from vitray.weights.pretrained import open_tokenizer_source

        return run, None, open_tokenizer_source(run, run.task.objective)
    if run.task.kind == "supervised" and "num_classes" not in run.model.model_fields_set:
        run = run.replace({"model.num_classes": len(dataset.classes)})
    return run, None, None


def _completed_by_data(run: Run, dataset: Dataset, mask: np.ndarray | None, images: int) -> Run:
    """Return the run with the views of its task, and with omitted settings that follow from the images."""
    traits, changes = run.task.traits, dict[str, Any]()
    if run.classification and run.classification.labels != dataset.labels:
        if "labels" in run.task.model_fields_set:
            raise ConfigError(
                f"task.labels: got {run.classification.labels}, expected {dataset.labels}, as the images of"
                f" {dataset.url} have"
            )
        changes["task.labels"] = dataset.labels
        if "loss" not in run.task.model_fields_set:
            changes["task.loss"] = "bce"
    if "views" in traits.needs and run.data.views is None:
        changes["data.views"] = run.data.chosen_views.model_dump(mode="json")
    if run.classification and not isinstance(weights := run.classification.class_weights, tuple) and weights != "none":
        from vitray.data.stream.decoding import locate_rows
        from vitray.data.stream.stream import class_counts

        used = None if mask is None else np.flatnonzero(~mask)
        counts = class_counts(locate_rows(dataset, run.data.train), used)
        found = loss_weights(weights, *counts, dataset.classes, dataset.labels)
        changes["task.class_weights"] = [float(f"{weight:.6g}") for weight in found]
    if traits.by_data:
        row = by_data(images)
        settings = row.of_task(run.task.kind).items()
        changes |= {f"task.{name}": value for name, value in settings if getattr(run.task, name) is None}
        if "duration" not in run.optim.model_fields_set:
            changes["optim.duration"] = f"{row.epochs} epochs"
    return run.replace(changes) if changes else run


def _open_teacher(run: Run, dataset: Dataset) -> "TeacherSource | None":
    if run.distill is None:
        return None
    from vitray.weights.pretrained import open_teacher  # imports torch, which takes seconds

    return open_teacher(run, run.distill, dataset.classes)


def _split_images(run: Run, dataset: Dataset) -> tuple[int, int, np.ndarray | None]:
    """Return the number of training images, that of evaluated images, and the hold-out mask."""
    images = _images(dataset, "data.train", run.data.train)
    mask = held_out(dataset, run.data)
    if mask is None:
        return images, _images(dataset, "data.val", run.data.val) if run.data.val else 0, None
    evaluated = int(mask.sum())
    if not evaluated:
        setting = "data.fold" if run.data.fold else "data.holdout"
        raise ConfigError(f"{setting}: got {run.data.held_out}, which holds out none of {images} images, expected more")
    return images - evaluated, evaluated, mask


def _balance(run: Run, dataset: Dataset, mask: np.ndarray | None) -> list[ClassDraw]:
    from vitray.data.stream.decoding import locate_rows, read_labels
    from vitray.data.stream.stream import class_balance

    rows = locate_rows(dataset, run.data.train)
    labels = read_labels(all_rows := np.arange(rows.starts[-1]), rows)
    used = all_rows if mask is None else np.flatnonzero(~mask)
    times = class_balance(dataset, rows, labels, used, run.data.balance, run.seed).times(0)
    return class_draws(labels, used, times, rows.classes)


# Classes of a table, the rarest and the most frequent ones.
MOST_CLASSES = 20


def _balance_lines(draws: Sequence[ClassDraw], classes: Sequence[str]) -> list[str]:
    """Return a table of how often an epoch shows the images of each class, the rarest first."""
    order = sorted(range(len(draws)), key=lambda label: (draws[label].images, label))
    left = len(order) - MOST_CLASSES
    half = MOST_CLASSES // 2
    chosen = order if left <= 0 else [*order[:half], *order[-half:]]
    width = max(len("class"), *(len(classes[label]) for label in chosen))
    lines = [f"{'class':<{width}}  {'images':>8}  {'shown':>8}  {'repeated':>8}  {'left out':>8}"]
    for label in chosen:
        each = draws[label]
        numbers = (each.images, each.shown, each.repeated, each.left_out)
        lines.append("  ".join([f"{classes[label]:<{width}}", *(f"{number:>8,}" for number in numbers)]))
    return [*lines[: half + 1], f"... {left:,} classes between", *lines[half + 1 :]] if left > 0 else lines


def plan_text(resolved: ResolvedRun) -> str:
    """Return the plan as indented lines, with the trained parts of a fine-tuning."""
    values = {key: value for key, value in plan_of(resolved).items() if value is not None}
    texts = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
    lines = [f"  {key:<18} {text}" for key, text in texts.items()]
    if resolved.balance:
        lines += ["", *(f"  {line}" for line in _balance_lines(resolved.balance, resolved.dataset.classes))]
    if resolved.initial:
        from vitray.weights.freezing import audit_table

        lines += ["", *(f"  {line}" for line in audit_table(resolved.initial.audit).splitlines())]
    return "\n".join(lines)


def check_storage(url: str) -> None:
    """Refuse an unusable folder for results and a temporary tracking store."""
    tracking_uri()
    check_writable(url)


def _images(dataset: Dataset, setting: str, split: str) -> int:
    if split not in dataset.splits:
        known = f"expected a split of {dataset.url}: {', '.join(dataset.splits)}{nearest(split, dataset.splits)}"
        without = setting == "data.val" and set(dataset.splits) == {"train"}
        other = "; without one, data.holdout=0.1 evaluates a tenth of train, and data.val=null nothing"
        raise ConfigError(f"{setting}: got {split!r}, {known}{other if without else ''}")
    return dataset.splits[split].rows


def _check_settings(run: Run, dataset: Dataset, images: int) -> None:
    classes, batch = run.model.num_classes, run.optim.batch
    if run.classification and classes != len(dataset.classes):
        raise ConfigError(
            f"model.num_classes: got {classes}, expected the {len(dataset.classes)} classes of {dataset.url}, or none:"
            " they then come from it; see docs/faq.md#wrong-head"
        )
    if run.data.repeats > images:
        raise ConfigError(
            f"data.repeats: got {run.data.repeats}, expected at most the {images} images of {run.data.train}"
        )
    if run.data.mix.is_mixing and batch % 2:
        raise ConfigError(f"optim.batch: got {batch}, expected an even number, as mixup and cutmix pair images")
    check_model_name(run.tracking.register_as)
    if run.tracking.promote and not run.classification:
        raise ConfigError(f"tracking.promote: got a rule, expected null: a task of kind {run.task.kind} has no top-1")
    if run.tracking.promote and (run.data.val is None or run.data.held_out):
        got = f"{run.data.held_out} of train held out" if run.data.held_out else "data.val null"
        wanted = "expected images on which no version was trained: data.val, data.holdout 0 and data.fold null"
        raise ConfigError(f"tracking.promote: got a rule with {got}; {wanted}")
    for name in run.evaluate.probes if dataset.labels == "several" else ():
        if reason := PROBE_TRAITS[name].needs_one_label:
            raise ConfigError(
                f"evaluate.probes: {name} does not apply to {dataset.url}, whose images have several labels: {reason}"
            )
    learning = sorted(name for name in run.evaluate.probes if PROBE_TRAITS[name].learns)
    if learning and len(dataset.classes) < 2:
        raise ConfigError(f"evaluate.probes {', '.join(learning)} needs labels to learn from; {dataset.url} has none")
    if run.compute.device == "gpu" and session.starts_local_ray():
        import torch  # takes seconds

        if not torch.cuda.is_available():
            raise ConfigError("compute.device: got gpu, expected cpu or auto: torch finds no GPU on this machine")
    check_batch(run, *(run.compute.worker_range or (1, 1)))


def _few_shot_least(run: Run, dataset: Dataset, mask: np.ndarray | None) -> int:
    """Return the number of few_shot's training images of the smallest class; refuse images that lack a class."""
    from vitray.training.probes import read_probe_labels  # imports torch, which takes seconds

    labels = read_probe_labels(run, dataset, mask)
    counts, wanted = np.bincount(labels, minlength=len(dataset.classes)), dataset.splits[run.data.train].class_counts
    missing = [dataset.classes[label] for label in np.flatnonzero((counts == 0) & (np.array(wanted) > 0))]
    if missing:
        raise ConfigError(
            f"evaluate.probe_images: got {run.evaluate.probe_images}: {len(missing):,} of {len(dataset.classes):,}"
            f" classes have none of these images of {run.data.train}, the first is {missing[0]!r}, and few_shot learns"
            " from each class; expected more images, or evaluate.probes without few_shot"
        )
    return int(counts[np.array(wanted) > 0].min())
