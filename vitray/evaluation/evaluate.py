"""One evaluation from addresses to its folder: check everything, compute outputs, score, compare, write, log."""

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.cluster.storage_check import check_writable
from vitray.config.evaluation import PROBE_TRAITS, feature_probes
from vitray.config.training import Data, Fold
from vitray.data.shards import held_out, open_dataset
from vitray.data.shards.label_lists import UNKNOWN
from vitray.data.stream.decoding import SplitRows
from vitray.errors import ConfigError, nearest
from vitray.evaluation.classes import all_classes, check_same_classes, class_names, class_numbers, numbered
from vitray.evaluation.corruptions import CorruptedImages, check_corrupted, corruption_errors, open_corrupted
from vitray.evaluation.page import write_evaluation
from vitray.evaluation.results import Evaluation, Result, Scored, check_finite, compare, score
from vitray.evaluation.texts import fixed_titles, score_text
from vitray.inference.engine import actor_session, numerics_of, workers_for
from vitray.inference.images import ImageSet, name_of, open_images
from vitray.inference.models import named_networks
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.outputs import BATCH, Output, Outputs, Work, compute_outputs
from vitray.metrics.arrays import ProbeInputs, ProbeValues
from vitray.metrics.classification import log_probability_chunks
from vitray.metrics.intervals import wilson
from vitray.metrics.label_sets import LabelSet, LabelSetScore, read_label_set, score_label_set
from vitray.metrics.multilabel import LabelScores, label_loss, score_labels
from vitray.metrics.probes import probe_scores, probe_shares
from vitray.models.network import AnyNetwork
from vitray.system import host_facts, storage
from vitray.system.mlflow_client import has_store
from vitray.tracking.lineage import ModelScores, TrackedDataset, experiment_of
from vitray.tracking.tracker import TrackedRun, Tracker

DEFAULT_FOLDER = "evaluations"
MAX_CORRUPT = 0.01


class Request(NamedTuple):
    """One call of `vitray evaluate`."""

    models: Sequence[str]
    data: str
    split: str = "val"
    probes: Sequence[str] = ()
    train_split: str = "train"
    """The split that the probes learn from."""
    train_shares: Sequence[float] = ()
    """Shares of its images that the linear probe learns from, besides all of them."""
    out: str | None = None
    """None is a folder below `evaluations`, named after the networks and the data."""
    workers: int | None = None
    max_corrupt: float = MAX_CORRUPT
    corrupt: bool = False
    """Whether corrupted copies of the images are scored too."""
    imagenet_c: str | None = None
    """A folder corruption/severity/class, whose images are scored too."""
    baseline: str | None = None
    """A JSON file with the errors of another network on the corrupted images."""
    labels: str | None = None
    """A label set as KIND=PATH; its images may have other classes than the network."""
    out_of_fold: bool = False
    """Whether the networks are those of all folds of a split, scored as one: each image by the one that did not learn
    it."""

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        words = ["vitray", "evaluate", *self.models, self.data, "--split", self.split]
        words += ["--probes", ",".join(self.probes), "--train-split", self.train_split] if self.probes else []
        words += ["--train-shares", *(f"{share:g}" for share in self.train_shares)] if self.train_shares else []
        words += ["--max-corrupt", f"{self.max_corrupt:g}"] if self.max_corrupt != MAX_CORRUPT else []
        words += ["--corrupt"] if self.corrupt else []
        words += ["--out-of-fold"] if self.out_of_fold else []
        named = {"--imagenet-c": self.imagenet_c, "--baseline": self.baseline, "--labels": self.labels}
        words += [word for option, value in named.items() if value for word in (option, value)]
        return shlex.join(words + (["--out", self.out] if self.out else []))


class Network(NamedTuple):
    """An opened network of a request."""

    name: str
    """Unique in the request."""
    spec: NetworkSpec
    vit: AnyNetwork


def evaluate(request: Request) -> tuple[Evaluation, str]:
    """Score all networks, write the folder, and return the scores and the address of the page.

    If a tracking store is configured, each network's scores become a run there.
    """
    is_tracked = has_store()
    evaluation, folder = compute_evaluation(request)
    page = write_evaluation(evaluation, folder)
    if is_tracked and not request.out_of_fold:  # a run in MLflow belongs to one network
        track_evaluation(evaluation, folder)
    return evaluation, page


