"""Every setting with bad values: refused with one short message that names its path, or good enough for a dry run."""

import argparse
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_sets import save_splits, shard_of

from pipelines import bench, model, sweep, train, ui, weights
from pipelines.__main__ import run_verb
from vitray.config import Run, load_run
from vitray.config.parsing import apply_changes, dump_yaml, parse_overrides
from vitray.config.validation import sections_in
from vitray.data.shards.manifest import Split, open_dataset
from vitray.data.shards.options import ShardSettings, read_request, read_settings
from vitray.data.stream.preview import PreviewSettings
from vitray.errors import ConfigError
from vitray.models.tokenizer import VisualTokenizer
from vitray.models.vit import ViT
from vitray.runs.resolve import plan_text, resolve
from vitray.runs.train import train as train_run
from vitray.sweeps.space import Space, check_space, read_space
from vitray.weights import save_model
from vitray.weights.folder import save_tokenizer

TINY = ["model.name=vit_u1x1_8", "model.image_size=32", "model.num_classes=3", "optim.batch=16"]
TINY += ["optim.duration=3 epochs", "optim.warmup=1 epoch", "data.mix={mixup: 0.1}", "tracking.register_as=vit"]
UNLABELED = ["data.mix={}", "model.num_classes=null"]
NEEDS = {
    "task.kind=finetune": ["task.weights=base"],
    "task.kind=masked": UNLABELED,
    "task.kind=lejepa": UNLABELED,
    "task.kind=self_distillation": UNLABELED,
    "task.kind=tokenizer": UNLABELED,
    "task.objective.kind=beit": ["task.objective.tokenizer=codes"],
}
BESIDE = {
    "task.distill.": ["task.distill.teacher=base"],
    "task.asymmetric.": ["task.loss=asymmetric"],
    "task.cosub.": ["model.drop_path=0.1"],
    "data.views": ["task.kind=lejepa", *UNLABELED],
}
DIGITS = "0" * 400
VALUES = [
    "0", "-1", "1e-300", "1e300", f"1{DIGITS[:40]}", f"1{DIGITS}", ".nan", "-.inf", "''", "[]", "{}", "null",
    "[.nan, 0, 1e300]", "0 epochs", "0.001 epochs", "1000000000 steps", f"1{DIGITS} steps", "0.5 steps", "0 minutes",
    '"a\\n0"', '"\\ud800"', "x" * 300, "x" * 5000, f"1..1{DIGITS}", "vit_b999999x999999_16",
]  # fmt: skip


def paths(section, above="", kinds=()):
    """Yield (dotted path, the kinds of sections it lies in) of every setting."""
    for name, field in section.model_fields.items():
        path = f"{above}{name}"
        if name != "kind":
            yield path, kinds
        for kind, below in sections_in(field.annotation).items():
            yield from paths(below, f"{path}.", (*kinds, f"{path}.kind={kind}") if kind else kinds)


def is_named(path, value, message):
    """Whether a message names the setting: by its path, by its section and name, or by the address that it holds."""
    parts = path.split(".")
    sections = [(".".join(parts[:at]), ".".join(parts[at:])) for at in range(1, len(parts))]
    by_section = any(f"{section}: " in message and name in message for section, name in sections)
    return path in message or by_section or (path == "data.url" and value.strip("'")[:40] in message)


