"""README and docs: every code block runs, plans or parses in a new folder, as a reader would paste it."""

import argparse
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from test_layers import ROOT

from pipelines import recipes
from pipelines.__main__ import VERBS, main
from vitray.cluster import session
from vitray.config import Model, Run, load_run
from vitray.config.classification import Supervised
from vitray.config.parsing import parse_overrides
from vitray.data.shards import read_request, write_dataset
from vitray.data.shards.demo import demo_item

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Paths of the clone that blocks name.
CLONED = ("pipelines", "tune_spaces", "deploy", "Makefile", "cluster.yaml")
# Programs of a shell block, of which only the syntax is checked.
UNCHECKED = {"git", "export", "curl", "(printf", "image=$(base64", "echo", "nvidia-smi", "python", "tar"}
UNCHECKED |= {"python3", "fresh/bin/pip", "fresh/bin/vitray"}  # test_wheel.py does this


# test_formats.py reads the JSON; test_code_blocks.py compares diffs with the source; text is output.
LANGUAGES = ("", "python", "yaml", "json", "text", "diff", "mermaid")


class Block(NamedTuple):
    """A fenced code block."""

    page: str
    line: int
    language: str
    text: str
    reason: str
    """Why no test runs it, by a comment before it: `<!-- not run: REASON -->`; else empty."""


class ParsedError(Exception):
    """Raised in place of a verb's work."""


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            before = text[: match.start()]
            mark = re.search(r"^<!-- not run: (.+) -->\n\Z", before, re.MULTILINE)
            found.append(Block(page.name, before.count("\n") + 1, match[1], match[2], mark[1] if mark else ""))
    return [pytest.param(each, id=f"{each.page}:{each.line}") for each in found if each.language == language]


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS, PYTHON, YAML = blocks(""), blocks("python"), blocks("yaml")
# `vitray VERB ...` within a sentence, without placeholders.
INLINE = sorted({span for page in PAGES for span in re.findall(r"`(vitray [a-z][^`\n]*)`", page.read_text())})
INLINE = [span for span in INLINE if re.search(r"=| --", span) and not re.search(r"\.\.\.|\b[A-Z]{2,}\b", span)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, s3_server):
    """A new clone after `make demo`, with a smaller dataset, a recipe of the user's and saved networks."""
    from vitray import ViT, flatten_model, save_model

    folder = tmp_path_factory.mktemp("clone")
    for name in CLONED:
        (folder / name).symlink_to(ROOT / name)
    write_dataset(read_request("demo", str(folder / "data/demo"), overrides=["images=400", "image_size=32"]))
    (folder / "data/photos").symlink_to(folder / "data/demo")
    for number, name in enumerate(("cat", "dog"), start=1):
        (folder / "photos" / name).mkdir(parents=True)
        (folder / "photos" / name / f"{number:04d}.jpg").write_bytes(demo_item(number, 0, 32, "shape")[0])
    (folder / "my_recipe.yaml").write_text(recipes.path_of("demo").read_text())
    vit = ViT(Model(name="vit_u2x1_8", image_size=32, num_classes=10))
    classes, base = [str(index) for index in range(10)], str(folder / "models/deit3_b")
    save_model(base, Run(model=vit.model), vit, classes)
    save_model(str(folder / "runs/photos/model"), Run(model=vit.model), vit, classes)
    several = Supervised(labels="several", loss="bce")
    save_model(str(folder / "runs/scenes/model"), Run(model=vit.model, task=several), vit, classes)
    for name in ("cars", "birds"):
        vit.head.bias.data += 1
        save_model(str(folder / "models" / name), Run(model=vit.model), vit, classes, relative_to=base)
    flatten_model(str(folder / "models/cars"), str(folder / "models/cars_whole"))
    save_model(str(folder / "cifar10_depth_x_branches-6x2"), Run(model=vit.model), vit, classes)
    return folder


@pytest.fixture
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def parse(words: list[str]) -> argparse.Namespace:
    """Return the arguments of `vitray WORDS`, as its verb parses them."""

    def stop(real):
        def parse_and_stop(*args):
            raise ParsedError(real(*args))

        return parse_and_stop

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, stop(getattr(argparse.ArgumentParser, name)))
        with pytest.raises(ParsedError) as parsed:
            main(words)
    return parsed.value.args[0]