def compute_evaluation(request: Request) -> tuple[Evaluation, str]:
    """Return the scores of all networks, and the folder that holds their outputs."""
    known = feature_probes()
    for name in request.probes:
        if name not in known:
            raise ConfigError(f"--probes: got {name}, expected some of {', '.join(known)}{nearest(name, known)}")
    networks = [Network(*each) for each in named_networks(request.models)]
    images = open_images(request.data, request.split)
    learns = any(PROBE_TRAITS[name].learns for name in request.probes)
    train = open_training(images, request.train_split) if learns else None
    corrupted = open_corrupted(request.corrupt, request.imagenet_c, request.baseline)
    _check(request, networks, images, corrupted)
    others = request.probes or corrupted or request.labels
    if request.out_of_fold and (others or not isinstance(images.source, SplitRows)):
        raise ConfigError("--out-of-fold: expected a dataset of `vitray shard`, and no other scores beside it")
    all_classes(train, images)  # refuses classes of one name
    names = [*(network.spec.name for network in networks), images.name]
    names += [images.split] if images.split != "val" else []
    folder = request.out or storage.join(DEFAULT_FOLDER, "-".join(names).replace("/", "-"))
    check_writable(folder)
    request = request._replace(workers=workers_for([network.spec for network in networks], request.workers))
    with actor_session(request.workers):
        if request.out_of_fold:
            results = [_out_of_fold(request, networks, images, folder)]
        else:
            results = [_result(request, network, images, train, corrupted, folder) for network in networks]
    pairs, shares = compare(results)
    return Evaluation(images, results, pairs, shares, request.command), folder


def open_training(images: ImageSet, train_split: str) -> ImageSet:
    """Return the training images beside those of a split; refuse a source that has only the latter."""
    train = open_images(images.url, train_split)
    if train.identity == images.identity:
        raise ConfigError(
            f"--train-split: got {train_split}, whose images are those of --split {images.split} in {images.url};"
            " expected other images than the scored ones, as of a source with splits"
        )
    if train.labels != images.labels:
        raise ConfigError(
            f"--train-split: got {train_split}, with {train.labels} label(s) an image, expected {images.labels}, as"
            f" {images.split} of {images.url} has"
        )
    return train


def _check(request: Request, networks: Sequence[Network], images: ImageSet, corrupted: CorruptedImages | None) -> None:
    """Refuse networks that do not fit the images or the options."""
    if not len(images):
        raise ConfigError(f"{images.url}: {images.split} has no images")
    if images.labels == "several":
        given = {"--corrupt": request.corrupt, "--imagenet-c": request.imagenet_c, "--labels": request.labels}
        refused = [(option, "") for option, is_given in given.items() if is_given]
        reasons = {name: PROBE_TRAITS[name].needs_one_label for name in request.probes}
        refused += [(f"--probes {name}", f": {reason}") for name, reason in reasons.items() if reason]
        for option, why in refused:
            raise ConfigError(f"{option} does not apply to {images.url}, whose images have several labels{why}")
    check_same_classes([network.spec for network in networks if network.spec.num_classes is not None], images)
    for network in networks:
        if network.spec.num_classes is not None:
            if request.labels:
                open_label_set(request.labels, network.spec)
            if request.corrupt or not request.labels:
                class_numbers(network.spec, images)
            if corrupted:
                check_corrupted(corrupted, network.spec)
        elif not request.probes:
            raise ConfigError(
                f"{network.spec.url}: it has no head, so no predictions; expected a classifier, or --probes"
                f" {' '.join(feature_probes())}"
            )


# ---- one network -----------------------------------------------------------------------------------------------------


