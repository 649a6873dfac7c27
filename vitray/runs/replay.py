"""`vitray replay`: a past step of a run, taken again, with the loss and the gradient of each of its images.

Nothing was recorded for it: images, augmentation, mixing, dropout and learning rate are functions of the step. So the
steps from the checkpoint before it give the same weights, and on a CPU the same bits.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitray.cluster import session
from vitray.config import Run
from vitray.data.augment.contact_sheets import Captioned, captioned_sheet
from vitray.data.augment.keyed_random import step_generator
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.shards.label_lists import names_of
from vitray.data.shards.tasks import ProgressLine
from vitray.data.stream.batches import Share
from vitray.data.stream.decoding import read_rows
from vitray.data.stream.prefetch import Prefetcher
from vitray.errors import ConfigError
from vitray.models.stems import use_patch
from vitray.pages.files import csv_text
from vitray.runs.local_host import LocalHost
from vitray.runs.local_start import Place, decode_processes
from vitray.runs.model_output import initial_weights
from vitray.runs.resolve import resolve
from vitray.runs.run_dir import run_dataset, run_source, stored_run
from vitray.runs.train_here import torch_settings_kept
from vitray.system import storage
from vitray.training import checkpoints
from vitray.training.data import training_spec, with_masks
from vitray.training.evaluator import autocast
from vitray.training.learner import Learner, build_learner, restore, wrap_model
from vitray.training.loop import prepared
from vitray.training.resolved import ResolvedRun
from vitray.training.schedule import Length, learning_rate, micro_batches, num_passes
from vitray.training.state import TrainState
from vitray.training.step import drawn_patch, prepare_micro_batch, take_step

DEFAULT_FOLDER = "replays"
SHEET, TABLE = "images.png", "images.csv"
# Images of the sheet, the worst first; the table has all.
MOST_SHOWN = 64


class ReplayedImage(NamedTuple):
    """An image of the step, as the network saw it."""

    key: str
    label: str | None
    """Its class; None for a task without classes."""
    loss: float
    """Of this image alone."""
    grad_norm: float
    """Of this image's loss."""
    view: np.ndarray
    """After augmentation, erasing and mixing (HWC, uint8)."""

    @property
    def rank(self) -> tuple[bool, float, str]:
        """A sort key: losses that are not finite first, then the largest."""
        return math.isfinite(self.loss), -self.loss if math.isfinite(self.loss) else 0.0, self.key


