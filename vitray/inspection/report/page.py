"""The page of an inspection: pictures first, each figure with its circumstances and its files."""

from collections.abc import Mapping
from typing import NamedTuple

from vitray.inspection.report.drawings import FigureResult, Rendered
from vitray.inspection.report.subjects import ChosenImages, Subject
from vitray.pages.markup import Content, Html, Picture, command_box, fact_list, illustrated, joined, stacked, tag
from vitray.pages.shell import PageSection, html_page

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
    sections = [_section(result, rendered) for result in inspection.results]
    sections.append(PageSection("origin", "How to reproduce", _origin(inspection)))
    title = f"Inside {' and '.join(subject.name for subject in inspection.subjects)}"
    files = [name for result in inspection.results for name in file_names(result)]
    links = [tag("li", tag("a", name, has={"href": name})) for name in files]
    footer = tag("footer", "Beside this page:", tag("ul", *links)) if links else tag("footer")
    return html_page(title, _headline(inspection), sections, footer)


def _headline(inspection: Inspection) -> Html:
    images = inspection.images
    networks = "; ".join(f"{subject.name} is {network_text(subject)}" for subject in inspection.subjects)
    over = "The figures need no images." if images is None else f"{images_text(images)}."
    return tag(
        "header",
        tag("p.eyebrow", "Inspection" if images is None else f"Inspection over {images.name}"),
        tag("h1", " and ".join(subject.name for subject in inspection.subjects)),
        tag("p.lede", f"{networks}. {over}"),
    )


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


def _section(result: FigureResult, rendered: Mapping[str, Rendered]) -> PageSection:
    links = [part for name in file_names(result) for part in (" ", tag("a", name, has={"href": name}))]
    pictures = [
        Picture(drawing.alt, drawing.caption, rendered[drawing.file].light, rendered[drawing.file].dark)
        for drawing in result.drawings
    ]
    files = tag("p.files", "Files:", *links) if links else None
    if result.gallery is None:
        return PageSection(result.name, result.title, joined(illustrated([result.prose], pictures), files))
    body = joined(result.gallery, tag("p", result.prose), stacked(pictures), files)
    return PageSection(result.name, result.title, body)


def _origin(inspection: Inspection) -> Html:
    facts: dict[str, Content] = {}
    if inspection.images is not None:
        facts["images"] = f"{inspection.images.origin}, identity {inspection.images.identity}"
        facts |= {"left out": ", ".join(inspection.images.left_out)} if inspection.images.left_out else {}
    for subject in inspection.subjects:
        spec = subject.spec
        preparation = f"{spec.crop}, computed in float32"
        facts[subject.name] = f"{spec.url}: {network_text(subject)}, {preparation}; weights {spec.identity}"
    return joined(command_box(inspection.command) if inspection.command else None, fact_list(facts))
