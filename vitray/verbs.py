"""The verbs as functions. They do what the command line does, and return values that a notebook shows.

An address is a path, `s3://`, or that of a network as `vitray evaluate` takes it. Settings are `{"optim.lr": 1e-3}` or
`["optim.lr=1e-3"]`, as in `load_run`.
"""

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vitray.config.parsing import spelled
from vitray.errors import ConfigError
from vitray.pages.notebook import facts_html, frame_html, joined_html, page_html, picture_html
from vitray.system import storage

if TYPE_CHECKING:
    import pandas as pd

    from vitray.sweeps.plan import Recipe
    from vitray.sweeps.saved_sweep import SavedSweep
    from vitray.sweeps.space import Space

Address = str | os.PathLike[str]
Addresses = Address | Sequence[Address]
Settings = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class Report:
    """What a verb has done. A notebook shows its table, and its page if it has one."""

    values: dict[str, Any]
    """All results by name, as the verb's `--json` prints them; `report["top1"]` is one of them."""
    path: str
    """The address of what was written: a page, a picture, or a folder."""
    text: str
    """What the command line prints."""
    read_frame: Callable[[], "pd.DataFrame"]
    """Reads `frame`."""

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """The results as a table: a row for each network, image, split or file."""
        return self.read_frame()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        if self.path.endswith(".html"):
            return joined_html([frame_html(self.frame), page_html(self.path)])
        if self.path.endswith(".png"):
            return joined_html([picture_html(storage.read_bytes(self.path)), frame_html(self.frame)])
        return joined_html([facts_html(self.path, {}), frame_html(self.frame)])


def shard(
    source: Address,
    dest: Address,
    settings: Settings = (),
    *,
    splits: Sequence[str] = (),
    index_only: bool = False,
) -> Report:
    """Write images as a dataset of shuffled, checked, counted shards. A job that was killed goes on when repeated.

    `source`: a folder of class folders, an index, tars, Parquet files or an archive, as of `vitray shard`; or `demo`
    `dest`: a new folder or s3://, or that of a job to finish
    `splits`: the only ones to write; NAME=SHARE draws one from train, as in `["val=0.1"]`
    `index_only`: leave Parquet files in place, and only describe them
    """
    from vitray.data.shards import read_request, write_dataset
    from vitray.data.shards.inspection import read_rejects, reject_lines
    from vitray.data.shards.sources import REJECTS

    request = read_request(os.fspath(source), os.fspath(dest), splits, _words(settings), index_only)
    dataset = write_dataset(request)
    rows = [
        {
            "split": name,
            "images": split.rows,
            "shards": len(split.shards),
            "bytes": sum(each.bytes for each in split.shards),
        }
        for name, split in dataset.splits.items()
    ]
    repeats = dataset.duplicates
    lines = [f"{dataset.url}: {len(dataset.classes)} classes, identity {dataset.identity[:16]}"]
    line = "  {split:<8} {images:>10,} images {shards:>6,} shards {megabytes:>12,.1f} MB"
    lines += [line.format_map({**row, "megabytes": row["bytes"] / 1e6}) for row in rows]
    lines += [f"  mean {dataset.mean}, std {dataset.std}"]
    lines += [
        f"  rejected images {dataset.rejects.count}; duplicates within a split {sum(repeats.within.values())}, kept"
    ]
    lines += [f"  duplicates between splits {repeats.across}, {repeats.removed} removed from train"]
    if rejects := read_rejects(dataset.url):
        lines += [f"  left out, all in {REJECTS}:", *(f"  {line}" for line in reject_lines(rejects, 5))]
    values = {
        "url": dataset.url,
        "identity": dataset.identity,
        "splits": {name: split.rows for name, split in dataset.splits.items()},
        **dataset.model_dump(include={"mean", "std", "rejects", "duplicates"}),
        "classes": len(dataset.classes),
    }
    return Report(values, dataset.url, "\n".join(lines), lambda: _frame(rows))


