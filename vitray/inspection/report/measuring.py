"""Measurements over many images for the figures, in chunks: in this process, or on the actors of a cluster.

A chunk is a mini-batch of CKA, so that the values do not depend on where they are computed. No more than two chunks of
pixels exist at a time in a process.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vitray.config.evaluation import NEEDS
from vitray.data.shards.tasks import ProgressLine
from vitray.inference.engine import Job, Span, actor_session, needs_actors, numerics_of, run_job, workers_for
from vitray.inference.networks import Networks
from vitray.inspection.report.figures import FIGURES
from vitray.inspection.report.subjects import Subject, View
from vitray.models.vit import ViT

# The most images of a chunk.
CHUNK = 32
# More images than this are spread over the actors of a cluster.
MOST_IN_PROCESS = 64


class MeasureBatch(NamedTuple):
    """What some figures need of a batch; a picklable function."""

    names: Sequence[str]
    levels: Sequence[int] | None
    on_passed: Callable[[int], None] | None = None
    """Counts the images of each value."""

    def __call__(self, networks: Networks, views: Sequence[np.ndarray], has_pixels: np.ndarray) -> dict[str, list[Any]]:
        """Return the values by figure, one of each network."""
        if not has_pixels.any():
            return {}
        seen: list[View] = []
        for network, images_BCHW in networks.inputs([view_BHWC[has_pixels] for view_BHWC in views]):
            seen.append(View(network, images_BCHW, self.levels, seen[0] if seen else None))
        return measure_views(seen, self.names, self.on_passed)


def measure_views(
    views: Sequence[View], names: Sequence[str], on_passed: Callable[[int], None] | None = None
) -> dict[str, list[Any]]:
    """Return the values of a batch by figure: one of each network, None where it has none."""
    values: dict[str, list[Any]] = {name: [] for name in names}
    for name in names:
        needs, own_measure = NEEDS[name], FIGURES[name].measure
        assert own_measure is not None, f"figure {name} measures nothing"
        for view in views:
            is_vit = isinstance(view.network, ViT)
            applies = len(view.images) >= needs.fewest_images and (is_vit or not needs.vit_only)
            if is_vit and needs.obstacle(view.network.model):
                applies = False
            values[name].append(own_measure(view) if applies else None)
            if on_passed:
                on_passed(len(view.images))
    return values


def measure(
    subjects: Sequence[Subject], names: Sequence[str], workers: int | None = None
) -> tuple[list[Subject], tuple[str, ...]]:
    """Return the subjects with what these figures need of all chosen images, and the images left out."""
    names, images = [name for name in names if FIGURES[name].measure], subjects[0].chosen
    if images is None or not names:
        return list(subjects), ()
    passes = len(names) * len(subjects)
    times = f" (each image {passes} times)" if passes > 1 else ""
    progress = ProgressLine(f"{', '.join(names)}{times}:", passes * len(images))
    specs = [subject.spec._replace(name=subject.name) for subject in subjects]
    workers = workers_for(specs, workers) if len(images) > MOST_IN_PROCESS else 1
    with actor_session(workers):
        on_actors = needs_actors(workers)
        compute = MeasureBatch(names, subjects[0].levels, None if on_actors else progress.add)
        loaded = {subject.name: subject.network for subject in subjects}
        job = Job(replace(images, shown=()), specs, compute, numerics_of(workers, CHUNK))
        chunks = {}
        for chunk in run_job(job, spans_of(len(images)), workers, loaded):
            chunks[chunk.span] = chunk
            if on_actors:
                progress.add(passes * len(chunk.keys))
    progress.end()
    ordered = [chunks[span] for span in sorted(chunks)]
    values = [value for chunk in ordered for value in chunk.values]
    measured = [
        {name: joined_values([each.get(name, []) for each in values], place) for name in names}
        for place in range(len(subjects))
    ]
    together = [subject._replace(measured=own) for subject, own in zip(subjects, measured, strict=True)]
    pairs = [pair for chunk in ordered for pair in zip(chunk.keys, chunk.reasons, strict=True)]
    return together, tuple(f"{key} ({reason})" for key, reason in pairs if reason is not None)


def joined_values(chunks: Sequence[Sequence[Any]], place: int) -> list[Any]:
    """Return the values of one network; those that do not apply are left out."""
    return [values[place] for values in chunks if values and values[place] is not None]


def spans_of(images: int) -> list[Span]:
    """Return even chunks of images: the first of each, and the one after its last."""
    parts = -(-images // CHUNK)
    return [(images * part // parts, images * (part + 1) // parts) for part in range(parts)]
