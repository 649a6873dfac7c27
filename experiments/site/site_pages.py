"""Hooks of mkdocs: pages of the site that README, LOG and CHANGELOG hold, and links that leave docs/."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# Pages of the site by the file in the root of the repository.
ROOT_PAGES = {"README.md": "index.md", "experiments/LOG.md": "log.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//[^"]+"""
    # A canonical link, which `make docs-serve` adds to each page, names the page's own address and loads nothing.
    r"""|<link\b(?![^>]*\brel="canonical")[^>]*\bhref="(?:https?:)?//[^"]+"""
)
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add home and measurements from README, log and changelog, and the script that draws diagrams."""
    readme = (ROOT / "README.md").read_text()
    first_screen, _, rest = readme.partition("\n## Results\n")
    measurements = "# Measurements\n" + rest.partition("\n## ")[0]
    pages = {name: (ROOT / source).read_text() for source, name in ROOT_PAGES.items()}
    pages |= {"index.md": first_screen, "measurements.md": measurements}
    for name, text in pages.items():
        # Links of the root: docs/data.md is data.md on the site.
        moved = LINK.sub(lambda link: link[0].replace("](docs/", "]("), text)
        files.append(File.generated(config, name, content=moved))
    mermaid = ROOT / ".venv-docs" / "mermaid.js"
    files.append(File.generated(config, "assets/mermaid.js", abs_src_path=str(mermaid)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files outside docs/ into their pages, or else into their paths."""
    folder = posixpath.dirname(page.file.src_uri)
    is_root = page.file.src_uri in (*ROOT_PAGES.values(), "measurements.md")

    def replaced(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups()
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        outside = path.removeprefix("../")
        if outside == path and not (is_root and not (ROOT / "docs" / path).exists()):
            return link[0]
        if outside in ROOT_PAGES:
            return f"{mark}[{text}]({posixpath.relpath(ROOT_PAGES[outside], folder or '.')}{anchor or ''})"
        if not (ROOT / outside).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {target}: no such file")
        return text if "`" in text else f"`{outside}`"

    parts = FENCE.split(markdown)
    return "".join(part if index % 2 else LINK.sub(replaced, part) for index, part in enumerate(parts))


def on_post_build(config: Any) -> None:
    """Refuse pages that load a script, a style or a picture of another host."""
    for page in sorted(Path(config["site_dir"]).rglob("*.html")):
        if loaded := LOADED.search(page.read_text()):
            raise ValueError(f"{page.name}: loads from another host: {loaded[0]}")
