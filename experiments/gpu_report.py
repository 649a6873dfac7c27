"""python experiments/gpu_report.py [--minutes 24]: measure one GPU, and write experiments/gpu.json and docs/gpu.md.

Each benchmark is a process with a share of the time; the later ones share what it does not use. Without a GPU the same
benchmarks run at toy size and their page goes to bench_out/gpu_toy, since their numbers say nothing of a GPU.
`--page` writes docs/gpu.md from experiments/gpu.json alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_page import FULL, TOY, Size, page

HERE = Path(__file__).parent
TOY_OUT = Path("bench_out/gpu_toy")
PAGE = HERE.parent / "docs" / "gpu.md"
THRESHOLDS = HERE.parent / "vitray" / "models" / "auto_thresholds.json"
RECIPE = "whole_run.yaml"


class Measurement(NamedTuple):
    """A command of `vitray`, or a script of this folder."""

    name: str
    arguments: Sequence[str]
    weight: float
    """Its share of the time, relative to the other measurements."""


def plan(size: Size, dataset: str, out: str) -> list[Measurement]:
    """Return the measurements, in their order."""
    has_gpu = size is FULL
    train = ["bench", "train", "--batch", str(size.batch), *size.options]
    batches = ["--batches", ",".join(map(str, size.batches)), *size.options, *size.quick]
    decoding = ["--image-size", size.options[1], "--rounds", "3" if has_gpu else "1", "--batch", str(size.batch)]
    workers = ["--workers", str(size.workers)] if size.workers else []
    predicted = ["--images", str(size.images)]
    largest = ["--largest-batch"] if has_gpu else []
    forward = ["--models", ",".join(dict.fromkeys([*size.models, *size.stems])), *batches]
    measurements = [
        ("dataset", ["shard", "demo", dataset, f"images={size.images}", f"image_size={256 if has_gpu else 40}"], 4),
        ("train", [*train, *largest, "--models", ",".join(size.models)], 5),
        ("train_stems", [*train, *largest, "--models", ",".join(size.stems)], 4),
        ("train_compiled", [*train, "--compile", "--models", ",".join(size.compiled)], 6),
        ("train_reduced", [*train, "--compile", "reduce-overhead", "--models", ",".join(size.compiled)], 6),
        ("train_augmented", [*train, "--augment", "three_augment", "--models", size.stems[0]], 1),
        ("run", ["train", f"{out}/{RECIPE}", f"data.url={dataset}", "--name", "whole", "--out", f"{out}/runs"], 3),
        ("latency", ["bench", "latency", *forward], 5),
        ("branches", ["bench", "branches", "--models", ",".join(size.parallel), *batches], 3),
        ("finetune", ["bench", "finetune", "--model", size.finetuned, "--modes", "full,attn", *size.options], 1),
        ("ingest", ["bench", "ingest", dataset, *decoding, *workers], 2),
        ("ingest_places", ["bench", "ingest", dataset, "--augment", "three_augment", *decoding], 1),
        ("predict", ["measure_predict.py", dataset, "--model", size.finetuned, *decoding, *workers, *predicted], 6),
    ]
    chosen = [Measurement(*each) for each in measurements if size.compiled or "--compile" not in each[1]]
    return [
        each._replace(
            arguments=[
                *each.arguments,
                "--json",
                *(["--out", f"{out}/{each.name}"] if each.arguments[0] in ("bench", "measure_predict.py") else []),
            ]
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
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield all results so far after each measurement, which takes at most its share of the seconds that are left."""
    end, results = clock() + seconds, {}
    for number, each in enumerate(measurements):
        share = each.weight / sum(later.weight for later in measurements[number:])
        limit = max(0.0, end - clock()) * share
        print(f"{each.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        results[each.name] = call(each.arguments, limit)
        print(f"{each.name}: {results[each.name].get('error', 'done')}", file=sys.stderr, flush=True)
        yield results


def call_vitray(arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """Return the JSON of a command, or its error with the rows that it had saved."""
    words = [str(HERE / arguments[0])] if arguments[0].endswith(".py") else ["-m", "pipelines", arguments[0]]
    command = [sys.executable, *words, *arguments[1:]]
    variables = os.environ | {"PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:  # MLflow's store of the whole run
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return saved_rows(arguments) | {"error": f"took more than its {limit:.0f} s"}
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return saved_rows(arguments) | {"error": f"ended with {done.returncode}: {message}"}
    return json.loads(done.stdout.splitlines()[-1])


def saved_rows(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what a benchmark had saved before it was stopped."""
    folder = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else None
    saved = sorted(folder.glob("*.json")) if folder else []
    return json.loads(saved[0].read_text()) if saved else {}


def with_threshold(measured: Sequence[Mapping[str, Any]], branches: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the limits that `auto` reads, with that of a result of `bench branches` for its hardware."""
    if "fused_elements" not in branches:
        return list(measured)
    new = {name: branches[name] for name in ("device", "hardware", "versions", "fused_elements")}
    new["source"] = f"experiments/gpu_report.py: vitray bench branches, {branches['mode']}, {branches['image_size']} px"
    others = [each for each in measured if (each["device"], each["hardware"]) != (new["device"], new["hardware"])]
    return [*others, new]


def write(size: Size, results: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Write the results as JSON and as a page; of the synthetic images only an error."""
    kept = {name: result for name, result in results.items() if name != "dataset" or "error" in result}
    (out / "gpu.json").write_text(json.dumps(kept, indent=1) + "\n")
    (PAGE if size is FULL else out / "gpu.md").write_text(page(size, kept))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=24.0, help="time of all benchmarks (%(default)s)")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md from experiments/gpu.json")
    parser.add_argument("--toy", action="store_true", help="toy sizes, as without a GPU")
    options = parser.parse_args(arguments)
    if options.page:
        PAGE.write_text(page(FULL, json.loads((HERE / "gpu.json").read_text())))
        return
    import torch  # takes seconds

    size, out = (FULL, HERE) if torch.cuda.is_available() and not options.toy else (TOY, TOY_OUT)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        Path(folder, RECIPE).write_text(json.dumps(whole_run(size)))
        results = {}
        for results in run_all(plan(size, f"{folder}/demo", folder), 60 * options.minutes, call_vitray):
            write(size, results, out)
    if size is FULL:
        measured = with_threshold(json.loads(THRESHOLDS.read_text()), results["branches"])
        THRESHOLDS.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"wrote {out / 'gpu.json'} and {PAGE if size is FULL else f'{out}/gpu.md; docs/gpu.md is as it was'}")
    if errors := [name for name, result in results.items() if "error" in result]:
        sys.exit(f"without a result: {', '.join(errors)}")


if __name__ == "__main__":
    main()
