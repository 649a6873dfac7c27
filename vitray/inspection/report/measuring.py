"""Measurements over many images for the figures, in chunks: in this process, or on the actors of a cluster.

A chunk is a mini-batch of CKA, so that the values do not depend on where they are computed. No more than one chunk of
pixels exists at a time in a process.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from vitray.config.evaluation import NEEDS
from vitray.data.augment.decode import UndecodableImage
from vitray.data.shards.ray_tasks import ProgressLine
from vitray.inference.actors import Span, actor_session, chunks_on_actors, needs_actors
from vitray.inference.extractor import decoding_threads
from vitray.inference.images import EncodedImage
from vitray.inference.models import open_network
from vitray.inference.network_spec import NetworkSpec
from vitray.inspection.report.figures import FIGURES
from vitray.inspection.report.subjects import ChosenImages, Subject, View, prepared, view_of
from vitray.models.network import AnyNetwork
from vitray.models.vit import ViT

# The most images of a chunk.
CHUNK = 32
# More images than this are spread over the actors of a cluster.
MOST_IN_PROCESS = 64


class Chunk(NamedTuple):
    """The measurements of a chunk by figure, one of each network or None where it has none; and the images left out."""

    values: dict[str, list[Any]]
    left_out: tuple[str, ...]


class Inspector:
    """Networks over chunks of images in one process."""

    def __init__(
        self,
        specs: Sequence[NetworkSpec],
        images: ChosenImages,
        levels: Sequence[int] | None,
        vits: Sequence[AnyNetwork] | None = None,
        decoders: int | None = None,
    ) -> None:
        """`decoders` is the number of threads that decode; None is the share of a device of this process."""
        self._specs, self._images, self._levels = specs, images, levels
        self._vits = list(vits or ())
        self._decoders = ThreadPoolExecutor(decoders or decoding_threads())
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the networks, before the first call of `extract`: an actor's constructor would hide the error."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._vits = [vit.to(device) for vit in self._vits or [open_network(spec) for spec in self._specs]]

    def extract(
        self, start: int, stop: int, names: Sequence[str], on_passed: Callable[[int], None] = lambda _: None
    ) -> Chunk:
        """Return the values of some of the chosen images; `on_passed` counts images for each value."""
        seen = list(self._decoders.map(self._seen, self._images.read(start, stop)))
        left_out = tuple(each for each in seen if isinstance(each, str))
        pixels = [each for each in seen if not isinstance(each, str)]
        if not pixels:
            return Chunk({}, left_out)
        views: list[View] = []
        with self._lock:
            for place, (spec, vit) in enumerate(zip(self._specs, self._vits, strict=True)):
                images_BCHW = prepared(np.stack([each[place] for each in pixels]), spec, vit)
                views.append(View(vit, images_BCHW, self._levels, views[0] if views else None))
            return Chunk(measure_views(views, names, on_passed), left_out)

    def _seen(self, image: EncodedImage) -> list[np.ndarray] | str:
        """The image as each network sees it, or the reason why there is none."""
        try:
            return [view_of(image, spec) for spec in self._specs]
        except UndecodableImage as error:
            return f"{image.key} ({error})"


def measure_views(
    views: Sequence[View], names: Sequence[str], on_passed: Callable[[int], None] = lambda _: None
) -> dict[str, list[Any]]:
    """Return the values of a chunk: for each figure, that of each network."""
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
            on_passed(len(view.images))
    return values


def measure(
    subjects: Sequence[Subject], names: Sequence[str], workers: int | None = None
) -> tuple[list[Subject], tuple[str, ...]]:
    """Return the subjects with what these figures need of all chosen images, and the images left out."""
    names, images = [name for name in names if FIGURES[name].measure], subjects[0].chosen
    if images is None or not names:
        return list(subjects), ()
    chunks = list(_chunks(subjects, images, names, workers))
    measured = [
        {name: joined_values([chunk.values.get(name, []) for chunk in chunks], place) for name in names}
        for place in range(len(subjects))
    ]
    together = [subject._replace(measured=own) for subject, own in zip(subjects, measured, strict=True)]
    return together, tuple(image for chunk in chunks for image in chunk.left_out)


def joined_values(chunks: Sequence[Sequence[Any]], place: int) -> list[Any]:
    """Return the values of one network; those that do not apply are left out."""
    return [values[place] for values in chunks if values and values[place] is not None]


def spans_of(images: int) -> list[Span]:
    """Return even chunks of images: the first of each, and the one after its last."""
    parts = -(-images // CHUNK)
    return [(images * part // parts, images * (part + 1) // parts) for part in range(parts)]


def _chunks(
    subjects: Sequence[Subject], images: ChosenImages, names: Sequence[str], workers: int | None
) -> list[Chunk]:
    """The chunks in the order of the images, wherever they are computed."""
    spans, passes = spans_of(len(images.numbers)), len(names) * len(subjects)
    specs, levels = [subject.spec for subject in subjects], subjects[0].levels
    times = f" (each image {passes} times)" if passes > 1 else ""
    progress = ProgressLine(f"{', '.join(names)}{times}:", passes * len(images.numbers))
    chunks: dict[Span, Chunk] = {}
    if len(images.numbers) > MOST_IN_PROCESS and needs_actors(workers):
        shared = specs, images._replace(shown=()), levels
        with actor_session(workers):
            for span, chunk in chunks_on_actors(Inspector, shared, [(span, names) for span in spans], workers):
                chunks[span] = chunk
                progress.add(passes * (span[1] - span[0]))
    else:
        inspector = Inspector(specs, images, levels, [subject.network for subject in subjects])
        inspector.load()
        for span in spans:
            chunks[span] = inspector.extract(*span, names, progress.add)
    progress.end()
    return [chunks[span] for span in spans]
