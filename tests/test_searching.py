"""A sweep on its driver: the ledger of trials, which is next, when no other begins, and what the screen shows."""

import io
import json
from types import SimpleNamespace

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from vitray import storage
from vitray.config import load_run
from vitray.config.sweep import Goal
from vitray.data.shards import read_job, write_dataset
from vitray.errors import ConfigError
from vitray.models.sizes import sizes_of
from vitray.runs.driver import HOME, RUN
from vitray.sweep.capacity import Node
from vitray.sweep.console import Screen
from vitray.sweep.driver import plan_sweep
from vitray.sweep.schedulers import scheduler_of
from vitray.sweep.searcher import Handing
from vitray.sweep.space import Point, extended, read_space
from vitray.sweep.trial_record import Record, write_record
from vitray.sweep.trial_store import Entry, Ledger, read_entries

GRID = "space: {optim.lr: {grid: [1.0e-3, 0.01, 0.1, 0.2]}}\n"
TPE = "space: {optim.lr: {loguniform: [1.0e-4, 0.1]}}\nsearch: {kind: tpe, trials: 5, first: 2}\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searching")
    write_dataset(read_job("demo", str(folder / "demo"), words=["images=40", "image_size=32"]))
    words = ["model.name=vit_u2x1_8", "model.image_size=32", "model.num_classes=10", "optim.batch=8"]
    words += ["optim.duration=4 steps", "optim.warmup=0 steps", f"data.url={folder / 'demo'}", "compute.workers=1"]
    return load_run(None, words)


def opened(folder, base, text, *words):
    """Plan, ledger and hand of a sweep in a folder, as another start finds them."""
    (folder / "space.yaml").write_text(text)
    space = extended(read_space(folder / "space.yaml"), words)
    planned = plan_sweep(base, space, [Node(cpus=4)])
    ledger = Ledger(str(folder / "home"), planned.base, planned.points, space.learns)
    return planned, ledger, Handing(planned, ledger, space, space.scheduler.kind != "none")


def handed(hand):
    """The names of all trials that it hands out."""
    names = []
    while (said := hand.suggest("")) != Searcher.FINISHED:
        names.append(said["name"])
    return names


def end(ledger, name, state="finished", score=0.5, seconds=None):
    if seconds is not None:
        outcome = {"device_seconds": seconds}
        place = ledger.place(name)
        write_record(place, Record(state, ((4, score),)))
        with open(f"{place}/outcome.json", "w") as file:
            json.dump(outcome, file)
    write_record(ledger.place(name), Record(state, ((4, score),) if state != "failed" else (), "broke"))


def test_a_grid_is_handed_out_once_and_again_without_what_is_over(tmp_path, base):
    _, ledger, hand = opened(tmp_path, base, GRID)
    assert handed(hand) == ["lr=1e-3", "lr=0.01", "lr=0.1", "lr=0.2"]
    end(ledger, "lr=0.01")
    end(ledger, "lr=0.2", "failed")
    assert handed(opened(tmp_path, base, GRID)[2]) == ["lr=1e-3", "lr=0.1"]


def test_a_scheduler_hears_first_of_what_is_over(tmp_path, base):
    _, ledger, _ = opened(tmp_path, base, GRID)
    end(ledger, "lr=0.1")
    hand = opened(tmp_path, base, f"{GRID}scheduler: {{kind: asha, grace: 1 step}}\n")[2]
    names = handed(hand)
    assert names[0] == "lr=0.1"
    assert sorted(names) == sorted(ledger.entries)


def test_under_a_scheduler_values_come_in_no_order_but_always_the_same(tmp_path, base):
    many = "space: {optim.lr: {grid: [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3, 5.0e-3, 6.0e-3]}}\nscheduler: {kind: asha}\n"
    names = handed(opened(tmp_path, base, many)[2])
    assert names not in (sorted(names), sorted(names, reverse=True))
    assert names == handed(opened(tmp_path, base, many)[2])


