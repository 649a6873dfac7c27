"""The views of images as a trained network takes them: decoded, resized and cropped, uint8.

Shapes: B images, H x W pixels, C colors.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitray.config.augmentation import Augment, CenterCrop, RandomResizedCrop
from vitray.config.views import Views
from vitray.data.augment.decode import UndecodableImage, decode_image


class View(NamedTuple):
    """How an image becomes the input of a network."""

    crop: CenterCrop
    size: tuple[int, int]

    def of(self, image_HWC: np.ndarray) -> np.ndarray:
        """Return the view of a decoded image."""
        from vitray.data.augment.crops import crop_center  # imports torch, and not all processes with views have it

        return crop_center(image_HWC, self.crop, self.size)


class ViewKind(NamedTuple):
    """Views of one kind of each image."""

    size: tuple[int, int]
    crop: Augment | CenterCrop
    number: int | None = None
    """None: one view, without an axis of views."""

    @property
    def views(self) -> int:
        """The number of views of an image."""
        return 1 if self.number is None else self.number


def view_kinds(views: Views, shape: tuple[int, int], patch: int, general: Augment) -> tuple[ViewKind, ...]:
    """Return the global and the local views of images of a shape.

    Where they are augmented, and how images are decoded, is as `general` has it.
    """
    kinds = [(views.large, views.large_size(shape)), (views.small, views.small_size(shape, patch))]
    return tuple(
        ViewKind(
            size,
            Augment(
                crop=RandomResizedCrop(scale=kind.scale),
                flip=kind.flip,
                policy=kind.policy,
                decode=general.decode,
                on=general.on,
            ),
            kind.count,
        )
        for kind, size in kinds
        if kind is not None
    )


def decode_views(
    contents: Sequence[bytes | str],
    views: Sequence[View],
    *,
    rows: int | None = None,
    run: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
) -> tuple[list[np.ndarray], list[str | None]]:
    """Return each view of some encoded images (BHWC), and for each image the reason why it has no pixels, or None.

    A string in place of an image is such a reason. These images are black, and black ones fill a batch of `rows`.
    `run` maps the decoding over the images, as a thread pool does.
    """

    def decode(content: bytes | str) -> list[np.ndarray] | str:
        if isinstance(content, str):
            return content
        try:
            image_HWC = decode_image(content)
        except UndecodableImage as error:
            return str(error)
        return [view.of(image_HWC) for view in views]

    batches = [np.zeros((rows or len(contents), *view.size, 3), np.uint8) for view in views]
    reasons: list[str | None] = [None] * len(contents)
    for index, result in enumerate(run(decode, contents)):
        if isinstance(result, str):
            reasons[index] = result
        else:
            for batch_BHWC, view_HWC in zip(batches, result, strict=True):
                batch_BHWC[index] = view_HWC
    return batches, reasons


def usable(reasons: Sequence[str | None]) -> np.ndarray:
    """Return for each image whether it has pixels."""
    return np.array([reason is None for reason in reasons], bool)
