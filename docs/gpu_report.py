"""python docs/gpu_report.py [--minutes 24]: measure one GPU, and write docs/gpu.json and docs/gpu.md.

Each benchmark is a process of its own with a share of the time; what one leaves, the later ones have. Without a GPU the
same benchmarks run at toy size and their page goes to bench_out/gpu_toy, since their numbers say nothing of a GPU.
`--page` writes docs/gpu.md from docs/gpu.json alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
TOY_OUT = Path("bench_out/gpu_toy")
THRESHOLDS = DOCS.parent / "vitray" / "models" / "auto_thresholds.json"
MISSING = "not measured"
RECIPE = "whole_run.yaml"

# A result by the name of its measurement: the JSON of the benchmark, or {"error": why there is none}.
Results = Mapping[str, Mapping[str, Any]]


class Size(NamedTuple):
    """What is measured, and how long."""

    models: Sequence[str]
    stems: Sequence[str]
    """The first one of these networks is also trained in a whole run, and with augmentation on the device."""
    compiled: Sequence[str]
    parallel: Sequence[str]
    finetuned: str
    batches: Sequence[int]
    options: Sequence[str]
    """Of every benchmark of a network."""
    batch: int
    images: int
    """Drawn images that are decoded."""
    steps: int
    """Of the whole run."""
    workers: int | None = None


STEMS = ("linear_bn", "linear_gelu", "linear_bn_gelu", "hmlp_bn", "hmlp_ln", "conv", "conv_ln", "local")
FULL = Size(
    models=[f"vit_{name}_16" for name in ("ti12x1", "s12x1", "b12x1", "l24x1", "s36x1", "s18x2", "b36x1", "b18x2")],
    stems=["vit_s12x1_16", *(f"vit_s12x1_16_{stem}" for stem in STEMS)],
    compiled=["vit_s12x1_16", "vit_b12x1_16", "vit_l24x1_16"],
    parallel=["vit_s18x2_16", "vit_b18x2_16"],
    finetuned="vit_b12x1_16",
    batches=[1, 2, 4, 8, 16, 32, 64],
    options=["--image-size", "224", "--dtype", "bf16"],
    batch=128,
    images=4096,
    steps=640,
)
TOY = Size(
    models=["vit_u1x1_8", "vit_u1x2_8"],
    stems=["vit_u1x1_8", "vit_u1x1_8_hmlp_bn"],
    compiled=[],
    parallel=["vit_u1x2_8"],
    finetuned="vit_u1x1_8",
    batches=[1, 2],
    options=["--image-size", "32", "--rounds", "2", "--seconds", "0.01"],
    batch=4,
    images=48,
    steps=60,
    workers=2,
)


class Measurement(NamedTuple):
    """A command of `vitray`, and its part of the time."""

    name: str
    words: Sequence[str]
    weight: float


def plan(size: Size, dataset: str, out: str) -> list[Measurement]:
    """Return the measurements, in their order."""
    has_gpu = size is FULL
    train = ["bench", "train", "--batch", str(size.batch), *size.options]
    batches = ["--batches", ",".join(map(str, size.batches)), *size.options]
    decoding = ["--image-size", size.options[1], "--rounds", "3" if has_gpu else "1", "--batch", str(size.batch)]
    workers = ["--workers", str(size.workers)] if size.workers else []
    largest = ["--largest-batch"] if has_gpu else []
    one = size.stems[0]
    forward = ["--models", ",".join(dict.fromkeys([*size.models, *size.stems])), *batches]
    all_ = [
        ("dataset", ["shard", "demo", dataset, f"images={size.images}", f"image_size={256 if has_gpu else 40}"], 4),
        ("train", [*train, *largest, "--models", ",".join(size.models)], 5),
        ("train_stems", [*train, *largest, "--models", ",".join(size.stems)], 4),
        ("train_compiled", [*train, "--compile", "--models", ",".join(size.compiled)], 6),
        ("train_reduced", [*train, "--compile", "reduce-overhead", "--models", ",".join(size.compiled)], 6),
        ("train_augmented", [*train, "--augment", "three_augment", "--models", one], 1),
        ("run", ["train", f"{out}/{RECIPE}", f"data.url={dataset}", "--name", "whole", "--out", f"{out}/runs"], 3),
        ("latency", ["bench", "latency", *forward], 4),
        ("branches", ["bench", "branches", "--models", ",".join(size.parallel), *batches], 3),
        ("finetune", ["bench", "finetune", "--model", size.finetuned, "--modes", "full,attn", *size.options], 1),
        ("ingest", ["bench", "ingest", dataset, *decoding, *workers], 2),
        ("ingest_places", ["bench", "ingest", dataset, "--augment", "three_augment", *decoding], 1),
        ("predict", ["bench", "predict", dataset, "--model", size.finetuned, *decoding, *workers], 2),
    ]
    chosen = [Measurement(*each) for each in all_ if size.compiled or "--compile" not in each[1]]
    return [
        each._replace(
            words=[*each.words, "--json", *(["--out", f"{out}/{each.name}"] if "bench" in each.words else [])]
        )
        for each in chosen
    ]


def whole_run(size: Size) -> dict[str, Any]:
    """Return the recipe of a run with the settings of `bench train` but its classes; its images are decoded once."""
    dtype = size.options[size.options.index("--dtype") + 1] if "--dtype" in size.options else "fp32"
    return {
        "model": {"name": size.stems[0], "image_size": int(size.options[1]), "num_classes": 10},
        "data": {"val": None, "cache": "decoded"},
        "optim": {"batch": size.batch, "duration": f"{size.steps} steps", "warmup": "10 steps"},
        "compute": {"workers": 1, "precision": dtype},
        "tracking": {"every": f"{size.steps // 10} steps", "register_as": None},
    }


def run_all(
    measurements: Sequence[Measurement],
    seconds: float,
    call: Callable[[Sequence[str], float], dict[str, Any]],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict[str, Any]]:
    """Return the results of all measurements within some seconds, each in its share of those that are left."""
    end, results = clock() + seconds, {}
    for number, each in enumerate(measurements):
        share = each.weight / sum(later.weight for later in measurements[number:])
        limit = max(0.0, end - clock()) * share
        print(f"{each.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        results[each.name] = call(each.words, limit)
        print(f"{each.name}: {results[each.name].get('error', 'done')}", file=sys.stderr, flush=True)
    return results


def call_vitray(words: Sequence[str], limit: float) -> dict[str, Any]:
    """Return the JSON of a command of vitray, or its error with the rows that it had saved."""
    command = [sys.executable, "-m", "pipelines", *words]
    variables = os.environ | {"PYTHONPATH": str(DOCS.parent)}
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:  # MLflow's store of the whole run
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return saved_rows(words) | {"error": f"took more than its {limit:.0f} s"}
    if done.returncode:
        return {"error": f"ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}
    return json.loads(done.stdout.splitlines()[-1])


def saved_rows(words: Sequence[str]) -> dict[str, Any]:
    """Return what a benchmark had saved before it was stopped."""
    folder = Path(words[words.index("--out") + 1]) if "--out" in words else None
    saved = sorted(folder.glob("*.json")) if folder else []
    return json.loads(saved[0].read_text()) if saved else {}


def with_threshold(measured: Sequence[Mapping[str, Any]], branches: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the limits that `auto` reads, with that of a result of `bench branches` for its hardware."""
    if "fused_elements" not in branches:
        return list(measured)
    new = {name: branches[name] for name in ("device", "hardware", "versions", "fused_elements")}
    new["source"] = f"make gpu-report: vitray bench branches, {branches['mode']}, {branches['image_size']} px"
    others = [each for each in measured if (each["device"], each["hardware"]) != (new["device"], new["hardware"])]
    return [*others, new]


