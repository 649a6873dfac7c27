"""Settings of the tasks that compare several views of an image, without labels."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from vitray.config.augmentation import Ascending, Augment, Chance
from vitray.config.classification import TRAINED, Lora, Part
from vitray.config.model import Model
from vitray.config.pretraining import Ratio, check_label_free
from vitray.config.sections import (
    MOST_PARAMETERS,
    Fraction,
    NotNegative,
    Positive,
    Section,
    Size,
    TaskTraits,
    Text,
    duration_in,
)
from vitray.config.training import Data

# Modes of fine-tuning that need no head; `Finetune` explains them.
ContinuedMode = Literal["full", "attn", "attn_norm", "ffn", "norm", "bias", "lora"]
Start = Annotated[
    Text | None,
    Field(description="Weights to continue from, as task finetune takes them, without their head; null: new ones."),
]
Continued = Annotated[
    ContinuedMode, Field(description="The parts of the network that are trained on, by the modes of task finetune.")
]
Rank = Annotated[Lora, Field(description="The products of mode lora.")]
HeadFirst = Annotated[
    Annotated[str, duration_in("epochs", "steps", least=0)] | None,
    Field(description="How long the new head learns alone, in epochs or steps; null: 1 epoch with weights, else none."),
]
MOST_SLICES = 2**16
# Of the teacher in the first step: a softer one would teach the noise of new weights.
TEACHER_TEMPERATURE = 0.04
# Beyond these, settings are suspected when features have collapsed: the lowest momentum of the teacher, the highest of
# the center, and the share of the largest entropy that assignments may have.
LEAST_MOMENTUM, MOST_CENTER_MOMENTUM, NEARLY_UNIFORM = 0.9, 0.99, 0.98


def check_views(kind: str, model: Model, data: Data) -> None:
    """Raise if the model or the data settings do not fit a task that compares views."""
    check_label_free(kind, model, data)
    for name in ("crop", "flip", "policy", "jitter"):
        if getattr(data.augment, name) != Augment.model_fields[name].default:
            raise ValueError(
                f"data.augment.{name} does not apply to task {kind}: set data.views.global and data.views.local,"
                " where each kind of view has its own"
            )
    if data.repeats > 1:
        raise ValueError(f"data.repeats: got {data.repeats}, expected 1: task {kind} has data.views in its place")
    data.chosen_views.check(model)
    views = data.chosen_views
    has_one_grid = views.small is None and views.large_size(model.image_shape) == model.image_shape
    if model.positions.kind == "relative" and not has_one_grid:
        raise ValueError(
            "model.positions relative are those of one grid, and some views have another one; expected other positions,"
            " or data.views.local null and data.views.global.size null"
        )


def check_several(data: Data, reason: str) -> None:
    """Raise if an image has one view alone."""
    if data.chosen_views.large.count == 1 and data.chosen_views.small is None:
        raise ValueError(f"data.views: got one view, expected at least two: {reason}")


def check_start(task: "Lejepa | SelfDistillation") -> None:
    """Raise if settings of a start from given weights do not fit each other."""
    if task.weights is None and task.mode != "full":
        raise ValueError(f"task.mode: got {task.mode} without task.weights, expected full: all weights are new")
    if task.weights is None and task.head_first is not None:
        raise ValueError("task.head_first: got a length without task.weights, expected null: all weights are new")
    if task.mode != "lora" and task.lora.changed:
        raise ValueError(f"task.lora.{task.lora.changed[0]} is about mode lora alone; got mode {task.mode}")


def length_alone(task: "Lejepa | SelfDistillation") -> str:
    """Return how long the head of a task learns alone."""
    return task.head_first or ("1 epoch" if task.weights else "0 steps")


class Lejepa(Section):
    """LeJEPA (Balestriero and LeCun, 2025): each view predicts the mean of the image's global views, and along random
    directions all projections together are normally distributed. No teacher."""

    traits: ClassVar = TaskTraits(needs=("views",), may_collapse=True, joint=True, by_data=True)
    kind: Literal["lejepa"] = "lejepa"
    weight: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Weight of the statistic of normality; the prediction has 1 - weight."""
    slices: Annotated[int, Field(ge=1, le=MOST_SLICES)] = 1024
    """Random directions, drawn anew in each step."""
    projection: Size = 128
    """Numbers to which a view is projected."""
    hidden: Size | None = None
    """Width of the two hidden layers of the projection; null: four times the width of the network, at most 2048."""
    weights: Start = None
    mode: Continued = "full"
    lora: Rank = Lora()
    head_first: HeadFirst = None

    def check(self, model: Model, data: Data) -> None:
        """Raise if the model or the data settings do not fit the task."""
        check_views(self.kind, model, data)
        check_start(self)
        check_several(data, "task lejepa predicts each from the others")
        width = model.shape.size
        parameters = self.hidden_width(width) * (width + self.hidden_width(width) + self.projection)
        if parameters > MOST_PARAMETERS:
            raise ValueError(f"task.hidden: got {parameters:.2g} parameters, expected at most {MOST_PARAMETERS:.2g}")

    def hidden_width(self, width: int) -> int:
        """Return the width of the hidden layers for a network of a width."""
        return self.hidden or min(4 * width, 2048)

    @property
    def trained(self) -> frozenset[Part]:
        """The parts of the network to train; it need not have all of them."""
        return frozenset(TRAINED[self.mode])

    def describe(self) -> str:
        """Return the loss in words."""
        return f"LeJEPA, {self.weight:.0%} normality along {self.slices} directions"


