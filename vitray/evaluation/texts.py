"""Scores as text: with their intervals, and as a table for a terminal."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from vitray.evaluation.corruptions import ERROR_OF
from vitray.evaluation.results import COMPARED, Evaluation, Result, probe_titles
from vitray.metrics.few_shot import SHOTS
from vitray.metrics.probes import PROBES

# Scores in the order in which they are shown: those of probes come before those of corrupted images.
TITLES = {
    "top1": COMPARED["top1"],
    "top5": "top-5",
    "map": COMPARED["map"],
    "f1_micro": "F1, micro",
    "f1_macro": "F1, macro",
    "f1_micro_chosen": "F1, micro, chosen thresholds",
    "f1_macro_chosen": "F1, macro, chosen thresholds",
    "mean_per_class": "mean per class",
    "nll": "loss (NLL)",
    "ece": "ECE",
    "ece_calibrated": "ECE, if calibrated",
    "calibration_p": "p of calibration",
    "adaptive_ece": "adaptive ECE",
    "brier": "Brier score",
    "temperature": "temperature",
    "ece_before_temperature": "ECE, other half",
    "ece_after_temperature": "ECE, at temperature",
    "labels_top1": COMPARED["labels_top1"],
    "labels_top5": "top-5 by the label set",
}
CORRUPTION_TITLES = {"corruption_error": "error on corrupted images", "mce": "mCE, relative to the baseline"}
SHARES = {
    "top1",
    "top5",
    "map",
    "f1_micro",
    "f1_macro",
    "f1_micro_chosen",
    "f1_macro_chosen",
    "labels_top1",
    "labels_top5",
    "mean_per_class",
    *CORRUPTION_TITLES,
}
# The linear probe of a share of the training images.
SHARE_OF = re.compile(r"linear_share([\d.e-]+)(_map)?")


def fixed_titles() -> dict[str, str]:
    """Return {score: title} in the order of the page, of the scores whose names do not depend on the evaluation."""
    return TITLES | probe_titles() | CORRUPTION_TITLES


def titles_of(results: Sequence[Result]) -> dict[str, str]:
    """Return {score: title} in the order of the page, with the shares and corruptions that these networks have."""
    scored = dict.fromkeys(match for result in results for match in map(SHARE_OF.fullmatch, result.more) if match)
    ends = {match: ", mAP" if match[2] else "" for match in scored}
    shares = {match[0]: f"linear probe, {100 * float(match[1]):g} % of train{end}" for match, end in ends.items()}
    kinds = dict.fromkeys(name for result in results for name in result.more if name.startswith(ERROR_OF))
    return fixed_titles() | shares | {name: f"error, {name.removeprefix(ERROR_OF).replace('_', ' ')}" for name in kinds}


class ScoreText(NamedTuple):
    """A score as text."""

    value: str
    spread: str
    """Its 95 % interval, or its standard deviation after ±; empty without either."""

    def __str__(self) -> str:
        if self.spread.startswith("±"):
            return f"{self.value} {self.spread}"
        return f"{self.value} ({self.spread})" if self.spread else self.value


def is_share(name: str) -> bool:
    """Whether a score is shown in percent."""
    is_probed = any(name in probe.titles for probe in PROBES.values() if probe.in_percent)
    return name in SHARES or is_probed or name.startswith(ERROR_OF) or SHARE_OF.fullmatch(name) is not None


def score_text(result: Result, name: str) -> ScoreText | None:
    """Return a score with its uncertainty; None where there is none."""
    values = result.flat()
    # The size of the smallest class is of interest where it leaves shots out.
    if values.get(name) is None or (name == "few_shot_least" and values["few_shot_least"] >= max(SHOTS)):
        return None
    if isinstance(values[name], int):
        return ScoreText(f"{values[name]:,}", "")
    unit, digits, percent = (100, "{:.2f}", " %") if is_share(name) else (1, "{:.4f}", "")
    by_sgd = " by SGD" if values.get(f"{name}_fit") == "sgd" else ""
    spread = ""
    if f"{name}_low" in values:
        spread = " to ".join(digits.format(unit * values[f"{name}_{end}"]) for end in ("low", "high"))
    elif values.get(f"{name}_std") is not None:
        spread = f"± {digits.format(unit * values[f'{name}_std'])}"
    return ScoreText(f"{digits.format(unit * values[name])}{percent}{by_sgd}", spread)


def score_rows(results: Sequence[Result]) -> dict[str, list[ScoreText | None]]:
    """Return {title: a score of each network} in the order of the page, without scores that no network has."""
    rows = {title: [score_text(result, name) for result in results] for name, title in titles_of(results).items()}
    return {title: texts for title, texts in rows.items() if any(texts)}


def scores_text(evaluation: Evaluation) -> str:
    """Return a table for a terminal, a line for each score and a column for each network, and the differences."""
    results = evaluation.results
    lines = [["", *(result.name for result in results)]]
    lines += [[title, *(str(text or "") for text in texts)] for title, texts in score_rows(results).items()]
    lines.append(["images", *(f"{len(result.outputs.labels):,}" for result in results)])
    if any(result.outputs.left_out for result in results):
        lines.append(["left out", *(f"{len(result.outputs.left_out):,}" for result in results)])
    verdict = evaluation.verdict()
    sentences = [*(pair.sentence() for pair in evaluation.pairs), *([verdict] if verdict else [])]
    return "\n".join([aligned(lines), *sentences])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table of a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(row.rstrip() for row in rows)
