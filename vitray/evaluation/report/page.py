"""The page of an evaluation: scores with intervals, differences, calibration, classes, confusion and mistakes."""

from collections.abc import Sequence

from vitray.evaluation.intervals import Interval, wilson
from vitray.evaluation.probes import PROBES
from vitray.evaluation.report.charts import (
    class_chart,
    confused_pairs,
    confusion_charts,
    difference_chart,
    reliability_chart,
)
from vitray.evaluation.report.galleries import differing, gallery, mistakes
from vitray.evaluation.report.results import Evaluation, PairResult, Result, Scored
from vitray.evaluation.report.robustness import errors_of
from vitray.evaluation.report.texts import TITLES, ScoreText, fixed_titles, score_rows, score_text
from vitray.pages.files import list_of_files
from vitray.pages.markup import Column, Content, Html, command_box, fact_list, illustrated, joined, table, tag
from vitray.pages.shell import PageSection, html_page

FILES = {
    "results.json": "all numbers of this page",
    "scores.csv": "a row for each network",
    "classes.csv": "a row for each class",
    "predictions.csv": "a row for each image",
}
MOST_LEFT_OUT = 100
# The most pairs of networks whose images are shown.
MOST_PAIRS = 3
# The scores beside the top-1 of a single network, before those of probes.
BESIDE = ("top5", "labels_top1", "mean_per_class", "nll", "ece")
Heads = Sequence[tuple[Result, Scored]]


def render(evaluation: Evaluation) -> str:
    """Return the page."""
    heads = [(result, result.scored) for result in evaluation.results if result.scored is not None]
    parts = [
        _scores(evaluation),
        _differences(evaluation),
        _corruptions(evaluation),
        *([_calibration(heads), _classes(heads), _confusion(heads), _mistakes(evaluation, heads)] if heads else []),
        _left_out(evaluation),
        PageSection("origin", "How to reproduce", _origin(evaluation)),
    ]
    names = ", ".join(result.name for result in evaluation.results)
    title = f"{names} on {evaluation.images.name}"
    sections = [part for part in parts if part is not None]
    return html_page(title, _headline(evaluation), sections, list_of_files(FILES))


def _headline(evaluation: Evaluation) -> Html:
    images, results = evaluation.images, evaluation.results
    outputs = results[0].outputs
    counted = f"{len(outputs.labels):,} images of {len(images.classes):,} classes, each counted once"
    lede = f"{counted}; {len(outputs.left_out):,} left out." if outputs.left_out else f"{counted}."
    title = " against ".join(result.name for result in results) if len(results) < 3 else f"{len(results)} networks"
    return tag(
        "header",
        tag("p.eyebrow", f"Evaluation on {images.name}, {images.split}"),
        tag("h1", title),
        tag("p.lede", lede),
        tag("div.hero", _best(evaluation), _beside(evaluation)),
    )


def _best(evaluation: Evaluation) -> Html:
    scored = [(result.name, top1) for result in evaluation.results if (top1 := _top1(result))]
    if not scored:
        return tag(
            "div", tag("p", "No network predicts the classes of these images; the table below has other scores.")
        )
    name, top1 = max(scored, key=lambda pair: pair[1].estimate)
    is_alone, has_labels = len(evaluation.results) == 1, any(result.scored for result in evaluation.results)
    title = "top-1" if has_labels else TITLES["labels_top1"]
    return tag(
        "div",
        tag("p.big", f"{100 * top1.estimate:.2f} %", tag("small", title if is_alone else f"highest {title}")),
        None if is_alone else tag("p", tag("strong", name)),
        tag("p", f"95 % interval {100 * top1.low:.2f} to {100 * top1.high:.2f} %, by Wilson."),
    )


def _top1(result: Result) -> Interval | None:
    """Return the top-1 of a network: by the labels of the images, or else by the label set."""
    if result.scored is not None:
        return result.scored.intervals["top1"]
    scored = result.by_labels
    return None if scored is None else wilson(scored.hits1, scored.images)


