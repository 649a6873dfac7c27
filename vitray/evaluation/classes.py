"""Classes by name: those of the images as those of a network, and those of two splits together."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from vitray.data.shards.label_lists import UNKNOWN
from vitray.errors import ConfigError, nearest
from vitray.inference.images import ImageSet
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.outputs import Outputs
from vitray.metrics.arrays import Labeled
from vitray.weights.files import few


def class_numbers(spec: NetworkSpec, images: ImageSet) -> np.ndarray:
    """Return the network's class for each label of the images; refuse images of a class that it lacks.

    Equal lists of names match by number. Where either side has no names, an equal number of classes counts as the same
    classes.
    """
    count = spec.num_classes or 0
    if spec.classes == images.classes:
        return np.arange(count)
    # Names such as 0, 1, 10, 2 look like numbers, and are names where the network has all of them.
    if spec.classes is None or (is_unnamed(images.classes) and not set(images.classes) <= set(spec.classes)):
        # Without names, a source knows no class beyond its largest label.
        if len(images.classes) > count or (len(images.classes) < count and not is_unnamed(images.classes)):
            raise ConfigError(
                f"{spec.url}: classes: got {count}, expected the {len(images.classes)} of {images.url}; classes are"
                " matched by number, as one of the two has no class names"
            )
        return np.arange(count)
    check_distinct(spec.url, spec.classes)
    check_distinct(images.url, images.classes)
    numbers = {name: number for number, name in enumerate(spec.classes)}
    missing = [name for name in images.classes if name not in numbers]
    if missing:
        raise ConfigError(
            f"{images.url}: classes: got {few(missing)}, which {spec.url} does not have; expected classes among"
            f" {few(spec.classes)}{nearest(missing[0], spec.classes)}"
        )
    return np.array([numbers[name] for name in images.classes], np.int64)


def class_names(spec: NetworkSpec, images: ImageSet) -> tuple[str, ...]:
    """Return the names of the network's classes; of the images, where it has none; numbers, where those are fewer."""
    if spec.classes is not None:
        return spec.classes
    if spec.num_classes in (None, len(images.classes)):
        return images.classes
    return tuple(map(str, range(spec.num_classes)))


def check_distinct(url: str, classes: Sequence[str]) -> None:
    """Refuse to match classes by name where two have the same."""
    repeated = [name for name, count in Counter(classes).items() if count > 1]
    if repeated:
        raise ConfigError(f"{url}: classes: got {few(repeated)} more than once, expected distinct names")


def check_same_classes(specs: Sequence[NetworkSpec], images: ImageSet) -> None:
    """Refuse to compare networks whose predictions have different names, or another order on images without names."""
    for spec in specs[1:]:
        first = specs[0]
        if first.classes is None or spec.classes is None:
            differing = [] if spec.num_classes == first.num_classes else [f"{spec.num_classes} classes"]
        elif spec.classes == first.classes:
            differing = []
        else:
            check_distinct(first.url, first.classes)
            check_distinct(spec.url, spec.classes)
            differing = sorted(set(first.classes) ^ set(spec.classes))
            if not differing and is_unnamed(images.classes) and not set(images.classes) <= set(spec.classes):
                raise ConfigError(
                    f"{spec.url}: classes: got another order than that of {first.url}, and {images.url} has only the"
                    " numbers of its classes; expected images with class names, or one network at a time"
                )
        if differing:
            raise ConfigError(f"{spec.url}: classes: they differ from those of {first.url} in {few(differing)}")


def is_unnamed(classes: Sequence[str]) -> bool:
    """Whether class names are only numbers in order, as sources without names have."""
    return tuple(classes) == tuple(map(str, range(len(classes))))


def all_classes(train: ImageSet | None, test: ImageSet) -> list[str]:
    """Return the class names of both splits: a source lists only the classes that a split has."""
    if train is None or train.classes == test.classes:
        return list(test.classes)
    check_distinct(train.url, train.classes)
    check_distinct(test.url, test.classes)
    return list(dict.fromkeys([*train.classes, *test.classes]))


def numbered(outputs: Outputs, images: ImageSet, classes: Sequence[str]) -> Labeled:
    """Return the features with labels as places among `classes`."""
    assert outputs.features is not None
    if images.classes == tuple(classes):  # two classes may have one name
        return Labeled(outputs.features, outputs.labels)
    places = {name: place for place, name in enumerate(classes)}
    own = np.array([places[name] for name in images.classes], np.int64)
    if images.labels == "one":
        return Labeled(outputs.features, own[outputs.labels])
    states_NK = np.full((len(outputs.labels), len(classes)), UNKNOWN, np.int8)  # of a class of the other split, too
    states_NK[:, own] = outputs.labels
    return Labeled(outputs.features, states_NK)
