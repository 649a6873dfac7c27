"""A run from its recipe to its registered model, seen from the driver: plan, folder, cluster, tracking, workers."""

import json
import math
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from vitray import storage
from vitray.cluster import session
from vitray.config import Run, load_run
from vitray.config.pretraining import Tokenizer
from vitray.config.training import Finetune
from vitray.data.shards.manifest import Dataset
from vitray.errors import ConfigError, RunError
from vitray.runs.console import Display
from vitray.runs.plan import Plan, check_storage, difference, make_plan
from vitray.runs.shutdown import Ending

if TYPE_CHECKING:
    from torch import Tensor

    from vitray.models.tokenizer import VisualTokenizer
    from vitray.weights import Saved
    from vitray.weights.pretrained import Start

RUN, HOME, ENDED = "run.yaml", "run.json", "outcome.json"
# Seconds in which a lost node may come back, before the run ends.
RETURNS_WITHIN = 1800


class Outcome(NamedTuple):
    """How a run ended."""

    name: str
    home: str
    state: Literal["finished", "stopped early"]
    model: str | None
    """Its model folder; None of a run that was stopped early."""
    model_bytes: int | None
    """Of the tensors in it: of a delta, those that it does not take from its base."""
    val_top1: float | None
    """Of the weights in the model folder; None of what learns no classes."""
    val_loss: float | None
    """Of the same."""
    mlflow_run: str | None
    """None where the tracking server was away."""
    steps: int
    seconds: float
    """Spent training, without start and evaluations."""
    images_per_second: float | None
    """The median of the records, the first of which holds the start, left out."""
    start: dict[str, float]
    """Seconds from the call to: ray, workers, first step."""


class Member(NamedTuple):
    """What a run is told that belongs to a sweep."""

    parent: str
    """The uid of the run that it is shown below."""
    is_enough: Callable[[int, Mapping[str, float]], bool]
    """Given the scores of a step, whether the run ends there."""
    asks: bool
    """Whether training waits for that answer; if not, a run ends by itself alone."""
    dataset: Dataset | None = None
    """What the sweep has opened already."""
    at_a_time: int = 1
    """Runs of the sweep that share the cluster."""
    ends: threading.Event | None = None
    """Set when the sweep is told to end: then the run saves where it is, and ends too."""


class Layout(NamedTuple):
    """Where the workers run."""

    workers: tuple[int, int]
    use_gpu: bool
    cpus: float
    """Reserved by a worker."""
    threads: int
    """Of a worker on a CPU."""


def train(run: Run, name: str, out: str = "runs", *, fork: str | None = None, member: Member | None = None) -> Outcome:
    """Train to the end: a new run, or one of this name that was interrupted."""
    called = time.monotonic()
    run, plan, dataset, aside, start, vocabulary = make_plan(run, member.dataset if member else None)
    dataset = dataset.model_copy(update={"url": storage.absolute(dataset.url)})
    out = storage.absolute(out)
    home = storage.join(out, name)
    uid = open_home(home, name, run, plan, fork)
    if over := finished(home):
        print(f"vitray: {name} is finished: {home}", file=sys.stderr)
        return over
    session.prepare_environment()
    ending = Ending(member.ends if member else None)
    with session.running(dashboard=False) as is_alone, ending.listening():
        if is_alone:
            session.begin_helpers()
        # They take seconds, which a refused recipe must not. What trains is loaded before a thread loads MLflow.
        from vitray.runs import trainer  # noqa: F401
        from vitray.runs.run_logger import Reporting

        await_nodes(run)
        layout = lay_out(run, member.at_a_time if member else 1)
        display = Display(plan, quiet=member is not None)
        first = start.task_state if start else _last_weights(storage.join(out, fork)) if fork else None
        with Reporting(run, plan, dataset, name, home, uid, display, layout, called, fork, start, member) as reporting:
            asks = member is not None and member.asks
            tokenizer = vocabulary and vocabulary.tokenizer
            ended = _fit(run, dataset, aside, home, layout, reporting.desk, asks, first, tokenizer, ending)
            if "told to end" in ended:
                display.line(f"  step {ended['step']:,} is saved")
                raise ending.error
            if "failed" in ended:
                raise RunError(f"{name}: {ended['failed']}")
            if "stopped" in ended:
                return reporting.finish(ended, None)
            return reporting.finish(ended, save_weights(run, home, dataset.classes, start))


