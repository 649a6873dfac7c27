"""The training stacks that measure_faults.py compares: environments, images, commands, and how each resumes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from vitray.data.shards import read_request, write_dataset
from vitray.errors import RunError

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "experiments" / "faults"
NAME = "faults"
"""Of the run, in every stack."""
VERSIONS = "import json, sys; from importlib.metadata import version; "
VERSIONS += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
EMPTY_STORE = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments()"
# Of the validation images that timm's train.py wants after each epoch.
VAL_SHARE = 1 / 32


class Settings(NamedTuple):
    """The run that every stack trains."""

    images: int = 2048
    batch: int = 32
    epochs: int = 3
    save_every: int = 16
    workers: int = 2
    pace: float = 0.1
    """Least seconds of a step. The network is so small that a run would end before some stacks notice a signal."""

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.images * self.epochs // self.batch


class Place(NamedTuple):
    """Where one run of a subject keeps its files."""

    data: Path
    folder: Path
    python: Path
    """The interpreter of the subject's environment."""
    timm: Path | None = None
    """timm's train.py, which its package does not hold."""

    @property
    def out(self) -> Path:
        """The folder of checkpoints and weights."""
        return self.folder / "out"

    @property
    def store(self) -> Path:
        """An empty MLflow store: two workers that make one at the same time may fail."""
        return self.python.parents[1] / "mlflow.db"

    @property
    def record(self) -> Path:
        """The file of the steps."""
        return self.folder / "record.txt"


class Subject(NamedTuple):
    """A training stack."""

    title: str
    packages: tuple[str, ...]
    """For an environment of its own; none is vitray's."""
    versions: tuple[str, ...]
    """The packages whose versions the page states."""
    command: Callable[[Place, Settings, int], list[str]]
    """The command for a number of workers; the same starts and resumes."""
    saves: str
    """How it saves and resumes, in words."""
    checkpoints: str
    """The pattern of its checkpoints in the output folder."""
    weights: str
    """The final weights in the output folder."""
    loss: str | None
    """The name of the loss in MLflow; None where it has another tracking."""
    is_alone: bool = False
    """Whether it trains with one worker: timm's train.py cannot distribute to CPUs."""


def environment(place: Place, settings: Settings, workers: int) -> Mapping[str, str]:
    """Return the variables that the scripts beside this file read."""
    content: dict[str, Any] = {
        **settings._asdict(),
        "steps": settings.steps,
        "workers": workers,
        "out": str(place.out),
        "data": str(place.data),
    }
    return {"FAULTS_SETTINGS": json.dumps(content), "FAULTS_RECORD": str(place.record), "FAULTS_TIMM": str(place.timm)}


