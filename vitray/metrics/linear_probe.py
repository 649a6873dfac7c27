"""Linear probe of frozen features: logistic regression, by L-BFGS over a grid of L2, or by SGD over chunks.

The loss is the mean cross-entropy plus l2 / 2 times the sum of the squared weights; the bias is not regularized. Of
several labels an image, it is the sum of the known classes' binary cross-entropies.
Features are standardized by the training images. SGD holds one chunk of them in float64, L-BFGS all. scikit-learn's
LogisticRegression has the same optimum, with C = 1 / (l2 N), but needs ten times the steps on correlated features.

Shapes: N images, F features, K classes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.errors import ConfigError
from vitray.metrics.arrays import (
    Labeled,
    ProbeInputs,
    ProbeScore,
    ProbeValues,
    by_rows,
    draw_part,
    predict,
    score_predictions,
)
from vitray.metrics.intervals import proportion_values
from vitray.metrics.multilabel import draw_maps, map_values

L2_GRID = tuple(10.0**power for power in range(-6, 2))
DEVELOPMENT = 0.1
EPSILON = 1e-5
MAX_ITERATIONS = 1000
COARSE, FINE = 1e-5, 1e-8
"""The largest gradient, by the scaled weights, at which a fit ends: of the grid, and of the head that is scored."""
MOST_BYTES = 2 * 2**30
"""The largest matrix of a fit by L-BFGS, which holds about six of this size at a time."""
RATES = (0.03, 0.1, 0.3)
"""The learning rates of SGD, of which a tenth of the training images chooses one; fewer epochs favor high ones."""
EPOCHS, MOMENTUM = 10, 0.9
SGD_CHUNK = 2**15
"""Images that SGD reads at a time."""
SEED = 0


class LinearHead(NamedTuple):
    """A linear classifier of standardized features."""

    weights: np.ndarray
    """F x K."""
    bias: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    def logits(self, features_NF: np.ndarray) -> np.ndarray:
        """Return N x K logits."""
        return (features_NF - self.mean) / self.std @ self.weights + self.bias


class LinearProbe(NamedTuple):
    """The head that is fitted on all training images with the best L2, or learning rate of SGD."""

    head: LinearHead
    chosen: float
    quality: dict[float, float]
    """{L2 or learning rate: that of its head on the tenth of the training images that chooses one}."""
    converged: bool = True


def linear_scores(inputs: ProbeInputs) -> ProbeValues:
    """Return the score of the probe `linear`, and how it was fitted: by SGD where L-BFGS needs too much memory."""
    train, scored, num_classes = inputs.learned, inputs.scored, inputs.num_classes
    how: dict[str, Any]
    name = "linear_map" if scored.several else "linear"
    if is_too_large(len(train.labels), train.features.shape[1], num_classes):
        probe = probe_linear_sgd(train, num_classes, inputs.keys)
        how = {f"{name}_fit": "sgd", f"{name}_lr": probe.chosen, f"{name}_epochs": EPOCHS}
    else:
        probe = probe_linear(train, num_classes, inputs.keys)
        how = {f"{name}_fit": "l-bfgs", f"{name}_l2": probe.chosen, f"{name}_converged": probe.converged}
    if scored.several:
        drawn_map = draw_maps(by_rows(probe.head.logits, scored.features), scored.labels)
        return ProbeValues(map_values(name, drawn_map) | how, maps={name: drawn_map})
    score = score_head(probe.head, scored)
    return ProbeValues(
        proportion_values(name, score.hits, score.images) | how, {name: score.predictions == scored.labels}
    )


def is_too_large(images: int, num_features: int, num_classes: int) -> bool:
    """Whether the matrices of a fit by L-BFGS are too large for memory."""
    return images * max(num_features, num_classes) * 8 > MOST_BYTES


def probe_linear(
    train: Labeled, num_classes: int, keys: Sequence[str], l2_grid: Sequence[float] = L2_GRID
) -> LinearProbe:
    """Return the head fitted on all training images with the L2 of the highest quality on a held-out tenth.

    Of equal quality, the larger L2 is better.
    """
    development_N = _development(train, keys, "L2")
    part = Labeled(train.features[~development_N], train.labels[~development_N])
    development = Labeled(train.features[development_N], train.labels[development_N])
    quality, head = {}, None
    for l2 in sorted(l2_grid, reverse=True):  # each fit starts from a stronger regularization
        head, _ = fit_head(part, num_classes, l2, head, COARSE)
        quality[l2] = quality_of(head, development)
    best = max(quality, key=lambda l2: (quality[l2], l2))
    head, converged = fit_head(train, num_classes, best)
    return LinearProbe(head, best, quality, converged)


def probe_linear_sgd(train: Labeled, num_classes: int, keys: Sequence[str]) -> LinearProbe:
    """Return the head fitted on all training images with the learning rate of the highest quality on a held-out tenth.

    Of equal quality, the smaller rate is better.
    """
    development_N = _development(train, keys, "lr")
    development, part = chunks_of(train, development_N), chunks_of(train, ~development_N)
    quality = {}
    for lr in RATES:
        head = fit_head_sgd(part, num_classes, lr)
        quality[lr] = sum(quality_of(head, chunk) for chunk in development())
    best = max(quality, key=lambda lr: (quality[lr], -lr))
    head = fit_head_sgd(chunks_of(train, np.ones(len(train.labels), dtype=bool)), num_classes, best)
    return LinearProbe(head, best, quality)


def _development(train: Labeled, keys: Sequence[str], what: str) -> np.ndarray:
    """Return N flags of a tenth of the training images, which a hash of the keys chooses."""
    images = len(train.labels)
    if images < 2:
        raise ConfigError(
            f"linear probe: 1 training image; expected at least 2, one to choose the {what} and one to fit"
        )
    return draw_part(keys, max(1, round(DEVELOPMENT * images)), SEED)


def chunks_of(data: Labeled, mask_N: np.ndarray) -> Callable[[], Iterator[Labeled]]:
    """Return a function that yields the flagged images in chunks; a permutation deals the images to the chunks."""
    order_N = np.random.default_rng(SEED).permutation(np.flatnonzero(mask_N))

    def chunks() -> Iterator[Labeled]:
        for first in range(0, len(order_N), SGD_CHUNK):
            rows_M = np.sort(order_N[first : first + SGD_CHUNK])  # a file is read from its start to its end
            yield Labeled(data.features[rows_M], data.labels[rows_M])

    return chunks


def quality_of(head: LinearHead, part: Labeled) -> float:
    """Return the hits on some images; of several labels an image, the sum of the losses, negated."""
    if part.several:
        return -len(part.labels) * _cross_entropy(by_rows(head.logits, part.features), part.labels)[0]
    return score_head(head, part).hits


def score_head(head: LinearHead, test: Labeled) -> ProbeScore:
    """Return the score of a head on the images of a split."""
    return score_predictions(predict(head.logits, test.features), test.labels)


def fit_head(
    train: Labeled, num_classes: int, l2: float, start: LinearHead | None = None, tolerance: float = FINE
) -> tuple[LinearHead, bool]:
    """Return the head with the lowest loss, and whether L-BFGS converged."""
    from scipy.optimize import minimize  # loads slowly

    features_NF = train.features.astype(np.float64)
    mean_F, std_F = features_NF.mean(0), features_NF.std(0) + EPSILON
    x_NF, num_features = (features_NF - mean_F) / std_F, features_NF.shape[1]
    # Weights are fitted along the principal axes, each scaled so that the loss curves alike at zero: on correlated
    # features, L-BFGS then converges in a tenth of the steps.
    variances_F, axes_FF = np.linalg.eigh(x_NF.T @ x_NF / len(x_NF))
    scales_F = np.sqrt(np.maximum(variances_F, 0) / (4 if train.several else num_classes) + l2)
    to_weights_FF = axes_FF / scales_F
    x_NF = x_NF @ to_weights_FF

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        scaled_FK, bias_K = flat[:-num_classes].reshape(num_features, num_classes), flat[-num_classes:]
        weights_FK = to_weights_FF @ scaled_FK
        value, slope_NK = _cross_entropy(x_NF @ scaled_FK + bias_K, train.labels)
        slope_FK = x_NF.T @ slope_NK + l2 * (to_weights_FF.T @ weights_FK)
        return value + l2 / 2 * float((weights_FK**2).sum()), np.r_[slope_FK.ravel(), slope_NK.sum(0)]

    flat = np.zeros((num_features + 1) * num_classes)
    if start is not None:
        flat = np.r_[(scales_F[:, None] * (axes_FF.T @ start.weights)).ravel(), start.bias]
    options = {"maxiter": MAX_ITERATIONS, "maxfun": 2 * MAX_ITERATIONS, "ftol": 1e-6 * tolerance, "gtol": tolerance}
    done = minimize(loss, flat, jac=True, method="L-BFGS-B", options=options)
    weights_FK = to_weights_FF @ done.x[:-num_classes].reshape(num_features, num_classes)
    return LinearHead(weights_FK, done.x[-num_classes:], mean_F, std_F), bool(done.success)


def fit_head_sgd(
    chunks: Callable[[], Iterable[Labeled]], num_classes: int, lr: float, epochs: int = EPOCHS, batch: int = 256
) -> LinearHead:
    """Return the head after SGD: momentum, a cosine from `lr` to zero, and batches within chunks in random order.

    Each call of `chunks` begins the same chunks anew: once for mean and deviation, then once an epoch.
    """
    mean_F, std_F, steps = _moments(chunks, batch)
    steps *= epochs
    weights_GK = np.zeros((len(mean_F) + 1, num_classes))  # the last row is the bias
    velocity_GK, step = np.zeros_like(weights_GK), 0
    for epoch in range(epochs):
        for index, chunk in enumerate(chunks()):
            x_NF = (chunk.features.astype(np.float64) - mean_F) / std_F
            order_N = np.random.default_rng((SEED, epoch, index)).permutation(len(x_NF))
            for first in range(0, len(order_N), batch):
                rows_B = order_N[first : first + batch]
                x_BG = np.pad(x_NF[rows_B], ((0, 0), (0, 1)), constant_values=1.0)
                _, slope_BK = _cross_entropy(x_BG @ weights_GK, chunk.labels[rows_B])
                velocity_GK = MOMENTUM * velocity_GK + x_BG.T @ slope_BK
                weights_GK -= lr * (1 + np.cos(np.pi * step / steps)) / 2 * velocity_GK
                step += 1
    return LinearHead(weights_GK[:-1], weights_GK[-1], mean_F, std_F)


def _moments(chunks: Callable[[], Iterable[Labeled]], batch: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return mean and deviation of the features of all chunks, and the number of batches."""
    count, steps, mean_F, squares_F = 0, 0, np.zeros(0), np.zeros(0)
    for chunk in chunks():
        features_NF = chunk.features.astype(np.float64)
        size, own_F = len(features_NF), features_NF.mean(0)
        if not count:
            mean_F, squares_F = np.zeros_like(own_F), np.zeros_like(own_F)
        delta_F = own_F - mean_F
        squares_F += ((features_NF - own_F) ** 2).sum(0) + delta_F**2 * count * size / (count + size)
        mean_F += delta_F * size / (count + size)
        count, steps = count + size, steps + -(-size // batch)
    return mean_F, np.sqrt(squares_F / count) + EPSILON, steps


def _cross_entropy(logits_NK: np.ndarray, labels_N: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean cross-entropy and its gradient by the logits; labels may be states, NxK."""
    from scipy.special import expit, log_expit, log_softmax  # loads slowly

    images, rows_N = len(labels_N), np.arange(len(labels_N))
    if labels_N.ndim > 1:
        is_present_NK, is_known_NK = labels_N == 1, labels_N >= 0
        losses_NK = -np.where(is_present_NK, log_expit(logits_NK), log_expit(-logits_NK))
        slope_NK = (expit(logits_NK) - is_present_NK) * is_known_NK
        return float(losses_NK[is_known_NK].sum()) / images, slope_NK / images
    log_NK = log_softmax(logits_NK, axis=1)
    slope_NK = np.exp(log_NK)
    slope_NK[rows_N, labels_N] -= 1
    return -float(log_NK[rows_N, labels_N].mean()), slope_NK / images
