"""docs/gpu.md, from the rows of experiments/gpu_report.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

HEAD = """# A GPU, measured

`python -m experiments.gpu_report` measures one GPU in eight minutes, from a bare checkout: it needs torch, torchvision,
numpy, pyarrow, Pillow, PyYAML, psutil, safetensors and pydantic, and neither Ray nor MLflow. It writes this page,
`experiments/gpu.json`, and the number of elements up to which `model.execution=auto` fuses branches. Each number is a
median ± half the interquartile range of interleaved rounds, in bfloat16 at 224 px unless it says otherwise. Without a
GPU, `--out FOLDER` runs everything at toy size.
"""
UNMEASURED = """
No GPU has been measured yet, so there are no numbers here.
"""
MISSING = "-"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


Format = Callable[[float], str]
NUMBER: Format = "{:.4g}".format
RATIO: Format = "{:.2f}".format
STEP = {"images_per_second": ("images/s", NUMBER), "mfu": ("MFU", _percent)}
SPEED = {"images_per_second": ("images/s", NUMBER), "speed": ("over the first", RATIO)}


class Section(NamedTuple):
    """A table of the page: its heading, the columns that name a row, and those with numbers."""

    heading: str
    labels: Sequence[str]
    numbers: Mapping[str, tuple[str, Format]]
    text: str = ""


_MS = {"autocast_ms": ("fp32 weights, autocast", NUMBER), "bf16_ms": ("bf16 weights, autocast", NUMBER)}
_BRANCHES = {name: (name.replace("_", ", CUDA "), NUMBER) for name in ("seq", "loop", "fused", "auto")}
_BRANCHES |= {f"{name}_graph": (f"{name}, CUDA graph", NUMBER) for name in ("seq", "loop", "fused")}
SECTIONS = {
    "steps": Section("Training steps", ["network", "batch"], STEP | {"peak_bytes": ("peak memory", _gigabytes)}),
    "compiled": Section(
        "Compiled training steps", ["network", "batch"], STEP | {"first_step_s": ("first step, s", NUMBER)}
    ),
    "branches": Section(
        "Parallel branches",
        ["network", "batch"],
        _BRANCHES | {"auto_over_seq": ("auto over seq", RATIO)},
        "images/s of inference; seq is the same blocks in sequence, which is another network.",
    ),
    "drop_path": Section("Drop path of 0.4", ["network", "variant"], SPEED, "A step, with samples left out or not."),
    "residual": Section(
        "Residual stream",
        ["network", "variant"],
        SPEED,
        "A step whose blocks add in fp32, and in bf16 (`model.residual`).",
    ),
    "optimizers": Section("Optimizers", ["network", "variant"], SPEED),
    "attention_only": Section(
        "Attention-only fine-tuning",
        ["network", "batch", "variant"],
        {"seconds": ("s", NUMBER), "time": ("over full", RATIO)},
        "A step at 384 px.",
    ),
    "latency": Section("Latency", ["network", "batch"], _MS | {"graph_ms": ("as a CUDA graph", NUMBER)}, "ms."),
    "whole_run": Section("A whole run", ["network"], SPEED, "The loop of every run, from pixels in memory."),
    "augmentation": Section(
        "3-Augment on the device", ["network"], {**SPEED, "speed": ("over plain crops", RATIO)}, "A step."
    ),
    "stems": Section("Stems", ["network", "variant"], SPEED, "A step."),
}


class Aim(NamedTuple):
    """A number to reach on an H100: the best of some rows."""

    text: str
    wanted: str
    parts: Sequence[str]
    rows: Mapping[str, Any]
    number: str
    format: Format = NUMBER
    best: Callable[..., float] = max


TRAINED = ("steps", "compiled")
AIMS = [
    Aim("images/s of ViT-S/16 in training", ">= 8,000", TRAINED, {"network": "vit_s12x1_16"}, "images_per_second"),
    Aim("MFU of ViT-B/16", ">= 35 %", TRAINED, {"network": "vit_b12x1_16"}, "mfu", _percent),
    Aim("MFU of ViT-L/16", ">= 40 %", TRAINED, {"network": "vit_l24x1_16"}, "mfu", _percent),
    Aim("auto over sequential, batch 1", ">= 1.40", ("branches",), {"batch": 1}, "auto_over_seq", RATIO, min),
    Aim("a step of attention alone over all", "<= 0.80", ("attention_only",), {"variant": "attn"}, "time", RATIO),
]


def page(report: Mapping[str, Any]) -> str:
    """Return the Markdown of a report; what was not measured is left out, and what failed is listed."""
    if not report.get("rows"):
        return HEAD + UNMEASURED
    memory = f", {report['device_bytes'] / 2**30:.0f} GiB" if report["device_bytes"] else ""
    versions = ", ".join(f"{name} {text}" for name, text in report["versions"].items())
    text = HEAD + f"\nHardware: {report['hardware']}{memory}, {report['cores']} CPU cores. Versions: {versions}.\n"
    for name, section in SECTIONS.items():
        rows = [row for row in report["rows"] if row["part"] == name]
        numbers = {key: each for key, each in section.numbers.items() if any(row.get(key) is not None for row in rows)}
        head = [*section.labels, *(label for label, _ in numbers.values())]
        lines = [
            [*(str(row[label]) for label in section.labels), *(_cell(row, key, numbers[key][1]) for key in numbers)]
            for row in rows
        ]
        if lines:
            about = f"\n{section.text}\n" if section.text else ""
            text += f"\n## {section.heading}\n{about}\n{_table(head, lines)}"
    aims = [[aim.text, aim.wanted, value] for aim in AIMS if (value := _reached(aim, report["rows"]))]
    if aims:
        text += f"\n## Aims, for an H100\n\n{_table(['what', 'aim', 'measured'], aims)}"
    if report["errors"]:
        text += "\n## Not measured\n\n" + "".join(f"- `{name}`: {why}\n" for name, why in report["errors"].items())
    return text


def _reached(aim: Aim, rows: Sequence[Mapping[str, Any]]) -> str | None:
    values = [
        row[aim.number]
        for row in rows
        if row["part"] in aim.parts and aim.rows.items() <= row.items() and row.get(aim.number) is not None
    ]
    return aim.format(aim.best(values)) if values else None


def _cell(row: Mapping[str, Any], name: str, text: Format) -> str:
    """Return a number with its spread if it has one."""
    value, spread = row.get(name), row.get(f"{name}_spread")
    if value is None:
        return MISSING
    return text(value) if spread is None else f"{text(value)} ± {text(spread)}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join([*rows, ""])
