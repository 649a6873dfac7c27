"""Settings of the tasks with labels: their losses, distillation, the modes of fine-tuning."""

from typing import Annotated, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from vitray.config.model import Model
from vitray.config.sections import Fraction, NameOf, NotNegative, Positive, Section, Size, TaskTraits, Text
from vitray.config.training import Balance, Data

# ---- losses ----------------------------------------------------------------------------------------------------------

Probability = Literal["softmax", "sigmoid"]
"""Softmax over the classes, or a sigmoid for each class."""


class LossTraits(NamedTuple):
    """What settings and predictions know of a loss; `LOSSES` of `vitray/tasks/supervised.py` computes it."""

    about: str
    """Its definition, for the page of all settings."""
    probability: Probability
    """How logits that it has trained become probabilities."""


LOSS_TRAITS = {
    "softmax": LossTraits("cross-entropy with soft targets", "softmax"),
    "bce": LossTraits("binary cross-entropy, with each class of a mixed image a target", "sigmoid"),
    "asymmetric": LossTraits(
        "binary cross-entropy that counts clearly absent classes less (task.asymmetric)", "sigmoid"
    ),
}


LOSS = f"{'; '.join(f'{name}: {traits.about}' for name, traits in LOSS_TRAITS.items())}."
Loss = Annotated[str, NameOf(lambda: list(LOSS_TRAITS)), Field(description=LOSS)]
Smoothing = Annotated[Fraction, Field(description="Label smoothing, applied after mixing.")]


Labels = Annotated[
    Literal["one", "several"],
    Field(description="Labels of an image: one class, or any number of them; as the dataset has."),
]


class Asymmetric(Section):
    """The asymmetric loss (Ridnik et al., 2021): -(1 - p)^focus_present log p of a present class, and -q^focus_absent
    log(1 - q) of an absent one, with q = max(0, p - shift)."""

    focus_present: NotNegative = 0.0
    """The exponent of present classes."""
    focus_absent: NotNegative = 4.0
    """The exponent of absent classes."""
    shift: Fraction = 0.05
    """What is taken from the probability of an absent class: one below it does not count."""


ClassWeights = Annotated[
    Balance | Annotated[tuple[Positive, ...], Field(strict=False)],
    Field(
        description="Weights of the classes in the loss. square_root, equal: in proportion to 1 / root of the images of"
        " a class, or to 1 / its images, with the mean 1 over the images of train; of several labels, a present class"
        " has the root of absent / present images, or absent / present. Or weights by class, 1 where none is given. The"
        " run records the numbers of all classes.",
    ),
]
Thresholds = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)], ...] | None,
    Field(
        strict=False,
        description="Of several labels: the least probability of each class that counts as present. The end of training"
        " writes those of the highest F1 on the evaluated images into the model folder; null: 0.5.",
    ),
]
Asymmetry = Annotated[Asymmetric | None, Field(description="Settings of task.loss asymmetric; null: their defaults.")]


# ---- distillation ----------------------------------------------------------------------------------------------------


class Distillation(Section):
    """Distillation from a teacher. The distillation token's head learns the teacher's outputs; without that token, the
    only head does."""

    teacher: Text
    """The teacher: a model folder (a path, s3://, zoo/NAME, runs:/, models:/name@alias) or another library's file."""
    target: Literal["hard", "soft"] = "hard"
    """hard: the cross-entropy with the teacher's most probable class; soft: temperature^2 times the Kullback-Leibler
    divergence from the teacher's probabilities, averaged over images. DeiT's code also divides it by the number of
    classes."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the teacher's term in the loss; the labels' term has 1 - weight."""
    temperature: Positive = 1.0
    """Divides the logits of both networks before the softmax. Only for target soft; the DeiT paper: 3, with weight
    0.1."""

    @model_validator(mode="after")
    def _temperature_acts(self) -> Self:
        if self.target == "hard" and self.temperature != 1:
            raise ValueError(f"temperature: got {self.temperature:g} with target hard, expected 1, or target soft")
        return self


Distill = Annotated[Distillation | None, Field(description="Distillation from a teacher (DeiT); null: none.")]


class Cosub(Section):
    """Co-training of two submodels, each a draw of drop path. An image passes through both, and each learns the
    labels and the other's answers."""

    weight: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the other submodel's term in the loss; the labels' term has 1 - weight. Its targets are the other's
    detached probabilities: a softmax with task.loss softmax, a sigmoid for each class with bce."""


CoTraining = Annotated[
    Cosub | None, Field(description="Co-training of two submodels (cosub); needs model.drop_path; null: none.")
]


# ---- fine-tuning modes -----------------------------------------------------------------------------------------------

Part = Literal[
    "stem", "class_token", "distillation_token", "registers", "positions", "norms", "attn", "ffn", "layerscale",
    "adapters", "lora", "head",
    "body", "stage1", "stage2", "stage3", "stage4",
]  # fmt: skip
"""Of a network of torchvision: norms, head, numbered stages where it has them, and body, which is the rest."""
Mode = Literal["full", "attn", "attn_norm", "ffn", "last", "norm", "bias", "lora", "adapter", "head"]

# The code of "Three things" trains the positions with the attention, because a finer grid has new ones.
TRAINED: dict[Mode, tuple[Part, ...]] = {
    "full": get_args(Part),
    "attn": ("attn", "positions", "head"),
    "attn_norm": ("attn", "norms", "positions", "head"),
    "ffn": ("ffn", "positions", "head"),
    "last": ("head",),  # and levels
    "norm": ("norms", "head"),
    "bias": ("head",),  # and vectors of other parts
    "lora": ("lora", "head"),
    "adapter": ("adapters", "head"),
    "head": ("head",),
}
Matrix = Literal["q", "k", "v", "out", "up", "down"]


class Lora(Section):
    """LoRA (Hu et al., 2021): W + alpha / rank * B A in place of a frozen matrix W. A and B are trained; B starts from
    zeros, so that training starts from the network as it is."""

    rank: Size = 8
    """Columns of B and rows of A; at most the width of the network."""
    alpha: Positive = 16.0
    """Scale: the product B A is multiplied by alpha / rank."""
    matrices: Annotated[tuple[Matrix, ...], Field(strict=False, min_length=1)] = ("q", "v")
    """Matrices that get a product, in every branch of every level. q, k, v, out: queries, keys, values and output of
    attention; up, down: the two of the feed-forward."""

    @model_validator(mode="after")
    def _matrices_differ(self) -> Self:
        if repeated := sorted({name for name in self.matrices if self.matrices.count(name) > 1}):
            raise ValueError(f"matrices: got {', '.join(repeated)} more than once, expected each matrix once")
        return self

    @property
    def changed(self) -> list[str]:
        """The settings that differ from their defaults."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]


