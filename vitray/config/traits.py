"""What the rest of vitray needs to know of a kind of task, search or scheduler; each states it beside its settings."""

from typing import Literal, NamedTuple

Need = Literal["labels", "masks"]


class TaskTraits(NamedTuple):
    """The nature of a kind of task."""

    needs: tuple[Need, ...]
    """What its loss takes beside the images, in this order. With labels, images are mixed and erased, and an evaluation
    counts correct answers; without, it is the mean of the loss."""
    saves: Literal["network", "tokenizer"] = "network"
    """What its model folder holds: a network, whose features can be probed, or a tokenizer, which has codes."""
    may_collapse: bool = False
    """Whether features may become equal for all images, which guard.on_collapse watches."""


class SearchTraits(NamedTuple):
    """The nature of a kind of search."""

    is_exhaustive: bool = False
    """Whether it tries every combination of listed values; any other search draws its points."""
    learns: bool = False
    """Whether a point depends on the scores of earlier ones."""


class SchedulerTraits(NamedTuple):
    """The nature of a kind of scheduler."""

    decides: bool
    """Whether it decides after each score; the trial waits for it."""
    is_population: bool = False
    """Whether trials continue from each other's checkpoints."""
