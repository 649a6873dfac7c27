"""Attention maps over images: overlays with the predicted classes under each picture (ViT paper, figures 6 and 14)."""

import io
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from vitray.data.augment.contact_sheets import attention_overlay
from vitray.data.shards.label_lists import names_of
from vitray.inspection.attention import attention_maps, gradient_rollout
from vitray.inspection.report.drawings import Drawing, FigureResult, Rows, Strip, Table, Thumbnail, file_name
from vitray.inspection.report.subjects import ChosenImages, Subject
from vitray.models.other_networks import OtherNetwork
from vitray.models.probabilities import probabilities_of
from vitray.pages.plotting import Theme, new_figure, one_line

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


class Outputs(NamedTuple):
    """The maps (BRQ) by name and the predictions of a subject's images, on the CPU."""

    maps: dict[str, np.ndarray]
    """The rollout is the first; empty for a network without attention."""
    predictions: list[list[tuple[str, float]]]
    """The most probable classes of each image, with their probabilities; empty for a network without a head."""


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with the maps and predicted classes of every image."""
    if all(isinstance(subject.network, OtherNetwork) for subject in subjects):
        result = result._replace(title="Predicted classes", prose="The images with their classes.")
    galleries: list[tuple[str, list[Strip]]] = []
    rows: Rows = [["model", "image", "row", "column", "map", "attention"]]
    predicted: Rows = [["model", "image", "true_class", "rank", "class", "probability"]]
    for subject in subjects:
        if isinstance(subject.network, OtherNetwork):
            text = f"{subject.name} has no attention maps: {subject.network.model.name} is not a ViT of vitray"
            if subject.spec.num_classes is None:
                result = result.without(f"{text}, and has no classes.")
                continue
            result = result.without(f"{text}. Its predicted classes are shown.")
        images, outputs = subject.chosen, _compute(subject)
        assert images is not None
        if outputs.maps:
            galleries.append((subject.name if len(subjects) > 1 else "", _strips(subject, images, outputs)))
        title = "Attention rollout" if outputs.maps else "Predicted classes"
        beside = "each beside its attention rollout, with" if outputs.maps else "each with"
        over = subject.over(len(images.shown))
        caption = f"{subject.name}: {over}, {beside} the predicted class and its probability."
        draw = partial(_draw, subject, images, outputs)
        result.drawings.append(
            Drawing(file_name(result.name, subject.name), f"{title} of {subject.name}", caption, draw)
        )
        for name, map_BRQ in outputs.maps.items():
            for place, row, column in np.ndindex(*map_BRQ.shape):
                value = float(map_BRQ[place, row, column])
                rows.append([subject.name, images.shown[place].key, row, column, name, value])
        for place, classes in enumerate(outputs.predictions):
            for rank, guess in enumerate(classes, start=1):
                own = true_class(images, place) or ""
                predicted.append([subject.name, images.shown[place].key, own, rank, *guess])
    tables = (Table("rollout", rows), Table("predictions", predicted))
    result.tables.extend(table for table in tables if len(table.rows) > 1)
    return result._replace(galleries=galleries)


def _compute(subject: Subject) -> Outputs:
    has_head = subject.spec.num_classes is not None
    rollouts, gradients, last, logits = [], [], [], []
    for batch_BCHW in subject.batches("attention maps"):
        if isinstance(subject.network, OtherNetwork):
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
    of_images = {name: torch.cat(parts).cpu().numpy() for name, parts in named.items() if parts}
    predictions: list[list[tuple[str, float]]] = []
    for values_K in probabilities_of(torch.cat(logits), subject.spec.probability).cpu().numpy() if has_head else ():
        best = np.argsort(-values_K, kind="stable")[:PREDICTIONS]
        predictions.append([(subject.class_name(k), float(values_K[k])) for k in best])
    return Outputs(of_images, predictions)


def true_class(images: ChosenImages, place: int) -> str | None:
    """Return the class that the dataset has for an image, or None."""
    label = images.shown[place].label
    has_label = isinstance(label, np.ndarray) or 0 <= label < len(images.classes)
    return names_of(label, images.classes) if has_label else None


# ---- pictures --------------------------------------------------------------------------------------------------------


def _strips(subject: Subject, images: ChosenImages, outputs: Outputs) -> list[Strip]:
    """Return the first images with all their maps."""
    assert subject.images is not None
    strips = []
    for place, image in enumerate(images.shown[:MOST_LARGE]):
        view_HWC = subject.images[place]
        pictures = [_thumbnail(view_HWC, image.key, "image")]
        for name, map_BRQ in outputs.maps.items():
            map_RQ, mean = map_BRQ[place], map_BRQ[place].mean()
            contrast = f"×{map_RQ.max() / mean:.2f}" if mean > 0 else "none"
            shown_HWC = attention_overlay(view_HWC, map_RQ, subject.vit.stem.patch)
            pictures.append(_thumbnail(shown_HWC, f"{name} of {image.key}", f"{name} {contrast}"))
        guesses, named = outputs.predictions[place] if outputs.predictions else [], true_class(images, place)
        is_wrong = bool(guesses) and named is not None and guesses[0][0] != named
        words = ", ".join(f"{name} {probability:.1%}" for name, probability in guesses)
        strips.append(Strip(pictures, named or image.key, words, is_wrong))
    return strips


def _thumbnail(view_HWC: np.ndarray, alt: str, name: str) -> Thumbnail:
    image = Image.fromarray(view_HWC)
    is_tiny = max(image.size) <= TINY
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    image.save(content := io.BytesIO(), "PNG" if is_tiny else "JPEG", quality=90)
    return Thumbnail(content.getvalue(), "image/png" if is_tiny else "image/jpeg", is_tiny, alt, name)


def _draw(subject: Subject, images: ChosenImages, outputs: Outputs, theme: Theme) -> Figure:
    """Pairs of an image and its rollout, with the prediction under each."""
    assert subject.images is not None
    shown, has_maps = len(images.shown), bool(outputs.maps)
    columns = min(8 if shown > 16 else 4, shown)
    lines = math.ceil(shown / columns)
    ratio, side = subject.images.shape[1] / subject.images.shape[2], 1.0 if columns == 8 else 1.5
    figure = new_figure(theme, (1 + has_maps) * side * columns + 0.3, (ratio * side + 0.35) * lines + 0.3)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for place, axis in enumerate(axes):
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        if place >= shown:
            axis.set_axis_off()
            continue
        view_HWC = subject.images[place]
        pair = [view_HWC]
        if has_maps:
            pair.append(attention_overlay(view_HWC, outputs.maps["rollout"][place], subject.vit.stem.patch))
        axis.imshow(np.concatenate(pair, axis=1), interpolation="nearest")
        for name, probability in outputs.predictions[place][:1] if outputs.predictions else ():
            is_wrong = true_class(images, place) not in (None, name)
            text = f"{'✗ ' * is_wrong}{one_line(name, 24)} {probability:.0%}"
            axis.set_xlabel(text, fontsize=7, color=theme.bad if is_wrong else theme.ink, labelpad=2)
    return figure
