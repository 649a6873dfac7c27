"""The preparation of images for an export, stated as JSON."""

from typing import Any

from vitray.config import Run
from vitray.exports.graphs import INPUT


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
