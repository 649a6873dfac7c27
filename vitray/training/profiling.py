"""Costs of a network: latency, memory, and arithmetic relative to the device's peak."""

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from vitray.config import Run
from vitray.models.network import AnyNetwork
from vitray.training.evaluator import autocast

# Fewest timed forward passes, and their fewest milliseconds: the busy spells of a machine last some.
PASSES, PASSES_MS = 10, 500.0
# Dense FLOPs per second from the makers' data sheets, by words of the device's name; fp32 uses TF32 products.
PEAK_FLOPS = {
    "H100 PCIe": {"fp32": 378e12, "bf16": 756e12},
    "H100 NVL": {"fp32": 417e12, "bf16": 835e12},
    "A100": {"fp32": 156e12, "bf16": 312e12},
    "H100": {"fp32": 494e12, "bf16": 989e12},
    "H200": {"fp32": 494e12, "bf16": 989e12},
    "L4": {"fp32": 60e12, "bf16": 121e12},
    "A10G": {"fp32": 35e12, "bf16": 70e12},
}


def measure_costs(run: Run, vit: AnyNetwork, device: torch.device) -> dict[str, float]:
    """Return the forward latency of one image on this device (a CPU: one thread), and the peak memory of any worker.

    The latency is that of the fastest pass, as other processes of the machine only slow some.
    """
    image_1CHW = torch.zeros((1, 3, *run.model.image_shape), device=device)
    was_training, threads, times = vit.training, torch.get_num_threads(), []
    vit.eval()
    # Each of several threads waits for the others: on two busy cores the fastest of ten passes took 120 ms, not 0.8.
    torch.set_num_threads(1)
    with torch.inference_mode(), autocast(run, device):
        while len(times) < PASSES or sum(times) < PASSES_MS:
            since = time.perf_counter()
            vit(image_1CHW)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(1e3 * (time.perf_counter() - since))
    torch.set_num_threads(threads)
    vit.train(was_training)
    return {"latency_ms": min(times), "peak_memory_bytes": _peak_memory(device)}


def forget_peak_memory(device: torch.device) -> None:
    """Let the peak memory count from now on: this process may have trained before. macOS keeps a process's peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(OSError):  # a sandbox without this file
            Path("/proc/self/clear_refs").write_text("5")


def _peak_memory(device: torch.device) -> float:
    """Return torch's peak reserved memory on a GPU, the process's peak memory on a CPU."""
    if device.type == "cuda":
        peak = float(torch.cuda.max_memory_reserved(device))
    else:
        unit = 1.0 if sys.platform == "darwin" else 1024.0  # Linux counts in KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    highest = torch.tensor(peak, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(highest, dist.ReduceOp.MAX)
    return highest.item()


def peak_flops(device: str, precision: str) -> float | None:
    """Return the peak of a device by its name; None for an unknown device."""
    words = {*device.replace("-", " ").split()}
    return next((peak[precision] for name, peak in PEAK_FLOPS.items() if words.issuperset(name.split())), None)
