"""Messages that name a page: the page and the heading exist; links between the pages of docs/ hold too."""

import re

import pytest
from test_layers import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
NAMED = {
    (path.relative_to(ROOT).as_posix(), page, anchor)
    for folder in ("vitray", "pipelines")
    for path in (ROOT / folder).rglob("*.py")
    for page, anchor in re.findall(r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", path.read_text())
}


def anchors(text):
    """Return the anchors of a page's headings, as GitHub and the site spell them."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_messages_name_the_faq():
    assert {anchor for _, _, anchor in NAMED} >= {"data-wait", "out-of-memory", "wrong-head", "two-runs-of-one-name"}


@pytest.mark.parametrize(("source", "page", "anchor"), sorted(NAMED))
def test_a_named_heading_exists(source, page, anchor):
    text = (ROOT / page).read_text()
    assert not anchor or anchor in anchors(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_hold(page):
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), anchor


def test_the_anchors_of_a_planted_page():
    text = "# A b\n\n## When it fails: C, `d`\n\n```\n# no heading\n```\n"
    assert anchors(text) == {"a-b", "when-it-fails-c-d"}
