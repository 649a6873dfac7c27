"""`vitray bench family`: its table, and the bytes that it states."""

import csv
from pathlib import Path

import torch

from vitray.bench.families import FamilySettings, build_family, measure_family
from vitray.config import load_run

MODEL = "vit_u2x1_8"


def test_the_table_of_a_family_has_all_variants_and_the_bytes(tmp_path, capsys):
    result = measure_family(FamilySettings(MODEL, deltas=3, batch=4, image_size=32, rounds=2, out=tmp_path))
    rows = {row["variant"]: row for row in result["rows"]}
    assert list(rows) == ["one model", "family, one task", "family, mixed", "family, task by task"]
    assert rows["one model"]["ratio"] == 1
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in result["rows"])
    [table] = result["files"]
    with Path(table).open() as file:
        assert [row["variant"] for row in csv.DictReader(file)] == list(rows)
    family = build_family(load_run(None, [f"model.name={MODEL}", "model.image_size=32"]), 3, torch.device("cpu"))
    attention = sum(tensor.nbytes for name, tensor in family.base.items() if ".attn" in name)
    assert result["bytes"] == sum(tensor.nbytes for tensor in family.base.values()) + 3 * attention
    assert "memory:" in capsys.readouterr().out
