"""python experiments/measure_predict.py IMAGES: `vitray predict` and its alternatives in interleaved rounds.

Images per second, and the time to the first batch, of Ray Data's documented pipeline and of a DataLoader loop. All read
the same Parquet files and return the most probable classes of each image. The bound is the lower of two speeds: that of
decoding alone on the CPUs that the actors leave, and that of the network alone on the actors.
"""

import argparse
import io
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import torch
from PIL import Image
from ray.data import ActorPoolStrategy
from torch.utils.data import DataLoader
from torchvision import transforms

from vitray.bench.charts import draw_bars
from vitray.bench.ingest import MEAN, STD
from vitray.bench.results import Results
from vitray.config import load_run
from vitray.data.augment.views import decode_views
from vitray.inference.images import undecodable
from vitray.inference.listing import list_images
from vitray.inference.models import describe_network, open_network
from vitray.inference.networks import views_of
from vitray.inference.parts import load_networks, predict_batch
from vitray.inference.pipeline import Bounds, compute_parts, pool_bounds
from vitray.inference.plan import TOP_K, Options, Plan, check_options, missing_parts, write_plan
from vitray.models.vit import ViT
from vitray.system.scratch import temporary_folder
from vitray.system.timing import circumstances, in_rounds, ratio_of, spread_of
from vitray.weights import save_model


