"""The source, destination and settings of `vitray shard`; invalid ones are rejected together in one message."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from vitray.config.parsing import apply_changes, parse_overrides
from vitray.config.sections import Fraction, Section, Seed, Size, Text
from vitray.config.validation import explain_error
from vitray.data.augment.decode import MAX_PIXELS
from vitray.errors import ConfigError
from vitray.system import storage

AnySection = TypeVar("AnySection", bound=Section)
Kind = Literal["folder", "index", "coco", "tar", "parquet", "cifar", "idx", "demo"]

# Settings that do not change the dataset.
_EXECUTION = {"workers", "chunk", "max_rejects"}
# Of every shard that vitray writes.
OWN_COLUMNS = ("image", "label", "key", "width", "height")
# Of a dataset with several labels an image: the classes of which nothing is known.
UNKNOWN_COLUMN = "unknown"
_DEMO_ONLY = {"images", "image_size", "task", "val_share", "rarity"}


class ShardSettings(Section):
    """The `key=value` settings of `vitray shard`."""

    kind: Kind | None = None
    """Kind of the source; None detects it."""
    seed: Seed = 0
    """Seed of the image order, of the images that `--split NAME=SHARE` draws, and of the demo images."""
    workers: Annotated[int, Field(ge=1, le=10**4)] | None = None
    """Concurrent tasks; None is one per CPU. Does not change the output."""
    resize: Annotated[int, Field(ge=1, le=10**5)] | None = None
    """Shorter side, in pixels, of images that are larger; they are encoded again as JPEG. None keeps all bytes."""
    quality: Annotated[int, Field(ge=1, le=100)] = 92
    """JPEG quality of resized images."""
    dedupe: Literal["exact", "perceptual", "off"] = "exact"
    """Definition of a duplicate. exact: equal bytes; perceptual: within 3 of 128 fingerprint bits and 8 gray levels."""
    max_rejects: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of rejected images; more of them stop the command."""
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] = MAX_PIXELS
    """Images with more pixels are rejected before they are decoded."""
    shard_bytes: Size = 256 * 2**20
    """Approximate size of a shard."""
    row_group: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Rows of a row group, the unit of reading; None gives about 6 MB within 16..128 rows."""
    chunk: Annotated[int, Field(ge=1, le=10**6)] = 256
    """Images inspected by one task."""
    image: str | None = None
    """Column with the path or the bytes; None takes the usual names."""
    label: str | None = None
    """Column or field with the label; None takes the usual names."""
    separator: Annotated[str, Field(min_length=1, max_length=8)] | None = None
    """Divides the labels of an image where they are text, as in cat|dog; an empty text is no label. None: a text is one
    label. Lists, of Parquet or of a tar's .json, need none."""
    unknown: str | None = None
    """Column or field with the classes of which it is not known whether an image shows them, like its labels; * stands
    for all that are not among them. Such a class is neither learned nor scored at that image."""
    columns: Annotated[tuple[Text, ...], Field(strict=False, max_length=64)] = ()
    """Further columns of an index or of Parquet, or fields of a tar's .json, to keep as text (data.fold.group)."""
    group: Text | None = None
    """One of `columns`: images with an equal value are in one split. `--split NAME=SHARE` draws them together, and a
    source that has them in two splits is refused. None: each image by itself."""
    images: Annotated[int, Field(ge=1, le=10**7)] = 6000
    """Demo: train images."""
    val_share: Fraction = 1 / 6
    """Demo: additional validation images, as a share of `images`."""
    image_size: Annotated[int, Field(ge=8, le=4096)] = 64
    """Demo: side of an image in pixels."""
    task: Literal["shape", "texture", "scene"] = "shape"
    """Demo: the labels. scene: images of two to four shapes, with a label each."""
    rarity: Annotated[float, Field(ge=1, le=1000)] = 1
    """Demo: how many times more often the first shape appears than the last one; those between follow a geometric
    series."""
    classes: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = None
    """Names of the classes to take, numbered in this order; None takes all."""

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        for name in self.columns:
            if name in (*OWN_COLUMNS, UNKNOWN_COLUMN) or self.columns.count(name) > 1:
                used = "a column that shards have anyway" if self.columns.count(name) == 1 else "it more than once"
                raise ValueError(f"columns: got {name}, {used}; expected other names, each once")
        if self.group is not None and self.group not in self.columns:
            raise ValueError(f"group: got {self.group}, expected one of columns, as in columns=[{self.group}]")
        return self


class ShardRequest(NamedTuple):
    """One call of `vitray shard`."""

    source: str
    dest: str
    settings: ShardSettings = ShardSettings()
    keep: tuple[str, ...] = ()
    """The splits to take; for a source without splits, the name of its only split."""
    draw: tuple[tuple[str, float], ...] = ()
    """(split, share of the train images to draw into it)."""
    index_only: bool = False

    def recorded(self) -> dict[str, Any]:
        """Return the settings that decide the content, for dataset.json."""
        unused = set() if self.source == "demo" else _DEMO_ONLY
        # Older datasets do not record these.
        newer = ("classes", "columns", "group", "separator", "unknown")
        unused = unused | {name for name in newer if not getattr(self.settings, name)}
        unused = unused | ({"rarity"} if self.settings.rarity == 1 else set())
        settings = self.settings.model_dump(mode="json", exclude=_EXECUTION | unused)
        return settings | {"keep": list(self.keep), "draw": [list(pair) for pair in self.draw]}


def read_request(
    source: str, dest: str, splits: Sequence[str] = (), overrides: Sequence[str] = (), index_only: bool = False
) -> ShardRequest:
    """Return the request of a command line."""
    settings = read_settings(ShardSettings, overrides, "settings")
    if source != "demo" and (foreign := sorted(_DEMO_ONLY & settings.model_fields_set)):
        raise ConfigError(f"{foreign[0]}: a setting of the demo source only; the source here is {source}")
    for url in (source, dest):
        storage.filesystem(url)  # rejects unknown schemes
    keep, draw = _parse_splits(splits)
    return ShardRequest(source, dest, settings, keep, draw, index_only)


def read_settings(section: type[AnySection], overrides: Sequence[str], where: str) -> AnySection:
    """Return a section with some settings overridden."""
    changes = parse_overrides(overrides)
    tree: dict[str, Any] = {}
    apply_changes(changes, tree)
    try:
        return section.model_validate(tree)
    except ValidationError as invalid:
        places = {path: f"override {override!r}" for path, override in zip(changes, overrides, strict=True)}
        raise explain_error(invalid, section, places, where) from None


def _parse_splits(splits: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]]:
    keep, draw = [], []
    for split in splits:
        name, equals, share = split.partition("=")
        try:
            is_valid = name.isidentifier() and (not equals or 0 < float(share) < 1)
        except ValueError:
            is_valid = False
        if not is_valid or name in [*keep, *dict(draw)] or (equals and name == "train"):
            raise ConfigError(f"--split {split}: expected each NAME once, or NAME=SHARE of train with 0 < SHARE < 1")
        if equals:
            draw.append((name, float(share)))
        else:
            keep.append(name)
    if sum(share for _, share in draw) >= 1:
        raise ConfigError(f"--split {' '.join(splits)}: the shares leave nothing to train on")
    return tuple(keep), tuple(draw)
