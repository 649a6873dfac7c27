"""Label sets of ImageNet's test sets: maps from a folder or file of an image to the model's classes.

The maps are read from the files that the authors of a set publish; none is part of this package. ReaL (Beyer et al.,
2020) and ImageNet-V2 number the classes in the order of their WordNet ids. Predictions on ImageNet-A and -R (Hendrycks
et al., 2021) are restricted to the classes of the set. ObjectNet (Barbu et al., 2019) counts a prediction among all
classes as right if it is one of those that the folder stands for; folders without an ImageNet class are not counted.

Shapes: N images, K classes of the model, C classes that compete.
"""

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from vitray.errors import ConfigError, nearest
from vitray.metrics.arrays import check_matrix
from vitray.metrics.classification import CHUNK_VALUES, TOP, label_ranks

IMAGENET_CLASSES = 1000
MOST_BYTES = 2**26
WORDNET_ID = re.compile(r"n\d{8}")


class LabelSet(NamedTuple):
    """The right classes of each image of a test set, as indices of the model's classes."""

    name: str
    targets: dict[str, tuple[int, ...]]
    """{id of an image: right classes}; images without any are not counted."""
    by_file: bool
    """The id is the name of the file without its ending, or else that of its folder."""
    columns: tuple[int, ...]
    """The classes that compete for the prediction, ascending."""
    num_classes: int

    def ids(self, names: Sequence[str]) -> list[str]:
        """Return the ids of images from their paths."""
        paths = [PurePosixPath(name) for name in names]
        return [path.stem if self.by_file else path.parent.name for path in paths]


class LabelSetScore(NamedTuple):
    """The scores of a model on a label set."""

    name: str
    images: int
    """Images that have a right class."""
    not_counted: int
    hits1: int
    hits5: int
    top1: float
    top5: float
    """A right class is among the first five that compete."""
    rows: np.ndarray
    """The rows of the counted images."""
    ranks: np.ndarray
    """The rank of the best right class of each counted image, from 0."""


def read_label_set(kind: str, path: str | Path, classes: Sequence[str]) -> LabelSet:
    """Return the label set of a published file or folder for a model with these classes.

    `real`: real.json. `imagenet-v2`, `imagenet-sketch`: the folder of class folders. `imagenet-a`, `imagenet-r`: that
    folder, its README.txt, or the authors' eval.py. `objectnet`: the folder `mappings`.
    """
    path = Path(path)
    if not classes:
        raise ConfigError(f"{kind}: the model has no classes; expected a classifier")
    match kind:
        case "real":
            return _read_real(path, classes)
        case "imagenet-v2":
            return _read_numbered(path, classes)
        case "imagenet-sketch":
            return _of_wordnet_ids(kind, path, _folders(path), classes, restricted=False)
        case "imagenet-a" | "imagenet-r":
            return _of_wordnet_ids(kind, path, _read_subset(path, classes), classes, restricted=True)
        case "objectnet":
            return _read_objectnet(path, classes)
    kinds = ("real", "imagenet-v2", "imagenet-a", "imagenet-r", "imagenet-sketch", "objectnet")
    raise ConfigError(f"label set: got {kind!r}; expected one of {', '.join(kinds)}{nearest(kind, kinds)}")


