"""The run folder: settings, identity and outcome of a run, and the checks before it is resumed or forked."""

import json
import shlex
import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from vitray.cluster import session
from vitray.config import Run, load_run
from vitray.data.shards import Dataset, open_dataset
from vitray.errors import ConfigError, nearest
from vitray.pages.notebook import facts_html
from vitray.system import storage
from vitray.training.resolved import ResolvedRun

# Settings that may change on a resume, because they do not affect the result.
FREE = (
    "compute.workers",
    "compute.device",
    "compute.cpus",
    "compute.gpus",
    "compute.local_batch",
    "compute.compile",
    "compute.channels_last",
    "compute.activation_checkpointing",
    "compute.max_failures",
    "checkpoint.",
    "data.url",  # a dataset may move: its identity is compared instead
    "data.augment.on",
    "data.cache",
    "evaluate.batch",
    "evaluate.figures",
    "evaluate.gpus",
    "evaluate.probes",
    "evaluate.where",
    "guard.",
    "model.execution",
    "task.save_delta",
    "task.distill.teacher",
    "task.weights",  # weights may move: their identity is compared instead
    "task.objective.tokenizer",
    "tracking.promote",
    "tracking.register_as",
)

SETTINGS, RUN_META, OUTCOME = "run.yaml", "run.json", "outcome.json"


class RunFolder(NamedTuple):
    """The folder of a run that this process owns."""

    url: str
    name: str
    uid: str
    """Of the run, also in MLflow."""
    starts: int
    """How many times the run was started, this time included."""
    owner: str
    """The id of this process as the owner."""
    forked_from: str | None
    """The run whose last weights this one starts from."""


class Outcome(NamedTuple):
    """How a run ended."""

    name: str
    home: str
    """The run folder."""
    state: Literal["finished", "stopped early"]
    model: str | None
    """The model folder; None after an early stop."""
    model_bytes: int | None
    """Bytes of the stored tensors; a delta counts only its own."""
    val_top1: float | None
    """Score of the weights in the model folder; None without classes, and of several labels an image."""
    val_loss: float | None
    """Loss of the same weights."""
    mlflow_run: str | None
    """None while the tracking server is unreachable."""
    steps: int
    seconds: float
    """Training time, without start and evaluations."""
    images_per_second: float | None
    """Median over the records, without the first, which includes the start."""
    start: dict[str, float]
    """Seconds from the call to: ray, workers, first step."""
    best_step: int | None = None
    """The step of the best evaluation; None without one."""
    val_map: float | None = None
    """Mean average precision of the same weights, of several labels an image."""
    promotion: str | None = None
    """The result of tracking.promote in words; None without it, and of a run that was finished before."""

    def _repr_html_(self) -> str:
        return facts_html(self.name, {name: value for name, value in self._asdict().items() if value is not None})


def finished_outcome(run_dir: str) -> Outcome | None:
    """Return the outcome of a finished run; None for any other."""
    if not storage.exists(path := storage.join(run_dir, OUTCOME)):
        return None
    content = json.loads(storage.read_bytes(path))
    return Outcome(*(content.get(field) for field in Outcome._fields)) if content["state"] == "finished" else None


def open_run_dir(run_dir: str, name: str, resolved: ResolvedRun, owner: str, fork: str | None = None) -> RunFolder:
    """Open the folder of a new run, or of an interrupted one, which must have the same settings, data and weights."""
    meta: dict[str, Any]
    if storage.exists(path := storage.join(run_dir, RUN_META)):
        meta = json.loads(storage.read_bytes(path))
        if fork and fork != meta["forked_from"]:
            before = meta["forked_from"] or "no other run"
            raise ConfigError(f"--fork: got {fork}, expected another --name: {name} exists and started from {before}")
        _check_same(run_dir, name, resolved, meta)
        storage.abort_uploads(run_dir)  # left by a killed writer
        meta["starts"] += 1
    else:
        if fork and resolved.run.weights is not None:
            raise ConfigError(
                f"--fork: task {resolved.run.task.kind} starts from task.weights; expected one of the two"
            )
        if fork:
            _check_fork(_source(run_dir, name, fork), resolved)
        meta = {"uid": uuid.uuid4().hex, "starts": 1, "name": name, "forked_from": fork} | _identities(resolved)
        storage.write_bytes(storage.join(run_dir, SETTINGS), resolved.run.to_yaml().encode())
    storage.write_bytes(path, json.dumps(meta).encode())
    return RunFolder(run_dir, name, meta["uid"], meta["starts"], owner, meta["forked_from"])


def _identities(resolved: ResolvedRun) -> dict[str, str | None]:
    """Return hashes of what a run reads; the files may move."""
    weights, teacher = resolved.initial or resolved.tokenizer, resolved.teacher
    return {
        "dataset_identity": resolved.dataset.identity,
        "weights_identity": weights and weights.identity,
        "teacher_identity": teacher and teacher.identity,
    }


def fork_source(run_dir: str) -> str | None:
    """Return the run folder whose last weights a run starts from; None if it has a checkpoint or is no fork."""
    if not storage.read_json(storage.join(run_dir, RUN_META))["forked_from"]:
        return None
    from vitray.training import checkpoints  # imports torch, which takes seconds

    return None if checkpoints.complete_steps(run_dir) else run_source(run_dir)