def write_dataset(folder):
    """Write a dataset of 100 rows in one shard, which no one decodes."""
    folder.mkdir()
    columns = {"image": [b""] * 100, "label": [0] * 100, "key": [f"key {row}" for row in range(100)]}
    pq.write_table(pa.table(columns), folder / "all.parquet")
    split = Split(shards=(shard_of(folder / "all.parquet"),), class_counts=(100, 0, 0))
    save_splits(folder, {"train": split, "val": split}, ("a", "b", "c"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The current folder: a dataset `data`, a model folder `base` and a tokenizer `codes`."""
    folder = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlruns.db'}")
        write_dataset(folder / "data")
        torch.manual_seed(0)
        run = load_run(None, TINY)
        save_model("base", run, ViT(run.model), ["a", "b", "c"])
        tokens = ["task.kind=tokenizer", *NEEDS["task.kind=tokenizer"]]
        tokens += ["task.levels=[4]", "task.decoder_width=8", "task.decoder_depth=1", "task.decoder_heads=1"]
        save_tokenizer("codes", VisualTokenizer(load_run(None, _merged(TINY, tokens))))
        yield folder


def _merged(*groups):
    """The overrides of all groups, of which a later one of the same setting counts."""
    return list({each.partition("=")[0]: each for group in groups for each in group}.values())


def test_every_bad_value_of_every_setting_is_refused_by_its_path_or_survives_a_dry_run(place):
    dataset, wrong, outcomes = open_dataset("data"), [], {"refused": 0, "planned": 0}
    for path, kinds in paths(Run):
        beside = [each for section, settings in BESIDE.items() if path.startswith(section) for each in settings]
        given = _merged(TINY, ["data.url=data"], kinds, *(NEEDS.get(kind, ()) for kind in kinds), beside)
        base = load_run(None, given)
        for value in VALUES:
            override = f"{path}={value}"
            try:
                plan_text(resolve(base.replace(parse_overrides([override])), dataset))
                outcomes["planned"] += 1
            except ConfigError as error:
                outcomes["refused"] += 1
                message = str(error)
                if not is_named(path, value, message) or "\n" in message or len(message) > 1400:
                    wrong.append(f"{override[:80]}: {message[:200]}")
            except Exception as error:
                wrong.append(f"{override[:80]}: {type(error).__name__}: {error}")
    assert wrong == []
    assert outcomes["refused"] > 2000
    assert outcomes["planned"] > 100


def test_every_bad_value_of_every_part_of_a_space_is_refused_or_has_points(tmp_path):
    trees = []
    random = {"kind": "random", "trials": 3}
    for value in (parse_overrides([f"x={text}"])["x"] for text in VALUES):
        for path, kinds in paths(Space):
            tree = {"space": {"optim.lr": {"uniform": [0.1, 1.0]}}, "search": dict(random)}
            chosen = {kind.partition("=")[0]: kind.partition("=")[2] for kind in kinds}
            apply_changes(chosen | ({"search.trials": 3} if "search.kind" in chosen else {}), tree)
            apply_changes({path: value}, tree)
            trees.append(tree)
        for kind, given in (
            ("grid", [value, 1]), ("choice", value), ("seeds", value), ("text", value),
            ("cases", {"a": {"seed": value}}), ("uniform", [value, 1]), ("uniform", [0.1, value]),
            ("loguniform", [0.1, value]), ("quniform", [0.1, 1, value]), ("quniform", [value, 1, 0.1]),
        ):  # fmt: skip
            trees.append({"space": {"seed" if kind == "seeds" else "optim.lr": {kind: given}}, "search": random})
    wrong, accepted = [], 0
    for tree in trees:
        (tmp_path / "space.yaml").write_text(dump_yaml(tree), encoding="utf-8", errors="surrogateescape")
        try:
            accepted += len(check_space(read_space(tmp_path / "space.yaml"), Run())) > 0
        except ConfigError as error:
            message = str(error)
            if "\n" in message or len(message) > 1400:
                wrong.append(f"{str(tree)[:200]}: {message[:200]}")
        except Exception as error:
            wrong.append(f"{str(tree)[:200]}: {type(error).__name__}: {error}")
    assert wrong == []
    assert len(trees) > 700
    assert accepted > 20


def bad_input(capsys, verb, *args):
    """The message of a verb that ends with exit 2."""
    assert run_verb(verb.main, args) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert len(message) < 1500
    return message


def test_an_interval_that_rounds_to_no_step_ends_a_dry_run(place, capsys):
    (place / "tiny.yaml").write_text(load_run(None, [*TINY, "data.url=data"]).to_yaml())
    assert run_verb(train.main, ["tiny.yaml", "--dry-run"]) == 0
    capsys.readouterr()
    for setting in ("evaluate.every", "checkpoint.every", "tracking.every"):
        message = bad_input(capsys, train, "tiny.yaml", "--dry-run", f"{setting}=0.01 epochs")
        assert message == (
            f"vitray: {setting}: got '0.01 epochs', which rounds to 0 steps, expected at least one;"
            " an epoch has 6 steps\n"
        )
    assert "6 steps" in bad_input(capsys, train, "tiny.yaml", "--dry-run", "optim.duration=0.01 epochs")
    assert "expected at most the 100 images" in bad_input(capsys, train, "tiny.yaml", "--dry-run", "data.repeats=101")


def test_an_interval_that_rounds_to_no_step_ends_the_dry_run_of_a_sweep(place, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (place / "tiny.yaml").write_text(load_run(None, [*TINY, "data.url=data"]).to_yaml())
    for setting, value, message in (
        (
            "evaluate.every",
            "0.01 epochs",
            "got '0.01 epochs', which rounds to 0 steps, expected at least one; an epoch has 6 steps",
        ),
        ("optim.duration", "0.01 epochs", "got '0.01 epochs', expected at least one step"),
        ("optim.batch", 102, "got 102, expected at most the 100 images of train"),
    ):
        good = 50 if setting == "optim.batch" else "2 epochs"
        space = {"space": {setting: {"grid": [good, value]}}, "goal": {"metric": "val/loss", "mode": "min"}}
        (place / "space.yaml").write_text(dump_yaml(space))
        assert f"{setting}: {message}" in bad_input(capsys, sweep, "tiny.yaml", "space.yaml", "--dry-run")


def test_a_name_of_300_characters_is_one_message(place, capsys):
    long = "x" * 300
    assert "cannot be read as text" in bad_input(capsys, train, long, "--dry-run")
    assert "cannot be read as text" in bad_input(capsys, sweep, "demo", long, "--dry-run")
    assert "cannot be read as text" in bad_input(capsys, sweep, long, "demo_lr", "--dry-run")
    assert "expected at most 100 characters" in bad_input(capsys, model, long)
    assert "yaml" in bad_input(capsys, train, f"{long}/a.yaml", "--dry-run")


@pytest.mark.parametrize(
    "name", ["x" * 300, "", " ", ".", "..", "../x", "a/../../b", "/tmp/a", "a\nb", "a\0b", "\udcff"]
)
def test_a_name_that_is_no_folder_is_refused_before_anything_else(place, capsys, name):
    wanted = "expected the name of a folder: one line of at most 200 bytes, without . and .."
    for option in ("--name", "--fork"):
        assert wanted in bad_input(capsys, train, "demo", "--dry-run", option, name)
    assert wanted in bad_input(capsys, sweep, "demo", "demo_lr", "--dry-run", "--name", name)
    if name:
        assert wanted in bad_input(capsys, train, "--dry-run", "--resume", name)
    with pytest.raises(ConfigError, match="expected the name of a folder"):
        train_run(load_run(None, TINY), name)


def test_a_resumed_run_gets_no_other_name(place, capsys):
    with pytest.raises(SystemExit) as error:
        train.main(["--resume", "first", "--name", "second", "--dry-run"])
    assert error.value.code == 2
    assert "--name: not allowed with argument --resume" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["a\0b", "\udcff"])
def test_an_address_that_is_no_text_is_one_message(place, capsys, folder):
    for args in ((train, "tiny.yaml", "--dry-run", "--out", folder), (weights, "show", folder)):
        assert "expected a path of UTF-8 text without null bytes" in bad_input(capsys, *args)
    with pytest.raises(ConfigError, match="expected a path of UTF-8 text"):
        read_request(folder, "data2")


def test_every_bad_value_of_every_setting_of_shard_is_refused_or_small():
    wrong, accepted = [], 0
    for section in (ShardSettings, PreviewSettings):
        for path, kinds in paths(section):
            for value in VALUES:
                try:
                    settings = read_settings(section, [*kinds, f"{path}={value}"], "settings")
                    accepted += 1
                    bound = {"seed": 2**63, "shard_bytes": 10**12, "max_pixels": 10**9}.get(path, 10**7)
                    numbers = [number for number in [getattr(settings, path, None)] if isinstance(number, int | float)]
                    wrong += [f"{path}={value[:80]}" for number in numbers if not 0 <= number <= bound]
                except ConfigError as error:
                    message = str(error)
                    if not is_named(path, value, message) or "\n" in message or len(message) > 1400:
                        wrong.append(f"{path}={value[:80]}: {message[:200]}")
    assert wrong == []
    assert accepted > 20
    with pytest.raises(ConfigError, match=r"samples x copies at 4000 px have .* pixels, expected at most 268,435,456"):
        read_settings(PreviewSettings, ["size=4000"], "look")


def test_the_kind_of_a_source_keeps_the_settings_before_it():
    assert read_settings(ShardSettings, ["workers=2", "kind=tar", "resize=64"], "settings") == ShardSettings(
        workers=2, kind="tar", resize=64
    )


def count_options(parser, above=()):
    """Yield (benchmark, option) for each option of `vitray bench` that takes a number."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from count_options(below, (name,))
        elif action.type not in (None, Path) and action.dest not in ("modes", "models"):  # lists of names
            yield *above, action.option_strings[0]


@pytest.mark.parametrize("value", ["0", "-1", "1e30", "nan", "inf", "", "x", "1.5.1", f"1{DIGITS[:40]}", f"1{DIGITS}"])
def test_every_bad_number_of_bench_is_refused_where_it_is_parsed(capsys, value):
    options = list(count_options(bench.build_parser()))
    assert len(options) > 20
    for benchmark, option in [*options, ("ui", "--port")]:
        verb, args = (ui, []) if benchmark == "ui" else (bench, [benchmark])
        with pytest.raises(SystemExit, match="2"):
            verb.main([*args, f"{option}={value}"])
        assert re.search(rf"argument {option}: got .*, expected a (whole )?number", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["vit_b999999x999999_16"],
            "expected at most 1,000 pairs of attention and feedforward; it has 7.1e+18 param",
        ),
        (["vit_u1000000x1_16"], "depth x branches is 1,000,000"),
        (["vit_h12x1_16000", "image_size=16000"], "has 9.8e+11 parameters, expected at most 1e+11"),
        (["vit_b12x1_16", "num_classes=999999999"], "has 7.7e+11 parameters"),
        (["vit_b12x1_16", "head={kind: mlp, hidden: 999999999}"], "has 1.8e+12 parameters"),
        (["vit_b12x1_1", "image_size=100000"], "has 100000 x 100000 patches, expected at most 1,048,576"),
        (["vit_b" + "9" * 60], "depth x branches is 999,999"),
    ],
)
def test_a_network_beyond_the_bounds_is_refused_before_it_is_built(capsys, args, message):
    assert message in bad_input(capsys, model, *args)