def _result(
    request: Request,
    network: Network,
    images: ImageSet,
    train: ImageSet | None,
    corrupted: CorruptedImages | None,
    folder: str,
) -> Result:
    """Compute and score one network; `train` are the images that its probes learn from."""
    spec = network.spec._replace(name=network.name)
    numerics = numerics_of(request.workers, BATCH)
    work = Work(spec, images, (), storage.join(folder, "outputs"), numerics, max_corrupt=request.max_corrupt)

    def outputs_of(images: ImageSet, *kinds: Output) -> Outputs:
        return compute_outputs(work._replace(images=images, outputs=kinds), request.workers, network.vit)

    head: list[Output] = [] if spec.num_classes is None else ["logits"]
    body: list[Output] = ["features"] if request.probes else []
    outputs = outputs_of(images, *head, *body)
    more, probed = {}, ProbeValues({})
    if request.probes:
        classes = all_classes(train, images)
        inputs, counts = ProbeInputs(numbered(outputs, images, classes), len(classes)), {}
        if train is not None:
            learned = outputs_of(train, "features")
            inputs = inputs._replace(train=numbered(learned, train, classes), keys=learned.keys)
            counts = {"train_images": len(learned.labels), "train_left_out": len(learned.left_out)}
        print(f"{network.name}, probes: {', '.join(request.probes)} ...", file=sys.stderr, flush=True)
        probed = probe_scores(request.probes, inputs)
        more |= probed.scores | probe_shares(request.train_shares, inputs) | counts
    if corrupted and head:
        more |= corruption_errors(corrupted, work, request.workers, network.vit)
    by_labels = None
    if request.labels and outputs.logits is not None:
        labels, keys = open_label_set(request.labels, spec), outputs.keys
        names = [name_of(key) for key in keys] if isinstance(images.source, SplitRows) else keys
        by_labels = score_label_set(outputs.logits, labels.ids(names), labels)
        more |= label_values(by_labels)
    scored = _score(spec, images, outputs, is_lenient=request.labels is not None)
    return Result(network.name, spec, outputs, class_names(spec, images), scored, more, by_labels, probed)


def _out_of_fold(request: Request, networks: Sequence[Network], images: ImageSet, folder: str) -> Result:
    """Compute and score the networks of all folds as one."""
    folds, dataset = _folds_of(networks, images), open_dataset(images.url)
    parts: list[Outputs] = []
    for network, fold in zip(networks, folds, strict=True):
        mask = held_out(dataset, Data(train=images.split, fold=fold))
        assert mask is not None
        rows = np.flatnonzero(mask)
        own = images.part(rows, fold.model_dump_json())
        numerics = numerics_of(request.workers, BATCH)
        work = Work(network.spec, own, ("logits",), storage.join(folder, "outputs"), numerics)
        outputs = compute_outputs(work._replace(max_corrupt=request.max_corrupt), request.workers, network.vit)
        parts.append(outputs._replace(rows=rows[outputs.rows]))
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    keys = [key for part in parts for key in part.keys]
    whole = Outputs(
        rows=np.concatenate([part.rows for part in parts])[order],
        keys=[keys[place] for place in order],
        labels=np.concatenate([part.labels for part in parts])[order],
        logits=np.concatenate([part.logits for part in parts if part.logits is not None])[order],
        features=None,
        left_out=tuple(reason for part in parts for reason in part.left_out),
    )
    specs = [network.spec for network in networks]
    identity = hashlib.sha256(json.dumps([spec.identity for spec in specs]).encode()).hexdigest()
    name = f"{len(folds)} folds"
    spec = specs[0]._replace(name=name, url=", ".join(spec.url for spec in specs), identity=identity)
    thresholds = None
    if spec.thresholds is not None:
        limits = [
            np.broadcast_to(np.array(network.thresholds or 0.5, np.float32), (len(part.rows), spec.num_classes or 0))
            for network, part in zip(specs, parts, strict=True)
        ]
        thresholds = np.concatenate(limits)[order]
    scored = _score(spec, images, whole, is_lenient=False, thresholds=thresholds)
    return Result(name, spec, whole, class_names(spec, images), scored, {})


def _folds_of(networks: Sequence[Network], images: ImageSet) -> list[Fold]:
    """Return the fold of each network; refuse networks that are not those of all folds of the images."""
    folds: list[Fold] = []
    for network in networks:
        if network.spec.fold is None:
            raise ConfigError(f"--out-of-fold: {network.spec.url} was trained without data.fold; expected all with one")
        split, fold = network.spec.fold
        if split != images.split:
            raise ConfigError(f"--split: got {images.split}, expected {split}, whose folds {network.spec.url} has")
        folds.append(fold)
        if (fold.of, fold.group) != (folds[0].of, folds[0].group):
            got, wanted = (f"{each.of} folds by {each.group or 'image'}" for each in (fold, folds[0]))
            raise ConfigError(f"--out-of-fold: {network.spec.url} has one of {got}, and the first network of {wanted}")
    numbers = sorted(fold.index for fold in folds)
    if numbers != list(range(folds[0].of)):
        raise ConfigError(f"--out-of-fold: got folds {numbers}, expected each of {folds[0].of} once, from 0 on")
    return folds