def evaluate(
    models: Addresses,
    data: Address,
    *,
    split: str = "val",
    probes: Sequence[str] = (),
    train_split: str = "train",
    train_shares: Sequence[float] = (),
    corrupt: bool = False,
    imagenet_c: Address | None = None,
    baseline: Address | None = None,
    labels: str | None = None,
    out_of_fold: bool = False,
    out: Address | None = None,
    workers: int | None = None,
    max_corrupt: float = 0.01,
) -> Report:
    """Score networks on each image of a split exactly once, and compare several in pairs; write a page.

    `data`: a dataset, or what `shard` reads
    `probes`: probes of the features, as in `["knn"]`, which learn from `train_split`
    `train_shares`: shares of these images that the linear probe learns from, too
    `corrupt`: also score corrupted copies; `imagenet_c` is a folder of them, `baseline` the errors of another network
    `labels`: published labels as KIND=PATH
    `out_of_fold`: the networks are those of all folds of the split, and are scored as one
    `out`: a folder or s3://; None is evaluations/MODEL-DATA
    `workers`: actors at a time; None is all GPUs or CPUs of a cluster, else one
    `max_corrupt`: the share of unusable images above which the evaluation fails
    """
    from vitray.evaluation import evaluate as evaluation_verb
    from vitray.evaluation.texts import scores_text

    _check({"workers": workers})
    if not 0 <= max_corrupt < 1:
        raise ConfigError(f"max_corrupt: got {max_corrupt}, expected a share from 0 to below 1")
    if train_shares and not ("linear" in probes and all(0 < share < 1 for share in train_shares)):
        raise ConfigError(f"train_shares: got {train_shares}, expected shares between 0 and 1, and the probe linear")
    request = evaluation_verb.Request(
        _several(models),
        os.fspath(data),
        split,
        probes,
        train_split,
        train_shares,
        _address(out),
        workers,
        max_corrupt,
        corrupt,
        _address(imagenet_c),
        _address(baseline),
        labels,
        out_of_fold,
    )
    evaluation, page = evaluation_verb.evaluate(request)
    text = f"{scores_text(evaluation)}\n\n{page}"
    return Report(
        evaluation.flat() | {"page": page}, page, text, lambda: _frame([each.flat() for each in evaluation.results])
    )


def predict(
    models: Addresses,
    images: Address,
    out: Address,
    *,
    top_k: int | None = None,
    logits: bool = False,
    embedding: bool = False,
    features: Sequence[str] = (),
    splits: Sequence[str] = (),
    precision: Literal["fp32", "bf16"] | None = None,
    compiled: bool = False,
    batch: int = 64,
    part: int = 1024,
    workers: int | tuple[int, int] | None = None,
    follow: Literal["csv", "jsonl"] | None = None,
) -> Report:
    """Write the predictions of networks for each image as Parquet. A command that was killed goes on when repeated.

    `images`: a folder, a glob, a tar, a Parquet file, a dataset, or an index of addresses
    `top_k`: the most probable classes; None is five, 0 none
    `embedding`: also the pooled vector before the head; `features` are vectors of levels, as in `["block05"]`
    `splits`: of a dataset; all without any
    `batch`, `part`: images of a forward pass, and of a file
    `compiled`: use torch.compile, with padded batches
    `workers`: the most actors on Ray, or their least and most; None is this process, or all that fit on a cluster
    `follow`: print each row too, as soon as its part is written
    """
    from vitray.inference.parts import read_parts
    from vitray.inference.plan import Options
    from vitray.inference.predict import Request
    from vitray.inference.predict import predict as predict_verb

    least, most = workers if isinstance(workers, tuple) else (1, 1 if workers is None else workers)
    _check({"batch": batch, "part": part, "workers": min(least, most)})
    if most < least or (top_k or 0) < 0:
        raise ConfigError(f"got workers={workers}, top_k={top_k}, expected as in workers=4 or (2, 8), top_k from 0 on")
    options = Options(top_k, logits, embedding, tuple(features), batch, part, compiled)
    request = Request(_several(models), os.fspath(images), os.fspath(out), options, splits)
    request = request._replace(workers=(least, most) if workers else None, precision=precision, follow=follow)
    prediction = predict_verb(request)
    values, plan = prediction.flat(), prediction.plan
    counts = "{written:,} of {images:,} images in {parts:,} files, {skipped:,} skipped".format_map(values)
    text = f"{counts}, {values['images_per_second']:,} images/s\n{plan.out}/predictions.json"
    return Report(values, plan.out, text, lambda: read_parts(plan).to_pandas())


