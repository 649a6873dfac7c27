"""The driver of a sweep: trial store, searcher, budgets, scheduler and console."""

import contextlib
import io
import json
import math
import signal
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import get_args
from unittest.mock import MagicMock

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from pipelines import recipes
from vitray.config import load_run
from vitray.config.parsing import dump_yaml, parse_yaml
from vitray.config.sweep import Asha, Goal, Scheduler, SchedulerTraits, Search, SearchTraits
from vitray.data.shards import read_request, write_dataset
from vitray.errors import ConfigError, OwnershipLost, RunError
from vitray.models.sizes import sizes_of
from vitray.runs.run_dir import RUN_META, SETTINGS
from vitray.sweeps import sweep
from vitray.sweeps.capacity import Node, fit_trials
from vitray.sweeps.plan import own_cpus, plan_sweep, trial_resources
from vitray.sweeps.sampler import SAMPLERS, ask
from vitray.sweeps.schedulers import BUILDERS, build_scheduler, progress
from vitray.sweeps.space import Space, SweepPoint, check_space, extend_space, read_space
from vitray.sweeps.sweep_logger import SweepConsole, SweepLogger
from vitray.sweeps.trial import INTERRUPTED, TrialContext, TrialTrainable
from vitray.sweeps.trial_store import (
    TrialEntry,
    TrialRecord,
    TrialStore,
    read_entries,
    read_record,
    write_record,
)
from vitray.sweeps.tuning import Interruption, TrialListener, TrialSearcher, trial_environment
from vitray.system import storage
from vitray.system.lease import FOLDER, own_folder

GRID = "space: {optim.lr: {grid: [1.0e-3, 0.01, 0.1, 0.2]}}\n"
TPE = "space: {optim.lr: {loguniform: [1.0e-4, 0.1]}}\nsearch: {kind: tpe, trials: 5, first: 2}\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searching")
    write_dataset(read_request("demo", str(folder / "demo"), overrides=["images=40", "image_size=32"]))
    overrides = ["model.name=vit_u2x1_8", "model.image_size=32", "model.num_classes=10", "optim.batch=8"]
    overrides += ["optim.duration=4 steps", "optim.warmup=0 steps", f"data.url={folder / 'demo'}", "compute.workers=1"]
    return load_run(None, overrides)


def open_sweep(folder, base, text, *additions, places=lambda: 1000):
    """Plan, trial store and searcher of a sweep in a folder, as after a restart."""
    (folder / "space.yaml").write_text(text)
    space = extend_space(read_space(folder / "space.yaml"), additions)
    plan = plan_sweep(base, space, [Node(cpus=4)])
    store = TrialStore(str(folder / "home"), plan.base, plan.points, space.search.traits.learns)
    return plan, store, TrialSearcher(plan, store, places)


def test_a_plan_knows_whose_cpus_a_trial_has(tmp_path, base):
    two = base.replace({"compute.workers": 2})
    for run, has_cpus in ((two, False), (two.replace({"compute.cpus": 1.25}), True)):
        plan = open_sweep(tmp_path, run, GRID)[0]
        assert (plan.has_cpus, plan.base.compute.cpus) == (has_cpus, 1.25 if has_cpus else 1)


@pytest.mark.parametrize(
    ("overrides", "cpus"),
    [
        ([], 2),
        (["compute.cpus=0.25"], 1.25),
        (["evaluate.probes=[knn]"], 3),
        (["compute.cpus=3"], 4),
        (["compute.workers=2"], None),
        (["data.cache=decoded"], None),
        (["evaluate.where=gpu"], None),
        (["compute.device=gpu"], None),
    ],
)
def test_a_trial_of_one_worker_on_cpus_is_one_process(overrides, cpus):
    resources = trial_resources(load_run(None, overrides), [Node(cpus=4)])
    assert resources.is_alone == (cpus is not None)
    assert not resources.is_alone or (resources.cpus, resources.data_cpus, resources.driver_cpus) == (cpus, 0, 0)


def test_a_trial_of_one_process_fits_a_single_cpu():
    assert fit_trials([Node(1)], trial_resources(load_run(None, []), [Node(1)])).concurrent == 1


def test_a_process_shares_the_cpus_of_its_node_with_the_other_trials(base, monkeypatch):
    nodes = [Node(cpus=8), Node(cpus=0), Node(cpus=9)]
    monkeypatch.setattr("vitray.sweeps.plan.cluster_nodes", lambda: nodes)
    resources = trial_resources(base, nodes)
    assert [own_cpus(resources, concurrent) for concurrent in (1, 2, 3, 8, 100)] == [8, 8, 4, 2, 1]
    assert own_cpus(trial_resources(base.replace({"compute.workers": 2}), nodes), 1) is None


