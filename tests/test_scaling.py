"""Many consumers on several nodes: one execution keeps the CPUs of all nodes busy."""

import json
import os
import runpy
import subprocess
import sys
import threading

import pytest
from test_layers import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import measure_scaling
from measure_scaling import highest_usage, tasks_in_flight, tree_usage

SCRIPT = str(ROOT / "experiments" / "measure_scaling.py")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_consumers_than_cpus_of_a_node_keep_up_with_rays_own_split(tmp_path):
    """Six nodes of one CPU, eight consumers; in its own process, since other tests use another Ray."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(ROOT)
    shard = ["pipelines.shard", "demo", str(tmp_path / "data"), "images=13000", "image_size=32", "val_share=0"]
    subprocess.run([sys.executable, "-m", *shard], env=environment, check=True, stdout=sys.stderr)
    settings = ["--consumers", "8", "--image-size", "32", "--images", "12288", "--decode-ms", "6", "--rounds", "3"]
    command = [sys.executable, SCRIPT, str(tmp_path / "data"), *settings, "--out", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    rows = {row["pipeline"]: row for row in json.loads((tmp_path / "scaling.json").read_text())["rows"]}
    assert rows["stream"]["ratio"] >= 0.9
    assert rows["stream"]["fairness"] <= 1.2
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_it_starts_its_own_nodes_with_the_same_number_of_cpus(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "data/demo", "--nodes", "4"])
    with pytest.raises(SystemExit, match="2"):
        measure_scaling.main()
    assert "--cpus: expected a multiple of --nodes" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(sys, "argv", [SCRIPT, "data/demo"])
    with pytest.raises(SystemExit, match="2"):
        measure_scaling.main()
    assert "starts nodes of its own" in capsys.readouterr().err


def test_the_estimate_of_the_documentation_is_that_of_the_plan(capsys):
    runpy.run_path(str(ROOT / "experiments/estimate_scaling.py"))["main"]()
    assert capsys.readouterr().out in (ROOT / "docs/scaling.md").read_text()


def test_tasks_in_flight_overlap_in_time(tmp_path):
    # Each task decodes from its first image to its last: 0 to 4, 1 to 3 and 5 to 6; the last pass began at 10.
    (tmp_path / "one").write_text("a 0 1\na 3 4\nc 5 6\nd 10 11\n")
    (tmp_path / "two").write_text("b 1 2\nb 2 3\n")
    assert tasks_in_flight(tmp_path, 0, 7) == (2, 1.0)
    assert tasks_in_flight(tmp_path, 10, 14) == (1, 0.25)


def test_the_highest_usage_counts_threads_that_have_ended():
    before, ends = tree_usage(), threading.Event()
    threads = [threading.Thread(target=ends.wait) for _ in range(20)]
    with highest_usage(0.01) as highest:
        for thread in threads:
            thread.start()
        while highest[1] < before[1] + 20:
            pass
        ends.set()
        for thread in threads:
            thread.join()
    assert highest[1] >= before[1] + 20
    assert highest[0] > 10**7
