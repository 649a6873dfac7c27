"""The training loop on each worker: a page to read from top to bottom.

Images, augmentation, mixing, dropout and learning rate are functions of (seed, step). A checkpoint therefore holds no
random state, and a resumed run continues exactly.
"""

import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor

from vitray.config import Run
from vitray.config.pretraining import Masked, Tokenizer
from vitray.data.augment.batch import BatchRows, BatchSettings, DeviceBatch, normalized, prepare_batch
from vitray.data.augment.keyed_random import step_generator
from vitray.data.stream import Share, Stream
from vitray.data.stream.decoding import read_rows
from vitray.data.stream.prefetch import Prefetcher
from vitray.errors import ConfigError, OwnershipLost
from vitray.evaluation.scores import gather_names
from vitray.models.stems import use_patch
from vitray.models.tokenizer import VisualTokenizer
from vitray.system.lease import check_visible
from vitray.tracking.system_info import SystemSampler
from vitray.training import checkpoints
from vitray.training.checkpoints import Saver
from vitray.training.context import WorkerContext
from vitray.training.data import batches_from, open_training, own_broadcast
from vitray.training.driver_client import DriverClient
from vitray.training.evaluator import Evaluator, autocast, log_scores
from vitray.training.heartbeat import HeartbeatSender
from vitray.training.learner import Learner, build_learner, checkpoint_of, resume, rewind, wrap_model
from vitray.training.messages import Ending, Metrics, WorkerResult, WorkersStarted
from vitray.training.optim import clip_gradients, set_learning_rate
from vitray.training.prober import Prober, log_probes
from vitray.training.profiling import measure_costs
from vitray.training.schedule import CheckTimer, Length, Triggers, learning_rate, length_of, micro_batches, num_passes

