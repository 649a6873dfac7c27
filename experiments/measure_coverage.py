"""python experiments/measure_coverage.py: how often the intervals of an evaluation contain the scores of all images.

Two networks of ten classes, one over-confident, on a population of 200,000 images drawn from a seed. Each repeat draws
some images of it. An interval of 95 % should contain the population's score in 95 % of the repeats. Bootstraps have
2,000 draws here, 10,000 in an evaluation.
"""

from collections.abc import Callable

import numpy as np

from vitray.metrics.calibration import calibration_error, calibration_scores
from vitray.metrics.classification import log_probability_chunks, mean_per_class_of
from vitray.metrics.intervals import bootstrap, compare_hits, wilson

POPULATION, CLASSES, DRAWS = 200_000, 10, 2_000
REPEATS = {100: 1_000, 1_000: 500, 5_000: 100}
"""{images of a repeat: repeats}"""


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


def main() -> None:
    """Print the table of docs/evaluation.md."""
    rng = np.random.default_rng(0)
    labels, networks = population(rng)
    hits = [(logits.argmax(1) == labels).astype(float) for logits in networks]
    losses = [losses_of(logits, labels) for logits in networks]
    recall = mean_per_class_of(CLASSES)
    truths: dict[str, float] = {
        "top1": hits[0].mean(),
        "mean_per_class": float(recall(np.stack([labels, hits[0]], 1)[None])[0]),
        "nll": losses[0].mean(),
        "ece, calibrated": 0.0,
        "ece, over-confident": calibration_scores(networks[1], labels).ece,
        "difference of top1": hits[0].mean() - hits[1].mean(),
    }
    interval_of: dict[str, Callable[[np.ndarray], tuple]] = {
        "top1": lambda rows: wilson(hits[0][rows].sum(), len(rows))[1:3],
        "mean_per_class": lambda rows: bootstrap(np.stack([labels[rows], hits[0][rows]], 1), recall, DRAWS)[1:3],
        "nll": lambda rows: bootstrap(losses[0][rows], draws=DRAWS)[1:3],
        "ece, calibrated": lambda rows: calibration_error(networks[0][rows], labels[rows]).interval[1:3],
        "ece, over-confident": lambda rows: calibration_error(networks[1][rows], labels[rows]).interval[1:3],
        "difference of top1": lambda rows: compare_hits(hits[0][rows], hits[1][rows]).difference[1:3],
    }
    print(f"| interval of | {' | '.join(f'{images:,} images' for images in REPEATS)} |")
    print("|---|" + "---|" * len(REPEATS))
    for name, interval in interval_of.items():
        shares = []
        for images, repeats in REPEATS.items():
            found = [interval(rng.integers(0, POPULATION, images)) for _ in range(repeats)]
            shares.append(np.mean([low <= truths[name] <= high for low, high in found]))
        print(f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
