"""python experiments/measure_coverage.py: how often the intervals of an evaluation contain the scores of all images.

Two networks of ten classes, one over-confident, and two of five labels, of which an image has any number and which 4 to
40 % of the images have, on populations of 200,000 images drawn from a seed. Each repeat draws some images. An interval
of 95 % should contain the population's score in 95 % of the repeats. Bootstraps of one label have 2,000 draws here,
10,000 in an evaluation.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from vitray.metrics.calibration import calibration_error, calibration_scores
from vitray.metrics.classification import log_probability_chunks, mean_per_class_of
from vitray.metrics.intervals import bootstrap, compare_hits, wilson
from vitray.metrics.multilabel import LabelScores, compare_maps, draw_maps, score_labels

POPULATION, CLASSES, DRAWS = 200_000, 10, 2_000
FREQUENCIES = (0.04, 0.08, 0.15, 0.25, 0.4)
"""Of the labels of which an image has any number."""
REPEATS = {100: 1_000, 1_000: 500, 5_000: 200}
"""{images of a repeat: repeats}"""


class Covered(NamedTuple):
    """A score: that of the population, and its interval on the images of a repeat."""

    name: str
    truth: float
    interval: Callable[[np.ndarray], tuple[float, ...]]


def population(rng: np.random.Generator) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return labels, and the logits of a calibrated network and of one with twice the confidence it should have."""
    logits_NK = 2 * rng.standard_normal((POPULATION, CLASSES))
    shares_NK = np.exp(logits_NK - logits_NK.max(1, keepdims=True))
    shares_NK /= shares_NK.sum(1, keepdims=True)
    labels_N = (rng.random((POPULATION, 1)) > shares_NK.cumsum(1)).sum(1).clip(max=CLASSES - 1)
    other_NK = 2 * (logits_NK + 0.5 * rng.standard_normal(logits_NK.shape))
    return labels_N, [logits_NK, other_NK]


def losses_of(logits_NK: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """Return the cross-entropy of each image."""
    parts = [
        -np.take_along_axis(log_BK, labels_N[rows, None], 1)[:, 0] for rows, log_BK in log_probability_chunks(logits_NK)
    ]
    return np.concatenate(parts)


def one_label(rng: np.random.Generator) -> Iterator[Covered]:
    """Yield the scores of one label an image."""
    labels, networks = population(rng)
    hits = [(logits.argmax(1) == labels).astype(float) for logits in networks]
    losses, recall = losses_of(networks[0], labels), mean_per_class_of(CLASSES)
    rows_N2 = np.stack([labels, hits[0]], 1)
    yield Covered("top1", hits[0].mean(), lambda rows: wilson(hits[0][rows].sum(), len(rows))[1:3])
    yield Covered(
        "mean_per_class", float(recall(rows_N2[None])[0]), lambda rows: bootstrap(rows_N2[rows], recall, DRAWS)[1:3]
    )
    yield Covered("nll", losses.mean(), lambda rows: bootstrap(losses[rows], draws=DRAWS)[1:3])
    for name, truth, logits in (
        ("ece, calibrated", 0.0, networks[0]),
        ("ece, over-confident", calibration_scores(networks[1], labels).ece, networks[1]),
    ):
        yield Covered(
            name, truth, lambda rows, logits=logits: calibration_error(logits[rows], labels[rows]).interval[1:3]
        )
    yield Covered(
        "difference of top1",
        hits[0].mean() - hits[1].mean(),
        lambda rows: compare_hits(hits[0][rows], hits[1][rows]).difference[1:3],
    )


def several_labels(rng: np.random.Generator) -> Iterator[Covered]:
    """Yield the scores of several labels an image."""
    states_NK = (rng.random((POPULATION, len(FREQUENCIES))) < FREQUENCIES).astype(np.int8)
    logits_NK = rng.standard_normal(states_NK.shape) + 1.5 * states_NK
    one_NK, other_NK = expit(logits_NK - 1), expit(logits_NK + 0.5 * rng.standard_normal(states_NK.shape))
    keys = [str(row) for row in range(POPULATION)]
    truths = score_labels(one_NK, states_NK, keys, draws=2)

    def scores(rows: np.ndarray) -> LabelScores:
        return score_labels(one_NK[rows], states_NK[rows], keys[: len(rows)])

    for name in ("map", "f1_micro", "f1_macro"):
        yield Covered(name, truths.intervals[name].estimate, lambda rows, name=name: scores(rows).intervals[name][1:3])
    rarest = truths.classes[0].average_precision
    assert rarest is not None
    yield Covered(
        "average precision of a label at 4 %",
        rarest.estimate,
        lambda rows: (scores(rows).classes[0].average_precision or (0, 0, 1))[1:3],
    )
    truth = (
        truths.intervals["map"].estimate - score_labels(other_NK, states_NK, keys, draws=2).intervals["map"].estimate
    )
    yield Covered(
        "difference of map",
        truth,
        lambda rows: compare_maps(
            draw_maps(one_NK[rows], states_NK[rows]), draw_maps(other_NK[rows], states_NK[rows])
        ).difference[1:3],
    )


def main() -> None:
    """Print the table of docs/evaluation.md."""
    rng = np.random.default_rng(0)
    print(f"| interval of | {' | '.join(f'{images:,} images' for images in REPEATS)} |")
    print("|---|" + "---|" * len(REPEATS))
    for each in (*one_label(rng), *several_labels(rng)):
        shares = []
        for images, repeats in REPEATS.items():
            found = [each.interval(rng.integers(0, POPULATION, images)) for _ in range(repeats)]
            shares.append(np.mean([low <= each.truth <= high for low, high in found]))
        print(f"| {each.name} | {' | '.join(f'{share:.3f}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
