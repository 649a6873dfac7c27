"""docs/gpu.md: the page of its report, the plan in a stated time, and the numbers that `auto` reads."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_layers import ROOT

from pipelines.__main__ import main
from pipelines.bench import build_parser
from vitray.bench.branches import GRAPHS, VARIANTS, elements, fused_elements
from vitray.bench.networks import capture
from vitray.bench.results import Results, draw_bars
from vitray.bench.train import largest_fitting, recipe
from vitray.config import load_run
from vitray.models import blocks
from vitray.models.blocks import most_fused
from vitray.system.timing import Spread

sys.path.insert(0, str(ROOT / "experiments"))
import gpu_report
import measure_predict
from gpu_page import FULL, TOY, page


def test_the_page_is_that_of_the_results():
    """Renew it by `python experiments/gpu_report.py --page`."""
    results = json.loads((ROOT / "experiments/gpu.json").read_text())
    assert (ROOT / "docs/gpu.md").read_text() == page(FULL, results)


def test_without_results_the_page_has_no_table():
    text = page(FULL, {})
    assert "No GPU has been measured yet" in text
    assert "\n|" not in text
    assert "\n## " not in text


def spread(name, value):
    return Spread(value, value / 100).columns(name, 4)


def test_each_number_has_its_cell():
    hardware = {"hardware": "A card", "device_bytes": 80 * 2**30, "cores": "16", "versions": {"torch": "2.15"}}
    train = {"model": "vit_s12x1_16", **spread("vitray", 8123.0), **spread("ratio", 0.98)}
    train |= {"mfu": 0.4, "peak_bytes": 12e9, "largest_batch": 1024}
    row = {"model": "vit_s18x2_16", "batch": 1} | spread("auto_over_seq", 1.5) | spread("auto_over_best", 0.99)
    row |= {
        key: value for name in ("seq", "loop", "fused", "auto", "seq_graph") for key, value in spread(name, 7).items()
    }
    latency = {"model": "vit_b12x1_16", "batch": 64} | spread("eager_ms", 3.25)
    modes = [{"mode": "attn", **spread("seconds", 0.5), **spread("seconds_ratio", 0.75), "peak_bytes": 3e9}]
    results = {
        "train": hardware | {"rows": [train]},
        "train_augmented": hardware | {"rows": [{"model": "vit_s12x1_16", "augmented": 8000, "ratio": 0.985}]},
        "run": {"images_per_second": 7960.54},
        "train_stems": hardware
        | {
            "rows": [
                {"model": "vit_s12x1_16_conv", "vitray": 7},
                {"model": "vit_s12x1_16_local", "error": "out of memory"},
            ],
            "error": "took more than its 60 s",
        },
        "latency": hardware | {"rows": [latency]},
        "branches": hardware | {"rows": [row]},
        "finetune": hardware | {"rows": modes},
        "ingest": hardware
        | {
            "about": "4096 images, 2 workers",
            "rows": [{"pipeline": "stream", **spread("images_per_second", 900), **spread("cpu_us", 5)}],
        },
    }
    text = page(FULL, results)
    assert "Hardware: A card, 80 GiB, 16 CPU cores. Versions: torch 2.15." in text
    assert "| `vit_s12x1_16` | 8123 ± 81.23 | 0.98 ± 0.01 | 40.0% | 12.00 GB | 1,024 |" in text
    assert "| `vit_b12x1_16` |" + 6 * " - |" + " 3.25 ± 0.0325 |" in text
    assert "| `vit_s18x2_16` | 1 |" + 5 * " 7 ± 0.07 |" + " - | 0.99 ± 0.01 |" in text
    assert "| attn | 0.5 s ± 0.005 s | 0.75 ± 0.01 | 3.00 GB | - | - |" in text
    assert "| stream | 900 ± 9 | 5 ± 0.05 |" in text
    assert "## Decoding\n\n4096 images, 2 workers.\n\n| pipeline |" in text
    assert "| images/s of ViT-S/16 in training | 8,000 | 8123 |" in text
    assert "| auto over the best, worst batch | 0.98 | 0.99 |" in text
    assert "| `vit_s12x1_16_conv` | 7 |" in text
    assert "| a whole run | 7961 | 0.980 |" in text
    assert "| augmented steps | 8000 | 0.985 |" in text
    assert "| a whole run of ViT-S/16 over its steps | 0.97 | 0.980 |" in text
    assert "vit_ti12x1_16" not in text  # what was not measured has no row
    assert "## Prediction" not in text
    assert "- `train_stems`: took more than its 60 s" in text
    assert "- `train_stems`, `vit_s12x1_16_local`: out of memory" in text


@pytest.mark.parametrize("size", [FULL, TOY])
def test_every_command_of_the_plan_is_parsed(size):
    measurements = gpu_report.plan(size, "data", "out")
    wanted = {
        "dataset",
        "train",
        "train_stems",
        "train_augmented",
        "run",
        "latency",
        "branches",
        "finetune",
        "ingest",
        "ingest_places",
        "predict",
    }
    assert {each.name for each in measurements} - {"train_compiled", "train_reduced"} == wanted
    outs = set()
    for each in measurements:
        if each.arguments[0] in ("bench", "measure_predict.py"):
            parser = build_parser() if each.arguments[0] == "bench" else measure_predict.build_parser()
            outs.add(parser.parse_args(each.arguments[1:]).out)
    assert len(outs) == len(measurements) - 2  # none overwrites another's files; dataset and run have other verbs
    # More batches than most machines have CPUs, so that the start is a small part of the time.
    assert measure_predict.build_parser().parse_args(measurements[-1].arguments[1:]).images == size.images


@pytest.mark.parametrize("size", [FULL, TOY])
def test_the_whole_run_has_the_network_and_the_batch_of_the_steps(size, tmp_path):
    (tmp_path / gpu_report.RECIPE).write_text(json.dumps(gpu_report.whole_run(size)))
    run = load_run(tmp_path / gpu_report.RECIPE)
    options = build_parser().parse_args(["train", "--batch", str(size.batch), *size.options])
    step = recipe(size.stems[0], options.batch, options.image_size, options.dtype, False)
    assert run.model == step.model.model_copy(update={"num_classes": 10})
    assert run.task == step.task
    assert run.data.mix == step.data.mix
    assert (run.optim.batch, run.compute.precision) == (step.optim.batch, step.compute.precision)
    assert run.optim.rule == step.optim.rule


def test_the_measurements_share_the_time():
    """Each uses all of its time, or none of it: the sum stays within the budget, and what is left goes to the later."""
    measurements, limits = gpu_report.plan(FULL, "data", "out"), []
    for uses in (1.0, 0.0):
        now, given = [0.0], []

        def call(words, limit, now=now, given=given, uses=uses):
            given.append(limit)
            now[0] += limit * uses
            return {"error": "toy"}

        *_, results = gpu_report.run_all(measurements, 1440.0, call, lambda now=now: now[0])
        assert list(results) == [each.name for each in measurements]
        assert now[0] <= 1440.0
        limits.append(given)
    assert sum(limits[0]) == pytest.approx(1440.0)
    assert limits[1][-1] == 1440.0


def test_the_rounds_of_each_measurement_take_less_than_its_share():
    measurements = gpu_report.plan(FULL, "data", "out")
    unit, counted = 1440.0 / sum(each.weight for each in measurements), set()
    for each in measurements:
        options = build_parser().parse_args(each.arguments[1:]) if each.arguments[0] == "bench" else None
        if not hasattr(options, "seconds"):
            continue
        networks = [1] if options.benchmark == "finetune" else options.models.split(",")
        variants = {"branches": len(VARIANTS) + len(GRAPHS), "finetune": len(getattr(options, "modes", []))}
        calls = len(networks) * len(getattr(options, "batches", [1])) * variants.get(options.benchmark, 2)
        assert calls * options.rounds * options.seconds < 0.8 * each.weight * unit, each.name
        counted.add(each.name)
    trained = {"train", "train_stems", "train_compiled", "train_reduced", "train_augmented"}
    assert counted == trained | {"latency", "branches", "finetune"}


def test_a_command_that_fails_or_takes_too_long_is_an_error_of_its_own():
    assert gpu_report.call_vitray(["bench", "train", "--models", "vit_q1"], 60)["error"].startswith("ended with 2: ")
    assert gpu_report.call_vitray(["bench", "train"], 0.01) == {"error": "took more than its 0 s"}


def test_a_benchmark_that_ends_with_an_error_keeps_its_rows_and_each_measurement_is_written(tmp_path, monkeypatch):
    Results(tmp_path / "new" / "train", torch.device("cpu"), {}).add({"model": "one", "vitray": 7})
    words = ["bench", "train", "--out", str(tmp_path / "new")]
    failed = SimpleNamespace(returncode=1, stderr="a long text\nRuntimeError: CUDA error", stdout="")
    monkeypatch.setattr(gpu_report.subprocess, "run", lambda *_, **__: failed)
    result = gpu_report.call_vitray(words, 1)
    assert (result["rows"], result["error"]) == (
        [{"model": "one", "vitray": 7}],
        "ended with 1: RuntimeError: CUDA error",
    )

    monkeypatch.setattr(gpu_report, "TOY_OUT", tmp_path)
    calls = []

    def call(words, _limit):
        calls.append(words)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return failure if words[0] == "shard" else result

    failure = {"error": "ended with 2: no space"}
    monkeypatch.setattr(gpu_report, "call_vitray", call)
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main(["--toy"])
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"dataset": failure, "train": result}
    assert "- `dataset`: ended with 2: no space" in (tmp_path / "gpu.md").read_text()


def test_what_a_stopped_benchmark_had_saved_is_kept(tmp_path):
    results = Results(tmp_path / "new" / "train", torch.device("cpu"), {"about": "toy"})
    results.add({"model": "one", "vitray": 7})
    saved = gpu_report.call_vitray(["bench", "train", "--out", str(tmp_path / "new")], 0.01)
    assert saved["rows"] == [{"model": "one", "vitray": 7}]
    assert (saved["about"], saved["is_partial"], saved["error"]) == ("toy", True, "took more than its 0 s")
    results.add({"model": "two", "vitray": 8})
    whole = results.finish({"limit": 3}, draw_bars({"one": 7, "two": 8}, "images/s", "toy"))
    assert [row["model"] for row in whole["rows"]] == ["one", "two"]
    assert "is_partial" not in whole
    assert whole["limit"] == 3
    assert [Path(name).suffix for name in whole["files"]] == [".csv", ".png", ".json"]
    assert json.loads((tmp_path / "new" / "train.json").read_text())["rows"] == whole["rows"]
    assert (tmp_path / "new" / "train.csv").read_text().split() == ["model,vitray", "one,7", "two,8"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_it_runs_at_toy_size(tmp_path, monkeypatch):
    before = (ROOT / "docs/gpu.md").read_text()
    monkeypatch.setattr(gpu_report, "TOY_OUT", tmp_path)
    gpu_report.main(["--toy", "--minutes", "12"])
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert len(results) == 10
    assert results.pop("run")["images_per_second"] > 0
    for result in results.values():
        assert result["device"] in ("cpu", "cuda")
        assert result["versions"]["torch"]
        assert result["rows"]
        assert any(name.endswith("_spread") for name in result["rows"][0])
    text = (tmp_path / "gpu.md").read_text()
    if not torch.cuda.is_available():  # the table of CUDA graphs is empty
        assert "## Latency as a CUDA graph" not in text
    assert all(f"## {heading}\n" in text for heading in ("Training", "Latency", "Decoding", "Prediction"))
    assert (ROOT / "docs/gpu.md").read_text() == before


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
    result = {"device": "cuda", "hardware": "A card", "versions": {"torch": "2.15"}, "fused_elements": 7}
    result |= {"mode": "bf16, eager, inference", "image_size": 224}
    new = gpu_report.with_threshold(measured, result)
    assert new[:-1] == measured
    assert new[-1]["source"] == "experiments/gpu_report.py: vitray bench branches, bf16, eager, inference, 224 px"
    again = gpu_report.with_threshold(new, result | {"fused_elements": 8})
    assert [each["fused_elements"] for each in again] == [50_000, 1_250_000, 8]
    assert gpu_report.with_threshold(measured, {"error": "took more than its 60 s"}) == measured

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


@pytest.mark.gpu
def test_a_captured_call_repeats_its_kernels():
    x = torch.ones(4, device="cuda")
    y = torch.zeros(4, device="cuda")
    with torch.inference_mode():
        replay = capture(lambda: y.copy_(x * 2))
        x.fill_(3)
        replay()
    torch.cuda.synchronize()
    assert y.tolist() == [6.0] * 4
