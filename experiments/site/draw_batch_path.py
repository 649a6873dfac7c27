"""python experiments/site/draw_batch_path.py: draw docs/images/batch_path.svg, from shards to MLflow."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

STEPS = (
    # title, lines, module, x, y
    ("Shards", "Parquet row groups:\nimage bytes, label, key", "data/shards", 0, 1),
    ("Decode and crop", "CPU tasks of Ray Data;\nuint8 images", "data/stream, data/augment", 1, 1),
    ("Augment", "batch on the device:\nerase, mixup, CutMix", "data/augment", 2, 1),
    ("Train step", "loss = task(*batch);\nbackward, step", "training, tasks, models", 3, 1),
    ("Checkpoint", "safetensors and JSON,\nevery N steps", "training, storage", 3, 0),
    ("Mailbox", "metrics of all workers,\none actor per run", "runs", 2, 0),
    ("Spool and upload", "on disk first, then sent\nin order, once", "tracking", 1, 0),
    ("MLflow", "metrics, figures,\nregistered model", "tracking", 0, 0),
)
ARROWS = ((0, 1), (1, 2), (2, 3), (3, 4), (3, 5), (5, 6), (6, 7))
COLORS = ("#dbe9f6", "#dbe9f6", "#fde6ce", "#fde6ce", "#e3f1de", "#e3f1de", "#e3f1de", "#e3f1de")
WIDTH, HEIGHT, GAP_X, GAP_Y = 2.3, 1.25, 2.8, 2.0


def main() -> None:
    """Draw the boxes and arrows, and write the picture."""
    pyplot.rcParams |= {"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "vitray"}
    figure, axes = pyplot.subplots(figsize=(11.2, 4.2))
    centers = [(x * GAP_X, y * GAP_Y) for *_, x, y in STEPS]
    for (title, text, module, *_), (x, y), color in zip(STEPS, centers, COLORS, strict=True):
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        box = FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle="round,pad=0.05", facecolor=color, edgecolor="#555555")
        axes.add_patch(box)
        axes.text(x, y + 0.4, title, ha="center", va="center", fontsize=12, fontweight="bold")
        axes.text(x, y - 0.02, text, ha="center", va="center", fontsize=10)
        axes.text(x, y - 0.48, module, ha="center", va="center", fontsize=9, color="#555555", style="italic")
    for start, end in ARROWS:
        (x1, y1), (x2, y2) = centers[start], centers[end]
        across = (x2 > x1) - (x2 < x1)
        down = y2 < y1
        if across and down:
            points = (x1 - WIDTH / 2, y1 - HEIGHT / 2), (x2 + WIDTH / 2, y2 + HEIGHT / 2)
        elif down:
            points = (x1, y1 - HEIGHT / 2 - 0.06), (x2, y2 + HEIGHT / 2 + 0.06)
        else:
            points = (x1 + across * (WIDTH / 2 + 0.06), y1), (x2 - across * (WIDTH / 2 + 0.06), y2)
        axes.add_patch(FancyArrowPatch(*points, arrowstyle="-|>", mutation_scale=16, color="#333333"))
    legend = "blue: CPUs of the cluster; orange: training workers; green: driver and storage"
    axes.text(centers[3][0] / 2, -1.15, legend, ha="center", fontsize=10, color="#333333")
    axes.set(xlim=(-1.4, centers[3][0] + 1.4), ylim=(-1.35, GAP_Y + 0.85))
    axes.axis("off")
    path = Path(__file__).parents[2] / "docs" / "images" / "batch_path.svg"
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