def test_one_more_value_is_one_more_trial(tmp_path, base):
    _, ledger, _ = opened(tmp_path, base, GRID)
    for name in ledger.entries:
        end(ledger, name)
    planned, _, hand = opened(tmp_path, base, GRID, "optim.lr=0.5")
    assert handed(hand) == ["lr=0.5"]
    assert planned.trials == 5


def test_a_name_that_now_means_something_else_is_refused(tmp_path, base):
    two = "space:\n  rate: {grid: [1, 2]}\n  optim.lr: '{rate}.0e-3'\n"
    _, ledger, _ = opened(tmp_path, base, two)
    assert list(ledger.entries) == ["rate=1", "rate=2"]
    end(ledger, "rate=1")
    with pytest.raises(ConfigError, match=r"gives trial rate=1 .*0.01.*, it was begun with .*0.001"):
        opened(tmp_path, base, two.replace("e-3", "e-2"))


def test_a_search_that_learns_goes_on_as_if_nothing_had_been(tmp_path, base):
    """Each trial over before the next: interrupted after any number of them, the same points are drawn."""
    (tmp_path / "one").mkdir()
    _, ledger, hand = opened(tmp_path / "one", base, TPE)
    names = []
    while (said := hand.suggest("")) != Searcher.FINISHED:
        names.append(said["name"])
        end(ledger, names[-1], score=len(names))
    assert len(set(names)) == 5
    for cut in (1, 3):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        _, first, hand = opened(folder, base, TPE)
        for number in range(cut):
            end(first, hand.suggest("")["name"], score=number + 1)
        hand.suggest("")  # begun, and lost with the driver
        _, second, hand = opened(folder, base, TPE)
        again = []
        while (said := hand.suggest("")) != Searcher.FINISHED:
            again.append(said["name"])
            end(second, again[-1], score=cut + len(again))
        assert names == [*names[:cut], *again]
    assert list(read_entries(ledger.home)) == names
    assert read_entries(ledger.home)[names[0]].asked is not None


def test_a_search_ends_where_there_is_no_other_point(tmp_path, base):
    few = "space: {optim.lr: {grid: [1.0e-3, 0.01, 0.1]}}\nsearch: {kind: tpe, trials: 9, first: 2}\n"
    _, ledger, hand = opened(tmp_path, base, few)
    assert sorted(handed(hand)) == ["lr=0.01", "lr=0.1", "lr=1e-3"]
    assert len(ledger.entries) == 3


@pytest.mark.parametrize(
    ("budget", "over", "left"),
    [
        ("budget: {device_hours: 1.0}\n", [("finished", 1800)], 3),
        ("budget: {device_hours: 1.0}\n", [("finished", 1800), ("stopped early", 1800)], 0),
        ("budget: {minutes: 1.0e-9}\n", [], 0),
        ("budget: {trials: 2}\n", [], 2),
        ("failures: 0.25\n", [("failed", None)], 3),
        ("failures: 0.25\n", [("failed", None), ("failed", None)], 0),
    ],
)
def test_no_trial_begins_once_the_budget_is_spent(tmp_path, base, budget, over, left):
    _, ledger, _ = opened(tmp_path, base, GRID + budget)
    for name, (state, seconds) in zip(ledger.entries, over, strict=False):
        end(ledger, name, state, seconds=seconds)
    assert len(handed(opened(tmp_path, base, GRID + budget)[2])) == left


def test_points_lie_on_disk_before_a_trial_begins(tmp_path, base):
    _, ledger, hand = opened(tmp_path, base, TPE)
    name = hand.suggest("")["name"]
    assert read_entries(ledger.home)[name].point == ledger.entries[name].point
    assert ledger.run(name).optim.lr == ledger.entries[name].point.settings["optim.lr"]
    ledger.add("more", Entry(Point({"optim.lr": 0.5}, {}, {"optim.lr": 0.5}, {})))
    assert list(read_entries(ledger.home)) == [name, "more"]


