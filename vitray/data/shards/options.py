"""What `vitray shard` is asked for: source, destination and settings, refused in one message where they do not fit."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from vitray import storage
from vitray.config.parsing import apply_changes, parse_words
from vitray.config.sections import Fraction, Section, Size
from vitray.config.validation import refusal
from vitray.data.augment.decode import MAX_PIXELS
from vitray.errors import ConfigError

Kind = Literal["folder", "index", "tar", "parquet", "cifar", "idx", "demo"]

# Words that decide how the work is done, not what comes out of it.
_HOW = {"workers", "chunk", "max_rejects"}
_DEMO_ONLY = {"images", "image_size", "task", "val_share"}


class Settings(Section):
    """The `key=value` words of `vitray shard`."""

    kind: Kind | None = None
    """What the source is; None recognises it."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides the order of the images, what `--split NAME=SHARE` draws, and the demo images."""
    workers: Size | None = None
    """Tasks at a time; None is one per CPU. Never changes what is written."""
    resize: Size | None = None
    """Re-encode images whose shorter side is longer, as JPEG with that shorter side; None keeps every byte."""
    quality: Annotated[int, Field(ge=1, le=100)] = 92
    """Of the JPEGs that resize makes."""
    dedupe: Literal["exact", "perceptual", "off"] = "exact"
    """Which images are the same: equal bytes; or nearly equal to the eye, within 3 of 128 bits and 8 grey levels."""
    max_rejects: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of images that may be set aside before the whole is refused."""
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] = MAX_PIXELS
    """Images with more are set aside before they are decoded."""
    shard_bytes: Size = 256 * 2**20
    """Images per shard are chosen to come near this."""
    row_group: Size | None = None
    """Rows read at a time; None comes near 6 MB within 16..128 rows."""
    chunk: Size = 256
    """Images inspected by one task."""
    image: str | None = None
    """Column with the path or the bytes; None takes the usual names."""
    label: str | None = None
    """Column or field with the label; None takes the usual names."""
    images: Size = 6000
    """Of a demo: train images."""
    val_share: Fraction = 1 / 6
    """Of a demo: fresh validation images, as a share of `images`."""
    image_size: Annotated[int, Field(ge=8)] = 64
    """Of a demo: pixels a side."""
    task: str = "shape"
    """Of a demo: what the labels say, shape or texture."""


class Job(NamedTuple):
    """One call of `vitray shard`."""

    source: str
    dest: str
    settings: Settings = Settings()
    keep: tuple[str, ...] = ()
    """The splits to take; of a source that names none, what its images are called."""
    draw: tuple[tuple[str, float], ...] = ()
    """(split, share of the train images to draw into it)."""
    index_only: bool = False

    def recorded(self) -> dict[str, Any]:
        """What decides the content, for dataset.json."""
        other = set() if self.source == "demo" else _DEMO_ONLY
        settings = self.settings.model_dump(mode="json", exclude=_HOW | other)
        return settings | {"keep": list(self.keep), "draw": [list(pair) for pair in self.draw]}


def read_job(
    source: str, dest: str, splits: Sequence[str] = (), words: Sequence[str] = (), index_only: bool = False
) -> Job:
    """The job that the words of the command line spell."""
    changes = parse_words(words)
    tree: dict[str, Any] = {}
    apply_changes(changes, tree)
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as invalid:
        places = {path: f"the word {word!r}" for path, word in zip(changes, words, strict=True)}
        raise refusal(invalid, Settings, places, "settings") from None
    if source != "demo" and (foreign := sorted(_DEMO_ONLY & set(changes))):
        raise ConfigError(f"{foreign[0]}: a setting of the demo source alone; the source here is {source}")
    for url in (source, dest):
        storage.filesystem(url)  # refuses an address of another kind
    keep, draw = _read_splits(splits)
    return Job(source, dest, settings, keep, draw, index_only)


def _read_splits(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]]:
    keep, draw = [], []
    for word in words:
        name, equals, share = word.partition("=")
        try:
            fits = name.isidentifier() and (not equals or 0 < float(share) < 1)
        except ValueError:
            fits = False
        if not fits or name in [*keep, *dict(draw)] or (equals and name == "train"):
            raise ConfigError(f"--split {word}: wanted each NAME once, or NAME=SHARE of train with 0 < SHARE < 1")
        if equals:
            draw.append((name, float(share)))
        else:
            keep.append(name)
    if sum(share for _, share in draw) >= 1:
        raise ConfigError(f"--split {' '.join(words)}: the shares leave nothing to train")
    return tuple(keep), tuple(draw)
