"""The files of a folder as the package that a job runs in."""

import subprocess
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from vitray.errors import ConfigError

# Folders that are never sent from a folder outside git.
EXCLUDED_FOLDERS = {".git", ".venv", "venv", "__pycache__", "node_modules"}
MEGABYTE = 1e6
# Bytes of the largest upload that Ray's dashboard accepts (DASHBOARD_CLIENT_MAX_SIZE).
UPLOAD_LIMIT = 100 * 1024**2


class PackageFiles(NamedTuple):
    """The files of a package: their sizes by their names relative to the folder."""

    folder: Path
    sizes: dict[str, int]
    skipped: list[str]
    """Links to folders, submodules and sockets, which a package cannot hold."""

    @property
    def total(self) -> int:
        """Size of the package in bytes: zip stores each file uncompressed, and its name twice."""
        return sum(size + 2 * len(name.encode()) + 150 for name, size in self.sizes.items())


def list_files(folder: Path) -> PackageFiles:
    """Return the files to send: tracked files, plus untracked files that git does not ignore."""
    names = _git_files(folder)
    if names is None:
        paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
        names = [str(path) for path in paths if not EXCLUDED_FOLDERS & set(path.parts)]
    sizes: dict[str, int] = {}
    skipped: list[str] = []
    for name in sorted(set(names)):
        path = folder / name
        if path.is_file():
            sizes[name] = path.stat().st_size
        elif path.exists():  # a tracked file that was deleted needs no mention
            skipped.append(name)
    return PackageFiles(folder, sizes, skipped)


def _git_files(folder: Path) -> list[str] | None:
    """Return the names that git lists, less those in .rayignore; None outside a repository or without git."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others"]
    try:
        listing = subprocess.run([*command, "--exclude-standard"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if listing.returncode:
        if "not a git repository" in listing.stderr:
            return None
        raise ConfigError(f"{folder}: git cannot list it: {' '.join(listing.stderr.split())[:300]}")
    names = [name for name in listing.stdout.split("\0") if name]
    if not (folder / ".rayignore").is_file():
        return names
    # Ray's own file for tracked files that a job does not need.
    ignored = subprocess.run([*command, "--ignored", "--exclude-from=.rayignore"], capture_output=True, text=True)
    return [name for name in names if name not in set(ignored.stdout.split("\0"))]


def check_size(files: PackageFiles) -> None:
    """Raise a ConfigError if the package is larger than a cluster accepts."""
    if files.total < UPLOAD_LIMIT:
        return
    totals: Counter[str] = Counter()
    for name, size in files.sizes.items():
        top, slash, _ = name.partition("/")
        totals[top + slash] += size
    largest = ", ".join(f"{name} ({size / MEGABYTE:,.1f} MB)" for name, size in totals.most_common(5))
    raise ConfigError(
        f"{files.folder}: {files.total / MEGABYTE:,.1f} MB in {len(files.sizes)} files, and a cluster takes"
        f" {UPLOAD_LIMIT / MEGABYTE:,.0f} MB; the largest: {largest}; put data on s3://, and name files"
        " that a job does not need in .gitignore, or in .rayignore if git tracks them"
    )


def write_package(files: PackageFiles, target: Path) -> None:
    """Write the zip file; the same files give the same bytes, so a cluster that has them gets no second upload."""
    with zipfile.ZipFile(target, "w") as package:
        for name in files.sizes:
            path = files.folder / name
            entry = zipfile.ZipInfo(name)  # dated 1980, since modification times would change the bytes
            entry.external_attr = (path.stat().st_mode & 0o777 | 0o100000) << 16
            package.writestr(entry, path.read_bytes())
