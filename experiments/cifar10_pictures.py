"""The pictures of docs/results.md from cifar10_results.json: a mean and a band over the seeds of each curve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10_differences import interval_of
from cifar10_results import DOCS, LABELS_PICTURE, Measured, label_curves, measured
from cifar10_texts import THINGS, Thing
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitray.pages.plotting import LIGHT, new_figure, style_axis, to_png
from vitray.sweeps.report.drawing import Label, label_ends

IMAGES = DOCS / "images"


def draw_all(records: Mapping[str, Any], images: Path = IMAGES) -> None:
    """Write a picture for each thing and for the labels, if they have curves of three seeds."""
    for thing in THINGS:
        if panels := panels_of(thing, records):
            (images / thing.picture).write_bytes(to_png(draw(panels)))
    if curves := label_curves(records):
        (images / LABELS_PICTURE).write_bytes(to_png(draw_label_curves(curves)))


def panels_of(thing: Thing, records: Mapping[str, Any]) -> dict[str, dict[str, Measured]]:
    """Return {title of a panel: {label: cell}}: the routes of stems apart, all other cells together."""
    panels: dict[str, dict[str, Measured]] = {}
    for label, cell in measured(thing, records).items():
        name, _, route = label.partition(", ")
        if cell.is_drawn:
            panels.setdefault(route, {})[name] = cell
    return panels


def draw(panels: Mapping[str, Mapping[str, Measured]]) -> Figure:
    """Return a figure with a panel for each route, on one scale."""
    figure = new_figure(LIGHT, 1 + 3.6 * len(panels), 3.2)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    labels = []
    for axis, (title, cells) in zip(axes, panels.items(), strict=True):
        style_axis(axis, LIGHT)
        axis.set_title(title or "top-1 of test, %", loc="left", color=LIGHT.ink, fontsize=9.5)
        axis.set_xlabel("step", color=LIGHT.pale, fontsize=8)
        axis.margins(x=0.02)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        labels.append([draw_cell(axis, *cell, LIGHT.series[place]) for place, cell in enumerate(cells.items())])
    for axis, own in zip(axes, labels, strict=True):  # after all panels, as it fixes their common scale
        label_ends(figure, axis, own, LIGHT)
    if any(panels):
        axes[0].set_ylabel("top-1 of test, %", color=LIGHT.pale, fontsize=8)
    return figure


def draw_cell(axis: Axes, label: str, cell: Measured, color: str) -> Label:
    """Draw the learning curve of a cell over the steps that all of its seeds have, and return the label of its end."""
    curves = [dict(map(tuple, trial["curve"])) for trial in cell.trials.values()]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return draw_curve(axis, label, {step: [curve[step] for curve in curves] for step in steps}, color)


def draw_label_curves(curves: Mapping[str, Mapping[float, Sequence[float]]]) -> Figure:
    """Return a figure of the accuracy by the share of labels."""
    figure = new_figure(LIGHT, 4.6, 3.2)
    axis = figure.subplots()
    style_axis(axis, LIGHT)
    axis.set_title("linear probe, top-1 of test, %", loc="left", color=LIGHT.ink, fontsize=9.5)
    axis.set_xlabel("% of labels", color=LIGHT.pale, fontsize=8)
    axis.set_xscale("log")
    shares = [100 * share for share in next(iter(curves.values()))]
    axis.set_xticks(shares, [f"{share:g}" for share in shares])
    axis.minorticks_off()
    labels = [
        draw_curve(axis, route, {100 * share: scores for share, scores in curve.items()}, LIGHT.series[place])
        for place, (route, curve) in enumerate(curves.items())
    ]
    label_ends(figure, axis, labels, LIGHT)
    return figure


def draw_curve(axis: Axes, label: str, scores: Mapping[float, Sequence[float]], color: str) -> Label:
    """Draw means over seeds in percent with Student's 95 % interval, and return the label of the end."""
    places, intervals = list(scores), [interval_of([100 * score for score in each]) for each in scores.values()]
    axis.plot(places, [each.mean for each in intervals], color=color, linewidth=1.5, marker="o", markersize=3)
    low, high = [each.low for each in intervals], [each.high for each in intervals]
    axis.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    return Label(places[-1], intervals[-1].mean, label, color)