def suggest_all(searcher):
    """The names of all remaining trials."""
    names = []
    while (config := searcher.suggest(str(len(names)))) != Searcher.FINISHED:
        names.append(config["name"])
    return names


def end_on_disk(store, name, state="finished", score=0.5, seconds=None):
    """End a trial as its own process does."""
    if seconds is not None:
        content = json.dumps({"device_seconds": seconds}).encode()
        storage.write_bytes(f"{store.run_dir(name)}/outcome.json", content)
    write_record(store.run_dir(name), TrialRecord(state, ((4, score),) if state != "failed" else (), "broke"))


def end(store, name, state="finished", score=0.5, seconds=None):
    """End a trial on disk and by its last results."""
    end_on_disk(store, name, state, score, seconds)
    if state != "failed":
        store.update(name, {"step": 4, "steps": 4, "goal": score})
    costs = {} if seconds is None else {"device_seconds": seconds}
    store.update(name, {"step": 4, "steps": 4, "goal": score, "state": state, "reason": "broke"} | costs)


def test_a_restarted_grid_leaves_out_ended_trials(tmp_path, base):
    _, store, searcher = open_sweep(tmp_path, base, GRID)
    assert suggest_all(searcher) == ["lr=1e-3", "lr=0.01", "lr=0.1", "lr=0.2"]
    end(store, "lr=0.01")
    end(store, "lr=0.2", "failed")
    assert suggest_all(open_sweep(tmp_path, base, GRID)[2]) == ["lr=1e-3", "lr=0.1"]


def test_a_scheduler_gets_ended_trials_first(tmp_path, base):
    _, store, _ = open_sweep(tmp_path, base, GRID)
    end(store, "lr=0.1")
    searcher = open_sweep(tmp_path, base, f"{GRID}scheduler: {{kind: asha, grace: 1 step}}\n")[2]
    names = suggest_all(searcher)
    assert names[0] == "lr=0.1"
    assert sorted(names) == sorted(store.trials)


def test_a_scheduler_gets_trials_in_the_same_shuffled_order(tmp_path, base):
    text = "space: {optim.lr: {grid: [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3, 5.0e-3, 6.0e-3]}}\nscheduler: {kind: asha}\n"
    names = suggest_all(open_sweep(tmp_path, base, text)[2])
    assert names not in (sorted(names), sorted(names, reverse=True))
    assert names == suggest_all(open_sweep(tmp_path, base, text)[2])


def test_an_added_value_is_one_more_trial(tmp_path, base):
    _, store, _ = open_sweep(tmp_path, base, GRID)
    for name in store.trials:
        end(store, name)
    plan, _, searcher = open_sweep(tmp_path, base, GRID, "optim.lr=0.5")
    assert suggest_all(searcher) == ["lr=0.5"]
    assert plan.trials == 5


def test_trials_keep_their_names_when_an_added_value_renames_all_points(tmp_path, base):
    text = "space: {model.name: {grid: [vit_u2x1_8, vit_u1x2_8]}}\n"
    _, store, _ = open_sweep(tmp_path, base, text)
    assert list(store.trials) == ["2x1", "1x2"]
    end(store, "2x1")
    for _ in range(2):
        _, wider, searcher = open_sweep(tmp_path, base, text, "model.name=vit_ti1x1_8")
        assert list(wider.trials) == ["2x1", "1x2", "vit_ti1x1_8"]
        assert suggest_all(searcher) == ["1x2", "vit_ti1x1_8"]
        assert wider.settings("2x1") == {"model.name": "vit_u2x1_8"}
        wider.close()


def test_a_changed_trial_of_the_same_name_is_refused(tmp_path, base):
    text = "space:\n  rate: {grid: [1, 2]}\n  optim.lr: '{rate}.0e-3'\n"
    _, store, _ = open_sweep(tmp_path, base, text)
    assert list(store.trials) == ["rate=1", "rate=2"]
    end(store, "rate=1")
    with pytest.raises(ConfigError, match=r"gives trial rate=1 .*0.01.*, it started with .*0.001"):
        open_sweep(tmp_path, base, text.replace("e-3", "e-2"))


def test_a_sweep_resumes_after_an_upgrade_that_brings_a_setting(tmp_path, base):
    (tmp_path / "space.yaml").write_text(GRID)
    space, home = read_space(tmp_path / "space.yaml"), str(tmp_path / "home")
    uid, starts, began = sweep.begin_sweep(home, "rates", base, space)
    meta = storage.read_json(f"{home}/sweep.json")
    settings = parse_yaml(meta["base"], "")[0]
    del settings["optim"]["lr"]  # as of a version without it
    storage.write_bytes(f"{home}/sweep.json", json.dumps(meta | {"base": dump_yaml(settings)}).encode())
    resumed = sweep.begin_sweep(home, "rates", base.replace({"compute.max_failures": 7}), space)
    assert (starts, resumed) == (1, (uid, 2, began))
    with pytest.raises(ConfigError, match="rates: a sweep of this name differs in seed: 0 -> 7; choose another"):
        sweep.begin_sweep(home, "rates", base.replace({"seed": 7}), space)


