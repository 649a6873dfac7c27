"""docs/gpu.md from the results of experiments/gpu_report.py, and the sizes of both."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MISSING = "-"

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
    quick: Sequence[str]
    """More options, of the benchmarks of many networks at many batch sizes."""
    batch: int
    images: int
    """Synthetic images that are decoded."""
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
    quick=["--rounds", "5", "--seconds", "0.1"],
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
    quick=[],
    batch=4,
    images=48,
    steps=60,
    workers=2,
)


# ---- the page --------------------------------------------------------------------------------------------------------

HEAD = """# A GPU, measured

`python experiments/gpu_report.py` measures one GPU in less than 25 minutes: training steps with MFU and peak memory,
eager and compiled, a whole run beside its steps, stems, latency, parallel branches, attention-only fine-tuning,
decoding and prediction. It writes this page and `experiments/gpu.json`, which has the JSON of each benchmark. Each
number is a median ± half the interquartile range of interleaved rounds. Without a GPU the same benchmarks run at toy
size, and the page stays as it is. `vitray bench NAME` and `experiments/measure_predict.py` run one of them.
"""
UNMEASURED = """
No GPU has been measured yet, so there are no numbers here.
"""
BRANCHES = """
images/s of inference. Sequential, the same blocks one after the other, is another network, and not a choice of auto;
the last column is auto over the better of loop and fused.
"""


def page(size: Size, results: Results) -> str:
    """Return the Markdown of the results; what was not measured is left out, and what failed is listed."""
    rows = rows_of(results)
    run, augmented = shares(size, results)
    compiled = _training(size.compiled, rows.get("train_compiled", []))
    reduced = _training(size.compiled, rows.get("train_reduced", []))
    whole = _whole(size, results, run, augmented)
    eager_ms, graph_ms = (_latency(size, rows.get("latency", []), variant) for variant in ("eager", "graph"))
    decoding = _pipelines([*rows.get("ingest", []), *rows.get("ingest_places", [])], "cpu_us")
    prediction = _pipelines(rows.get("predict", []), "share_of_bound")
    errors = [f"- `{name}`: {result['error']}" for name, result in results.items() if "error" in result]
    errors += [
        f"- `{name}`, `{row['model']}`: {row['error']}"
        for name, found in rows.items()
        for row in found
        if "error" in row
    ]
    # A heading, and the texts and tables below it: a text stays if the table after it has rows.
    sections = [
        ("Training", [("", _training(size.models, rows.get("train", [])))]),
        ("Compiled training", [("\n`compute.compile=default`:\n", compiled)]),
        ("Training with CUDA graphs", [("\n`compute.compile=reduce-overhead`:\n", reduced)]),
        ("A whole run", [("\nIts images are decoded once; 3-Augment runs on the device:\n", whole)]),
        ("Stems", [("", _training(size.stems, rows.get("train_stems", [])))]),
        ("Latency", [("\nms of a forward pass, by images in a batch:\n", eager_ms)]),
        ("Latency as a CUDA graph", [("", graph_ms)]),
        ("Parallel branches", [(BRANCHES, _branches(size, rows.get("branches", [])))]),
        ("Attention-only fine-tuning", [("", _finetuning(rows.get("finetune", [])))]),
        ("Decoding", [("".join(_about(results, "ingest", "ingest_places")), decoding)]),
        ("Prediction", [("".join(_about(results, "predict")), prediction)]),
        ("Aims, for an H100", [("", _aims(rows, run, augmented))]),
        ("Failed", [("\n", "\n".join(errors) + "\n" if errors else "")]),
    ]
    text = HEAD + (_hardware(results) if results else UNMEASURED)
    for heading, parts in sections:
        body = "".join(intro + content for intro, content in parts if content)
        text += f"\n## {heading}\n{body}" if body else ""
    return text


def rows_of(results: Results) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return the rows of each measurement."""
    return {name: result.get("rows", []) for name, result in results.items()}


def table(head: Sequence[str], lines: Sequence[Sequence[str]], labels: int = 1) -> str:
    """Return a table in Markdown of the lines that have a number beside their labels; nothing if none has."""
    lines = [line for line in lines if any(text != MISSING for text in line[labels:])]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(["", *rows, ""]) if lines else ""


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
        return ""
    memory = f", {measured['device_bytes'] / 2**30:.0f} GiB" if measured["device_bytes"] else ""
    versions = ", ".join(f"{name} {text}" for name, text in measured["versions"].items())
    return f"\nHardware: {measured['hardware']}{memory}, {measured['cores']} CPU cores. Versions: {versions}.\n"


def _training(models: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for model in models:
        row = _row(rows, model=model)
        numbers = [cell(row, "vitray"), cell(row, "ratio", "{:.2f}".format), cell(row, "mfu", _percent)]
        largest = cell(row, "largest_batch", "{:,.0f}".format)
        lines.append([f"`{model}`", *numbers, cell(row, "peak_bytes", _gigabytes), largest])
    return table(["model", "images/s", "over a bare step", "MFU", "peak memory", "largest batch"], lines)


def _whole(size: Size, results: Results, run: Mapping[str, Any] | None, augmented: Mapping[str, Any] | None) -> str:
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
    return table(["model", "batch", *names.values(), "auto / best"], lines, labels=2)


def _finetuning(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for mode in ("full", "attn"):
        row = _row(rows, mode=mode)
        share = "{:.2f}".format
        numbers = [cell(row, "seconds", "{:.3g} s".format), cell(row, "seconds_ratio", share)]
        numbers += [cell(row, f"{name}_bytes", _gigabytes) for name in ("peak", "activations")]
        lines.append([mode, *numbers, cell(row, "peak_ratio", share)])
    return table(["trains", "a step", "over full", "peak memory", "activations", "peak over full"], lines)


def _about(results: Results, *names: str) -> list[str]:
    """Return the circumstances of some measurements: images, batches, and the processes that decode."""
    return [f"\n{results[name]['about']}.\n" for name in names if "about" in results.get(name, {})]


def _pipelines(rows: Sequence[Mapping[str, Any]], other: str) -> str:
    head = {"cpu_us": "CPU us an image", "share_of_bound": "over the bound"}[other]
    text: Callable[[float], str] = "{:.4g}".format
    lines = [[row["pipeline"], cell(row, "images_per_second", text), cell(row, other, text)] for row in rows]
    return table(["pipeline", "images/s", head], lines)


def _aims(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], run: Mapping[str, Any] | None, augmented: Mapping[str, Any] | None
) -> str:

    def best(model: str, name: str) -> dict[str, Any] | None:
        numbers = [
            row.get(name)
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
        ["a whole run of ViT-S/16 over its steps", "0.97", cell(run, "ratio", "{:.3f}".format)],
        ["steps with 3-Augment on the device over steps without", "0.97", cell(augmented, "ratio", "{:.3f}".format)],
        ["auto over sequential, S-18x2, batch 1", "1.40", cell(gain, "auto_over_seq", "{:.2f}".format)],
        ["auto over the best, worst batch", "0.98", cell({"worst": worst}, "worst", "{:.2f}".format)],
    ]
    return table(["what", "aim", "measured"], lines, labels=2)
