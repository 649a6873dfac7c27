"""Few-shot accuracy of frozen features: regularized least squares in closed form, as in the ViT paper's code.

Targets are +1 for the own class and -1 for the others. Features are standardized by the chosen images, a constant
feature of 100 is the bias, and the regularization is fixed. That code computes in float32, this module in float64.

Shapes: N images, F features, G = F + 1, K classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.errors import ConfigError
from vitray.metrics.arrays import Labeled, ProbeInputs, ProbeScore, check_probe, predict, score_predictions

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
L2 = 2.0**10
BIAS = 100.0
EPSILON = 1e-5


class FewShot(NamedTuple):
    """The score of one draw of training images."""

    shots: int
    seed: int
    images: int
    """The number of training images: a class with fewer than `shots` gives all that it has."""
    score: ProbeScore


class FewShotMean(NamedTuple):
    """The top-1 scores of one number of shots over the seeds."""

    top1: float
    std: float | None
    """The sample standard deviation; None for one seed."""
    seeds: int


class LeastSquares(NamedTuple):
    """A fitted linear classifier with its standardization."""

    weights: np.ndarray
    """G x K; the last row belongs to the constant feature."""
    mean: np.ndarray
    std: np.ndarray

    def scores(self, features_NF: np.ndarray) -> np.ndarray:
        """Return the N x K regressed targets."""
        return _with_bias((features_NF - self.mean) / self.std) @ self.weights


def few_shot_scores(inputs: ProbeInputs) -> dict[str, Any]:
    """Return the scores of the probe `few_shot` by name."""
    # A smaller class would give fewer images than the name of the score says.
    least = smallest_class(inputs.learned.labels)
    values: dict[str, Any] = {"few_shot_least": least}
    fitted = probe_few_shot(inputs.learned, inputs.scored, inputs.num_classes, shots_within(least))
    for shots, mean in mean_of_seeds(fitted).items():
        values |= {f"few_shot{shots}": mean.top1, f"few_shot{shots}_std": mean.std}
    return values


def probe_few_shot(
    train: Labeled,
    test: Labeled,
    num_classes: int,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
) -> list[FewShot]:
    """Return the scores for each seed and number of shots; the images of fewer shots are among those of more."""
    if not shots or min(shots) < 1 or not seeds:
        raise ConfigError(f"few-shot: got shots {list(shots)} and seeds {list(seeds)}; expected shots of at least 1")
    train, test = check_probe(train, test, num_classes)
    scores = []
    for seed in seeds:
        order = shot_order(train.labels, num_classes, seed)
        for count in shots:
            rows_M = np.concatenate([rows[:count] for rows in order])
            model = fit_least_squares(train.features[rows_M], train.labels[rows_M], num_classes)
            score = score_predictions(predict(model.scores, test.features), test.labels)
            scores.append(FewShot(count, seed, len(rows_M), score))
    return scores


def smallest_class(labels_N: np.ndarray) -> int:
    """Return the number of images of the smallest class; a class without images does not count."""
    return int(np.unique(labels_N, return_counts=True)[1].min())


def shots_within(images: int) -> list[int]:
    """Return the numbers of shots that a class with so many images can give."""
    return [count for count in SHOTS if count <= images]


def mean_of_seeds(scores: Sequence[FewShot]) -> dict[int, FewShotMean]:
    """Return {shots: mean over the seeds}."""
    means = {}
    for count in sorted({each.shots for each in scores}):
        values = [each.score.top1 for each in scores if each.shots == count]
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        means[count] = FewShotMean(float(np.mean(values)), std, len(values))
    return means


def shot_order(labels_N: np.ndarray, num_classes: int, seed: int) -> list[np.ndarray]:
    """Return the rows of each class in random order; numpy's generator draws one class after the other."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(np.flatnonzero(labels_N == label)) for label in range(num_classes)]


def fit_least_squares(features_NF: np.ndarray, labels_N: np.ndarray, num_classes: int, l2: float = L2) -> LeastSquares:
    """Return the classifier W = (X'X + l2 I)^-1 X'Y, computed as X'(XX' + l2 I)^-1 Y where N is smaller than G."""
    features_NF = features_NF.astype(np.float64)
    mean_F, std_F = features_NF.mean(0), features_NF.std(0) + EPSILON
    x_NG = _with_bias((features_NF - mean_F) / std_F)
    y_NK = np.where(labels_N[:, None] == np.arange(num_classes), 1.0, -1.0)
    if len(x_NG) >= x_NG.shape[1]:
        weights_GK = np.linalg.solve(x_NG.T @ x_NG + l2 * np.eye(x_NG.shape[1]), x_NG.T @ y_NK)
    else:
        weights_GK = x_NG.T @ np.linalg.solve(x_NG @ x_NG.T + l2 * np.eye(len(x_NG)), y_NK)
    return LeastSquares(weights_GK, mean_F, std_F)


def _with_bias(features_NF: np.ndarray) -> np.ndarray:
    return np.pad(features_NF, ((0, 0), (0, 1)), constant_values=BIAS)
