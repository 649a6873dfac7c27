"""Settings of a training run: data, optimizer, devices, checkpoints, guard and tracking."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vitray.config.augmentation import Augment, CenterCrop, Mix, Normalize, PositiveFraction
from vitray.config.parsing import short
from vitray.config.sections import (
    MOST_NUMBER,
    Fraction,
    NotNegative,
    Positive,
    Section,
    Side,
    Size,
    Text,
    duration_in,
    one_of,
    parse_duration,
)
from vitray.config.views import Views


def _check_workers(workers: int | str) -> int | str:
    match = re.fullmatch(r"([0-9]{1,6})(?:\.\.([0-9]{1,6}))?", str(workers))
    if workers != "auto" and not (match and 1 <= int(match[1]) <= int(match[2] or match[1])):
        raise ValueError(f"got {short(workers)}, expected a number from 1 to 999,999, a range as in 2..8, or auto")
    return workers


Balance = Literal["none", "square_root", "equal"] | dict[Text, Annotated[float, Field(gt=0, le=MOST_NUMBER)]]
Recompute = Literal["none", "feedforward", "blocks"]


class Early(Section):
    """Smaller images in the first steps, which take less time (Touvron et al., 2019; progressive resizing)."""

    size: Side | None = None
    """Side in pixels, or [height, width]; multiples of the patch size, smaller than the network's; null: three quarters
    of the network's."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the run's steps."""


class Fold(Section):
    """Folds of equal sizes with equal shares of each class, one of which is held out. They are a function of the set of
    images."""

    of: Annotated[int, Field(ge=2, le=1000)] = 5
    """Number of folds."""
    index: Annotated[int, Field(ge=0, lt=1000)] = 0
    """The fold that is held out, counted from 0."""
    group: Text | None = None
    """Column of the dataset whose equal values stay in one fold, such as a patient; null: each image by itself."""

    @model_validator(mode="after")
    def _one_is_held_out(self) -> Self:
        if self.index >= self.of:
            raise ValueError(f"index: got {self.index}, expected at most {self.of - 1}, the last of {self.of} folds")
        return self


class Data(Section):
    """The dataset, its augmentation and its normalization."""

    url: Text | None = None
    """A dataset written by `vitray shard`: a folder or s3://."""
    train: Text = "train"
    """The training split."""
    val: Text | None = "val"
    """The evaluation split; null: no evaluation."""
    holdout: Fraction = 0.0
    """Fraction of train to hold out and evaluate in place of val, chosen by a hash of each image's key. Use it to tune
    settings; leave it 0 in the final run."""
    fold: Fold | None = None
    """One of several folds of train to hold out and evaluate in place of val; null: none."""
    augment: Augment = Augment()
    views: Views | None = None
    """Several views of each image in a step, for tasks that compare them; null: those of the task."""
    early: Early | None = None
    """Smaller images at the start of the run: the views, shrunk on the device; null: one size."""
    balance: Balance = "none"
    """How often an epoch shows the images of each class, of a training that learns classes. none: each once;
    square_root, equal: an image in proportion to 1 / root of its class's images, or to 1 / its class's images; or
    relative weights of an image by class, 1 where none is given. Of several labels, the largest weight counts. An epoch
    keeps its number of images."""
    repeats: Size = 1
    """Repeated augmentation: views of each image in an epoch. An epoch keeps its length, and covers 1 / repeats of the
    images."""
    mix: Mix = Mix()
    normalize: Normalize = Normalize()
    eval_crop: CenterCrop = CenterCrop()
    max_corrupt: Fraction = 0.001
    """Fraction of a split's images that may be corrupt before the run stops."""
    cache: Literal["none", "decoded"] = "none"
    """decoded: keep decoded pixels for all epochs: in Ray's object store until the cluster ends, for all runs; with
    --here in the processes that decode."""

    @model_validator(mode="after")
    def _cache_has_all_pixels(self) -> Self:
        if self.cache == "decoded" and self.augment.decode == "scaled":
            raise ValueError("cache=decoded keeps all pixels of an image, expected augment.decode=full")
        return self

    @property
    def chosen_views(self) -> Views:
        """The views of a task that compares them."""
        return self.views or Views()

    @model_validator(mode="after")
    def _holds_out_once(self) -> Self:
        if self.holdout and self.fold is not None:
            raise ValueError(f"holdout: got {self.holdout:g} with a fold, expected 0: the fold is held out")
        return self

    @property
    def evaluated(self) -> str | None:
        """The split that holds the evaluated images; None without evaluation."""
        return self.train if self.held_out else self.val

    @property
    def held_out(self) -> str | None:
        """The part of train that is evaluated and not trained on, as in `10%`; None where all is trained on."""
        if self.fold is None:
            return f"{self.holdout:.0%}" if self.holdout else None
        return f"fold {self.fold.index} of {self.fold.of}" + (f" by {self.fold.group}" if self.fold.group else "")


Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False, description="Decay rates of the two moments.")]
Epsilon = Annotated[Positive, Field(description="Added to the denominator.")]
Floor = Annotated[NotNegative, Field(description="Final learning rate.")]


