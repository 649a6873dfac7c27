"""The settings of a training run: its data, its loss, how it descends, where it computes, what it keeps."""

import re
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vitray.config.augmentation import Augment, CentreCrop, Mix, Normalise, NotNegative, Share
from vitray.config.sections import Fraction, Positive, Section, Size, one_of

Unit = Literal["epochs", "steps", "minutes"]


class Duration(NamedTuple):
    """So many of a unit."""

    number: float
    unit: Unit


def parse_duration(text: str) -> Duration:
    """`300 epochs`, `1 epoch`, `10000 steps`, `10 minutes`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(epoch|step|minute)s?", text.strip())
    if found is None:
        raise ValueError(f"got {text!r}, wanted a number and a unit, as in '300 epochs' or '10000 steps'")
    return Duration(float(found[1]), f"{found[2]}s")  # type: ignore[arg-type]


def _spelled(*units: Unit, least: float = 1e-9) -> BeforeValidator:
    """A duration in one of these units, stored in one spelling."""

    def spell(text: Any) -> str:
        count, unit = parse_duration(str(text))
        if unit not in units:
            raise ValueError(f"got {text!r}, wanted {' or '.join(units)}")
        if unit == "steps" and count != int(count):
            raise ValueError(f"got {text!r}, wanted whole steps")
        if count < least:
            raise ValueError(f"got {text!r}, wanted more than nothing")
        return f"{count:.15g} {unit if count != 1 else unit[:-1]}"

    return BeforeValidator(spell)


def _countable(workers: int | str) -> int | str:
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", str(workers))
    if workers != "auto" and not (found and 1 <= int(found[1]) <= int(found[2] or found[1])):
        raise ValueError(f"got {workers!r}, wanted a number from 1 on, a range as in 2..8, or auto")
    return workers


Recompute = Literal["none", "feedforward", "blocks"]


def _spelled_out(recompute: Any) -> Any:
    """A bool, which is how older runs say it, as a word."""
    return ("blocks" if recompute else "none") if isinstance(recompute, bool) else recompute


class Data(Section):
    """The images, and what happens to them on their way."""

    url: str | None = None
    """A dataset that `vitray shard` wrote: a folder, or s3://."""
    train: str = "train"
    """The split that is trained on."""
    val: str | None = "val"
    """The split that is evaluated; None evaluates nothing."""
    development: Fraction = 0.0
    """Share of train, by a hash of each image's key, that is evaluated in place of val and not trained on: to find
    settings with. The final run, on all of train, leaves it 0."""
    augment: Augment = Augment()
    copies: Size = 1
    """Repeated augmentation: views of an image in one epoch, which then meets the images / copies."""
    mix: Mix = Mix()
    normalise: Normalise = Normalise()
    eval_crop: CentreCrop = CentreCrop()
    max_corrupt: Fraction = 0.001
    """Share of a split's images that may turn out corrupt while streaming before the run stops."""
    cache: Literal["none", "decoded"] = "none"
    """decoded keeps a split's pixels in the object store, decoded once for all epochs and runs on the Ray cluster."""

    @property
    def evaluated(self) -> str | None:
        """The split whose images, or some of them, are evaluated."""
        return self.train if self.development else self.val


class Supervised(Section):
    """Classes, learned from labels."""

    kind: Literal["supervised"] = "supervised"
    loss: Literal["softmax", "bce"] = "softmax"
    """Cross-entropy with soft targets; or binary cross-entropy, where each class of a mixed image is present."""
    smoothing: Fraction = 0.0
    """Share of the target spread evenly over all classes, after mixing (and after bce has made targets 0 and 1)."""


Part = Literal["stem", "class_token", "positions", "norms", "attn", "ffn", "layerscale", "head"]
Mode = Literal["full", "attn", "ffn", "head", "norm"]