class PatchMask(Section):
    """Rectangles of patches of some global views, as in BeiT, of which each view has a number of its own."""

    chance: Chance = 0.5
    """Probability that a view is masked."""
    ratio: Annotated[tuple[Ratio, Ratio], Field(strict=False), Ascending] = (0.1, 0.5)
    """Smallest and largest fraction of the patches of a masked view."""
    min_patches: Size = 4
    """Area of the smallest rectangle in patches."""


class ByData(NamedTuple):
    """What depends on the number of training images, where a recipe leaves it out."""

    images: float
    """The most images that a row is for."""
    prototypes: int
    temperature: float
    """Of the teacher, after its warm-up."""
    momentum: float
    """Of the teacher, in the first step."""
    epochs: int

    def of_task(self, kind: str) -> dict[str, Any]:
        """Return the settings of a kind of task: of its teacher, where it has one."""
        if kind != "self_distillation":
            return {}
        temperatures = [TEACHER_TEMPERATURE, self.temperature]
        return {"prototypes": self.prototypes, "teacher_temperature": temperatures, "momentum": self.momentum}


# Few images fill few prototypes, and need more epochs, in which the teacher must not lag behind by whole ones.
BY_DATA = (
    ByData(20_000, 1_024, 0.04, 0.99, 800),
    ByData(50_000, 2_048, 0.04, 0.992, 400),
    ByData(100_000, 4_096, 0.05, 0.992, 400),
    ByData(200_000, 16_384, 0.05, 0.994, 300),
    ByData(500_000, 32_768, 0.06, 0.996, 200),
    ByData(math.inf, 65_536, 0.07, 0.996, 100),
)


def by_data(images: int) -> ByData:
    """Return the row of a number of training images."""
    return next(row for row in BY_DATA if images <= row.images)


def suspects(task: "SelfDistillation", values: Mapping[str, float]) -> list[str]:
    """Return what often makes the features of a teacher and its student equal for all images, the likeliest first."""
    found, prototypes, warmest = [], task.prototypes or 1, max(task.teacher_temperature or (0.0,))
    if task.momentum is not None and task.momentum < LEAST_MOMENTUM:
        found.append(f"task.momentum {task.momentum:g}: the teacher is not an average of many steps")
    if task.centering == "center" and task.center_momentum > MOST_CENTER_MOMENTUM:
        found.append(f"task.center_momentum {task.center_momentum:g}: the center hardly moves")
    if warmest >= task.student_temperature:
        found.append(f"task.teacher_temperature {warmest:g}: it is not below task.student_temperature")
    if values.get("entropy", 0.0) > NEARLY_UNIFORM * math.log(prototypes) > 0:
        found.append("the teacher's assignments are nearly uniform: task.teacher_temperature is too high")
    return found


