"""A resolved run: the one value that travels from the driver to the step."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitray.config import Run
from vitray.data.shards.manifest import Dataset
from vitray.models.sizes import Sizes
from vitray.training.schedule import Intervals, Length

if TYPE_CHECKING:
    from vitray.data.stream.balance import ClassDraw
    from vitray.tasks.build import TaskCosts
    from vitray.weights.pretrained import InitialWeights, TeacherSource, TokenizerSource


class ResolvedRun(NamedTuple):
    """The settings of a run with all that its data and weights decide."""

    run: Run
    """Complete: settings that a recipe omits come from the initial weights and from the classes of the data."""
    dataset: Dataset
    holdout_mask: np.ndarray | None
    """For each row of train, whether it is held out and evaluated; None where all are trained on."""
    images: int
    """To train on."""
    val_images: int
    few_shot_least: int | None
    """Images of the smallest class that probe few_shot learns from; None without this probe."""
    length: Length
    intervals: Intervals
    balance: "list[ClassDraw] | None"
    """How often the first epoch shows the images of each class, where they are balanced; others differ by one."""
    sizes: Sizes
    """Of the network, without what a task trains beside it: a decoder, a head of predictions."""
    costs: "TaskCosts"
    initial: "InitialWeights | None" = None
    """The initial weights of a fine-tuning."""
    tokenizer: "TokenizerSource | None" = None
    """The tokenizer whose codes are predicted."""
    teacher: "TeacherSource | None" = None
    """The teacher of a distillation."""

    def without_networks(self) -> "ResolvedRun":
        """Return it without the networks beside the trained one, which the workers get from their host."""
        return self._replace(initial=None, tokenizer=None, teacher=None)
