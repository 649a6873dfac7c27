"""The cost of `data.augment.on: device`: a training step on batches that the worker augments, against plain crops.

Both come through the prefetcher of a run: copies and augmentation run beside the steps, as in training.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch

from vitray.bench.rounds import Results, circumstances, interleave, ratio_of, spread_of
from vitray.bench.train import TrainSettings, random_batch, recipe, training_step
from vitray.config import Run
from vitray.data.augment.draws import Draws, draw_columns, draw_operations, read_draws, write_draws
from vitray.data.augment.keyed_random import generator
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.stream.batches import HostBatch, Share
from vitray.data.stream.prefetch import Prefetcher
from vitray.training.learner import Learner
from vitray.training.loop import take_step
from vitray.training.schedule import length_of

VARIANTS = ("augmented", "crops")
# Steps before the timed ones: more than the batches that a feed makes while the other variant runs.
UNTIMED = 4


def measure_augmented(settings: TrainSettings, policy: str) -> dict[str, Any]:
    """Measure every model, print and save the table, and return its rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = f"{settings.dtype}, {settings.image_size} px, batches of {settings.batch}, policy {policy}"
    print(f"images/s of a training step, median ± half the interquartile range of {settings.rounds} interleaved rounds")
    print(f"{circumstances(device)}; {about}")
    print(f"\n{'model':<18}{'augmented':>18}{'crops':>18}{'ratio':>18}")
    stem = f"train_{policy}_{device.type}_{settings.dtype}" + (f"_{settings.compile}" if settings.compile else "")
    results = Results(settings.out / stem, device, {"circumstances": circumstances(device), "about": about})
    for name in settings.models:
        run = recipe(settings, name).replace({"data.augment.policy": policy, "data.augment.on": "device"})
        with fed_steps(run, device) as steps:
            speeds = interleave(steps, settings.rounds, settings.seconds, device, settings.batch, UNTIMED)
        augmented, crops = (spread_of(speeds[variant]) for variant in VARIANTS)
        ratio = ratio_of(*(speeds[variant] for variant in VARIANTS))
        print(f"{name:<18}{augmented!s:>18}{crops!s:>18}{ratio!s:>18}", flush=True)
        row = {"model": name} | augmented.columns("augmented", 2) | crops.columns("crops", 2)
        results.add(row | ratio.columns("ratio", 4))
    return results.finish()


@contextmanager
def fed_steps(run: Run, device: torch.device) -> Iterator[dict[str, Callable[[], object]]]:
    """Yield {variant: a step on the next batch of its prefetcher}."""
    learner = training_step(run, random_batch(run, device))[0]
    with ExitStack() as stack:
        feeds = [stack.enter_context(closing(Prefetcher(repeat(batch), device))) for batch in host_batches(run)]
        yield {variant: partial(_step, run, feed, learner) for variant, feed in zip(VARIANTS, feeds, strict=True)}


def _step(run: Run, feed: Iterator[DeviceBatch], learner: Learner) -> None:
    take_step(run, 20, next(feed), Share(0, 1), learner, length_of(run.optim, 1000))


def host_batches(run: Run) -> tuple[HostBatch, HostBatch]:
    """Return a batch of random crops with the draws of its augmentation, and the same without them."""
    images, labels, positions, rows, _ = random_batch(run, torch.device("cpu"))
    batch = HostBatch(images.numpy(), labels.numpy(), positions, rows, 0, draws_of(run))
    return batch, batch._replace(draws=None)


def draws_of(run: Run) -> Draws:
    """Return the draws of a batch, as a task makes them."""
    augment, (height, width) = run.data.augment, run.model.image_shape
    columns = draw_columns(augment, run.optim.batch)
    for row in range(run.optim.batch):
        rng: np.random.Generator = generator(run.seed, 0, str(row))
        write_draws(columns, row, rng.random() < augment.flip, draw_operations(augment, (width, height), rng))
    return read_draws(columns, augment)
