"""Label sets: read from files laid out as their authors publish them, scored as their authors do, refused by name."""

import json

import numpy as np
import pytest

from vitray.errors import ConfigError
from vitray.metrics.label_sets import _literals, read_label_set, score_label_set

WORDNET = [f"n{10_000_000 + 7 * index:08d}" for index in range(1000)]
SHUFFLED = [WORDNET[index] for index in np.random.default_rng(0).permutation(1000)]
NUMBERS = [str(index) for index in range(1000)]


def random_logits(images, seed=0):
    return np.random.default_rng(seed).normal(size=(images, 1000)).astype(np.float32)


def folders(path, names):
    for name in names:
        (path / name).mkdir(parents=True)
    return path


def real(tmp_path, lists):
    (tmp_path / "real.json").write_text(json.dumps(lists))
    return tmp_path / "real.json"


@pytest.mark.parametrize("classes", [WORDNET, SHUFFLED, NUMBERS])
def test_real_equals_the_authors_example(tmp_path, classes):
    rng = np.random.default_rng(1)
    lists = [rng.choice(1000, rng.integers(0, 400), replace=False).tolist() for _ in range(60)]
    lists[3] = []
    labels = read_label_set("real", real(tmp_path, lists), classes)
    order = [classes.index(name) for name in (NUMBERS if classes is NUMBERS else WORDNET)]
    logits = random_logits(60)  # in the order of ImageNet
    of_model = np.empty_like(logits)
    of_model[:, order] = logits
    names = [f"val/{WORDNET[0]}/ILSVRC2012_val_{row + 1:08d}.JPEG" for row in range(60)]
    score = score_label_set(of_model, labels.ids(names), labels)
    hits = [logits[row].argmax() in lists[row] for row in range(60) if lists[row]]
    top5 = [bool(set(np.argsort(-logits[row])[:5]) & set(lists[row])) for row in range(60) if lists[row]]
    assert (score.images, score.not_counted) == (len(hits), 60 - len(hits))
    assert (score.hits1, score.hits5) == (sum(hits), sum(top5))
    assert score.top1 == np.mean(hits)
    assert 3 not in score.rows


def test_numeric_folders_of_imagenet_v2_are_indices(tmp_path):
    labels = read_label_set("imagenet-v2", folders(tmp_path, NUMBERS), SHUFFLED)
    assert labels.targets["10"] == (SHUFFLED.index(WORDNET[10]),)  # and not the third folder by name
    logits = np.eye(1000)[[SHUFFLED.index(WORDNET[7]), 5]]
    score = score_label_set(logits, labels.ids(["v2/7/a.jpeg", "v2/8/b.jpeg"]), labels)
    assert (score.hits1, score.images) == (1, 2)


@pytest.mark.parametrize("kind", ["imagenet-a", "imagenet-r"])
@pytest.mark.parametrize("source", ["folder", "readme", "code"])
def test_a_subset_restricts_the_prediction_to_its_classes(tmp_path, kind, source):
    chosen = sorted(np.random.default_rng(2).choice(1000, 200, replace=False).tolist())
    names = [WORDNET[index] for index in chosen]
    if source == "folder":
        path = folders(tmp_path / "images", names)
    elif source == "readme":
        path = tmp_path / "README.txt"
        path.write_text("The classes are\n\n" + "".join(f"{name} a thing\n" for name in names))
    else:
        path = tmp_path / "eval.py"
        mapping = {index: chosen.index(index) if index in chosen else -1 for index in range(1000)}
        literal = f"thousand_k_to_200 = {mapping}" if kind == "imagenet-a" else f"imagenet_r_wnids = {set(names)}"
        path.write_text(f"import torch\nall_wnids = {WORDNET}\n{literal}\nraise SystemExit\n")
    labels = read_label_set(kind, path, SHUFFLED)
    logits, label = random_logits(300), np.random.default_rng(3).integers(0, 200, 300)
    of_model = np.empty_like(logits)
    of_model[:, [SHUFFLED.index(name) for name in WORDNET]] = logits
    score = score_label_set(of_model, [names[each] for each in label], labels)
    restricted = logits[:, chosen]
    assert score.hits1 == (restricted.argmax(1) == label).sum()
    assert score.hits5 == (np.argsort(-restricted, 1)[:, :5] == label[:, None]).sum()
    assert score.images == 300


def test_imagenet_sketch_is_not_restricted(tmp_path):
    labels = read_label_set("imagenet-sketch", folders(tmp_path, WORDNET[:3]), WORDNET)
    logits = np.zeros((1, 1000))
    logits[0, 999], logits[0, 1] = 2, 1
    score = score_label_set(logits, [WORDNET[1]], labels)
    assert (score.hits1, score.hits5) == (0, 1)