def run_source(run_dir: str) -> str | None:
    """Return the run folder whose last weights a run started from; None if it is no fork."""
    meta = storage.read_json(storage.join(run_dir, RUN_META))
    return _source(run_dir, meta["name"], meta["forked_from"]) if meta["forked_from"] else None


def _source(run_dir: str, name: str, fork: str) -> str:
    """Return the folder of the run to fork, which needs a complete checkpoint.

    `run_dir` less `name`, which may have slashes, is the folder of all runs.
    """
    from vitray.training import checkpoints  # imports torch, which takes seconds

    source = storage.join(run_dir.rsplit("/", name.count("/") + 1)[0], fork)
    if not checkpoints.complete_steps(source):
        raise ConfigError(f"--fork {fork}: {source} has no checkpoint to start from")
    return source


def stored_run(run_dir: str, overrides: Sequence[str] = ()) -> Run:
    """Return the settings of the run in a folder, with `a.b=c` overrides."""
    if not storage.exists(storage.join(run_dir, RUN_META)):
        folder, _, name = run_dir.rpartition("/")
        runs = {path.partition("/")[0] for path in storage.list_files(folder) if path.endswith(f"/{RUN_META}")}
        raise ConfigError(f"{run_dir}: no run to resume{nearest(name, runs)}")
    with storage.local_copy(storage.join(run_dir, SETTINGS)) as path:
        return load_run(path, overrides)


def run_dataset(run: Run, run_dir: str) -> Dataset:
    """Return the images of a run, which must be those that it started with."""
    assert run.data.url is not None
    dataset = open_dataset(run.data.url)
    if dataset.identity != json.loads(storage.read_bytes(storage.join(run_dir, RUN_META)))["dataset_identity"]:
        raise ConfigError(f"{dataset.url}: the images have changed since {run_dir} started; expected those of the run")
    return dataset


def resume_command(name: str, run_dir: str) -> str:
    """Return the command that resumes a run, on this machine or as a job."""
    out = run_dir.removesuffix(f"/{name}")  # a name may have slashes
    options = [] if out == storage.absolute("runs") else ["--out", out]
    verb = ["vitray", "submit", "train"] if session.job_dir() else ["vitray", "train"]
    return shlex.join([*verb, "--resume", name, *options])


def difference(old: Run, new: Run) -> list[str]:
    """Return the settings that make two runs different experiments, as `path: old -> new`."""
    before, after = old.dotted(), new.dotted()
    return [
        f"{path}: {before.get(path)!r} -> {after.get(path)!r}"
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path) and not path.startswith(FREE)
    ]


def _check_same(run_dir: str, name: str, resolved: ResolvedRun, meta: dict[str, Any]) -> None:
    run, changes = resolved.run, difference(stored_run(run_dir), resolved.run)
    identities, weights = _identities(resolved), resolved.initial or resolved.tokenizer
    if meta["dataset_identity"] != identities["dataset_identity"]:
        changes.append(f"{run.data.url}: the images have changed since the run started")
    if meta["weights_identity"] != identities["weights_identity"]:
        changes.append(f"{weights and weights.url}: the weights have changed since the run started")
    if meta["teacher_identity"] != identities["teacher_identity"]:
        teacher = resolved.teacher and resolved.teacher.url
        changes.append(f"{teacher}: the teacher has changed since the run started")
    if changes:
        raise ConfigError(
            f"{name}: a run of this name exists with other settings: {'; '.join(changes)}. Pick another --name, or"
            f" start from its weights: --name NEW {_use_of_weights(run_dir, name, run)}; see"
            " docs/faq.md#two-runs-of-one-name"
        )


def _use_of_weights(run_dir: str, name: str, run: Run) -> str:
    """Return the arguments by which a new run starts from the weights of this one."""
    if run.weights is None:
        return f"--fork {shlex.quote(name)}"
    if finished_outcome(run_dir):
        return shlex.quote(f"task.weights={run_dir}/model")
    return f"task.weights=TARGET, after `{shlex.join(['vitray', 'weights', 'checkpoint', run_dir, 'TARGET'])}`"


def _check_fork(source: str, resolved: ResolvedRun) -> None:
    import torch

    from vitray.tasks.build import build_task
    from vitray.training import checkpoints

    run, tokenizer = resolved.run, resolved.tokenizer and resolved.tokenizer.tokenizer
    before, now = stored_run(source).model, run.model
    if (before.name, before.image_size, before.num_classes) != (now.name, now.image_size, now.num_classes):
        raise ConfigError(
            f"--fork: the weights of {before.name} at {before.image_size} px do not fit {now.name} at {now.image_size};"
            f" expected the same network, or task.kind=finetune task.weights={source}/model"
        )
    got = checkpoints.weight_shapes(source, checkpoints.complete_steps(source)[-1])
    with torch.device("meta"):
        wanted = {name: list(each.shape) for name, each in build_task(run, tokenizer).state_dict().items()}
    for name in {**wanted, **got}:
        if wanted.get(name) != got.get(name):
            raise ConfigError(
                f"--fork: {source} is of another network: {name}: got {got.get(name, 'none')}, expected"
                f" {wanted.get(name, 'none')}; settings of model and task have changed"
            )
