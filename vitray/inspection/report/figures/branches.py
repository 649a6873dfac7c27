"""Parallel branches: their likeness against chance, and the share of each in the updates."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitray.inspection.branches import PERMUTATIONS, BranchReport, BranchSums, Half, branch_report, branch_sums
from vitray.inspection.report.drawings import DPI, FigureResult, Rows, Table, add_legend, number_levels, prepare
from vitray.inspection.report.subjects import Subject, View
from vitray.inspection.similarity import FEWEST_IMAGES
from vitray.pages.plotting import Theme, new_figure

TITLES: dict[Half, str] = {"attn": "attention", "ffn": "feed-forward"}
ALPHA = 0.05
PROSE = (
    "Above: how alike the outputs of two branches of a level are, by linear CKA and by the mean cosine of the same"
    f" token. Marks are filled where fewer than {ALPHA:.0%} of {PERMUTATIONS} permutations of the images are as far"
    " from chance, not corrected for the number of levels; the pale marks are chance, the mean of the permutations."
    " Below: the share of the level's update that each branch makes, with one standard deviation over images."
)


def measure(view: View) -> BranchSums:
    """Return the sums of a chunk, by level and half."""
    return branch_sums(view.vit, view.images)


def make(subjects: Sequence[Subject], result: FigureResult) -> FigureResult:
    """Return the result with a drawing of each network with parallel levels, and two tables of all."""
    pairs: Rows = [["model", "level", "half", "first", "second", "measure", "value", "chance", "p"]]
    shares: Rows = [["model", "level", "half", "branch", "share", "sd_over_images"]]
    for subject in subjects:
        sums = subject.measured["branches"]
        if subject.vit.model.shape.branches < 2:
            reason = f"The levels of {subject.name} have one branch each, so there is nothing to compare."
            result = result.without(reason)
        elif not sums:
            result = result.without(f"Likeness needs at least {FEWEST_IMAGES} images.")
        else:
            report = branch_report(sums)
            caption = f"{subject.over(sum(each[0][0].shares.shape[1] for each in sums))}."
            result.add(subject.name, "Branches", caption, partial(_draw, report))
            for pair in report.pairs:
                place = [subject.name, pair.level, pair.half, pair.first, pair.second]
                pairs += [[*place, "cka", *pair.cka], [*place, "cosine", *pair.cosine]]
            shares += [[subject.name, *each] for each in report.shares]
    if result.drawings:
        result.tables.extend((Table("branch_likeness", pairs), Table("branch_shares", shares)))
    return result


def _draw(report: BranchReport, theme: Theme, title: str) -> Figure:
    figure = new_figure(theme, 7.4, 5.0, DPI)
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    for (half, name), (above, below) in zip(TITLES.items(), axes.T, strict=True):
        is_first = half == "attn"
        prepare(above, theme, f"{title}, {name}", "likeness" if is_first else "")
        prepare(below, theme, "", "share of the update" if is_first else "")
        number_levels(below, theme, "level")
        _draw_likeness(above, report, half, theme)
        _draw_shares(below, report, half, theme)
    for axis in axes[:, 1]:
        add_legend(axis, theme)
    return figure


def _draw_likeness(axis: Axes, report: BranchReport, half: Half, theme: Theme) -> None:
    pairs = [pair for pair in report.pairs if pair.half == half]
    measures = {"CKA": [pair.cka for pair in pairs], "cosine": [pair.cosine for pair in pairs]}
    for (name, values), color, marker, shift in zip(
        measures.items(), theme.series, ("o", "s"), (-0.12, 0.12), strict=False
    ):
        places = [pair.level + shift for pair in pairs]
        axis.plot(places, [each.chance for each in values], "_", color=color, alpha=0.7, markersize=8)
        faces = [color if each.p_value <= ALPHA else theme.paper for each in values]
        axis.scatter(
            places, [each.value for each in values], 16, faces, marker=marker, edgecolors=color, linewidths=0.9
        )
        axis.plot([], [], marker, color=color, markersize=4, label=name)
    axis.axhline(0, color=theme.rest, linewidth=0.8, zorder=0.9)


def _draw_shares(axis: Axes, report: BranchReport, half: Half, theme: Theme) -> None:
    of_half = [each for each in report.shares if each.half == half]
    branches = sorted({each.branch for each in of_half})
    for branch in branches:
        own = [each for each in of_half if each.branch == branch]
        axis.errorbar(
            [each.level + (branch - (len(branches) + 1) / 2) * 0.15 for each in own],
            [each.share for each in own],
            [each.deviation for each in own],
            color=theme.series[(branch - 1) % len(theme.series)],
            linewidth=1.2,
            elinewidth=0.7,
            marker="o",
            markersize=3,
            label=f"branch {branch}",
        )
    axis.axhline(1 / len(branches), color=theme.pale, linewidth=1, linestyle=(0, (4, 3)))