# ---- tasks -----------------------------------------------------------------------------------------------------------


class Supervised(Section):
    """Classification, trained from random weights."""

    traits: ClassVar = TaskTraits(needs=("labels",))
    kind: Literal["supervised"] = "supervised"
    labels: Labels = "one"
    loss: Loss = "softmax"
    asymmetric: Asymmetry = None
    thresholds: Thresholds = None
    class_weights: ClassWeights = "none"
    smoothing: Smoothing = 0.0
    distill: Distill = None
    cosub: CoTraining = None

    def check(self, model: Model, data: Data) -> None:
        """Raise if the model or the data settings do not fit the task."""
        del model, data
        check_labels(self)

    def describe(self) -> str:
        """Return the loss in words."""
        return describe_classification(self)


def check_labels(task: "Supervised | Finetune") -> None:
    """Raise if settings do not fit the loss, or several labels an image."""
    if task.loss != "asymmetric" and task.asymmetric is not None:
        raise ValueError(f"task.asymmetric does not apply to task.loss {task.loss}")
    if task.labels == "one":
        if task.thresholds is not None:
            raise ValueError("task.thresholds does not apply to one label an image, which is the most probable class")
        return
    if task.distill is not None:
        raise ValueError(
            "task.distill does not apply to several labels an image: a teacher's classes exclude each other"
        )


def describe_classification(task: "Supervised | Finetune") -> str:
    """Return the loss of a task with labels in words."""
    taught = task.distill and f", {task.distill.weight:.0%} {task.distill.target} distillation"
    cotrained = task.cosub and f", {task.cosub.weight:.0%} co-training of two submodels"
    return f"{task.loss}, smoothing {task.smoothing:g}{taught or cotrained or ''}"


class Finetune(Section):
    """Classification, trained from given weights, some of which may stay frozen."""

    traits: ClassVar = TaskTraits(needs=("labels",))
    kind: Literal["finetune"] = "finetune"
    weights: Text
    """A vitray model folder (a path, s3://, zoo/NAME, runs:/, models:/name@alias) or another library's weights file."""
    mode: Mode = "full"
    """The parts to train, besides the head. full: all; attn, ffn: attention or feed-forwards of every branch, and
    positions; attn_norm: attn and norms; last: the last `levels` and the last norm; norm: norms; bias: all biases but
    those of a stem with batch norms (BitFit); lora: the products of `lora`; adapter: the adapters of model.adapters;
    head: nothing else."""
    lora: Lora = Lora()
    """The products of mode lora. A delta holds their factors, which loading merges into the matrices; a complete model
    folder holds merged matrices."""
    levels: Size = 1
    """In mode last, the number of levels to train."""
    also_train: Annotated[tuple[Part, ...], Field(strict=False)] = ()
    """Further parts to train."""
    save_delta: bool = True
    """Saves only the tensors that differ from the weights. Mode full changes all, so its model folder is complete."""
    first_branch: bool = False
    """In mode attn, trains only the first of parallel attentions, as the code of "Three things" does."""
    labels: Labels = "one"
    loss: Loss = "softmax"
    asymmetric: Asymmetry = None
    thresholds: Thresholds = None
    class_weights: ClassWeights = "none"
    smoothing: Smoothing = 0.0
    distill: Distill = None
    cosub: CoTraining = None

    @model_validator(mode="after")
    def _parts_differ(self) -> Self:
        trained = TRAINED[self.mode]
        if repeated := [part for part in self.also_train if part in trained]:
            rest = [part for part in get_args(Part) if part not in trained]
            raise ValueError(
                f"also_train names {', '.join(repeated)}, which mode {self.mode} trains anyway;"
                f" expected {' or '.join(rest) if rest else 'nothing'}"
            )
        for mode, text, is_default, wanted in (
            ("attn", "first_branch true", not self.first_branch, "false"),
            ("last", f"levels {self.levels}", self.levels == 1, "1"),
            ("lora", " and ".join(f"lora.{name}" for name in self.lora.changed), not self.lora.changed, "the defaults"),
        ):
            if self.mode != mode and not is_default:
                raise ValueError(f"{text} is about mode {mode} alone; expected {wanted} in mode {self.mode}")
        return self

    def check(self, model: Model, data: Data) -> None:
        """Raise if the model or the data settings do not fit the task."""
        del data
        check_labels(self)
        if self.mode not in (modes := ("full", "head", "norm")):
            model.require_vit(f"task.mode: {self.mode} (not {', '.join(modes)})")

    def describe(self) -> str:
        """Return the loss in words."""
        return describe_classification(self)

    @property
    def trained(self) -> frozenset[Part]:
        """The parts to train; the network need not have all of them."""
        return frozenset((*TRAINED[self.mode], *self.also_train))
