"""Backups of MLflow's databases: made during writes, and restored only where no database exists."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from vitray.system import storage

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("backup", ["{tmp}/kept", "s3://bucket/kept-{name}"])
def test_mlflow_databases_are_restored_after_the_loss_of_the_head(tmp_path, s3_server, monkeypatch, backup):
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    import mlflow_store

    backup = backup.format(tmp=tmp_path, name=tmp_path.name)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    assert mlflow_store.restore(after, backup) == []
    with closing(sqlite3.connect(before / "mlflow.db")) as live:
        live.execute("create table runs (name)")
        live.execute("insert into runs values ('first')")
        live.commit()
        live.execute("insert into runs values ('not yet committed')")  # the server still writes during the backup
        assert mlflow_store.save(before, backup) == ["mlflow.db"]
    assert mlflow_store.restore(after, backup) == ["mlflow.db"]
    with closing(sqlite3.connect(after / "mlflow.db")) as restored:
        assert restored.execute("select name from runs").fetchall() == [("first",)]
    storage.write_bytes(str(after / "mlflow.db"), b"newer")
    assert mlflow_store.restore(after, backup) == []
    assert (after / "mlflow.db").read_bytes() == b"newer"
