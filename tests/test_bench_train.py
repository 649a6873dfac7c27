"""The training benchmark measures a step and writes its table."""

import json

from pipelines.__main__ import main


def test_a_training_step_is_measured(tmp_path, capsys):
    args = ["--models", "vit_u2x1_8", "--image-size", "32", "--batch", "2", "--rounds", "2", "--seconds", "0.05"]
    assert main(["bench", "train", *args, "--out", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row[column] > 0 for column in ("vitray", "bare", "ratio"))
    assert (tmp_path / "train_step_cpu_fp32.csv").read_text().startswith("model,vitray,bare,ratio,mfu\nvit_u2x1_8,")
