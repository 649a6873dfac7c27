"""Costs of a network: latency, memory, and arithmetic relative to the device's peak."""

import resource
import time
from statistics import quantiles

import torch
import torch.distributed as dist

from vitray.config import Run
from vitray.models.network import AnyNetwork
from vitray.training.evaluator import autocast

# Timed forward passes, after the same number of warm-up passes.
PASSES = 10
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
    """Return the forward latency of one image on this device, and the peak memory of any worker.

    The latency is the median of the timed passes, beside its quartiles: other processes of the machine slow some.
    """
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
    q25, middle, q75 = quantiles(times[PASSES:], n=4, method="inclusive")
    latency = {"latency_ms": middle, "latency_ms_q25": q25, "latency_ms_q75": q75, "latency_passes": float(PASSES)}
    return latency | {"peak_memory_bytes": _peak_memory(device)}


def _peak_memory(device: torch.device) -> float:
    """Return torch's peak reserved memory on a GPU, the process's peak memory on a CPU."""
    if device.type == "cuda":
        peak = float(torch.cuda.max_memory_reserved(device))
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # Linux counts in KiB
    highest = torch.tensor(peak, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(highest, dist.ReduceOp.MAX)
    return highest.item()


def peak_flops(device: str, precision: str) -> float | None:
    """Return the peak of a device by its name; None for an unknown device."""
    words = {*device.replace("-", " ").split()}
    return next((peak[precision] for name, peak in PEAK_FLOPS.items() if words.issuperset(name.split())), None)
