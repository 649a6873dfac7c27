"""python experiments/site/write_notebooks.py: write the notebook of each page of docs/tutorials/ with jupytext."""

from pathlib import Path

import jupytext
import nbformat

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
PYTHON = "---\njupyter:\n  kernelspec:\n    display_name: Python 3\n    language: python\n    name: python3\n---\n\n"
# Without the kernel in the page's header, which GitHub would show as a table.
PAGE = {"extension": ".md", "format_name": "markdown"}
NO_METADATA = {"notebook_metadata_filter": "-all", "cell_metadata_filter": "-all"}


def notebook_of(page: str) -> str:
    """Return a page as a notebook: Python in code cells, shell commands in cells with %%bash. Equal pages give equal
    bytes."""
    notebook = jupytext.reads(PYTHON + page, PAGE)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # otherwise drawn at random
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def page_of(notebook: str) -> str:
    """Return a notebook as a page; outputs of its cells are left out."""
    read = nbformat.reads(notebook, as_version=4)
    read.metadata = {"jupytext": NO_METADATA}
    return jupytext.writes(read, PAGE)


def main() -> None:
    """Write the notebooks."""
    for page in sorted(FOLDER.glob("*.md")):
        page.with_suffix(".ipynb").write_text(notebook_of(page.read_text()))


if __name__ == "__main__":
    main()
