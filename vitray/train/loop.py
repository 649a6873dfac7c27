"""The loop on each device: a page to read from top to bottom.

Images, augmentation, mixing, dropout and learning rate are all computed from (seed, step), so a checkpoint holds no
random state, and a resumed run goes on as if nothing had been.
"""

import math
import os
import time
from contextlib import nullcontext
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitray.config import Run
from vitray.config.pretraining import Masked, Tokenizer
from vitray.data.augment.batch import Rows, normalised, prepare_batch
from vitray.data.augment.keyed_random import step_generator
from vitray.data.stream import Share, Stream
from vitray.data.stream.decoding import read_rows
from vitray.data.stream.prefetch import DeviceBatch, Feed
from vitray.errors import ConfigError
from vitray.models.tokenizer import VisualTokenizer
from vitray.tasks.supervised import Task, recompute_activations
from vitray.tracking import system_info
from vitray.train import checkpoints
from vitray.train.checkpoints import Checkpoint, Saver
from vitray.train.data import batches_from, open_training
from vitray.train.evaluator import Evaluations, autocast, judge
from vitray.train.optim import Average, build_optimizer, clip_gradients, set_learning_rate
from vitray.train.profiling import costs
from vitray.train.schedule import learning_rate, total_steps
from vitray.train.state import Due, Job, Standing, Teller

# Of a worker's process, whatever its node was started with: Ray Data's own census needs one process more, and its
# counts, which die with a node and nobody here reads, would be an error at each look.
QUIET = {"RAY_DATA_USAGE_DISABLED": "1", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}


def worker(config: dict[str, Job]) -> dict[str, Any]:
    """Train on this device among all; how it ended, which the driver reads."""
    os.environ.update(QUIET)
    job = config["job"]
    if reason := ray.get(job.desk.given_up.remote()):
        return {"failed": reason}
    try:
        return descend(job)
    except ConfigError as error:
        ray.get(job.desk.give_up.remote(str(error)))
        raise


