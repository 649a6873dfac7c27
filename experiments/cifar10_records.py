"""The records of the sweeps of CIFAR-10: a row for each trial, in experiments/cifar10_results.json."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cifar10_rates import check_settings
from cifar10_texts import SWEEPS

import tune_spaces
from vitray.runs.run_dir import OUTCOME
from vitray.sweeps.plan import SWEEP_META
from vitray.sweeps.space import read_space
from vitray.sweeps.trial_store import read_entries, read_record
from vitray.system import storage
from vitray.system.host_facts import facts

NOTHING = {"machines": {}, "trials": [], "stages": [], "labels": [], "views": []}
PROBES = ("linear", "few_shot", "knn")
COSTS = ("device_seconds", "model_bytes", "peak_memory_bytes", "images_per_second")


def collect(sweeps: str, known: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return the known records, updated with those of the sweeps and label probes in SWEEPS."""
    records = {key: known.get(key, rows).copy() for key, rows in NOTHING.items()}
    for name, recipe, overrides in SWEEPS:
        sweep_dir = storage.join(sweeps, name)
        if storage.exists(storage.join(sweep_dir, SWEEP_META)):
            check_settings(sweep_dir, recipe, overrides)
            trials = [{"sweep": name} | row for row in trial_rows(sweep_dir)]
            if any(row not in records["trials"] for row in trials):
                records["machines"][name] = machine_facts()
            records["trials"] = merged(records["trials"], trials, "trial")
            records["stages"] = merged(records["stages"], stage_rows(sweep_dir, name), "stage")
    for name in ("labels", "views"):
        path = storage.join(sweeps, name, "results.json")
        if storage.exists(path):
            records[name] = []
            for scores in storage.read_json(path)["models"]:
                kept = {key: value for key, value in scores.items() if key.startswith(PROBES)}
                records[name].append({"model": network_of(scores["url"], sweeps), **kept})
    return records


def merged(known: list[dict[str, Any]], new: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return the known rows updated by key, then the new keys' rows; a row of fewer runs does not replace one."""
    rows = {(row["sweep"], row[key]): row for row in known}
    for row in new:
        place = row["sweep"], row[key]
        if row.get("runs", 0) >= rows.get(place, {}).get("runs", 0):
            rows[place] = row
    return list(rows.values())


def machine_facts() -> dict[str, str]:
    """Return versions and hardware; the commit that reads the records is not the one that trained."""
    return {name: value for name, value in facts().items() if name.startswith(("version.", "hardware."))}


def trial_rows(sweep_dir: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each finished trial of a sweep."""
    for name, entry in read_entries(sweep_dir).items():
        run_dir = storage.join(sweep_dir, name)
        path = storage.join(run_dir, OUTCOME)
        outcome = storage.read_json(path) if storage.exists(path) else {}
        if outcome.get("state") == "finished":
            record = read_record(run_dir)
            times = None if record.began is None or record.ended is None else record.ended - record.began
            costs = {field: outcome.get(field) for field in COSTS}
            yield {
                "trial": name,
                "drawn": {key: value for key, value in entry.point.drawn.items() if key != "rate"},
                "rate": entry.point.settings.get("optim.lr"),
                "top1": outcome.get("val_top1"),
                "steps": outcome["steps"],
                "wall_seconds": times and round(times, 1),
                "curve": outcome["curves"].get("val/top1", []),
                **{field: value if value is None else round(value, 1) for field, value in costs.items()},
            }


def stage_rows(sweep_dir: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the cost of each stage of a sweep."""
    for stage in read_space(tune_spaces.path_of(name)).before:
        rows = list(trial_rows(storage.join(sweep_dir, "before", stage)))
        seconds = [sum(row[field] or 0 for row in rows) for field in ("device_seconds", "wall_seconds")]
        yield {
            "sweep": name,
            "stage": stage,
            "runs": len(rows),
            "device_seconds": seconds[0],
            "wall_seconds": seconds[1],
        }


def network_of(url: str, sweeps: str) -> str:
    """Return the address of a network below SWEEPS, without the folder of the model."""
    return url.removeprefix(storage.absolute(sweeps)).strip("/").removesuffix("/model")


def records_text(records: Mapping[str, Any]) -> str:
    """Return records as JSON, a row a line."""
    parts = []
    for name, content in records.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in content) if isinstance(content, list) else ""
        parts.append(f'"{name}": ' + (f"[\n{lines}\n]" if lines else json.dumps(content)))
    return "{\n" + ",\n".join(parts) + "\n}\n"