def inspect(
    model: Address,
    images: Addresses = (),
    *,
    figures: Sequence[str] = (),
    compare: Address | None = None,
    split: str = "val",
    most: int = 64,
    levels: Sequence[int] | None = None,
    workers: int | None = None,
    out: Address | None = None,
) -> Report:
    """Draw the inside of a network: attention, branches, filters, positions, levels, weights; write a page.

    `images`: a dataset, or image files; none for the figures that need no images
    `figures`: as in `["rollout", "distance"]`; all without any
    `compare`: another network, shown beside the first
    `most`: images of a dataset, evenly spaced
    `levels`: of figure distance; None is all
    `workers`: actors for over 64 images; None is all of a cluster, else this process
    `out`: a folder or s3://; None is inspect/MODEL-DATA
    """
    from vitray.inspection.report.inspect_networks import Request, inspect_networks
    from vitray.inspection.report.page import file_names

    _check({"most": most, "workers": workers})
    request = Request(os.fspath(model), _several(images), figures, _address(compare), split, most, levels)
    inspection, page = inspect_networks(request._replace(out=_address(out), workers=workers))
    files = {result.name: list(file_names(result)) for result in inspection.results}
    values = {
        "page": page,
        "models": [subject.name for subject in inspection.subjects],
        "images": 0 if inspection.images is None else inspection.images.used,
        "figures": list(files),
        "files": [name for names in files.values() for name in names],
    }
    rows = [{"figure": figure, "file": name} for figure, names in files.items() for name in names]
    return Report(values, page, page, lambda: _frame(rows))


def export(
    model: Address,
    target: str,
    *,
    out: Address | None = None,
    data: Address = "demo",
    split: str = "val",
    images: int = 1000,
    any_size: bool = False,
    int8: Literal["weights", "dynamic"] | None = None,
    bound: float = 0.001,
    allow: bool = False,
    rounds: int = 5,
    settings: Settings = (),
) -> Report:
    """Write a network for another runtime or library, with a proof that it computes the same.

    `target`: onnx, torch_export, timm, torchvision or hf
    `out`: a new folder or s3://; None is exports/MODEL-TARGET
    `data`, `split`, `images`: what the logits are compared on; `demo` draws it
    `any_size`: take images of any multiple of a patch
    `int8`: store the weights in 8 bits, or also compute in them
    `bound`: the largest share of images with another top-1; `allow` writes an export above it
    `rounds`: of the latency
    `settings`: what a file of weights lacks, as in `{"heads": 12}`
    """
    from vitray.exports.export import export_network
    from vitray.exports.options import ExportRequest

    _check({"images": images, "rounds": rounds})
    if not 0 <= bound <= 1:
        raise ConfigError(f"bound: got {bound}, expected a share from 0 to 1")
    request = ExportRequest(os.fspath(model), target, _words(settings), _address(out), os.fspath(data), split, images)
    request = request._replace(any_size=any_size, int8=int8, bound=bound, allow=allow, rounds=rounds)
    export = export_network(request)
    values = export.flat()
    return Report(values, export.path, export.text(), lambda: _frame([values]))


def replay(run: Address, step: int, *, out: Address | None = None) -> Report:
    """Take a past step of a run again, and show the loss and the gradient norm of each of its images.

    `run`: a run folder, as in runs/first
    `step`: counted from 1, as in MLflow's charts
    `out`: a folder or s3://; None is replays/RUN-step-N
    """
    from vitray.runs.replay import SHEET
    from vitray.runs.replay import replay as replay_verb

    replayed = replay_verb(os.fspath(run), step, _address(out))
    sheet = storage.join(replayed.out, SHEET)
    return Report(replayed.flat(), sheet, replayed.text(), lambda: _frame(replayed.rows()))


