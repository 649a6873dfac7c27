"""What a run will do, checked against its data and its storage before anything is started. No Ray."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitray import storage
from vitray.cluster.storage_check import preflight, readable
from vitray.config import Run
from vitray.config.pretraining import Beit, Masked
from vitray.config.training import Finetune
from vitray.data.shards import open_dataset, set_aside
from vitray.data.shards.manifest import MANIFEST, Dataset
from vitray.errors import ConfigError, nearest
from vitray.models.sizes import sizes_of
from vitray.tracking.mlflow_client import tracking_uri
from vitray.train.schedule import in_steps, total_steps

if TYPE_CHECKING:
    from vitray.weights.pretrained import Start, Vocabulary


class Plan(NamedTuple):
    """The numbers of a run that follow from its settings and its data."""

    model: str
    params: int
    trainable_params: int
    trainable_share: float
    gflops: float
    """Of one image, forward, multiply-adds counted once."""
    dataset: str
    dataset_identity: str
    images: int
    val_images: int
    classes: int
    weights: str | None
    """What a fine-tuning starts from, or the tokenizer whose codes are predicted; None where there is no such thing."""
    weights_identity: str | None
    global_batch: int
    workers: int | str
    steps_per_epoch: int
    steps: int
    warmup_steps: int
    evaluate_every: int | None
    """In steps; None evaluates nothing."""
    record_every: int


class Planned(NamedTuple):
    """A plan and what it was made from."""

    run: Run
    """With what a fine-tuning leaves open as its weights have it."""
    plan: Plan
    dataset: Dataset
    aside: np.ndarray | None
    """For each row of train whether data.development sets it aside; None where it sets none aside."""
    start: "Start | None"
    """What a fine-tuning starts from."""
    vocabulary: "Vocabulary | None"
    """The tokenizer whose codes are predicted."""


def make_plan(run: Run, known: Dataset | None = None) -> Planned:
    """The plan of a run and its dataset, or one message about what does not fit.

    A dataset that is known is not opened again where it is the run's.
    """
    if run.data.url is None:
        raise ConfigError("data.url: got null, wanted a dataset that `vitray shard` wrote, as in data.url=data/demo")
    is_known = known is not None and storage.absolute(known.url) == storage.absolute(run.data.url)
    if not is_known:
        readable(run.data.url, MANIFEST)
    dataset = known if known and is_known else open_dataset(run.data.url)
    start = None
    if isinstance(run.task, Finetune):
        from vitray.weights.pretrained import (
            open_start,  # torch takes seconds, which a plan from scratch has no need of
        )

        run, start = open_start(run, run.task, dataset)
    vocabulary = None
    if isinstance(run.task, Masked) and isinstance(run.task.objective, Beit):
        from vitray.weights.pretrained import open_vocabulary

        vocabulary = open_vocabulary(run, run.task.objective)
    taken = start or vocabulary
    images = _images(dataset, "data.train", run.data.train)
    aside = None
    if run.data.development:
        aside = set_aside(dataset, run.data.train, run.data.development)
        val_images, images = int(aside.sum()), int((~aside).sum())
        if not val_images:
            raise ConfigError(
                f"data.development: got {run.data.development:g}, which sets none of {images} images aside, wanted more"
            )
    else:
        val_images = _images(dataset, "data.val", run.data.val) if run.data.val else 0
    _check_classes(run, dataset)
    _check_batch(run, images)
    if not is_known:
        check_shards(dataset, list(dict.fromkeys([run.data.train, run.data.evaluated or run.data.train])))
    steps_per_epoch = images // run.optim.batch
    sizes = sizes_of(run.model)
    plan = Plan(
        model=run.model.name,
        params=sizes.params,
        trainable_params=start.audit.trained if start else sizes.params,
        trainable_share=start.audit.share if start else 1.0,
        gflops=sizes.gflops,
        dataset=dataset.url,
        dataset_identity=dataset.identity,
        images=images,
        val_images=val_images,
        classes=len(dataset.classes),
        weights=taken.url if taken else None,
        weights_identity=taken.identity if taken else None,
        global_batch=run.optim.batch,
        workers=run.compute.workers,
        steps_per_epoch=steps_per_epoch,
        steps=total_steps(run.optim, steps_per_epoch),
        warmup_steps=in_steps(run.optim.warmup, steps_per_epoch),
        evaluate_every=in_steps(run.evaluate.every, steps_per_epoch) if run.data.evaluated else None,
        record_every=in_steps(run.tracking.every, steps_per_epoch),
    )
    return Planned(run, plan, dataset, aside, start, vocabulary)


def plan_text(planned: Planned) -> str:
    """The plan as a person reads it, with what trains of a network that is fine-tuned."""
    lines = [f"  {key:<18} {value}" for key, value in planned.plan._asdict().items()]
    if planned.start:
        from vitray.weights.freezing import audit_table

        lines += ["", *(f"  {line}" for line in audit_table(planned.start.audit).splitlines())]
    return "\n".join(lines)


def check_storage(url: str) -> None:
    """Refuse a place for results that cannot be written, read and cleared, and one for records that would not last."""
    tracking_uri()
    preflight(url)


def check_shards(dataset: Dataset, splits: list[str]) -> None:
    """Whether the shards that dataset.json lists lie where they should, as long as they should be."""
    found = storage.file_sizes(dataset.url)
    for split in splits:
        for shard in dataset.splits[split].shards:
            if dataset.address(shard) == shard.name:  # left in place: elsewhere, and opened when it is read
                continue
            got = found.get(shard.name)
            if got != shard.bytes:
                state = "is missing" if got is None else f"has {got} bytes"
                raise ConfigError(f"{dataset.address(shard)}: {state}, dataset.json says {shard.bytes} bytes")


def difference(old: Run, new: Run) -> list[str]:
    """The settings in which two runs are different experiments, as `path: old -> new`."""
    before, after = old.dotted(), new.dotted()
    return [
        f"{path}: {before.get(path)!r} -> {after.get(path)!r}"
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path) and not path.startswith(FREE)
    ]


# Settings that may differ between the parts of one run: none of them decides what is learned.
FREE = (
    "compute.workers",
    "compute.device",
    "compute.cpus",
    "compute.gpus",
    "compute.local_batch",
    "compute.compile",
    "compute.recompute",
    "compute.max_failures",
    "checkpoint.",
    "data.url",  # the dataset's identity is compared instead: it may have been moved
    "data.cache",
    "evaluate.batch",
    "evaluate.where",
    "guard.",
    "model.execution",
    "task.delta",
    "task.weights",  # their identity is compared instead
    "task.objective.tokenizer",
    "tracking.register_as",
)


def _images(dataset: Dataset, setting: str, split: str) -> int:
    if split not in dataset.splits:
        known = ", ".join(dataset.splits)
        raise ConfigError(
            f"{setting}: got {split!r}, wanted a split of {dataset.url}: {known}{nearest(split, dataset.splits)}"
        )
    return dataset.splits[split].rows


def _check_classes(run: Run, dataset: Dataset) -> None:
    if run.model.num_classes is None and run.task.kind in ("masked", "tokenizer"):
        return
    if run.model.num_classes != len(dataset.classes):
        raise ConfigError(
            f"model.num_classes: got {run.model.num_classes}, wanted {len(dataset.classes)} as in {dataset.url}"
        )


def _check_batch(run: Run, images: int) -> None:
    batch = run.optim.batch
    if batch > images:
        raise ConfigError(f"optim.batch: got {batch}, wanted at most the {images} images of {run.data.train}")
    if run.data.mix.is_mixing and batch % 2:
        raise ConfigError(f"optim.batch: got {batch}, wanted an even number, as mixup and cutmix pair images")
    highest = (run.compute.worker_range or (1, 1))[1]
    if batch < highest * (2 if run.data.mix.is_mixing else 1):
        raise ConfigError(f"optim.batch: got {batch}, too few for {highest} workers")