# ---- the page --------------------------------------------------------------------------------------------------------

HEAD = """# A GPU, measured

You can see what one GPU does with vitray, and measure yours: `make gpu-report` takes less than 25 minutes and writes
this page. Each number is a median ± half the interquartile range of interleaved rounds. Without a GPU the same
benchmarks run at toy size, and the page stays as it is. The JSON of each benchmark is in `docs/gpu.json`. A cell
without a number says "not measured".
"""
BRANCHES = """
images/s of inference. Sequential, the same blocks one after the other, is another network, and not a choice of auto;
the last column is auto over the better of loop and fused.

"""
AIMS = """
The aims are for an H100.
"""


def page(size: Size, results: Results) -> str:
    """Return the Markdown of the results; a cell without a result says so."""
    rows = rows_of(results)
    parts = [HEAD, _hardware(results), "## Training\n", _training(size.models, rows.get("train", []))]
    parts += ["\nCompiled (`compute.compile=default`):\n", _training(size.compiled, rows.get("train_compiled", []))]
    parts += ["\nCompiled with CUDA graphs (`compute.compile=reduce-overhead`):\n"]
    parts += [_training(size.compiled, rows.get("train_reduced", []))]
    parts += ["\nA whole run, whose images are decoded once, and 3-Augment on the device:\n", _whole(size, results)]
    parts += ["\n## Stems\n", _training(size.stems, rows.get("train_stems", []))]
    parts += ["\n## Latency\n", "\nms of a forward pass, by images in a batch:\n"]
    parts += [_latency(size, rows.get("latency", []), "eager"), "\nAs a CUDA graph:\n"]
    parts += [_latency(size, rows.get("latency", []), "graph")]
    parts += ["\n## Parallel branches\n", BRANCHES]
    parts += [_branches(size, rows.get("branches", []))]
    parts += ["\n## Attention-only fine-tuning\n", _finetuning(rows.get("finetune", []))]
    parts += ["\n## Decoding\n", _pipelines([*rows.get("ingest", []), *rows.get("ingest_places", [])], "cpu_us")]
    parts += ["\n## Prediction\n", _pipelines(rows.get("predict", []), "share_of_bound")]
    parts += ["\n## Aims\n", _aims(size, results), AIMS]
    errors = {name: result["error"] for name, result in results.items() if "error" in result}
    if errors:
        parts += ["\n## Missing\n", "\n".join(f"- `{name}`: {text}" for name, text in errors.items()), "\n"]
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def rows_of(results: Results) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return the rows of each measurement."""
    return {name: result.get("rows", []) for name, result in results.items()}


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rule = f"|{'---|' * len(head)}"
    return "\n".join(["", f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines), ""])


def cell(row: Mapping[str, Any] | None, name: str, text: Callable[[float], str] = "{:.4g}".format) -> str:
    """Return a number with its spread if it has one."""
    value = None if row is None else row.get(name)
    if value is None:
        return MISSING
    spread = row.get(f"{name}_spread") if row else None
    return text(value) if spread is None else f"{text(value)} ± {text(spread)}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


def _row(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any] | None:
    return next((row for row in rows if all(row.get(name) == value for name, value in wanted.items())), None)


def _hardware(results: Results) -> str:
    measured = next((result for name, result in results.items() if name != "dataset" and "hardware" in result), None)
    if measured is None:
        return f"\nHardware: {MISSING}. Versions: {MISSING}.\n\n"
    memory = f", {measured['device_bytes'] / 2**30:.0f} GiB" if measured["device_bytes"] else ""
    versions = ", ".join(f"{name} {text}" for name, text in measured["versions"].items())
    return f"\nHardware: {measured['hardware']}{memory}, {measured['cores']} CPU cores. Versions: {versions}.\n\n"


def _training(models: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for model in models:
        row = _row(rows, model=model)
        numbers = [cell(row, "vitray"), cell(row, "ratio", "{:.2f}".format), cell(row, "mfu", _percent)]
        largest = cell(row, "largest_batch", "{:,.0f}".format)
        lines.append([f"`{model}`", *numbers, cell(row, "peak_bytes", _gigabytes), largest])
    return table(["model", "images/s", "over a bare step", "MFU", "peak memory", "largest batch"], lines)


def _whole(size: Size, results: Results) -> str:
    run, augmented = shares(size, results)
    row = _row(rows_of(results).get("train_augmented", []), model=size.stems[0])
    lines = [
        ["a whole run", cell(results.get("run"), "images_per_second"), cell(run, "ratio", "{:.3f}".format)],
        ["augmented steps", cell(row, "augmented"), cell(augmented, "ratio", "{:.3f}".format)],
    ]
    return table([f"`{size.stems[0]}`", "images/s", "over plain steps"], lines)


def shares(size: Size, results: Results) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return the speed of a whole run over that of its steps, and of steps with and without augmentation."""
    rows = rows_of(results)
    step, run = _row(rows.get("train", []), model=size.stems[0]), results.get("run", {})
    speed = run.get("images_per_second")
    whole = {"ratio": speed / step["vitray"]} if step and speed else None
    return whole, _row(rows.get("train_augmented", []), model=size.stems[0])


