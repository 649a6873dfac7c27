"""The tutorials: page and notebook are equal, commands parse, pictures are small; the notebooks run (slow)."""

import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import psutil
import pytest
from test_layers import ROOT
from test_readme import parse
from test_walkthrough import RUN

sys.path.insert(0, str(ROOT / "experiments" / "site"))
from write_notebooks import FOLDER, notebook_of, page_of

# The order in which a reader meets them: later ones use the networks of earlier ones.
ORDER = ["photographs", "deltas", "sweep", "folds", "scenes", "without-labels", "inside", "hundred-tasks", "cluster"]
ORDER += ["ask", "features", "own-loop", "two-runs", "best-trial", "few-labels"]
PICTURES = sorted((ROOT / "docs/images").glob("tutorial_*.png"))
MOST_BYTES = 150_000
pages = pytest.mark.parametrize("name", ORDER)


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text()


def commands(text: str) -> list[list[str]]:
    """Return the words of each vitray command of a page, without pipes and redirections."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"\$\(.*\)", "ID", line).replace(" $tasks", "") for line in lines if line.startswith("vitray ")]
    return [shlex.split(re.split(r" (?:[|&]|2?>)", line)[0]) for line in lines]


def test_no_page_is_missed():
    assert {path.stem for path in FOLDER.glob("*.md")} == {path.stem for path in FOLDER.glob("*.ipynb")} == set(ORDER)


@pages
def test_a_notebook_is_that_of_its_page(name):
    """Run `make reference` after a change of a page."""
    assert (FOLDER / f"{name}.ipynb").read_text() == notebook_of(text_of(name))


@pages
def test_a_notebook_gives_its_page_back(name):
    assert page_of((FOLDER / f"{name}.ipynb").read_text()) == text_of(name)


def test_a_planted_change_is_found():
    notebook = notebook_of("# A\n\n```bash\nvitray demo\n```\n")
    assert "%%bash\\n" in notebook
    assert page_of(notebook.replace("demo", "train")) == "# A\n\n```bash\nvitray train\n```\n"
    assert notebook_of("# A\n\n```bash\nvitray train\n```\n") != notebook


@pages
def test_a_page_opens_with_its_aim_and_names_its_notebook(name):
    title, aim = text_of(name).split("\n\n")[:2]
    assert title.startswith("# ")
    assert aim.startswith("You ")
    assert f"]({name}.ipynb)" in aim


@pages
def test_the_commands_parse(name):
    text = text_of(name)
    assert set(re.findall(r"^```(\w*)$", text, re.MULTILINE)) <= {"", "bash", "python", "text"}
    assert re.search(r"^```(bash|python)$", text, re.MULTILINE)
    for words in commands(text):
        parse(words[1:])


# ---- shown outputs --------------------------------------------------------------------------------------------------

# Of a shown line to the most similar printed one, without numbers: a small network may predict another class.
LEAST_LIKENESS = 0.75


def shown_outputs(text: str) -> dict[int, list[str]]:
    """Return {number of a cell: the lines that its page shows below it}, without those that stand for left-out ones."""
    number, outputs = 0, {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        number += language in ("bash", "python")
        if language == "text":
            block = re.sub(r',\n +"', ',"', block)  # JSON, which is one line where it is printed
            outputs[number] = [line for line in block.splitlines() if line.strip(" .")]
    return outputs


def printed_outputs(name: str, text: str) -> dict[int, list[str]]:
    """Return {number of a cell: the lines that it printed} of the output of notebook_runner.py."""
    parts = re.split(rf"^### {name}-(\d+)$", text, flags=re.MULTILINE)
    return {int(number): re.split(r"[\r\n]+", part) for number, part in zip(parts[1::2], parts[2::2], strict=True)}


def outline(line: str) -> str:
    """Return a line without its numbers, names of jobs, hashes and widths."""
    return re.sub(r"\s+", " ", re.sub(r"[^\s=|(\"]*\d[^\s=|)\"]*", "#", line)).strip()


def unlike(shown: list[str], printed: list[str]) -> list[str]:
    """Return the shown lines that no printed one is like."""
    outlines = {outline(line) for line in printed}

    def likeness(line: str) -> float:
        end = len(line) if line.endswith("...") else None  # the page leaves out the rest
        return max((SequenceMatcher(None, line, other[:end]).ratio() for other in outlines), default=0.0)

    return [line for line in shown if outline(line) not in outlines and likeness(outline(line)) < LEAST_LIKENESS]


def test_an_output_is_that_of_its_cell_but_for_numbers():
    text = (
        "```python\na\n```\n\n```bash\nvitray a\n```\n\n```text\n  top-1  49.50 % of 400 images\n...\n  run   b\n```\n"
    )
    shown = shown_outputs(text)
    assert shown == {2: ["  top-1  49.50 % of 400 images", "  run   b"]}
    printed = printed_outputs("a", "### a-1\n### 0.1 s\n### a-2\n  run  b\rtop-1 7.5 % of 20 images\n### 3.0 s\n")
    assert unlike(shown[2], printed[2]) == []
    assert unlike(shown[2], printed[1]) == shown[2]
    assert unlike(["  top-5  49.50 % of 400 images"], printed[2]) == []  # the name has a number
    assert unlike(["  loss   1.25"], printed[2]) == ["  loss   1.25"]
    assert unlike(["job-1  DONE  python -m a ..."], ["job-2  DONE  python -m a " + "b" * 99]) == []
    assert shown_outputs('```bash\na\n```\n\n```text\n{"a": 1,\n  "b": 2}\n```\n') == {1: ['{"a": 1,"b": 2}']}


def test_the_pictures_are_small_and_shown():
    shown = {target for name in ORDER for target in re.findall(r"\(\.\./images/(tutorial_\w+\.png)\)", text_of(name))}
    assert {path.name for path in PICTURES} == shown
    assert {path.name: path.stat().st_size for path in PICTURES if path.stat().st_size > MOST_BYTES} == {}


# ---- they run -------------------------------------------------------------------------------------------------------

# As of test_walkthrough: fewer images and steps, one worker. The run `long` is stopped while it trains.
LONG = {"optim.duration": "400 steps", "evaluate.every": "100 steps", "checkpoint.every": "100 steps"}
TEXTS = {"range(2000)": "range(800)", "epoch 1/4": " step "}
TEXTS |= {"train demo_self_distillation ": 'train demo_self_distillation "task.freeze_prototypes=0 steps" '}
TEXTS |= {"few100=0.0016667": "few100=0.2", "few1000=0.016667": "few1000=0.2", "dev=0.05": "dev=0.2"}
RAY_PORTS = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def write_noise(folder: Path) -> None:
    """Write noise of ten classes as the four files of Fashion-MNIST."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for split, images in (("train", 200), ("t10k", 20)):
        pixels = draw.integers(0, 256, (images, 28, 28), np.uint8)
        head = struct.pack(">IIII", 0x803, *pixels.shape)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        labels = struct.pack(">II", 0x801, images) + bytes(place % 10 for place in range(images))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(labels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with images of noise as Fashion-MNIST, a `vitray` that trains little, and the texts in place of those of
    cells. The programs that a failed notebook leaves are ended."""
    folder = tmp_path_factory.mktemp("tutorials")
    write_noise(folder / "fashion-mnist")
    (folder / "bin").mkdir()
    program = folder / "bin/vitray"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/notebook_runner.py"} "$@"\n')
    program.chmod(0o755)
    serving, tracking, *ray = [free_port() for _ in range(2 + len(RAY_PORTS))]
    heads = " ".join(f"--{name}={port}" for name, port in zip(RAY_PORTS, ray, strict=True))
    texts = {"vitray serve": f"vitray serve --port {serving}", "127.0.0.1:8000": f"127.0.0.1:{serving}"}
    texts |= {"--port 5000": f"--port {tracking}", "127.0.0.1:5000": f"127.0.0.1:{tracking}"}
    texts |= {"ray start --head": f"ray start --head {heads}", "127.0.0.1:8265": f"127.0.0.1:{ray[1]}"}
    with tempfile.TemporaryDirectory(prefix="vt", ignore_cleanup_errors=True) as rays:
        # Ray names a job the latest cluster of this folder, which would be one of other tests.
        texts["ray start --head"] += f" --temp-dir={rays}"
        yield folder, TEXTS | texts
        for path in folder.glob("*.pid"):
            with suppress(psutil.Error):
                program = psutil.Process(int(path.read_text()))
                if program.cwd() == str(folder):  # otherwise a later process has its number
                    program.terminate()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pages
def test_a_notebook_runs(folder, name):
    folder, texts = folder
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "MLFLOW_", "RAY_"))}
    environment |= {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),  # Ray's token is written there
        "VITRAY_HOME": str(folder / "home"),
        "VITRAY_SMALL": json.dumps({"texts": texts, "settings": RUN, "long": LONG}),
    }
    command = [sys.executable, str(ROOT / "tests/notebook_runner.py"), str(FOLDER / f"{name}.ipynb")]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = done.stdout.decode(errors="replace").replace(str(folder), "~/tutorials")
    assert done.returncode == 0, output[-5000:]
    printed = printed_outputs(name, output)
    shown = shown_outputs(text_of(name))
    assert {number: lines for number in shown if (lines := unlike(shown[number], printed[number]))} == {}
