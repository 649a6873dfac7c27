"""`vitray inspect`: the page, pictures and tables of a network's inside, and bad input. Nothing here needs Ray."""

import csv
import importlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import scrambled
from PIL import Image
from test_layers import ROOT
from test_report import measured_page

from pipelines.__main__ import main
from vitray import Model, Run, ViT, save_model
from vitray import inspection as inside
from vitray.config.evaluation import NEEDS, FigureNeeds
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError
from vitray.inspection.report import figures, inspect_networks
from vitray.inspection.report.drawings import Rendered
from vitray.inspection.report.figures import FIGURES, Figure, choose_figures
from vitray.inspection.report.inspect_networks import Request, make_figures
from vitray.inspection.report.page import file_names, render
from vitray.pages.plotting import new_figure

MADE = ["rollout", "distance", "branches"]
CLASSES = ["cat & <dog>", "owl", "猫"]


@pytest.fixture(autouse=True)
def untracked(monkeypatch):
    """Without the tracking store that a user of this folder may have."""
    monkeypatch.setattr(inspect_networks, "has_store", lambda: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two networks, a headless one, and pictures of other sizes."""
    path = tmp_path_factory.mktemp("inspect")
    kinds = {
        "parallel": {"name": "vit_u3x2_8"},
        "mean": {"name": "vit_u2x1_8", "class_token": False, "pool": "mean", "image_size": (16, 32)},
        "headless": {"name": "vit_u2x1_8", "num_classes": None},
    }
    for name, settings in kinds.items():
        run = Run(model=Model.model_validate({"num_classes": 3, "image_size": 32, **settings}))
        save_model(str(path / name), run, scrambled(ViT(run.model)), None if name == "headless" else CLASSES)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
    for name in ("a.png", "b <i>.jpg"):
        Image.fromarray(pixels).save(path / name)
    (path / "text.png").write_text("not pixels")
    return path


@pytest.fixture(scope="module")
def made(folder):
    """Figures of two networks over demo images, not rendered."""
    request = Request(str(folder / "parallel"), ["demo"], MADE, str(folder / "mean"), images=6)
    return make_figures(request._replace(out=str(folder / "made")))[0]


def rows_of(table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table.csv().decode())))


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("img", "link", "meta", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_has_every_figure_with_its_files(made):
    picture = Rendered(b"light", b"dark", b"svg")
    page = render(made, {drawing.file: picture for result in made.results for drawing in result.drawings})
    tags = Tags(page).seen
    sections = [attributes["id"] for tag, attributes in tags if tag == "section"]
    assert sections == [*(result.name for result in made.results), "origin"]
    links = {attributes["href"] for tag, attributes in tags if tag == "a"}
    assert links >= {name for result in made.results for name in file_names(result)}
    assert all(attributes["alt"] for tag, attributes in tags if tag == "img")
    assert "<i>" not in page
    assert "cat &amp; &lt;dog&gt;" in page
    assert "vit_u3x2_8 at 32 x 32 pixels" in page
    assert re.search(r">[^<]*\. 6 of [\d,]+ images, at even distances", page)
    assert "script" not in {tag for tag, _ in tags}


@pytest.mark.parametrize("place", range(len(MADE)), ids=MADE)
def test_pictures_and_tables_can_be_read(made, place):
    result = made.results[place]
    drawn = result.drawings[0].rendered()
    assert min(Image.open(io.BytesIO(drawn.light)).size) > 200
    assert Image.open(io.BytesIO(drawn.light)).size == Image.open(io.BytesIO(drawn.dark)).size
    assert drawn.light != drawn.dark
    assert drawn.svg.startswith(b"<?xml")
    for table in result.tables:
        assert len({len(row) for row in table.rows}) == 1
        assert rows_of(table)


def test_captions_name_the_network_the_images_and_the_dataset(made):
    drawings = [drawing for result in made.results for drawing in result.drawings]
    assert len(drawings) == 2 + 2 * 2 + 1
    for drawing in drawings:
        size = "16 x 32" if drawing.caption.startswith("mean: ") else "32 x 32"
        assert re.match(r"(mean|parallel): 6 of [\d,]+ images of demo, val ", drawing.caption)
        assert f"(identity {made.images.identity[:8]}) at {size} pixels" in drawing.caption


def test_equal_drawings_have_equal_bytes(made):
    drawing = made.results[1].drawings[0]
    assert drawing.rendered() == drawing.rendered()


def test_tables_hold_the_values_of_the_functions(made):
    tables = {table.file: rows_of(table) for result in made.results for table in result.tables}
    for subject in made.subjects:
        batch = subject.batch()
        assert torch.equal(batch, normalized(torch.from_numpy(subject.images), subject.spec.normalize))
        spread = inside.attention_distances(subject.vit, batch)
        own = [row for row in tables["distance"] if row["model"] == subject.name]
        values = [float(row["distance_pixels"]) for row in own]
        assert values == pytest.approx(spread.distance.mean(-1).flatten().tolist(), rel=1e-5)
        deviations = [float(row["distance_pixels_sd_over_images"]) for row in own]
        assert deviations == pytest.approx(spread.distance.std(-1).flatten().tolist(), rel=1e-3)
        maps = inside.attention_maps(subject.vit, batch)
        own = [row for row in tables["rollout"] if (row["model"], row["map"]) == (subject.name, "rollout")]
        assert [float(row["attention"]) for row in own] == pytest.approx(maps.rollout.flatten().tolist(), rel=1e-4)
        own = [row for row in tables["predictions"] if row["model"] == subject.name]
        best = [(row["class"], float(row["probability"])) for row in own if row["rank"] == "1"]
        wanted = maps.logits.softmax(1).max(1)
        assert [name for name, _ in best] == [CLASSES[k] for k in wanted.indices]
        assert [value for _, value in best] == pytest.approx(wanted.values.tolist(), rel=1e-5)


def test_a_figure_that_does_not_apply_says_so(made):
    [branches] = [result for result in made.results if result.name == "branches"]
    assert [drawing.file for drawing in branches.drawings] == ["branches-parallel"]
    assert "The levels of mean have one branch each, so there is nothing to compare." in branches.prose


def test_image_files_are_inspected_from_the_command_line(folder, capsys):
    files = [str(folder / name) for name in ("headless", "a.png", "b <i>.jpg")]
    words = [*files, "--figures", "rollout,distance"]
    assert main(["inspect", *words, "--levels", "1", "--out", str(folder / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["page"] == str(folder / "out" / "index.html")
    assert (result["images"], result["figures"]) == (2, ["rollout", "distance"])
    assert {path.name for path in (folder / "out").iterdir()} == {*result["files"], "index.html"}
    page = (folder / "out" / "index.html").read_text()
    assert "gradient-weighted ×" not in page
    assert "b &lt;i&gt;.jpg" in page
    assert re.search(r"vitray inspect \S+headless .*--figures rollout,distance --levels 1", page)
    levels = {row["level"] for row in csv.DictReader((folder / "out" / "distance.csv").read_text().splitlines())}
    assert levels == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_a_browser_shows_the_page_in_any_width_and_theme(made, tmp_path, width, theme):
    rendered = {drawing.file: drawing.rendered() for result in made.results for drawing in result.drawings}
    measured = measured_page(render(made, rendered), width, theme, tmp_path)
    assert measured["wide"] <= width
    assert measured["boxes"] == 0
    assert measured["drawn"]
    assert measured["images"] > 12
    assert measured["dark"] == (len(rendered) if theme == "dark" else 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel", "a.png", "text.png"], "text.png: not an image; expected image files, or one dataset"),
        (["parallel", "a.png", "absent.png"], "absent.png: no such file; expected image files, or one dataset"),
        (["parallel", "absent"], "absent: no files here"),
        (["parallel", "a.png", "--figures", "rolout"], "--figures: got rolout; expected some of rollout, components"),
        (["parallel", "--figures", "distance"], "--figures: distance needs images; expected a dataset or image files"),
        (["parallel", "a.png", "--levels", "1,3"], "levels: got 1, 3; expected some of 0 to 2 in ascending order"),
        (["parallel", "a.png", "--compare", "parallel"], "which is the inspected network; expected another"),
        (["text.png", "a.png"], "text.png"),
        (["absent", "a.png"], "absent"),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(folder, words, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert main(["inspect", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(folder.iterdir()) == before


def test_figures_are_those_that_the_inputs_allow():
    assert choose_figures(["distance", "rollout"], has_images=True, has_two=False) == ["rollout", "distance"]
    without = choose_figures([], has_images=False, has_two=False)
    assert all(not NEEDS[name].images and not NEEDS[name].two for name in without)
    assert choose_figures([], has_images=True, has_two=True) == list(NEEDS)
    with pytest.raises(ConfigError, match="did you mean rollout"):
        choose_figures(["rolout"], has_images=True, has_two=False)


def test_every_figure_has_all_parts():
    """What it needs, its row, its module, and its definition in the documentation."""
    assert list(FIGURES) == list(NEEDS)
    files = {path.stem for path in Path(figures.__file__).parent.glob("*.py")}
    assert files == {"__init__", *FIGURES}
    documentation = (ROOT / "docs/inspection.md").read_text()
    for name, figure in FIGURES.items():
        module = importlib.import_module(f"{figures.__name__}.{name}")
        assert figure[1:] == (module.PROSE, module.make, getattr(module, "measure", None))
        assert figure.title
        assert figure.measure is None or NEEDS[name].images
        assert f"`{name}`" in documentation


def test_a_new_row_is_in_the_help_on_the_page_and_a_file(folder, tmp_path, monkeypatch, capsys):
    def make(subjects, result):
        for subject in subjects:
            rows = [["images"], [sum(subject.measured["count"])]]
            result.add(subject.name, "Images", "counted.", lambda theme, title: new_figure(theme, 2, 2), rows)
        return result

    monkeypatch.setitem(NEEDS, "count", FigureNeeds(vit_only="only these can count."))
    monkeypatch.setitem(FIGURES, "count", Figure("Count", "Counts images.", make, lambda view: len(view.images)))
    assert choose_figures([], has_images=True, has_two=False)[-1] == "count"
    with pytest.raises(SystemExit):
        main(["inspect", "-h"])
    assert "spectra, changes, features, count, as in" in " ".join(capsys.readouterr().out.split())
    words = [str(folder / name) for name in ("headless", "a.png", "b <i>.jpg")]
    assert main(["inspect", *words, "--figures", "count", "--out", str(tmp_path)]) == 0
    names = {f"count-headless.{ending}" for ending in ("png", "svg", "csv")}
    assert {path.name for path in tmp_path.iterdir()} == names | {"index.html"}
    assert (tmp_path / "count-headless.csv").read_text().split() == ["images", "2"]
    page = (tmp_path / "index.html").read_text()
    assert '<section id="count"' in page
    assert "Counts images." in page
    assert all(f'href="{name}"' in page for name in names)
