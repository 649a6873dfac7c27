"""One inspection from addresses to its folder: check everything, make the figures, write the page."""

import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vitray import storage
from vitray.cluster.storage_check import check_writable
from vitray.errors import ConfigError
from vitray.inference.models import describe_network
from vitray.inspection.levels import check_levels
from vitray.inspection.report.drawings import Rendered, file_name
from vitray.inspection.report.figures import FIGURES, choose_figures
from vitray.inspection.report.page import Inspection, render
from vitray.inspection.report.subjects import ChosenImages, Subject, choose_images, views

DEFAULT_FOLDER = "inspect"
MOST_IMAGES = 64


class Request(NamedTuple):
    """One call of `vitray inspect`."""

    model: str
    words: Sequence[str] = ()
    """A dataset or image files; none for the figures that need no images."""
    figures: Sequence[str] = ()
    """None named: all that the inputs allow."""
    compare: str | None = None
    split: str = "val"
    images: int = MOST_IMAGES
    """The most images of a dataset."""
    levels: Sequence[int] | None = None
    """The levels whose attention distance is measured; None is all."""
    out: str | None = None
    """None is a folder below `inspect`, named after the networks and the data."""

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        words = ["vitray", "inspect", self.model, *self.words]
        words += ["--compare", self.compare] if self.compare else []
        words += ["--split", self.split] if self.split != "val" else []
        words += ["--images", str(self.images)] if self.images != MOST_IMAGES else []
        words += ["--figures", ",".join(self.figures)] if self.figures else []
        words += ["--levels", ",".join(map(str, self.levels))] if self.levels else []
        return shlex.join(words + (["--out", self.out] if self.out else []))


def inspect_networks(request: Request) -> tuple[Inspection, str]:
    """Make the figures, write the folder, the page last, and return them and the address of the page."""
    inspection, folder = make_figures(request)
    rendered: dict[str, Rendered] = {}
    for result in inspection.results:
        for drawing in result.drawings:
            rendered[drawing.file] = drawing.rendered()
            storage.write_bytes(storage.join(folder, f"{drawing.file}.png"), rendered[drawing.file].light)
            storage.write_bytes(storage.join(folder, f"{drawing.file}.svg"), rendered[drawing.file].svg)
        for table in result.tables:
            storage.write_bytes(storage.join(folder, f"{table.file}.csv"), table.csv())
    page = storage.join(folder, "index.html")
    storage.write_bytes(page, render(inspection, rendered).encode(errors="backslashreplace"))
    return inspection, page


def make_figures(request: Request) -> tuple[Inspection, str]:
    """Return the figures, and the folder that is theirs."""
    names = choose_figures(request.figures, bool(request.words), request.compare is not None)
    if request.compare == request.model:
        raise ConfigError(f"--compare: got {request.compare}, which is the inspected network; wanted another")
    urls = [request.model, *([request.compare] if request.compare else [])]
    described = [describe_network(url) for url in urls]
    titles = [spec.name for spec, _ in described]
    if len(set(titles)) < len(titles):
        titles = urls
    images = choose_images(request.words, request.split, request.images)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subjects = []
    for title, (spec, vit) in zip(titles, described, strict=True):
        if request.levels is not None:
            check_levels(vit, request.levels)
        pixels_BHWC = None if images is None else views(images, spec)
        subjects.append(Subject(title, spec, vit.to(device), images, pixels_BHWC, request.levels))
    folder = request.out or storage.join(DEFAULT_FOLDER, _folder_name(titles, images))
    check_writable(folder)
    results = []
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        results.append(FIGURES[name].make(subjects))
    return Inspection(subjects, images, results, request.command), folder


def _folder_name(titles: Sequence[str], images: ChosenImages | None) -> str:
    end = [] if images is None else [storage.join(images.name).rpartition("/")[2].replace(", ", "-")]
    return file_name("-".join([*titles, *end]))
