"""docs/reference/: the pages are those that parsers, recipes, spaces and the source give now."""

import ast
import re
import sys

import pytest
from test_layers import ROOT

import vitray

sys.path.insert(0, str(ROOT / "experiments" / "site"))
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
    files = "".join(path.read_text() for path in (ROOT / "pipelines").glob("*.py"))
    parsers = re.findall(r'prog="vitray ([^"]+)"', files)
    assert "doctor data" in parsers
    assert all(re.search(rf"^###? (vitray )?{parser}$", PAGES["verbs.md"], re.MULTILINE) for parser in parsers)
    assert all(f"\n## {name}\n" in PAGES["recipes.md"] for name in recipes.names())
    assert "| `--resume NAME` |" in PAGES["verbs.md"]
    assert "|  |" not in PAGES["verbs.md"], "an argument without a meaning"
    assert not re.search(r"^##.*\n\n\n", PAGES["verbs.md"], re.MULTILINE), "a command without a description"
    assert PAGES["recipes.md"].count("expected: ") > 50
    # A command that goes on in another line is a block of its own; in prose its backslash would be shown.
    prose = re.sub(r"^```.*?^```$", "", PAGES["recipes.md"], flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"\\[\sa-zA-Z0-9]", prose)


def test_every_name_of_readme_docs_and_notebooks_is_on_the_python_page():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.md")]
    blocks = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)]
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitray")]
    named = {(str(node.module), each.name) for node in imports for each in node.names}
    dotted = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    named |= {tuple(name.rsplit(".", 1)) for name in dotted if re.fullmatch(r"vitray(\.\w+)+", name)}
    named -= {("vitray", name) for name in vitray.MODULES}
    modules = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    assert {name for name in modules if name.startswith("vitray")} == {"vitray"}
    assert len(named) > 5
    titles = re.findall(r"^(##+) ([\w.]+)$", PAGES["python.md"], re.MULTILINE)
    module, shown = "", set()
    for level, title in titles:
        module = title if level == "##" else module
        shown.add((module, title))
    assert named - shown == set()
    assert {("vitray", name) for name in vitray.PUBLIC} | {("vitray.inspection", "cka")} <= shown


def test_the_python_page_has_signatures_fields_and_methods():
    page = PAGES["python.md"]
    assert "def load_model(url: str) -> LoadedModel\n```\n\nReturn the content of a model folder" in page
    assert "| `step` |" not in page.partition("### Outcome")[0]
    assert "| `val_top1` | <code>float &#124; None</code> | Score of the weights in the model folder; None" in page
    assert "def load_state_dict(self, state: Mapping[str, Any]) -> None" in page
    assert "def __init__" not in page


def test_a_name_without_a_description_is_refused():
    with pytest.raises(ValueError, match=r"metrics without a description: \['train/new'\]"):
        generate_reference.check("metric", {"train/new", "train/loss"}, {"train/loss"})
    with pytest.raises(ValueError, match=r"not in the source: \['train/old'\]"):
        generate_reference.check("metric", {"train/loss"}, {"train/old", "train/loss"})
