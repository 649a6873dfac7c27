"""Attention maps over images: overlays with the predicted classes under each picture (ViT paper, figures 6 and 14)."""

import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from vitray.data.augment.contact_sheets import attention_overlay
from vitray.inspection.report.drawings import Drawing, FigureResult, Strip, Table, Thumbnail, file_name
from vitray.inspection.report.subjects import ChosenImages, Subject
from vitray.inspection.rollout import attention_maps, gradient_rollout
from vitray.models.probabilities import probabilities_of
from vitray.models.torchvision_networks import TorchvisionNetwork
from vitray.plotting import Theme, new_figure, one_line

# Images with all their maps on the page; the grid has all that are shown.
MOST_LARGE = 12
PREDICTIONS = 3
# Pixels of the longer side on the page; images below the second are enlarged with their pixels visible.
THUMBNAIL, TINY = 256, 96
PROSE = (
    "Each image, then the patches that its output attends to: by attention rollout through all levels, by rollout"
    " weighted with the gradient of the predicted class, and by the last level alone. Yellow patches have the most"
    " attention of their image, violet ones the least. Each map is stretched to its own contrast, so that faint ones"
    " look as sharp as clear ones: the number under each is the most attended patch over the mean patch. Below: the"
    " predicted classes; a wrong one is marked."
)


class Maps(NamedTuple):
    """The maps (BRQ) and predictions of a subject's images, on the CPU."""

    names: tuple[str, ...]
    maps: list[np.ndarray]
    probabilities: np.ndarray | None
    """BK; None for a network without a head."""


