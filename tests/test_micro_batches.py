"""Gradient accumulation, the sums of a record, and the peak of a device: arithmetic of the training loop."""

import pytest
import torch

from vitray.config import load_run
from vitray.training.loop import all_reduce_metrics
from vitray.training.profiling import peak_flops
from vitray.training.schedule import micro_batches


@pytest.mark.parametrize("mix", ["{}", "{mixup: 0.8}"])
@pytest.mark.parametrize("images", [1, 2, 7, 10, 64, 256])
@pytest.mark.parametrize("most", [None, 1, 2, 3, 5, 64, 300])
def test_no_part_of_a_batch_exceeds_the_local_batch(images, most, mix):
    run = load_run(None, [f"compute.local_batch={'null' if most is None else most}", f"data.mix={mix}"])
    parts = micro_batches(images, run)
    assert [number for part in parts for number in range(part.start, part.stop)] == list(range(images))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) <= (most or images) or (run.data.mix.is_mixing and max(sizes) == 2)
    if run.data.mix.is_mixing:
        assert all(size % 2 == 0 for size in sizes[:-1])
    else:
        assert len(sizes) == -(-images // (most or images))


def test_losses_and_counts_are_summed_together():
    unread = {4: torch.tensor([0.5, 2.0]), 5: torch.tensor([0.25, 3.0])}
    assert all_reduce_metrics(unread, torch.device("cpu"), [True, 7, 0]) == ([[0.5, 2.0], [0.25, 3.0]], [1, 7, 0])
    assert all_reduce_metrics({}, torch.device("cpu"), [False, 0, 3]) == ([], [0, 0, 3])


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", None),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("CPU", None),
    ],
)
def test_a_device_has_the_peak_of_its_whole_name(device, peak):
    assert peak_flops(device, "bf16") == peak
