"""The charts of an evaluation: reliability, classes and confusion, in both themes. K classes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure

from vitray.evaluation.classification import ClassScore
from vitray.evaluation.intervals import wilson
from vitray.evaluation.report.results import Result, Scored
from vitray.pages.markup import Picture
from vitray.plotting import DARK, LIGHT, Theme, new_figure, one_line, style_axis, to_png

WIDTH, DPI = 4.0, 220
# The most classes with a bar each, with a name in the matrix, and with their counts in it.
MOST_BARS, MOST_NAMES, MOST_COUNTS = 30, 40, 12


class Chart(NamedTuple):
    """A chart: its texts, and a function that draws it in a theme."""

    alt: str
    caption: str
    draw: Callable[[Theme], Figure]

    def picture(self) -> Picture:
        """Return the chart in both themes."""
        return Picture(self.alt, self.caption, to_png(self.draw(LIGHT)), to_png(self.draw(DARK)))


def _prepare(axis: Axes, theme: Theme, title: str) -> None:
    style_axis(axis, theme)
    axis.set_title(one_line(title, 52), loc="left", color=theme.ink, fontsize=9.5)


# ---- calibration -----------------------------------------------------------------------------------------------------


def reliability_chart(result: Result, scored: Scored) -> Chart:
    """Return the accuracy of each bin of confidence, above the share of images in it."""
    error, fitted = scored.intervals["ece"], scored.temperature
    caption = (
        f"{result.name}: expected calibration error {error.estimate:.2%}, 95 % interval {error.low:.2%} to"
        f" {error.high:.2%}."
    )
    if fitted is not None and not fitted.at_bound:
        caption += (
            f" Divided by a temperature of {fitted.temperature:.3g}, fitted on one half, the logits of the other half"
            f" have {fitted.after.ece:.2%} instead of {fitted.before.ece:.2%}."
        )

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, WIDTH, 3.9, DPI)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        _prepare(upper, theme, result.name)
        style_axis(lower, theme)
        filled = [each for each in scored.bins if each.accuracy is not None]
        left, width = [each.low for each in filled], [each.high - each.low for each in filled]
        heights = [each.accuracy or 0 for each in filled]
        upper.bar(left, heights, width, align="edge", color=theme.series[0], edgecolor=theme.paper, linewidth=0.8)
        for each in filled:
            interval, middle = wilson(each.hits, each.images), (each.low + each.high) / 2
            upper.plot([middle, middle], [interval.low, interval.high], color=theme.ink, linewidth=0.9)
        upper.plot([0, 1], [0, 1], color=theme.pale, linewidth=1, linestyle=(0, (4, 3)))
        upper.set(xlim=(0, 1), ylim=(0, 1))
        upper.set_ylabel("accuracy", color=theme.pale, fontsize=8)
        images = sum(each.images for each in filled)
        shares = [each.images / images for each in filled]
        lower.bar(left, shares, width, align="edge", color=theme.rest, edgecolor=theme.paper, linewidth=0.8)
        lower.set_ylabel("share", color=theme.pale, fontsize=8)
        lower.set_xlabel("confidence of the predicted class", color=theme.pale, fontsize=8)
        return figure

    return Chart(f"Reliability diagram of {result.name}", caption, draw)


# ---- classes ---------------------------------------------------------------------------------------------------------


def class_chart(result: Result, scored: Scored) -> Chart:
    """Return the recall of each class, sorted; of many classes, of the lowest and the highest."""
    classes = sorted(
        (each for each in scored.classification.classes if each.images), key=lambda each: each.hits / each.images
    )
    shown = f"{len(classes)} classes"
    if len(classes) > MOST_BARS:
        half = MOST_BARS // 2
        shown = f"the {half} lowest and {half} highest of {len(classes):,} classes"
        classes = [*classes[:half], *classes[-half:]]
    caption = (
        f"{result.name}: recall of {shown}, with 95 % intervals. The line is the mean of all classes; those surely"
        " below it have the second colour."
    )

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, WIDTH, 0.8 + 0.2 * len(classes), DPI)
        axis = figure.add_subplot()
        _prepare(axis, theme, result.name)
        axis.grid(False, axis="y")
        for place, each in enumerate(classes):
            interval = wilson(each.hits, each.images)
            axis.barh(place, interval.estimate, 0.72, color=_class_colour(each, scored, theme))
            axis.plot([interval.low, interval.high], [place] * 2, color=theme.ink, linewidth=0.9)
        axis.axvline(scored.classification.mean_per_class, color=theme.rest, linewidth=1, zorder=0.9)
        axis.set_yticks(range(len(classes)), [one_line(result.classes[each.label], 22) for each in classes])
        axis.set(xlim=(0, 1), ylim=(len(classes) - 0.4, -0.6))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.set_xlabel("recall", color=theme.pale, fontsize=8)
        return figure

    return Chart(f"Recall of the classes of {result.name}", caption, draw)


def _class_colour(each: ClassScore, scored: Scored, theme: Theme) -> str:
    """Classes whose interval lies below the mean stand out."""
    is_low = wilson(each.hits, each.images).high < scored.classification.mean_per_class
    return theme.series[1] if is_low else theme.series[0]


# ---- confusion -------------------------------------------------------------------------------------------------------


def confusion_chart(result: Result, scored: Scored) -> Chart:
    """Return the confusion matrix as shares of each row, with confused classes beside each other."""
    confusion = scored.classification.confusion
    used = np.flatnonzero(confusion.sum(0) + confusion.sum(1))
    order = used[cluster(confusion[np.ix_(used, used)])]
    counts = confusion[np.ix_(order, order)]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    caption = f"{result.name}: a row for each class, a column for each prediction. Confused classes are neighbours."

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, WIDTH, WIDTH, DPI)
        axis = figure.add_subplot()
        _prepare(axis, theme, result.name)
        axis.grid(False)
        colours = LinearSegmentedColormap.from_list("confusion", [theme.low, theme.high])
        # The square root keeps rare confusions visible beside the diagonal.
        axis.imshow(shares, cmap=colours, norm=PowerNorm(0.5, 0, 1), interpolation="nearest", aspect="equal")
        axis.set_xlabel("predicted", color=theme.pale, fontsize=8)
        axis.set_ylabel("class", color=theme.pale, fontsize=8)
        if len(order) > MOST_NAMES:
            axis.set(xticks=[], yticks=[])
            return figure
        names, size = [one_line(result.classes[label], 18) for label in order], 7.5 if len(order) <= 20 else 5
        axis.set_xticks(range(len(order)), names, rotation=90, fontsize=size)
        axis.set_yticks(range(len(order)), names, fontsize=size)
        if len(order) <= MOST_COUNTS:
            for row, column in zip(*np.nonzero(counts), strict=True):
                ink = theme.paper if shares[row, column] > 0.25 else theme.ink
                text = f"{counts[row, column]:,}"
                axis.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink)
        return figure

    return Chart(f"Confusion matrix of {result.name}", caption, draw)


def cluster(confusion: np.ndarray) -> np.ndarray:
    """Return the order of classes in which those that are confused stand beside each other."""
    from scipy.cluster.hierarchy import leaves_list, linkage  # loads slowly

    count = len(confusion)
    if count < 3:
        return np.arange(count)
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    distances = (1 - (shares + shares.T) / 2)[np.triu_indices(count, 1)]
    # The best order of leaves takes the cube of their number.
    return leaves_list(linkage(distances, "average", optimal_ordering=count <= 200))


def confused_pairs(scored: Scored, most: int = 12) -> Sequence[tuple[int, int, int]]:
    """Return the most frequent confusions: class, prediction, images."""
    confusion = scored.classification.confusion.copy()
    np.fill_diagonal(confusion, 0)
    rows, columns = np.nonzero(confusion)
    triples = zip(rows.tolist(), columns.tolist(), confusion[rows, columns].tolist(), strict=True)
    return sorted(triples, key=lambda triple: (-triple[2], triple[0], triple[1]))[:most]
