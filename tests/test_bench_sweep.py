"""The sweep benchmark: no process is left out of its count, and what it measures is what was asked for."""

import json
import os
import sys
import textwrap
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pipelines.__main__ import main
from vitray.bench.accounting import run_counted
from vitray.bench.calls import Span
from vitray.bench.sweep import beyond_steps
from vitray.config import RunError
from vitray.search.record import Record, read_record, write_record

# Works for some CPU time by its own clock, and may first start another that does.
BURN = """
import os, signal, subprocess, sys, time
seconds, then = float(sys.argv[1]), sys.argv[2:]
def burn():
    while time.process_time() < seconds:
        pass
"""
NEAR = 0.4  # CPU seconds: looks, ticks and interpreters


@pytest.fixture(scope="module")
def burner(tmp_path_factory):
    """Writes a program that burns, and then does as it is told; the words that run it."""
    folder = tmp_path_factory.mktemp("burn")

    def written(name, code):
        (folder / f"{name}.py").write_text(BURN + textwrap.dedent(code))
        return [sys.executable, str(folder / f"{name}.py")]

    return written


def count(words):
    return run_counted(words, os.environ)[1]


def test_a_child_and_its_child_are_counted(burner):
    words = burner("child", "burn()\nif then: subprocess.run([sys.executable, __file__, *then], check=True)")
    cost = count([*words, "1.0", "0.9", "0.8"])
    assert cost.cpu == pytest.approx(2.7, abs=NEAR)
    assert cost.seen == 0
    assert cost.wall > 2.6


def test_what_outlives_its_parent_is_counted_and_waited_for(burner):
    # The middle one ends at once, and its child goes on in a session of its own, as Ray's daemons do.
    words = burner(
        "orphan",
        """
        if then:
            middle = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
            subprocess.run([sys.executable, "-c", middle, sys.executable, __file__, *then], check=True)
        burn()
        """,
    )
    began = time.monotonic()
    cost = count([*words, "0.2", "1.0"])
    assert cost.cpu == pytest.approx(1.2, abs=NEAR)
    assert cost.seen == 0
    assert time.monotonic() - began > cost.wall


def test_what_nobody_waits_for_is_counted(burner):
    # As Ray's raylet does, the parent ignores the end of its children, and the kernel forgets them.
    words = burner(
        "ignored",
        """
        if then:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, __file__, *then])
            while os.path.exists(f"/proc/{child.pid}"):
                time.sleep(0.05)
        burn()
        """,
    )
    cost = count([*words, "0.3", "1.2"])
    assert cost.cpu == pytest.approx(1.5, abs=NEAR)
    assert cost.seen == pytest.approx(1.2, abs=NEAR)


def test_what_has_lost_an_ignoring_parent_is_counted_once(burner):
    words = burner(
        "lost",
        """
        if then:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            subprocess.Popen([sys.executable, __file__, *then])
            time.sleep(0.5)
        burn()
        """,
    )
    cost = count([*words, "0.1", "1.2"])
    assert cost.cpu == pytest.approx(1.3, abs=NEAR)
    assert cost.seen == 0


def test_what_a_command_prints_is_given_back(burner):
    output, cost = run_counted([sys.executable, "-c", "print('a'); print('{}')"], os.environ | {"LANG": "C"})
    assert output == "a\n{}\n"
    assert 0 < cost.cpu < 1


def test_a_command_that_fails_says_its_last_word():
    with pytest.raises(RunError, match="ended with status 3: vitray: no such thing"):
        count([sys.executable, "-c", "import sys; print('vitray: no such thing', file=sys.stderr); sys.exit(3)"])


def test_what_passes_between_two_runs_belongs_to_the_second():
    one_by_one = [Span(0, 10, 6), Span(12, 20, 7), Span(21, 33, 10)]
    assert beyond_steps(one_by_one) == [4, 3, 3]
    # Two places: the third begins where the second was, which has ended first.
    side_by_side = [Span(0, 10, 6), Span(1, 9, 7), Span(10.5, 20, 7), Span(9.5, 19, 7)]
    assert beyond_steps(side_by_side) == [4, 1, 3, 3]


def test_a_record_keeps_its_times_and_older_ones_have_none(tmp_path):
    record = Record("finished", ((6, 0.5),), began=1.5, ended=9.25)
    write_record(str(tmp_path), record)
    assert read_record(str(tmp_path)) == record
    (tmp_path / "trial.json").write_text('{"state": "finished", "scores": [[6, 0.5]], "reason": null}')
    assert read_record(str(tmp_path)) == Record("finished", ((6, 0.5),))


# ---- the benchmark ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory, ray_cluster):
    folder = str(tmp_path_factory.mktemp("bench") / "demo")
    assert main(["shard", "demo", folder, "images=100", "image_size=32"]) == 0
    return folder


@pytest.mark.ray
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", "1"], "--trials 1: wanted 2 or more"),
        (["--model", "vit_q2"], "model name 'vit_q2'"),
        (["--steps", "0"], "optim.duration: got '0 steps'"),
        (["--batch", "0"], "optim.batch: got 0"),
        (["--image-size", "33"], "image_size 33 is not a multiple"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, demo, capsys):
    assert main(["bench", "sweep", demo, *words]) == 2
    assert message in capsys.readouterr().err


def test_words_are_refused_before_the_data_is_read(capsys):
    for words in (["--cache", "all"], ["--rounds", "0"], ["--trials", "some"]):
        with pytest.raises(SystemExit) as leaving:
            main(["bench", "sweep", "absent", *words])
        assert leaving.value.code == 2
        assert words[0] in capsys.readouterr().err
    assert main(["bench", "sweep", "absent"]) == 2
    assert "absent" in capsys.readouterr().err


def test_a_cluster_that_runs_already_cannot_be_counted(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["bench", "sweep", "absent"]) == 2
    assert "RAY_ADDRESS: wanted it unset" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_measures_and_draws(demo, tmp_path, capsys, monkeypatch):
    words = ["--model", "vit_u2x1_8", "--trials", "2", "--steps", "4", "--batch", "8", "--rounds", "1"]
    with TemporaryDirectory(prefix="v") as rays:  # short: the paths of Ray's sockets are limited
        monkeypatch.setenv("RAY_TMPDIR", rays)
        assert main(["bench", "sweep", demo, *words, "--out", str(tmp_path), "--json"]) == 0
        # The sweep starts one Ray, each of the two runs its own, and the two calls share one: that is what is compared.
        assert len([*Path(rays).glob("ray/session_[0-9]*")]) == 4
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert all(Path(file).stat().st_size for file in result["files"])
    rows = {row["variant"]: row for row in result["rows"]}
    assert list(rows) == ["one sweep", "vitray train, each", "calls on one Ray"]
    assert all(f"\n{variant} " in out for variant in rows)
    sweep, separate, called = rows.values()
    assert result["cpu_ratio"] == pytest.approx(sweep["cpu"] / separate["cpu"], rel=0.01)
    assert result["overhead"] == pytest.approx(sweep["beyond"] - called["beyond"], abs=0.01)
    for row in rows.values():
        assert 0 < row["seen"] < row["cpu"] < 2 * os.cpu_count() * row["wall"]
        assert 0 < row["beyond"] < row["wall"]
    assert (separate["around"], sweep["around"] > 0, called["around"] > 0) == (0, True, True)
