"""docs/gpu.md: the page of its report, the report on a bare machine, and the numbers that `auto` reads."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_layers import ROOT

from experiments import gpu_report
from experiments.gpu_page import page
from pipelines.__main__ import main
from vitray.bench.branches import elements, fused_elements
from vitray.bench.charts import draw_bars
from vitray.bench.results import Results
from vitray.bench.train import largest_fitting
from vitray.models import blocks
from vitray.models.blocks import most_fused

# What a bare machine has not: the report is to run there.
ABSENT = ("ray", "mlflow", "optuna", "boto3", "botocore", "simplejpeg", "pandas", "matplotlib", "timm", "transformers")
BARE = f"""
import importlib.machinery, runpy, sys
find = importlib.machinery.PathFinder
class Finder:
    invalidate_caches, find_distributions = find.invalidate_caches, find.find_distributions
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else find.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(find)] = Finder
runpy.run_module("experiments.gpu_report", run_name="__main__", alter_sys=True)
"""


def test_the_page_is_that_of_the_report():
    """Renew it by `python -m experiments.gpu_report --page`."""
    report = json.loads((ROOT / "experiments/gpu.json").read_text())
    assert (ROOT / "docs/gpu.md").read_text() == page(report)


def test_without_a_report_the_page_has_no_table():
    text = page({})
    assert "No GPU has been measured yet" in text
    assert "\n|" not in text
    assert "\n## " not in text


def test_each_number_has_its_cell():
    report = {"hardware": "A card", "device_bytes": 80 * 2**30, "cores": "16", "versions": {"torch": "2.15"}}
    step = {"part": "steps", "network": "vit_s12x1_16", "batch": 256, "mfu": 0.4, "peak_bytes": 12e9}
    step |= {"images_per_second": 8123.0, "images_per_second_spread": 81.23}
    rows = [
        step,
        {"part": "branches", "network": "vit_s18x2_16", "batch": 1, "seq": 7, "auto_over_seq": 1.5},
        {"part": "branches", "network": "vit_s18x2_16", "batch": 8, "fused": 9, "auto_over_seq": 1.2},
        {"part": "attention_only", "network": "vit_b12x1_16", "batch": 64, "variant": "attn", "time": 0.75},
    ]
    text = page(report | {"rows": rows, "errors": {"stems": "no time was left"}})
    assert "Hardware: A card, 80 GiB, 16 CPU cores. Versions: torch 2.15." in text
    assert "| vit_s12x1_16 | 256 | 8123 ± 81.23 | 40.0% | 12.00 GB |" in text
    assert "| network | batch | seq | fused | auto over seq |" in text  # without the columns that no row has
    assert "| vit_s18x2_16 | 8 | - | 9 | 1.20 |" in text
    assert "| images/s of ViT-S/16 in training | >= 8,000 | 8123 |" in text
    assert "| auto over sequential, batch 1 | >= 1.40 | 1.50 |" in text
    assert "| a step of attention alone over all | <= 0.80 | 0.75 |" in text
    assert "MFU of ViT-L/16" not in text
    assert "- `stems`: no time was left" in text


def test_it_runs_on_a_bare_machine(tmp_path):
    before = (ROOT / "docs/gpu.md").read_text()
    command = [sys.executable, "-c", BARE, "--toy", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [json.loads(line) for line in done.stdout.splitlines()] == report["rows"]
    assert {row["part"] for row in report["rows"]} == {*gpu_report.PARTS} - {"compiled"}
    assert report["versions"]["torch"]
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"## {heading}\n" in text for heading in ("Training steps", "Latency", "A whole run", "Stems"))
    assert (ROOT / "docs/gpu.md").read_text() == before


def test_what_a_part_had_measured_is_saved_and_a_failure_is_its_own(tmp_path):
    def fails(_bench):
        yield {"network": "one"}
        assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == [{"part": "fails", "network": "one"}]
        raise RuntimeError("CUDA error")

    def goes_on(_bench):
        yield {"network": "two"}

    bench = gpu_report.Bench(gpu_report.TOY, torch.device("cpu"), time.monotonic() + 60)
    report = gpu_report.measure(bench, tmp_path / "gpu.json", {"fails": fails, "goes_on": goes_on})
    assert [row["network"] for row in report["rows"]] == ["one", "two"]
    assert report["errors"] == {"fails": "RuntimeError: CUDA error"}
    late = gpu_report.measure(bench._replace(end=0.0), tmp_path / "gpu.json", {"goes_on": goes_on})
    assert (late["rows"], late["errors"]) == ([], {"goes_on": "no time was left"})


def test_only_a_whole_report_of_a_gpu_replaces_ours(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, message in ((["--toy"], "--out: expected a folder"), (["--only", "x", "--out", "o"], "--only: got x")):
        with pytest.raises(SystemExit):
            gpu_report.main(words)
        assert message in capsys.readouterr().err


# ---- what the benchmarks write ---------------------------------------------------------------------------------------


def test_a_record_names_hardware_and_versions(tmp_path):
    record = Results(tmp_path / "new" / "a", torch.device("cpu"), {}).finish({"limit": 3})
    assert record["files"] == [str(tmp_path / "new" / "a.csv"), str(tmp_path / "new" / "a.json")]
    saved = json.loads((tmp_path / "new" / "a.json").read_text())
    assert saved == record
    assert saved["limit"] == 3
    assert (saved["device"], saved["device_bytes"]) == ("cpu", None)
    assert saved["hardware"]
    assert saved["versions"]["torch"].startswith(torch.__version__.partition("+")[0])


def test_rows_are_saved_before_the_end_and_files_at_the_end(tmp_path):
    results = Results(tmp_path / "new" / "train", torch.device("cpu"), {"about": "toy"})
    results.add({"model": "one", "vitray": 7})
    saved = json.loads((tmp_path / "new" / "train.json").read_text())
    assert (saved["rows"], saved["about"], saved["is_partial"]) == ([{"model": "one", "vitray": 7}], "toy", True)
    results.add({"model": "two", "vitray": 8})
    whole = results.finish({"limit": 3}, draw_bars({"one": 7, "two": 8}, "images/s", "toy"))
    assert [row["model"] for row in whole["rows"]] == ["one", "two"]
    assert "is_partial" not in whole
    assert [Path(name).suffix for name in whole["files"]] == [".csv", ".png", ".json"]
    assert (tmp_path / "new" / "train.csv").read_text().split() == ["model,vitray", "one,7", "two,8"]


def test_latency_is_measured(tmp_path, capsys):
    args = ["--models", "ViT-U1x2/8", "--image-size", "32", "--batches", "1,2", "--rounds", "2", "--seconds", "0.01"]
    assert main(["bench", "latency", *args, "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["batch"] for row in result["rows"]] == [1, 2]
    assert all(row["eager_ms"] > 0 and row["eager_ms_spread"] >= 0 for row in result["rows"])
    assert all(row["eager_gain"] == 1 for row in result["rows"])
    assert json.loads((tmp_path / "latency_cpu_fp32.json").read_text())["rows"] == result["rows"]


@pytest.mark.parametrize("room", [*range(8, 70), 100, 127, 128, 1000, 4097])
def test_the_largest_batch_fits_and_an_eighth_more_does_not(room):
    largest = largest_fitting(lambda batch: batch <= room)
    assert largest is not None
    assert largest <= room < largest + max(1, largest // 8)


def test_no_batch_fits_a_full_gpu():
    assert largest_fitting(lambda _: False) is None
    assert largest_fitting(lambda _: True, most=64) == 64


def test_a_cpu_has_no_largest_batch(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "train", "--largest-batch"]) == 2
    assert "--largest-batch: got a machine without a GPU" in capsys.readouterr().err


# ---- the limit of execution auto -------------------------------------------------------------------------------------


def test_auto_reads_its_limits_with_their_hardware():
    measured = json.loads((Path(blocks.__file__).parent / "auto_thresholds.json").read_text())
    assert {each["device"]: each["fused_elements"] for each in measured} == {"cpu": 50_000, "cuda": 1_250_000}
    assert all(each["hardware"] and each["source"] for each in measured)
    most_fused.cache_clear()
    assert (most_fused("cpu"), most_fused("meta")) == (50_000, 0)
    measured_here = {each["hardware"]: each["fused_elements"] for each in measured}
    assert most_fused("cuda") == measured_here.get(
        torch.cuda.is_available() and torch.cuda.get_device_name(), 1_250_000
    )


def test_the_limit_of_this_gpu_counts_before_the_first_of_its_kind(monkeypatch, tmp_path):
    measured = json.loads((Path(blocks.__file__).parent / "auto_thresholds.json").read_text())
    report = {"device": "cuda", "hardware": "A card", "versions": {"torch": "2.15"}}
    rows = [{"part": "branches", "elements": 7, "loop": 1, "fused": 2}, {"part": "steps"}]
    new = gpu_report.with_threshold(measured, report | {"rows": rows})
    assert new[:-1] == measured
    assert new[-1]["source"].startswith("experiments/gpu_report.py")
    again = gpu_report.with_threshold(new, report | {"rows": [rows[0] | {"elements": 8}]})
    assert [each["fused_elements"] for each in again] == [50_000, 1_250_000, 8]
    assert gpu_report.with_threshold(measured, report | {"rows": []}) == measured

    (tmp_path / "auto_thresholds.json").write_text(json.dumps(again))
    monkeypatch.setattr(blocks, "__file__", str(tmp_path / "blocks.py"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for hardware, limit in (("A card", 8), ("Another card", 1_250_000)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=hardware: name)
        most_fused.cache_clear()
        assert most_fused("cuda") == limit
    most_fused.cache_clear()


def test_the_elements_of_a_row_are_those_by_which_auto_decides():
    assert elements("vit_u18x2_8", 16, 32) == 2 * 16 * 17 * 64


@pytest.mark.parametrize(
    ("gains", "limit"),
    [
        ([1.5, 1.2, 0.9, 0.7], 200),
        ([1.5, 1.2, 1.1], 300),
        ([0.9, 0.8], 0),
        ([1.2, 0.99, 1.3], 300),  # a small loss in between costs less than giving up the gain after it
        ([1.02, 0.8, 1.01], 100),
    ],
)
def test_the_limit_loses_least_at_the_worst_row(gains, limit):
    rows = [{"elements": 100 * place, "loop": 10.0, "fused": 10.0 * gain} for place, gain in enumerate(gains, start=1)]
    assert fused_elements(rows) == limit