def _latency(size: Size, rows: Sequence[Mapping[str, Any]], variant: str) -> str:
    lines = [
        [f"`{model}`", *(cell(_row(rows, model=model, batch=batch), f"{variant}_ms") for batch in size.batches)]
        for model in dict.fromkeys([*size.models, *size.stems])
    ]
    return table(["model", *map(str, size.batches)], lines)


def _branches(size: Size, rows: Sequence[Mapping[str, Any]]) -> str:
    names = {"seq": "sequential", "loop": "loop", "fused": "fused", "auto": "auto"}
    names |= {"seq_graph": "sequential, CUDA graph", "fused_graph": "fused, CUDA graph"}
    lines = []
    for model in size.parallel:
        for batch in size.batches:
            row = _row(rows, model=model, batch=batch)
            best = cell(row, "auto_over_best", "{:.2f}".format)
            lines.append([f"`{model}`", str(batch), *(cell(row, name) for name in names), best])
    return table(["model", "batch", *names.values(), "auto / best"], lines)


def _finetuning(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for mode in ("full", "attn"):
        row = _row(rows, mode=mode)
        share = "{:.2f}".format
        numbers = [cell(row, "seconds", "{:.3g} s".format), cell(row, "seconds_ratio", share)]
        numbers += [cell(row, f"{name}_bytes", _gigabytes) for name in ("peak", "activations")]
        lines.append([mode, *numbers, cell(row, "peak_ratio", share)])
    return table(["trains", "a step", "over full", "peak memory", "activations", "peak over full"], lines)


def _pipelines(rows: Sequence[Mapping[str, Any]], other: str) -> str:
    head = {"cpu_us": "CPU us an image", "share_of_bound": "over the bound"}[other]
    text: Callable[[float], str] = "{:.4g}".format
    lines = [[row["pipeline"], cell(row, "images_per_second", text), cell(row, other, text)] for row in rows]
    return table(["pipeline", "images/s", head], lines or [["all", MISSING, MISSING]])


def _aims(size: Size, results: Results) -> str:
    rows = rows_of(results)
    whole, augmented = shares(size, results)

    def best(model: str, name: str) -> dict[str, Any] | None:
        numbers = [
            row[name]
            for key in ("train", "train_compiled", "train_reduced")
            for row in rows.get(key, [])
            if row["model"] == model
        ]
        numbers = [number for number in numbers if number is not None]
        return {name: max(numbers)} if numbers else None

    branches = rows.get("branches", [])
    gain = _row(branches, model="vit_s18x2_16", batch=1)
    worst = min((row["auto_over_best"] for row in branches), default=None)
    lines = [
        ["images/s of ViT-S/16 in training", "8,000", cell(best("vit_s12x1_16", "vitray"), "vitray")],
        ["MFU of ViT-B/16", "35 %", cell(best("vit_b12x1_16", "mfu"), "mfu", _percent)],
        ["MFU of ViT-L/16", "45 %", cell(best("vit_l24x1_16", "mfu"), "mfu", _percent)],
        ["a whole run of ViT-S/16 over its steps", "0.97", cell(whole, "ratio", "{:.3f}".format)],
        ["steps with 3-Augment on the device over steps without", "0.97", cell(augmented, "ratio", "{:.3f}".format)],
        ["auto over sequential, S-18x2, batch 1", "1.40", cell(gain, "auto_over_seq", "{:.2f}".format)],
        ["auto over the best, worst batch", "0.98", cell({"worst": worst}, "worst", "{:.2f}".format)],
    ]
    return table(["what", "aim", "measured"], lines)


# ---- the program -----------------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=24.0, help="time of all benchmarks (%(default)s)")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md from docs/gpu.json")
    parser.add_argument("--toy", action="store_true", help="toy sizes, as without a GPU")
    options = parser.parse_args(words)
    if options.page:
        (DOCS / "gpu.md").write_text(page(FULL, json.loads((DOCS / "gpu.json").read_text())))
        return
    import torch  # takes seconds

    size, out = (FULL, DOCS) if torch.cuda.is_available() and not options.toy else (TOY, TOY_OUT)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        Path(folder, RECIPE).write_text(json.dumps(whole_run(size)))
        results = run_all(plan(size, f"{folder}/demo", folder), 60 * options.minutes, call_vitray)
    results.pop("dataset")
    (out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "gpu.md").write_text(page(size, results))
    if size is FULL:
        measured = with_threshold(json.loads(THRESHOLDS.read_text()), results["branches"])
        THRESHOLDS.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"wrote {out / 'gpu.json'} and {out / 'gpu.md'}")
    if size is TOY:
        print("these are toy sizes, and docs/gpu.md is as it was")
    if errors := [name for name, result in results.items() if "error" in result]:
        sys.exit(f"without a result: {', '.join(errors)}")


if __name__ == "__main__":
    main()
