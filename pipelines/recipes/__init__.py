"""The recipes that vitray brings, by name."""

import re
from pathlib import Path

from vitray.errors import ConfigError, nearest

HERE = Path(__file__).parent


def names() -> list[str]:
    """Their names, in order."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def path_of(recipe: str) -> Path:
    """Return the path of a file, or else of the recipe of this name."""
    # Names first: a name that is longer than file systems allow makes `exists` raise.
    is_ours = recipe in names() and not Path(recipe).exists()
    if not is_ours and re.fullmatch(r"\w{1,100}", recipe) and not Path(recipe).exists():
        raise ConfigError(f"no recipe {recipe!r}, and no file{nearest(recipe, names())}")
    return HERE / f"{recipe}.yaml" if is_ours else Path(recipe)
