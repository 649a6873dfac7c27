"""Contact sheets of a dataset: some of its images, with the augmented views that training would see."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from vitray.config.augmentation import Augment
from vitray.config.sections import Section, Seed
from vitray.config.views import Views
from vitray.data.augment.contact_sheets import Sample, contact_sheet
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.data.augment.views import ViewKind, view_kinds
from vitray.data.shards.label_lists import names_of
from vitray.data.shards.manifest import Dataset, open_dataset
from vitray.data.shards.options import read_settings
from vitray.data.stream.decoding import locate_rows, read_rows
from vitray.errors import ConfigError
from vitray.system import storage

MOST_PIXELS = 2**28  # a sheet of 0.8 GB before it is compressed


class PreviewSettings(Section):
    """The settings of `vitray shard --look`."""

    split: str = "train"
    size: Annotated[int, Field(ge=1, le=4096)] = 224
    """Side of a view in pixels."""
    samples: Annotated[int, Field(ge=1, le=1000)] = 8
    """Images, one per row."""
    copies: Annotated[int, Field(ge=1, le=1000)] = 7
    """Views of each image, one per epoch."""
    seed: Seed = 0
    augment: Augment = Augment()
    views: Views | None = None
    """Several views of each image, as tasks that compare them see it; null: one view in each epoch."""

    @model_validator(mode="after")
    def _sheet_fits_in_memory(self) -> Self:
        columns = self.copies if self.views is None else self.views.large.count
        if (pixels := self.size**2 * self.samples * (columns + 1)) > MOST_PIXELS:
            raise ValueError(
                f"samples x copies at {self.size} px have {pixels:,} pixels, expected at most {MOST_PIXELS:,}"
            )
        return self


def write_preview(url: str, target: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Write a contact sheet (PNG) of a dataset, and return its path and shape."""
    settings = read_settings(PreviewSettings, overrides, "look")
    size, shape = (settings.size, settings.size), (settings.samples, settings.copies)
    kinds = (ViewKind(size, settings.augment),)
    if settings.views is not None:
        kinds = view_kinds(settings.views, size, 1, settings.augment)
    sheet = sample_sheet(open_dataset(url), settings.split, kinds, shape, settings.seed)
    storage.write_bytes(target, sheet)
    return {"look": target, "samples": settings.samples, "copies": settings.copies}


def sample_sheet(
    dataset: Dataset,
    split: str,
    kinds: Sequence[ViewKind],
    shape: tuple[int, int] = (8, 7),
    seed: int = 0,
) -> bytes:
    """Return a contact sheet (PNG) of a split; `shape` is the number of images and of views of each.

    Corrupt images are left out.
    """
    rows = locate_rows(dataset, split)
    total = int(rows.starts[-1])
    # Evenly spaced rows are a random sample: the stored order is shuffled.
    numbers = np.linspace(0, total - 1, min(shape[0], total)).astype(np.int64)
    stored = read_rows(numbers, rows).values()
    samples = []
    for data, label, key in stored:
        with suppress(UndecodableImage):  # training counts and names them
            samples.append(Sample(decode_image(data), key, names_of(label, dataset.classes)))
    if not samples:
        raise ConfigError(f"{dataset.url}: none of {len(numbers)} images of split {split} can be decoded")
    return contact_sheet(samples, kinds, copies=shape[1], seed=seed)