def objectnet(tmp_path, to_imagenet=None, lines=None):
    """The authors' four files: lines in another order than the indices, one folder without an ImageNet class."""
    lines = lines or [f"thing {index}, item {index}" for index in range(1000)]
    numbers = {str(index): (index * 3) % 1000 for index in range(1000)}
    files = {
        "folder_to_objectnet_label.json": {"clock": "Alarm clock", "bike": "Bicycle", "egg": "Egg"},
        "objectnet_to_imagenet_1k.json": to_imagenet
        or {"Alarm clock": "thing 3, item 3; thing 6, item 6", "Bicycle": "thing 9, item 9"},
        "pytorch_to_imagenet_2012_id.json": numbers,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "imagenet_to_label_2012_v2").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_objectnet_maps_many_classes_to_one_folder(tmp_path):
    labels = read_label_set("objectnet", objectnet(tmp_path), SHUFFLED)
    clock = tuple(SHUFFLED.index(WORDNET[index]) for index in (1, 2))  # lines 3 and 6 are indices 1 and 2
    assert labels.targets == {"clock": clock, "bike": (SHUFFLED.index(WORDNET[3]),), "egg": ()}
    logits = np.zeros((5, 1000))
    for row, index in enumerate((clock[0], clock[1], labels.targets["bike"][0], 999, 999)):
        logits[row, index] = 1
    score = score_label_set(logits, ["clock", "clock", "clock", "bike", "egg"], labels)
    assert (score.images, score.not_counted, score.hits1) == (4, 1, 2)
    assert score.rows.tolist() == [0, 1, 2, 3]


def test_the_order_of_images_changes_nothing(tmp_path):
    labels = read_label_set("imagenet-r", folders(tmp_path, WORDNET[:50]), WORDNET)
    logits, ids = random_logits(80), np.array([WORDNET[row % 50] for row in range(80)])
    order = np.random.default_rng(1).permutation(80)
    one, other = score_label_set(logits, ids, labels), score_label_set(logits[order], ids[order], labels)
    assert one[:7] == other[:7]
    assert np.array_equal(one.ranks[order], other.ranks)


def test_of_equal_logits_the_lower_class_comes_first(tmp_path):
    labels = read_label_set("imagenet-r", folders(tmp_path, WORDNET[10:13]), WORDNET)
    score = score_label_set(np.zeros((3, 1000)), WORDNET[10:13], labels)
    assert score.ranks.tolist() == [0, 1, 2]
    assert score.top5 == 1.0


def refused(message, kind, path, classes=WORDNET):
    with pytest.raises(ConfigError, match=message):
        read_label_set(kind, path, classes)


def test_maps_that_do_not_fit_are_refused_by_name(tmp_path):
    refused("got 'imagenet-x'; expected one of real, .*; did you mean imagenet-", "imagenet-x", tmp_path)
    refused("real: the model has 2 classes such as 'cat'; expected the 1,000 classes", "real", tmp_path, ["cat", "dog"])
    refused("imagenet-a: the model has no classes", "imagenet-a", tmp_path, [])
    refused("no-file: FileNotFoundError; expected the file", "real", tmp_path / "no-file")
    refused("image 2 has class 1000; expected 0 to 999", "real", real(tmp_path, [[1], [1000]]))
    refused("image 1 has class '7'", "real", real(tmp_path, [["7"]]))
    refused("got dict; expected a list", "real", real(tmp_path, {"1": [2]}))
    (tmp_path / "broken.json").write_text("[\n[1")
    refused("line 2 is not JSON", "real", tmp_path / "broken.json")
    refused("got the folder 'n10000000'; expected numbers", "imagenet-v2", folders(tmp_path / "v2", WORDNET[:2]))
    refused("no folder in it", "imagenet-sketch", folders(tmp_path / "empty", ["."]))
    few = ["n01440764", "n01443537"]
    unknown = folders(tmp_path / "r", ["n01440764", "n01443538"])
    refused(
        "1 of 2 classes of imagenet-r are not among the 2 .* first is 'n01443538'; .*; did you mean n01443537",
        "imagenet-r",
        unknown,
        few,
    )
    (tmp_path / "code.py").write_text("wnids = []")
    refused("no literal; expected imagenet_r_wnids", "imagenet-a", tmp_path / "code.py")
    (tmp_path / "code.py").write_text("imagenet_r_wnids = {print()}")
    refused("imagenet_r_wnids is no literal", "imagenet-r", tmp_path / "code.py")
    (tmp_path / "none.txt").write_text("no id")
    refused("no WordNet id; expected the classes of imagenet-a", "imagenet-a", tmp_path / "none.txt")


def test_maps_of_objectnet_that_do_not_fit_are_refused_by_name(tmp_path):
    refused(
        "'Alarm clok' has no folder; .*did you mean Alarm clock", "objectnet", objectnet(tmp_path, {"Alarm clok": "x"})
    )
    refused(
        "'Egg' stands for 'thing 3, item', which is in 0",
        "objectnet",
        objectnet(tmp_path, {"Egg": "thing 3, item"}),
    )
    refused("are not those of the lines", "objectnet", objectnet(tmp_path, lines=["a", "b"]))


def test_a_folder_in_place_of_an_authors_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="a folder, pipe or device; expected the file that its authors publish"):
        _literals(tmp_path)


def test_bad_images_are_refused_by_name(tmp_path):
    labels = read_label_set("objectnet", objectnet(tmp_path), WORDNET)
    for logits, ids, message in (
        (np.zeros((1, 3)), ["egg"], "objectnet: logits of 3 classes; expected 1000"),
        (np.zeros((1, 1000)), ["eggs"], "got an image of 'eggs'; expected one of its 3 ids; did you mean egg"),
        (np.zeros((2, 1000)), ["egg"], "1 ids; expected 2"),
        (np.zeros((1, 1000)), ["egg"], "none of 1 images has a right class"),
    ):
        with pytest.raises(ConfigError, match=message):
            score_label_set(logits, ids, labels)