class SelfDistillation(Section):
    """A teacher, the average of the network itself, says what other views of the same image should say: DINO of whole
    views, iBOT of masked patches, and KoLeo, which keeps different images apart (DINOv2)."""

    traits: ClassVar = TaskTraits(
        needs=("views", "masks", "hidden"),
        may_collapse=True,
        joint=True,
        network="teacher.vit",
        suspects=suspects,
        by_data=True,
    )
    kind: Literal["self_distillation"] = "self_distillation"
    dino: NotNegative = 1.0
    """Weight of the cross-entropy between the prototypes of whole views; 0: off."""
    ibot: NotNegative = 1.0
    """Weight of the cross-entropy between the prototypes of patches, where the student's are masked: the mean over
    masked views, where DINOv2 divides by all views; 0: off."""
    koleo: NotNegative = 0.1
    """Weight of the negative logarithm of the distance to the nearest other image, of normalized vectors: the mean
    over global views, where DINOv2 has their sum; 0: off."""
    compares: Literal["pool", "class_token", "patches"] = "pool"
    """The vector of a view. pool: the one of model.pool; patches: the mean of the normalized patches."""
    mask: PatchMask = PatchMask()
    """The patches that iBOT hides from the student."""
    prototypes: Size | None = None
    """Size of the last layer; null: by the number of images, from 1,024 up to 20,000 images to 65,536."""
    hidden: Size | None = None
    """Width of the two hidden layers of the head; null: four times the width of the network, at most 2048."""
    bottleneck: Size | None = None
    """Width of the head's normalized output; null: the width of the network, at most 256."""
    shared_head: bool = True
    """Whether whole views and patches have one head."""
    centering: Literal["center", "sinkhorn"] = "sinkhorn"
    """What keeps the teacher from giving all images to one prototype. center: subtracts the average of its outputs
    (DINO); sinkhorn: three iterations towards equally frequent prototypes in each batch (DINOv2)."""
    center_momentum: Fraction = 0.9
    """Weight of the previous center, with centering center."""
    student_temperature: Positive = 0.1
    """Divides the student's cosines before the softmax."""
    teacher_temperature: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None
    """At the start, and after temperature_warmup; null: from 0.04 to 0.04 or more, by the number of images."""
    temperature_warmup: Annotated[str, duration_in("epochs", "steps", least=0)] | None = None
    """Length of the linear change of the teacher's temperature, in epochs or steps; null: a tenth of the run."""
    momentum: Fraction | None = None
    """Weight of the previous teacher in the first step; it grows to 1 by half a cosine. null: by the number of images,
    from 0.99 to 0.996."""
    freeze_prototypes: Annotated[str, duration_in("epochs", "steps", least=0)] = "1 epoch"
    """How long the last layer keeps its initial weights, in epochs or steps."""
    weights: Start = None
    mode: Continued = "full"
    lora: Rank = Lora()
    head_first: HeadFirst = None

    @model_validator(mode="after")
    def _some_loss(self) -> Self:
        if not self.dino + self.ibot:
            raise ValueError("dino and ibot: got 0 and 0, expected at least one of them above 0")
        if not self.shared_head and not (self.dino and self.ibot):
            off = "dino" if not self.dino else "ibot"
            raise ValueError(f"shared_head: got false with {off} 0, expected true: there is one head")
        return self

    def check(self, model: Model, data: Data) -> None:
        """Raise if the model or the data settings do not fit the task."""
        check_views(self.kind, model, data)
        check_start(self)
        if self.compares == "class_token" and not model.class_token:
            raise ValueError(
                "task.compares: got class_token, which model.class_token false leaves out; expected patches, or pool"
            )
        if self.dino:
            check_several(data, "task.dino compares them")
        if self.ibot and model.shape.traits.mixes_patches:
            raise ValueError(
                f"task.ibot: got {self.ibot:g} with {model.shape}, whose stem shows masked pixels to other patches;"
                " expected another stem, or 0"
            )
        width = model.shape.size
        hidden, bottleneck = self.hidden_width(width), self.bottleneck_width(width)
        layers = hidden * (width + hidden + bottleneck) + bottleneck * (self.prototypes or 0)
        if layers > MOST_PARAMETERS:
            raise ValueError(
                f"task.prototypes: got a head of {layers:.2g} parameters, expected at most {MOST_PARAMETERS:.2g}"
            )

    def hidden_width(self, width: int) -> int:
        """Return the width of the head's hidden layers for a network of a width."""
        return self.hidden or min(4 * width, 2048)

    def bottleneck_width(self, width: int) -> int:
        """Return the width of the head's output for a network of a width."""
        return self.bottleneck or min(width, 256)

    @property
    def trained(self) -> frozenset[Part]:
        """The parts of the network to train; it need not have all of them."""
        return frozenset(TRAINED[self.mode])

    def describe(self) -> str:
        """Return the loss in words."""
        parts = {"DINO": self.dino, "iBOT": self.ibot, "KoLeo": self.koleo}
        return " + ".join(f"{weight:g} {name}" for name, weight in parts.items() if weight)
