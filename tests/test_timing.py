"""What is timed in interleaved rounds: warm, compiled, cast and prepared alike."""

import pytest
import torch

from vitray.bench import branches, networks
from vitray.bench.branches import measure_branches
from vitray.bench.networks import measure_latency, measure_networks
from vitray.bench.train import random_batch, recipe, training_step
from vitray.system import timing
from vitray.system.timing import in_rounds, interleave

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def timed_calls(monkeypatch, device, **options):
    """Return the number of calls in each timed slice of a variant, as interleave makes them."""
    slices, timed = [], timing._timed

    def watched(variant, calls, _device):
        slices.append(calls)
        return timed(variant, calls, CPU) and 0.25  # seconds

    monkeypatch.setattr(timing, "_timed", watched)
    interleave({"only": lambda: None}, 2, 1.0, device, **options)
    return slices


def test_calls_are_counted_when_a_compiled_network_has_recorded_its_graphs(monkeypatch):
    """Under reduce-overhead the first call compiles, and the second one records a CUDA graph."""
    assert timed_calls(monkeypatch, CPU) == [1, 1, 0, 4, 0, 4]
    assert timed_calls(monkeypatch, CUDA)[:2] == [3, 1]


def test_untimed_calls_precede_those_that_are_timed(monkeypatch):
    assert timed_calls(monkeypatch, CPU, untimed=3) == [1, 1, 3, 4, 3, 4]


def test_variants_take_turns_and_each_is_first_in_some_rounds():
    order = []
    variants = {name: lambda number, name=name: order.append((number, name)) or number for name in "abc"}
    assert in_rounds(variants, 3, warm_up=1) == {name: [1, 2, 3] for name in "abc"}
    assert "".join(name for _, name in order) == "abc" + "bca" + "cab" + "abc"
    assert [number for number, _ in order] == sorted([0, 1, 2, 3] * 3)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_step_computes_products_as_precisely_as_a_run(allowed):
    run = recipe("vit_u1x1_8", 2, 16, "fp32", False).replace({"compute.tf32": allowed})
    training_step(run, random_batch(run, CPU))
    assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")


@pytest.fixture
def compilations(monkeypatch):
    """The number of networks that are compiled after each reset of torch's compiler; none is really compiled."""
    counts = []

    def compiled(network, mode, dynamic=None):
        counts[-1] += 1
        return network

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "reset", lambda: counts.append(0))
    return counts


def test_each_batch_size_is_compiled_anew(compilations, monkeypatch, tmp_path):
    """torch stops after 8 versions of the same code, and then runs it uncompiled without an error."""
    monkeypatch.setattr(networks, "interleave", run_once)
    measure_latency(["vit_u1x1_8"], [1, 2, 3], 16, "fp32", "default", 1, 0.01, tmp_path)
    assert compilations == [1, 1, 1]


def test_each_execution_of_branches_is_compiled_anew_at_each_batch_size(compilations, monkeypatch, tmp_path):
    monkeypatch.setattr(branches, "interleave", run_once)
    measure_branches(["vit_u1x2_8"], [1, 2], 16, "fp32", "default", False, 1, 0.01, tmp_path)
    assert compilations == [4, 4]


def test_each_trained_network_is_compiled_anew(compilations):
    run = recipe("vit_u1x1_8", 2, 16, "fp32", "default")
    for _ in range(2):
        training_step(run, random_batch(run, CPU))
    assert compilations == [1, 1]


@pytest.mark.slow
def test_more_networks_are_compiled_than_torch_does_by_itself(monkeypatch, tmp_path):
    compile_for, graphs = torch.compile, []

    def count(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda network, **_: compile_for(network, dynamic=False, backend=count))
    monkeypatch.setattr(networks, "interleave", run_once)
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", 8)  # torch's own, which other benchmarks raise
    names = [f"vit_u{depth}x1_8" for depth in range(1, 11)]
    measure_networks(names, 1, 16, "fp32", "default", False, 1, 0.01, tmp_path)
    assert len(graphs) == len(names)


def run_once(variants, *_):
    """Call each variant, and return a speed for it."""
    for variant in variants.values():
        variant()
    return {name: [1.0] for name in variants}


@pytest.mark.parametrize("is_training", [False, True])
def test_the_weights_of_all_executions_are_cast_once_in_inference(is_training, monkeypatch, tmp_path):
    shared = []

    def watched(variants, *_):
        shared.append(torch.is_autocast_enabled("cpu"))
        return {name: [1.0] for name in variants}

    monkeypatch.setattr(branches, "interleave", watched)
    measure_branches(["vit_u1x2_8"], [1], 16, "bf16", False, is_training, 1, 0.01, tmp_path)
    assert shared == [not is_training]
