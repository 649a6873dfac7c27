"""Graphs of a network in files, a torch.export archive or ONNX, and their runners."""

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitray.exports.parity import Runner

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
