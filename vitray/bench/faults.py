"""python -m vitray.bench.faults: what a fault costs in vitray and in other training stacks, as docs/faults.md.

Cells that have a JSON in experiments/faults/cells are not run again. Everything is made on first use: an environment
for each stack (about 2 GB each), the images, an undisturbed run of each stack.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from vitray.bench.fault_cells import FAULTS, run_cell, write_result
from vitray.bench.fault_page import faults_page
from vitray.bench.fault_setup import machine, make_environment, make_images, make_mds, versions_of
from vitray.bench.fault_subjects import ROOT, SCRIPTS, SUBJECTS, Place, Settings, python_of
from vitray.errors import ConfigError, RunError, nearest

CELLS, PAGE = SCRIPTS / "cells", ROOT / "docs" / "faults.md"
UNDISTURBED = "undisturbed"


def main(args: list[str]) -> None:
    """Run the missing cells and write the page."""
    parser = argparse.ArgumentParser(prog="python -m vitray.bench.faults", description=__doc__)
    parser.add_argument("--stacks", default=",".join(SUBJECTS), help="which, separated by commas (%(default)s)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which, separated by commas (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench_out/faults"), help="folder of all files (%(default)s)")
    parser.add_argument("--timm", type=Path, help="train.py of timm's repository, at the version of the package")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args(args)
    if not SCRIPTS.exists():
        raise ConfigError(f"{SCRIPTS}: not there; run this in a clone")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes of the cell too
    stacks = chosen("--stacks", options.stacks, SUBJECTS)
    faults = chosen("--faults", options.faults, FAULTS)
    if not options.page:
        run_cells(stacks, faults, options.work.absolute(), options.timm and options.timm.absolute())
    PAGE.write_text(faults_page(read_cells(CELLS)))
    print(PAGE)


def chosen(option: str, text: str, known: dict[str, Any]) -> list[str]:
    """Return the names of an option."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: got {name!r}, expected some of {', '.join(known)}{nearest(name, known)}")
    return names


def run_cells(stacks: list[str], faults: list[str], work: Path, timm: Path | None) -> None:
    """Run the cells that have no JSON, fault by fault."""
    settings, data = Settings(), work / "data"
    make_images(data, settings)
    for fault in faults:
        for name in stacks:
            path = CELLS / f"{name}-{fault}.json"
            if path.exists():
                continue
            if name == "timm" and timm is None:
                print("timm: skipped, as its package does not hold train.py; see --timm", file=sys.stderr)
                continue
            make_environment(name, work)
            if name == "composer":
                make_mds(data, work)
            python = python_of(name, work)
            place, before = (
                Place(data, work / "runs" / f"{name}-{each}", python, timm) for each in (fault, UNDISTURBED)
            )
            try:
                if not (before.folder / "final.safetensors").exists():
                    print(f"{name}: an undisturbed run", file=sys.stderr)
                    run_cell(name, "none", before, None, settings)
                print(f"{name}: {fault}", file=sys.stderr)
                result = run_cell(name, fault, place, before, settings)
            except RunError as error:  # a person looks at it; the other cells go on
                print(f"vitray: {error}", file=sys.stderr)
                continue
            facts = {"versions": versions_of(name, work), "machine": machine(), "date": time.strftime("%Y-%m-%d")}
            write_result(path, result | facts)


def read_cells(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the measured cells."""
    cells = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {(cell["subject"], cell["fault"]): cell for cell in cells}


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, RunError) as error:
        print(f"vitray: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
