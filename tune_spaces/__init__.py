"""The built-in search spaces, by name."""

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """Return the names, sorted."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def path_of(space: str) -> Path:
    """Return the path of a file or of a built-in space."""
    brought = HERE / f"{space}.yaml"
    return brought if brought.exists() and not Path(space).exists() else Path(space)
