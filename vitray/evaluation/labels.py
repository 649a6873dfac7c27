"""The parts of an evaluation's page and files that are about several labels an image. K classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vitray.data.shards.label_lists import ABSENT, names_of
from vitray.evaluation.charts import MOST_BARS, Line, Matrix, cluster, interval_chart, matrix_chart
from vitray.evaluation.results import Result
from vitray.metrics.multilabel import LabelScore, LabelScores
from vitray.models.probabilities import probabilities_of
from vitray.pages.files import csv_text
from vitray.pages.rendering import Column, Picture, Table

Several = Sequence[tuple[Result, LabelScores]]
# Classes of a matrix.
MOST_TOGETHER = 40


def label_classes(several: Several) -> Mapping[str, Any] | None:
    """Return the charts and the table of the classes."""
    if not several:
        return None
    heads = ("images", "AP", "95 % interval", "F1", "precision", "recall", "best threshold")
    columns = [Column("network"), Column("class"), *(Column(head, True) for head in heads)]
    rows = []
    for result, scores in several:
        for each in sorted(scores.classes, key=_rank):
            found = each.average_precision
            interval = f"{100 * found.low:.1f} to {100 * found.high:.1f}" if found else "–"
            shares = [_share(value) for value in (each.f1, each.precision, each.recall)]
            threshold = "–" if each.best_threshold is None else f"{each.best_threshold:.2f}"
            numbers = [f"{each.images:,}", _share(found and found.estimate), interval, *shares, threshold]
            rows.append([result.name, result.classes[each.label], *numbers])
    charts = [_class_chart(*pair) for pair in several]
    return {"charts": charts, "count": f"{len(rows):,}", "table": Table("Classes", columns, rows)}


def _rank(each: LabelScore) -> float:
    return 2.0 if each.average_precision is None else each.average_precision.estimate


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _class_chart(result: Result, scores: LabelScores) -> Picture:
    """Return the average precision of each class, the lowest first."""
    known = sorted((each for each in scores.classes if each.average_precision), key=_rank)
    shown = known[:MOST_BARS]
    which = f"the {MOST_BARS} lowest of {len(known):,}" if len(known) > MOST_BARS else f"{len(known)}"
    lines = [Line(result.classes[each.label], [each.average_precision]) for each in shown if each.average_precision]
    caption = f"{result.name}: average precision of {which} classes, with 95 % intervals by a bootstrap over images."
    return interval_chart(result.name, lines, [""], "average precision, %", caption)


def label_charts(result: Result, scores: LabelScores) -> list[Picture]:
    """Return which classes come together: by the labels, and by the predictions."""
    order = np.argsort(-np.diag(scores.together), kind="stable")[:MOST_TOGETHER]
    order = order[np.diag(scores.together)[order] > 0]
    order = order[cluster(scores.together[np.ix_(order, order)])]
    names = [result.classes[label] for label in order.tolist()]
    charts = []
    for which, counts in (("labels", scores.together), ("predictions", scores.predicted_together)):
        matrix = Matrix(names, counts[np.ix_(order, order)], np.diag(counts)[order])
        text = (
            f"of the images with the class of a row, by the {which}, how many have that of the column, too. The"
            " diagonal counts the images with the class."
        )
        title = f"Classes together in the {which} of {result.name}"
        charts.append(matrix_chart(title, f"{result.name}: {text}", which, matrix, ("too", "class")))
    return charts


def label_mistakes(result: Result, scores: LabelScores) -> list[tuple[int, str, tuple[str, str]]]:
    """Return the images whose absent class has the highest probability: number, key, and two lines of text."""
    return [
        (
            int(result.outputs.rows[row]),
            result.outputs.keys[row],
            (names_of(scores.states[row], result.classes), f"also {result.classes[label]}, {probability:.0%}"),
        )
        for probability, row, label in scores.wrong
    ]


# ---- files -----------------------------------------------------------------------------------------------------------


def label_details(result: Result, scores: LabelScores) -> dict[str, Any]:
    """Return the scores of each class for JSON."""
    classes = []
    for each in scores.classes:
        found = each.average_precision
        values = each._asdict() | {"precision": each.precision, "recall": each.recall}
        values["average_precision"] = found and found.estimate
        values |= {"average_precision_low": found.low, "average_precision_high": found.high} if found else {}
        classes.append({"class": result.classes[each.label], **values})
    return {"classes": classes}


def label_classes_csv(several: Several) -> str:
    """Return a row for each class and network."""
    names = ["images", "known", "average_precision", "average_precision_low", "average_precision_high"]
    names += ["hits", "predicted", "precision", "recall", "f1", "best_threshold"]
    rows: list[Sequence[Any]] = [["model", "class", *names]]
    for result, scores in several:
        for each in label_details(result, scores)["classes"]:
            rows.append([result.name, each["class"], *(each.get(name) for name in names)])
    return csv_text(rows)


def label_predictions_csv(several: Several) -> str:
    """Return a row for each image and network: its labels, those unknown, the predictions and their probabilities."""
    rows: list[Sequence[Any]] = [["model", "image", "labels", "unknown", "predicted", "probabilities"]]
    for result, scores in several:
        assert result.outputs.logits is not None
        logits_NK = torch.from_numpy(np.asarray(result.outputs.logits))
        probabilities_NK = probabilities_of(logits_NK, result.spec.probability).numpy()
        columns = zip(result.outputs.keys, scores.states, scores.predicted, probabilities_NK, strict=True)
        for key, states_K, predicted_K, probabilities_K in columns:
            shown = np.flatnonzero(predicted_K)
            lists = [np.flatnonzero(states_K > ABSENT), np.flatnonzero(states_K < ABSENT), shown]
            texts = ["|".join(result.classes[label] for label in each.tolist()) for each in lists]
            rows.append([result.name, key, *texts, "|".join(f"{value:.6f}" for value in probabilities_K[shown])])
    return csv_text(rows)
