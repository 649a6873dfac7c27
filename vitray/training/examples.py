"""A few images of the evaluated split, the same at every evaluation: predictions, and the patches attended to."""

import numpy as np
import torch

from vitray.config import Run
from vitray.data.augment.mixing import normalized
from vitray.data.augment.views import View
from vitray.data.shards.manifest import Dataset
from vitray.data.stream.decoding import locate_rows
from vitray.inference.images import split_images
from vitray.inspection.attention import attention_maps
from vitray.inspection.report.subjects import at_even_distances
from vitray.metrics.arrays import Examples
from vitray.metrics.multilabel import THRESHOLD
from vitray.models.network import AnyNetwork
from vitray.models.probabilities import probabilities_of, probability_of
from vitray.models.vit import ViT
from vitray.training.resolved import ResolvedRun


class ExampleImages:
    """The images, read at the first evaluation."""

    def __init__(self, resolved: ResolvedRun, device: torch.device) -> None:
        self._resolved, self._device = resolved, device
        self._images: np.ndarray | None = None
        self._labels = np.zeros(0, np.int64)

    @torch.no_grad()
    def look(self, vit: AnyNetwork) -> Examples | None:
        """Return the predictions of a network with a head; None if no image can be decoded."""
        if self._images is None:
            self._images, self._labels = read_examples(self._resolved)
        if not len(self._images):
            return None
        was_training = vit.training
        vit.eval()
        images_BCHW = normalized(torch.from_numpy(self._images).to(self._device), self._resolved.run.data.normalize)
        attention_BRQ = None
        if isinstance(vit, ViT):
            maps = attention_maps(vit, images_BCHW)
            logits_BK, attention_BRQ = maps.logits, maps.rollout.float().cpu().numpy()
        else:
            logits_BK = vit(images_BCHW)
        vit.train(was_training)
        probabilities_BK = probabilities_of(logits_BK, probability_of(self._resolved.run))
        if self._resolved.run.has_several_labels:
            probabilities, predicted = probabilities_BK, probabilities_BK >= THRESHOLD
        else:
            probabilities, predicted = probabilities_BK.max(1)
        arrays = (predicted.cpu().numpy(), probabilities.cpu().numpy(), attention_BRQ)
        return Examples(self._images, self._labels, *arrays)


def read_examples(resolved: ResolvedRun) -> tuple[np.ndarray, np.ndarray]:
    """Return the evaluation's views of a few images (BHWC, uint8) and their labels, without corrupt images."""
    run, dataset, split = resolved.run, resolved.dataset, resolved.run.data.evaluated
    assert split is not None
    chosen, _ = choose_examples(run, dataset, resolved.holdout_mask)
    view = View(run.data.eval_crop, run.model.image_shape)
    return split_images(dataset, split).read_views(chosen.tolist(), view)


def choose_examples(run: Run, dataset: Dataset, holdout_mask: np.ndarray | None) -> tuple[np.ndarray, int]:
    """Return the rows of the evaluated split that are shown, and the number of rows that they are chosen from."""
    assert run.data.evaluated is not None
    total = int(locate_rows(dataset, run.data.evaluated).starts[-1])
    used = np.arange(total) if holdout_mask is None else np.flatnonzero(holdout_mask)
    # Evenly spaced rows are a random sample: the stored order is shuffled.
    return used[at_even_distances(len(used), run.evaluate.examples)], len(used)