class Replay(NamedTuple):
    """A step that was taken again."""

    run: str
    step: int
    """Counted from 1, as in MLflow."""
    start: int
    """The step of the checkpoint that it came from; 0 is the start of the run."""
    loss: float
    grad_norm: float
    """Of the whole batch, before it is clipped."""
    learning_rate: float
    images: Sequence[ReplayedImage]
    """The worst first."""
    verdict: str
    notes: Sequence[str]
    """Why the numbers may differ from the run's in the last digits."""
    out: str

    def flat(self) -> dict[str, Any]:
        """Return the values of `--json`."""
        values = self._asdict() | {"images": len(self.images), "notes": list(self.notes)}
        return values | {"worst": [each.key for each in self.images[:5]], "sheet": storage.join(self.out, SHEET)}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each image, the worst first."""
        return [
            {"key": each.key, "label": each.label, "loss": each.loss, "grad_norm": each.grad_norm}
            for each in self.images
        ]

    def text(self) -> str:
        """Return the step in a few lines."""
        head = f"step {self.step:,}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}, learning rate"
        lines = [f"{head} {self.learning_rate:.4g}", self.verdict, *self.notes]
        lines += [f"  {each.loss:>10.4g} {each.grad_norm:>10.4g}  {_name(each)}" for each in self.images[:5]]
        return "\n".join([*lines, *([f"  and {len(self.images) - 5} more"] if len(self.images) > 5 else []), self.out])


def replay(url: str, step: int, out: str | None = None) -> Replay:
    """Take a step of the run in a folder again, and write its images; nothing of the run changes.

    `step` counts from 1, as MLflow's charts and a run's messages do.
    """
    run_dir = storage.absolute(url).rstrip("/")
    run = stored_run(run_dir)
    resolved = resolve(run, run_dataset(run, run_dir))
    total = resolved.length.total
    if not 1 <= step <= total:
        raise ConfigError(f"--step: got {step}, expected one of the {total:,} steps of {run_dir}, which count from 1")
    folder = out or storage.join(DEFAULT_FOLDER, f"{run_dir.rpartition('/')[2]}-step-{step}")
    saved = checkpoints.complete_steps(run_dir)
    start = max((each for each in saved if each < step), default=0)
    last = checkpoints.read_meta(run_dir, saved[-1])["state"] if saved else {}
    threads = last.get("threads") or int(run.compute.cpus or session.local_cpus())
    has_gpu = run.compute.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    notes = []
    if last.get("workers", 1) != 1:
        notes.append(f"the run had {last['workers']} workers, and this is one: sums may round differently")
    if saved and (last["threads"] is None) != has_gpu:
        notes.append(f"the run was on another device than this {device.type}: sums round differently")
    skipped = {each for each in last.get("train_state", {}).get("skipped", ()) if each != step - 1}
    with decode_processes(Place(), None) as decoders, torch_settings_kept():
        host = LocalHost(
            resolved,
            run_dir,
            "",
            place=(0, 1),
            device=device,
            threads=threads,
            decoders=decoders,
            initial=None if start else initial_weights(resolved, run_source(run_dir)),
            is_stop_requested=lambda: False,
        )
        with closing(host):
            return _replayed(prepared(resolved, host), run_dir, host, start, step, skipped, notes, folder)


def _replayed(
    resolved: ResolvedRun,
    run_dir: str,
    host: LocalHost,
    start: int,
    step: int,
    skipped: set[int],
    notes: Sequence[str],
    folder: str,
) -> Replay:
    """Take the steps from a checkpoint, look at the images of the last one, and write them."""
    run, share = resolved.run, Share(0, 1)
    learner, state = build_learner(run, host), TrainState()
    if start:
        state = restore(checkpoints.read_checkpoint(run_dir, start), learner, host)
    learner = wrap_model(learner, run)
    stream = host.open_stream(training_spec(resolved, host.device.type))
    batches = Prefetcher((with_masks(each, run, each.epoch) for each in stream.train(start, step, share)), host.device)
    progress, losses, last = ProgressLine("replay:", step - start, "steps"), list(state.recent), step - 1
    try:
        for number in range(start, last):
            batch = next(batches)
            if number not in skipped:
                losses.append(take_step(run, number, batch, share, learner, resolved.length).tolist()[0])
            progress.add(1)
        batch = next(batches)
        look = _look(run, last, batch, learner, resolved.length)
        loss, norm = take_step(run, last, batch, share, learner, resolved.length).tolist()
        progress.add(1)
    finally:
        batches.close()
    progress.end()
    stored, classes = read_rows(batch.rows, stream.rows), resolved.dataset.classes
    numbers = [stored[int(row)] for row in batch.rows]
    images = [
        ReplayedImage(
            key, names_of(label, classes) if run.classification else None, each.loss, each.grad_norm, each.view
        )
        for (_, label, key), each in zip(numbers, look.images, strict=True)
    ]
    images.sort(key=lambda image: image.rank)
    rate = learning_rate(run.optim, resolved.length, last)
    verdict = _verdict(loss, norm, losses, images, look.broken, is_mixed=run.classification is not None)
    replayed = Replay(run_dir, step, start, loss, norm, rate, images, verdict, notes, folder)
    _write(replayed)
    return replayed


# ---- the images of a step --------------------------------------------------------------------------------------------


class LookedAt(NamedTuple):
    """An image by its own loss."""

    loss: float
    grad_norm: float
    view: np.ndarray


class Look(NamedTuple):
    """What is known before a step is taken."""

    images: list[LookedAt]
    broken: list[str]
    """The names of the weights that are not finite."""


def _look(run: Run, step: int, batch: DeviceBatch, learner: Learner, length: Length) -> Look:
    """Return the loss and the gradient norm of each image of a step, at the weights before it.

    Dropout and skipped branches are drawn alike for each image, and batch norms use their running averages.
    """
    task = copy.deepcopy(learner.task)
    for module in task.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm):
            module.eval()
    use_patch(task, drawn_patch(run, step))
    task.before_step(step, length.epoch, length.total)
    parameters = [each for each in task.parameters() if each.requires_grad]
    buffers = [each.clone() for each in task.buffers()]  # a center moves with each pass
    seed = int(step_generator(run.seed, step, "torch 0").integers(2**63))
    looked = []
    for part in micro_batches(len(batch.images), num_passes(run, 1), run):
        inputs = prepare_micro_batch(batch, part, run, step, length)
        views = _as_pixels(inputs[0], run)
        for place in range(len(inputs[0])):
            torch.manual_seed(seed)
            with autocast(run, batch.images.device):
                loss = task(*_inputs_of_one(batch, inputs, part.start + place, place, run))
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            squares = [each.double().square().sum() for each in gradients if each is not None]
            norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
            looked.append(LookedAt(float(loss.detach()), norm, views[place]))
            for each, kept in zip(task.buffers(), buffers, strict=True):
                each.copy_(kept)
    broken = [name for name, tensor in learner.task.state_dict().items() if not bool(torch.isfinite(tensor).all())]
    return Look(looked, broken)


def _inputs_of_one(batch: DeviceBatch, inputs: Sequence[Any], row: int, place: int, run: Run) -> Sequence[Any]:
    """Return what the task takes of one image, of a row of the batch: mixed with its partner where the run mixes."""
    if run.classification:
        return [each[place : place + 1] for each in inputs]
    return batch.inputs(run.task.traits.needs, run.data.normalize, slice(row, row + 1))


def _as_pixels(images_BCHW: Tensor, run: Run) -> np.ndarray:
    """Return normalized images, or the first of several views, as pixels (BHWC, uint8)."""
    if images_BCHW.ndim == 5:
        images_BCHW = images_BCHW[:, 0]
    mean_C, std_C = (torch.tensor(values) for values in (run.data.normalize.mean, run.data.normalize.std))
    pixels_BHWC = images_BCHW.detach().float().cpu().permute(0, 2, 3, 1) * std_C + mean_C
    return pixels_BHWC.nan_to_num(0).mul(255).round().clamp(0, 255).to(torch.uint8).numpy()


def _verdict(
    loss: float,
    norm: float,
    before: Sequence[float],
    images: Sequence[ReplayedImage],
    broken: Sequence[str],
    *,
    is_mixed: bool,
) -> str:
    """Return what the step shows, in a sentence."""
    bad = [image for image in images if not math.isfinite(image.loss)]
    if broken:
        return (
            f"the weights were broken before it: {len(broken)} tensors are not finite, such as {broken[0]}; look at an"
            " earlier step"
        )
    if bad:
        return f"{len(bad)} of {len(images)} images have a loss that is not finite, {_name(bad[0])} among them"
    if not math.isfinite(loss):
        causes = f"{'see its mixing, or ' if is_mixed else ''}lower optim.lr"
        return f"each image alone has a finite loss, the batch has not: {causes}"
    if not math.isfinite(norm):
        return "the loss is finite and its gradient is not: a lower optim.lr, or compute.precision=fp32"
    usual = median(before) if before else None
    compared = "" if usual is None else f"the loss is {loss / usual:.2f} times the median of {len(before)} before it; "
    middle = median(image.loss for image in images)
    return f"{compared}the worst image has {images[0].loss / middle:.1f} times the median loss of its batch"


def _name(image: ReplayedImage) -> str:
    return image.key if image.label is None else f"{image.key} ({image.label})"


def _write(replayed: Replay) -> None:
    title = f"step {replayed.step:,}: loss {replayed.loss:.4g}; the worst of {len(replayed.images)} images first"
    cells = [
        Captioned(each.view, each.label or each.key, f"loss {each.loss:.3g}, norm {each.grad_norm:.3g}")
        for each in replayed.images[:MOST_SHOWN]
    ]
    rows = replayed.rows()
    table = csv_text([list(rows[0]), *(["" if value is None else value for value in row.values()] for row in rows)])
    storage.write_bytes(storage.join(replayed.out, TABLE), table.encode(errors="backslashreplace"))
    storage.write_bytes(storage.join(replayed.out, SHEET), captioned_sheet(cells, title))
