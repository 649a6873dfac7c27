"""A few images of the evaluated split, the same at every evaluation: predictions, and the patches attended to."""

import numpy as np
import torch

from vitray.data.augment.batch import normalised
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.image import crop_centre
from vitray.data.stream.decoding import locate_rows, read_rows
from vitray.evaluation.arrays import Examples
from vitray.inspection.rollout import attention_maps
from vitray.models.vit import ViT
from vitray.training.context import WorkerContext


class ExampleImages:
    """The images, read once."""

    def __init__(self, context: WorkerContext, device: torch.device) -> None:
        run, dataset = context.run, context.dataset
        assert run.data.evaluated is not None
        rows, mask = locate_rows(dataset, run.data.evaluated), context.holdout_mask
        used = np.arange(rows.starts[-1]) if mask is None else np.flatnonzero(mask)
        # Evenly spaced rows are a random sample: the stored order is shuffled.
        number = min(run.evaluate.pictures, len(used))
        chosen = used[np.linspace(0, len(used) - 1, number).astype(np.int64)]
        views, labels = [], []
        for content, label, _ in read_rows(chosen, rows).values():
            try:
                image_HWC = decode_image(content)
            except UndecodableImage:
                continue
            views.append(crop_centre(image_HWC, run.data.eval_crop, run.model.image_shape))
            labels.append(label)
        self._images, self._labels = np.stack(views) if views else None, np.array(labels)
        self._normalise, self._device = run.data.normalise, device

    @torch.no_grad()
    def look(self, vit: ViT) -> Examples | None:
        """Return the predictions of a network with a head; None if no image can be decoded."""
        if self._images is None:
            return None
        was_training = vit.training
        vit.eval()
        images_BCHW = normalised(torch.from_numpy(self._images).to(self._device), self._normalise)
        maps = attention_maps(vit, images_BCHW)
        vit.train(was_training)
        probability_B, predicted_B = maps.logits.float().softmax(1).max(1)
        arrays = [each.float().cpu().numpy() for each in (predicted_B, probability_B, maps.rollout)]
        return Examples(self._images, self._labels, arrays[0].astype(np.int64), *arrays[1:])
