"""docs/reference/: the pages are those that parsers, recipes, spaces and the source give now."""

import sys

import pytest
from test_layers import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import generate_reference

PAGES = generate_reference.pages()


def test_the_reference_has_no_other_page():
    assert {path.name for path in (ROOT / "docs/reference").iterdir()} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_current(name):
    """Run `make reference` after a change."""
    assert (ROOT / "docs/reference" / name).read_text() == PAGES[name]


def test_every_verb_recipe_and_option_has_a_row():
    from pipelines import recipes
    from pipelines.__main__ import VERBS

    assert all(f"\n## vitray {verb}\n" in PAGES["verbs.md"] for verb in VERBS)
    assert all(f"\n## {name}\n" in PAGES["recipes.md"] for name in recipes.names())
    assert "| `--resume NAME` |" in PAGES["verbs.md"]
    assert PAGES["recipes.md"].count("expected: ") > 50


def test_a_name_without_a_description_is_refused():
    with pytest.raises(ValueError, match=r"metrics without a description: \['train/new'\]"):
        generate_reference.check("metric", {"train/new", "train/loss"}, {"train/loss"})
    with pytest.raises(ValueError, match=r"not in the source: \['train/old'\]"):
        generate_reference.check("metric", {"train/loss"}, {"train/old", "train/loss"})