def test_an_interrupted_search_resumes_with_the_same_points(tmp_path, base):
    """Trials run one after another; the search is interrupted after 1 and after 3 of them."""
    (tmp_path / "one").mkdir()
    _, store, searcher = open_sweep(tmp_path / "one", base, TPE)
    names = []
    while (config := searcher.suggest("")) != Searcher.FINISHED:
        names.append(config["name"])
        end(store, names[-1], score=len(names))
    assert len(set(names)) == 5
    for completed, is_written in ((1, True), (3, True), (3, False)):
        folder = tmp_path / f"cut{completed}{is_written}"
        folder.mkdir()
        _, first, searcher = open_sweep(folder, base, TPE)
        for number in range(completed):
            end(first, searcher.suggest("")["name"], score=number + 1)
        first.close()
        points = storage.read_bytes(f"{first.sweep_dir}/points.json")
        searcher.suggest("")  # started, then lost with the driver
        first.close()
        if not is_written:  # lost before the thread wrote its point
            storage.write_bytes(f"{first.sweep_dir}/points.json", points)
        _, second, searcher = open_sweep(folder, base, TPE)
        resumed = []
        while (config := searcher.suggest("")) != Searcher.FINISHED:
            resumed.append(config["name"])
            end(second, resumed[-1], score=completed + len(resumed))
        assert names == [*names[:completed], *resumed]
    store.close()
    assert list(read_entries(store.sweep_dir)) == names
    assert read_entries(store.sweep_dir)[names[0]].asked is not None


def test_a_sweep_is_planned_by_a_trial_whose_stage_has_a_model(tmp_path, base, monkeypatch):
    planned, folder = [], tmp_path / "home" / "before" / "second" / "second=once" / "model"
    monkeypatch.setattr("vitray.sweeps.plan.resolve", planned.append)
    cases = "{a: {task: {kind: finetune, weights: '{first}'}}, b: {task: {kind: finetune, weights: '{second}'}}}"
    stages = "before: {first: {recipe: demo}, second: {recipe: demo}}\n"
    (tmp_path / "space.yaml").write_text(f"space: {{route: {{cases: {cases}}}}}\n{stages}")
    space, home = read_space(tmp_path / "space.yaml"), str(tmp_path / "home")
    assert plan_sweep(base, space, [Node(cpus=4)], home, ready=False).trials == 2
    with pytest.raises(ConfigError, match=r"before\.first, before\.second: every trial starts from a run that failed"):
        plan_sweep(base, space, [Node(cpus=4)], home)
    storage.write_bytes(str(folder / "run.yaml"), b"")
    plan_sweep(base, space, [Node(cpus=4)], home)
    assert [run.task.weights for run in planned] == [str(folder)]