def _fit(
    run: Run,
    dataset: Dataset,
    aside: np.ndarray | None,
    home: str,
    layout: Layout,
    desk: Any,
    asks: bool,
    first: "dict[str, Tensor] | None",
    tokenizer: "VisualTokenizer | None",
    ending: Ending,
) -> dict[str, Any]:
    import ray
    import ray.train

    from vitray.runs.oom_backoff import WaitForMemory, fit_patiently
    from vitray.runs.trainer import Trainer
    from vitray.train.loop import worker
    from vitray.train.state import Job

    job = Job(
        run,
        dataset,
        aside,
        home,
        uuid.uuid4().hex[:12],
        layout.threads,
        desk,
        asks,
        os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1") != "0",
        None if first is None else ray.put(first),
        None if tokenizer is None else ray.put(tokenizer),
    )
    lowest, highest = layout.workers
    # Ray Train's own storage, of which nothing is used: beside the driver, so that no outage of the run's can end it.
    beside = tempfile.TemporaryDirectory(prefix="vitray-")
    trainer = Trainer(
        worker,
        train_loop_config={"job": job},
        scaling_config=ray.train.ScalingConfig(
            num_workers=highest if lowest == highest else (lowest, highest),
            use_gpu=layout.use_gpu,
            resources_per_worker={"CPU": layout.cpus} | ({"GPU": run.compute.gpus} if layout.use_gpu else {}),
        ),
        run_config=ray.train.RunConfig(
            name=job.attempt,
            storage_path=beside.name,
            failure_config=ray.train.FailureConfig(
                max_failures=run.compute.max_failures, controller_failure_limit=_patience()
            ),
            callbacks=[WaitForMemory(desk, run.compute.max_failures)],
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        return ending.wait_for(lambda: fit_patiently(trainer.fit, desk), desk).return_value or {}
    except ray.train.TrainingFailedError as error:
        if reason := ray.get(desk.given_up.remote()):
            raise RunError(reason) from None
        times = (
            "" if isinstance(error, ray.train.ControllerError) else f" {run.compute.max_failures + 1} times, at last"
        )
        raise RunError(f"the workers failed{times} {_cause(error)}") from error
    finally:
        beside.cleanup()


def _patience() -> int:
    """How often a start for which the nodes do not suffice is tried: what fits at first has lost a node since."""
    seconds = session.grows_within() or RETURNS_WITHIN
    return math.ceil(seconds / float(os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]))


def _cause(error: BaseException) -> str:
    """Why training failed: of a node without memory the node, otherwise the last line that says something."""
    from vitray.runs.oom_backoff import short_of_memory

    if short := short_of_memory([error, *getattr(error, "worker_failures", {}).values()]):
        return f"because {short}; wanted more memory there, or less that takes it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"by: {lines[-1] if lines else type(error).__name__}"


def _last_weights(home: str) -> "dict[str, Tensor]":
    """What a run ended with, or has come to: averaged where it averages."""
    from vitray.train import checkpoints

    parts = checkpoints.read_checkpoint(home, checkpoints.complete_steps(home)[-1]).parts
    return parts["model"] | parts.get("average", {})  # what is not trained has no average


def save_weights(run: Run, home: str, classes: Sequence[str], start: "Start | None") -> "Saved":
    """Write the model folder of a run that has ended; a fine-tuning of some parts as a delta.

    Of what predicts patches only the network is written, with which a fine-tuning goes on; of a tokenizer all.
    """
    from vitray.models.vit import ViT
    from vitray.weights import save_model, save_tokenizer

    weights = _last_weights(home)
    if isinstance(run.task, Tokenizer):
        from vitray.models.tokenizer import VisualTokenizer

        tokenizer = VisualTokenizer(run)
        tokenizer.load_state_dict(weights)
        storage.remove(storage.join(home, "model"))
        return save_tokenizer(storage.join(home, "model"), tokenizer)
    vit = ViT(run.model)
    vit.load_state_dict({name.removeprefix("vit."): tensor for name, tensor in weights.items() if name[:4] == "vit."})
    base = None
    if start and isinstance(run.task, Finetune) and run.task.delta and run.task.mode != "full":
        base = start.url
    storage.remove(storage.join(home, "model"))
    named = classes if run.model.num_classes is not None else None
    return save_model(storage.join(home, "model"), run, vit, named, relative_to=base)


# ---- the run's folder ------------------------------------------------------------------------------------------------


def open_home(home: str, name: str, run: Run, plan: Plan, fork: str | None) -> str:
    """The identity of the run in a folder: that of the interrupted one, or a new one."""
    check_storage(home)
    if storage.exists(storage.join(home, HOME)):
        known = json.loads(storage.read_bytes(storage.join(home, HOME)))
        _check_same(home, name, run, plan, known)
        storage.abort_uploads(home)  # of a writer that was killed
        return known["uid"]
    if fork and isinstance(run.task, Finetune):
        raise ConfigError("--fork: task finetune starts from task.weights; wanted one of them")
    if fork:
        _check_fork(storage.join(home.rpartition("/")[0], fork), run)
    uid = uuid.uuid4().hex
    content = {"uid": uid, "name": name, "dataset_identity": plan.dataset_identity, "forked_from": fork}
    content["weights_identity"] = plan.weights_identity
    storage.write_bytes(storage.join(home, RUN), run.to_yaml().encode())
    storage.write_bytes(storage.join(home, HOME), json.dumps(content).encode())
    return uid


def finished(home: str) -> Outcome | None:
    """How the run in a folder ended, if it went to its end."""
    if not storage.exists(where := storage.join(home, ENDED)):
        return None
    content = json.loads(storage.read_bytes(where))
    return Outcome(*(content.get(field) for field in Outcome._fields)) if content["state"] == "finished" else None


def stored_run(home: str, words: Sequence[str] = ()) -> Run:
    """The settings of the run in a folder, with `a.b=c` words laid over them."""
    if not storage.exists(storage.join(home, HOME)):
        folder, _, name = home.rpartition("/")
        known = {path.partition("/")[0] for path in storage.list_files(folder) if path.endswith(f"/{HOME}")}
        from vitray.errors import nearest

        raise ConfigError(f"{home}: no run here to go on with{nearest(name, known)}")
    with storage.local_copy(storage.join(home, RUN)) as path:
        return load_run(path, words)


def _check_same(home: str, name: str, run: Run, plan: Plan, known: dict[str, Any]) -> None:
    differing = difference(stored_run(home), run)
    if known["dataset_identity"] != plan.dataset_identity:
        differing.append(f"{plan.dataset}: other images than the run was begun with")
    if known.get("weights_identity") != plan.weights_identity:
        differing.append(f"{plan.weights}: other weights than the run was begun with")
    if differing:
        raise ConfigError(
            f"{name}: a run of this name is another experiment: {'; '.join(differing)}. Choose another --name, or"
            f" start from the weights of that one: --name NEW --fork {name}"
        )


def _check_fork(old: str, run: Run) -> None:
    from vitray.train import checkpoints  # torch takes seconds, which nobody else here needs

    steps = checkpoints.complete_steps(old)
    if not steps:
        raise ConfigError(f"--fork {old.rpartition('/')[2]}: {old} has no checkpoint to start from")
    before, now = stored_run(old).model, run.model
    if (before.name, before.image_size, before.num_classes) != (now.name, now.image_size, now.num_classes):
        raise ConfigError(
            f"--fork: the weights of {before.name} at {before.image_size} px do not fit {now.name} at {now.image_size};"
            f" wanted the same network, or task.kind=finetune task.weights={old}/model"
        )


# ---- the cluster -----------------------------------------------------------------------------------------------------


def await_nodes(run: Run) -> None:
    """On a cluster that grows, wait for the nodes that a run needs at least; elsewhere what is there counts."""
    seconds, compute = session.grows_within(), run.compute
    if seconds is None:
        return
    import ray

    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    if compute.device == "auto" and not has_gpus:
        raise ConfigError("compute.device: got auto on a cluster that grows and has no GPU now; wanted gpu or cpu")
    if compute.worker_range is None:
        raise ConfigError("compute.workers: got auto on a cluster that grows; wanted a number, as in compute.workers=2")
    gpus = {} if compute.device == "cpu" else {"GPU": compute.gpus}
    apart = run.evaluate.where if run.data.evaluated else "workers"
    bundles: list[dict[str, float]] = [{"CPU": compute.cpus or 1.0} | gpus] * compute.worker_range[0]
    bundles += [{"CPU": 1.0}]  # decodes images
    if apart != "workers":
        bundles += [{"CPU": 1.0} | (gpus if apart == "gpu" else {})]
    session.wait_for_room(bundles, seconds)


def _taken(nodes: list[float], each: float) -> int:
    """How many workers nodes of so many CPUs take at most, where one of them keeps a whole CPU to decode images."""
    counts = [(int(cpus / each + 1e-9), int(max(cpus - 1, 0) / each + 1e-9)) for cpus in nodes]
    keeps = [count - less for (count, less), cpus in zip(counts, nodes, strict=True) if cpus >= 1]
    return sum(count for count, _ in counts) - min(keeps, default=0)


def lay_out(run: Run, at_a_time: int = 1) -> Layout:
    """Where the workers run, or one message: what does not fit would be waited for without end.

    With several such runs at a time, a worker on a CPU takes no more threads than its part of them.
    """
    import ray

    resources, compute = ray.cluster_resources(), run.compute
    # Evaluations apart have a device of their own, and one CPU of the cluster at least decodes images.
    apart = run.evaluate.where if run.data.evaluated else "workers"
    kept = 1 + (apart != "workers")
    gpus, cpus = int(resources.get("GPU", 0)) - (apart == "gpu"), resources.get("CPU", 0.0)
    use_gpu = compute.device == "gpu" or (compute.device == "auto" and gpus > 0)
    lowest, highest = compute.worker_range or ((gpus, gpus) if use_gpu else (1, 1))
    if (use_gpu and lowest > gpus) or (use_gpu and not gpus) or gpus < 0:
        beside = " beside the one that evaluates" if apart == "gpu" else ""
        raise ConfigError(f"compute.workers: got {max(lowest, 1)} GPU workers, the cluster has {gpus} GPUs{beside}")
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"] and "CPU" in node["Resources"]]
    per_node = -(-highest // max(1, len(nodes)))
    smallest = min(nodes, default=0.0)
    fair = 1.0 if use_gpu else min((cpus - kept) / highest, smallest / per_node)
    each = compute.cpus or (fair if fair < 1 else float(int(fair)))
    if not compute.cpus and each > 0:
        while each > 0.01 and _taken(nodes, each) < highest:  # what is left of each node would be too little for a task
            each /= 2
    if each <= 0 or lowest * each + kept > cpus or lowest > _taken(nodes, each):
        evaluating = ", and one to evaluate apart," if kept > 1 else ""
        share = f" of {each:g} CPUs" if each > 0 else ""
        raise ConfigError(
            f"compute.workers: {lowest} workers{share} beside one CPU to decode images{evaluating} do not fit into the"
            f" {cpus:g} CPUs of the cluster{f', {smallest:g} on its smallest node' if len(nodes) > 1 else ''}"
        )
    beside = -(-highest * at_a_time // max(1, len(nodes)))
    return Layout((lowest, highest), use_gpu, each, max(1, int(smallest // beside)))