def _beside(evaluation: Evaluation) -> Html:
    """Return other scores of a single network, or the top-1 of several, with the verdict on two."""
    results = evaluation.results
    if len(results) == 1:
        beside = {*BESIDE, *(probe.headline for probe in PROBES.values() if probe.in_percent)}
        texts = {title: score_text(results[0], name) for name, title in fixed_titles().items() if name in beside}
    else:
        texts = {each.name: score_text(each, "top1") or score_text(each, "labels_top1") for each in results}
    shown = {title: _cell(text) for title, text in texts.items() if text or len(results) > 1}
    verdict = tag("p.pale", _verdict(evaluation.pairs[0])) if len(evaluation.pairs) == 1 else None
    return tag("div", fact_list(shown), verdict)


def _cell(text: ScoreText | None) -> Content:
    """Return a score of which neither number nor interval breaks at the end of a line."""
    if text is None:
        return "–"
    value, spread = text.value.replace(" %", "\u00a0%"), text.spread.replace(" ", "\u00a0")
    return joined(value, " ", tag("small.pale", spread)) if spread else value


def _verdict(pair: PairResult) -> str:
    return f"{pair.first} against {pair.second}: {pair.comparison.sentence()}"


def _scores(evaluation: Evaluation) -> PageSection:
    results = evaluation.results
    columns = [Column("score"), *(Column(result.name, True) for result in results)]
    texts = score_rows(results)
    rows = [[title, *map(_cell, line)] for title, line in texts.items()]
    prose = "Beside a score: its 95 % interval, by Wilson for proportions and by a bootstrap over images for the rest."
    if any(text and text.spread.startswith("±") for line in texts.values() for text in line):
        prose += " After ±: the standard deviation over three draws of training images."
    return PageSection("scores", "Scores", joined(tag("p", prose), table("Scores", columns, rows)))


# ---- differences -----------------------------------------------------------------------------------------------------


def _differences(evaluation: Evaluation) -> PageSection | None:
    pairs, results = evaluation.pairs, {result.name: result for result in evaluation.results}
    if not pairs:
        return None
    correction = f", not corrected for {len(pairs)} comparisons" if len(pairs) > 1 else ""
    title = TITLES[pairs[0].score]
    prose = f"The first network's {title} minus the second's, paired by image. Each interval is at 95 %{correction}."
    columns = [Column("first"), Column("second"), Column("difference, points", True), Column("95 % interval", True)]
    columns += [Column("only first right", True), Column("only second right", True), Column("McNemar p", True)]
    parts: list[Content] = [illustrated([prose], [difference_chart(pairs).picture()])]
    parts += [table("Differences", columns, [_pair_row(pair) for pair in pairs])]
    parts += [*(tag("p", _verdict(pair)) for pair in pairs), _agreement(evaluation)]
    for pair in pairs[:MOST_PAIRS] if evaluation.agreement is not None else ():
        for right, wrong in ((pair.first, pair.second), (pair.second, pair.first)):
            if examples := differing(results[right], results[wrong]):
                parts += [tag("h3", f"{right} is right, {wrong} is wrong"), gallery(evaluation.images, examples)]
    return PageSection("differences", "Differences", joined(*parts))


def _pair_row(pair: PairResult) -> list[Content]:
    difference, test = pair.comparison.difference, pair.comparison.mcnemar
    interval = f"{100 * difference.low:+.2f} to {100 * difference.high:+.2f}"
    counts = [f"{test.only_a:,}", f"{test.only_b:,}", f"{test.p_value:.2g}"]
    return [pair.first, pair.second, f"{100 * difference.difference:+.2f}", interval, *counts]


def _agreement(evaluation: Evaluation) -> Html | None:
    if evaluation.agreement is None:
        return None
    names = [result.name for result in evaluation.results if result.scored is not None]
    if len(names) == 2:
        return tag("p", f"They predict the same class for {evaluation.agreement[0, 1]:.1%} of the images.")
    lines = zip(names, evaluation.agreement, strict=True)
    rows = [[name, *(f"{share:.1%}" for share in shares)] for name, shares in lines]
    columns = [Column("same prediction"), *(Column(name, True) for name in names)]
    return table("Agreement", columns, rows)


# ---- corrupted images ------------------------------------------------------------------------------------------------


