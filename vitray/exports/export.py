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
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitray.cluster.storage_check import check_outlives_job
from vitray.config.parsing import parse_overrides
from vitray.data.augment.mixing import normalized
from vitray.errors import ConfigError, RunError
from vitray.exports.folding import fold
from vitray.exports.options import TARGETS, ExportRequest, check_network, check_request
from vitray.exports.parity import MOST_OTHERS, Parity, compare_logits, measure_latency, views
from vitray.exports.writers import GRAPHS, OPSET, OUTPUT, preprocessing_of, trace_program, write_for_library
from vitray.inference.images import open_images
from vitray.inference.models import short_name
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
    out, target = request.out or f"exports/{short_name(request.model)}-{request.target}", request.target
    check_outlives_job(out)
    check_request(request, out)
    url = pin_uri(request.model)
    run, vit, classes = open_weights(url, parse_overrides(request.settings))
    check_network(request, vit.model)
    images = open_images(request.data, request.split)
    identity, file, size = identity_of(vit.state_dict()), TARGETS[target].file, vit.model.image_shape
    # The images of an export of any size have sides of any multiple of this.
    patch = vit.model.shape.patch if request.any_size else None
    vit.requires_grad_(False)

    def before(images_BCHW: Tensor) -> Tensor:
        return vit(normalized(images_BCHW.permute(0, 2, 3, 1), run.data.normalize))

    with storage.scratch_folder() as scratch, torch.no_grad():
        folder = scratch / "export"
        folder.mkdir()
        progress(f"writing {target}")
        if file is None:
            after = write_for_library(vit, run, target, folder, classes)
        else:
            network = fold(vit, run.data.normalize, any_size=request.any_size, int8_weights=request.int8 == "weights")
            after = GRAPHS[target](trace_program(network, size, patch), folder / file, request.int8)
        progress(f"comparing {min(request.images, len(images)):,} images")
        sizes = [size] if patch is None else [size, (size[0] + patch, size[1])]
        parity = compare_logits(before, after, views(images, request.images, sizes, run.data.eval_crop))
        if parity.changed_share > request.bound and not request.allow:
            raise RunError(
                f"{request.model} --to {target}: top-1 changed for {parity.changed_top1} of {parity.images} images"
                f" ({parity.changed_share:.2%}), expected at most {request.bound:.2%}: nothing is written. Raise"
                " --bound, or add --allow"
            )
        progress("measuring the latency")
        measured, others = measure_latency(before, after, size, request.rounds, request.seconds)
        latency, conditions = measured if others <= MOST_OTHERS else None, circumstances(torch.device("cpu"))
        versions = {name.removeprefix("version."): value for name, value in host_facts.versions().items()}
        versions |= {name: version(name) for name in (*TARGETS[target].packages, "safetensors", "torchvision")}
        contents = {
            "classes": None if classes is None else list(classes),
            "preprocessing": preprocessing_of(run, size, in_graph=file is not None, any_multiple_of=patch),
            "parity": parity.flat()
            | {
                "bound": request.bound,
                "allowed_above": request.allow,
                "sizes": sizes,
                "data": request.data,
                "split": request.split,
                "data_identity": images.identity,
                "kind": "drawn" if request.data == "demo" else "real",
                "latency": latency,
                "rounds": request.rounds,
                "used_by_others": round(others, 3),
                "circumstances": conditions,
                "versions": versions,
            },
            "export": {
                "format": FORMAT,
                "target": target,
                "network": vit.model.name,
                "settings": vit.model.model_dump(mode="json"),
                "source": url,
                "identity": identity,
                "int8": request.int8,
                "opset": OPSET if target == "onnx" else None,
                "output": {
                    "name": OUTPUT,
                    "shape": ["any", vit.model.num_classes],
                    "probabilities": probability_of(run),
                }
                | ({} if run.thresholds is None else {"thresholds": list(run.thresholds)}),
                "versions": versions,
            },
        }
        for name, content in contents.items():
            (folder / f"{name}.json").write_text(f"{json.dumps(content, indent=1)}\n")
        _publish(folder, out)
    return Export(out, parity, latency, conditions)


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
