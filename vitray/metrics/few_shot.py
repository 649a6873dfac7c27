"""Few-shot accuracy of frozen features: regularized least squares in closed form, as in the ViT paper's code.

Targets are +1 for the own class and -1 for the others. Features are standardized by the chosen images, a constant
feature of 100 is the bias, and the regularization is fixed. That code computes in float32, this module in float64.

Shapes: N images, F features, G = F + 1, K classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.metrics.arrays import Labeled, ProbeInputs, ProbeScore, ProbeValues, predict, score_predictions

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
COMPARED_SHOTS = 5
L2 = 2.0**10
BIAS = 100.0
EPSILON = 1e-5


class LeastSquares(NamedTuple):
    """A fitted linear classifier with its standardization."""

    weights: np.ndarray
    """G x K; the last row belongs to the constant feature."""
    mean: np.ndarray
    std: np.ndarray

    def scores(self, features_NF: np.ndarray) -> np.ndarray:
        """Return the N x K regressed targets."""
        return _with_bias((features_NF - self.mean) / self.std) @ self.weights


def few_shot_scores(inputs: ProbeInputs) -> ProbeValues:
    """Return the scores of the probe `few_shot`: of each number of shots, mean and deviation over the seeds.

    The hits are those of `COMPARED_SHOTS` or fewer, the mean over the seeds.
    """
    # A smaller class would give fewer images than the name of the score says.
    least = smallest_class(inputs.learned.labels)
    values: dict[str, Any] = {"few_shot_least": least}
    fitted = probe_few_shot(inputs.learned, inputs.scored, inputs.num_classes, shots_within(least))
    for shots, scores in fitted.items():
        top1 = [score.top1 for score in scores]
        values |= {f"few_shot{shots}": float(np.mean(top1)), f"few_shot{shots}_std": float(np.std(top1, ddof=1))}
    compared = max(shots for shots in fitted if shots <= COMPARED_SHOTS)
    hits_N = np.mean([score.predictions == inputs.scored.labels for score in fitted[compared]], axis=0)
    return ProbeValues(values, {f"few_shot{compared}": hits_N})


def probe_few_shot(
    train: Labeled, test: Labeled, num_classes: int, shots: Sequence[int] = SHOTS
) -> dict[int, list[ProbeScore]]:
    """Return {shots: score of each seed}; the images of fewer shots are among those of more.

    A class with fewer images than shots gives all that it has.
    """
    scores: dict[int, list[ProbeScore]] = {count: [] for count in shots}
    for seed in SEEDS:
        order = shot_order(train.labels, num_classes, seed)
        for count in shots:
            rows_M = np.concatenate([rows[:count] for rows in order])
            model = fit_least_squares(train.features[rows_M], train.labels[rows_M], num_classes)
            scores[count].append(score_predictions(predict(model.scores, test.features), test.labels))
    return scores


def smallest_class(labels_N: np.ndarray) -> int:
    """Return the number of images of the smallest class; a class without images does not count."""
    return int(np.unique(labels_N, return_counts=True)[1].min())


def shots_within(images: int) -> list[int]:
    """Return the numbers of shots that a class with so many images can give."""
    return [count for count in SHOTS if count <= images]


def shot_order(labels_N: np.ndarray, num_classes: int, seed: int) -> list[np.ndarray]:
    """Return the rows of each class in random order; numpy's generator draws one class after the other."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(np.flatnonzero(labels_N == label)) for label in range(num_classes)]


def fit_least_squares(features_NF: np.ndarray, labels_N: np.ndarray, num_classes: int) -> LeastSquares:
    """Return the classifier W = (X'X + L2 I)^-1 X'Y, computed as X'(XX' + L2 I)^-1 Y where N is smaller than G.

    It is scikit-learn's Ridge without an intercept, whose solvers round otherwise.
    """
    features_NF = features_NF.astype(np.float64)
    mean_F, std_F = features_NF.mean(0), features_NF.std(0) + EPSILON
    x_NG = _with_bias((features_NF - mean_F) / std_F)
    y_NK = np.where(labels_N[:, None] == np.arange(num_classes), 1.0, -1.0)
    if len(x_NG) >= x_NG.shape[1]:
        weights_GK = np.linalg.solve(x_NG.T @ x_NG + L2 * np.eye(x_NG.shape[1]), x_NG.T @ y_NK)
    else:
        weights_GK = x_NG.T @ np.linalg.solve(x_NG @ x_NG.T + L2 * np.eye(len(x_NG)), y_NK)
    return LeastSquares(weights_GK, mean_F, std_F)


def _with_bias(features_NF: np.ndarray) -> np.ndarray:
    return np.pad(features_NF, ((0, 0), (0, 1)), constant_values=BIAS)
