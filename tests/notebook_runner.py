"""python tests/notebook_runner.py NOTEBOOK: run its code cells in order in this folder, as Jupyter would; but a cell
of bash ends at the first command that fails.

With other arguments it is `vitray`. $VITRAY_SMALL, as JSON, holds texts in place of those of cells, settings in place
of those of trainings, and those of the run `long`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def small() -> dict[str, dict[str, str]]:
    return {"texts": {}, "settings": {}, "long": {}} | json.loads(os.environ.get("VITRAY_SMALL", "{}"))


def run_notebook(path: Path) -> None:
    """Run the cells, and print the number and the seconds of each."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        text = "".join(cell["source"])
        for large, other in small()["texts"].items():
            text = text.replace(large, other)
        start = time.monotonic()
        print(f"### {path.stem}-{number}", flush=True)
        if text.startswith("%%bash\n"):
            subprocess.run(["bash", "-ec", text.removeprefix("%%bash\n")], check=True)
        else:
            exec(compile(text, f"{path.stem}-{number}", "exec"), variables)
        print(f"### {time.monotonic() - start:.1f} s", flush=True)


def run_vitray(words: list[str]) -> int:
    """Run a verb; a training has the small settings."""
    from pipelines.__main__ import main

    if {"train", "sweep"} & set(words[:3]):
        settings = small()["settings"] | (small()["long"] if "long" in words else {})
        kept = [word for word in words if word.partition("=")[0] not in settings]
        words = kept + [f"{name}={value}" for name, value in settings.items()]
    return main(words)


if __name__ == "__main__":
    if sys.argv[1].endswith(".ipynb"):
        run_notebook(Path(sys.argv[1]))
    else:
        raise SystemExit(run_vitray(sys.argv[1:]))
