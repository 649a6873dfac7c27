"""The networks that come with vitray: `zoo/NAME`, wherever a network has an address.

The name stays an address on every machine, so a fine-tuning kept as a delta of such a network can be read anywhere. A
folder of your own with the same name is `./zoo/NAME`.
"""

from pathlib import Path

from vitray.errors import ConfigError, nearest
from vitray.system import storage

PREFIX = "zoo/"
FOLDER = Path(__file__).parent.parent / "zoo"


def zoo_names() -> list[str]:
    """Return the names of these networks."""
    return sorted(path.parent.name for path in FOLDER.glob("*/run.yaml"))


def zoo_folder(url: str) -> str | None:
    """Return the model folder of a network of vitray, and None for another address; refuse an unknown name."""
    if not url.startswith(PREFIX):
        return None
    name, names = url.removeprefix(PREFIX).rstrip("/"), zoo_names()
    if name in names:
        return str(FOLDER / name)
    if Path(url).exists():
        return None
    expected = ", ".join(f"{PREFIX}{each}" for each in names)
    raise ConfigError(f"{url}: neither a network of vitray nor a path; expected {expected}{nearest(name, names)}")


def check_there(*urls: str) -> None:
    """Refuse a local address of a network where nothing is; those of S3 and MLflow are looked up later."""
    storage.check_there(*(url for url in urls if zoo_folder(url) is None))
