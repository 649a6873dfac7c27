"""Memory while batches are read more slowly than they are decoded: it must not grow with the dataset."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from vitray.bench.ingest.processes import tree_cpu_seconds
from vitray.bench.measure import circumstances, write_csv
from vitray.stream import Cursor, Share, Stream

MIB = 2**20


class Peaks:
    """The most that was seen of each kind of memory, in bytes."""

    def __init__(self) -> None:
        self.store = self.spilled = self.this_process = self.a_task = 0

    def look(self, processes: list[int]) -> None:
        """Look once, at these processes."""
        here = get_state_from_address(ray.get_runtime_context().gcs_address)
        stats = get_memory_info_reply(here).store_stats
        self.store = max(self.store, stats.object_store_bytes_used)
        self.spilled = max(self.spilled, stats.spilled_bytes_total)
        self.this_process = max(self.this_process, _heap(Path("/proc/self")))
        for folder in (Path(f"/proc/{process}") for process in processes):
            with suppress(OSError):  # it has just ended
                if b"_decode_item" in (folder / "cmdline").read_bytes():
                    self.a_task = max(self.a_task, _heap(folder))


def _heap(process: Path) -> int:
    """Memory of its own: neither the object store nor the files that it maps."""
    lines = (process / "status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


@contextmanager
def _watched() -> Iterator[Peaks]:
    peaks, ended = Peaks(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            peaks.look([*tree_cpu_seconds()])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def measure_memory(stream: Stream, images: int, pause: float, store: int, out: Path) -> dict[str, Any]:
    """Read an epoch with a pause after each batch; print and return the peaks, in MiB."""
    start = time.perf_counter()
    with _watched() as peaks:
        skipped = stream.steps - images // stream.batch
        for _ in stream.train(Cursor(0, skipped), Share(0, 1)):
            time.sleep(pause)
    assert min(peaks.store, peaks.a_task) > 0, "the memory of this Ray could not be looked at"
    row: dict[str, Any] = {
        "decoded": images * stream.size[0] * stream.size[1] * 3 / MIB,
        "object_store": store / MIB,
        "peak_object_store": peaks.store / MIB,
        "spilled_to_disk": peaks.spilled / MIB,
        "heap_of_consumer": peaks.this_process / MIB,
        "heap_of_a_task": peaks.a_task / MIB,
    }
    row = {name: round(value, 1) for name, value in row.items()}
    where = circumstances(torch.device("cpu"))
    seconds = time.perf_counter() - start
    about = (
        f"{images} images to {stream.size[0]} px, batches of {stream.batch}, {pause:g} s after each, {seconds:.0f} s"
    )
    print(f"{where}\n{about}\n")
    for name, value in row.items():
        print(f"{name:<20}{value:>10} MiB")
    write_csv(out / "memory.csv", [row])
    print(f"\nwrote {out / 'memory.csv'}")
    return {"circumstances": where, "about": about, "rows": [row], "files": [str(out / "memory.csv")]}
