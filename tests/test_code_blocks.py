"""Code blocks of README and docs: how many run, why the others do not, and that diffs are lines of the source."""

import re

import pytest
from test_layers import ROOT
from test_readme import blocks, commands
from test_walkthrough import ELSEWHERE, NOT_RUN, ORDER

# The tests that run the verbs which the walkthrough leaves out, and `make demo`.
RUN_BY = {
    "demo": "test_wheel.py",
    "submit": "test_jobs.py",
    "slurm": "test_slurm.py",
    "jobs": "test_jobs.py",
    "stop": "test_jobs.py",
    "doctor": "test_doctor.py",
    "ui": "test_ui.py",
    "bench": "test_bench_train.py",
    "serve": "test_serve_http.py",
}


def runs(words):
    """Whether a test runs a command: the walkthrough, one of RUN_BY, or test_vtab.py."""
    program, *args = words
    match program.removeprefix(".venv/bin/"):
        case "vitray" | "fresh/bin/vitray":
            return True
        case "make":
            return args[0] in RUN_BY
        case other:
            assert other in NOT_RUN, other
            return False


def test_at_most_a_tenth_of_the_blocks_is_not_run(capsys):
    shell = [each.values[0] for each in blocks("")]
    others = [each.values[0] for language in ("python", "yaml", "json") for each in blocks(language)]
    assert {block.page for block in [*shell, *others]} == {*ORDER}
    assert [block for block in others if block.reason] == []
    ran = {block: [runs(words) for words in commands(block.text)] for block in shell if not block.reason}
    unrun = [block for block in shell if block.reason]
    partly = [block for block, each in ran.items() if not all(each)]
    tutorials = [page.read_text() for page in (ROOT / "docs" / "tutorials").glob("*.md")]  # test_tutorials.py runs them
    cells = sum(len(re.findall(r"^```(?:bash|python)$", text, re.MULTILINE)) for text in tutorials)
    number = len(shell) + len(others) + cells
    with capsys.disabled():
        print(
            f"\n{number} code blocks, {cells} of tutorials: {number - len(unrun) - len(partly)} run whole,"
            f" {len(partly)} without some commands (make, curl, ...), {len(unrun)} not"
        )
    assert [block for block, each in ran.items() if not any(each)] == []
    assert len(unrun) <= number / 10


def test_the_verbs_that_run_elsewhere_have_their_tests():
    assert RUN_BY.keys() == ELSEWHERE
    assert all((ROOT / "tests" / name).exists() for name in RUN_BY.values())


@pytest.mark.parametrize("page", ["adding-a-variant.md", "contributing/extending.md"])
def test_a_diff_has_lines_of_the_source(page):
    files = [path for folder in ("vitray", "pipelines", "tests") for path in (ROOT / folder).rglob("*.[py][ya]*")]
    source = {line.strip() for path in files for line in path.read_text().splitlines()}
    diffs = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    added = [line[1:].strip() for diff in diffs for line in diff.splitlines() if line.startswith("+")]
    assert len(added) > 10
    assert [line for line in added if line and line not in source] == []
