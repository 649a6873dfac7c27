"""The measured costs of a network: a latency that other load of the machine leaves alone."""

from types import SimpleNamespace

import torch

from vitray.config import load_run
from vitray.training import profiling
from vitray.training.profiling import PASSES, measure_costs


def test_one_undisturbed_pass_is_enough_for_the_latency(monkeypatch):
    run, passes, seconds = load_run(None, ["model.name=vit_u1x1_8", "model.image_size=16"]), [], [0.0]

    class Disturbed(torch.nn.Module):
        def forward(self, image_1CHW):
            passes.append((torch.get_num_threads(), self.training))
            seconds[0] += 0.5 if len(passes) == PASSES // 2 else 40.0

    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    network, threads = Disturbed(), torch.get_num_threads()
    assert measure_costs(run, network, torch.device("cpu"))["latency_ms"] == 500.0
    assert passes == [(1, False)] * PASSES
    assert (torch.get_num_threads(), network.training) == (threads, True)
