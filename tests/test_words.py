"""Upper bounds for unclear phrases in docstrings and comments; pages begin with their use."""

import re

import pytest
from test_layers import ROOT
from word_count import count_words

# Occurrences per 1,000 words.
BOUNDS = {"what": 3.0, "said": 1.0}


@pytest.mark.parametrize("folders", [("vitray", "pipelines"), ("tests",)])
def test_unclear_phrases_are_rare(folders):
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    count = count_words({str(path.relative_to(ROOT)): path.read_text() for path in paths})
    assert count.words > 1000
    for phrase, bound in BOUNDS.items():
        assert count.per_thousand(phrase) <= bound, "\n".join(count.matches[phrase])


def test_planted_phrases_are_counted():
    source = '''"""What a run needs.

Whoever asks is told. A whatsoever is not counted."""
value: int = 1
"""Whatever it says; the rest is said."""
text = "what a message to a user contains is not counted"  # what follows
'''
    count = count_words({"planted.py": source})
    assert count.words == 22
    assert [len(count.matches[phrase]) for phrase in ("what", "said")] == [4, 3]
    assert count.matches["said"][0] == "planted.py:1: Whoever asks is told."
    assert count.per_thousand("what") == pytest.approx(1000 * 4 / 22)


PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "index.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_a_page_opens_with_what_its_reader_can_do(path):
    text = re.sub(r"^(?:<!--|#|!\[).*$", "", path.read_text(), flags=re.MULTILINE)
    assert text.strip().startswith("You ")
