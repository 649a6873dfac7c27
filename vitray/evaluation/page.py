"""The folder of an evaluation: the page, and its numbers as JSON and CSV.

The page has scores with intervals, differences, calibration, classes, confusion and mistakes.
"""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitray.evaluation.charts import (
    class_chart,
    confused_pairs,
    confusion_charts,
    difference_chart,
    reliability_chart,
)
from vitray.evaluation.corruptions import errors_of
from vitray.evaluation.labels import (
    Several,
    label_charts,
    label_classes,
    label_classes_csv,
    label_details,
    label_mistakes,
    label_predictions_csv,
)
from vitray.evaluation.results import Evaluation, PairResult, Result, Scored
from vitray.evaluation.texts import TITLES, ScoreText, fixed_titles, score_rows, score_text
from vitray.inference.images import ImageSet
from vitray.metrics.probes import PROBES
from vitray.pages.files import csv_text, write_files
from vitray.pages.rendering import Column, PageSection, Table, render_page

MOST_LEFT_OUT = 100
# The most pairs of networks whose images are shown.
MOST_PAIRS = 3
# Images of a gallery of differences.
MOST_DIFFERING = 12
# Pixels of a thumbnail's longer side; images below the second are shown enlarged, with their pixels visible.
THUMBNAIL, TINY = 192, 96
# The scores beside the top-1 of a single network, before those of probes.
BESIDE = ("top5", "labels_top1", "mean_per_class", "nll", "ece", "f1_micro", "f1_macro", "f1_macro_chosen")
Heads = Sequence[tuple[Result, Scored]]


def write_evaluation(evaluation: Evaluation, folder: str) -> str:
    """Write or replace the files of an evaluation and return the address of the page."""
    files = {
        "results.json": json.dumps(_details(evaluation), indent=1) + "\n",
        "scores.csv": scores_csv(evaluation),
        "classes.csv": classes_csv(evaluation),
        "predictions.csv": predictions_csv(evaluation),
    }
    return write_files(folder, files, render(evaluation))


def _details(evaluation: Evaluation) -> dict[str, Any]:
    """Everything on the command line's JSON, and the classes, bins and confusion of each network."""
    details = []
    for result in evaluation.results:
        detail: dict[str, Any] = result.flat() | {"left_out_images": list(result.outputs.left_out)}
        if result.scored is not None:
            whole = result.scored.classification
            detail["classes"] = [{"class": result.classes[each.label], **each._asdict()} for each in whole.classes]
            detail["reliability"] = [each._asdict() for each in result.scored.bins]
            places = whole.confusion.nonzero()
            triples = zip(*(part.tolist() for part in (*places, whole.confusion[places])), strict=True)
            detail["confusion"] = [list(triple) for triple in triples]
        if result.several is not None:
            detail |= label_details(result, result.several)
        details.append(detail)
    return evaluation.flat() | {"command": evaluation.command, "details": details}


