"""experiments/measure_family.py: its table, and the bytes that it states."""

import csv
import sys
from pathlib import Path

import torch
from test_layers import ROOT

from vitray.config import load_run

sys.path.insert(0, str(ROOT / "experiments"))
from measure_family import build_family, main

MODEL = "vit_u2x1_8"


def test_the_table_of_a_family_has_all_variants_and_the_bytes(tmp_path, capsys):
    result = main(
        ["--model", MODEL, "--deltas=3", "--batch=4", "--image-size=32", "--rounds=2", "--out", str(tmp_path)]
    )
    rows = {row["variant"]: row for row in result["rows"]}
    assert list(rows) == ["one model", "family, one task", "family, mixed", "family, task by task"]
    assert rows["one model"]["ratio"] == 1
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in result["rows"])
    table, _ = result["files"]
    with Path(table).open() as file:
        assert [row["variant"] for row in csv.DictReader(file)] == list(rows)
    family = build_family(load_run(None, [f"model.name={MODEL}", "model.image_size=32"]), 3, torch.device("cpu"))
    attention = sum(tensor.nbytes for name, tensor in family.base.items() if ".attn" in name)
    assert result["bytes"] == sum(tensor.nbytes for tensor in family.base.values()) + 3 * attention
    assert "memory:" in capsys.readouterr().out
