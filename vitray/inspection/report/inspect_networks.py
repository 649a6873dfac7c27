"""One inspection from addresses to its folder: check everything, make the figures, write the page."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from vitray.cluster.storage_check import check_writable
from vitray.errors import ConfigError
from vitray.inference.models import named_networks
from vitray.inspection.levels import check_levels
from vitray.inspection.report.drawings import file_name
from vitray.inspection.report.figures import FIGURES, choose_figures, make_figure
from vitray.inspection.report.measuring import measure
from vitray.inspection.report.page import PAGE, Inspection, render, track_inspection
from vitray.inspection.report.subjects import MOST_SHOWN, ChosenImages, Subject, choose_images
from vitray.models.network import vit_of
from vitray.system import storage
from vitray.system.mlflow_client import has_store

DEFAULT_FOLDER = "inspect"


class Request(NamedTuple):
    """One call of `vitray inspect`."""

    model: str
    words: Sequence[str] = ()
    """A dataset or image files; none for the figures that need no images."""
    figures: Sequence[str] = ()
    """None named: all that the inputs allow."""
    compare: str | None = None
    split: str = "val"
    images: int = MOST_SHOWN
    """The most images of a dataset."""
    levels: Sequence[int] | None = None
    """The levels whose attention distance is measured; None is all."""
    out: str | None = None
    """None is a folder below `inspect`, named after the networks and the data."""
    workers: int | None = None
    """Actors that measure more than 64 images; None is all GPUs or CPUs of a cluster, and without one this process."""

    @property
    def command(self) -> str:
        """The command line that repeats it."""
        words = ["vitray", "inspect", self.model, *self.words]
        words += ["--compare", self.compare] if self.compare else []
        words += ["--split", self.split] if self.split != "val" else []
        words += ["--images", str(self.images)] if self.images != MOST_SHOWN else []
        words += ["--figures", ",".join(self.figures)] if self.figures else []
        words += ["--levels", ",".join(map(str, self.levels))] if self.levels else []
        return shlex.join(words + (["--out", self.out] if self.out else []))


def inspect_networks(request: Request) -> tuple[Inspection, str]:
    """Make the figures, write the folder, the page last, and return them and the address of the page.

    If a tracking store is configured, the figures become artifacts of a run of each network there.
    """
    is_tracked = has_store()
    inspection, folder = make_figures(request)
    print(f"drawing {sum(len(result.drawings) for result in inspection.results)} pictures ...", file=sys.stderr)
    files = draw_files(inspection)
    for name, content in files.items():
        storage.write_bytes(storage.join(folder, name), content)
    if is_tracked:
        track_inspection(inspection, folder, files)
    return inspection, storage.join(folder, PAGE)


def draw_files(inspection: Inspection) -> dict[str, bytes]:
    """Return the files of an inspection by name: PNG, SVG and CSV of every figure, and the page, which is last."""
    drawings = [drawing for result in inspection.results for drawing in result.drawings]
    rendered = {drawing.file: drawing.rendered() for drawing in drawings}
    files = {
        f"{name}.{ending}": content
        for name, drawn in rendered.items()
        for ending, content in (("png", drawn.light), ("svg", drawn.svg))
    }
    files |= {f"{table.file}.csv": table.csv() for result in inspection.results for table in result.tables}
    return files | {PAGE: render(inspection, rendered).encode(errors="backslashreplace")}


def make_figures(request: Request) -> tuple[Inspection, str]:
    """Return the figures, and the folder that is theirs."""
    names = choose_figures(request.figures, bool(request.words), request.compare is not None)
    if request.compare == request.model:
        raise ConfigError(f"--compare: got {request.compare}, which is the inspected network; expected another")
    urls = [request.model, *([request.compare] if request.compare else [])]
    named = named_networks(urls)
    # Without a figure that measures, no image is used but those that are shown.
    most = request.images if any(FIGURES[name].measure for name in names) else min(request.images, MOST_SHOWN)
    images = choose_images(request.words, request.split, most)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subjects = []
    for title, spec, network in named:
        if request.levels is not None:
            check_levels(vit_of(network, f"{spec.url}: --levels"), request.levels)
        shown_BHWC = None if images is None else images.shown_views(spec)
        subjects.append(Subject(title, spec, network.to(device), images, shown_BHWC, request.levels))
    titles = [title for title, _, _ in named]
    folder = request.out or storage.join(DEFAULT_FOLDER, _folder_name(titles, images))
    check_writable(folder)
    subjects, left_out = measure(subjects, names, request.workers)
    if images is not None and left_out:
        images = replace(images, left_out=left_out)
    results = []
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        results.append(make_figure(name, subjects))
        for reason in results[-1].reasons:
            print(f"{name}: {reason}", file=sys.stderr)
    return Inspection(subjects, images, results, request.command), folder


def _folder_name(titles: Sequence[str], images: ChosenImages | None) -> str:
    end = [] if images is None else [storage.join(images.name).rpartition("/")[2].replace(", ", "-")]
    return file_name("-".join([*titles, *end]))