# What trains in each mode. Seed 000's code trains the positions with the attention, because a finer grid has new ones.
TRAINED: dict[Mode, tuple[Part, ...]] = {
    "full": get_args(Part),
    "attn": ("attn", "positions", "head"),
    "ffn": ("ffn", "positions", "head"),
    "head": ("head",),
    "norm": ("norms", "head"),
}


class Finetune(Section):
    """Classes, learned from labels by a network that starts from trained weights and may keep some of them."""

    kind: Literal["finetune"] = "finetune"
    weights: str
    """A vitray model folder (a path, s3://, runs:/, models:/name@alias) or a weights file of another library."""
    mode: Mode = "full"
    """What trains: all; attn or ffn (every branch's matrices) with positions and head; the head; norms and head."""
    also: Annotated[tuple[Part, ...], Field(strict=False)] = ()
    """Parts that train besides."""
    delta: bool = True
    """Whether the model folder holds only what differs from the weights; mode full changes all, so it is whole."""
    first_branch: bool = False
    """Whether of parallel attentions only the first trains, as by seed 000's code, which goes by the name `attn`."""
    loss: Literal["softmax", "bce"] = "softmax"
    """As the supervised task's."""
    smoothing: Fraction = 0.0
    """As the supervised task's."""

    @model_validator(mode="after")
    def _parts_differ(self) -> Self:
        trained = TRAINED[self.mode]
        if twice := [part for part in self.also if part in trained]:
            rest = [part for part in get_args(Part) if part not in trained]
            raise ValueError(
                f"also names {', '.join(twice)}, which mode {self.mode} trains anyway;"
                f" wanted {' or '.join(rest) if rest else 'nothing'}"
            )
        if self.first_branch and self.mode != "attn":
            raise ValueError(f"first_branch true is about mode attn alone; wanted false in mode {self.mode}")
        return self

    @property
    def trained(self) -> frozenset[Part]:
        """The parts that train, whether the network has them or not."""
        return frozenset((*TRAINED[self.mode], *self.also))


class AdamW(Section):
    """Adam with decoupled weight decay."""

    kind: Literal["adamw"] = "adamw"
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)
    eps: Positive = 1e-8


class Sgd(Section):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.9
    nesterov: bool = False


class Lamb(Section):
    """Adam whose step is as long as the weights: LAMB, as A2 and DeiT III train."""

    kind: Literal["lamb"] = "lamb"
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)
    eps: Positive = 1e-6


class Cosine(Section):
    """Half a cosine, from lr down to the floor."""

    kind: Literal["cosine"] = "cosine"
    floor: NotNegative = 0.0
    """The learning rate at the end."""
    during_warmup: bool = False
    """Whether the cosine is read from the first step on, as timm's is, or begins where the warm-up ends."""


class Linear(Section):
    """A line, from lr down to the floor."""

    kind: Literal["linear"] = "linear"
    floor: NotNegative = 0.0
    """The learning rate at the end."""


class Constant(Section):
    """lr to the end."""

    kind: Literal["constant"] = "constant"