# A worker's environment on any node. Ray Data's usage statistics would start another process, and its counters, which
# die with their node, would log errors.
ENVIRONMENT = {"RAY_DATA_USAGE_DISABLED": "1", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
# Seconds between two collectives of the workers while rank 0 waits at the end of a run.
MEET_SECONDS = 5.0


def worker(config: dict[str, WorkerContext]) -> WorkerResult:
    """Train on this device, as one of all workers."""
    os.environ.update(ENVIRONMENT)
    logging.disable(logging.INFO)  # Ray Train logs every report; a worker's own messages go to the driver
    context = config["context"]
    session = ray.train.get_context()
    share = Share(session.get_world_rank(), session.get_world_size(), own_broadcast())
    heartbeat = HeartbeatSender(context.mailbox, share)
    try:
        return train_loop(context, share, heartbeat)
    except (ConfigError, OwnershipLost) as error:
        ray.get(context.mailbox.record_fatal_error.remote(error))
        raise
    except Exception:
        heartbeat.send(has_failed=True)
        raise
    finally:
        heartbeat.close()


def train_loop(context: WorkerContext, share: Share, heartbeat: HeartbeatSender) -> WorkerResult:
    """Take every step from the last checkpoint to the end."""
    run, session, device = context.run, ray.train.get_context(), ray.train.torch.get_device()
    client = DriverClient(context.mailbox, is_reporter=share.rank == 0)
    check_visible(context.run_dir, context.owner)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    client.send(WorkersStarted(device_name, share.workers))
    if device.type == "cpu":
        torch.set_num_threads(context.threads)
    torch.set_float32_matmul_precision("high" if run.compute.tf32 else "highest")

    # ---- model and optimizer, from the last checkpoint ---------------------------------------------------------------
    learner = build_learner(context, device)
    state = resume(context, learner, client)
    learner = wrap_model(learner, run)

    # ---- data --------------------------------------------------------------------------------------------------------
    train = open_training(context, device)
    evaluator = Evaluator(context, share, device, learner) if run.data.evaluated else None
    if evaluator is not None and (lost := evaluator.restart_pending(state)):
        client.note(f"the evaluation at step {lost} was lost when the run was interrupted")
    prober = Prober(context, client, is_reporter=share.rank == 0)
    prober.restart_pending(state)
    length = length_of(run.optim, train.steps)
    total, triggers = length.total, Triggers(run, length)

    def open_pipeline() -> tuple[Saver | None, Prefetcher]:
        saver = None
        if share.rank == 0:
            saver = Saver(context.run_dir, run.checkpoint.keep, client.saved, client.note, context.owner)
        return saver, Prefetcher(batches_from(run, train, state.step, total, share), device, largest)

    def has_collapsed() -> bool:
        return run.guard.on_collapse == "stop" and state.collapse is not None

    def close_pipeline() -> None:
        prefetcher.close()
        if saver:
            saver.close()

    # One worker per node samples its load. As in MLflow, nodes are numbered only if there are several.
    node = None if session.get_local_world_size() == share.workers else session.get_node_rank()
    sampler = SystemSampler(node) if session.get_local_rank() == 0 else None
    saver, prefetcher = open_pipeline()
    unread: dict[int, Tensor] = {}  # {step: loss and gradient norm}, still on the device
    steps, seconds = 0, 0.0  # since the last record
    next_check, timer = state.step + 1, CheckTimer(state.step)
    is_preempted = False
    ending: Ending = "finished"
    since = time.perf_counter()

    while state.step < total:
        step = state.step
        heartbeat.at(step, "images")
        batch = next(prefetcher)
        heartbeat.at(step, "computation")
        if step not in state.skipped:
            unread[step] = take_step(run, step, batch, share, learner, length)
        state.step += 1
        client.progress(state.step)
        is_check = state.step == next_check
        if state.step not in triggers and not is_check:
            continue

        # ---- metrics, and the check of the loss ----------------------------------------------------------------------
        heartbeat.at(step, "metrics")
        wanted = timer.steps_to_next(state.step) if is_check and share.rank == 0 else 0
        is_stopping = client.is_stop_requested() or has_collapsed()
        corrupt = train.new_corrupt()
        metrics, (stops, interval, new) = all_reduce_metrics(unread, device, [is_stopping, wanted, len(corrupt)])
        is_interrupted = stops > 0
        if new:
            train.merge_corrupt(gather_names(corrupt))
        elapsed = time.perf_counter() - since
        if is_check:
            next_check = state.step + interval
        steps, seconds, state.seconds = steps + len(unread), seconds + elapsed, state.seconds + elapsed
        # A gradient that is not finite has corrupted the weights, even if the loss is finite.
        losses = [loss if math.isfinite(norm) else norm for loss, norm in metrics]
        broken = state.first_broken(losses, run.guard.spike)
        if broken is not None:
            close_pipeline()
            bad_step = list(unread)[broken]
            text = describe_broken_loss(context, train, bad_step, losses[broken])
            if run.guard.on_nan == "stop" or state.rewinds >= run.guard.max_rewinds:
                return WorkerResult("failed", bad_step, text)
            state = rewind(context, learner, client, state, bad_step)
            if evaluator is not None:
                evaluator.discard_after(state.step)
            prober.discard_after(state.step)
            client.note(f"{text}; training continues from step {state.step} and skips step {bad_step}")
            saver, prefetcher = open_pipeline()
            unread, steps, seconds = {}, 0, 0.0
            next_check, timer = state.step + 1, CheckTimer(state.step)
            since = time.perf_counter()
            continue
        state.add_losses(losses)
        if state.step in triggers.records and state.losses:
            values = {
                "train/loss": sum(state.losses) / len(state.losses),
                "train/lr": learning_rate(run.optim, length, step),
                "train/images_per_second": steps * run.optim.batch / seconds,
                "train/data_wait_share": min(1.0, prefetcher.waited / seconds),
                "train/grad_norm": metrics[-1][1] if metrics else 0.0,
                "train/epoch": state.step / length.epoch,
                "data/corrupt": float(len(train.corrupt)),
            }
            if isinstance(learner.task, VisualTokenizer):
                values["train/perplexity"] = learner.task.read_perplexity(training=True)
            client.metrics(state.step, state, values)
            saved = saver and saver.latest
            # For Ray's dashboard. Ray Train waits for all workers here, as the all-reduce of the metrics has just done.
            ray.train.report(
                {"step": state.step, **values}
                | ({} if saved is None else {"checkpoint": checkpoints.folder_of(context.run_dir, saved)})
            )
            state.losses = []
            steps, seconds, prefetcher.waited = 0, 0.0, 0.0
            if sampler is not None:
                context.mailbox.put.remote(Metrics(state.step, sampler.sample()))
        unread = {}
        notice = None
        if is_check and context.watches_preemption and not is_preempted:
            notice = ray.train.get_preemption_info()  # waits for all workers
            is_preempted = notice is not None
        if state.step not in triggers and not is_interrupted and notice is None:
            since = time.perf_counter()
            continue

        # ---- evaluation and checkpoint -------------------------------------------------------------------------------
        heartbeat.at(step, "evaluation")
        is_evaluated = evaluator is not None and state.step in triggers.evaluations
        if evaluator is not None:
            if is_evaluated:
                evaluator.start(state.step)
                prober.start(state.step, learner, is_last=state.step == total)
            log_scores(evaluator.finished(), state, client)
            log_probes(prober.finished(), context, state, client)
            state.pending, state.pending_probes = evaluator.pending, prober.pending
        heartbeat.at(step, "checkpoint")
        since = time.perf_counter()
        if notice is not None:
            client.note(f"a node is about to be preempted: step {state.step:,} is saved")
        if saver and (triggers.saves(state.step) or is_interrupted or notice is not None):
            saver.save(checkpoint_of(run, learner, state, share), state.protected_steps)
        if state.step < total:
            if context.waits_for_decision and is_evaluated and client.should_stop(state.step):
                ending = "stopped early"
                break
            if is_interrupted:
                ending = "interrupted"
                break
            # Later steps would be lost, and the next workers can start while the node still runs. If it is the driver's
            # own node, nothing can start again, so training goes on.
            if notice is not None and context.driver_node not in notice.preempted_node_ids:
                ending = "preempted"
                break

    # ---- the end -----------------------------------------------------------------------------------------------------
    heartbeat.at(state.step, "evaluation")
    if ending == "finished" and evaluator is not None:
        if evaluator.latest_step != total:  # interrupted before the last evaluation
            evaluator.start(total)
            if total not in prober.pending:
                prober.start(total, learner, is_last=True)
        await_results(evaluator, prober)
        log_scores(evaluator.finished(wait=True), state, client)
        log_probes(prober.finished(wait=True), context, state, client)
        if state.latest:
            client.evaluation(state.latest)
    close_pipeline()
    if largest(int(has_collapsed())) and ending != "stopped early":  # only rank 0 has probes
        return WorkerResult("failed", state.step, f"stopped by guard.on_collapse: {state.collapse}")
    return WorkerResult(
        ending,
        state.step,
        seconds=state.seconds,
        workers=share.workers,
        val_top1=state.latest.top1 if state.latest else None,
        val_loss=state.latest.loss if state.latest else None,
        best_step=state.best_step,
        corrupt=list(train.corrupt),
        skipped=state.skipped,
        costs={} if ending in ("interrupted", "preempted") else measure_costs(run, learner.task.vit, device),
    )


# ---- one step --------------------------------------------------------------------------------------------------------


def take_step(run: Run, step: int, batch: DeviceBatch, share: Share, learner: Learner, length: Length) -> Tensor:
    """Take one optimizer step; return this worker's part of loss and gradient norm, still on the device."""
    set_learning_rate(learner.optimizer, learning_rate(run.optim, length, step))
    torch.manual_seed(int(step_generator(run.seed, step, f"torch {share.rank}").integers(2**63)))
    loss = torch.zeros((), device=batch.images.device)
    use_patch(learner.task, drawn_patch(run, step))
    parts = micro_batches(len(batch.images), num_passes(run, share.workers), run)
    for part in parts:
        images, targets = prepare_micro_batch(batch, part, run, step)
        # DDP averages the workers' gradients, so each worker is weighted by its share of the global batch.
        weight = len(images) * share.workers / run.optim.batch
        is_last = part is parts[-1]
        with nullcontext() if is_last or share.workers == 1 else learner.model.no_sync():  # pyright: ignore[reportCallIssue]
            if run.compute.has_graphs:
                torch.compiler.cudagraph_mark_step_begin()  # may overwrite the previous loss, which `loss` holds
            with autocast(run, images.device):
                part_loss = learner.model(images, targets) * weight
            part_loss.backward()
        loss += part_loss.detach() / share.workers
    use_patch(learner.task, None)
    norm = clip_gradients(learner.task.parameters(), run.optim.clip)
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=not run.compute.has_graphs)
    if learner.average is not None:
        learner.average.update(step)
    return torch.stack([loss, norm / share.workers])


