"""The forward pass of a network as CUDA graphs: a graph repeats its kernels on the same memory, without launching each.

Shapes: B images, C colors, H x W pixels.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Call = Callable[[], object]


def capture(call: Call) -> Call:
    """Return a call as a CUDA graph. Other threads may use the GPU meanwhile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # allocates, and chooses the algorithms of convolutions
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


class _Graph(NamedTuple):
    """A captured forward pass, from its images to its outputs."""

    images: Tensor
    outputs: Tensor
    replay: Call


class GraphedNetwork:
    """A network whose forward passes are graphs: one for each power of two of images, captured when it is first needed.

    A batch is filled up to the next power with other images, black or of an earlier one; what they give is left out.
    """

    def __init__(self, network: nn.Module, capture: Callable[[Call], Call] = capture) -> None:
        self._network, self._capture = network, capture
        self._graphs: dict[Any, _Graph] = {}
        self._lock = threading.Lock()

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Return the outputs for some images on the GPU."""
        count = len(images_BCHW)
        size = 1 << (count - 1).bit_length()
        key = size, images_BCHW.shape[1:], images_BCHW.dtype
        with self._lock:  # a graph computes one batch at a time
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = self._captured(images_BCHW, size)
            graph.images[:count] = images_BCHW
            graph.replay()
            return graph.outputs[:count].clone()

    def _captured(self, images_BCHW: Tensor, size: int) -> _Graph:
        """The graph of a number of images; it is not run yet."""
        inputs = images_BCHW.new_zeros(size, *images_BCHW.shape[1:])
        outputs = torch.empty_like(self._network(inputs))

        def run() -> None:
            outputs.copy_(self._network(inputs))

        return _Graph(inputs, outputs, self._capture(run))
