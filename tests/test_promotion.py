"""Promotion of registered versions: the rules, the alias in a real store, what two runs do at once, and bad input."""

import json
import re
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset, write_network
from scipy.stats import binomtest

import tune_spaces
from pipelines.__main__ import main
from vitray.config import load_run
from vitray.errors import ConfigError, RunError
from vitray.evaluation import evaluate
from vitray.inference.engine import numerics_of
from vitray.inference.images import open_images
from vitray.inference.models import describe_network
from vitray.inference.outputs import BATCH, Work, compute_outputs
from vitray.metrics.intervals import compare_hits
from vitray.runs import promotion
from vitray.runs.promotion import PromotionRequest, decide, promote, promote_finished
from vitray.runs.resolve import resolve
from vitray.runs.train import train
from vitray.sweeps.plan import plan_stages
from vitray.sweeps.space import read_space
from vitray.system.mlflow_client import open_client, tracking_uri
from vitray.tracking import model_registry
from vitray.tracking.model_registry import PROMOTION_TAG, UID_TAG, holder_of, move_alias
from vitray.tracking.upload import flush_all
from vitray.weights import load_model, save_model

SETTINGS = ["model.num_classes=10", "model.image_size=32", "model.name=vit_u2x1_8"]


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> Path:
    """A dataset, and networks: good (its head is fitted), nearly (as good but for 2 images), bad."""
    folder = tmp_path_factory.mktemp("networks")
    write_dataset(folder / "data", {"train": 40, "val": 101})
    write_network(folder / "bad")
    write_network(folder / "other", classes=(*SHAPES[:9], "sphere"))
    spec, vit = describe_network(str(folder / "bad"))
    images = open_images(str(folder / "data"), "val")
    outputs = compute_outputs(Work(spec, images, ("features",), str(folder / "outputs"), numerics_of(1, BATCH)), 1, vit)
    features, targets = outputs.features.astype(np.float64), np.eye(10)[outputs.labels]
    centered = features - features.mean(0)
    weights = np.linalg.solve(centered.T @ centered + 1e-3 * np.eye(len(centered.T)), centered.T @ targets)
    run, vit, classes = load_model(str(folder / "bad"))
    scores = centered @ weights
    for name, wrong in (("good", 0), ("nearly", 2)):
        best = scores.argmax(1)
        # The bias of one class rises until the network has lost this many right images.
        raised = next(
            rise
            for rise in np.linspace(0, 1, 2001)
            if (best == outputs.labels).sum() - ((scores + rise * np.eye(10)[0]).argmax(1) == outputs.labels).sum()
            == wrong
        )
        bias = raised * np.eye(10)[0] - features.mean(0) @ weights
        with torch.no_grad():
            vit.head.weight.copy_(torch.from_numpy(weights.T))
            vit.head.bias.copy_(torch.from_numpy(bias))
        save_model(str(folder / name), run, vit, classes)
    return folder


@pytest.fixture(autouse=True)
def pages(monkeypatch) -> list[dict]:
    """The contents of the pages that the test writes; drawing them takes seconds."""
    contents = []

    def write(evaluation, folder):
        contents.append(evaluation.flat())
        return f"{folder}/index.html"

    monkeypatch.setattr(evaluate, "write_evaluation", write)
    monkeypatch.setattr(evaluate, "track_evaluation", lambda *_: None)
    monkeypatch.setattr(model_registry, "SETTLE_SECONDS", 0.0)
    return contents


