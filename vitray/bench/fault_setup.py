"""The environments of the other stacks, the images in each one's format, and the facts of a measurement."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from vitray.bench.fault_subjects import SCRIPTS, SUBJECTS, Settings, python_of
from vitray.data.shards import read_request, write_dataset
from vitray.errors import RunError
from vitray.system import host_facts

VERSIONS = "import json, sys; from importlib.metadata import version; "
VERSIONS += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
EMPTY_STORE = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments()"
# Of the validation images that timm's train.py wants after each epoch.
VAL_SHARE = 1 / 32


def make_environment(name: str, environments: Path) -> None:
    """Install a subject's packages in an environment of its own, unless that is done."""
    packages, done = SUBJECTS[name].packages, environments / name / "installed.json"
    if not packages or (done.exists() and json.loads(done.read_text()) == list(packages)):
        return
    uv, folder = Path(sys.executable).with_name("uv"), environments / name
    shutil.rmtree(folder, ignore_errors=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for command in (
        [uv, "venv", "--quiet", "--python", version, folder],
        [uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python", *packages],
    ):
        if subprocess.run(command).returncode:
            raise RunError(f"the environment of {name} is not complete: {' '.join(map(str, command))} failed")
    if SUBJECTS[name].loss is not None:
        store = f"sqlite:///{folder}/mlflow.db"
        subprocess.run([folder / "bin" / "python", "-c", EMPTY_STORE, store], check=True)
    done.write_text(json.dumps(list(packages)))


def versions_of(name: str, environments: Path) -> dict[str, str]:
    """Return the versions of a subject's packages."""
    command = [str(python_of(name, environments)), "-c", VERSIONS, *SUBJECTS[name].versions]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def make_images(data: Path, settings: Settings) -> None:
    """Draw the images as a dataset of vitray and as a folder of classes, whose file names are the rows."""
    if (data / "folder").exists():
        return
    sizes = [f"images={settings.images}", "image_size=32", f"val_share={VAL_SHARE}"]
    dataset = write_dataset(read_request("demo", str(data / "demo"), overrides=sizes))
    unfinished = data / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    for split, content in dataset.splits.items():
        row = 0
        for shard in content.shards:
            table = pq.read_table(data / "demo" / shard.name, columns=["image", "label"])
            for image, label in zip(*(table.column(name).to_pylist() for name in ("image", "label")), strict=True):
                folder = unfinished / split / dataset.classes[label]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{row:05}.jpg").write_bytes(image)
                row += 1
    unfinished.rename(data / "folder")


def make_mds(data: Path, environments: Path) -> None:
    """Write the training images as shards of Streaming, with its own writer."""
    if not (data / "mds").exists():
        unfinished = data / "unfinished.mds"
        shutil.rmtree(unfinished, ignore_errors=True)
        script, python = SCRIPTS / "write_mds.py", python_of("composer", environments)
        subprocess.run([python, script, data / "folder" / "train", unfinished], check=True)
        unfinished.rename(data / "mds")


def machine() -> str:
    """Return this machine in words."""
    return f"{os.cpu_count()} cores of {host_facts.facts()['hardware.cpu']}"
