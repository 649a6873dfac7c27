"""What a benchmark writes: its table as CSV and JSON with hardware and versions, and its chart."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitray.pages.files import csv_text
from vitray.system import host_facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Results:
    """The rows of a benchmark, with hardware and versions; saved after each row, since a long one may be stopped."""

    def __init__(self, path: Path, device: torch.device, about: Mapping[str, Any]) -> None:
        """`path` is that of the files, without a suffix."""
        self._path, self._device, self._about = path, device, about
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Save one more row."""
        self.rows.append(row)
        self._write_json({"rows": self.rows, "is_partial": True})

    def finish(self, more: Mapping[str, Any] | None = None, chart: "Figure | None" = None) -> dict[str, Any]:
        """Write all files, print their paths, and return all of the JSON; `more` enters it too."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        table = [names, *([row.get(name) for name in names] for row in self.rows)]
        files = [self._file("csv")]
        files[0].parent.mkdir(parents=True, exist_ok=True)
        files[0].write_text(csv_text(table), newline="")
        if chart is not None:
            from vitray.pages.plotting import to_png

            files.append(self._file("png"))
            files[-1].write_bytes(to_png(chart))
        files.append(self._file("json"))
        record = self._write_json({**(more or {}), "rows": self.rows, "files": [str(file) for file in files]})
        print(f"\nwrote {', '.join(record['files'])}")
        return record

    def _file(self, suffix: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{suffix}")

    def _write_json(self, content: Mapping[str, Any]) -> dict[str, Any]:
        facts, is_gpu = host_facts.facts(), self._device.type == "cuda"
        record = {
            "device": self._device.type,
            "hardware": torch.cuda.get_device_name(self._device) if is_gpu else facts["hardware.cpu"],
            "device_bytes": torch.cuda.get_device_properties(self._device).total_memory if is_gpu else None,
            "threads": torch.get_num_threads(),
            "cores": facts["hardware.cores"],
            "versions": {name.removeprefix("version."): text for name, text in facts.items() if "version." in name},
            "commit": facts.get("git.commit"),
            **self._about,
            **content,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file("json").write_text(json.dumps(record, indent=1) + "\n")
        return record
