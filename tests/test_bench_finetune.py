"""The fine-tuning benchmark: its memory numbers agree with the tensors that exist."""

import json
from pathlib import Path

import pytest
import torch

from pipelines.__main__ import main
from vitray.bench.finetune import Variant, allocated, measure_memory, recipe

CPU = torch.device("cpu")


def tiny(mode):
    return Variant(recipe("vit_u2x1_8", mode, 4, 32, "fp32"), CPU)


def test_allocations_are_counted_at_the_peak_and_at_the_end():
    held = torch.zeros(1000)

    def call():
        wide = held.repeat(8)  # 8
        both = wide.relu()  # 16
        del wide
        return both[:1000].relu()  # 9, and 1 when `both` goes

    assert allocated(call, CPU) == (16 * 4000, 4000)


def test_activations_are_the_tensors_that_autograd_keeps():
    variant = tiny("full")
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = variant.loss()
    outside = {tensor.data_ptr() for tensor in [*variant.task.parameters(), variant.images, variant.targets]}
    by_autograd = sum(storage.nbytes() for place, storage in saved.items() if place not in outside)
    assert loss.requires_grad
    assert allocated(variant.loss, CPU)[1] == pytest.approx(by_autograd, rel=0.01)


def test_memory_adds_up():
    variant = tiny("attn")
    costs = measure_memory(variant, CPU)
    trained = 4 * sum(parameter.numel() for parameter in variant.task.parameters() if parameter.requires_grad)
    weights = 4 * sum(parameter.numel() for parameter in variant.task.parameters())
    assert costs["gradients"] == trained
    # Two moments, and a step count for each tensor.
    assert 2 * trained < costs["optimizer"] < 2 * trained + 4 * 100
    assert costs["peak"] > weights + costs["optimizer"] + max(costs["activations"], costs["gradients"])


def test_it_measures_and_draws(tmp_path, capsys):
    args = ["--model", "vit_u2x2_8", "--image-size", "32", "--batch", "4", "--rounds", "2", "--seconds", "0.01"]
    assert main(["bench", "finetune", *args, "--out", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert all(Path(file).stat().st_size for file in result["files"])
    rows = {row["mode"]: row for row in result["rows"]}
    assert list(rows) == ["full", "attn", "ffn", "head", "attn+feedforward"]
    assert all(f"| {mode} " in out for mode in rows)
    first = rows["full"]
    assert {first[name] for name in first if name.endswith("_ratio")} == {1.0}
    for cost in ("peak", "activations", "gradients", "optimizer"):
        assert rows["head"][f"{cost}_bytes"] < rows["attn"][f"{cost}_bytes"] < first[f"{cost}_bytes"]
    assert rows["attn+feedforward"]["activations_bytes"] < rows["attn"]["activations_bytes"]
    assert rows["attn+feedforward"]["gradients_bytes"] == rows["attn"]["gradients_bytes"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--modes", "full,atn"], "task.mode: got 'atn'"),
        (["--modes", "full+block"], "compute.activation_checkpointing: got 'block'"),
        (["--model", "vit_q2"], "model name 'vit_q2'"),
    ],
)
def test_invalid_settings_are_rejected(args, message, capsys):
    assert main(["bench", "finetune", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_batch_of_nothing_is_rejected(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "finetune", "--batch", "0"])
    assert "--batch: got '0', expected a whole number from 1" in capsys.readouterr().err