def scores_csv(evaluation: Evaluation) -> str:
    """Return a row for each network."""
    rows = [result.flat() for result in evaluation.results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text([names, *([row.get(name) for name in names] for row in rows)])


def classes_csv(evaluation: Evaluation) -> str:
    """Return a row for each class and network."""
    rows: list[Sequence[Any]] = [["model", "class", "images", "hits", "predicted", "recall", "precision"]]
    if evaluation.images.labels == "several":
        return label_classes_csv([(result, result.several) for result in evaluation.results if result.several])
    for result in evaluation.results:
        for each in result.scored.classification.classes if result.scored else ():
            numbers = [each.images, each.hits, each.predicted, each.recall, each.precision]
            rows.append([result.name, result.classes[each.label], *numbers])
    return csv_text(rows)


def predictions_csv(evaluation: Evaluation) -> str:
    """Return a row for each image and network."""
    if evaluation.images.labels == "several":
        return label_predictions_csv([(result, result.several) for result in evaluation.results if result.several])
    rows: list[Sequence[Any]] = [["model", "image", "label", "predicted", "confidence", "rank_of_label"]]
    for result in evaluation.results:
        if result.scored is None:
            continue
        whole, classes = result.scored.classification, result.classes
        arrays = (result.scored.labels, whole.predictions, whole.confidences, whole.ranks)
        columns = zip(result.outputs.keys, *(array.tolist() for array in arrays), strict=True)
        rows += [[result.name, key, classes[a], classes[b], f"{p:.6f}", rank] for key, a, b, p, rank in columns]
    return csv_text(rows)


# ---- pictures of images ----------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """An image with lines of text below it."""

    row: int
    """The number of the image in its set."""
    key: str
    lines: tuple[str, str]
    """The class, and the prediction."""


Gallery = list[tuple[Example, bytes, bool]]
"""The pictures of examples as JPEG, and whether their pixels are shown enlarged."""


def mistakes(result: Result, scored: Scored) -> list[Example]:
    """Return the most confident mistakes of a network."""
    classes = result.classes
    return [
        Example(
            int(result.outputs.rows[each.row]),
            result.outputs.keys[each.row],
            (classes[each.label], f"predicted {classes[each.predicted]}, {each.probability:.0%}"),
        )
        for each in scored.classification.mistakes
    ]


def differing(right: Result, wrong: Result) -> list[Example]:
    """Return images that only the first network has right, the most confident mistakes of the second first."""
    assert right.scored is not None
    assert wrong.scored is not None
    whole, classes, labels = wrong.scored.classification, wrong.classes, wrong.scored.labels
    rows = np.flatnonzero(right.scored.hits & ~wrong.scored.hits)
    rows = rows[np.argsort(-whole.confidences[rows], kind="stable")[:MOST_DIFFERING]]
    return [
        Example(
            int(wrong.outputs.rows[row]),
            wrong.outputs.keys[row],
            (
                classes[labels[row]],
                f"{wrong.name}: {classes[whole.predictions[row]]}, {whole.confidences[row]:.0%}",
            ),
        )
        for row in rows.tolist()
    ]


def gallery(images: ImageSet, examples: Sequence[Example]) -> Gallery:
    """Return the pictures of examples."""
    places, thumbnails = sorted({example.row for example in examples}), {}
    for place, encoded in zip(places, images.read(places), strict=True):
        image = Image.fromarray(encoded.pixels())
        is_tiny = max(image.size) <= TINY
        image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        image.save(content := io.BytesIO(), "JPEG", quality=88)
        thumbnails[place] = content.getvalue(), is_tiny
    return [(example, *thumbnails[example.row]) for example in examples]


# ---- the page --------------------------------------------------------------------------------------------------------


def render(evaluation: Evaluation) -> str:
    """Return the page."""
    images, results = evaluation.images, evaluation.results
    names, outputs = [result.name for result in results], results[0].outputs
    heads = [(result, result.scored) for result in results if result.scored is not None]
    several = [(result, result.several) for result in results if result.several is not None]
    counted = f"{len(outputs.labels):,} images of {len(images.classes):,} classes, each counted once"
    left_out = "\n".join(outputs.left_out[:MOST_LEFT_OUT])
    if len(outputs.left_out) > MOST_LEFT_OUT:
        left_out += f"\nand {len(outputs.left_out) - MOST_LEFT_OUT:,} more"
    values = {
        "title": f"{', '.join(names)} on {images.name}",
        "eyebrow": f"Evaluation on {images.name}, {images.split}",
        "heading": " against ".join(names) if len(names) < 3 else f"{len(names)} networks",
        "lede": f"{counted}; {len(outputs.left_out):,} left out." if outputs.left_out else f"{counted}.",
        "best": _best(evaluation),
        "beside": _beside(evaluation),
        "verdict": evaluation.verdict(),
    }
    sections = [
        PageSection("scores", "Scores", _scores(results)),
        PageSection("differences", "Differences", _differences(evaluation)),
        PageSection("corruptions", "Corruptions", _corruptions(results)),
        PageSection("calibration", "Calibration", [reliability_chart(*head) for head in heads]),
        PageSection("classes", "Classes", _classes(heads) or label_classes(several)),
        PageSection("confusion", "Confusion", _confusion(heads)),
        PageSection(
            "together", "Labels that come together", [each for pair in several for each in label_charts(*pair)]
        ),
        PageSection("mistakes", "Most confident mistakes", _mistakes(evaluation, heads, several)),
        PageSection("left-out", "Images left out", left_out),
        PageSection("origin", "How to reproduce", _origin(evaluation)),
    ]
    return render_page("evaluate.html", values, sections)


def _best(evaluation: Evaluation) -> Mapping[str, str] | None:
    """Return the highest of the main scores as text; None where no network predicts the classes."""
    results = evaluation.results
    scored = [(result.name, *result.main) for result in results if result.main]
    if not scored:
        return None
    name, score, main = max(scored, key=lambda each: each[2].estimate)
    title = TITLES[score]
    return {
        "score": f"{100 * main.estimate:.2f} %",
        "title": title if len(results) == 1 else f"highest {title}",
        "name": "" if len(results) == 1 else name,
        "interval": f"{100 * main.low:.2f} to {100 * main.high:.2f}",
        "how": "a bootstrap over images" if score == "map" else "Wilson",
    }


def _beside(evaluation: Evaluation) -> Mapping[str, ScoreText | None]:
    """Return other scores of a single network, or the main score of each of several."""
    results = evaluation.results
    if len(results) == 1:
        beside = {*BESIDE, *(name for probe in PROBES.values() if probe.in_percent for name in probe.headlines)}
        texts = {title: score_text(results[0], name) for name, title in fixed_titles().items() if name in beside}
        return {title: text for title, text in texts.items() if text}
    return {each.name: score_text(each, each.main[0]) if each.main else None for each in results}


def _scores(results: Sequence[Result]) -> Mapping[str, Any]:
    columns = [Column("score"), *(Column(result.name, True) for result in results)]
    texts = score_rows(results)
    has_draws = any(text and text.spread.startswith("±") for line in texts.values() for text in line)
    rows = [[title, *line] for title, line in texts.items()]
    return {"has_draws": has_draws, "table": Table("Scores", columns, rows)}


# ---- differences -----------------------------------------------------------------------------------------------------


def _differences(evaluation: Evaluation) -> Mapping[str, Any] | None:
    pairs, results = evaluation.pairs, {result.name: result for result in evaluation.results}
    if not pairs:
        return None
    correction = f", corrected for {len(pairs)} comparisons, which the intervals are not" if len(pairs) > 1 else ""
    has_maps = any(pair.comparison.mcnemar is None for pair in pairs)
    prose = (
        "The first network's score minus the second's, paired by image. Each interval is at 95 %, and p is"
        f" {'that of the bootstrap' if has_maps else 'that of McNemar'}{correction}."
    )
    columns = [Column("first"), Column("second"), Column("score"), Column("difference, points", True)]
    columns += [Column("95 % interval", True), Column("only first right", True), Column("only second right", True)]
    columns += [Column("p", True), Column("images to tell it", True)]
    compared = [
        (results[right], results[wrong])
        for pair in [pair for pair in pairs if pair.score == "top1"][:MOST_PAIRS]
        for right, wrong in ((pair.first, pair.second), (pair.second, pair.first))
    ]
    return {
        "prose": prose,
        "chart": difference_chart(pairs),
        "table": Table("Differences", columns, [_pair_row(pair) for pair in pairs]),
        "verdicts": [pair.sentence() for pair in pairs],
        **_agreement(evaluation),
        "galleries": [
            (right.name, wrong.name, gallery(evaluation.images, examples))
            for right, wrong in compared
            if (examples := differing(right, wrong))
        ],
    }


def _pair_row(pair: PairResult) -> list[str]:
    difference, test = pair.comparison.difference, pair.comparison.mcnemar
    interval = f"{100 * difference.low:+.2f} to {100 * difference.high:+.2f}"
    counts = ["–", "–"] if test is None else [f"{test.only_a:,}", f"{test.only_b:,}"]
    counts.append(f"{pair.comparison.corrected_p:.2g}")
    counts.append(f"{pair.comparison.images_to_tell:,}")
    return [pair.first, pair.second, pair.title, f"{100 * difference.difference:+.2f}", interval, *counts]


def _agreement(evaluation: Evaluation) -> Mapping[str, Any]:
    """Return the share of equal predictions of two networks, or a table of those of several."""
    shares, names = evaluation.agreement, [result.name for result in evaluation.results if result.scored is not None]
    if shares is None or len(names) == 2:
        return {"agreement": None if shares is None else f"{shares[0, 1]:.1%}", "agreements": None}
    rows = [[name, *(f"{share:.1%}" for share in row)] for name, row in zip(names, shares, strict=True)]
    columns = [Column("same prediction"), *(Column(name, True) for name in names)]
    return {"agreement": None, "agreements": Table("Agreement", columns, rows)}


# ---- corrupted images ------------------------------------------------------------------------------------------------


def _corruptions(results: Sequence[Result]) -> Mapping[str, Any] | None:
    tables = [(result.name, errors_of(result.more)) for result in results]
    severities = sorted({severity for _, errors in tables for row in errors.values() for severity in row})
    if not severities:
        return None
    columns = [Column("network"), Column("corruption"), *(Column(f"severity {at}", True) for at in severities)]
    rows = [
        [name, kind.replace("_", " "), *(f"{row[severity]:.1%}" for severity in severities)]
        for name, errors in tables
        for kind, row in errors.items()
    ]
    images = next(each.more["corruption_images"] for each in results if "corruption_images" in each.more)
    return {"images": f"{images:,}", "table": Table("Corruptions", columns, rows)}


# ---- each network ----------------------------------------------------------------------------------------------------


def _classes(heads: Heads) -> Mapping[str, Any] | None:
    if not heads:
        return None
    columns = [Column("network"), Column("class"), *(Column(head, True) for head in ("images", "recall", "precision"))]
    rows = []
    for result, scored in heads:
        for each in sorted(scored.classification.classes, key=lambda each: (each.recall is None, each.recall or 0)):
            shares = ["–" if share is None else f"{share:.1%}" for share in (each.recall, each.precision)]
            rows.append([result.name, result.classes[each.label], f"{each.images:,}", *shares])
    charts = [class_chart(result, scored) for result, scored in heads]
    return {"charts": charts, "count": f"{len(rows):,}", "table": Table("Classes", columns, rows)}


def _confusion(heads: Heads) -> Mapping[str, Any] | None:
    if not heads:
        return None
    charts = [chart for result, scored in heads for chart in confusion_charts(result, scored)]
    columns = [Column("network"), Column("class"), Column("predicted as"), Column("images", True)]
    rows = [
        [result.name, result.classes[label], result.classes[predicted], f"{count:,}"]
        for result, scored in heads
        for label, predicted, count in confused_pairs(scored)
    ]
    return {"charts": charts, "table": Table("Confusions", columns, rows)}


def _mistakes(evaluation: Evaluation, heads: Heads, several: Several) -> list[tuple[str, Gallery]]:
    """Return the pictures of each network that has mistakes, with its name where there are several."""
    found = [(result.name, mistakes(result, scored)) for result, scored in heads]
    found += [(each.name, [Example(*line) for line in label_mistakes(each, scores)]) for each, scores in several]
    return [
        (name if len(found) > 1 else "", gallery(evaluation.images, examples)) for name, examples in found if examples
    ]


def _origin(evaluation: Evaluation) -> Mapping[str, Any]:
    images = evaluation.images
    facts = {"images": f"{images.url}, {images.split}", "identity of the images": images.identity}
    for result in evaluation.results:
        spec = result.spec
        size = " x ".join(map(str, spec.size))
        facts[result.name] = (
            f"{spec.url}: {spec.network} at {size}, {spec.crop}, {spec.precision}; weights {spec.identity}"
        )
    return {"command": evaluation.command, "facts": facts}