def check_vitray(words: list[str]) -> None:
    """Parse `vitray WORDS`; plan what needs nothing but the folder."""
    verb, options = words[0], parse(words)
    settings = [word for word in getattr(options, "words", []) if "=" in word]
    match verb:
        case "submit" | "slurm":
            check_vitray([options.verb, *options.args])
        case "train" if options.resume:
            parse_overrides(settings)
        case "train":
            (recipe,) = set(options.words) - set(settings)
            run = load_run(recipes.path_of(recipe), settings)
            if run.data.url == "data/demo" and isinstance(run.task, Supervised) and run.distill is None:
                assert main([*words, "--dry-run"]) == 0
        case "sweep" if not words[1].startswith("cifar10_"):  # test_cifar10_results.py plans those
            assert main([*words, "--dry-run"]) == 0
        case "model" if not Path(options.name).suffix and not Path(options.name).is_dir():
            assert main(words) == 0
        case "shard" if not options.look:
            read_request(options.source, options.dest, options.split or (), options.settings, options.index_only)


def check_command(words: list[str]) -> None:
    program, *args = words
    match program.removeprefix(".venv/bin/"):
        case "vitray":
            check_vitray(args)
        case "torchrun":
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("WORLD_SIZE", args[args.index("--nproc-per-node") + 1])
                check_vitray(args[args.index("vitray") + 1 :])
        case "make":
            targets = [arg for arg in args if "=" not in arg]
            assert all(re.search(rf"^{target}:", Path("Makefile").read_text(), re.MULTILINE) for target in targets)
        case "mlflow":
            from mlflow.cli import cli

            _, group, rest = cli.resolve_command(cli.make_context("mlflow", [*args]), args)
            _, command, rest = group.resolve_command(group.make_context(args[0], [*rest]), rest)
            command.make_context(args[1], rest).close()
        case "docker" | "kubectl" | "sky":
            named = [arg for arg in args if arg.startswith("deploy/")]
            assert [name for name in named if not Path(name).is_file()] == []
        case "python" if args[0] == "-c":
            compile(args[1], "command", "exec")
        case _:
            assert program in UNCHECKED, f"{program}: no check of this program"


def test_no_block_is_missed():
    fences = sum(page.read_text().count("\n```") for page in PAGES)
    assert fences == 2 * sum(len(blocks(language)) for language in LANGUAGES)
    assert len(COMMANDS) > 15
    assert len(PYTHON) >= 3
    assert len(YAML) >= 3
    assert len(INLINE) > 2


@pytest.mark.parametrize("block", COMMANDS)
def test_the_commands_parse_and_plan(inside, block):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for words in commands(block.text):
        check_command(words)


@pytest.mark.parametrize("span", INLINE)
def test_a_command_in_a_sentence_parses(inside, span):
    parse(shlex.split(span)[1:])


@pytest.mark.parametrize("block", YAML)
def test_a_space_is_planned(inside, tmp_path, monkeypatch, block):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session, "local_cpus", lambda: 64)  # a population has all its trials at once
    (tmp_path / "space.yaml").write_text(block.text)
    assert main(["sweep", "demo", str(tmp_path / "space.yaml"), "model.image_size=32", "--dry-run"]) == 0


# Python that needs exports: test_walkthrough.py runs it.
SLOW_PYTHON = ("exports/",)
TRAINS = "MLflowCallback"


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(*each.values, id=each.id, marks=[pytest.mark.slow] * (TRAINS in each.values[0].text))
        for each in PYTHON
        if not any(name in each.values[0].text for name in SLOW_PYTHON)
    ],
)
def test_python_runs_and_prints_what_it_states(inside, block, capsys):
    run_python(block.text)
    printed = capsys.readouterr().out
    stated = re.findall(r"^print\(.*\)  # ([\d,]+)$", block.text, re.MULTILINE)
    assert printed.split() == [number.replace(",", "") for number in stated]


def run_python(text: str) -> None:
    exec(compile(text, "block", "exec"), {"__name__": "__main__"})


def test_every_verb_of_a_page_exists():
    named = {verb for page in PAGES for verb in re.findall(r"`(?:\.venv/bin/)?vitray ([a-z]+)", page.read_text())}
    assert named <= VERBS.keys()