def _torchrun(place: Place, workers: int, script: str, restarts: int) -> list[str]:
    command = [str(place.python), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    return [*command, f"--max-restarts={restarts}", str(SCRIPTS / script)]


def _vitray(place: Place, settings: Settings, workers: int) -> list[str]:
    overrides = {
        "model.name": "vit_u6x1_8",
        "model.image_size": 32,
        "model.class_token": "true",
        "model.pool": "token",
        "data.url": place.data / "demo",
        "optim.batch": settings.batch,
        "optim.duration": f"{settings.epochs} epochs",
        "optim.warmup": "0 steps",
        "optim.lr": "1e-3",
        "checkpoint.every": f"{settings.save_every} steps",
        "tracking.every": "1 step",
        "tracking.register_as": "null",
        "compute.workers": workers,
    }
    words = [f"{setting}={value}" for setting, value in overrides.items()]
    words += ["--name", NAME, "--out", str(place.out)]
    return [str(place.python), str(SCRIPTS / "with_vitray.py"), "train", "demo", *words]


def _timm(place: Place, settings: Settings, workers: int) -> list[str]:
    sizes = ["img_size=32", "patch_size=8", "embed_dim=64", "depth=6", "num_heads=2"]
    options = ["--data-dir", str(place.data / "folder"), "--model", "vit_tiny_patch16_224", "--model-kwargs", *sizes]
    options += ["--num-classes", "10", "--img-size", "32", "--batch-size", str(settings.batch // workers)]
    options += ["--epochs", str(settings.epochs), "--opt", "adamw", "--lr", "1e-3", "--workers", "0"]
    options += ["--no-prefetcher", "--device", "cpu", "--output", str(place.out), "--experiment", NAME]
    last = place.out / NAME / "last.pth.tar"
    return _torchrun(place, workers, "with_timm.py", 0) + options + (["--resume", str(last)] if last.exists() else [])


TORCH = ("torch==2.15.0", "torchvision==0.29.2", "timm==1.0.31")
SUBJECTS = {
    "vitray": Subject(
        "vitray",
        (),
        ("vitray", "ray", "torch", "mlflow"),
        _vitray,
        "a checkpoint every 16 steps and on SIGTERM; workers start again by themselves; the same command resumes",
        f"{NAME}/checkpoints/step-*",
        f"{NAME}/model/model.safetensors",
        "train/loss",
    ),
    "timm": Subject(
        "timm's train.py",
        TORCH,
        ("timm", "torch"),
        _timm,
        "a checkpoint after each epoch; `--resume .../last.pth.tar` at the next start",
        f"{NAME}/*.pth.tar",
        "final.safetensors",
        None,
    ),
    "huggingface": Subject(
        "Hugging Face Trainer",
        ("transformers==5.23.0", "accelerate==1.15.0", "mlflow==3.17.2", *TORCH),
        ("transformers", "accelerate", "torch", "mlflow"),
        lambda place, _, workers: _torchrun(place, workers, "with_huggingface.py", 3),
        "`save_steps=16`, `enable_jit_checkpoint`; `resume_from_checkpoint` of the last folder, "
        "`ignore_data_skip=False`; torchrun with `--max-restarts`",
        "checkpoint-*",
        "final.safetensors",
        "loss",
    ),
    "lightning": Subject(
        "Lightning",
        ("pytorch-lightning==2.6.6", "torchdata==0.11.0", "mlflow==3.17.2", *TORCH),
        ("pytorch-lightning", "torchdata", "torch", "mlflow"),
        lambda place, _, workers: _torchrun(place, workers, "with_lightning.py", 3),
        '`ModelCheckpoint(every_n_train_steps=16, save_last=True)`, OnExceptionCheckpoint, `ckpt_path="last"`, '
        "StatefulDataLoader and its sampler; torchrun with `--max-restarts`",
        "*.ckpt",
        "final.safetensors",
        "train/loss",
    ),
    "composer": Subject(
        "Composer and Streaming",
        ("mosaicml[mlflow]==0.32.1", "mosaicml-streaming==0.13.0", "sqlalchemy<2.1", "timm==1.0.31", "torchvision"),
        ("mosaicml", "mosaicml-streaming", "torch", "mlflow"),
        lambda place, _, workers: [
            str(place.python.with_name("composer")),
            "-n",
            str(workers),
            str(SCRIPTS / "with_composer.py"),
        ],
        '`save_interval="16ba"`, `autoresume=True`, StreamingDataset',
        "ep*",
        "final.safetensors",
        "loss/train/total",
    ),
}


def _loop(script: str, *packages: str, saves: str, checkpoints: str, is_alone: bool = False) -> Subject:
    """Return a loop of experiments/loops around `vitray.Loader`."""

    def command(place: Place, _: Settings, workers: int) -> list[str]:
        words = [str(ROOT / "experiments" / "loops" / script), *([str(place.timm)] if "timm" in script else [])]
        return [*_torchrun(place, workers, "with_loader.py", 3), *words]

    versions = ("vitray", *packages, "torch")
    return Subject(script, (), versions, command, saves, checkpoints, "final.safetensors", None, is_alone)


LOOPS = {
    "loader-torch": _loop("torch_ddp.py", saves="`torch.save` every 16 steps", checkpoints="last.pt"),
    "loader-accelerate": _loop(
        "with_accelerate.py",
        "accelerate",
        saves="`save_state()` every 16 steps, with the loader registered",
        checkpoints="checkpoints/checkpoint_*",
    ),
    "loader-huggingface": _loop(
        "with_trainer.py",
        "transformers",
        saves="`save_steps=16`; the loader seeks the Trainer's step",
        checkpoints="checkpoint-*",
    ),
    "loader-lightning": _loop(
        "with_lightning.py",
        "lightning",
        saves="`ModelCheckpoint(every_n_train_steps=16, save_last=True)`, which stores the loader's state",
        checkpoints="*.ckpt",
    ),
    "loader-timm": _loop(
        "with_timm.py", "timm", saves="timm's own, after each epoch", checkpoints="run/*.pth.tar", is_alone=True
    ),
}


def python_of(name: str, environments: Path) -> Path:
    """Return the interpreter of a subject."""
    return environments / name / "bin" / "python" if (SUBJECTS | LOOPS)[name].packages else Path(sys.executable)


def shown(command: list[str], place: Place) -> str:
    """Return a command as a person would type it."""
    text = " ".join(f"'{word}'" if " " in word else word for word in command)
    text = text.replace(f"{place.python} -m torch.distributed.run", "torchrun").replace(str(place.python), "python")
    text = text.replace(str(place.python.with_name("composer")), "composer").replace(f"{ROOT}/", "")
    text = text.replace(str(place.timm), "TRAIN.PY")
    return text.replace(str(place.out), "OUT").replace(str(place.data), "DATA")


# ---- what is made on first use ---------------------------------------------------------------------------------------


def make_environment(name: str, environments: Path) -> None:
    """Install a subject's packages in an environment of its own, unless that is done."""
    packages, done = (SUBJECTS | LOOPS)[name].packages, environments / name / "installed.json"
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
    command = [str(python_of(name, environments)), "-c", VERSIONS, *(SUBJECTS | LOOPS)[name].versions]
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
