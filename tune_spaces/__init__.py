"""The built-in search spaces, by name."""

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """Return the names, sorted."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def path_of(space: str) -> Path:
    """Return the path of a file or of a built-in space."""
    # Names first: a name that is longer than file systems allow makes `exists` raise.
    is_ours = space in names() and not Path(space).exists()
    return HERE / f"{space}.yaml" if is_ours else Path(space)
