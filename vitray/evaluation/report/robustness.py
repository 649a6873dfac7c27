"""The errors of a network on corrupted copies of its images: five corruptions at five severities."""

from functools import partial

import numpy as np

from vitray.evaluation.corruptions import CORRUPTIONS, SEVERITIES, Corruption, corrupt, mean_corruption_error
from vitray.inference.outputs import Work, compute_outputs
from vitray.models.vit import ViT

SEED = 0


def corruption_errors(work: Work, classes: np.ndarray, workers: int | None, vit: ViT) -> dict[str, float]:
    """Return the top-1 error of each corruption at each severity, and their means.

    `classes` is the network's class for each label. Images are corrupted after the crop, as in ImageNet-C.
    """
    errors: dict[str, list[float]] = {}
    for corruption in CORRUPTIONS:
        for severity in SEVERITIES:
            alter = partial(_altered, corruption=corruption, severity=severity)
            name = f"{corruption} {severity} seed {SEED}"
            outputs = compute_outputs(work._replace(outputs=("logits",), alter=alter, alteration=name), workers, vit)
            assert outputs.logits is not None
            wrong_N = outputs.logits.argmax(1) != classes[outputs.labels]
            errors.setdefault(corruption, []).append(float(wrong_N.mean()))
    means = mean_corruption_error(errors)
    values = {"corruption_error": means.mean}
    values |= {f"corruption_error_{name}": error for name, error in means.by_corruption.items()}
    return values | {f"error_{name}_{at}": share for name, row in errors.items() for at, share in enumerate(row, 1)}


def _altered(view_HWC: np.ndarray, key: str, corruption: Corruption, severity: int) -> np.ndarray:
    return corrupt(view_HWC, corruption, severity, SEED, key)