class AdamW(Section):
    """Adam with decoupled weight decay."""

    kind: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8


class Sgd(Section):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.9
    """Decay rate of the momentum."""
    nesterov: bool = False
    """Uses Nesterov momentum."""


class Lamb(Section):
    """LAMB: Adam that scales the step of each decaying tensor to lr times the norm of its weights (A2, DeiT III)."""

    kind: Literal["lamb"] = "lamb"
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-6


class Muon(Section):
    """Muon for the matrices of the blocks: a step turns them by their momentum, made orthogonal; queries, keys and
    values are three matrices. AdamW for all other parameters (Jordan et al., 2024)."""

    kind: Literal["muon"] = "muon"
    matrix_lr: Positive = 10.0
    """Learning rate of the matrices, as a multiple of lr. A step changes a matrix of r rows and c columns by the length
    of that rate times the root of max(1, r / c), in every direction alike."""
    momentum: Fraction = 0.95
    """Decay rate of the matrices' momentum; a step looks ahead as Nesterov's."""
    iterations: Annotated[int, Field(ge=1, le=100)] = 5
    """Newton-Schulz iterations, which make the momentum nearly orthogonal: after 5, its singular values are 0.7 to
    1.2."""
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8


class Cosine(Section):
    """Half a cosine, from lr to floor."""

    kind: Literal["cosine"] = "cosine"
    floor: Floor = 0.0
    during_warmup: bool = False
    """Starts the cosine at the first step, as timm does, rather than after the warm-up."""


class Linear(Section):
    """A straight line, from lr to floor."""

    kind: Literal["linear"] = "linear"
    floor: Floor = 0.0


class Constant(Section):
    """lr to the end."""

    kind: Literal["constant"] = "constant"


class Ema(Section):
    """Exponential moving average of the weights, evaluated and saved as well."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    """Weight of the previous average in a step."""
    warmup: bool = True
    """Early in training, uses (1 + steps) / (10 + steps) where that is less than decay."""


class Optim(Section):
    """Optimizer, learning-rate schedule and duration."""

    batch: Size = 1024
    """Global batch size: images per step over all workers."""
    duration: Annotated[str, duration_in("epochs", "steps")] = "90 epochs"
    """Length of the training, in epochs or steps."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    rule: Annotated[AdamW | Sgd | Lamb | Muon, Field(discriminator="kind"), one_of("adamw")] = AdamW()
    """The optimizer."""
    weight_decay: NotNegative = 0.1
    """AdamW and Muon: decoupled, multiplied by the learning rate. Sgd: added to the gradient. Lamb: added before the
    trust ratio. Matrices and kernels only."""
    weight_decay_end: Positive | None = None
    """Weight decay at the end, reached by half a cosine (DINO: from 0.04 to 0.4); null: it stays the same."""
    schedule: Annotated[Cosine | Linear | Constant, Field(discriminator="kind"), one_of("cosine")] = Cosine()
    """Learning-rate schedule after the warm-up."""
    warmup: Annotated[str, duration_in("epochs", "steps", least=0)] = "5 epochs"
    """Length of the linear warm-up, in epochs or steps."""
    warmup_from: NotNegative = 0.0
    """Learning rate at the start of the warm-up."""
    clip: Positive | None = 1.0
    """Maximum norm of the gradient over all parameters; null: no clipping."""
    layer_decay: PositiveFraction = 1.0
    """Factor of the learning rate per level below the head; 1: none. 18x2 has 18 levels."""
    ema: Ema | None = None
    """Average of the weights; null: none."""

    @model_validator(mode="after")
    def _weights_decay(self) -> Self:
        if self.weight_decay_end is not None and not self.weight_decay:
            raise ValueError(
                f"weight_decay_end: got {self.weight_decay_end:g} with weight_decay 0, expected a start above 0"
            )
        return self


