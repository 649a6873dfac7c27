"""Keep MLflow's SQLite databases where they outlive the head: mlflow_store.py save|restore FOLDER DESTINATION."""

import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from vitray import storage


def save(folder: Path, destination: str) -> list[str]:
    """Copy every database as it is at one moment, while the server goes on writing; their names."""
    names = sorted(path.name for path in folder.glob("*.db"))
    with tempfile.TemporaryDirectory() as aside:
        for name in names:
            copy = Path(aside) / name
            with closing(sqlite3.connect(folder / name)) as live, closing(sqlite3.connect(copy)) as still:
                live.backup(still)
            storage.upload(copy, storage.join(destination, name))
    return names


def restore(folder: Path, destination: str) -> list[str]:
    """Bring back the databases that are not here; their names. What is here is newer, and stays."""
    names = [name for name in storage.list_files(destination) if name.endswith(".db") and not (folder / name).exists()]
    for name in names:
        with storage.local_copy(storage.join(destination, name)) as copy, storage.created(str(folder / name)) as aside:
            aside.write_bytes(copy.read_bytes())
    return names


if __name__ == "__main__":
    verb, place, kept = sys.argv[1:]
    done = {"save": save, "restore": restore}[verb](Path(place), kept)
    print(f"{verb}: {', '.join(done) or 'nothing'}")
