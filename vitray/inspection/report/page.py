"""An inspection as a page, pictures first, each figure with its circumstances and its files; and as runs in MLflow."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from vitray.inference.images import ImageSet
from vitray.inspection.report.drawings import FigureResult, Rendered
from vitray.inspection.report.subjects import ChosenImages, Subject
from vitray.pages.rendering import PageSection, Picture, render_page
from vitray.system import host_facts, storage
from vitray.tracking.lineage import TrackedDataset, experiment_of
from vitray.tracking.tracker import TrackedRun, Tracker

PAGE = "index.html"


class Inspection(NamedTuple):
    """The networks, the images and the figures of one call of `vitray inspect`."""

    subjects: list[Subject]
    images: ChosenImages | None
    results: list[FigureResult]
    command: str
    """The command that repeats it; empty where none does."""


def render(inspection: Inspection, rendered: Mapping[str, Rendered]) -> str:
    """Return the page; the drawings are rendered by the names of their files."""
    subjects, images = inspection.subjects, inspection.images
    names = " and ".join(subject.name for subject in subjects)
    networks = "; ".join(f"{subject.name} is {network_text(subject)}" for subject in subjects)
    over = "The figures need no images." if images is None else f"{images_text(images)}."
    values = {
        "title": f"Inside {names}",
        "eyebrow": "Inspection" if images is None else f"Inspection over {images.name}",
        "heading": names,
        "lede": f"{networks}. {over}",
        "files": [name for result in inspection.results for name in file_names(result)],
    }
    sections = [PageSection(each.name, each.title, _figure(each, rendered)) for each in inspection.results]
    sections.append(PageSection("origin", "How to reproduce", _origin(inspection)))
    return render_page("inspect.html", values, sections)


def network_text(subject: Subject) -> str:
    """Return the architecture of a network, for a caption."""
    height, width = subject.spec.size
    return f"{subject.spec.network} at {height} x {width} pixels"


def images_text(images: ChosenImages) -> str:
    """Return the number of images and their choice, for a caption."""
    if images.used + len(images.left_out) < images.total:
        text = f"{images.used:,} of {images.total:,} images, at even distances"
    else:
        text = f"{images.used:,} image{'s' if images.used > 1 else ''}"
    return f"{text}; {len(images.left_out)} that cannot be decoded left out" if images.left_out else text


def file_names(result: FigureResult) -> list[str]:
    """Return the names of the files of a figure."""
    pictures = [f"{drawing.file}.{ending}" for drawing in result.drawings for ending in ("png", "svg")]
    return pictures + [f"{table.file}.csv" for table in result.tables]


def _figure(result: FigureResult, rendered: Mapping[str, Rendered]) -> Mapping[str, Any]:
    pictures = [
        Picture(drawing.alt, drawing.caption, rendered[drawing.file].light, rendered[drawing.file].dark)
        for drawing in result.drawings
    ]
    return {
        "prose": result.prose,
        "files": file_names(result),
        "pictures": pictures,
        "galleries": result.galleries,
    }


def _origin(inspection: Inspection) -> Mapping[str, Any]:
    facts = {}
    if inspection.images is not None:
        facts["images"] = f"{inspection.images.origin}, identity {inspection.images.identity}"
        facts |= {"left out": ", ".join(inspection.images.left_out)} if inspection.images.left_out else {}
    for subject in inspection.subjects:
        spec = subject.spec
        preparation = f"{spec.crop}, computed in float32"
        facts[subject.name] = f"{spec.url}: {network_text(subject)}, {preparation}; weights {spec.identity}"
    return {"command": inspection.command, "facts": facts}


# ---- MLflow ----------------------------------------------------------------------------------------------------------


def track_inspection(inspection: Inspection, folder: str, files: Mapping[str, bytes]) -> None:
    """Log the files of an inspection as a run of each network, linked to its training run and registered version.

    A repeated inspection continues its runs.
    """
    images, home = inspection.images, storage.absolute(folder)
    dataset, data, over, on = None, {}, "", ""
    if images is not None:
        data = {"data": images.origin, "data_identity": images.identity}
        over, on = f" over {images_text(images)} ({images.origin})", f" on {images.name}"
        if isinstance(images.source, ImageSet):
            name, url = f"{images.source.name}/{images.source.split}", images.source.url
            dataset = TrackedDataset(name, images.identity, url, "evaluation", images.total, len(images.classes))
    figures = ", ".join(result.title for result in inspection.results)
    tags = {"vitray.kind": "inspection", "vitray.home": home} | host_facts.facts()
    for subject in inspection.subjects:
        spec = subject.spec
        parts = [home, spec.key, spec.url, inspection.command, *([] if images is None else [images.identity])]
        uid = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        run = TrackedRun(uid, f"inside {subject.name}{on}", experiment_of(spec.url))
        params = {"model": spec.url, "network": spec.network, "identity": spec.identity, "command": inspection.command}
        description = f"`{spec.url}`, {network_text(subject)}{over}\n\n{figures}\n\n`{inspection.command}`"
        with Tracker(run, params | data, tags, description) as tracker:
            if dataset is not None:
                tracker.datasets([dataset])
            tracker.link(spec.url, description)
            log_files(tracker, files)


def log_files(tracker: Tracker, files: Mapping[str, bytes]) -> None:
    """Log the files of an inspection as artifacts of a run."""
    for name, content in files.items():
        if name == PAGE:
            tracker.text(f"inspection/{name}", content.decode())
        else:
            tracker.figure(f"inspection/{name}", content)
