"""Many consumers on several nodes: one execution keeps the CPUs of all nodes busy."""

import json
import os
import subprocess
import sys

import pytest

from pipelines.__main__ import main


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_consumers_than_cpus_of_a_node_keep_up_with_rays_own_split(tmp_path):
    """Six nodes of one CPU, eight consumers; in its own process, since other tests use another Ray."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    run = [sys.executable, "-m"]
    shard = ["pipelines.shard", "demo", str(tmp_path / "data"), "images=13000", "image_size=32", "val_share=0"]
    subprocess.run([*run, *shard], env=environment, check=True, stdout=sys.stderr)
    settings = ["--consumers", "8", "--image-size", "32", "--images", "12288", "--decode-ms", "4", "--rounds", "2"]
    bench = ["pipelines.bench", "scaling", str(tmp_path / "data"), *settings, "--out", str(tmp_path), "--json"]
    done = subprocess.run([*run, *bench], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    rows = {row["pipeline"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows["stream"]["ratio"] >= 0.9
    assert rows["stream"]["fairness"] <= 1.2
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_the_scaling_benchmark_starts_its_own_nodes(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert main(["bench", "scaling", "data/demo"]) == 2
    assert "this benchmark starts nodes of its own" in capsys.readouterr().err