class Compute(Section):
    """Devices, memory and precision. The images, the global batch and the learning rate do not depend on them."""

    workers: Annotated[int | str, AfterValidator(_check_workers)] = "auto"
    """Number of training workers, an elastic range such as 2..8, or auto: one per GPU, or one CPU worker."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: a GPU if the cluster has one."""
    # Ray counts CPUs and GPUs in ten thousandths.
    cpus: Annotated[float, Field(ge=0.0001, le=10_000)] | None = None
    """CPUs reserved per worker; without a GPU also its threads, rounded down, at least one. null: reservations leave at
    least one CPU free for decoding, and the threads of a node's workers share all of its CPUs."""
    gpus: Annotated[float, Field(ge=0.0001, le=1)] = 1.0
    """Fraction of a GPU reserved per worker: with 0.25, four trials of a sweep share one. Memory is not limited."""
    local_batch: Size | Literal["auto"] | None = None
    """Maximum images per forward pass on a device. A larger share of the batch uses gradient accumulation; every worker
    takes as many passes as the largest share needs. auto: the most that fit the memory of every worker's GPU, found by
    trying at each start."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: autocast, with fp32 weights. auto: bf16 on a GPU that computes in it, else fp32; the trained network's
    settings have which."""
    tf32: bool = True
    """Allows TF32 in fp32 matrix products on a GPU, in training and of the trained network."""
    compile: Annotated[
        Literal[False, "auto", "default", "reduce-overhead", "max-autotune"],
        BeforeValidator(lambda mode: "default" if mode is True else mode),
    ] = False
    """Mode of torch.compile, for training and evaluation; true: default; auto: default on a GPU, and none on CPUs.
    reduce-overhead runs the steps of training as CUDA graphs; max-autotune also times several kernels for each product,
    which takes minutes at the start."""
    channels_last: bool = False
    """Stores convolution kernels in channels_last, the layout of the images, so that no pass of a stem converts it."""
    activation_checkpointing: Annotated[
        Recompute, BeforeValidator(lambda value: ("none", "blocks")[value] if isinstance(value, bool) else value)
    ] = "none"
    """Activation checkpointing. feedforward: recompute the widest activations, at one matrix product per block;
    blocks (or true): keep only the input of each block."""
    max_failures: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Restarts of lost workers from the last checkpoint before the run fails."""

    @model_validator(mode="after")
    def _no_two_share_a_gpu(self) -> Self:
        if self.gpus < 1 and self.device == "cpu":
            raise ValueError(f"gpus: got {self.gpus:g} with device cpu, expected 1 (the default), or device gpu")
        if self.gpus < 1 and self.local_batch == "auto":
            raise ValueError(
                f"local_batch: got auto with gpus {self.gpus:g}, expected a number: others take memory of the same GPU"
            )
        if self.gpus < 1 and self.worker_range != (1, 1):
            raise ValueError(
                f"gpus {self.gpus:g} needs workers: 1, got {self.workers}: NCCL refuses two workers of a run on one GPU"
            )
        return self

    @property
    def has_graphs(self) -> bool:
        """Whether the steps on a GPU are CUDA graphs, whose results the next run of a graph overwrites."""
        return self.compile in ("reduce-overhead", "max-autotune")

    def compile_on(self, device: str, graphs: bool = True) -> str | None:
        """Return the mode of torch.compile on a kind of device, such as cuda; None: compile nothing.

        Without `graphs`, one that is as near and has no CUDA graphs, which overwrite the results of a batch.
        """
        mode = ("default" if device == "cuda" else None) if self.compile == "auto" else self.compile or None
        if mode is None or graphs:
            return mode
        return {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(mode, mode)

    @property
    def worker_range(self) -> tuple[int, int] | None:
        """Minimum and maximum of workers; None for auto."""
        if self.workers == "auto":
            return None
        lowest, _, highest = str(self.workers).partition("..")
        return int(lowest), int(highest or lowest)


class Checkpointing(Section):
    """Checkpoint interval and retention."""

    every: Annotated[str, duration_in("epochs", "steps", "minutes")] = "10 minutes"
    """Interval, in epochs, steps or minutes; in minutes, evaluated steps are saved, too. The last step is always
    saved."""
    keep: Size = 2
    """Number of latest checkpoints to keep, besides the best one."""

    @property
    def is_timed(self) -> bool:
        """Whether the interval is one of the clock."""
        return parse_duration(self.every)[1] == "minutes"


class Guard(Section):
    """Reaction to a loss or gradient that is not finite, to a loss spike, and to collapsed features."""

    on_nan: Literal["stop", "rewind"] = "stop"
    """rewind: return to the last checkpoint and skip the step."""
    max_rewinds: Size = 3
    """Rewinds before the run stops."""
    spike: Annotated[float, Field(gt=1, le=MOST_NUMBER)] | None = None
    """Treats a loss above this multiple of the median of the last 100 as not finite; null: off."""
    knn_drop: Annotated[float, Field(gt=0, lt=1)] | None = 0.2
    """Training without labels, with probe knn: the features have collapsed if kNN accuracy, at the upper end of its
    interval, is below the best so far by more than this fraction of the best; null: off."""
    min_rank: Annotated[float, Field(gt=1, le=MOST_NUMBER)] | None = 2.0
    """Training without labels, with probe rank: the features have collapsed if RankMe is below this; null: off."""
    min_prototypes: Size | None = 4
    """Self-distillation: the features have collapsed if all evaluated images share fewer prototypes; null: off."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """stop: save a checkpoint and end the run."""


def check_alias(alias: str) -> str:
    """Return an alias that MLflow's registry accepts; refuse any other."""
    is_reserved = alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias)
    if is_reserved or not re.fullmatch(r"[\w-]{1,255}", alias, re.ASCII):
        raise ValueError(f"got {short(alias)}, expected letters, digits, - and _, and neither `latest` nor `v1`")
    return alias


class Promote(Section):
    """Moves an alias to the registered version, if it is better than the alias's version on the images of data.val."""

    alias: Annotated[str, AfterValidator(check_alias)] = "champion"
    """The alias in MLflow's model registry."""
    when: Literal["better", "significantly_better"] = "significantly_better"
    """better: a higher top-1, or mAP of several labels an image; significantly_better: and a significant difference."""


class Tracking(Section):
    """MLflow."""

    experiment: Text = "vitray"
    """The run's experiment."""
    every: Annotated[str, duration_in("epochs", "steps")] | None = None
    """Logging interval, in epochs or steps; null: 50 steps, or a twentieth of a shorter run."""
    register_as: Text | None = None
    """Name of the registered model of which this run's network becomes the next version; null: none."""
    promote: Promote | None = None
    """Rule that moves an alias to this version; null: `champion` moves if the top-1 or mAP at the end of training is
    higher than its own on the same images and classes, without a significance test."""

    @model_validator(mode="after")
    def _promotes_a_version(self) -> Self:
        if self.promote and self.register_as is None:
            raise ValueError("promote compares registered versions, and register_as is null; expected a name")
        return self
