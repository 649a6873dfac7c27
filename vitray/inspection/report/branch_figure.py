"""The figure of parallel branches: their likeness against chance, and the share of each in the updates."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitray.inspection.branches import PERMUTATIONS, BranchReport, Half, Likeness, compare_branches
from vitray.inspection.report.drawings import (
    DPI,
    Drawing,
    FigureResult,
    Table,
    file_name,
    prepare_axis,
    prepare_depth_axis,
)
from vitray.inspection.report.subjects import Subject
from vitray.plotting import Theme, new_figure

TITLES: dict[Half, str] = {"attn": "attention", "ffn": "feed-forward"}
ALPHA = 0.05
PROSE = (
    "Above: how alike the outputs of two branches of a level are, by linear CKA and by the mean cosine of the same"
    f" token. Marks are filled where fewer than {ALPHA:.0%} of {PERMUTATIONS} permutations of the images are as far"
    " from chance, not corrected for the number of levels; the pale marks are chance, the mean of the permutations."
    " Below: the share of the level's update that each branch makes, with one standard deviation over images."
)


def branches_figure(subjects: Sequence[Subject]) -> FigureResult:
    """Return the likeness and the shares of the branches of parallel levels."""
    prose, drawings = PROSE, []
    pairs: list[Sequence[Any]] = [["model", "level", "half", "first", "second", "measure", "value", "chance", "p"]]
    shares: list[Sequence[Any]] = [["model", "level", "half", "branch", "share", "sd_over_images"]]
    for subject in subjects:
        if reason := why_not(subject):
            prose += f" {reason}"
            continue
        report = compare_branches(subject.vit, subject.batch())
        drawings.append(_drawing(subject, report))
        for pair in report.pairs:
            place = [subject.name, pair.level, pair.half, pair.first, pair.second]
            pairs += [[*place, "cka", *pair.cka], [*place, "cosine", *pair.cosine]]
        shares += [[subject.name, *each] for each in report.shares]
    tables = [Table("branch_likeness", pairs), Table("branch_shares", shares)] if drawings else []
    return FigureResult("branches", "Parallel branches", prose, drawings, tables)


def why_not(subject: Subject) -> str | None:
    """Return the reason why the branches of a network cannot be compared, or None."""
    assert subject.images is not None
    if subject.vit.model.shape.branches < 2:
        return f"The levels of {subject.name} have one branch each, so there is nothing to compare."
    if len(subject.images) < 4:
        return f"Likeness needs at least 4 images, and {subject.name} was given {len(subject.images)}."
    return None


def _drawing(subject: Subject, report: BranchReport) -> Drawing:
    assert subject.images is not None
    caption = f"{subject.name}: {len(subject.images):,} images."

    def draw(theme: Theme) -> Figure:
        figure = new_figure(theme, 7.4, 5.0, DPI)
        axes = figure.subplots(2, 2, sharex=True, sharey="row")
        for (half, title), (above, below) in zip(TITLES.items(), axes.T, strict=True):
            prepare_axis(above, theme, f"{subject.name}, {title}", "likeness" if half == "attn" else "")
            prepare_axis(below, theme, "", "share of the update" if half == "attn" else "")
            prepare_depth_axis(below, theme)
            _draw_likeness(above, report, half, theme)
            _draw_shares(below, report, half, theme)
        for axis in axes[:, 1]:
            axis.legend(fontsize=7.5, frameon=False, labelcolor=theme.ink)
        return figure

    return Drawing(file_name("branches", subject.name), f"Branches of {subject.name}", caption, draw)


def _draw_likeness(axis: Axes, report: BranchReport, half: Half, theme: Theme) -> None:
    pairs = [pair for pair in report.pairs if pair.half == half]
    measures: dict[str, list[tuple[int, Likeness]]] = {
        "CKA": [(pair.level, pair.cka) for pair in pairs],
        "cosine": [(pair.level, pair.cosine) for pair in pairs],
    }
    for (name, values), colour, marker, shift in zip(
        measures.items(), theme.series, ("o", "s"), (-0.12, 0.12), strict=False
    ):
        places = [level + shift for level, _ in values]
        axis.plot(places, [each.chance for _, each in values], "_", color=colour, alpha=0.45, markersize=6)
        faces = [colour if each.p_value <= ALPHA else theme.paper for _, each in values]
        axis.scatter(
            places, [each.value for _, each in values], 16, faces, marker=marker, edgecolors=colour, linewidths=0.9
        )
        axis.plot([], [], marker, color=colour, markersize=4, label=name)
    axis.axhline(0, color=theme.rest, linewidth=0.8, zorder=0.9)


def _draw_shares(axis: Axes, report: BranchReport, half: Half, theme: Theme) -> None:
    of_half = [each for each in report.shares if each.half == half]
    branches = sorted({each.branch for each in of_half})
    for branch in branches:
        own, colour = (
            [each for each in of_half if each.branch == branch],
            theme.series[(branch - 1) % len(theme.series)],
        )
        places = [each.level + (branch - (len(branches) + 1) / 2) * 0.15 for each in own]
        axis.errorbar(
            places,
            [each.share for each in own],
            [each.deviation for each in own],
            color=colour,
            linewidth=1.2,
            elinewidth=0.7,
            marker="o",
            markersize=3,
            label=f"branch {branch}",
        )
    axis.axhline(1 / len(branches), color=theme.pale, linewidth=1, linestyle=(0, (4, 3)))
