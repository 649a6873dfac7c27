"""Back up MLflow's SQLite databases outside the head node: mlflow_store.py save|restore FOLDER DESTINATION."""

import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from vitray.system import storage


def save(folder: Path, destination: str) -> list[str]:
    """Upload a consistent copy of every database while the server keeps writing; return their names."""
    names = sorted(path.name for path in folder.glob("*.db"))
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            copy = Path(temporary) / name
            with closing(sqlite3.connect(folder / name)) as live, closing(sqlite3.connect(copy)) as snapshot:
                live.backup(snapshot)
            storage.upload(copy, storage.join(destination, name))
    return names


def restore(folder: Path, destination: str) -> list[str]:
    """Download the databases that do not exist locally; return their names. Local ones are newer and stay."""
    names = [name for name in storage.list_files(destination) if name.endswith(".db") and not (folder / name).exists()]
    for name in names:
        with (
            storage.local_copy(storage.join(destination, name)) as copy,
            storage.atomic_write(str(folder / name)) as target,
        ):
            target.write_bytes(copy.read_bytes())
    return names


if __name__ == "__main__":
    verb, folder, destination = sys.argv[1:]
    names = {"save": save, "restore": restore}[verb](Path(folder), destination)
    print(f"{verb}: {', '.join(names) or 'nothing'}")
