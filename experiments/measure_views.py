"""python experiments/measure_views.py: the memory and time of a step by the number of views, ViT-S/16 on a CPU.

Memory is the largest sum of allocations of a step beyond weights and optimizer, by torch's allocator, for two sizes of
batch: their difference is that of an image. Time is that of the larger batch.
"""

import sys
import time
from statistics import median

import torch

from vitray.bench.finetune import allocated
from vitray.config import Run, load_run
from vitray.system.timing import circumstances
from vitray.tasks.build import build_task
from vitray.training.optim import build_optimizer

BATCHES = (2, 4)
VARIANTS = {
    "supervised, 1 view": ("plain_s16_imagenet", {}),
    "DINO, 2 global views": ("dino_s16_imagenet", {"data.views": {"local": None}}),
    "DINO, 2 global and 8 local views": ("dino_s16_imagenet", {}),
    "DINO and iBOT, 2 and 8": ("dino_s16_imagenet", {"task.ibot": 1.0}),
    "LeJEPA, 2 and 8": ("dino_s16_imagenet", {"task": {"kind": "lejepa"}}),
}


def inputs_of(run: Run) -> list[object]:
    """Return random inputs of the loss, of the shapes of a batch of the run."""
    batch, (height, width) = run.optim.batch, run.model.image_shape
    if "views" not in run.task.traits.needs:
        return [torch.randn(batch, 3, height, width), torch.eye(1000)[:batch]]
    views, patch = run.data.chosen_views, run.model.shape.patch
    small = views.small_size((height, width), patch)
    count = views.small.count if views.small else 0
    found: list[object] = [
        torch.randn(batch, views.large.count, 3, height, width),
        torch.randn(batch, count, 3, *small),
    ]
    if "masks" in run.task.traits.needs:
        masks = torch.zeros(batch, views.large.count, height * width // patch**2, dtype=torch.bool)
        masks[:, ::2, : masks.shape[2] * 3 // 10] = True  # half of the views, three tenths of their patches
        found += [masks, int(masks.sum())]
    return found


def measure(recipe: str, changes: dict[str, object], batch: int) -> tuple[int, float]:
    """Return the bytes that a step allocates at its peak, and its seconds."""
    run = load_run(recipe, {"optim.batch": batch, "compute.precision": "fp32", "compute.compile": False} | changes)
    task = build_task(run).train()
    optimizer, inputs = build_optimizer(task, run.optim, torch.device("cpu")), inputs_of(run)
    task.before_step(1, 100, 1000)

    def step() -> None:
        task(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        task.after_step()

    step()
    most, _ = allocated(step, torch.device("cpu"))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return most, median(seconds)


def main() -> int:
    """Print a table."""
    torch.manual_seed(0)
    print(f"{circumstances(torch.device('cpu'))}\n")
    print(
        "| objective | MB of an image | MB of a step at batch 4, beyond weights | ms of an image |\n|---|---|---|---|"
    )
    for name, (recipe, changes) in VARIANTS.items():
        (few, _), (more, seconds) = (measure(recipe, changes, batch) for batch in BATCHES)
        image = (more - few) / (BATCHES[1] - BATCHES[0]) / 1e6
        print(f"| {name} | {image:.0f} | {more / 1e6:.0f} | {1000 * seconds / BATCHES[1]:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