def descend(job: Job) -> dict[str, Any]:
    """Take every step from the last checkpoint to the end."""
    run, context, device = job.run, ray.train.get_context(), ray.train.torch.get_device()
    share = Share(context.get_world_rank(), context.get_world_size())
    first, teller = share.rank == 0, Teller(job.desk, share.rank == 0)
    teller.say("workers", {"device": describe(device), "workers": share.workers})
    if device.type == "cpu":
        torch.set_num_threads(job.threads)
    torch.set_float32_matmul_precision("high" if run.compute.tf32 else "highest")

    # ---- what is trained ---------------------------------------------------------------------------------------------
    torch.manual_seed(run.seed)  # the same first weights on every worker
    task = job.build(device)
    if job.first is not None:
        task.load_state_dict(ray.get(job.first))
    recompute_activations(task, run.compute.recompute)
    optimizer = build_optimizer(task, run.optim, device)
    average = Average(task, run.optim.ema) if run.optim.ema else None
    standing = resume(job, task, optimizer, average, teller)
    model: nn.Module = ray.train.torch.prepare_model(task)  # wrapped where there are several workers
    if run.compute.compile:
        model = torch.compile(model)  # pyright: ignore[reportAssignmentType]

    # ---- what it is trained on ---------------------------------------------------------------------------------------
    train = open_training(job, share)
    evaluations = Evaluations(job, share, device) if run.data.evaluated else None
    if evaluations is not None and (lost := evaluations.begin_again(standing)):
        teller.say("note", {"text": f"the evaluation at step {lost} was lost when the run was interrupted"})
    total = total_steps(run.optim, train.steps)
    due = Due(run, train.steps, total)

    def new_saver() -> Saver | None:
        return Saver(job.home, run.checkpoint.keep, teller.saved, teller.note) if first else None

    saver = new_saver()
    feed = Feed(batches_from(run, train, standing.step, total, share), device)
    unread: dict[int, Tensor] = {}  # {step: loss and gradient norm}, still on the device
    is_warned = False
    since = time.perf_counter()

    while standing.step < total:
        step = standing.step
        batch = next(feed)
        if step not in standing.skipped:
            unread[step] = take_step(run, step, batch, share, model, task, optimizer, average, train.steps)
        standing.step += 1
        teller.progress(standing.step)
        if standing.step not in due:
            continue

        # ---- the numbers ---------------------------------------------------------------------------------------------
        numbers, is_to_end = summed(unread, device, teller.is_to_end())
        seconds = time.perf_counter() - since
        standing.seconds += seconds
        # A gradient that is not finite has spoilt the weights, whatever the loss was.
        losses = [loss if math.isfinite(norm) else norm for loss, norm in numbers]
        broken = standing.first_broken(losses, run.guard.spike)
        if broken is not None:
            feed.close()
            if saver:
                saver.close()
            bad_step = list(unread)[broken]
            text = explain(job, train, bad_step, losses[broken])
            if run.guard.on_nan == "stop" or standing.rewinds >= run.guard.max_rewinds:
                return {"failed": text, "step": bad_step}
            standing = rewind(job, task, optimizer, average, teller, standing, bad_step)
            if evaluations is not None:
                evaluations.forget(standing.step)
            teller.note(f"{text}; back at step {standing.step}, step {bad_step} is left out")
            saver = new_saver()
            feed = Feed(batches_from(run, train, standing.step, total, share), device)
            unread, since = {}, time.perf_counter()
            continue
        standing.count(losses)
        if standing.step in due.records and standing.losses:
            values = {
                "train/loss": sum(standing.losses) / len(standing.losses),
                "train/lr": learning_rate(run.optim, step, train.steps),
                "train/images_per_second": len(unread) * run.optim.batch / seconds,
                "train/data_wait_share": min(1.0, feed.waited / seconds),
                "train/grad_norm": numbers[-1][1] if numbers else 0.0,
                "train/epoch": standing.step / train.steps,
                "data/corrupt": float(len(train.corrupt)),
            }
            if isinstance(task, VisualTokenizer):
                values["train/perplexity"] = task.read_perplexity()
            teller.metrics(standing.step, standing, values)
            standing.losses = []
            if context.get_local_rank() == 0:
                node = f"system/node{context.get_node_rank()}"
                system = {f"{node}/{name}": value for name, value in system_info.sample().items()}
                job.desk.put.remote({"kind": "metrics", "step": standing.step, "values": system})
        unread, feed.waited = {}, 0.0

        # ---- evaluation and checkpoint -------------------------------------------------------------------------------
        if evaluations is not None:
            if standing.step in due.evaluations:
                evaluations.begin(standing.step, task, average)
            judge(evaluations.done(), standing, teller)
            standing.pending = evaluations.pending
        since = time.perf_counter()
        # A node that is to be taken away takes at most what comes after the checkpoint of its notice.
        is_new = not is_warned and job.watches and ray.train.get_preemption_info() is not None
        is_warned = is_warned or is_new
        if is_new:
            teller.note(f"a node is to be taken away: step {standing.step:,} is saved")
        if saver and (due.saves(standing.step) or is_to_end or is_new):
            saver.save(checkpoint_of(run, task, optimizer, average, standing, share), standing.spared)
        asks = job.asks and evaluations is not None and standing.step in due.evaluations and standing.step < total
        if asks and teller.is_told_to_stop(standing.step):
            feed.close()
            if saver:
                saver.close()
            return outcome(standing, share, train) | costs(run, task.vit, device) | {"stopped": True}
        if is_to_end and standing.step < total:
            feed.close()
            if saver:
                saver.close()
            return outcome(standing, share, train) | {"told to end": True}

    # ---- the end -----------------------------------------------------------------------------------------------------
    if evaluations is not None:
        if evaluations.latest != total:  # where it was interrupted right here
            evaluations.begin(total, task, average)
        judge(evaluations.done(wait=True), standing, teller)
        if standing.latest:
            teller.score(standing.latest)
    if saver:
        saver.close()
    return outcome(standing, share, train) | costs(run, task.vit, device)


def outcome(standing: Standing, share: Share, train: Stream) -> dict[str, Any]:
    """What the driver learns of how it ended."""
    return {
        "step": standing.step,
        "seconds": standing.seconds,
        "val_top1": standing.latest.top1 if standing.latest else None,
        "val_loss": standing.latest.loss if standing.latest else None,
        "best_top1": standing.best_top1,
        "workers": share.workers,
        "corrupt": train.corrupt,
        "skipped": standing.skipped,
    }


# ---- one step --------------------------------------------------------------------------------------------------------