def _corruptions(evaluation: Evaluation) -> PageSection | None:
    tables = [(result.name, errors_of(result.more)) for result in evaluation.results]
    severities = sorted({severity for _, errors in tables for row in errors.values() for severity in row})
    if not severities:
        return None
    columns = [Column("network"), Column("corruption"), *(Column(f"severity {at}", True) for at in severities)]
    rows: list[list[Content]] = [
        [name, kind.replace("_", " "), *(f"{row[severity]:.1%}" for severity in severities)]
        for name, errors in tables
        for kind, row in errors.items()
    ]
    images = next(each.more["corruption_images"] for each in evaluation.results if "corruption_images" in each.more)
    prose = f"Top-1 errors. Each is of {images:,} images, and has no interval of its own."
    return PageSection("corruptions", "Corruptions", joined(tag("p", prose), table("Corruptions", columns, rows)))


# ---- each network ----------------------------------------------------------------------------------------------------


def _calibration(heads: Heads) -> PageSection:
    prose = (
        "Accuracy of the images in each bin of confidence; on the dashed line both are equal. Thin lines are 95 %"
        " intervals. The lower bars are the share of images in each bin."
    )
    pictures = [reliability_chart(result, scored).picture() for result, scored in heads]
    return PageSection("calibration", "Calibration", illustrated([prose], pictures))


def _classes(heads: Heads) -> PageSection:
    pictures = [class_chart(result, scored).picture() for result, scored in heads]
    columns = [Column("network"), Column("class"), *(Column(head, True) for head in ("images", "recall", "precision"))]
    rows: list[list[Content]] = []
    for result, scored in heads:
        for each in sorted(scored.classification.classes, key=lambda each: (each.recall is None, each.recall or 0)):
            shares = ["–" if share is None else f"{share:.1%}" for share in (each.recall, each.precision)]
            rows.append([result.name, result.classes[each.label], f"{each.images:,}", *shares])
    whole = tag("details", tag("summary", f"All {len(rows):,} rows"), table("Classes", columns, rows))
    return PageSection("classes", "Classes", joined(illustrated([], pictures), whole))


def _confusion(heads: Heads) -> PageSection:
    pictures = [chart.picture() for result, scored in heads for chart in confusion_charts(result, scored)]
    columns = [Column("network"), Column("class"), Column("predicted as"), Column("images", True)]
    rows: list[list[Content]] = [
        [result.name, result.classes[label], result.classes[predicted], f"{count:,}"]
        for result, scored in heads
        for label, predicted, count in confused_pairs(scored)
    ]
    pairs = joined(tag("h3", "Most frequent confusions"), table("Confusions", columns, rows)) if rows else None
    return PageSection("confusion", "Confusion", joined(illustrated([], pictures), pairs))


def _mistakes(evaluation: Evaluation, heads: Heads) -> PageSection | None:
    parts: list[Content] = []
    for result, scored in heads:
        if examples := mistakes(result, scored):
            title = tag("h3", result.name) if len(heads) > 1 else None
            parts += [title, gallery(evaluation.images, examples)]
    if not parts:
        return None
    prose = tag("p", "The images whose wrong prediction has the highest probability, with their true class first.")
    return PageSection("mistakes", "Most confident mistakes", joined(prose, *parts))


# ---- the rest --------------------------------------------------------------------------------------------------------


def _left_out(evaluation: Evaluation) -> PageSection | None:
    names = evaluation.results[0].outputs.left_out
    if not names:
        return None
    more = f"\nand {len(names) - MOST_LEFT_OUT:,} more" if len(names) > MOST_LEFT_OUT else ""
    prose = "These images could not be used. No score counts them."
    text = "\n".join(names[:MOST_LEFT_OUT]) + more
    return PageSection("left-out", "Images left out", joined(tag("p", prose), tag("pre", text)))


def _origin(evaluation: Evaluation) -> Html:
    images = evaluation.images
    facts: dict[str, Content] = {"images": f"{images.url}, {images.split}", "identity of the images": images.identity}
    for result in evaluation.results:
        spec = result.spec
        size = " x ".join(map(str, spec.size))
        facts[result.name] = (
            f"{spec.url}: {spec.network} at {size}, {spec.crop}, {spec.precision}; weights {spec.identity}"
        )
    return joined(command_box(evaluation.command), fact_list(facts))