# ---- sweeps ----------------------------------------------------------------------------------------------------------


class SweepInputs(NamedTuple):
    """A sweep as it was read."""

    recipe: "Recipe"
    space: "Space"
    stages: "dict[str, Recipe]"


def sweep(
    recipe: Address,
    space: Address,
    settings: Settings = (),
    *,
    name: str | None = None,
    out: Address = "sweeps",
    add: Settings = (),
    here: bool = False,
) -> "SavedSweep":
    """Train every point of a search space, on Ray Tune; the same name resumes an interrupted sweep.

    `recipe`, `space`: files, or names of those that vitray brings, as in `demo` and `demo_lr`
    `settings`: of all trials; stage.setting of a stage
    `name`: of the sweep; None is made of the space and the time
    `out`: the folder of all sweeps, or s3://
    `add`: one more value of a grid, as in `{"optim.lr": 0.1}`
    `here`: train the trials in this process, without Ray; several processes share those of one name
    """
    from vitray.sweeps.saved_sweep import open_sweep

    words, additions = _words(settings), _words(add)
    inputs = read_sweep(recipe, space, words, additions)
    name, out = sweep_name(space, name), os.fspath(out)
    command = sweep_command(recipe, space, words, additions, name, out)
    if here:
        from vitray.sweeps.sweep_here import sweep_here

        sweep_here(inputs.recipe, inputs.space, name, out, f"{command} --here", inputs.stages)
    else:
        from vitray.sweeps.sweep import sweep as sweep_verb

        sweep_verb(inputs.recipe, inputs.space, name, out, command, inputs.stages)
    return open_sweep(name, out)


def read_sweep(recipe: Address, space: Address, words: Sequence[str], additions: Sequence[str] = ()) -> SweepInputs:
    """Return the sweep of a recipe and a space, with `a.b=c` overrides, and additions to its grids."""
    import tune_spaces
    from vitray.config import load_run
    from vitray.sweeps.plan import Recipe
    from vitray.sweeps.space import check_overrides, extend_space, read_space, split_overrides

    searched = extend_space(read_space(tune_spaces.path_of(os.fspath(space))), additions)
    overrides, stages = split_overrides(searched, words)
    check_overrides(searched, overrides)
    base = Recipe(load_run(os.fspath(recipe), overrides), [os.fspath(recipe), *overrides])
    recipes = {stage: Recipe(load_run(own, changes), [own, *changes]) for stage, (own, *changes) in stages.items()}
    return SweepInputs(base, searched, recipes)


def sweep_name(space: Address, name: str | None) -> str:
    """Return the name of a sweep: the given one, or that of the space with the time."""
    named = f"{Path(space).stem}-{time.strftime('%Y%m%d-%H%M%S')}" if name is None else name
    storage.check_name(named, "--name")
    return named


def sweep_command(
    recipe: Address, space: Address, words: Sequence[str], additions: Sequence[str], name: str, out: str
) -> str:
    """Return the command line of a sweep, which resumes it."""
    flags = ["--name", name, "--out", out, *(part for value in additions for part in ("--add", value))]
    return shlex.join(["vitray", "sweep", os.fspath(recipe), os.fspath(space), *words, *flags])


# ---- arguments -------------------------------------------------------------------------------------------------------


def _words(settings: Settings) -> list[str]:
    """Return settings as a command line spells them."""
    if isinstance(settings, Mapping):
        return [f"{path}={spelled(value)}" for path, value in settings.items()]
    return list(settings)


def _several(addresses: Addresses) -> list[str]:
    return (
        [os.fspath(addresses)] if isinstance(addresses, str | os.PathLike) else [os.fspath(each) for each in addresses]
    )


def _frame(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(list(rows))


def _address(address: Address | None) -> str | None:
    return None if address is None else os.fspath(address)


def _check(counts: Mapping[str, int | None]) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name}: got {count}, expected 1 or more")
