"""The proof of an export: the same images through the network and its export, and the latency of both.

Shapes: B images, C colors, H x W pixels, K classes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from vitray.config.augmentation import CenterCrop
from vitray.data.augment.views import View, decode_views, usable
from vitray.errors import ConfigError, RunError
from vitray.inference.images import ImageSet
from vitray.system.timing import interleave, ratio_of, spread_of
from vitray.weights.files import few

BATCH = 32
BATCHES = (1, 32)  # of the latency
MOST_OTHERS = 0.1  # share of the CPUs that other processes may use while the latency is measured

# From uint8 images (BCHW) to logits (BK).
Runner = Callable[[Tensor], Tensor]


class Parity(NamedTuple):
    """The differences of an export from its network."""

    images: int
    """Compared images."""
    left_out: tuple[str, ...]
    """Images that cannot be decoded, each with its reason."""
    max_logit_difference: float
    largest_logit: float
    """The largest absolute logit of the network, the scale of a difference."""
    changed_top1: int
    """Images with another most probable class."""
    predicted_classes: int
    """Number of different classes that the network predicts."""

    @property
    def changed_share(self) -> float:
        """The share of images with another most probable class."""
        return self.changed_top1 / self.images

    def flat(self) -> dict[str, Any]:
        """Return the values of parity.json by name."""
        return self._asdict() | {"changed_share": self.changed_share}


def views(
    images: ImageSet, count: int, sizes: Sequence[tuple[int, int]], crop: CenterCrop
) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield batches of evaluation views (uint8, BCHW), and the images without a view, each with its reason.

    The images are evenly spaced over their set; the sizes take turns.
    """
    numbers = np.linspace(0, len(images), min(count, len(images)), endpoint=False).astype(int)
    at_once = max(1, min(BATCH, -(-len(numbers) // len(sizes))))  # so that few images see each size too
    for place, first in enumerate(range(0, len(numbers), at_once)):
        size = sizes[place % len(sizes)]
        encoded = images.read(numbers[first : first + at_once].tolist())
        [views_BHWC], reasons = decode_views([image.content for image in encoded], [View(crop, size)])
        left_out = [f"{image.key} ({reason})" for image, reason in zip(encoded, reasons, strict=True) if reason]
        yield torch.from_numpy(views_BHWC[usable(reasons)]).permute(0, 3, 1, 2).contiguous(), left_out


def compare_logits(before: Runner, after: Runner, batches: Iterable[tuple[Tensor, list[str]]]) -> Parity:
    """Return the differences of two runners over batches of views."""
    images = changed = 0
    difference = largest = 0.0
    classes: set[int] = set()
    left_out: list[str] = []
    for views_BCHW, bad in batches:
        left_out += bad
        if not len(views_BCHW):
            continue
        ours_BK, theirs_BK = before(views_BCHW).double(), after(views_BCHW).double()
        if ours_BK.shape != theirs_BK.shape:
            raise RunError(f"the export's logits are {tuple(theirs_BK.shape)}, the network's {tuple(ours_BK.shape)}")
        for name, logits_BK in (("network", ours_BK), ("export", theirs_BK)):
            if not logits_BK.isfinite().all():
                raise ConfigError(f"the {name}'s logits are not finite; expected weights of a finished training")
        top1_B = ours_BK.argmax(1)
        changed += int((top1_B != theirs_BK.argmax(1)).sum())
        classes |= set(top1_B.tolist())
        difference = max(difference, float((ours_BK - theirs_BK).abs().max()))
        largest = max(largest, float(ours_BK.abs().max()))
        images += len(views_BCHW)
    if not images:
        raise ConfigError(f"no image to compare: {few(left_out) or 'there is none'}; expected at least one")
    return Parity(images, tuple(left_out), difference, largest, changed, len(classes))


def measure_latency(
    before: Runner, after: Runner, size: tuple[int, int], rounds: int, seconds: float
) -> tuple[dict[str, dict[str, float]], float]:
    """Return the milliseconds of a batch, by batch size, as medians of interleaved rounds, and the load beside them.

    The load is the share of the CPUs that other processes used meanwhile.
    """
    table, start, used = {}, time.monotonic(), _used_by_others()
    for batch in BATCHES:
        images = torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8)
        calls = {"before": lambda images=images: before(images), "after": lambda images=images: after(images)}
        speeds = interleave(calls, rounds, seconds, torch.device("cpu"), batch)
        row: dict[str, float] = {}
        for name, measured in speeds.items():
            row |= spread_of([1000 * batch / speed for speed in measured]).columns(f"{name}_ms", 4)
        row |= ratio_of(speeds["before"], speeds["after"]).columns("after_over_before", 4)
        table[str(batch)] = row
    return table, (_used_by_others() - used) / (time.monotonic() - start) / (psutil.cpu_count() or 1)


def _used_by_others() -> float:
    """Return the CPU seconds of all other processes since the machine started."""
    total, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return sum(total) - total.idle - getattr(total, "iowait", 0.0) - own.user - own.system