class Timing(NamedTuple):
    """One pipeline in one round."""

    first: float
    """Seconds until the first batch; 0 for a half alone."""
    speed: float
    """Images per second, the start included."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="images as of vitray predict")
    parser.add_argument("--model", default="vit_ti12x1_16", help="a model name (%(default)s)")
    parser.add_argument("--images", type=int, default=512, help="images of a round (%(default)s)")
    parser.add_argument("--workers", type=int, help="CPUs of the Ray started here (all)")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the results (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    return parser


def main() -> None:
    """Measure every pipeline in turns, print and save the table."""
    options = build_parser().parse_args()
    # Ray's workers run at nice 15 by default; here they get the same priority as the others.
    settings: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.WARNING}
    settings |= {"num_cpus": options.workers, "_system_config": {"worker_niceness": 0}}
    with temporary_folder() as folder, ray.init("local", **settings):
        job = open_job(options, folder)
        result = report(options, job, measure(job, folder, options.rounds))
    if options.json:
        print(json.dumps(result))


def measure(job: "Job", folder: Path, rounds: int) -> dict[str, list[Timing]]:
    """Return the timings of each pipeline."""

    def piped(pipeline: "Callable[[Job, Path], Iterator[int]]", _number: int) -> Timing:
        try:
            return timed(pipeline(job, folder / "out"), len(job.plan.images))
        finally:
            shutil.rmtree(folder / "out", ignore_errors=True)

    variants: dict[str, Callable[[int], Timing]] = {
        "decode alone": lambda _: Timing(0, decode_alone(job)),
        "network alone": lambda _: Timing(0, network_alone(job)),
        "vitray predict": partial(piped, ours),
        "Ray Data, Pillow": partial(piped, stock),
        "DataLoader, Pillow": partial(piped, loader),
    }
    # The first round warms the page cache and the worker processes.
    return in_rounds(variants, rounds, warm_up=1, shown=True)


def timed(batches: Iterator[int], images: int) -> Timing:
    """Return the time of the first batch, and the speed."""
    start = time.perf_counter()
    count = next(batches)
    first = time.perf_counter() - start
    count += sum(batches)
    end = time.perf_counter() - start
    assert count == images, f"got {count} images, expected {images}"
    return Timing(first, images / end)


def report(options: argparse.Namespace, job: "Job", timings: dict[str, list[Timing]]) -> dict[str, Any]:
    """Print and save the table."""
    device = torch.device(job.plan.device)
    about = f"{len(job.plan.images)} images, {options.model}, {options.image_size} px, batches of {options.batch}"
    about += f"; {job.actors} actors on {job.plan.device}, {job.decoders} CPUs to decode"
    where = circumstances(device)
    print(f"{where}\n{about}; {options.rounds} interleaved rounds, median ± half the interquartile range\n")
    limits = zip(timings["decode alone"], timings["network alone"], strict=True)
    bound = [min(decode.speed, network.speed) for decode, network in limits]
    print(f"{'pipeline':<22}{'images/s':>18}{'over the bound':>18}{'first batch s':>18}")
    results = Results(options.out / "predict", device, {"circumstances": where, "about": about})
    for name, rounds in timings.items():
        first, speed = (spread_of(values) for values in zip(*rounds, strict=True))
        share = ratio_of([timing.speed for timing in rounds], bound)
        print(f"{name:<22}{speed!s:>18}{share!s:>18}{first!s:>18}")
        row: dict[str, Any] = {"pipeline": name} | speed.columns("images_per_second", 4)
        results.add(row | share.columns("share_of_bound", 4) | first.columns("first_batch", 4))
    bars = {row["pipeline"]: row["images_per_second"] for row in results.rows}
    return results.finish(chart=draw_bars(bars, "images/s", f"{where}\n{about}"))


# ---- the prediction --------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """The prediction that all pipelines compute."""

    plan: Plan
    """A part is a batch."""
    files: list[str]
    """The Parquet files of its images."""
    actors: int
    decoders: int
    """The CPUs that the actors leave."""


def open_job(options: argparse.Namespace, folder: Path) -> Job:
    """Write the network and the images, and return the prediction."""
    size = f"model.image_size={options.image_size}"
    run = load_run(None, [f"model.name={options.model}", size, "model.num_classes=1000"])
    torch.manual_seed(0)
    save_model(str(folder / "model"), run, ViT(run.model))
    files = write_images(options.dataset, options.images, options.batch, folder / "images")
    assert len(files) > 1, f"--batch {options.batch}: expected at least two batches of the images"
    device = "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
    plan = make_plan(str(folder / "model"), str(folder / "images"), options.batch, folder / "out", device)
    cpus, actors = int(ray.cluster_resources()["CPU"]), pool_bounds(None, device).most
    return Job(plan, files, actors, cpus if device == "cuda" else cpus - actors)


def write_images(url: str, count: int, batch: int, folder: Path) -> list[str]:
    """Write the first decodable images of a source as Parquet files of one batch each; return these."""
    images, files = list_images(url), []
    folder.mkdir(parents=True)
    for start in range(0, min(count, len(images)), batch):
        stop = min(start + batch, count, len(images))
        encoded = images.read(range(start, stop))
        usable = [each.content for each, reason in zip(encoded, undecodable(encoded), strict=True) if reason is None]
        files.append(str(folder / f"images-{start:08d}.parquet"))
        pq.write_table(pa.table({"image": usable}), files[-1])
    return files


def make_plan(model: str, images: str, batch: int, out: Path, device: Any) -> Plan:
    """Return the plan of a prediction with a part for each batch."""
    spec = describe_network(model)[0]
    options = check_options([spec], Options(batch=batch, part=batch))
    return Plan((spec,), list_images(images), options, str(out), device)


# ---- the pipelines ---------------------------------------------------------------------------------------------------


def ours(job: Job, out: Path) -> Iterator[int]:
    """Yield the sizes of the parts of `vitray predict`, planning included."""
    old = job.plan
    plan = make_plan(old.networks[0].url, old.images.url, old.options.batch, out, old.device)
    write_plan(plan)
    for part in compute_parts(plan, missing_parts(plan), Bounds(1, job.actors)):
        start, stop = plan.span(part, 0)
        yield stop - start


def stock(job: Job, out: Path) -> Iterator[int]:
    """Yield the sizes of batches of Ray Data's documented pipeline: a Pillow decode by row, then actors."""
    spec, batch = job.plan.networks[0], job.plan.options.batch
    gpus = int(job.plan.device == "cuda")
    rows = ray.data.read_parquet(job.files)  # their only column is image
    rows = rows.map(partial(_pillow_row, transform=_usual_transform(spec.size)))
    actors: Any = {"compute": ActorPoolStrategy(min_size=1, max_size=job.actors), "num_cpus": 1 - gpus}
    arguments = (spec, job.plan.device)
    rows = rows.map_batches(_StockPredictor, fn_constructor_args=arguments, batch_size=batch, num_gpus=gpus, **actors)
    rows.context.enable_progress_bars = rows.context.print_on_execution_start = False
    yield from _written(rows.iter_batches(batch_size=batch), out)


