"""The training benchmark: a turn is a turn, what is paused does nothing, and both modes measure what they name."""

import json
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.__main__ import main
from vitray.bench import runs
from vitray.bench.runs import Point, Racer, Turn, speeds


@given(
    rates=st.lists(st.floats(0.5, 20), min_size=2, max_size=6),
    lengths=st.lists(st.floats(5, 15), min_size=6, max_size=6),
    gaps=st.lists(st.floats(0.1, 30), min_size=6, max_size=6),
)
def test_the_speed_of_a_turn_is_that_of_its_steps(rates, lengths, gaps):
    now, done, turns, points = 100.0, 0.0, [], []
    for rate, length, gap in zip(rates, lengths, gaps, strict=False):
        turns.append(Turn(now, now + length))
        # A point at each end of a turn and within it, with as many steps as are done by then.
        points += [Point(now + share * length, done + share * rate * length) for share in (0.001, 0.3, 0.9, 0.999)]
        now, done = now + length + gap, done + rate * length
    assert speeds(points, turns) == pytest.approx(rates, rel=0.05)


def test_between_two_turns_nothing_is_done(tmp_path):
    (tmp_path / "counting.py").write_text(
        "import subprocess, sys, time\n"
        "sys.argv[2:] and subprocess.Popen([sys.executable, __file__, sys.argv[1]])\n"
        "while True:\n    open(sys.argv[1], 'a').write('x')\n    time.sleep(0.01)\n"
    )
    counted = tmp_path / "counted"

    def points():
        return [Point(0, 0)] * len(counted.read_text()) if counted.exists() else []

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setenv("PYTHONPATH", str(tmp_path))
        racer = Racer(["counting", str(counted), "and a child"], {}, tmp_path / "told", points)
    child = None
    try:
        racer.start()
        until = time.monotonic() + 60
        while len(tree := runs._tree(racer.process.pid)) < 2 and time.monotonic() < until:
            racer.work(0.5)
        _, child = tree
        while any(each.status() != psutil.STATUS_STOPPED for each in tree):  # a signal takes effect a little later
            time.sleep(0.01)
        before = len(points())
        time.sleep(0.2)
        assert len(points()) == before
        racer.work(0.5)
        assert len(points()) > before
    finally:
        racer.end()
        if child:
            child.kill()


def test_what_ends_before_its_first_step_is_said(tmp_path):
    racer = Racer(["this"], {}, tmp_path / "told", list)
    with pytest.raises(runs.RunError, match="no step"):
        racer.start()


def test_a_step_is_measured(tmp_path, capsys):
    words = ["--models", "vit_u2x1_8", "--image-size", "32", "--batch", "2", "--rounds", "2", "--seconds", "0.05"]
    assert main(["bench", "train", *words, "--out", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row[what] > 0 for what in ("vitray", "bare", "ratio"))
    assert (tmp_path / "train_step_cpu_fp32.csv").read_text().startswith("model,vitray,bare,ratio,mfu\nvit_u2x1_8,")


def test_a_cluster_that_runs_already_cannot_be_paused(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["bench", "train", "--dataset", "absent"]) == 2
    assert "RAY_ADDRESS: wanted it unset" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.slow
def test_whole_runs_are_measured_in_turns(tmp_path):
    def vitray(*words):
        return subprocess.run([sys.executable, "-m", "pipelines", *words], capture_output=True, text=True, check=True)

    vitray("shard", "demo", str(tmp_path / "demo"), "images=200", "image_size=32")
    words = ["--models", "vit_u2x1_8", "--image-size", "32", "--batch", "8", "--rounds", "2", "--seconds", "2"]
    measured = vitray("bench", "train", "--dataset", str(tmp_path / "demo"), *words, "--out", str(tmp_path), "--json")
    (row,) = json.loads(measured.stdout.splitlines()[-1])["rows"]
    assert row["vitray"] > 0
    assert row["loader"] > 0
    assert 0 < row["start_ray"] < row["start_workers"] < row["start_first_step"]
    assert (tmp_path / "train_runs.csv").exists()
