"""The wheel: it holds the modules, recipes and spaces of the tree, and its demo runs in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from test_layers import ROOT

PACKAGES = ("vitray", "pipelines", "tune_spaces")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of a copy of the tree, as `make wheel` builds it: a build in the clone would keep removed files."""
    folder = tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    code = "import setuptools.build_meta as backend; backend.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    (path,) = (folder / "dist").iterdir()
    return path


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    tree = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == tree
    assert sum(name.endswith(".yaml") for name in names) > 30


def test_the_wheel_has_its_command_and_license(wheel):
    archive = zipfile.ZipFile(wheel)
    texts = {
        name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name
    }
    assert "vitray = pipelines.__main__:main" in texts["entry_points.txt"]
    assert texts["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "Requires-Dist: torch" in texts["METADATA"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_demo_runs_from_the_wheel_in_an_empty_folder(wheel, tmp_path):
    fresh, empty = tmp_path / "venv", tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh], check=True)
    (packages,) = fresh.glob("lib/python*/site-packages")
    # The dependencies of this environment, without its link to the clone: a .pth in a .pth's folder is not read.
    shared = Path(torch.__file__).parent.parent
    (packages / "dependencies.pth").write_text(f"{shared}\n")
    install = [shutil.which("uv") or Path(sys.executable).with_name("uv"), "pip", "install", "--no-deps", "--offline"]
    subprocess.run([*install, "--python", fresh / "bin/python", wheel], check=True, capture_output=True)
    empty.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_", "PYTHONPATH"))}
    environment = kept | {"VITRAY_HOME": str(tmp_path / "home")}
    options = {"cwd": empty, "env": environment, "capture_output": True, "text": True}
    code = "import vitray; print(vitray.__file__)"
    where = subprocess.run([fresh / "bin/python", "-c", code], check=True, **options).stdout
    assert Path(where.strip()).is_relative_to(packages)
    small = ["model.image_size=32", "optim.duration=8 steps", "optim.warmup=2 steps", "compute.workers=1"]
    done = subprocess.run([fresh / "bin/vitray", "demo", "--images", "200", *small, "--json"], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, shown = lines = done.stdout.splitlines()
    result = json.loads(shown)
    assert result["state"] == "finished"
    assert (empty / "data/demo/dataset.json").exists()
    assert Path(result["model"]).is_relative_to(empty)
    commands = [line.split()[:2] for line in lines if line.startswith("  vitray ")]
    assert commands == [["vitray", "ui"], ["vitray", "evaluate"], ["vitray", "sweep"]]