def loader(job: Job, out: Path) -> Iterator[int]:
    """Yield the sizes of batches of a DataLoader with the same decode, whose loop runs the network."""
    spec, device = job.plan.networks[0], torch.device(job.plan.device)
    transform = _usual_transform(spec.size)
    network = open_network(spec).to(device)

    def read(file: Any) -> torch.Tensor:
        return torch.stack([_pillow(content, transform) for content in pq.read_table(file)["image"].to_pylist()])

    def predicted() -> Iterator[dict[str, np.ndarray]]:
        # Forked, as is usual on Linux; the processes use neither Ray nor threads.
        workers: Any = {"num_workers": job.decoders, "multiprocessing_context": "fork"}
        files: Any = job.files
        for images_BCHW in DataLoader(files, batch_size=None, collate_fn=read, **workers):
            yield _top(network, images_BCHW.to(device))

    threads = torch.get_num_threads()
    torch.set_num_threads(job.actors)
    try:
        yield from _written(predicted(), out)
    finally:
        torch.set_num_threads(threads)


def decode_alone(job: Job) -> float:
    """Return the images per second that tasks read and decode on the CPUs that the actors leave."""
    shared, tasks = ray.put(job.plan), min(job.decoders, job.plan.parts)  # each task has a part at least
    remote: Any = ray.remote(num_cpus=1)(_decode_rate)
    return sum(ray.get([remote.remote(shared, first, tasks) for first in range(tasks)]))


def network_alone(job: Job) -> float:
    """Return the images per second of all actors with batches that are ready."""
    shared, gpus = ray.put(job.plan), int(job.plan.device == "cuda")
    remote: Any = ray.remote(num_cpus=1 - gpus, num_gpus=gpus)(_network_rate)
    return sum(ray.get([remote.remote(shared, max(2, job.plan.parts // 2)) for _ in range(job.actors)]))


def _decode_rate(plan: Plan, first: int, step: int) -> float:
    torch.set_num_threads(1)
    spans = [plan.span(part, 0) for part in range(first, plan.parts, step)]

    def decode(start: int, stop: int) -> None:
        contents = [image.content for image in plan.images.read(range(start, stop))]
        decode_views(contents, views_of(plan.networks), rows=plan.options.batch)

    decode(*spans[0])
    began = time.perf_counter()
    for span in spans:
        decode(*span)
    return sum(stop - start for start, stop in spans) / (time.perf_counter() - began)


def _network_rate(plan: Plan, batches: int) -> float:
    torch.set_num_threads(1)
    networks, size = load_networks(plan), plan.networks[0].size
    views = [np.random.default_rng(0).integers(0, 256, (plan.options.batch, *size, 3), np.uint8)]
    has_pixels = np.ones(plan.options.batch, bool)
    predict_batch(plan, networks, views, has_pixels)
    began = time.perf_counter()
    for _ in range(batches):
        predict_batch(plan, networks, views, has_pixels)
    return batches * plan.options.batch / (time.perf_counter() - began)


class _StockPredictor:
    def __init__(self, spec: Any, device: str) -> None:
        self._network, self._device = open_network(spec).to(device), device

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return _top(self._network, torch.as_tensor(batch["image"], device=self._device))


def _pillow_row(row: dict[str, Any], transform: Any) -> dict[str, Any]:
    return {"image": _pillow(row["image"], transform).numpy()}


def _pillow(content: bytes, transform: Any) -> torch.Tensor:
    return transform(Image.open(io.BytesIO(content)).convert("RGB"))


def _usual_transform(size: tuple[int, int]) -> Any:
    steps = [transforms.Resize(int(size[0] / 0.875)), transforms.CenterCrop(size)]
    return transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


@torch.inference_mode()
def _top(network: Any, images_BCHW: torch.Tensor) -> dict[str, np.ndarray]:
    logits_BK = network(images_BCHW).float()
    probabilities, classes = logits_BK.softmax(1).topk(min(TOP_K, logits_BK.shape[1]))
    return {"classes": classes.cpu().numpy(), "probabilities": probabilities.cpu().numpy()}


def _written(batches: Any, out: Path) -> Iterator[int]:
    """Write each batch as a Parquet file, as ours does; yield its size."""
    out.mkdir(parents=True)
    for number, batch in enumerate(batches):
        columns = {name: list(values) for name, values in batch.items()}
        pq.write_table(pa.table(columns), out / f"{number:05d}.parquet")
        yield len(batch["classes"])


if __name__ == "__main__":
    main()
