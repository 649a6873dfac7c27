"""`vitray export`: a network as files of another runtime or library, with a proof of its equality.

export.json         target, network, identity, input and output, opset and versions; written last
parity.json         differences from the network over images, and the latency of both
preprocessing.json  the steps from an encoded image to the input
classes.json        class names, or null
"""

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitray.cluster.storage_check import check_outlives_job
from vitray.config import Run
from vitray.config.parsing import parse_overrides
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError, RunError
from vitray.exports import graphs
from vitray.exports.folding import fold
from vitray.exports.libraries import write_for_library
from vitray.exports.options import TARGETS, ExportRequest, check_network, check_request, package_versions
from vitray.exports.parity import MOST_OTHERS, Parity, Runner, compare_logits, measure_latency, views
from vitray.exports.preparation import preprocessing_of
from vitray.inference.images import ImageSet, open_images
from vitray.inference.models import short_name
from vitray.models.network import AnyNetwork
from vitray.models.probabilities import probability_of
from vitray.system import host_facts, storage
from vitray.system.timing import circumstances, progress
from vitray.weights import identity_of, open_weights
from vitray.weights.addresses import pin_uri

FORMAT = 1


class Export(NamedTuple):
    """A written export."""

    path: str
    parity: Parity
    latency: dict[str, dict[str, float]] | None
    """By batch size; None if other processes were busy meanwhile."""
    circumstances: str

    def flat(self) -> dict[str, Any]:
        """Return the values of `--json`."""
        parity = self.parity
        return {
            "path": self.path,
            "max_logit_difference": parity.max_logit_difference,
            "changed_top1": parity.changed_top1,
            "images": parity.images,
        }

    def text(self) -> str:
        """Return the proof in a few lines."""
        parity = self.parity
        lines = [
            f"largest logit difference {parity.max_logit_difference:.2g} (largest logit {parity.largest_logit:.3g}),"
            f" top-1 changed for {parity.changed_top1} of {parity.images:,} images"
        ]
        if self.latency is None:
            lines.append("latency: not measured, as other processes were using the CPUs")
        for batch, row in (self.latency or {}).items():
            before, after = (f"{row[name]:.4g} ± {row[f'{name}_spread']:.2g} ms" for name in ("before_ms", "after_ms"))
            lines.append(f"batch {batch}: {before} before, {after} after")
        return "\n".join([*lines, self.circumstances, self.path])


def export_network(request: ExportRequest) -> Export:
    """Write an export and return it; refuse one whose top-1 changes exceed the bound, and leave nothing then."""
    out = request.out or f"exports/{short_name(request.model)}-{request.target}"
    check_outlives_job(out)
    check_request(request, out)
    url = pin_uri(request.model)
    run, vit, classes = open_weights(url, parse_overrides(request.settings))
    check_network(request, vit.model)
    images = open_images(request.data, request.split)
    identity = identity_of(vit.state_dict())
    vit.requires_grad_(False)
    with storage.scratch_folder() as scratch, torch.no_grad():
        folder = scratch / "export"
        folder.mkdir()
        progress(f"writing {request.target}")
        after = _write(request, run, vit, classes, folder)
        proof = _prove(request, run, vit, after, images)
        export = Export(out, proof.parity, proof.latency, circumstances(torch.device("cpu")))
        described = _described(request, url, vit, identity)
        described["output"]["probabilities"] = probability_of(run)
        for name, content in {
            "classes": None if classes is None else list(classes),
            "preprocessing": _preprocessing(request, run, vit),
            "parity": proof.content | {"circumstances": export.circumstances, "versions": described["versions"]},
            "export": described,
        }.items():
            (folder / f"{name}.json").write_text(f"{json.dumps(content, indent=1)}\n")
        _publish(folder, out)
    return export


class _Proof(NamedTuple):
    """The content of parity.json, but for the circumstances."""

    parity: Parity
    latency: dict[str, dict[str, float]] | None
    content: dict[str, Any]