def test_a_fine_tuning_counts_the_network_of_its_weights_once_that_is_known(tmp_path, base):
    name, point = "a", Point({}, {}, {}, {})
    words = {"kind": "finetune", "weights": "elsewhere"}
    ledger = Ledger(str(tmp_path), base.replace({"task": words}), {name: point}, False)
    assert ledger.sizes(name) is ledger.cost(name, "params") is None
    begun = base.replace({"task": words, "model.name": "vit_u3x2_8"})  # as training settles it
    storage.write_bytes(f"{ledger.place(name)}/{RUN}", begun.to_yaml().encode())
    storage.write_bytes(f"{ledger.place(name)}/{HOME}", b"{}")
    assert ledger.cost(name, "params") == sizes_of(begun.model).params
    assert Ledger(str(tmp_path / "plain"), base, {name: point}, False).sizes(name) == sizes_of(base.model)


# ---- the screen ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self):
        return True


RECORDS = {
    "18x2": Record("finished", ((10, 0.5), (20, 0.75))),
    "9x4": Record("running", ((10, 0.25),)),
    "36x1": Record("waiting"),
}


def test_a_terminal_shows_a_table_and_rewrites_it():
    stream = Terminal()
    screen = Screen(3, Goal(), RECORDS, stream)
    screen.show(RECORDS)
    first = stream.getvalue()
    for said in (
        "9x4            0.25         10  running",
        "18x2           0.75         20  finished, best so far",
        "1/3 over",
    ):
        assert said in first
    screen.show(RECORDS)
    assert stream.getvalue() == first  # nothing moved, and it was shown just now
    screen.show(RECORDS | {"9x4": Record("failed", (), "NaN")})
    assert "\x1b[4F\x1b[J" in stream.getvalue()
    assert "2/3 over (1 failed)" in stream.getvalue()
    screen.line("done")
    assert stream.getvalue().endswith("\x1b[3F\x1b[Jdone\n")


def test_time_left_counts_down_until_the_next_trial_ends(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("vitray.sweep.console.time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    screen = Screen(3, Goal(), {}, stream)
    for now[0], end in ((100.0, "0:03:20 left\n"), (150.0, "0:02:30 left\n"), (1000.0, "0:00:00 left\n")):
        screen.show({"a": Record("finished")})
        assert stream.getvalue().endswith(end)


def test_elsewhere_a_line_says_it():
    stream = io.StringIO()
    Screen(3, Goal(), RECORDS, stream).show(RECORDS)
    assert stream.getvalue() == "  1/3 over; running 9x4; best 18x2 0.75; - left\n"


def test_below_the_median_of_three_others_a_trial_ends_and_none_is_paused_before(tmp_path, base):
    """Tune's own rule pauses while another trial waits for its turn, which a training run cannot be."""
    text = f"{GRID}scheduler: {{kind: median, grace: 2 steps}}\n"
    planned, _, _ = opened(tmp_path, base, text)
    scheduler = scheduler_of(planned.plan, read_space(tmp_path / "space.yaml"))
    scheduler.set_search_properties("goal", "max")
    tune = SimpleNamespace(get_live_trials=lambda: [SimpleNamespace(status="PENDING")])

    def says(trial, step, goal):
        return scheduler.on_trial_result(tune, trial, {"step": step, "goal": goal})

    trials = [Trial("stands for one", stub=True) for _ in range(5)]
    for trial, goal in zip(trials, (0.2, 0.4, 0.6), strict=False):
        assert [says(trial, step, goal) for step in (1, 2, 4)] == [TrialScheduler.CONTINUE] * 3
        scheduler.on_trial_complete(tune, trial, {"step": 4, "goal": goal})
    assert says(trials[3], 1, 0.3) == TrialScheduler.CONTINUE  # within its grace
    assert says(trials[3], 2, 0.3) == TrialScheduler.STOP
    assert says(trials[4], 2, 0.5) == TrialScheduler.CONTINUE