def take_step(
    run: Run,
    step: int,
    batch: DeviceBatch,
    share: Share,
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    steps_per_epoch: int,
) -> Tensor:
    """One descent of all workers; this worker's part of the loss and of the gradient's norm, still on the device."""
    set_learning_rate(optimizer, learning_rate(run.optim, step, steps_per_epoch))
    torch.manual_seed(int(step_generator(run.seed, step, f"torch {share.rank}").integers(2**63)))
    loss = torch.zeros((), device=batch.images.device)
    parts = slices(len(batch.images), run)
    for part in parts:
        images, targets = prepared(batch, part, run, step)
        # The workers' gradients are averaged, so that each must count by its part of the global batch.
        weight = len(images) * share.workers / run.optim.batch
        is_last = part is parts[-1]
        with nullcontext() if is_last or share.workers == 1 else model.no_sync():  # pyright: ignore[reportCallIssue]
            with autocast(run, images.device):
                part_loss = model(images, targets) * weight
            part_loss.backward()
        loss += part_loss.detach() / share.workers
    norm = clip_gradients(task.parameters(), run.optim.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if average is not None:
        average.update(task, step)
    return torch.stack([loss, norm / share.workers])


def slices(images: int, run: Run) -> list[slice]:
    """A worker's share of a step, cut into as few even passes as fit on the device."""
    most = run.compute.local_batch or images
    passes = -(-images // most)
    pairs = 2 if images % 2 == 0 else 1
    size = -(-images // pairs // passes) * pairs
    return [slice(start, min(start + size, images)) for start in range(0, images, size)]


def prepared(batch: DeviceBatch, part: slice, run: Run, step: int) -> tuple[Tensor, Tensor]:
    """A part of the batch as the task wants it."""
    if isinstance(run.task, Masked | Tokenizer):  # nothing is mixed or erased
        return normalised(batch.images[part], run.data.normalise), batch.labels[part]
    places = batch.positions[part] % run.optim.batch
    return prepare_batch(
        batch.images[part],
        batch.labels[part],
        augment=run.data.augment,
        mix=run.data.mix,
        normalise=run.data.normalise,
        num_classes=run.model.num_classes or 0,
        seed=run.seed,
        step=step,
        rows=Rows(places, run.optim.batch),
    )


def summed(unread: dict[int, Tensor], device: torch.device, wish: bool) -> tuple[list[list[float]], bool]:
    """Loss and gradient norm of each step over all workers, on the host, and whether one of them has the wish.

    The one place that waits for the device.
    """
    numbers = torch.stack([torch.full((2,), float(wish), device=device), *unread.values()]).double()
    if dist.is_initialized():
        dist.all_reduce(numbers)
    (wishes, _), *rest = numbers.tolist()
    return rest, wishes > 0


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_of(
    run: Run,
    task: Task,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    standing: Standing,
    share: Share,
) -> Checkpoint:
    """All that the next step depends on."""
    tensors, rest = checkpoints.split_state(optimizer.state_dict())
    parts = {"model": dict(task.state_dict()), "optimizer": tensors}
    if average is not None:
        parts["average"] = average.state()
    state = {
        "standing": standing.saved(),
        "optimizer": rest,
        "workers": share.workers,
        "run": run.model_dump(mode="json"),
        "versions": system_info.versions(),
    }
    return Checkpoint(standing.step, parts, state)


def resume(job: Job, task: Task, optimizer: torch.optim.Optimizer, average: Average | None, teller: Teller) -> Standing:
    """Load the last whole checkpoint, where there is one, into what is trained."""
    steps = [checkpoints.complete_steps(job.home)]
    if dist.is_initialized():
        dist.broadcast_object_list(steps, 0)  # one worker decides: another may already see the next
    if not steps[0]:
        return Standing()
    checkpoint = checkpoints.read_checkpoint(job.home, steps[0][-1])
    task.load_state_dict(checkpoint.parts["model"])
    optimizer.load_state_dict(checkpoints.join_state(checkpoint.parts["optimizer"], checkpoint.state["optimizer"]))
    if average is not None:
        average.load(checkpoint.parts["average"])
    teller.say("resumed", {"step": checkpoint.step, "workers": checkpoint.state["workers"]})
    standing = Standing(**checkpoint.state["standing"])
    for record in standing.told:
        teller.say("metrics again", record)
    return standing


def rewind(
    job: Job,
    task: Task,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    teller: Teller,
    standing: Standing,
    broken: int,
) -> Standing:
    """Back to the last checkpoint, with one more step to leave out."""
    back = resume(job, task, optimizer, average, teller)
    if back.step == 0:
        raise ConfigError(f"the loss broke at step {broken}, before the first checkpoint: nothing to go back to")
    back.skipped, back.rewinds = [*standing.skipped, broken], standing.rewinds + 1
    return back


def explain(job: Job, train: Stream, step: int, loss: float) -> str:
    """What broke: the step, the learning rate, the images, and where one may go on from."""
    epoch, within = divmod(step, train.steps)
    rows = train.order(epoch).rows[within * train.batch : (within + 1) * train.batch]
    keys = [key for _, _, key in read_rows(rows[:8], train.rows).values()]
    saved = checkpoints.complete_steps(job.home)
    last = checkpoints.folder_of(job.home, saved[-1]) if saved else "none"
    lr = learning_rate(job.run.optim, step, train.steps)
    images = f"{', '.join(keys)} and {len(rows) - len(keys)} more" if len(rows) > len(keys) else ", ".join(keys)
    return f"loss {loss:.4g} at step {step}, learning rate {lr:.3g}, images {images}; last good checkpoint: {last}"


def describe(device: torch.device) -> str:
    """The device's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
