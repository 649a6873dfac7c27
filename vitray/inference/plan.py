"""The plan of a prediction: its networks, images and options, cut into parts and batches that nothing else decides.

plan.json is written before the first part. A repeated command goes on with the parts that are missing; a command with
another plan is refused. The bytes of a part are a function of the plan, on machines of one kind.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from vitray.config import Model
from vitray.config.model_names import is_vit, parse_name
from vitray.config.parsing import short
from vitray.errors import ConfigError, RunError, nearest
from vitray.inference.listing import ImageList
from vitray.inference.network_spec import NetworkSpec, Numerics, Wanted
from vitray.system import storage

FORMAT = 1
PLAN, RESULT, PARTS = "plan.json", "predictions.json", "parts"
TOP_K = 5
BATCH = 64
# Most compute threads of a plan that is read.
MOST_THREADS = 1024
# Images of a part: a kill costs at most the parts under way.
PART = 1024


class Options(NamedTuple):
    """What is computed, and in batches of how many images."""

    top_k: int | None = None
    """None is five, or all classes of the network with the fewest; 0 leaves the classes out."""
    logits: bool = False
    embedding: bool = False
    """The pooled vector before the head."""
    levels: tuple[str, ...] = ()
    """Levels whose features are kept, such as block07."""
    batch: int = BATCH
    part: int = PART
    """Images of a file, rounded up to whole batches."""
    compile: bool = False
    """Compile the blocks; each batch is then padded to the same shape."""


class Plan(NamedTuple):
    """One prediction."""

    networks: tuple[NetworkSpec, ...]
    """Each under a name of its own."""
    images: ImageList
    options: Options
    out: str
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    """Compute threads of a process on a CPU."""

    @property
    def wanted(self) -> Wanted:
        """The outputs of the networks that the columns need."""
        options = self.options
        return Wanted(bool(options.top_k or options.logits), options.embedding, options.levels)

    @property
    def numerics(self) -> Numerics:
        """How the networks compute."""
        return Numerics(self.device, self.threads, self.options.batch, self.options.compile)

    @property
    def batches(self) -> int:
        """The batches of a part."""
        return -(-self.options.part // self.options.batch)

    @property
    def parts(self) -> int:
        """The number of parts."""
        return -(-len(self.images) // (self.batches * self.options.batch))

    def span(self, part: int, batch: int) -> tuple[int, int]:
        """Return the first image of a batch and the one after its last; those of the last part may be empty."""
        start = (part * self.batches + batch) * self.options.batch
        return min(start, len(self.images)), min(start + self.options.batch, len(self.images))

    def address(self, part: int) -> str:
        """Return the address of a part."""
        return storage.join(self.out, PARTS, f"part-{part:05d}-of-{self.parts:05d}.parquet")

    @property
    def content(self) -> dict[str, Any]:
        """The content of plan.json: everything that decides the bytes of the parts."""
        # In their order, which is that of the columns.
        networks = [[spec.name, spec.key] for spec in self.networks]
        classes = [[spec.name, spec.classes] for spec in self.networks]
        probabilities = [[spec.name, spec.probability] for spec in self.networks]
        options = self.options._asdict() | {"levels": list(self.options.levels)}
        images = {"images": len(self.images), "identity of the images": self.images.identity}
        if any(spec.thresholds for spec in self.networks):
            images["thresholds"] = _hash([[spec.name, spec.thresholds] for spec in self.networks])
        return (
            {"format": FORMAT, "networks": networks, "class names": _hash(classes), "probabilities": probabilities}
            | images
            | options
            | self.numerics._asdict()
        )

    @property
    def identity(self) -> str:
        """A hash of the plan, which each part carries."""
        return _hash(self.content)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_options(networks: Sequence[NetworkSpec], options: Options) -> Options:
    """Return the options with the classes of these networks, or refuse those that a network cannot give."""
    for spec in networks:
        if spec.num_classes is None:
            if options.logits or options.top_k or not (options.embedding or options.levels):
                wanted = "a classifier, or --embedding or --features alone"
                raise ConfigError(f"{spec.url}: it has no head, so no classes; expected {wanted}")
        elif options.top_k is not None and options.top_k > spec.num_classes:
            wanted = f"at most the {spec.num_classes} classes of {spec.url}"
            raise ConfigError(f"--top-k: got {options.top_k}, expected {wanted}")
        _check_levels(spec, options)
    if options.top_k == 0 and not (options.logits or options.embedding or options.levels):
        raise ConfigError("--top-k 0: nothing to write; expected --logits, --embedding or --features")
    if options.top_k is None:
        options = options._replace(top_k=min([TOP_K, *(spec.num_classes for spec in networks if spec.num_classes)]))
    return options


def _check_levels(spec: NetworkSpec, options: Options) -> None:
    known = list(level_widths(spec)) if options.levels else []
    for level in options.levels:
        if not known:
            raise ConfigError(f"--features {level}: {spec.network} has no stages; expected --embedding alone")
        if level not in known:
            wanted = f"one of {known[0]} to {known[-1]}{nearest(level, known)}"
            raise ConfigError(f"--features {level}: no such level in {spec.network}; expected {wanted}")
    if options.compile and not is_vit(spec.network) and (options.levels or options.embedding):
        wanted = "no --embedding and no --features"
        raise ConfigError(f"--compile: {spec.network} is compiled whole, with its logits alone; expected {wanted}")


def level_widths(spec: NetworkSpec) -> dict[str, int]:
    """Return the width of the features of each level: of the blocks, or of the stages of a network of torchvision."""
    if not is_vit(spec.network):
        from vitray.models.other_networks import stage_widths  # loads torch

        return stage_widths(Model.model_validate_json(spec.settings))
    return {f"block{level:02d}": spec.features for level in range(parse_name(spec.network).depth)}


def column_widths(plan: Plan) -> dict[str, int]:
    """Return {column: length of its lists} in order; several networks prefix theirs by their name."""
    options, widths = plan.options, {}
    for spec in plan.networks:
        classes = spec.num_classes or 0
        own = dict.fromkeys(("classes", "probabilities"), (options.top_k or 0) * bool(classes))
        levels = level_widths(spec) if options.levels else {}
        own |= {"logits": classes * options.logits} | {level: levels[level] for level in options.levels}
        own |= {"embedding": spec.features * options.embedding}
        prefix = f"{spec.name}/" if len(plan.networks) > 1 else ""
        widths |= {prefix + name: width for name, width in own.items() if width}
    return widths


def open_plan(plan: Plan) -> Plan:
    """Return the plan with the device and the threads of an earlier command; refuse a folder with another plan."""
    url = storage.join(plan.out, PLAN)
    if not storage.exists(url):
        if names := storage.list_files(storage.join(plan.out, PARTS)):
            raise ConfigError(f"{plan.out}: has {PARTS}/{names[0]} without {PLAN}; expected a new or an empty folder")
        return plan
    stored = storage.read_json(url)
    if isinstance(stored, dict) and stored.get("device") in ("cpu", "cuda"):
        plan = plan._replace(device=stored["device"])
    if isinstance(stored, dict) and type(stored.get("threads")) is int and 1 <= stored["threads"] <= MOST_THREADS:
        plan = plan._replace(threads=stored["threads"])
    check_same(plan, stored, url)
    return plan


def check_same(plan: Plan, stored: Any, url: str) -> None:
    """Refuse another plan, by its first difference."""
    if not isinstance(stored, dict):
        raise ConfigError(f"{url}: not a plan of vitray predict: got {short(stored)}")
    for name, value in plan.content.items():
        if stored.get(name) != value:
            raise ConfigError(
                f"{plan.out}: holds a prediction with {name} {short(stored.get(name))}, now {short(value)}: repeat that"
                " command, or pick another OUT"
            )


def write_plan(plan: Plan) -> None:
    """Write plan.json, unless it is there."""
    url = storage.join(plan.out, PLAN)
    if not storage.exists(url):
        storage.write_bytes(url, f"{json.dumps(plan.content, indent=1)}\n".encode())


def missing_parts(plan: Plan) -> list[int]:
    """Return the numbers of the parts that have no file."""
    done = storage.file_sizes(storage.join(plan.out, PARTS)).keys()
    return [part for part in range(plan.parts) if plan.address(part).rpartition("/")[2] not in done]


def check_still_ours(plan: Plan) -> None:
    """Raise a RunError if another command has replaced the plan meanwhile."""
    try:
        check_same(plan, storage.read_json(url := storage.join(plan.out, PLAN)), url)
    except ConfigError as error:
        raise RunError(f"another command has written to the same folder meanwhile: {error}") from None