@pytest.fixture
def place(networks, migrated, tmp_path, monkeypatch) -> Path:
    """A working folder with its own store."""
    shutil.copy(migrated, tmp_path / "mlruns.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "data").symlink_to(networks / "data")
    return tmp_path


def register(folder, alias=None, run_id=None, name="vit"):
    """Register a model folder as the next version, with an alias; return its number."""
    client = open_client(tracking_uri())
    if name not in [model.name for model in client.search_registered_models()]:
        client.create_registered_model(name)
    version = str(client.create_model_version(name, str(folder), run_id).version)
    if alias:
        client.set_registered_model_alias(name, alias, version)
    return version


def tags(version):
    return open_client(tracking_uri()).get_model_version("vit", version).tags


def raise_interrupt(*_):
    raise KeyboardInterrupt


def verb(capsys, *args):
    """The result of a command that succeeds."""
    assert main(["promote", *args, "--workers", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refusal(capsys, *args):
    """The message of a command that is refused, and writes nothing."""
    assert main(["promote", *args, "--out", "page"]) == 2
    assert not Path("page").exists()
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


# ---- the rules -------------------------------------------------------------------------------------------------------


def test_the_rules_follow_the_counts_the_interval_and_the_test():
    """Against the binomial test of SciPy, and percentiles of drawn differences."""
    rng, seen = np.random.default_rng(0), set()
    for _ in range(40):
        images, shares = int(rng.integers(5, 400)), rng.uniform(0.2, 0.9, 2)
        one, other = (rng.random((2, images)) < shares[:, None]).astype(int)
        only_one, only_other = int((one > other).sum()), int((other > one).sum())
        draws = rng.choice(one - other, (2000, images)).mean(1)
        low = np.quantile(draws, 0.025)
        if abs(low) < 2 / images or not only_one + only_other:  # too close for two bootstraps to agree
            continue
        is_sure = only_one > only_other and low > 0 and binomtest(only_one, only_one + only_other).pvalue < 0.05
        comparison = compare_hits(one, other)
        assert decide(comparison, "better")[0] == (only_one > only_other)
        assert decide(comparison, "significantly_better")[0] == is_sure
        seen.add((only_one > only_other, bool(is_sure)))
    assert seen == {(False, False), (True, False), (True, True)}


def test_a_tie_moves_nothing():
    hits = np.array([1, 0, 1, 0])
    assert not decide(compare_hits(hits, hits), "better")[0]
    assert not decide(compare_hits(hits, 1 - hits), "better")[0]


# ---- the alias -------------------------------------------------------------------------------------------------------


def test_the_first_version_gets_the_alias_without_a_comparison(networks, place, capsys):
    register(networks / "bad", "challenger")
    result = verb(capsys, "vit@challenger")
    assert (result["promoted"], result["holder"], result["comparison"], result["page"]) == (True, None, None, None)
    assert result["sentence"] == "version 1 of vit is now champion: no version had the alias"
    assert holder_of("vit", "champion") == "1"
    assert tags("1")[PROMOTION_TAG] == result["sentence"]
    again = verb(capsys, "models:/vit/1")
    assert (again["promoted"], again["sentence"]) == (
        True,
        "version 1 of vit is now champion: it had the alias already",
    )
    assert tags("1")[PROMOTION_TAG] == result["sentence"]


def test_the_repeat_of_a_command_that_was_killed_after_its_move_reports_the_promotion(networks, place, monkeypatch):
    register(networks / "bad", "champion")
    register(networks / "good")
    request = PromotionRequest("vit/2", "data", workers=1)
    with monkeypatch.context() as killed:
        killed.setattr(promotion, "tag_promotion", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            promote(request)
    repeated = promote(request)
    assert (repeated.promoted, repeated.holder, holder_of("vit", "champion")) == (True, "2", "2")


def test_a_surely_better_version_gets_the_alias(networks, place, pages, capsys):
    register(networks / "bad", "champion")
    register(networks / "good", "challenger")
    result = verb(capsys, "vit@challenger", "data", "--out", "page")
    assert result["promoted"]
    assert result["comparison"]["significant"]
    assert result["sentence"].startswith(
        "version 2 of vit is now champion: compared with version 1, which had the alias. The difference"
    )
    assert (result["holder"], holder_of("vit", "champion"), holder_of("vit", "challenger")) == ("1", "2", "2")
    [page] = pages
    assert page["comparisons"] == [result["comparison"]]
    assert [model["url"] for model in page["models"]] == ["models:/vit/2", "models:/vit/1"]
    assert result["page"] == "page/index.html"
    # The same question the other way round.
    back = verb(capsys, "vit/1", "data", "--when", "better")
    assert not back["promoted"]
    assert back["comparison"]["difference"] == -result["comparison"]["difference"]
    assert holder_of("vit", "champion") == "2"


def test_a_better_version_gets_the_alias_only_by_the_weaker_rule(networks, place, capsys):
    register(networks / "nearly", "production")
    register(networks / "good")
    result = verb(capsys, "vit/2", "data", "--alias", "production")
    assert not result["promoted"]
    assert "The difference of +1.98 points on 101 images is not significant" in result["sentence"]
    assert tags("2")[PROMOTION_TAG] == result["sentence"]
    assert holder_of("vit", "production") == "1"
    assert verb(capsys, "vit/2", "data", "--alias", "production", "--when", "better")["promoted"]
    assert holder_of("vit", "production") == "2"
    assert holder_of("vit", "champion") is None


def test_equal_versions_leave_the_alias(networks, place, capsys):
    register(networks / "good", "champion")
    register(networks / "good")
    result = verb(capsys, "vit/2", "data", "--when", "better")
    assert (result["promoted"], result["comparison"]["difference"]) == (False, 0)


def test_the_settings_of_the_run_are_the_defaults(networks, place, capsys):
    run, vit, classes = load_model(str(networks / "good"))
    changes = {"data.url": str(networks / "data"), "tracking.register_as": "vit"}
    rule = {"tracking.promote": {"alias": "best", "when": "better"}}
    save_model(str(place / "model"), run.replace(changes | rule), vit, classes)
    register(networks / "nearly", "best")
    register(place / "model")
    result = verb(capsys, "vit/2", "--out", "page")
    assert (result["promoted"], result["alias"]) == (True, "best")


# ---- two at once -----------------------------------------------------------------------------------------------------


def test_only_one_of_several_moves_the_alias_from_the_same_holder(networks, place):
    versions = [register(networks / "good") for _ in range(6)]
    barrier, moved = threading.Barrier(len(versions)), []

    def move(version):
        barrier.wait()
        if move_alias("vit", "champion", version, None):
            moved.append(version)

    threads = [threading.Thread(target=move, args=(version,)) for version in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moved == [holder_of("vit", "champion")]
    assert not move_alias("vit", "champion", "1" if moved != ["1"] else "2", None)


def test_two_machines_that_move_the_alias_at_once_end_with_the_better_version(networks, place, monkeypatch, capsys):
    """Another machine has read the alias before this one moves it, and moves it a moment later."""
    register(networks / "bad", "champion")
    nearly, good = register(networks / "nearly"), register(networks / "good")

    def settle(_seconds):
        monkeypatch.setattr(model_registry, "time", SimpleNamespace(sleep=lambda _: None))
        open_client(tracking_uri()).set_registered_model_alias("vit", "champion", other)

    for version, other, promoted in ((good, nearly, True), (nearly, good, False)):
        open_client(tracking_uri()).set_registered_model_alias("vit", "champion", "1")
        monkeypatch.setattr(model_registry, "time", SimpleNamespace(sleep=settle))
        result = verb(capsys, f"vit/{version}", "data", "--when", "better")
        assert (result["promoted"], result["holder"]) == (promoted, other)
        assert holder_of("vit", "champion") == good


def test_a_holder_that_changes_during_the_comparison_is_compared_too(networks, place, monkeypatch):
    """The version is better than the first holder, and not than the one that takes its place meanwhile."""
    register(networks / "bad", "champion")
    register(networks / "good")
    register(networks / "nearly")
    compare, holders = promotion._compare, []

    def compare_slowly(candidate, holder, request):
        result = compare(candidate, holder, request)
        if not holders:
            open_client(tracking_uri()).set_registered_model_alias("vit", "champion", "2")
        holders.append(holder)
        return result

    monkeypatch.setattr(promotion, "_compare", compare_slowly)
    result = promote(PromotionRequest("vit/3", "data", when="better", workers=1))
    assert holders == ["1", "2"]
    assert (result.promoted, result.holder, holder_of("vit", "champion")) == (False, "2", "2")


def test_an_alias_that_never_rests_is_an_error(networks, place, monkeypatch):
    register(networks / "good")
    monkeypatch.setattr(promotion, "move_alias", lambda *_: False)
    with pytest.raises(RunError, match="vit@champion: its version changed 5 times"):
        promote(PromotionRequest("vit/1"))


# ---- the end of a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def info(place) -> SimpleNamespace:
    """A finished run in its folder, of the parts that promotion reads."""
    run = load_run(None, [*SETTINGS, f"data.url={place / 'data'}", "tracking.register_as=vit", "tracking.promote={}"])
    folder = place / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(run.to_yaml())
    (folder / "run.json").write_text(json.dumps({"uid": "u1"}))
    return SimpleNamespace(run_dir=str(folder), data=str(place / "data"))


def test_a_run_promotes_the_version_that_it_has_registered(networks, place, info, capsys):
    client = open_client(tracking_uri())
    experiment = client.create_experiment("vitray")
    first, second = (client.create_run(experiment, tags={UID_TAG: uid}).info.run_id for uid in ("u1", "u2"))
    register(networks / "bad", "champion", second)
    register(networks / "good", None, first)
    register(networks / "bad", None, second)
    sentence = promote_finished(info.run_dir, info.data)
    assert sentence.startswith("version 2 of vit is now champion: compared with version 1")
    assert holder_of("vit", "champion") == "2"
    assert len(list((Path(info.run_dir) / "promotion" / "outputs").iterdir())) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_whose_store_is_away_is_promoted_later(networks, place, info, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    text = promote_finished(info.run_dir, info.data)
    assert text.startswith(f"not done: vit: MLflow at {address} does not answer: ")
    command = f"vitray promote {info.run_dir} {place / 'data'}"
    assert text.endswith(f"Later: vitray sync; {command}")
    assert command in capsys.readouterr().err
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert "has no version of this run yet" in promote_finished(info.run_dir, info.data)
    client = open_client(tracking_uri())
    run_id = client.create_run(client.create_experiment("vitray"), tags={UID_TAG: "u1"}).info.run_id
    register(networks / "good", None, run_id)
    capsys.readouterr()
    assert verb(capsys, *command.split()[2:])["promoted"]
    assert holder_of("vit", "champion") == "1"


def test_an_error_of_the_comparison_does_not_end_the_run(networks, place, info):
    client = open_client(tracking_uri())
    run_id = client.create_run(client.create_experiment("vitray"), tags={UID_TAG: "u1"}).info.run_id
    register(networks / "other", "champion")
    register(networks / "good", None, run_id)
    text = promote_finished(info.run_dir, info.data)
    assert text.startswith("not done: models:/vit/1: classes: they differ from those of models:/vit/2 in ")
    assert "sphere" in text
    assert holder_of("vit", "champion") == "1"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["vit/7", "data"], "vit has no version 7; it has 1, 2"),
        (["vit@chalenger", "data"], "vit has no alias chalenger; it has .*challenger .*; did you mean challenger"),
        (["vti@champion", "data"], "no model is registered as vti; registered are vit; did you mean vit"),
        (["runs/first/model", "data"], "runs/first/model: expected name@alias or name/3 of a registered model, or the"),
        (["vit", "data"], "vit: expected name@alias or name/3"),
        (["vit@challenger"], "models:/vit/2: its run names no images; expected DATA to compare the versions on"),
        (["vit@challenger", "nowhere"], "nowhere: no files here"),
        (
            ["vit@challenger", "data", "--split", "vall"],
            "no split 'vall', expected one of train, val; did you mean val",
        ),
        (["vit@challenger", "data", "--alias", "latest"], "--alias: got 'latest', expected letters, digits, - and _"),
        (["vit@challenger", "data", "--alias", "a b"], "--alias: got 'a b', expected letters"),
        (["vit@challenger", "data", "--alias", "other"], "models:/vit/3: classes: they differ .* in .*sphere"),
    ],
)
def test_bad_input_gets_one_message_and_moves_nothing(networks, place, capsys, args, message):
    register(networks / "bad", "champion")
    register(networks / "good", "challenger")
    if "other" in args:
        register(networks / "other", "other")
    before = open_client(tracking_uri()).get_registered_model("vit").aliases
    capsys.readouterr()
    assert re.search(message, refusal(capsys, *args))
    assert open_client(tracking_uri()).get_registered_model("vit").aliases == before


def test_a_folder_without_a_store_is_refused_and_gets_none(place, info, capsys):
    (place / "mlruns.db").unlink()
    for model in ("vit@challenger", info.run_dir):
        assert "mlruns.db; expected the folder that training ran in" in refusal(capsys, model, "data")
    assert not (place / "mlruns.db").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tracking.promote={}"], "promote compares registered versions, and register_as"),
        (
            ["tracking.register_as=vit", "tracking.promote.alias=Latest"],
            "tracking.promote.alias: got 'Latest', expected letters, digits, - and _",
        ),
        (["tracking.register_as=team/vit"], "tracking.register_as: got 'team/vit', expected a name without /, : and @"),
        (["tracking.register_as=vit@champion"], "register_as: got 'vit@champion', expected a name without"),
        (
            ["tracking.register_as=vit", "tracking.promote.alias=v2"],
            "tracking.promote.alias: got 'v2', expected letters",
        ),
        (
            ["tracking.register_as=vit", "tracking.promote.when=beter"],
            "tracking.promote.when: got 'beter', expected 'better' or .*; did you mean better",
        ),
        (
            ["tracking.register_as=vit", "tracking.promote={}", "data.val=null"],
            "tracking.promote: got a rule with data.val null; expected images on",
        ),
        (
            ["tracking.register_as=vit", "tracking.promote={}", "data.holdout=0.5"],
            "tracking.promote: got a rule with 50% of train held out",
        ),
    ],
)
def test_a_rule_that_no_run_can_follow_is_refused_by_the_plan(place, overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve(load_run(None, [*SETTINGS, f"data.url={place / 'data'}", "optim.batch=8", *overrides]))


def test_a_task_without_classes_has_no_rule(place):
    settings = [*SETTINGS[1:], "model.num_classes=null", f"data.url={place / 'data'}", "optim.batch=8", "task=masked"]
    with pytest.raises(ConfigError, match=r"tracking.promote: got a rule, expected null: a task of kind masked has no"):
        resolve(load_run(None, [*settings, "tracking.register_as=vit", "tracking.promote={}"]))


def test_a_sweep_refuses_a_rule_and_a_name_that_mlflow_refuses():
    run = load_run(None, [*SETTINGS, "tracking.register_as=vit", "tracking.promote={}"])
    space = read_space(tune_spaces.path_of("demo_lr"))
    with pytest.raises(ConfigError, match=r"tracking.promote: got a rule for champion, expected null in a sweep"):
        plan_stages(run, space, {}, "")
    run = load_run(None, [*SETTINGS, "tracking.register_as=vit:1"])
    with pytest.raises(ConfigError, match=r"tracking.register_as: got 'vit:1', expected a name without"):
        plan_stages(run, space, {}, "")


# ---- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
def test_runs_promote_their_versions_at_their_end(ray_cluster, tmp_path, monkeypatch):
    """The first version gets the alias, the second only if it is better, and a store that is away ends no run."""
    monkeypatch.undo()  # the page is written
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    write_dataset(tmp_path / "data", {"train": 200, "val": 101})
    settings = [*SETTINGS, f"data.url={tmp_path / 'data'}", "optim.batch=20", "optim.warmup=0 steps", "optim.lr=0.003"]
    settings += ["compute.workers=1", "evaluate.every=100 epochs", "checkpoint.every=100 epochs"]
    settings += ["tracking.register_as=vit", "tracking.promote={alias: best, when: better}"]

    def run(name, duration):
        return train(load_run(None, [*settings, f"optim.duration={duration}"]), name, str(tmp_path / "runs"))

    first = run("first", "1 steps")
    assert first.promotion == "version 1 of vit is now best: no version had the alias"
    second = run("second", "60 steps")
    is_better = second.val_top1 > first.val_top1
    assert second.promotion.startswith(
        f"version 2 of vit {'is now' if is_better else 'does not become'} best: compared with "
    )
    assert holder_of("vit", "best") == ("2" if is_better else "1")
    assert holder_of("vit", "champion") is None  # a registration alone moves no alias
    page = tmp_path / "runs" / "second" / "promotion"
    scores = {each["url"]: each["top1"] for each in json.loads((page / "results.json").read_text())["models"]}
    assert scores == {"models:/vit/2": second.val_top1, "models:/vit/1": first.val_top1}
    assert "The difference of" in (page / "index.html").read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    third = run("third", "1 steps")
    assert (third.state, third.mlflow_run) == ("finished", None)
    assert third.promotion.startswith("not done: vit: MLflow at http://127.0.0.1:9 does not answer")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlruns.db'}")
    assert {result.state for result in flush_all(tracking_uri())} == {"complete"}
    assert promote(PromotionRequest(third.home, out=str(tmp_path / "page"), workers=1)).version == "3"
