"""What a trained network takes: the time for one image, and the memory that training it took."""

import resource
import time
from statistics import median

import torch
import torch.distributed as dist

from vitray.config import Run
from vitray.models.vit import ViT
from vitray.train.evaluator import autocast

# Passes that are timed, after as many that warm up.
PASSES = 10


def costs(run: Run, vit: ViT, device: torch.device) -> dict[str, float]:
    """Milliseconds that one image takes forward on this device, and the most bytes that one of the workers took."""
    image_1CHW = torch.zeros((1, 3, *run.model.image_shape), device=device)
    was_training, times = vit.training, []
    vit.eval()
    with torch.inference_mode(), autocast(run, device):
        for _ in range(2 * PASSES):
            since = time.perf_counter()
            vit(image_1CHW)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(1e3 * (time.perf_counter() - since))
    vit.train(was_training)
    return {"latency_ms": median(times[PASSES:]), "peak_memory_bytes": _peak_memory(device)}


def _peak_memory(device: torch.device) -> float:
    """Of a GPU what torch has reserved at most; on a CPU the most that the process ever held."""
    if device.type == "cuda":
        taken = float(torch.cuda.max_memory_reserved(device))
    else:
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # Linux counts in KiB
    most = torch.tensor(taken, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()
