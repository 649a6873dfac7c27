"""The files of an export: a graph (torch.export, ONNX) or those of a library; and the preparation of images.

A writer returns a runner of the network that it reads back from its files.
"""

import json
import logging
import os
import runpy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitray.config import Run
from vitray.data.augment.mixing import normalized
from vitray.exports.parity import Runner
from vitray.models.network import AnyNetwork
from vitray.models.probabilities import probability_of
from vitray.weights.export import LOADER, write_library

OPSET = 20  # the first with Gelu
INPUT, OUTPUT = "images", "logits"


def trace_program(network: nn.Module, size: tuple[int, int], any_multiple_of: int | None = None) -> ExportedProgram:
    """Return the graph of a network over any number of uint8 images (BCHW).

    Their size is fixed, or any multiple of a patch where one is given.
    """
    shape: dict[int, Any] = {0: Dim("batch", min=1)}
    if any_multiple_of is not None:
        shape |= {2: any_multiple_of * Dim("rows", min=1), 3: any_multiple_of * Dim("columns", min=1)}
    # Dynamic dimensions of the example differ, so that torch.export does not take two of them for one.
    height, width = size if any_multiple_of is None else (3 * any_multiple_of, 5 * any_multiple_of)
    example = torch.zeros(2, 3, height, width, dtype=torch.uint8)
    program = torch.export.export(network, (example,), dynamic_shapes=(shape,))
    program.example_inputs = None  # they would be pickled
    return program


def write_torch_export(program: ExportedProgram, path: Path, int8: str | None = None) -> Runner:
    """Write a torch.export archive and return a runner of the file."""
    del int8  # the program has its weights already
    torch.export.save(program, path)
    network = torch.export.load(path).module()
    return lambda images: network(images)


def write_onnx(program: ExportedProgram, path: Path, int8: str | None = None) -> Runner:
    """Write an ONNX file, with its weights beside it above 2 GB, and return a runner by onnxruntime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnxscript and the exporter warn of their own code
        graph: Any = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[OUTPUT],
        )
    graph.save(path)
    if int8 == "dynamic":
        _quantize_dynamically(path)
    return open_onnx(path)


def open_onnx(path: Path) -> Runner:
    """Return a runner of an ONNX file on the CPU, with as many threads as torch has."""
    onnxruntime = _import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (logits,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(logits)

    return run


def _import_onnxruntime() -> Any:
    """Import onnxruntime, an optional package; its import would write a device id and queue events."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def _quantize_dynamically(path: Path) -> None:
    """Quantize the products of an ONNX file to 8-bit integers: the weights here, the activations at run time."""
    _import_onnxruntime()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantized = path.with_name(f"int8_{path.name}")
    logging.disable(logging.WARNING)  # it warns that a model may be pre-processed
    try:
        # Unsigned weights: signed ones saturate in the products of processors without VNNI.
        quantize_dynamic(path, quantized, ["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QUInt8)
    finally:
        logging.disable(logging.NOTSET)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    quantized.replace(path)


# The writer of each graph of `TARGETS`: of a program, to a path, with a kind of int8.
GRAPHS: dict[str, Callable[[ExportedProgram, Path, str | None], Runner]] = {
    "onnx": write_onnx,
    "torch_export": write_torch_export,
}


# ---- files of a library ----------------------------------------------------------------------------------------------


def _complete_hf(vit: AnyNetwork, run: Run, folder: Path) -> None:
    """Write the preparation of images, and let the pipelines of Hugging Face answer with the run's probabilities."""
    if processor := image_processor_of(run, vit.model.image_shape):
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    if probability_of(run) == "sigmoid":
        config = folder / "config.json"
        content = json.loads(config.read_text()) | {"problem_type": "multi_label_classification"}
        config.write_text(json.dumps(content, indent=2))


# What a library reads beside the network.
COMPLETED = {"hf": _complete_hf}


def write_for_library(vit: AnyNetwork, run: Run, layout: str, folder: Path, classes: Sequence[str] | None) -> Runner:
    """Write a network for a library and return a runner of the network that the written program loads."""
    write_library(vit, layout, folder, classes)
    if layout in COMPLETED:
        COMPLETED[layout](vit, run, folder)
    network = runpy.run_path(str(folder / LOADER))["model"].eval()

    def logits_of(images_BCHW: Tensor) -> Tensor:
        output = network(normalized(images_BCHW.permute(0, 2, 3, 1), run.data.normalize))
        return getattr(output, "logits", output)

    return logits_of


# ---- the preparation of images ---------------------------------------------------------------------------------------


def preprocessing_of(run: Run, size: tuple[int, int], *, in_graph: bool, any_multiple_of: int | None) -> dict[str, Any]:
    """Return the steps from an encoded image to the input of an export; `in_graph`: the export normalizes."""
    (height, width), crop, normalize = size, run.data.eval_crop, run.data.normalize
    covers = None if crop.crop_ratio is None else [int(height / crop.crop_ratio), int(width / crop.crop_ratio)]
    resize = {"to": [height, width]} if covers is None else {"smallest_that_covers": covers}
    steps = {
        "decode": {"colors": "RGB", "orientation": "upright by EXIF", "transparency": "over white"},
        "resize": {
            **resize,
            "keeps_aspect_ratio": covers is not None,
            "interpolation": crop.interpolation,
            "antialias": True,
        },
        "crop": {"center": [height, width]},
        "normalize": {
            "formula": "(pixels / 255 - mean) / std",
            "mean": list(normalize.mean),
            "std": list(normalize.std),
            "inside_the_export": in_graph,
        },
    }
    shape = ["any", 3, *((height, width) if any_multiple_of is None else (f"any multiple of {any_multiple_of}",) * 2)]
    tensor = {"name": INPUT, "type": "uint8" if in_graph else "float32", "layout": "BCHW", "shape": shape}
    return steps | {"input": tensor}


def image_processor_of(run: Run, size: tuple[int, int]) -> dict[str, Any] | None:
    """Return the same steps for Hugging Face's AutoImageProcessor; None for images that are not square."""
    (height, width), crop, normalize = size, run.data.eval_crop, run.data.normalize
    if height != width:
        return None
    square = {"height": height, "width": width}
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": square if crop.crop_ratio is None else {"shortest_edge": int(height / crop.crop_ratio)},
        "resample": {"bilinear": 2, "bicubic": 3}[crop.interpolation],  # Pillow's numbers
        "do_center_crop": crop.crop_ratio is not None,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(normalize.mean),
        "image_std": list(normalize.std),
    }
