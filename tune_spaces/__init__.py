"""The spaces of sweeps that vitray brings, by name."""

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """Their names, in order."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def path_of(space: str) -> Path:
    """A file, or else the space of this name."""
    brought = HERE / f"{space}.yaml"
    return brought if brought.exists() and not Path(space).exists() else Path(space)
