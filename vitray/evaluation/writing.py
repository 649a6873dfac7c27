"""The folder of an evaluation: index.html, results.json and three CSV files; the page is written last."""

import json
from collections.abc import Sequence
from typing import Any

from vitray.evaluation.page import render
from vitray.evaluation.results import Evaluation
from vitray.pages.files import csv_text, write_files


def write_evaluation(evaluation: Evaluation, folder: str) -> str:
    """Write or replace the files of an evaluation and return the address of the page."""
    files = {
        "results.json": json.dumps(_details(evaluation), indent=1) + "\n",
        "scores.csv": scores_csv(evaluation),
        "classes.csv": classes_csv(evaluation),
        "predictions.csv": predictions_csv(evaluation),
    }
    return write_files(folder, files, render(evaluation))


def scores_csv(evaluation: Evaluation) -> str:
    """Return a row for each network."""
    rows = [result.flat() for result in evaluation.results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text([names, *([row.get(name) for name in names] for row in rows)])


def classes_csv(evaluation: Evaluation) -> str:
    """Return a row for each class and network."""
    rows: list[Sequence[Any]] = [["model", "class", "images", "hits", "predicted", "recall", "precision"]]
    for result in evaluation.results:
        for each in result.scored.classification.classes if result.scored else ():
            numbers = [each.images, each.hits, each.predicted, each.recall, each.precision]
            rows.append([result.name, result.classes[each.label], *numbers])
    return csv_text(rows)


def predictions_csv(evaluation: Evaluation) -> str:
    """Return a row for each image and network."""
    rows: list[Sequence[Any]] = [["model", "image", "label", "predicted", "confidence", "rank_of_label"]]
    for result in evaluation.results:
        if result.scored is None:
            continue
        whole, classes = result.scored.classification, result.classes
        arrays = (result.scored.labels, whole.predictions, whole.confidences, whole.ranks)
        columns = zip(result.outputs.keys, *(array.tolist() for array in arrays), strict=True)
        rows += [[result.name, key, classes[a], classes[b], f"{p:.6f}", rank] for key, a, b, p, rank in columns]
    return csv_text(rows)


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
        details.append(detail)
    return evaluation.flat() | {"command": evaluation.command, "details": details}
