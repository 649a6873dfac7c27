"""A picture of what training sees: some images of a dataset, and their augmented views, as the stream makes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from vitray import storage
from vitray.config.augmentation import Augment
from vitray.config.parsing import apply_changes, parse_words
from vitray.config.sections import Section, Size
from vitray.config.validation import refusal
from vitray.data.augment.contact_sheets import Sample, contact_sheet
from vitray.data.augment.decode import decode_image
from vitray.data.shards.manifest import Dataset, open_dataset
from vitray.data.stream.decoding import read_rows, rows_of
from vitray.errors import ConfigError, nearest


class Look(Section):
    """What to look at."""

    split: str = "train"
    size: Size = 224
    """Pixels a side of a view."""
    samples: Size = 8
    """Images, a row each."""
    copies: Size = 7
    """Views of an image, one an epoch."""
    seed: int = 0
    augment: Augment = Augment()


def draw_look(url: str, target: str, words: Sequence[str]) -> dict[str, Any]:
    """Write a contact sheet (PNG) of a dataset; the words are `Look`'s settings."""
    tree: dict[str, Any] = {}
    apply_changes(parse_words(words), tree)
    try:
        look = Look.model_validate(tree)
    except ValidationError as invalid:
        places = {word.partition("=")[0]: f"the word {word!r}" for word in words}
        raise refusal(invalid, Look, places, "look") from None
    dataset = open_dataset(url)
    if look.split not in dataset.splits:
        known = ", ".join(dataset.splits)
        raise ConfigError(f"{url}: no split {look.split!r}, wanted one of {known}{nearest(look.split, dataset.splits)}")
    side = (look.size, look.size)
    sheet = sample_sheet(dataset, look.split, look.augment, side, look.samples, look.copies, look.seed)
    storage.write_bytes(target, sheet)
    return {"look": target, "samples": look.samples, "copies": look.copies}


def sample_sheet(
    dataset: Dataset,
    split: str,
    augment: Augment,
    size: tuple[int, int],
    samples: int = 8,
    copies: int = 7,
    seed: int = 0,
) -> bytes:
    """A contact sheet (PNG) of some images of a split and their views."""
    rows = rows_of(dataset, split)
    total = int(rows.starts[-1])
    # Spread over the split; its stored order is shuffled already.
    found = read_rows(np.linspace(0, total - 1, min(samples, total)).astype(np.int64), rows)
    shown = [Sample(decode_image(data), key, dataset.classes[label]) for data, label, key in found.values()]
    return contact_sheet(shown, augment, size, copies=copies, seed=seed)