def test_a_drawn_point_has_absolute_addresses(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").symlink_to(base.data.url)
    text = TPE.replace("space: {", "space: {data.url: {choice: [here]}, ")
    _, store, searcher = open_sweep(tmp_path, base, text)
    assert searcher.suggest("")["data.url"] == f"{tmp_path}/here"
    store.close()


def test_a_trial_gets_the_absolute_address_of_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitray.sweeps.plan.resolve", lambda run: None)  # there is no data set
    text = "space: {optim.lr: {grid: [1.0e-3]}}\ngoal: {metric: val/loss, mode: min}\n"
    (tmp_path / "space.yaml").write_text(text)
    run = load_run(recipes.path_of("masked_beit_imagenet"), ["task.objective.tokenizer=codes/model"])
    plan = plan_sweep(run, read_space(tmp_path / "space.yaml"), [Node(cpus=4)])
    assert plan.base.task.objective.tokenizer == f"{tmp_path}/codes/model"


@pytest.mark.parametrize("uri", ["sqlite:///mlruns.db", None, "http://10.0.0.5:5000"])
def test_a_trial_gets_the_absolute_addresses_of_the_store_and_of_the_users_files(tmp_path, monkeypatch, uri):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAY_HOME", "home")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    embedded = f"sqlite:///{tmp_path}/mlruns.db"
    assert trial_environment() == {
        "MLFLOW_TRACKING_URI": uri if uri and "http" in uri else embedded,
        "VITRAY_HOME": f"{tmp_path}/home",
    }


def test_as_many_trials_start_as_fit_the_cluster_now(tmp_path, base, monkeypatch):
    """Nodes come and go between two trials: new ones are used, and no trial starts in the place of a lost one."""
    places = [1]
    searcher = open_sweep(tmp_path, base, GRID, places=lambda: places[0])[2]
    monkeypatch.setattr("vitray.sweeps.tuning.NODES_INTERVAL", 0.0)
    assert searcher.suggest("a")["name"] == "lr=1e-3"
    assert searcher.suggest("b") is None
    places[0] = 3
    assert searcher.suggest("b")["name"] == "lr=0.01"
    assert searcher.suggest("c")["name"] == "lr=0.1"
    places[0] = 1
    searcher.on_trial_complete("a")
    searcher.on_trial_complete("b")
    assert searcher.suggest("d") is None  # one runs, and one fits
    places[0] = 0
    searcher.on_trial_complete("c")
    assert searcher.suggest("d")["name"] == "lr=0.2"  # waits for its nodes: Tune asks in vain only while others run
    searcher.on_trial_complete("d")
    assert searcher.suggest("e") == Searcher.FINISHED


@pytest.mark.parametrize(("scores", "score"), [((), None), ((0.9, 0.5), 0.5), ((0.5, math.nan), None)])
def test_a_trial_counts_with_its_last_score(scores, score):
    """The model that it leaves has those weights."""
    assert TrialRecord(scores=tuple(enumerate(scores, start=1))).score == score


def test_the_trials_follow_the_results_that_tune_receives(tmp_path, base):
    _, store, _ = open_sweep(tmp_path, base, GRID)
    names = list(store.trials)
    for name in names:
        store.start(name)
        store.update(name, {"step": 2, "steps": 4, "goal": 0.25})
        store.update(name, {"step": 2, "steps": 4, "goal": 0.25})  # repeated by a trial whose process had died
    store.update(names[0], {"step": 4, "steps": 4, "goal": 0.5, "state": "finished", "device_seconds": 9.0})
    for name in names[:3]:
        store.end(name, "stopped early")  # called at every end
    store.end(names[3], "failed", "its process failed")
    states = [record.state for record in store.records().values()]
    assert states == ["finished", "stopped early", "stopped early", "failed"]
    assert store.trials[names[0]].record.scores == ((2, 0.25), (4, 0.5))  # the last score comes with the end
    assert store.trials[names[0]].record.steps == 4
    assert store.trials[names[0]].cost("device_seconds") == 9.0
    store.read_ends()
    assert store.trials[names[1]].cost("device_seconds") is None  # its run is still ending
    end_on_disk(store, names[1], "stopped early", seconds=3)
    store.read_ends()
    assert store.trials[names[1]].cost("device_seconds") == 3.0
    assert store.outcome(names[1]).device_seconds == 3.0
    end_on_disk(store, names[2])  # finished between the last look and the end of the sweep
    store.close()
    assert store.trials[names[2]].record.score == 0.5
    assert [record.state for record in store.records().values()] == ["finished", "stopped early", "finished", "waiting"]


def test_a_trial_that_tune_gives_another_name_takes_the_place_of_the_earlier_one(tmp_path, base):
    _, store, searcher = open_sweep(tmp_path, base, GRID)
    trial = SimpleNamespace(trial_id="t", config=searcher.suggest("t"))
    first, second = list(store.trials)[:2]
    listener = TrialListener(store)
    listener.on_trial_start(0, [], trial)
    listener.on_trial_start(1, [], trial)  # its process has died
    assert (store.names, store.trials[first].record.state) == ({"t": first}, "running")
    trial.config = {"name": second}
    listener.on_trial_start(2, [], trial)
    assert (store.names, store.trials[second].entry.replaces) == ({"t": second}, first)
    assert [store.trials[name].record.state for name in (first, second)] == ["stopped early", "running"]
    store.close()
    assert read_entries(store.sweep_dir)[second].replaces == first


def test_a_trial_that_is_killed_while_it_stops_has_an_end(tmp_path, base):
    """At the end of a sweep Tune kills the process of a stopped trial after some seconds."""
    _, store, _ = open_sweep(tmp_path, base, GRID)
    for name in ("lr=0.1", "lr=0.2"):
        store.update(name, {"step": 2, "steps": 4, "goal": 0.25})
        store.end(name, "stopped early")
    end_on_disk(store, "lr=0.1", "failed")  # by itself, in the same seconds
    write_record(store.run_dir("lr=0.2"), TrialRecord("running", ((2, 0.25),)))
    store.close()
    assert [store.trials[name].record.state for name in ("lr=0.1", "lr=0.2")] == ["failed", "stopped early"]
    record = read_record(store.run_dir("lr=0.2"))
    assert (record.state, record.scores) == ("stopped early", ((2, 0.25),))


def test_points_that_could_not_be_written_are_written_again(tmp_path, base, monkeypatch):
    _, store, searcher = open_sweep(tmp_path, base, TPE)
    failed = threading.Event()

    def fail(url, content):
        failed.set()
        raise ConfigError(f"{url}: the storage does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_bytes", fail)
        first = searcher.suggest("a")["name"]
        failed.wait()
        store.retry_points()
        assert read_entries(store.sweep_dir) == {}
    while first not in read_entries(store.sweep_dir):
        store.retry_points()  # as the logger calls it
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_bytes", fail)
        failed.clear()
        second = searcher.suggest("b")["name"]
        failed.wait()
    store.close()
    assert list(read_entries(store.sweep_dir)) == [first, second]


def open_trial(store, base, name="lr=0.1", owner=""):
    """A trial as Tune starts it."""
    context = TrialContext(
        base=base,
        dataset=None,
        sweep_dir=store.sweep_dir,
        owner=owner,
        parent_uid="parent",
        space=Space(space={}, scheduler=Asha()),
        trials=1,
        resources=None,
        has_cpus=True,
        environment={},
    )
    trial = TrialTrainable.__new__(TrialTrainable)  # without Tune's folders and loggers
    trial.setup({"name": name, "optim.lr": 0.1}, context)
    return trial


@pytest.fixture
def free_cluster(monkeypatch):
    """Stand in for Ray, which a trial asks how many of its kind run at a time."""
    monkeypatch.setattr("vitray.sweeps.trial.trials_that_fit", lambda *_: 1)
    monkeypatch.setattr("vitray.sweeps.trial.own_cpus", lambda *_: None)


@pytest.fixture
def training(monkeypatch, free_cluster):
    """Stand in for the training run: it has scores at these steps and ends."""

    def train(run, name, out, *, hook):
        is_stopped = any(hook.should_stop(step, 4, {"val/top1": step / 10}) for step in (2, 4))
        return SimpleNamespace(state="stopped early" if is_stopped else "finished")

    monkeypatch.setattr("vitray.sweeps.trial.train", train)


@pytest.mark.parametrize("scores", [(), ((2, 0.2),), ((2, 0.2), (4, 0.4))])
def test_a_trial_reports_its_last_score_with_its_end(tmp_path, base, training, scores):
    """Also a resumed one: at a last score before the end, Tune would kill it while it saves its model."""
    _, store, _ = open_sweep(tmp_path, base, GRID)
    write_record(store.run_dir("lr=0.1"), TrialRecord("running", scores, steps=4))
    trial = open_trial(store, base)
    results = [trial.step(), trial.step()]
    trial.cleanup()
    assert [(result["step"], result["goal"], result["done"]) for result in results] == [(2, 0.2, False), (4, 0.4, True)]
    assert read_record(store.run_dir("lr=0.1")).state == "finished"
    for result in results:
        store.update("lr=0.1", result)
    assert store.trials["lr=0.1"].record.scores == ((2, 0.2), (4, 0.4))
    assert store.trials["lr=0.1"].record.state == "finished"


def test_a_trial_fails_on_a_node_that_does_not_see_the_sweep(tmp_path, base, training):
    _, store, _ = open_sweep(tmp_path, base, GRID)
    result = open_trial(store, base, owner="of another node").step()
    store.update("lr=0.1", result)
    assert store.trials["lr=0.1"].record.state == "failed"
    assert "is not visible on node" in store.trials["lr=0.1"].record.reason
    assert not (tmp_path / "home" / "lr=0.1").exists()


def test_a_trial_stops_at_the_score_at_which_tune_stops_it(tmp_path, base, training):
    _, store, _ = open_sweep(tmp_path, base, GRID)
    trial = open_trial(store, base)
    assert trial.step()["step"] == 2
    assert trial.reset_config({"name": "lr=0.2", "optim.lr": 0.2}), "the next trial of the process"
    assert trial.step()["step"] == 2
    assert [read_record(store.run_dir(name)).state for name in ("lr=0.1", "lr=0.2")] == ["stopped early", "running"]
    trial.cleanup()


def test_a_trial_of_a_lost_sweep_answers_its_workers_and_records_no_end(tmp_path, base, free_cluster, monkeypatch):
    """An error would end the thread that answers, and the workers would wait for ever."""
    answers = []

    def train(run, name, out, *, hook):
        others.enter_context(own_folder(out, "another sweep"))
        answers.append((hook.should_stop(2, 4, {"val/top1": 0.2}), hook.stop_requested.is_set()))
        return SimpleNamespace(state="stopped early")

    monkeypatch.setattr("vitray.sweeps.trial.train", train)
    _, store, _ = open_sweep(tmp_path, base, GRID)
    trial = open_trial(store, base)
    with ExitStack() as others, pytest.raises(RuntimeError, match="taken over by process"):
        trial.step()
    trial.cleanup()
    assert answers == [(False, True)]
    record = read_record(store.run_dir("lr=0.1"))
    assert (record.state, record.scores) == ("running", ())


def test_a_lost_sweep_replaces_no_points_and_leaves_the_marker_of_an_interruption(tmp_path, base):
    plan, _, _ = open_sweep(tmp_path, base, GRID)
    home = str(tmp_path / "home")
    with own_folder(home, "first") as first:
        store = TrialStore(home, plan.base, plan.points, False, first.id)
        storage.remove(storage.join(home, FOLDER))
        with own_folder(home, "another sweep"):
            store.add("lr=0.5", TrialEntry(SweepPoint({"optim.lr": 0.5}, {}, {}, {})))
            with pytest.raises(OwnershipLost, match="taken over by process"):
                store.finish_points()
            assert "lr=0.5" not in read_entries(home)
            ownership = SimpleNamespace(is_lost=True)
            with contextlib.suppress(OwnershipLost), Interruption(home, ownership) as interruption:
                interruption.signal = signal.SIGTERM
                assert interruption.stop_all()
                raise OwnershipLost("lost")
            assert storage.exists(f"{home}/{INTERRUPTED}")


@pytest.mark.parametrize(("error", "is_printed"), [(RunError("no room"), True), (OwnershipLost("taken over"), False)])
def test_only_a_sweep_that_keeps_its_folder_says_how_to_resume_it(capsys, error, is_printed):
    logger = SweepLogger.__new__(SweepLogger)  # without MLflow
    logger._stopped, logger._thread = threading.Event(), threading.Thread(target=int)
    logger._thread.start()
    logger._console = SimpleNamespace(line=print)
    logger._tracker, logger.command = contextlib.nullcontext(), "vitray sweep"
    logger.__exit__(type(error), error, None)
    assert ("the same command resumes it" in capsys.readouterr().out) is is_printed


def test_the_best_trial_is_a_finished_one_with_a_model_to_register(tmp_path, base, monkeypatch):
    monkeypatch.setattr("vitray.runs.registered_figures.log_registered_figures", lambda *_: None)
    _, store, _ = open_sweep(tmp_path, base, GRID)
    end(store, "lr=1e-3", "stopped early", score=0.9)
    end(store, "lr=0.01", score=0.5)
    end(store, "lr=0.1", score=float("nan"))
    storage.write_bytes(f"{store.run_dir('lr=0.01')}/outcome.json", b'{"model": "home/lr=0.01/model"}')
    logger = SweepLogger.__new__(SweepLogger)  # without MLflow
    logger._stopped, logger._thread, logger._tracker = threading.Event(), MagicMock(), MagicMock(run_id="1")
    logger._console, logger._on_imagenet, logger.store = MagicMock(), False, store
    logger.recipe = SimpleNamespace(run=base.replace({"tracking.register_as": "vit"}), args=["tiny"])
    logger.name, space = "sweep", read_space(tmp_path / "space.yaml")
    dataset = SimpleNamespace(part_identity=lambda *part: f"hash of {part}")
    logger.plan = SimpleNamespace(trials=4, space=space, first=SimpleNamespace(dataset=dataset))
    logger._kill_children = MagicMock()
    logger.report = lambda: [logger._trial_result(name) for name in store.trials]
    outcome = logger.finish()
    assert (outcome.best, outcome.best_goal) == ("lr=0.01", 0.5)
    logger._tracker.model.assert_called_once_with("home/lr=0.01/model", "vit", None, "hash of ('val',)")
    store.close()


def suppressed(error, call):
    with contextlib.suppress(error):
        call()


def test_a_process_whose_trial_does_not_end_takes_no_other(tmp_path, base, free_cluster, monkeypatch):
    """With an error, after which Tune frees the place of the trial or starts it in another process."""
    began, ended = threading.Event(), threading.Event()
    monkeypatch.setattr("vitray.sweeps.trial.train", lambda *_, **__: began.set() or ended.wait())
    monkeypatch.setattr("vitray.sweeps.trial.STOP_SECONDS", 0.1)
    trial = open_trial(open_sweep(tmp_path, base, GRID)[1], base)
    step = threading.Thread(target=suppressed, args=[RuntimeError, trial.step])  # waits for a score
    step.start()
    began.wait()
    with pytest.raises(RuntimeError, match="the previous trial did not stop in time"):
        trial.reset_config({"name": "lr=0.2", "optim.lr": 0.2})
    ended.set()
    step.join()


def test_a_search_ends_when_no_new_point_is_left(tmp_path, base):
    text = "space: {optim.lr: {grid: [1.0e-3, 0.01, 0.1]}}\nsearch: {kind: tpe, trials: 9, first: 2}\n"
    _, store, searcher = open_sweep(tmp_path, base, text)
    assert sorted(suggest_all(searcher)) == ["lr=0.01", "lr=0.1", "lr=1e-3"]
    assert len(store.trials) == 3


@pytest.mark.parametrize(
    ("budget", "ended", "remaining"),
    [
        ("budget: {device_hours: 1.0}\n", [("finished", 1800)], 3),
        ("budget: {device_hours: 1.0}\n", [("finished", 1800), ("stopped early", 1800)], 0),
        ("budget: {minutes: 1.0e-9}\n", [], 0),
        ("budget: {trials: 2}\n", [], 2),
        ("failures: 0.25\n", [("failed", None)], 3),
        ("failures: 0.25\n", [("failed", None), ("failed", None)], 0),
    ],
)
def test_no_trial_starts_after_the_budget_is_spent(tmp_path, base, budget, ended, remaining):
    _, store, _ = open_sweep(tmp_path, base, GRID + budget)
    for name, (state, seconds) in zip(store.trials, ended, strict=False):
        end(store, name, state, seconds=seconds)
    assert len(suggest_all(open_sweep(tmp_path, base, GRID + budget)[2])) == remaining


def test_a_trial_gets_its_settings_and_its_point_is_written(tmp_path, base):
    _, store, searcher = open_sweep(tmp_path, base, TPE)
    config = searcher.suggest("")
    name = config["name"]
    assert config == {"name": name, "optim.lr": store.trials[name].entry.point.settings["optim.lr"]}
    assert json.loads(json.dumps(config)) == config
    assert store.run(name).optim.lr == config["optim.lr"]
    store.add("more", TrialEntry(SweepPoint({"optim.lr": 0.5}, {}, {"optim.lr": 0.5}, {})))
    store.close()
    assert list(read_entries(store.sweep_dir)) == [name, "more"]
    assert read_entries(store.sweep_dir)[name].point == store.trials[name].entry.point


def test_the_sizes_of_a_fine_tuning_come_from_its_weights(tmp_path, base):
    name, point = "a", SweepPoint({}, {}, {}, {})
    task = {"kind": "finetune", "weights": "elsewhere"}
    store = TrialStore(str(tmp_path), base.replace({"task": task}), {name: point}, False)
    assert store.sizes(name) is store.trials[name].cost("params") is None
    started = base.replace({"task": task, "model.name": "vit_u3x2_8"})  # settings of a started fine-tuning
    storage.write_bytes(f"{store.run_dir(name)}/{SETTINGS}", started.to_yaml().encode())
    storage.write_bytes(f"{store.run_dir(name)}/{RUN_META}", b"{}")
    assert store.sizes(name) == sizes_of(started.model)
    end(store, name)
    ended = TrialStore(str(tmp_path), store.base, {name: point}, False)
    assert ended.trials[name].cost("params") == sizes_of(started.model).params
    assert TrialStore(str(tmp_path / "plain"), base, {name: point}, False).sizes(name) == sizes_of(base.model)


# ---- console ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


RECORDS = {
    "18x2": TrialRecord("finished", ((10, 0.5), (20, 0.75))),
    "9x4": TrialRecord("running", ((10, 0.25),)),
    "36x1": TrialRecord("waiting"),
}


def test_a_terminal_gets_a_table_that_is_rewritten():
    stream = Terminal()
    console = SweepConsole(3, Goal(), RECORDS, stream)
    console.show(RECORDS)
    first = stream.getvalue()
    for row in (
        "9x4            0.25         10  running",
        "18x2           0.75         20  finished, best so far",
        "1/3 over",
    ):
        assert row in first
    console.show(RECORDS)
    assert stream.getvalue() == first  # no change within the interval
    console.show(RECORDS | {"9x4": TrialRecord("failed", (), "NaN")})
    assert "\x1b[4F\x1b[J" in stream.getvalue()
    assert "2/3 over (1 failed)" in stream.getvalue()
    console.line("done")
    assert stream.getvalue().endswith("\x1b[3F\x1b[J\r\x1b[Kdone\n")


def test_the_remaining_time_counts_down_between_ends_of_trials(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("vitray.sweeps.sweep_logger.time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    console = SweepConsole(3, Goal(), {}, stream)
    for now[0], end in ((100.0, "0:03:20 left\n"), (150.0, "0:02:30 left\n"), (1000.0, "0:00:00 left\n")):
        console.show({"a": TrialRecord("finished")})
        assert stream.getvalue().endswith(end)


def test_a_file_gets_a_line():
    stream = io.StringIO()
    SweepConsole(3, Goal(), RECORDS, stream).show(RECORDS)
    assert stream.getvalue() == "  1/3 over; running 9x4; best 18x2 0.75; - left\n"


def test_a_sweep_says_what_it_waits_for():
    stream = io.StringIO()
    SweepConsole(3, Goal(), RECORDS, stream).show(RECORDS | {"9x4": TrialRecord("waiting")})
    assert "1/3 over, none running: a trial starts when its CPUs or GPUs are free; " in stream.getvalue()


# ---- schedulers ------------------------------------------------------------------------------------------------------


def test_every_kind_of_scheduler_and_of_search_has_its_rows():
    assert set(BUILDERS) == set(get_args(Scheduler))
    assert set(SAMPLERS) == {kind for kind in get_args(Search) if kind.traits.learns}
    assert {type(kind.traits) for kind in get_args(Scheduler)} == {SchedulerTraits}
    assert {type(kind.traits) for kind in get_args(Search)} == {SearchTraits}


def test_a_planted_kind_without_a_row_is_refused(tmp_path, base):
    """It never runs as another kind."""
    plan, store, _ = open_sweep(tmp_path, base, GRID)
    space = read_space(tmp_path / "space.yaml")
    scheduler = SimpleNamespace(kind="hyperband", traits=SchedulerTraits(decides=True))
    with pytest.raises(AssertionError, match=r"scheduler hyperband has no builder in vitray.sweeps.schedulers"):
        build_scheduler(plan.first.length, space.model_copy(update={"scheduler": scheduler}), store)
    search = SimpleNamespace(kind="sobol", traits=SearchTraits(learns=True), seed=0)
    with pytest.raises(AssertionError, match=r"search sobol has no sampler in vitray.sweeps.sampler"):
        ask(space.model_copy(update={"search": search}), [], 0)
    with pytest.raises(AssertionError, match="sobol"):
        check_space(space.model_copy(update={"search": search}), base)


def test_the_median_rule_stops_but_never_pauses(tmp_path, base):
    """Tune's own rule pauses a trial while others wait; a training run cannot pause."""
    text = f"{GRID}scheduler: {{kind: median, grace: 2 steps}}\n"
    plan, store, _ = open_sweep(tmp_path, base, text)
    scheduler = build_scheduler(plan.first.length, read_space(tmp_path / "space.yaml"), store)
    scheduler.set_search_properties("goal", "max")
    tune = SimpleNamespace(get_live_trials=lambda: [SimpleNamespace(status="PENDING")])

    def decision(trial, step, goal):
        return scheduler.on_trial_result(tune, trial, {"share": progress(step, plan.first.length.total), "goal": goal})

    trials = [Trial("stub", stub=True) for _ in range(5)]
    for trial, goal in zip(trials, (0.2, 0.4, 0.6), strict=False):
        assert [decision(trial, step, goal) for step in (1, 2, 4)] == [TrialScheduler.CONTINUE] * 3
        scheduler.on_trial_complete(tune, trial, {"share": progress(4, plan.first.length.total), "goal": goal})
    assert decision(trials[3], 1, 0.3) == TrialScheduler.CONTINUE  # in its grace period
    assert decision(trials[3], 2, 0.3) == TrialScheduler.STOP
    assert decision(trials[4], 2, 0.5) == TrialScheduler.CONTINUE


def test_asha_compares_trials_of_different_lengths_at_the_same_share_of_their_steps(tmp_path, base):
    """With batches of half the size, a trial takes twice the steps: no rung may end it halfway."""
    plan, store, _ = open_sweep(tmp_path, base, f"{GRID}scheduler: {{kind: asha, grace: 2 steps, reduction: 2}}\n")
    steps = plan.first.length.total
    for length in (steps, 2 * steps, 3 * steps + 1):
        scheduler = build_scheduler(plan.first.length, read_space(tmp_path / "space.yaml"), store)
        scheduler.set_search_properties("goal", "max")
        trials = [Trial("stub", stub=True) for _ in range(2)]
        stopped = []
        for trial, goal in zip(trials, (0.6, 0.3), strict=True):
            scheduler.on_trial_add(None, trial)
            for step in range(1, length + 1):
                result = {"share": progress(step, length), "goal": goal}
                if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                    stopped.append(step)
                    break
        assert stopped[0] == length  # the first trial is never stopped, for any length
        assert stopped[1] == -(-2 * length // steps)  # the worse one stops at the first rung, after the grace period
    assert progress(5, None) == 0  # a run of unknown length is before every rung and never stopped
