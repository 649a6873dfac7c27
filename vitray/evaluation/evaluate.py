"""One evaluation from addresses to its folder: check everything, compute outputs, score, compare, write."""

import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from vitray.cluster.storage_check import check_writable
from vitray.config.evaluation import PROBE_TRAITS, feature_probes
from vitray.errors import ConfigError
from vitray.evaluation.classes import check_same_classes, class_names, class_numbers
from vitray.evaluation.labeling import label_values, open_label_set, score_labels
from vitray.evaluation.probes import all_classes, check_probes, numbered, open_training
from vitray.evaluation.results import Evaluation, Result, Scored, compare, score
from vitray.evaluation.robustness import CorruptedImages, check_corrupted, corruption_errors, open_corrupted
from vitray.evaluation.tracking import track_evaluation
from vitray.evaluation.writing import write_evaluation
from vitray.inference.engine import actor_session, numerics_of
from vitray.inference.images import ImageSet, open_images
from vitray.inference.models import describe_network
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.outputs import BATCH, CHUNK, Output, Outputs, Work, compute_outputs
from vitray.metrics.arrays import ProbeInputs
from vitray.metrics.probes import probe_scores, probe_shares
from vitray.models.network import AnyNetwork
from vitray.system import storage
from vitray.system.mlflow_client import has_store

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
    chunk: int = CHUNK
    max_corrupt: float = MAX_CORRUPT
    corrupt: bool = False
    """Whether corrupted copies of the images are scored too."""
    imagenet_c: str | None = None
    """A folder corruption/severity/class, whose images are scored too."""
    baseline: str | None = None
    """A JSON file with the errors of another network on the corrupted images."""
    labels: str | None = None
    """A label set as KIND=PATH; its images may have other classes than the network."""

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        words = ["vitray", "evaluate", *self.models, self.data, "--split", self.split]
        words += ["--probes", ",".join(self.probes), "--train-split", self.train_split] if self.probes else []
        words += ["--train-shares", *(f"{share:g}" for share in self.train_shares)] if self.train_shares else []
        words += ["--max-corrupt", f"{self.max_corrupt:g}"] if self.max_corrupt != MAX_CORRUPT else []
        words += ["--corrupt"] if self.corrupt else []
        named = {"--imagenet-c": self.imagenet_c, "--baseline": self.baseline, "--labels": self.labels}
        words += [word for option, value in named.items() if value for word in (option, value)]
        return shlex.join(words + (["--out", self.out] if self.out else []))


class Network(NamedTuple):
    """An opened network of a request."""

    name: str
    """Unique in the request."""
    spec: NetworkSpec
    vit: AnyNetwork


class _Data(NamedTuple):
    scored: ImageSet
    train: ImageSet | None
    """None without a probe that learns."""
    corrupted: CorruptedImages | None


def evaluate(request: Request) -> tuple[Evaluation, str]:
    """Score all networks, write the folder, and return the scores and the address of the page.

    If a tracking store is configured, each network's scores become a run there.
    """
    is_tracked = has_store()
    evaluation, folder = compute_evaluation(request)
    page = write_evaluation(evaluation, folder)
    if is_tracked:
        track_evaluation(evaluation, folder)
    return evaluation, page


def compute_evaluation(request: Request) -> tuple[Evaluation, str]:
    """Return the scores of all networks, and the folder that holds their outputs."""
    check_probes(request.probes)
    networks = open_networks(request.models)
    images = open_images(request.data, request.split)
    learns = any(PROBE_TRAITS[name].learns for name in request.probes)
    train = open_training(images, request.train_split) if learns else None
    data = _Data(images, train, open_corrupted(request.corrupt, request.imagenet_c, request.baseline))
    _check(request, networks, data)
    folder = request.out or storage.join(DEFAULT_FOLDER, _folder_name(networks, images))
    check_writable(folder)
    with actor_session(request.workers):
        results = [_result(request, network, data, folder) for network in networks]
    pairs, shares = compare(results)
    return Evaluation(images, results, pairs, shares, request.command), folder