def _score(
    spec: NetworkSpec, images: ImageSet, outputs: Outputs, *, is_lenient: bool, thresholds: np.ndarray | None = None
) -> Scored | LabelScores | None:
    """The scores by the labels of the images; lenient: None if they are of other classes.

    `thresholds` are those of each image (NK), where several networks are scored as one.
    """
    if outputs.logits is None:
        return None
    try:
        numbers = class_numbers(spec, images)
    except ConfigError:
        if is_lenient:
            return None
        raise
    if images.labels == "one":
        return score(outputs.logits, numbers[outputs.labels], outputs.keys, spec.probability)
    states_NK = np.full(outputs.logits.shape, UNKNOWN, np.int8)  # of a class that only the network has, too
    states_NK[:, numbers] = outputs.labels
    check_finite(outputs.logits, outputs.keys)
    chunks = [np.exp(log_BK) for _, log_BK in log_probability_chunks(outputs.logits, probability=spec.probability)]
    loss = label_loss(outputs.logits, states_NK, spec.probability)
    limits = spec.thresholds if thresholds is None else thresholds
    return score_labels(np.concatenate(chunks), states_NK, outputs.keys, limits, loss)


# ---- label sets that the authors of test sets publish: ReaL, ImageNet-V2, -A, -R, -Sketch, ObjectNet -----------------


def open_label_set(labels: str, spec: NetworkSpec) -> LabelSet:
    """Return the label set of an option KIND=PATH for a network; refuse one that its classes do not fit."""
    kind, equals, path = labels.partition("=")
    if not equals or not path:
        raise ConfigError(f"--labels: got {labels}, expected KIND=PATH, as in real=real.json")
    if spec.classes is None:
        raise ConfigError(f"--labels: {spec.url} has no class names; expected a network with names")
    return read_label_set(kind, path, spec.classes)


def label_values(scored: LabelSetScore) -> dict[str, Any]:
    """Return the top-1 and top-5 by a label set by name, of the images that it counts."""
    values: dict[str, Any] = {"labels": scored.name, "labels_images": scored.images}
    values["labels_not_counted"] = scored.not_counted
    for name, hits in (("labels_top1", scored.hits1), ("labels_top5", scored.hits5)):
        interval = wilson(hits, scored.images)
        values |= {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return values


# ---- MLflow ----------------------------------------------------------------------------------------------------------


def track_evaluation(evaluation: Evaluation, folder: str) -> None:
    """Log the scores of each network as a run, linked to its training run and its registered version, with the page.

    A repeated evaluation continues its run.
    """
    images, home = evaluation.images, storage.absolute(folder)
    files = {name: storage.read_bytes(storage.join(folder, name)).decode() for name in ("index.html", "results.json")}
    data = f"{images.name}/{images.split}"
    dataset = TrackedDataset(data, images.identity, images.url, "evaluation", len(images), len(images.classes))
    tags = {"vitray.kind": "evaluation", "vitray.home": home} | host_facts.facts()
    for result in evaluation.results:
        spec, description = result.spec, _description(evaluation, result)
        parts = [home, spec.url, spec.key, images.identity, evaluation.command]
        uid = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        run = TrackedRun(uid, f"{result.name} on {data}", experiment_of(spec.url))
        params = {"model": spec.url, "network": spec.network, "identity": spec.identity, "data": images.url}
        params |= {"split": images.split, "data_identity": images.identity, "command": evaluation.command}
        # Under the names that training gives them: val/top1.
        metrics = {
            f"{images.split}/{score}": value
            for score, value in result.flat().items()
            if type(value) in (int, float) and math.isfinite(value)
        }
        with Tracker(run, params, tags, description) as tracker:
            tracker.datasets([dataset])
            tracker.scores(spec.url, ModelScores(0, metrics, dataset), description)
            for name, text in files.items():
                tracker.text(f"evaluation/{name}", text)


def _description(evaluation: Evaluation, result: Result) -> str:
    rows = [f"| {title} | {text} |" for name, title in fixed_titles().items() if (text := score_text(result, name))]
    table = "\n".join(["| score | with its 95 % interval |", "|---|---|", *rows])
    images = evaluation.images
    head = f"`{result.spec.url}` on {len(result.outputs.labels):,} images of `{images.url}`, {images.split}"
    return f"{head}\n\n{table}\n\n`{evaluation.command}`"
