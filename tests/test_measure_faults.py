"""What a fault costs: the counting from the workers' records, a run's processes, and the page."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from test_layers import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "faults"))
from fault_page import FAULT_TEXTS, LOOP_FAULTS, PAGE, faults_page, person_text, read_cells, tracking_text
from fault_subjects import LOOPS, SUBJECTS, Place, Settings, environment, shown
from measure_faults import (
    FAULTS,
    StepRecord,
    Tree,
    cost_of,
    history_of,
    longest_pause,
    measured_cost,
    parse_records,
    starts_of,
    step_summary,
)

BATCH, STEPS = 4, 12


def run_of(
    *starts: tuple[int, int, int], workers: int = 2, images=lambda step: range(step * BATCH, (step + 1) * BATCH)
):
    """Return the records of starts (process, first step, end); a worker takes every n-th image of a step."""
    records, time = [], 0.0
    for process, first, end in starts:
        for step in range(first, end):
            time += 1
            for rank in range(workers):
                own = tuple(images(step))[rank::workers]
                records.append(StepRecord(time + rank / 10, 10 * process + rank, rank, step, own))
    return records


WHOLE = history_of(run_of((1, 0, STEPS)))


def test_a_line_of_a_record_is_parsed():
    assert parse_records(["2.5 11 1 3 7 8\n", "1.5 10 0 3 5 6"]) == [(1.5, 10, 0, 3, (5, 6)), (2.5, 11, 1, 3, (7, 8))]


def test_an_undisturbed_run_costs_nothing():
    assert WHOLE.lost == 0
    assert WHOLE.starts == (0,)
    assert cost_of(WHOLE, WHOLE) == (STEPS, 0, 0, 0, 0)


def test_steps_after_the_checkpoint_are_lost_but_not_repeated():
    run = history_of(run_of((1, 0, 7), (2, 4, STEPS)))
    assert run.starts == (0, 4)
    assert cost_of(run, WHOLE) == (STEPS, 3, 0, 0, 0)


def test_a_start_from_nothing_loses_every_step():
    assert cost_of(history_of(run_of((1, 0, 7), (2, 0, STEPS))), WHOLE) == (STEPS, 7, 0, 0, 0)


def test_a_step_that_only_one_worker_recorded_is_lost_once():
    records = [record for record in run_of((1, 0, 7)) if (record.step, record.rank) != (6, 1)]
    later = [record._replace(time=record.time + 100) for record in run_of((2, 4, STEPS))]
    assert cost_of(history_of(records + later), WHOLE) == (STEPS, 3, 0, 0, 0)


def test_a_loader_that_begins_again_repeats_images_and_skips_others():
    """At step 4 of the epoch the weights go on, and the loader begins at the first image."""
    again = [
        record._replace(time=record.time + 100)
        for record in run_of((2, 4, STEPS), images=lambda step: range((step - 4) * BATCH, (step - 3) * BATCH))
    ]
    cost = cost_of(history_of(run_of((1, 0, 4)) + again), WHOLE)
    assert cost == (STEPS, 0, 4 * BATCH, 4 * BATCH, STEPS - 4)


def test_a_resume_at_the_next_epoch_skips_the_rest_of_this_one():
    assert cost_of(history_of(run_of((1, 0, 4))), WHOLE) == (4, 0, 0, (STEPS - 4) * BATCH, STEPS - 4)


def test_another_number_of_workers_on_the_same_images_costs_nothing():
    one = [record._replace(time=record.time + 100) for record in run_of((2, 4, 8), workers=1)]
    two = [record._replace(time=record.time + 200) for record in run_of((3, 8, STEPS))]
    run = history_of(run_of((1, 0, 6)) + one + two)
    assert run.starts == (0, 4, 8)
    assert cost_of(run, WHOLE) == (STEPS, 2, 0, 0, 0)
    assert len(starts_of(run_of((1, 0, 6)) + one + two)) == 3


@given(st.lists(st.tuples(st.integers(1, STEPS - 1), st.floats(0, 1)), max_size=4))
def test_a_history_is_whole_after_any_kills(kills):
    """Reference: the final weights depend on each step once, and lost steps are those taken less those kept."""
    starts, first = [], 0
    for number, (taken, share) in enumerate(kills):
        end = min(first + taken, STEPS - 1)
        if end > first:
            starts.append((number, first, end))
            first = int(share * end)
    starts.append((len(kills), first, STEPS))
    history = history_of(run_of(*starts))
    assert sum(history.images.values(), Counter()) == Counter(range(STEPS * BATCH))
    assert history.lost == sum(end - first for _, first, end in starts) - STEPS
    assert cost_of(history, WHOLE)._replace(lost=0) == (STEPS, 0, 0, 0, 0)


def test_the_pause_is_the_longest_gap_after_the_fault():
    times = [1.0, 2.0, 9.0, 10.0, 15.0, 16.0]
    records = [StepRecord(time, 1, 0, step, ()) for step, time in enumerate(times)]
    assert longest_pause(records, 0.0) == 7.0
    assert longest_pause(records, 10.5) == 5.0
    assert longest_pause(records, 16.5) is None


def place_of(folder: Path) -> Place:
    return Place(folder / "data", folder, Path("/env/bin/python"))


def test_the_cost_of_a_run_is_read_from_its_files(tmp_path):
    runs = {"before": run_of((1, 0, STEPS)), "after": run_of((1, 0, 7), (2, 4, STEPS))}
    weights = {"a": np.array([1.0, 2.0], np.float32)}
    for name, records in runs.items():
        (tmp_path / name).mkdir()
        lines = [" ".join(map(str, [*record[:4], *record.images])) for record in records]
        (tmp_path / name / "record.txt").write_text("\n".join(lines))
        save_file(weights, tmp_path / name / "final.safetensors")
    places = place_of(tmp_path / "after"), place_of(tmp_path / "before")
    cost = measured_cost(*places, since=7.0)
    assert (cost["lost"], cost["repeated"], cost["weights_difference"]) == (3, 0, 0.0)
    assert cost["pause"] == pytest.approx(0.9)
    save_file({"a": weights["a"] + np.float32(0.5)}, tmp_path / "after" / "final.safetensors")
    assert measured_cost(*places, since=None)["weights_difference"] == 0.5


def test_the_steps_of_a_metric_are_summed_up():
    assert step_summary([1, 2, 2, 5]) == {"first": 1, "last": 5, "twice": 1, "missing": 2}
    assert step_summary([])["first"] is None


@pytest.mark.slow
def test_a_tree_is_seen_after_its_root_has_died(tmp_path):
    child = f"import subprocess, sys, time; subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    tree = Tree([sys.executable, "-c", f"{child}; print('up', flush=True); time.sleep(60)"], {}, tmp_path / "log")
    while "up" not in (tmp_path / "log").read_text():
        assert tree.status is None
    assert len(tree.alive()) == 2
    os.kill(tree.process.pid, signal.SIGKILL)
    tree.process.wait()
    assert tree.await_end(0.2) == 1
    tree.kill()
    assert tree.alive() == []


# ---- commands and the page -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_command_names_a_script_and_the_workers(name, tmp_path):
    place = place_of(tmp_path)
    command = SUBJECTS[name].command(place, Settings(), 1)
    (script,) = (word for word in command if word.endswith(".py"))
    assert Path(script).exists()
    assert any(word in ("1", "--nproc-per-node=1", "compute.workers=1") for word in command)
    text = shown(command, place)
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    assert '"steps": 192' in environment(place, Settings(), 2)["FAULTS_SETTINGS"]


CELL = {
    "subject": "vitray",
    "fault": "sigkill_driver",
    "commands": ["vitray train", "vitray train"],
    "notes": [],
    "versions": {"vitray": "0.1.0"},
    "machine": "2 cores",
    "date": "2026-11-24",
    "tracking": [{"status": "FINISHED", "first": 1, "last": 192, "twice": 0, "missing": 0}],
    "steps": 192,
    "lost": 8,
    "repeated": 0,
    "skipped": 0,
    "other_steps": 0,
    "weights_difference": 0.0,
    "pause": 12.34,
}


def test_the_page_has_every_fault_and_says_what_is_not_measured():
    other = CELL | {
        "subject": "lightning",
        "lost": 2,
        "repeated": 5,
        "skipped": 5,
        "weights_difference": 0.02,
        "pause": 20.0,
    }
    page = faults_page({("vitray", "sigkill_driver"): CELL, ("lightning", "sigkill_driver"): other})
    assert all(f"\n## {title}\n" in page for title, _ in FAULT_TEXTS.values())
    assert set(FAULT_TEXTS) == set(FAULTS)
    row = "| vitray | 0 | 0 | 0 | 8 | equal, bit for bit | 12.3 | started it again | FINISHED: steps 1 to 192 |"
    assert row in page
    assert "| Lightning | 5 | 5 | 0 | 2 | differ by up to 0.02 | 20.0 |" in page
    assert "Fewest steps lost (2): Lightning. Each image as often as without the fault: vitray." in page
    stacks, _, loops = page.partition("## The loader in loops of others")
    assert stacks.count("| not measured |") == len(SUBJECTS) * len(FAULTS) - 2
    assert loops.count("not measured") == len(LOOPS) * len(LOOP_FAULTS) - 1  # timm's train.py is not elastic on CPUs
    assert "vitray 0.1.0" in page
    assert "Measured on 2 cores, 2026-11-24." in page


def test_a_run_without_a_step_after_its_fault_has_no_pause():
    cells = {(name, "disk_full"): CELL | {"subject": name, "pause": None} for name in ("vitray", "timm")}
    page = faults_page(cells)
    assert "Fewest steps lost (8): vitray, timm's train.py. Each image" in page
    assert "| vitray | 0 | 0 | 0 | 8 | equal, bit for bit | - | started it again |" in page


def test_what_a_person_did_and_what_tracking_shows_are_words():
    assert person_text(CELL | {"commands": ["a"]}) == "no"
    killed = CELL | {"commands": ["a"] * 3, "notes": ["3 processes outlived the command by 5 s and were killed"]}
    assert person_text(killed) == "started it again 2 times, ended or removed something"
    # The kill after SIGTERM is a part of the fault.
    assert person_text(CELL | {"notes": ["did not end within 30 s of SIGTERM"]}) == "started it again"
    runs = [{"status": "RUNNING", "first": 1, "last": 104, "twice": 0, "missing": 0}]
    runs += [{"status": "FINISHED", "first": 97, "last": 192, "twice": 1, "missing": 2}]
    assert tracking_text(runs) == "RUNNING: steps 1 to 104; FINISHED: steps 97 to 192, 1 twice, 2 missing"
    assert tracking_text([{"status": None, "epochs": [0, 1, 1, 2]}]) == "summary.csv: epochs 0, 1, 1, 2"


def test_the_summary_adds_up_the_faults_of_a_stack_without_the_undisturbed_run():
    whole = [{"status": "FINISHED", "first": 0, "last": 191, "twice": 0, "missing": 0}]
    lightning = CELL | {"subject": "lightning", "tracking": whole}
    cells = {
        ("lightning", "none"): lightning,
        ("lightning", "sigterm"): lightning | {"lost": 3, "commands": ["a"] * 3},
        ("lightning", "checkpoint"): lightning | {"lost": 4, "skipped": 5, "weights_difference": 0.1},
    }
    assert "| Lightning | 1 of 2 | 1 of 2 | 7 | 3 times | 2 of 2 |" in faults_page(cells)
    for flaw in ({"status": "FAILED"}, {"first": 1}, {"twice": 1}, {"missing": 1}, {"first": None, "last": None}):
        cells["lightning", "sigterm"]["tracking"] = [whole[0] | flaw]
        assert "3 times | 1 of 2 |" in faults_page(cells)
    cells["lightning", "sigterm"]["tracking"] = whole * 2
    assert "3 times | 1 of 2 |" in faults_page(cells)


def test_the_page_is_that_of_the_measured_cells():
    """Run `python experiments/faults/measure_faults.py --page` after a change."""
    assert PAGE.read_text() == faults_page(read_cells())