def drawn_patch(run: Run, step: int) -> int | None:
    """Return the patch size of a step, equal on all workers; None where the run draws none."""
    patches = run.model.patches
    return patches[int(step_generator(run.seed, step, "patch").integers(len(patches)))] if patches else None


def prepare_micro_batch(batch: DeviceBatch, part: slice, run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Return a slice of the batch as the task's inputs and targets."""
    if isinstance(run.task, Masked | Tokenizer):  # without mixing or erasing
        return normalized(batch.images[part], run.data.normalize), batch.labels[part]
    data = run.data
    settings = BatchSettings(data.augment, data.mix, data.normalize, run.model.num_classes or 0)
    rows = BatchRows(batch.positions[part] % run.optim.batch, run.optim.batch)
    return prepare_batch(batch.images[part], batch.labels[part], settings, run.seed, step, rows)


def all_reduce_metrics(
    unread: dict[int, Tensor], device: torch.device, counts: Sequence[int]
) -> tuple[list[list[float]], list[int]]:
    """Sum losses and gradient norms of each step over the workers in one collective, which also carries some counts.

    Between records and evaluations, training waits for the device only here.
    """
    own = torch.tensor(counts, dtype=torch.float64, device=device)
    numbers = torch.cat([own, *(each.double() for each in unread.values())])
    if dist.is_initialized():
        dist.all_reduce(numbers)
    sums, at = numbers.tolist(), len(counts)
    return [sums[start : start + 2] for start in range(at, len(sums), 2)], [int(each) for each in sums[:at]]


def largest(number: int) -> int:
    """Return the largest of all workers' numbers."""
    if not dist.is_initialized():
        return number
    numbers = torch.tensor([number], device=ray.train.torch.get_device())
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return int(numbers)


def await_results(evaluator: Evaluator, prober: Prober) -> None:
    """Wait for rank 0's separate evaluations and probes.

    The workers repeat a short collective meanwhile, because a single one would exceed its time limit. The wait for
    probes has a limit, too.
    """
    while largest(int(not evaluator.is_ready(MEET_SECONDS))):
        continue
    since = time.monotonic()
    while largest(int(not prober.is_ready(MEET_SECONDS, time.monotonic() - since))):
        continue


def describe_broken_loss(context: WorkerContext, train: Stream, step: int, loss: float) -> str:
    """Return the step, learning rate and images of a broken loss, and the last checkpoint."""
    epoch, within = divmod(step, train.steps)
    first = within * train.spec.batch
    rows = train.order(epoch).at(np.arange(first, first + train.spec.batch))[0]
    keys = [key for _, _, key in read_rows(rows[:8], train.rows).values()]
    saved = checkpoints.complete_steps(context.run_dir)
    last = checkpoints.folder_of(context.run_dir, saved[-1]) if saved else "none"
    lr = learning_rate(context.run.optim, length_of(context.run.optim, train.steps), step)
    images = f"{', '.join(keys)} and {len(rows) - len(keys)} more" if len(rows) > len(keys) else ", ".join(keys)
    return f"loss {loss:.4g} at step {step}, learning rate {lr:.3g}, images {images}; last good checkpoint: {last}"
