"""The plan of a run: steps and dataset sizes, and one error for each mismatch of recipe and dataset."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vitray.config import load_run
from vitray.config.training import Data
from vitray.data.shards import held_out, open_dataset, read_request, write_dataset
from vitray.errors import ConfigError
from vitray.runs.resolve import check_storage, plan_of, resolve
from vitray.runs.run_dir import difference

ROOT = Path(__file__).parent.parent
TINY = ["model.name=vit_u2x2_8", "model.image_size=32", "model.num_classes=10", "optim.batch=16"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("data") / "demo")
    write_dataset(read_request("demo", url, overrides=["images=100", "image_size=32"]))
    return url


def run(dataset, *overrides):
    return load_run(None, [*TINY, f"data.url={dataset}", "optim.duration=3 epochs", "optim.warmup=1 epoch", *overrides])


def test_a_plan_has_the_numbers_of_its_recipe_and_dataset(dataset):
    resolved = resolve(run(dataset))
    assert resolved.length == (6, 6, 18)
    assert resolved.dataset.url == str(Path(dataset).absolute())
    plan = plan_of(resolved)
    assert (plan["images"], plan["classes"]) == (100, 10)
    assert plan["val_images"] == open_dataset(dataset).splits["val"].rows
    assert (plan["steps_per_epoch"], plan["steps"], plan["warmup_steps"]) == (6, 18, 6)
    assert plan["trainable_share"] == 1.0


def test_the_number_of_classes_comes_from_the_dataset(dataset):
    settings = ["model.name=vit_u2x2_8", "model.image_size=32", f"data.url={dataset}", "optim.batch=16"]
    assert resolve(load_run(None, [*settings, "optim.warmup=1 epoch"])).run.model.num_classes == 10


@pytest.mark.parametrize(
    ("overrides", "phrases"),
    [
        (["data.train=trian"], ["data.train: got 'trian'", "did you mean train"]),
        (["model.num_classes=1000"], ["model.num_classes: got 1000, expected the 10 classes of"]),
        (["optim.batch=101"], ["optim.batch: got 101, expected at most the 100 images"]),
        (["optim.batch=15", "data.mix.mixup=0.8"], ["optim.batch: got 15, expected an even number"]),
        (
            ["optim.batch=4", "compute.workers=2..8"],
            ["optim.batch: got 4, expected at least an image for each of 8 workers, or fewer compute.workers"],
        ),
        (
            ["optim.batch=9", "compute.workers=1..2", "compute.local_batch=1"],
            [
                "compute.local_batch 1 does not fit optim.batch 9 on 2 workers",
                "5 for 5 images",
                "the smallest share has 4",
            ],
        ),
        (["optim.warmup=4 epochs"], ["optim.warmup"]),
        (["data.url=null"], ["data.url: got null", "vitray shard"]),
        (["data.url=nowhere"], ["nowhere: not a vitray dataset"]),
    ],
)
def test_a_mismatch_of_recipe_and_dataset_is_one_error(dataset, overrides, phrases):
    changed = {override.partition("=")[0] for override in overrides}
    base = [*TINY, f"data.url={dataset}", "optim.duration=3 epochs", "optim.warmup=1 epoch"]
    settings = [setting for setting in base if setting.partition("=")[0] not in changed]
    with pytest.raises(ConfigError) as error:
        resolve(load_run(None, [*settings, *overrides]))
    assert len(str(error.value).splitlines()) == 1
    for phrase in phrases:
        assert phrase in str(error.value)


def test_a_holdout_split_is_evaluated_and_not_trained_on(dataset):
    opened = open_dataset(dataset)
    masks = {share: held_out(opened, Data(holdout=share)) for share in (0.1, 0.4, 0.999)}
    assert held_out(opened, Data()) is None
    assert (masks[0.1] <= masks[0.4]).all()
    assert 0 < masks[0.1].sum() < masks[0.4].sum() < 70
    resolved = resolve(run(dataset, "data.holdout=0.4"))
    assert (resolved.holdout_mask == masks[0.4]).all()
    assert resolved.val_images == masks[0.4].sum()
    assert resolved.images == 100 - masks[0.4].sum()
    assert resolved.length.epoch == resolved.images // 16
    with pytest.raises(ConfigError, match="holds out none of 100 images"):
        resolve(run(dataset, "data.holdout=1e-9"))


def test_images_and_splits_that_are_no_dataset_come_with_the_command(dataset, tmp_path):
    folder = tmp_path / "photos" / "cat"
    folder.mkdir(parents=True)
    (folder / "1.JPG").write_bytes(b"")
    message = f"it holds images: `vitray shard {tmp_path}/photos {tmp_path}/photos_shards` makes one"
    with pytest.raises(ConfigError, match=message):
        resolve(run(dataset).replace({"data.url": f"{tmp_path}/photos"}))
    (tmp_path / "only").mkdir()
    described = json.loads((Path(dataset) / "dataset.json").read_text())
    del described["splits"]["val"]
    (tmp_path / "only" / "dataset.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"data.val: got 'val', .*: train; without one, data.holdout=0"):
        resolve(run(dataset).replace({"data.url": f"{tmp_path}/only"}))


def test_a_missing_or_truncated_shard_is_named(dataset, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in Path(dataset).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shard = next(copy.glob("val-*.parquet"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    with pytest.raises(
        ConfigError, match=rf"{shard.name}: has {len(content) - 7} bytes, expected {len(content)} bytes"
    ):
        resolve(run(copy))
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"{shard.name}: is missing"):
        resolve(run(copy))


def test_a_dry_run_prints_the_plan_as_json_without_ray(dataset, tmp_path):
    code = (
        "import sys; from pipelines.__main__ import main; status = main(sys.argv[1:]);"
        " print('ray' in sys.modules, file=sys.stderr); sys.exit(status)"
    )
    args = ["train", "demo", f"data.url={dataset}", "optim.duration=3 epochs", "--dry-run", "--json"]
    command = [sys.executable, "-c", code, *args, "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout.splitlines()[-1])
    assert {"trainable_share", "params", "steps", "global_batch", "workers"} <= plan.keys()
    assert plan["steps"] == 9
    assert done.stderr.splitlines()[-1] == "False"
    assert list((tmp_path / "runs").iterdir()) == []


def test_unwritable_storage_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        check_storage(str(tmp_path / "file" / "runs"))


def test_only_settings_that_affect_the_result_define_an_experiment():
    base = load_run(None, ["optim.lr=1e-3"])
    ignored = [
        "compute.workers=4",
        "data.url=elsewhere",
        "checkpoint.every=7 steps",
        "guard.on_nan=rewind",
        "data.augment.on=auto",
    ]
    assert difference(base, load_run(None, ignored)) == []
    assert difference(base, load_run(None, ["optim.lr=2e-3", "seed=1"])) == ["seed: 0 -> 1", "optim.lr: 0.001 -> 0.002"]
