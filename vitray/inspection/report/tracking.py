"""Inspections as runs in MLflow: one for each network, linked to its training run and its registered version."""

import hashlib
import json
from collections.abc import Mapping

from vitray.inference.images import ImageSet
from vitray.inspection.report.page import PAGE, Inspection, images_text, network_text
from vitray.inspection.report.subjects import Subject
from vitray.system import host_facts, storage
from vitray.tracking.lineage import TrackedDataset, experiment_of
from vitray.tracking.tracker import TrackedRun, Tracker


def track_inspection(inspection: Inspection, folder: str, files: Mapping[str, bytes]) -> None:
    """Log the files of an inspection's folder for each network; a repeated inspection continues its run."""
    for subject in inspection.subjects:
        tags = {"vitray.kind": "inspection", "vitray.home": storage.absolute(folder)} | host_facts.facts()
        description = _description(inspection, subject)
        with Tracker(
            _identity(inspection, subject, folder), _params(inspection, subject), tags, description
        ) as tracker:
            if (dataset := _dataset(inspection)) is not None:
                tracker.datasets([dataset])
            tracker.link(subject.spec.url, description)
            log_files(tracker, files)


def log_files(tracker: Tracker, files: Mapping[str, bytes]) -> None:
    """Log the files of an inspection as artifacts of a run."""
    for name, content in files.items():
        if name == PAGE:
            tracker.text(f"inspection/{name}", content.decode())
        else:
            tracker.figure(f"inspection/{name}", content)


def _identity(inspection: Inspection, subject: Subject, folder: str) -> TrackedRun:
    images = inspection.images
    parts = [storage.absolute(folder), subject.spec.key, subject.spec.url, inspection.command]
    parts += [] if images is None else [images.identity]
    uid = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    name = f"inside {subject.name}" + (f" on {images.name}" if images else "")
    return TrackedRun(uid, name, experiment_of(subject.spec.url))


def _dataset(inspection: Inspection) -> TrackedDataset | None:
    images = inspection.images
    if images is None or not isinstance(images.source, ImageSet):
        return None
    name, url = f"{images.source.name}/{images.source.split}", images.source.url
    return TrackedDataset(name, images.identity, url, "evaluation", images.total, len(images.classes))


def _params(inspection: Inspection, subject: Subject) -> dict[str, str]:
    spec, images = subject.spec, inspection.images
    params = {"model": spec.url, "network": spec.network, "identity": spec.identity, "command": inspection.command}
    return params if images is None else params | {"data": images.origin, "data_identity": images.identity}


def _description(inspection: Inspection, subject: Subject) -> str:
    over = "" if inspection.images is None else f" over {images_text(inspection.images)} ({inspection.images.origin})"
    figures = ", ".join(result.title for result in inspection.results)
    return f"`{subject.spec.url}`, {network_text(subject)}{over}\n\n{figures}\n\n`{inspection.command}`"