def _write(request: ExportRequest, run: Run, vit: AnyNetwork, classes: Sequence[str] | None, folder: Path) -> Runner:
    """Write the files of the network and return a runner that has read them."""
    if not (file := TARGETS[request.target].file):
        return write_for_library(vit, run, request.target, folder, classes)
    network = fold(vit, run.data.normalize, any_size=request.any_size, int8_weights=request.int8 == "weights")
    program = graphs.trace_program(network, vit.model.image_shape, _any_multiple_of(request, vit))
    return graphs.GRAPHS[request.target](program, folder / file, request.int8)


def _prove(request: ExportRequest, run: Run, vit: AnyNetwork, after: Runner, images: ImageSet) -> _Proof:
    """Compare an export with its network over the images."""

    def before(images_BCHW: Tensor) -> Tensor:
        return vit(normalized(images_BCHW.permute(0, 2, 3, 1), run.data.normalize))

    size = vit.model.image_shape
    sizes = [size]
    if request.any_size:
        sizes.append((size[0] + vit.model.shape.patch, size[1]))
    progress(f"comparing {min(request.images, len(images)):,} images")
    parity = compare_logits(before, after, views(images, request.images, sizes, run.data.eval_crop))
    if parity.changed_share > request.bound and not request.allow:
        raise RunError(
            f"{request.model} --to {request.target}: top-1 changed for {parity.changed_top1} of {parity.images} images"
            f" ({parity.changed_share:.2%}), expected at most {request.bound:.2%}: nothing is written. Raise --bound,"
            " or add --allow"
        )
    progress("measuring the latency")
    measured, others = measure_latency(before, after, size, request.rounds, request.seconds)
    latency = measured if others <= MOST_OTHERS else None
    drawn = "drawn" if request.data == "demo" else "real"
    content = parity.flat() | {"bound": request.bound, "allowed_above": request.allow, "sizes": sizes}
    content |= {"data": request.data, "split": request.split, "data_identity": images.identity, "kind": drawn}
    content |= {"latency": latency, "rounds": request.rounds, "used_by_others": round(others, 3)}
    return _Proof(parity, latency, content)


def _described(request: ExportRequest, url: str, vit: AnyNetwork, identity: str) -> dict[str, Any]:
    """The content of export.json."""
    versions = {name.removeprefix("version."): value for name, value in host_facts.versions().items()}
    return {
        "format": FORMAT,
        "target": request.target,
        "network": vit.model.name,
        "settings": vit.model.model_dump(mode="json"),
        "source": url,
        "identity": identity,
        "int8": request.int8,
        "opset": graphs.OPSET if request.target == "onnx" else None,
        "output": {"name": graphs.OUTPUT, "shape": ["any", vit.model.num_classes]},
        "versions": versions | package_versions(request.target),
    }


def _preprocessing(request: ExportRequest, run: Run, vit: AnyNetwork) -> dict[str, Any]:
    in_graph, patch = TARGETS[request.target].file is not None, _any_multiple_of(request, vit)
    return preprocessing_of(run, vit.model.image_shape, in_graph=in_graph, any_multiple_of=patch)


def _any_multiple_of(request: ExportRequest, vit: AnyNetwork) -> int | None:
    return vit.model.shape.patch if request.any_size else None


def _publish(folder: Path, out: str) -> None:
    """Move a whole folder to its address: on a path it appears at once, on S3 its export.json comes last."""
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: name == "export.json")
    is_remote = storage.is_remote(out)
    final = Path(storage.absolute(out))
    target = out if is_remote else str(final.with_name(f".writing-{uuid.uuid4().hex}"))
    try:
        for name in names:
            storage.upload(folder / name, storage.join(target, name))
        if not is_remote:
            os.rename(target, final)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
    finally:
        if not is_remote:
            shutil.rmtree(target, ignore_errors=True)
