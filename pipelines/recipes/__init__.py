"""The recipes that vitray brings, by name."""

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """Their names, in order."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def path_of(recipe: str) -> Path:
    """A file, or else the recipe of this name."""
    # Names first: a name that is longer than file systems allow makes `exists` raise.
    is_ours = recipe in names() and not Path(recipe).exists()
    return HERE / f"{recipe}.yaml" if is_ours else Path(recipe)
