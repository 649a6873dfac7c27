"""README and docs: their commands, Python and spaces run in order in a new clone, on few images and small networks."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
import yaml
from image_sets import write_dataset, write_folder
from mlflow import MlflowClient
from test_layers import ROOT
from test_readme import CLONED, UNCHECKED, Block, blocks, commands, run_python

from pipelines import recipes
from pipelines.__main__ import main
from vitray.system import storage
from vitray.weights import load_model, save_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

# The order in which a reader meets the pages: later ones use what earlier ones have made.
ORDER = [
    "README.md",
    "install.md",
    "quickstart.md",
    "training.md",
    "networks.md",
    "fine-tuning.md",
    "distillation.md",
    "pretraining.md",
    "weights.md",
    "tracking.md",
    "benchmarks.md",
    "data.md",
    "several-labels.md",
    "evaluation.md",
    "inspection.md",
    "sweeps.md",
    "cluster.md",
]
ORDER += ["prediction.md", "export.md", "serving.md", "formats.md", "results.md", "zoo.md"]
# Verbs that need a cluster, serve, train or measure for minutes: test_wheel, test_jobs, test_slurm, test_doctor,
# test_ui, test_serve_http and test_bench_* run them.
ELSEWHERE = {"demo", "submit", "slurm", "jobs", "stop", "doctor", "ui", "bench", "serve"}
NOT_RUN = UNCHECKED | {"make", "mlflow", "torchrun"}

# Settings in place of those of a command, {setting: value}; all others are as the page has them.
RUN = {
    "optim.duration": "4 steps",
    "optim.warmup": "0 steps",
    "optim.batch": "8",
    "evaluate.every": "2 steps",
    "checkpoint.every": "2 steps",
    "compute.workers": "1",
}
FINETUNE_IMAGENET = RUN | {"model.image_size": "64", "compute.local_batch": "8", "compute.precision": "fp32"}
TRAIN_IMAGENET = FINETUNE_IMAGENET | {"model.name": "vit_u2x1_8", "model.num_classes": "10"}
# The teacher of the page has ImageNet's classes; here it is the network that the page trained before.
DISTIL = TRAIN_IMAGENET | {
    "model.image_size": "32",
    "data.url": "data/demo",
    "task.distill.teacher": "runs/base/model",
}
DRAWN = {"images": "300", "image_size": "32"}
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
# Texts in place of those of a space or of Python code.
SPACE = {"vit_s{": "vit_u{", "trials: 24": "trials: 2", "trials: 8": "trials: 2", " 10 epochs": " 2 steps"}
SPACE |= {" 5 epochs": " 2 steps"}
PYTHON = {"batch=256": "batch=16"}


def settings_of(verb: str, first: str) -> dict[str, str]:
    """Return the settings that make a command small."""
    if verb == "shard":
        return DRAWN if first == "demo" else {}
    if first == "demo_self_distillation":  # of which a tenth of an epoch is longer than these runs
        return RUN | {"task.freeze_prototypes": "0 steps"}
    if not first.endswith("_imagenet"):
        return RUN
    if first.startswith("deit_"):
        return DISTIL
    return FINETUNE_IMAGENET if first.startswith("finetune") else TRAIN_IMAGENET


def shrunk(words: list[str], stages: tuple[str, ...] = ()) -> list[str]:
    """Return the words of a command with small sizes, for the stages of its space too."""
    verb, *args = words
    if verb == "shard":  # its tasks are those of a Ray that was started in another folder
        args = [word if word[0] == "-" or "=" in word or word == "demo" else storage.absolute(word) for word in args]
    args = [word.replace("step-00001200", "step-00000004") for word in args]
    if verb == "evaluate":  # in this process, as without a cluster: actors of that Ray lack this folder's store
        args = [*args, "--workers", "1"]
    if verb == "inspect":
        args = [*args, "--images", "8"]
    if "--int8" in args:  # of 20 images, an untrained network changes one
        args = [*args, "--allow"]
    if verb not in ("train", "sweep", "shard") or "--resume" in args or "--look" in args:
        return [verb, *args]
    small = settings_of(verb, args[0])
    kept = [verb, *(word for word in args if word.partition("=")[0] not in small)]
    of_stages = [f"{stage}.{key}={small[key]}" for stage in stages for key in small if key != "compute.workers"]
    return [*kept, *(f"{key}={value}" for key, value in small.items()), *of_stages]


def replaced(text: str, sizes: dict[str, str]) -> str:
    for large, small in sizes.items():
        text = text.replace(large, small)
    return text


@pytest.fixture(scope="module")
def clone(tmp_path_factory, ray_cluster, s3_server):
    """A new clone after `make demo`, with what a reader has: photos, archives, weights and two registered versions."""
    clone = tmp_path_factory.mktemp("clone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(clone)
        patch.setenv("VITRAY_HOME", str(clone / "home"))
        for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        for name in CLONED:
            (clone / name).symlink_to(ROOT / name)
        run(["shard", "demo", "data/demo", "images=6000", "image_size=64"])  # as `make demo` does
        (clone / "my_recipe.yaml").write_text(recipes.path_of("demo").read_text())
        write_folder(clone / "photos", 60)
        for split, count in (("train", 80), ("val", 20)):  # the images of val are those of train, which lose them
            write_folder(clone / "ILSVRC2012" / split, count)
        write_dataset(clone / "data/cars", {"val": 20})
        write_cifar(clone)
        write_deit3(clone / "deit_3_base_224_1k.pth")
        torch.save(torchvision.models.resnet50().state_dict(), clone / "resnet50-11ad3fa6.pth")
        write_folder(s3_server / "bucket/photos", 12)
        (clone / "addresses.csv").write_text("\n".join(["path", *map(str, clone.glob("photos/*/*.jpg"))]))
        run(["train", "demo", "tracking.register_as=vit", "--name", "registered"])
        run(["train", "demo", "tracking.register_as=vit", "seed=1", "--name", "challenging"])
        MlflowClient(f"sqlite:///{clone / 'mlruns.db'}").set_registered_model_alias("vit", "challenger", "2")
        yield clone


def write_cifar(folder: Path) -> None:
    """Write CIFAR-10 as its authors' archive of pickles and as that of binary files, with few images of noise."""
    draw, names = np.random.default_rng(0), CIFAR10
    labels = np.arange(40) % len(names)
    pixels = {name: draw.integers(0, 256, (40, 3072), np.uint8) for name in ("data_batch_1", "test_batch")}
    batches = {name: {"data": data, "labels": labels.tolist()} for name, data in pixels.items()}
    pickles = batches | {"batches.meta": {"label_names": names}}
    binary = {f"{name}.bin": np.c_[labels, data].astype(np.uint8).tobytes() for name, data in pixels.items()}
    binary |= {"batches.meta.txt": "\n".join(names).encode()}
    write_tar(folder / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", binary)
    packed = {name: pickle.dumps(content, protocol=2) for name, content in pickles.items()}
    write_tar(folder / "cifar-10-python.tar.gz", "cifar-10-batches-py", packed)


def write_tar(path: Path, folder: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_deit3(path: Path) -> None:
    """Write a checkpoint with DeiT III's names and one of its twelve blocks."""
    state = timm.create_model("deit3_base_patch16_224", depth=1, num_classes=10).state_dict()
    for number in (1, 2):
        state = {name.replace(f"ls{number}.gamma", f"gamma_{number}"): each for name, each in state.items()}
    torch.save({"model": state}, path)


def write_deltas() -> None:
    """Write fine-tunings of models/deit3_b, which a page takes for granted."""
    model_run, vit, classes = load_model("models/deit3_b")
    for name in ("cars", "birds"):
        vit.head.bias.data += 1
        save_model(f"models/{name}", model_run, vit, classes, relative_to="models/deit3_b")


def run(words: list[str], stages: tuple[str, ...] = ()) -> None:
    small = shrunk(words, stages)
    assert main(small) == 0, f"vitray {' '.join(small)}"


def run_commands(text: str) -> None:
    for program, *words in commands(text):
        if (name := program.removeprefix(".venv/bin/")) != "vitray":
            assert name in NOT_RUN
        elif words[0] not in ELSEWHERE and "--vtab" not in words:  # it trains many networks; test_vtab runs it
            if words[:2] == ["weights", "show"]:
                write_deltas()
            run(words)


def run_space(text: str) -> None:
    small = replaced(text, SPACE)
    Path("space.yaml").write_text(small)
    stages = tuple(yaml.safe_load(small).get("before", ()))
    run(["sweep", "demo", "space.yaml", "model.image_size=32", "compute.cpus=0.25"], stages)


def blocks_of(page: str) -> list[Block]:
    found = [each.values[0] for language in ("", "python", "yaml") for each in blocks(language)]
    return sorted((block for block in found if block.page == page and not block.reason), key=lambda block: block.line)


def test_no_page_with_commands_is_missed():
    assert {each.values[0].page for language in ("", "python", "yaml") for each in blocks(language)} == {*ORDER}


@pytest.mark.parametrize("page", ORDER)
def test_a_page_runs_from_its_first_block_to_its_last(clone, page):
    for block in blocks_of(page):
        match block.language:
            case "":
                run_commands(block.text)
            case "python":
                run_python(replaced(block.text, PYTHON | {'"data/demo"': repr(storage.absolute("data/demo"))}))
            case _:
                run_space(block.text)
