"""The recipes that vitray brings, by name."""

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """Their names, in order."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def path_of(recipe: str) -> Path:
    """A file, or else the recipe of this name."""
    brought = HERE / f"{recipe}.yaml"
    return brought if brought.exists() and not Path(recipe).exists() else Path(recipe)