def maps_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the attention maps of every image."""
    has_maps = any(not isinstance(subject.network, TorchvisionNetwork) for subject in subjects)
    title, prose = ("Attention maps", PROSE) if has_maps else ("Predicted classes", "The images with their classes.")
    galleries, drawings, result = [], [], FigureResult("rollout", title, prose, [], [])
    rows: list[Sequence[Any]] = [["model", "image", "row", "column", "map", "attention"]]
    predicted: list[Sequence[Any]] = [["model", "image", "true_class", "rank", "class", "probability"]]
    for subject in subjects:
        if isinstance(subject.network, TorchvisionNetwork):
            text = f"{subject.name} has no attention maps: {subject.network.model.name} is not a ViT of vitray"
            if subject.spec.num_classes is None:
                result = result.without(f"{text}, and has no classes.")
                continue
            result = result.without(f"{text}. Its predicted classes are shown.")
        maps, images = compute_maps(subject), subject.chosen
        assert images is not None
        if maps.maps:
            galleries.append((subject.name if len(subjects) > 1 else "", _strips(subject, images, maps)))
        drawings.append(_sheet(subject, images, maps))
        rows += _map_rows(subject, images, maps)
        predicted += _prediction_rows(subject, images, maps)
    tables = [Table(name, each) for name, each in (("rollout", rows), ("predictions", predicted)) if len(each) > 1]
    return result._replace(drawings=drawings, tables=tables, galleries=galleries)


def compute_maps(subject: Subject) -> Maps:
    """Return the maps and predictions of all images."""
    has_head = subject.spec.num_classes is not None
    rollouts, gradients, last, logits = [], [], [], []
    for batch_BCHW in subject.batches("attention maps"):
        if isinstance(subject.network, TorchvisionNetwork):
            with torch.no_grad():
                logits.append(subject.network(batch_BCHW))
            continue
        maps = attention_maps(subject.vit, batch_BCHW)
        rollouts.append(maps.rollout)
        last.append(maps.last_level)
        logits.append(maps.logits)
        if has_head:
            gradients.append(gradient_rollout(subject.vit, batch_BCHW, maps.logits.argmax(dim=1)))
    named = {"rollout": rollouts, "gradient-weighted": gradients, "last level": last}
    named = {name: torch.cat(parts).cpu().numpy() for name, parts in named.items() if parts}
    probabilities = probabilities_of(torch.cat(logits), subject.spec.probability).cpu().numpy() if has_head else None
    return Maps(tuple(named), list(named.values()), probabilities)


# ---- texts -----------------------------------------------------------------------------------------------------------


def predictions(subject: Subject, maps: Maps, place: int) -> list[tuple[str, float]]:
    """Return the most probable classes of one image, with their probabilities."""
    if maps.probabilities is None:
        return []
    values_K = maps.probabilities[place]
    return [(subject.class_name(k), float(values_K[k])) for k in np.argsort(-values_K, kind="stable")[:PREDICTIONS]]


def true_class(images: ChosenImages, place: int) -> str | None:
    """Return the class that the dataset has for an image, or None."""
    label = images.shown[place].label
    return images.classes[label] if 0 <= label < len(images.classes) else None


def _prediction_rows(subject: Subject, images: ChosenImages, maps: Maps) -> list[Sequence[Any]]:
    return [
        [subject.name, image.key, true_class(images, place) or "", rank, name, probability]
        for place, image in enumerate(images.shown)
        for rank, (name, probability) in enumerate(predictions(subject, maps, place), start=1)
    ]


def _map_rows(subject: Subject, images: ChosenImages, maps: Maps) -> list[Sequence[Any]]:
    return [
        [subject.name, image.key, row, column, name, float(map_BRQ[place, row, column])]
        for name, map_BRQ in zip(maps.names, maps.maps, strict=True)
        for place, image in enumerate(images.shown)
        for row, column in np.ndindex(*map_BRQ.shape[1:])
    ]


# ---- pictures --------------------------------------------------------------------------------------------------------


def _strips(subject: Subject, images: ChosenImages, maps: Maps) -> list[Strip]:
    """Return the first images with all their maps."""
    assert subject.images is not None
    strips = []
    for place, image in enumerate(images.shown[:MOST_LARGE]):
        view_HWC = subject.images[place]
        pictures = [_thumbnail(view_HWC, image.key, "image")]
        for name, map_BRQ in zip(maps.names, maps.maps, strict=True):
            shown_HWC = attention_overlay(view_HWC, map_BRQ[place], subject.vit.stem.patch)
            pictures.append(_thumbnail(shown_HWC, f"{name} of {image.key}", f"{name} {contrast(map_BRQ[place])}"))
        guesses, named = predictions(subject, maps, place), true_class(images, place)
        is_wrong = bool(guesses) and named is not None and guesses[0][0] != named
        words = ", ".join(f"{name} {probability:.1%}" for name, probability in guesses)
        strips.append(Strip(pictures, named or image.key, words, is_wrong))
    return strips


def contrast(map_RQ: np.ndarray) -> str:
    """Return the largest value of a map over its mean: ×1 where all patches have the same attention."""
    mean = map_RQ.mean()
    return f"×{map_RQ.max() / mean:.2f}" if mean > 0 else "none"


def _thumbnail(view_HWC: np.ndarray, alt: str, name: str) -> Thumbnail:
    image = Image.fromarray(view_HWC)
    is_tiny = max(image.size) <= TINY
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    image.save(content := io.BytesIO(), "PNG" if is_tiny else "JPEG", quality=90)
    return Thumbnail(content.getvalue(), "image/png" if is_tiny else "image/jpeg", is_tiny, alt, name)


def _sheet(subject: Subject, images: ChosenImages, maps: Maps) -> Drawing:
    """Pairs of an image and its rollout, with the prediction under each."""
    assert subject.images is not None
    shown = len(images.shown)
    columns = min(8 if shown > 16 else 4, shown)
    lines = math.ceil(shown / columns)
    ratio = subject.images.shape[1] / subject.images.shape[2]
    has_maps = bool(maps.maps)
    beside = "each beside its attention rollout, with" if has_maps else "each with"
    caption = f"{subject.name}: {subject.over(shown)}, {beside} the predicted class and its probability."

    def draw(theme: Theme) -> Figure:
        side = 1.0 if columns == 8 else 1.5
        figure = new_figure(theme, (1 + has_maps) * side * columns + 0.3, (ratio * side + 0.35) * lines + 0.3)
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        for place, axis in enumerate(axes):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if place >= shown:
                axis.set_axis_off()
                continue
            assert subject.images is not None
            view_HWC = subject.images[place]
            pair = [view_HWC]
            if has_maps:
                pair.append(attention_overlay(view_HWC, maps.maps[0][place], subject.vit.stem.patch))
            axis.imshow(np.concatenate(pair, axis=1), interpolation="nearest")
            for name, probability in predictions(subject, maps, place)[:1]:
                is_wrong = true_class(images, place) not in (None, name)
                text = f"{'✗ ' * is_wrong}{one_line(name, 24)} {probability:.0%}"
                axis.set_xlabel(text, fontsize=7, color=theme.bad if is_wrong else theme.ink, labelpad=2)
        return figure

    title = "Attention rollout" if has_maps else "Predicted classes"
    return Drawing(file_name("rollout", subject.name), f"{title} of {subject.name}", caption, draw)
