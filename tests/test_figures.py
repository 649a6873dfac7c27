"""Run figures: correct numbers for any number of classes and any name, and no text cut off."""

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from PIL import Image, ImageColor

from vitray.pages.plotting import LIGHT
from vitray.tracking import figures
from vitray.tracking.figures import MistakePicture, draw_confusion, draw_curves, draw_mistakes

ODD_NAMES = [
    "cat",
    "American Staffordshire terrier, Staffordshire terrier, American pit bull terrier",
    "price in $ and $_{x",
    "two\nlines",
    "猫",
    "",
    "MMMMMMMMMMMMMMMMMMMMMMMMMMMM",
]


def names(number: int) -> list[str]:
    return [f"{ODD_NAMES[label % len(ODD_NAMES)]} {label}" for label in range(number)]


def counts(number: int, images: int = 30) -> np.ndarray:
    """Counts with a strong diagonal."""
    rng = np.random.default_rng(number)
    noise = rng.integers(0, 2, (number, number)) * rng.integers(0, 3, (number, number))
    return noise + images * np.eye(number, dtype=int)


def mistakes(number: int) -> list[MistakePicture]:
    rng = np.random.default_rng(number)
    sizes = [(32, 32), (200, 90), (60, 300)]
    return [
        MistakePicture(
            rng.integers(0, 256, (*sizes[place % 3], 3), dtype=np.uint8),
            ODD_NAMES[place % len(ODD_NAMES)],
            ODD_NAMES[(place + 1) % len(ODD_NAMES)],
            float(rng.random()),
            f"val/a folder with a long name/image {place}",
        )
        for place in range(number)
    ]


def history(points: int) -> figures.History:
    steps = range(50, 50 * points + 1, 50)
    keys = [key for keys in figures.PANELS.values() for key in keys]
    return {key: [(step, 1 / (step + place)) for step in steps] for place, key in enumerate(keys)}


DRAWINGS = {
    "1 class": lambda: draw_confusion(counts(1), names(1)),
    "2 classes": lambda: draw_confusion(counts(2), names(2)),
    "20 classes": lambda: draw_confusion(counts(20), names(20)),
    "60 classes": lambda: draw_confusion(counts(60), names(60)),
    "1000 classes": lambda: draw_confusion(counts(1000), names(1000)),
    "large counts": lambda: draw_confusion(counts(10, 123_456), names(10)),
    "nothing confused": lambda: draw_confusion(5 * np.eye(100, dtype=int), names(100)),
    "no images": lambda: draw_confusion(np.zeros((3, 3), int), names(3)),
    "1 mistake": lambda: draw_mistakes(mistakes(1)),
    "30 mistakes": lambda: draw_mistakes(mistakes(30)),
    "no mistakes": lambda: draw_mistakes([]),
    "1 point": lambda: draw_curves(history(1)),
    "500 points": lambda: draw_curves(history(500)),
    "one curve": lambda: draw_curves({"train/loss": [(1, 2.0), (2, 1.0)]}),
    "nothing recorded": lambda: draw_curves({}),
    "nothing finite": lambda: draw_curves({"train/loss": [(1, float("nan"))]}),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_nothing_is_cut_off(name):
    with Image.open(io.BytesIO(DRAWINGS[name]())) as opened:
        pixels = np.array(opened.convert("RGB"))
    assert max(pixels.shape) < 3000
    paper = np.array(ImageColor.getrgb(LIGHT.paper))
    # Ink at the edge means that something is cut off.
    edges = [pixels[:4], pixels[-4:], pixels[:, :4], pixels[:, -4:]]
    assert all((edge == paper).all() for edge in edges)
    assert (pixels != paper).any()


@pytest.mark.parametrize("name", ["2 classes", "1000 classes", "1 mistake", "one curve"])
def test_equal_input_draws_equal_bytes(name):
    assert DRAWINGS[name]() == DRAWINGS[name]()


@pytest.fixture
def raw_figures(monkeypatch):
    """Make the functions return the figure itself."""
    monkeypatch.setattr(figures, "to_png", lambda figure: figure)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_rows_of_the_matrix_are_shares_of_the_true_class(raw_figures):
    figure = draw_confusion(np.array([[3, 1], [0, 0]]), ["cat", "dog"])
    [shares] = figure.axes[0].findobj(AxesImage)
    assert shares.get_array().tolist() == [[0.75, 0.25], [0, 0]]
    assert {"3", "1", "cat", "dog", "true", "predicted", "75.0 % of 4 images right"} <= set(texts(figure))
    assert figure.findobj(QuadMesh)  # the scale


@pytest.mark.parametrize(("number", "readable"), [(20, True), (21, False)])
def test_cells_show_counts_only_while_they_are_readable(raw_figures, number, readable):
    figure = draw_confusion(7 * np.eye(number, dtype=int), [f"class {label}" for label in range(number)])
    assert texts(figure).count("7") == (number if readable else 0)
    assert f"class {number - 1}" in texts(figure)


def test_many_classes_show_the_most_confused_pairs(raw_figures):
    counts_KK = 10 * np.eye(100, dtype=int)
    counts_KK[3, 4], counts_KK[4, 3], counts_KK[90, 1], counts_KK[5, 6] = 7, 2, 9, 2
    figure = draw_confusion(counts_KK, [f"class {label}" for label in range(100)])
    [axis] = figure.axes
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == [f"class {true} → class {predicted}" for true, predicted in [(90, 1), (3, 4), (4, 3), (5, 6)]]
    assert [bar.get_width() for bar in axis.patches] == [9, 7, 2, 2]
    assert "9 of 19" in texts(figure)


def test_counts_must_fit_the_classes():
    with pytest.raises(ValueError, match=r"got counts of shape \(2, 3\) for 2 classes"):
        draw_confusion(np.zeros((2, 3)), ["a", "b"])


def test_the_most_confident_mistakes_come_first(raw_figures):
    numbered = [mistake._replace(key=str(place)) for place, mistake in enumerate(mistakes(30))]
    figure = draw_mistakes(numbered)
    ranked = sorted(numbered, key=lambda mistake: -mistake.probability)[: figures.MOST_MISTAKES]
    assert [axis.texts[2].get_text() for axis in figure.axes] == [mistake.key for mistake in ranked]
    assert "24 of 30 mistakes, most confident first" in texts(figure)
    images = [np.asarray(axis.images[0].get_array()) for axis in figure.axes]
    assert all((image == mistake.image).all() for image, mistake in zip(images, ranked, strict=True))


def test_curves_show_recorded_metrics_and_count_non_finite_values(raw_figures):
    recorded = {"train/loss": [(2, float("inf")), (1, 3.0), (3, 2.0)], "val/top1": [(3, 0.5)], "val/other": [(1, 1.0)]}
    figure = draw_curves(recorded)
    assert [axis.get_title("left") for axis in figure.axes] == ["loss", "top1"]
    [line] = figure.axes[0].lines
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False]
    assert figure.axes[0].get_title("right") == "last 2 at 3, 1 not finite"


def test_many_points_get_a_running_mean(raw_figures):
    values = np.random.default_rng(0).random(500)
    figure = draw_curves({"train/loss": list(enumerate(values))})
    mean, raw = figure.axes[0].lines
    assert np.array_equal(raw.get_ydata(), values)
    steps, means = mean.get_data()
    for step, value in zip(steps.astype(int)[::50], means[::50], strict=True):
        assert np.isclose(value, values[step - 5 : step + 5].mean())


def test_drawing_does_not_load_pyplot():
    code = "import sys; from vitray.tracking import figures; figures.draw_curves({'train/loss': [(1, 1.0)]})"
    code += "; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
