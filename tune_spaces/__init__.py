"""The built-in search spaces, by name."""

import re
from pathlib import Path

from vitray.errors import ConfigError, nearest

HERE = Path(__file__).parent


def names() -> list[str]:
    """Return the names, sorted."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def path_of(space: str) -> Path:
    """Return the path of a file, or else of the space of this name."""
    # Names first: a name that is longer than file systems allow makes `exists` raise.
    is_ours = space in names() and not Path(space).is_file()
    if not is_ours and re.fullmatch(r"\w{1,100}", space) and not Path(space).is_file():
        raise ConfigError(f"no space {space!r}, and no file{nearest(space, names())}")
    return HERE / f"{space}.yaml" if is_ours else Path(space)
