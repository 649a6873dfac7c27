"""The command line: exit statuses, one message on stderr, one JSON object last on stdout."""

import json
import os
import pathlib
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from pipelines.__main__ import VERBS, main, run_verb


def vitray(*args):
    return subprocess.run([sys.executable, "-m", "pipelines", *args], capture_output=True, text=True)


def test_the_bare_command_lists_the_verbs(capsys):
    for args in ([], ["-h"], ["--help"]):
        assert main(args) == 0
        usage = capsys.readouterr().out
        assert all(verb in usage for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([verb, "-h"])
    assert exit_.value.code == 0
    usage = capsys.readouterr().out
    assert "--json" in usage
    assert "example" in usage


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["sweep", "demo", "demo_lr", "--out", str(tmp_path)]) == 2
    assert re.search(r"needs ray, .*; shard, train --here, evaluate, inspect and predict work", capsys.readouterr().err)


def test_an_unknown_verb_suggests_the_nearest(capsys):
    assert main(["modle"]) == 2
    assert "unknown verb 'modle'" in (message := capsys.readouterr().err)
    assert "did you mean model" in message


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["finetune"], "did you mean train?"),
        (["train", "demmo"], "no recipe 'demmo', and no file; did you mean demo?"),
        (["sweep", "demo", "demo_lrr"], "no space 'demo_lrr', and no file; did you mean demo_lr?"),
        (["train", "demo", "optim.duration=5", "epochs"], 'needs quotes, as in "optim.duration=5 epochs"'),
        (["train", "demo", "optim.lr", "=", "1e-3"], "expected setting=value without spaces"),
        (["train", "demo", "optim.lr=", "1e-3"], "expected setting=value without spaces"),
        (["train", "demo", "lr=1e-3"], "lr: unknown setting, .*; did you mean optim.lr?"),
        (["train", "demo", "model.name=vit_base_patch16_224"], "did you mean vit_b12x1_16, with model.image_size=224?"),
        (["train", "demo", "{folder}"], "the data of a run are a setting, data.url={folder}"),
    ],
)
def test_what_was_meant_is_offered(args, meant, tmp_path, capsys):
    assert main([arg.format(folder=tmp_path) for arg in args]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in meant.format(folder=tmp_path).split(".*")), message


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"vitray \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_json_is_the_last_line(capsys):
    assert main(["model", "ViT-U2x2/8", "image_size=32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["name"] == "vit_u2x2_8"
    assert set(result) == {"name", "params", "gflops", "activation_bytes"}


def test_bad_input_exits_2_without_a_traceback():
    done = vitray("model", "vit_u2x2_8", "image_size=33")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vitray: override 'model.image_size=33'")
    assert "Traceback" not in done.stderr


def test_the_installed_command_is_the_module():
    command = os.path.join(os.path.dirname(sys.executable), "vitray")
    done = subprocess.run([command, "model", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "model name 'nonsense'" in done.stderr


def test_each_verb_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "pipelines.model", "b0x1"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "depth is 0" in done.stderr


def test_control_c_exits_130(capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    assert run_verb(interrupted, []) == 130


def test_an_internal_error_keeps_its_traceback():
    def failing(args):
        raise RuntimeError("an internal error")

    with pytest.raises(RuntimeError, match="an internal error"):
        run_verb(failing, [])


def test_weights_are_described_and_saved(tmp_path, capsys):
    from vitray import Model, Run, ViT, save_model
    from vitray.weights import write_library

    vit = ViT(Model(name="vit_u2x1_8", image_size=32, num_classes=3, norm_eps=1e-12))
    save_model(str(tmp_path / "a"), Run(model=vit.model), vit, ["cat", "dog", "owl"])
    (tmp_path / "hf").mkdir()
    write_library(vit, "hf", tmp_path / "hf", ["cat", "dog", "owl"])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["id2label"]["1"] == "dog"
    assert main(["model", str(tmp_path / "hf")]) == 2
    assert 'do not show normalize (mean and std of the colors; "normalize={}" are those of' in capsys.readouterr().err
    assert main(["model", str(tmp_path / "hf"), "normalize={}", "--save", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["name"] == "vit_u2x1_8"
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in "ab"]
    assert weights[0] == weights[1]
    assert main(["model", str(tmp_path / "a"), "image_size=64"]) == 2
    assert "a model folder has its own settings; got image_size" in capsys.readouterr().err
    assert main(["model", str(tmp_path / "absent.pth")]) == 2
    assert "absent.pth: no such file" in capsys.readouterr().err


def test_a_model_name_has_no_weights_to_save(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["model", "B12", "--save", str(tmp_path / "m")])
    assert exit_.value.code == 2
    assert "B12 is a name" in capsys.readouterr().err


def test_the_public_names_resolve():
    import vitray

    for name in vitray.PUBLIC:
        assert getattr(vitray, name).__module__.startswith("vitray")
    assert vitray.inspection.attention_maps.__module__ == "vitray.inspection.attention"
    assert {*vitray.PUBLIC, "inspection"} < set(dir(vitray))
    assert vitray.__version__ == version("vitray")
    with pytest.raises(AttributeError, match="vitray has no 'Vit'"):
        vitray.Vit  # noqa: B018


def test_the_branch_benchmark_measures_and_draws(tmp_path, capsys):
    args = ["--models", "ViT-U2x2/8", "--image-size", "32", "--batches", "1,2", "--rounds", "2", "--seconds", "0.01"]
    for options in ([], ["--train", "--dtype", "bf16"]):
        assert main(["bench", "branches", *args, "--out", str(tmp_path), "--json", *options]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [row["batch"] for row in result["rows"]] == [1, 2]
        assert all(row[variant] > 0 for row in result["rows"] for variant in ("seq", "loop", "fused", "auto"))
        for path in map(pathlib.Path, result["files"]):
            assert path.stat().st_size > 100


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--models", "vit_s18x1_16"], "one branch leaves nothing to compare"),
        (["--models", "axial_resnet50_s"], "--models needs a Vision Transformer: got axial_resnet50_s"),
        (["--models", "vit_q2x2_16"], "width 'q'"),
        (["--image-size", "100"], "image_size 100 is not a multiple"),
    ],
)
def test_a_benchmark_without_anything_to_compare_is_rejected(args, message, capsys):
    assert main(["bench", "branches", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("options", "drawn"), [([], 6000), (["--images", "200"], 200)])
def test_the_demo_draws_trains_and_names_the_next_commands(tmp_path, monkeypatch, capsys, options, drawn):
    from pipelines import shard, train

    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shard, "main", lambda words: calls.append(words))
    monkeypatch.setattr(train, "main", lambda words: calls.append(words) or {"model": "runs/first/model"})
    assert main(["demo", "optim.lr=1e-3", "--name", "first", *options]) == 0
    assert calls == [
        ["demo", "data/demo", f"images={drawn}", "image_size=64", "workers=2"],
        ["demo", "data.url=data/demo", "tracking.register_as=demo", "optim.lr=1e-3", "--name", "first"],
    ]
    printed = capsys.readouterr().out
    assert "\n  vitray evaluate runs/first/model data/demo\n" in printed
    assert printed.count("\n  vitray ") == 3


def test_the_demo_keeps_its_dataset(tmp_path, monkeypatch):
    from pipelines import shard, train

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/demo").mkdir(parents=True)
    (tmp_path / "data/demo/dataset.json").write_text("{}")
    monkeypatch.setattr(shard, "main", lambda words: pytest.fail("drew images again"))
    monkeypatch.setattr(train, "main", lambda words: {"model": "m"})
    assert main(["demo"]) == 0