def open_networks(urls: Sequence[str]) -> list[Network]:
    """Return the networks at these addresses, each under a name of its own."""
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"{url}: given {urls.count(url)} times; expected each network once")
    opened = [describe_network(url) for url in urls]
    names = [spec.name for spec, _ in opened]
    if len(set(names)) < len(names):
        names = list(urls)
    return [Network(name, spec, vit) for name, (spec, vit) in zip(names, opened, strict=True)]


def _check(request: Request, networks: Sequence[Network], data: _Data) -> None:
    images = data.scored
    if not len(images):
        raise ConfigError(f"{images.url}: {images.split} has no images")
    check_same_classes([network.spec for network in networks if network.spec.num_classes is not None], images)
    for network in networks:
        if network.spec.num_classes is not None:
            if request.labels:
                open_label_set(request.labels, network.spec)
            if request.corrupt or not request.labels:
                class_numbers(network.spec, images)
            if data.corrupted:
                check_corrupted(data.corrupted, network.spec)
        elif not request.probes:
            raise ConfigError(
                f"{network.spec.url}: it has no head, so no predictions; expected a classifier, or --probes"
                f" {' '.join(feature_probes())}"
            )
    all_classes(data.train, images)  # refuses classes of one name


def _folder_name(networks: Sequence[Network], images: ImageSet) -> str:
    names = [network.spec.name for network in networks]
    split = [images.split] if images.split != "val" else []
    return "-".join([*names, images.name, *split]).replace("/", "-")


def _result(request: Request, network: Network, data: _Data, folder: str) -> Result:
    """Compute and score one network."""
    spec, images = network.spec._replace(name=network.name), data.scored

    numerics = numerics_of(request.workers, BATCH)
    work = Work(spec, images, (), storage.join(folder, "outputs"), numerics, request.chunk, request.max_corrupt)

    def outputs_of(images: ImageSet, *kinds: Output) -> Outputs:
        return compute_outputs(work._replace(images=images, outputs=kinds), request.workers, network.vit)

    head: list[Output] = [] if spec.num_classes is None else ["logits"]
    body: list[Output] = ["features"] if request.probes else []
    outputs = outputs_of(images, *head, *body)
    more = {}
    if request.probes:
        classes = all_classes(data.train, images)
        learned = outputs_of(data.train, "features") if data.train else None
        train = numbered(learned, data.train, classes) if learned and data.train else None
        keys = learned.keys if learned else []
        inputs = ProbeInputs(numbered(outputs, images, classes), len(classes), train, keys)
        print(f"{network.name}, probes: {', '.join(request.probes)} ...", file=sys.stderr, flush=True)
        more |= probe_scores(request.probes, inputs) | probe_shares(request.train_shares, inputs)
        if learned is not None:
            more |= {"train_images": len(learned.labels), "train_left_out": len(learned.left_out)}
    if data.corrupted and head:
        more |= corruption_errors(data.corrupted, work, request.workers, network.vit)
    by_labels = None
    if request.labels and outputs.logits is not None:
        by_labels = score_labels(outputs.logits, outputs.keys, images, open_label_set(request.labels, spec))
        more |= label_values(by_labels)
    scored = _score(spec, images, outputs, is_lenient=request.labels is not None)
    return Result(network.name, spec, outputs, class_names(spec, images), scored, more, by_labels)


def _score(spec: NetworkSpec, images: ImageSet, outputs: Outputs, *, is_lenient: bool) -> Scored | None:
    """The scores by the labels of the images; lenient: None if they are of other classes."""
    if outputs.logits is None:
        return None
    try:
        numbers = class_numbers(spec, images)
    except ConfigError:
        if is_lenient:
            return None
        raise
    return score(outputs.logits, numbers[outputs.labels], outputs.keys, spec.probability)