class Ema(Section):
    """An exponential moving average of the weights, evaluated and saved beside them."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    """Share of the old average that a step keeps."""
    warmup: bool = True
    """While the run is young the average forgets faster: (1 + steps) / (10 + steps) where that is less than decay."""


class Optim(Section):
    """How the weights descend."""

    batch: Size = 1024
    """Images of one step over all workers."""
    duration: Annotated[str, _spelled("epochs", "steps")] = "90 epochs"
    """In epochs or in steps."""
    lr: Positive = 1e-3
    """The highest learning rate."""
    rule: Annotated[AdamW | Sgd | Lamb, Field(discriminator="kind"), one_of("adamw")] = AdamW()
    weight_decay: NotNegative = 0.1
    """Of matrices and kernels alone: norms, biases, LayerScale, tokens and positions never decay. Multiplied by lr."""
    schedule: Annotated[Cosine | Linear | Constant, Field(discriminator="kind"), one_of("cosine")] = Cosine()
    warmup: Annotated[str, _spelled("epochs", "steps", least=0)] = "5 epochs"
    """In epochs or in steps."""
    warmup_from: NotNegative = 0.0
    """The learning rate that the warm-up starts at."""
    clip: Positive | None = 1.0
    """Longest gradient, by the norm over all parameters; None lets it be."""
    layer_decay: Share = 1.0
    """Each level below the head learns slower by this factor; 1 is all alike. 18x2 has 18 levels."""
    ema: Ema | None = None


class Compute(Section):
    """Where it runs; nothing here changes the images, the global batch or the learning rate."""

    workers: Annotated[int | str, AfterValidator(_countable)] = "auto"
    """Devices that train together: a number, a range as in 2..8 (elastic), or auto: every GPU, or one CPU worker."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto is a GPU where the cluster has one."""
    cpus: Positive | None = None
    """CPUs that a worker reserves; None leaves at least one CPU free for decoding images."""
    gpus: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a GPU that a worker reserves: with 0.25, four trials of a sweep share one. It limits no memory."""
    local_batch: Size | None = None
    """Most images on a device at once; a larger share of the global batch is accumulated over several passes."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 is autocast: weights stay fp32."""
    tf32: bool = True
    """Whether fp32 products on a GPU may use TF32."""
    compile: bool = False
    """Through torch.compile."""
    recompute: Annotated[Recompute, BeforeValidator(_spelled_out)] = "none"
    """Activation checkpointing: what runs again in the backward pass instead of keeping what it computed. feedforward
    gives up the widest activations for one product a block; blocks (or true) gives up all but a block's input."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Times that lost workers are started anew, from the last checkpoint."""

    @model_validator(mode="after")
    def _no_two_share_a_gpu(self) -> Self:
        if self.gpus < 1 and self.device == "cpu":
            raise ValueError(f"gpus {self.gpus:g} is about GPUs; device is cpu")
        if self.gpus < 1 and self.worker_range != (1, 1):
            raise ValueError(
                f"gpus {self.gpus:g} needs workers: 1, got {self.workers}: NCCL refuses two workers of a run on one GPU"
            )
        return self

    @property
    def worker_range(self) -> tuple[int, int] | None:
        """Fewest and most workers; None leaves it to what is found."""
        if self.workers == "auto":
            return None
        lowest, _, highest = str(self.workers).partition("..")
        return int(lowest), int(highest or lowest)


class Evaluate(Section):
    """When every image of the val split is counted, once."""

    every: Annotated[str, _spelled("epochs", "steps")] = "1 epoch"
    """In epochs or in steps; the end is always evaluated."""
    batch: Size | None = None
    """Images of one step over all workers; None is that of training."""
    where: Literal["workers", "cpu", "gpu"] = "workers"
    """workers stop training for it; cpu or gpu is one device more, beside them, whose scores come some steps later."""


class Checkpoint(Section):
    """When the state is saved, and how much of it is kept."""

    every: Annotated[str, _spelled("epochs", "steps", "minutes")] = "1 epoch"
    """In epochs, steps or minutes; the end is always saved."""
    keep: Size = 2
    """Latest checkpoints that stay; the one with the best val/top1 stays besides."""


class Guard(Section):
    """What happens when the loss is not finite, or leaps."""

    on_nan: Literal["stop", "rewind"] = "stop"
    """rewind goes back to the last checkpoint and leaves the step out that broke it."""
    max_rewinds: Size = 3
    """After so many the run stops all the same."""
    spike: Annotated[float, Field(gt=1)] | None = None
    """A loss this many times the median of the last 100 counts as broken; None lets it leap."""


class Tracking(Section):
    """What MLflow gets."""

    experiment: str = "vitray"
    """The experiment that the run belongs to."""
    every: Annotated[str, _spelled("epochs", "steps")] = "50 steps"
    """How often numbers are recorded, in epochs or in steps."""
    register_as: str | None = None
    """Name of a registered model that gets this run's network as its next version."""
