"""MLflow's databases, copied while they are written and brought back where they are not."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from vitray import storage

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("kept", ["{tmp}/kept", "s3://bucket/kept-{name}"])
def test_mlflows_records_outlive_the_head(tmp_path, s3_server, monkeypatch, kept):
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    import mlflow_store

    kept = kept.format(tmp=tmp_path, name=tmp_path.name)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    assert mlflow_store.restore(after, kept) == []
    with closing(sqlite3.connect(before / "mlflow.db")) as live:
        live.execute("create table runs (name)")
        live.execute("insert into runs values ('first')")
        live.commit()
        live.execute("insert into runs values ('not yet committed')")  # the server goes on writing meanwhile
        assert mlflow_store.save(before, kept) == ["mlflow.db"]
    assert mlflow_store.restore(after, kept) == ["mlflow.db"]
    with closing(sqlite3.connect(after / "mlflow.db")) as found:
        assert found.execute("select name from runs").fetchall() == [("first",)]
    storage.write_bytes(str(after / "mlflow.db"), b"newer")
    assert mlflow_store.restore(after, kept) == []
    assert (after / "mlflow.db").read_bytes() == b"newer"