def score_label_set(logits_NK: Any, ids_N: Sequence[str], labels: LabelSet) -> LabelSetScore:
    """Return the scores of N images; of equal logits, the lower class comes first."""
    logits_NK = check_matrix("logits", logits_NK, "classes")
    images, num_classes = logits_NK.shape
    if num_classes != labels.num_classes:
        raise ConfigError(f"{labels.name}: logits of {num_classes} classes; expected {labels.num_classes}")
    if len(ids_N) != images:
        raise ConfigError(f"{labels.name}: {len(ids_N)} ids; expected {images}, one for each image")
    for each in ids_N:
        if each not in labels.targets:
            raise ConfigError(
                f"{labels.name}: got an image of {each!r}; expected one of its {len(labels.targets):,} ids"
                f"{nearest(each, labels.targets)}"
            )
    rows_M = np.array([row for row, each in enumerate(ids_N) if labels.targets[each]], dtype=np.int64)
    if not len(rows_M):
        raise ConfigError(f"{labels.name}: none of {images:,} images has a right class; expected at least one")
    columns_C, size = np.array(labels.columns), max(1, CHUNK_VALUES // num_classes)
    ranks_M = np.empty(len(rows_M), np.int64)
    for start in range(0, len(rows_M), size):
        rows_B = rows_M[start : start + size]
        right_BK = np.zeros((len(rows_B), num_classes), dtype=bool)
        for own_K, row in zip(right_BK, rows_B.tolist(), strict=True):
            own_K[list(labels.targets[ids_N[int(row)]])] = True
        logits_BC, right_BC = logits_NK[rows_B][:, columns_C].astype(np.float64), right_BK[:, columns_C]
        best_B = np.where(right_BC, logits_BC, -np.inf).argmax(1)
        ranks_M[start : start + size] = label_ranks(logits_BC, best_B)
    hits1, hits5 = int((ranks_M == 0).sum()), int((ranks_M < TOP).sum())
    count = len(rows_M)
    return LabelSetScore(
        labels.name, count, images - count, hits1, hits5, hits1 / count, hits5 / count, rows_M, ranks_M
    )


# ---- readers ---------------------------------------------------------------------------------------------------------


def _read_real(path: Path, classes: Sequence[str]) -> LabelSet:
    order, lists = _imagenet_order("real", classes), _read_json(path)
    if not (isinstance(lists, list) and all(isinstance(each, list) for each in lists)):
        raise ConfigError(f"{path}: got {type(lists).__name__}; expected a list with a list of classes for each image")
    targets = {}
    for number, labels in enumerate(lists, 1):
        for label in labels:
            if type(label) is not int or not 0 <= label < IMAGENET_CLASSES:
                raise ConfigError(f"{path}: image {number} has class {label!r}; expected 0 to {IMAGENET_CLASSES - 1}")
        targets[f"ILSVRC2012_val_{number:08d}"] = tuple(order[label] for label in labels)
    return LabelSet("real", targets, True, tuple(range(len(classes))), len(classes))


def _read_numbered(path: Path, classes: Sequence[str]) -> LabelSet:
    order, targets = _imagenet_order("imagenet-v2", classes), {}
    for folder in _folders(path):
        if not folder.isdecimal() or int(folder) >= IMAGENET_CLASSES:
            raise ConfigError(f"{path}: got the folder {folder!r}; expected numbers from 0 to {IMAGENET_CLASSES - 1}")
        targets[folder] = (order[int(folder)],)
    return LabelSet("imagenet-v2", targets, False, tuple(range(len(classes))), len(classes))


def _of_wordnet_ids(name: str, path: Path, ids: Sequence[str], classes: Sequence[str], *, restricted: bool) -> LabelSet:
    if not ids:
        raise ConfigError(f"{path}: no WordNet id; expected the classes of {name}, such as n01443537")
    index = {each: position for position, each in enumerate(classes)}
    missing = [each for each in ids if each not in index]
    if missing:
        raise ConfigError(
            f"{path}: {len(missing)} of {len(ids)} classes of {name} are not among the {len(classes)} classes of the "
            f"model, the first is {missing[0]!r}; expected classes such as {classes[0]!r}{nearest(missing[0], classes)}"
        )
    targets = {each: (index[each],) for each in ids}
    columns = sorted(index[each] for each in targets) if restricted else range(len(classes))
    return LabelSet(name, targets, False, tuple(columns), len(classes))


def _read_subset(path: Path, classes: Sequence[str]) -> list[str]:
    """Return the WordNet ids of the classes of a set."""
    if path.is_dir():
        return _folders(path)
    if path.suffix != ".py":
        return [found[0] for line in _read(path).splitlines() if (found := WORDNET_ID.match(line.strip()))]
    literals = _literals(path)
    if "imagenet_r_wnids" in literals:
        return sorted(literals["imagenet_r_wnids"])
    if "thousand_k_to_200" in literals:
        order = _imagenet_order("imagenet-a", classes)
        chosen = [index for index, place in literals["thousand_k_to_200"].items() if place != -1]
        return [classes[order[int(index)]] for index in chosen]
    raise ConfigError(f"{path}: no literal; expected imagenet_r_wnids or thousand_k_to_200, as in the authors' eval.py")


def _read_objectnet(path: Path, classes: Sequence[str]) -> LabelSet:
    order = _imagenet_order("objectnet", classes)
    folders = _read_json(path / "folder_to_objectnet_label.json")
    to_imagenet = _read_json(path / "objectnet_to_imagenet_1k.json")
    numbers = _read_json(path / "pytorch_to_imagenet_2012_id.json")
    lines = [line.strip() for line in _read(path / "imagenet_to_label_2012_v2").splitlines()]
    if sorted(numbers.values()) != list(range(len(lines))):
        raise ConfigError(f"{path}: the numbers of pytorch_to_imagenet_2012_id.json are not those of the lines")
    unknown = sorted(set(to_imagenet) - set(folders.values()))
    if unknown:
        raise ConfigError(
            f"{path}: {unknown[0]!r} has no folder; expected a label{nearest(unknown[0], folders.values())}"
        )
    index_of_line = {line: int(index) for index, line in numbers.items()}
    targets = {}
    for folder, label in folders.items():
        names = to_imagenet[label].split("; ") if label in to_imagenet else []
        for each in names:
            if lines.count(each) != 1:
                raise ConfigError(
                    f"{path}: {label!r} stands for {each!r}, which is in {lines.count(each)} lines of "
                    f"imagenet_to_label_2012_v2; expected it in one{nearest(each, lines)}"
                )
        targets[folder] = tuple(order[index_of_line[lines.index(each)]] for each in names)
    return LabelSet("objectnet", targets, False, tuple(range(len(classes))), len(classes))


def _imagenet_order(name: str, classes: Sequence[str]) -> list[int]:
    """Return the model's class of each index of ImageNet: by sorted WordNet ids, or by number."""
    if len(set(classes)) == len(classes) == IMAGENET_CLASSES:
        if all(WORDNET_ID.fullmatch(each) for each in classes):
            return sorted(range(len(classes)), key=lambda position: classes[position])
        if set(classes) == {str(index) for index in range(IMAGENET_CLASSES)}:
            return sorted(range(len(classes)), key=lambda position: int(classes[position]))
    raise ConfigError(
        f"{name}: the model has {len(classes)} classes such as {classes[0]!r}; expected the {IMAGENET_CLASSES:,} "
        "classes of ImageNet, as WordNet ids (n01440764) or as numbers from 0"
    )


def _folders(path: Path) -> list[str]:
    if not path.is_dir():
        raise ConfigError(f"{path}: not a folder; expected one with a folder for each class")
    folders = sorted(each.name for each in path.iterdir() if each.is_dir() and each.name[0] != ".")
    if not folders:
        raise ConfigError(f"{path}: no folder in it; expected one for each class")
    return folders


def _literals(path: Path) -> dict[str, Any]:
    """Return the classes that an authors' eval.py assigns, without running it."""
    text = _read(path)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}: line {error.lineno} is not Python; expected the authors' eval.py") from error
    except (RecursionError, MemoryError, ValueError):
        raise ConfigError(f"{path}: cannot be read as Python; expected the authors' eval.py") from None
    assigned = [
        (target.id, node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Set | ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("imagenet_r_wnids", "thousand_k_to_200")
    ]
    try:
        return {name: ast.literal_eval(value) for name, value in assigned}
    except ValueError as error:
        raise ConfigError(f"{path}: {assigned[0][0]} is no literal; expected the authors' eval.py") from error


def _read(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: a folder, pipe or device; expected the file that its authors publish")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path}: more than {MOST_BYTES:,} bytes; expected the file that its authors publish")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error.__class__.__name__}; expected the file that its authors publish") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno} is not JSON; expected the file of its authors") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; expected the file of its authors") from None
