"""The charts of an evaluation: reliability, classes and confusion, in both themes. K classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from vitray.evaluation.results import PairResult, Result, Scored
from vitray.metrics.classification import ClassScore
from vitray.metrics.intervals import Interval, wilson
from vitray.pages.plotting import Theme, heat, new_figure, one_line, style_axis
from vitray.pages.rendering import Picture, draw_picture

WIDTH, DPI = 4.0, 220
# The most classes with a bar each, with a name in the matrix, and with their counts in it.
MOST_BARS, MOST_NAMES, MOST_COUNTS = 30, 40, 16
# Of more classes than have names: the groups of neighbors in one matrix, and the most confused classes in another.
GROUPS, CONFUSED = 25, 16


def _prepare(axis: Axes, theme: Theme, title: str) -> None:
    style_axis(axis, theme)
    axis.set_title(one_line(title, 52), loc="left", color=theme.ink, fontsize=9.5)


# ---- intervals -------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of a chart of intervals: its name, and an interval of each series."""

    name: str
    intervals: Sequence[Interval]
    is_pale: bool = False


def interval_chart(
    title: str, lines: Sequence[Line], series: Sequence[str], unit: str, caption: str, with_zero: bool = False
) -> Picture:
    """Return estimates with their intervals, a line below the other; several series have a legend."""

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, WIDTH, 0.9 + max(0.3, 0.2 * len(series)) * len(lines) + 0.2 * len(series), DPI)
        axis = figure.add_subplot()
        _prepare(axis, theme, title)
        axis.grid(False, axis="y")
        for place, line in enumerate(lines):
            for index, interval in enumerate(line.intervals):
                color = theme.rest if line.is_pale else theme.series[index % len(theme.series)]
                at = place + 0.64 * (index - (len(series) - 1) / 2) / len(series)
                ends = 100 * interval.low, 100 * interval.high
                axis.plot(ends, [at, at], color=color, linewidth=1.8, solid_capstyle="round")
                label = one_line(series[index], 40) if not place else None
                axis.plot(100 * interval.estimate, at, "o", color=color, markersize=5, label=label)
        if with_zero:
            axis.axvline(0, color=theme.ink, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
        axis.set_yticks(range(len(lines)), [one_line(line.name, 40) for line in lines])
        axis.set_ylim(len(lines) - 0.4, -0.6)
        axis.set_xlabel(unit, **_pale(theme))
        if len(series) > 1:
            figure.legend(loc="outside lower left", frameon=False, labelcolor=theme.ink, fontsize=8)
        return figure

    return draw_picture(title, caption, draw)


def difference_chart(pairs: Sequence[PairResult]) -> Picture:
    """Return the differences of pairs; one that is not significant is pale."""
    lines, titles = [], list(dict.fromkeys(pair.title for pair in pairs))
    for pair in pairs:
        found = pair.comparison.difference
        interval = Interval(found.difference, found.low, found.high, found.level)
        name = f"{pair.first} − {pair.second}"
        name = f"{pair.title}: {name}" if len(titles) > 1 else name
        lines.append(Line(name, [interval], not pair.comparison.significant))
    caption = "Gray: a difference that is not significant, by its interval or by its p."
    title = f"Difference of {titles[0]}" if len(titles) == 1 else "Differences"
    return interval_chart(title, lines, [""], "points", caption, with_zero=True)


# ---- calibration -----------------------------------------------------------------------------------------------------


def reliability_chart(result: Result, scored: Scored) -> Picture:
    """Return the accuracy of each bin of confidence, above the share of images in it."""
    error, fitted = scored.intervals["ece"], scored.temperature
    caption = (
        f"{result.name}: expected calibration error {error.estimate:.2%}, 95 % interval {error.low:.2%} to"
        f" {error.high:.2%}; a calibrated network would have {scored.values['ece_calibrated']:.2%}, and as much as this"
        f" one with a probability of {scored.values['calibration_p']:.2g}."
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
        upper.plot([0, 1], [0, 1], color=theme.ink, linewidth=1, linestyle=(0, (4, 3)))
        upper.set(xlim=(0, 1), ylim=(0, 1))
        upper.set_ylabel("accuracy", **_pale(theme))
        images = sum(each.images for each in filled)
        shares = [each.images / images for each in filled]
        lower.bar(left, shares, width, align="edge", color=theme.rest, edgecolor=theme.paper, linewidth=0.8)
        lower.set_ylabel("share", **_pale(theme))
        lower.set_xlabel("confidence of the predicted class", **_pale(theme))
        return figure

    return draw_picture(f"Reliability diagram of {result.name}", caption, draw)


# ---- classes ---------------------------------------------------------------------------------------------------------


def class_chart(result: Result, scored: Scored) -> Picture:
    """Return the recall of each class, sorted; of many classes as a curve, and bars of the lowest and the highest."""
    classes = sorted((each for each in scored.classification.classes if each.images), key=recall_rank)
    is_many, half = len(classes) > MOST_BARS, MOST_BARS // 2
    shown = [*classes[:half], *classes[-half:]] if is_many else classes
    places = [place + (is_many and place >= half) for place in range(len(shown))]  # a gap between the halves
    bars = f"the {half} lowest and {half} highest of {len(classes):,}" if is_many else f"{len(classes)}"
    caption = (
        f"{result.name}: recall of {bars} classes, with 95 % intervals. The line is the mean of all classes; those"
        " surely below it have the second color."
    )
    mean = scored.classification.mean_per_class

    def draw(theme: Theme) -> Figure:
        height = 0.8 + 0.2 * len(shown)
        figure = new_figure(theme, WIDTH, height + 1.6 * is_many, DPI)
        axes = figure.subplots(2, 1, height_ratios=(1.3, height)) if is_many else [figure.add_subplot()]
        axis = axes[-1]
        _prepare(axes[0], theme, result.name)
        style_axis(axis, theme)
        if is_many:
            _draw_curve(axes[0], theme, [each.hits / each.images for each in classes], mean)
            axis.text(0.02, half, f"{len(classes) - 2 * half:,} classes between", va="center", **_pale(theme))
        axis.grid(False, axis="y")
        for place, each in zip(places, shown, strict=True):
            interval = wilson(each.hits, each.images)
            # A class without a hit has a thin bar, too.
            axis.barh(place, max(interval.estimate, 0.006), 0.72, color=_class_color(each, scored, theme))
            axis.plot([interval.low, interval.high], [place] * 2, color=theme.ink, linewidth=0.9)
        axis.axvline(mean, color=theme.rest, linewidth=1, zorder=0.9)
        axis.set_yticks(places, [one_line(result.classes[each.label], 22) for each in shown])
        axis.set(xlim=(0, 1), ylim=(places[-1] + 0.6, -0.6))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.set_xlabel("recall", **_pale(theme))
        return figure

    return draw_picture(f"Recall of the classes of {result.name}", caption, draw)


def _draw_curve(axis: Axes, theme: Theme, recalls: Sequence[float], mean: float) -> None:
    """Draw the recall of all classes, sorted."""
    axis.fill_between(np.arange(len(recalls)), recalls, step="mid", color=theme.series[0], linewidth=0)
    axis.axhline(mean, color=theme.rest, linewidth=1)
    axis.set(xlim=(-0.5, len(recalls) - 0.5), ylim=(0, 1))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("classes by recall", **_pale(theme))
    axis.set_ylabel("recall", **_pale(theme))


def _pale(theme: Theme) -> dict[str, Any]:
    """Return the style of a label."""
    return {"color": theme.pale, "fontsize": 8}


def recall_rank(each: ClassScore) -> tuple[float, float]:
    """Return the sort key of a class; of equal recalls, more images sort lower below a half, and higher above it."""
    interval = wilson(each.hits, each.images)
    return interval.estimate, interval.low + interval.high


def _class_color(each: ClassScore, scored: Scored, theme: Theme) -> str:
    """Classes whose interval lies below the mean stand out."""
    is_low = wilson(each.hits, each.images).high < scored.classification.mean_per_class
    return theme.series[1] if is_low else theme.series[0]


# ---- confusion -------------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A confusion matrix to draw: named rows, columns of the same names."""

    names: Sequence[str]
    counts: np.ndarray
    images: np.ndarray
    """Of each row, also those predicted as a class without a column."""


def confusion_charts(result: Result, scored: Scored) -> list[Picture]:
    """Return the confusion matrix, with confused classes beside each other.

    Many classes have a matrix of groups of such neighbors, and one of the most confused classes.
    """
    confusion = scored.classification.confusion
    used = np.flatnonzero(confusion.sum(0) + confusion.sum(1))
    order = used[cluster(confusion[np.ix_(used, used)])]
    if len(order) <= MOST_NAMES:
        text = "a row for each class, a column for each prediction. Confused classes are neighbors."
        return [_matrix_chart(result, matrix_of(result, confusion, order), text)]
    text = (
        f"all {len(order):,} classes in {GROUPS} groups of neighbors, which are confused with each other. A row for"
        " each group, a column for that of the prediction. The class with the most mistakes names its group."
    )
    charts = [_matrix_chart(result, grouped(result, confusion, order), text)]
    if most := most_confused(scored):
        text = (
            f"the {len(most)} classes of the most frequent confusions, as counts of images. Predictions of other"
            " classes have no column."
        )
        labels = np.array(most)[cluster(confusion[np.ix_(most, most)])]
        charts.append(_matrix_chart(result, matrix_of(result, confusion, labels), text))
    return charts


def matrix_of(result: Result, confusion: np.ndarray, labels: np.ndarray) -> Matrix:
    """Return the matrix of some classes."""
    names = [result.classes[label] for label in labels]
    return Matrix(names, confusion[np.ix_(labels, labels)], confusion[labels].sum(1))


def grouped(result: Result, confusion: np.ndarray, order: np.ndarray) -> Matrix:
    """Return the matrix of groups of neighbors; each is named after its class with the most mistakes."""
    groups = np.array_split(order, GROUPS)
    starts = np.cumsum([0, *map(len, groups[:-1])])
    counts = np.add.reduceat(np.add.reduceat(confusion[np.ix_(order, order)], starts, 0), starts, 1)
    mistakes = confusion.sum(1) - confusion.diagonal()
    worst = [group[mistakes[group].argmax()] for group in groups]
    names = [
        one_line(result.classes[label], 16) + (f" +{len(group) - 1}" if len(group) > 1 else "")
        for label, group in zip(worst, groups, strict=True)
    ]
    return Matrix(names, counts, counts.sum(1))


def most_confused(scored: Scored) -> list[int]:
    """Return the classes of the most frequent confusions."""
    labels: list[int] = []
    for label, predicted, _ in confused_pairs(scored, CONFUSED**2):
        labels += [each for each in (label, predicted) if each not in labels]
    return labels[:CONFUSED]


def _matrix_chart(result: Result, matrix: Matrix, text: str) -> Picture:
    title, caption = f"Confusion matrix of {result.name}", f"{result.name}: {text}"
    return matrix_chart(title, caption, result.name, matrix, ("predicted", "class"))


def matrix_chart(title: str, caption: str, head: str, matrix: Matrix, labels: tuple[str, str]) -> Picture:
    """Return the counts of a matrix as shares of the images of each row; `labels` are of columns and rows."""
    shares = matrix.counts / np.maximum(matrix.images, 1)[:, None]
    count = len(matrix.names)

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, WIDTH, WIDTH, DPI)
        axis = figure.add_subplot()
        _prepare(axis, theme, head)
        axis.grid(False)
        # The square root keeps rare confusions visible beside the diagonal.
        axis.imshow(shares, cmap=heat(theme), norm=PowerNorm(0.5, 0, 1), interpolation="nearest", aspect="equal")
        axis.set_xlabel(labels[0], **_pale(theme))
        axis.set_ylabel(labels[1], **_pale(theme))
        names, size = [one_line(name, 22) for name in matrix.names], 7.5 if count <= 20 else 5.5
        axis.set_xticks(range(count), names, rotation=90, fontsize=size)
        axis.set_yticks(range(count), names, fontsize=size)
        if count <= MOST_COUNTS:
            for row, column in zip(*np.nonzero(matrix.counts), strict=True):
                ink = theme.paper if shares[row, column] > 0.25 else theme.ink
                number = f"{matrix.counts[row, column]:,}"
                axis.text(
                    column, row, number, ha="center", va="center", fontsize=6.5 if count <= 12 else 5.5, color=ink
                )
        return figure

    return draw_picture(title, caption, draw)


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
