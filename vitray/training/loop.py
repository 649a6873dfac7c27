"""The training loop on each worker: a page to read from top to bottom.

Images, augmentation, mixing, dropout and learning rate are functions of (seed, step). A checkpoint therefore holds no
random state, and a resumed run continues exactly.
"""

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vitray.data.stream.batches import Share
from vitray.data.stream.decoding import read_rows
from vitray.data.stream.prefetch import Prefetcher, all_reduce_max, new_share
from vitray.data.stream.stream import Stream
from vitray.metrics.scores import gather_names
from vitray.models.precision import precision_on
from vitray.training import checkpoints
from vitray.training.checkpoints import Saver
from vitray.training.data import training_spec, with_masks
from vitray.training.evaluator import Evaluator, evaluation_message, log_scores
from vitray.training.host import Host, Notice
from vitray.training.learner import Learner, build_learner, checkpoint_of, resume, rewind, wrap_model
from vitray.training.local_batch import with_local_batch
from vitray.training.messages import CheckpointSaved, Ending, Note, WorkerResult, WorkersStarted
from vitray.training.prober import Prober, log_probes
from vitray.training.profiling import measure_costs
from vitray.training.resolved import ResolvedRun
from vitray.training.schedule import (
    CheckTimer,
    Triggers,
    learning_rate,
)
from vitray.training.state import TrainState
from vitray.training.step import take_step

# Seconds between two collectives of the workers while rank 0 waits at the end of a run.
MEET_SECONDS = 5.0


def train_loop(resolved: ResolvedRun, run_dir: str, host: Host) -> WorkerResult:
    """Take every step from the last checkpoint to the end."""
    worker, state = start_worker(resolved, run_dir, host)
    progress, ending = Progress.starting(worker, state), None
    try:
        while progress.state.step < resolved.length.total and ending is None:
            train_step(worker, progress)
            step = progress.state.step
            is_check = step == progress.next_check
            if step not in worker.triggers and not is_check:
                continue
            meeting = meet(worker, progress, is_check)
            if broken := find_broken(worker, progress, meeting):
                progress.close()
                if resolved.run.guard.on_nan == "stop" or progress.state.rewinds >= resolved.run.guard.max_rewinds:
                    return WorkerResult("failed", *broken)
                progress = go_back(worker, progress.state, *broken)
                continue
            record(worker, progress, meeting)
            notice = host.notice() if is_check else None
            if step in worker.triggers or meeting.is_interrupted or notice is not None:
                evaluate(worker, progress)
                progress.since = time.perf_counter()
                save(worker, progress, meeting, notice)
                ending = decide(worker, progress, meeting, notice)
            else:
                progress.since = time.perf_counter()
        return finish(worker, progress, ending or "finished")
    except BaseException:
        progress.abandon()
        raise


# ---- what a worker works with ----------------------------------------------------------------------------------------


class Worker(NamedTuple):
    """The parts of a worker, the same from its start to its end."""

    resolved: ResolvedRun
    run_dir: str
    host: Host
    share: Share
    learner: Learner
    train: Stream
    evaluator: Evaluator | None
    prober: Prober
    triggers: Triggers

    def largest(self, number: int) -> int:
        """Return the largest of all workers' numbers."""
        return all_reduce_max(number, self.host.device)

    def has_collapsed(self, state: TrainState) -> bool:
        """Whether guard.on_collapse stops the run; only rank 0 has probes."""
        return self.resolved.run.guard.on_collapse == "stop" and state.collapse is not None


@dataclass
class Progress:
    """The variables of the loop between two steps, of which `state` is saved."""

    state: TrainState
    batches: Prefetcher
    saver: Saver | None
    """On rank 0."""
    timer: CheckTimer
    next_check: int
    since: float
    """The time after the last record or evaluation, on the performance counter."""
    unread: dict[int, Tensor] = field(default_factory=dict)
    """{step: loss and gradient norm}, still on the device."""
    steps: int = 0
    """Since the last record."""
    seconds: float = 0.0
    """Of training, since the last record."""

    @staticmethod
    def starting(worker: Worker, state: TrainState) -> "Progress":
        """Return the loop's variables at a state, and start to read images and to save."""
        resolved, host, share = worker.resolved, worker.host, worker.share
        stream = worker.train.train(state.step, resolved.length.total, share)
        batches = (with_masks(batch, resolved.run, batch.epoch) for batch in stream)
        saver = None
        if host.rank == 0:
            saver = Saver(
                worker.run_dir,
                resolved.run.checkpoint.keep,
                on_saved=lambda step: host.send(CheckpointSaved(step)),
                on_delay=lambda text: host.send(Note(text)),
                check=host.check_owner,
            )
        prefetcher = Prefetcher(batches, host.device, worker.largest)
        return Progress(state, prefetcher, saver, CheckTimer(state.step), state.step + 1, time.perf_counter())

    def close(self) -> None:
        """Stop to read ahead, and wait until all checkpoints are written."""
        self.batches.close()
        if self.saver:
            self.saver.close()

    def abandon(self) -> None:
        """Let the threads end without waiting for them: this process may go on after an error."""
        self.batches.abandon()
        if self.saver:
            self.saver.abandon()


def prepared(resolved: ResolvedRun, host: Host) -> ResolvedRun:
    """Set the threads and the products of this process, and return the run with a local batch that fits."""
    if host.device.type == "cpu":
        torch.set_num_threads(host.threads)
    torch.set_float32_matmul_precision("high" if resolved.run.compute.tf32 else "highest")
    return with_local_batch(resolved, host)


def start_worker(resolved: ResolvedRun, run_dir: str, host: Host) -> tuple[Worker, TrainState]:
    """Return the parts of this worker and the state of the last checkpoint; all workers call this together."""
    run, device = resolved.run, host.device
    share = new_share(host.rank, host.workers, host.node)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    precision, mode = precision_on(device, run.compute.precision), run.compute.compile_on(device.type)
    host.send(WorkersStarted(name, host.workers, precision, mode))
    resolved = prepared(resolved, host)
    if run.compute.local_batch == "auto":
        run = resolved.run
        host.send(Note(f"at most {run.compute.local_batch:,} images a pass fit (compute.local_batch=auto)"))
    learner = build_learner(run, host)
    state = resume(run_dir, learner, host)
    learner = wrap_model(learner, run)
    train = host.open_stream(training_spec(resolved, device.type))
    assert train.steps == resolved.length.epoch, f"{train.steps} steps an epoch, resolved to {resolved.length.epoch}"
    evaluator = Evaluator(resolved, run_dir, host, learner) if run.data.evaluated else None
    if evaluator is not None and (lost := evaluator.restart_pending(state)):
        host.send(Note(f"the evaluation at step {lost} was lost when the run was interrupted"))
    prober = Prober(run, run_dir, host)
    prober.restart_pending(state)
    triggers = Triggers(resolved.intervals, resolved.length.total)
    return Worker(resolved, run_dir, host, share, learner, train, evaluator, prober, triggers), state


# ---- the parts of the loop, in their order ---------------------------------------------------------------------------


def train_step(worker: Worker, progress: Progress) -> None:
    """Take the next step, unless it is one to skip."""
    resolved, host, state = worker.resolved, worker.host, progress.state
    step = state.step
    host.at(step, "images")
    batch = next(progress.batches)
    host.at(step, "computation")
    if step not in state.skipped:
        loss_and_norm = take_step(resolved.run, step, batch, worker.share, worker.learner, resolved.length)
        progress.unread[step] = loss_and_norm
    state.step += 1
    host.progress(state.step)


class Meeting(NamedTuple):
    """What all workers know after a check or at a record."""

    losses: list[float]
    """Of the steps since the last meeting; the norm of a gradient that is not finite, as it has corrupted the weights
    even if the loss is finite."""
    grad_norm: float
    """Of the last step."""
    is_interrupted: bool
    """Whether a worker was asked to save and end."""


def meet(worker: Worker, progress: Progress, is_check: bool) -> Meeting:
    """Exchange losses, requests to stop, the next check and corrupt images with all workers."""
    host, train, state = worker.host, worker.train, progress.state
    host.at(state.step - 1, "metrics")
    interval = progress.timer.steps_to_next(state.step) if is_check and host.rank == 0 else 0
    is_stopping = host.stop_requested() or worker.has_collapsed(state)
    corrupt = train.new_corrupt()
    metrics, (stops, interval, new) = all_reduce_metrics(
        progress.unread, host.device, [is_stopping, interval, len(corrupt)]
    )
    if new:
        train.merge_corrupt(gather_names(corrupt))
    elapsed = time.perf_counter() - progress.since
    progress.steps, progress.seconds = progress.steps + len(progress.unread), progress.seconds + elapsed
    state.seconds += elapsed
    if is_check:
        progress.next_check = state.step + interval
    losses = [loss if math.isfinite(norm) else norm for loss, norm in metrics]
    return Meeting(losses, metrics[-1][1] if metrics else 0.0, stops > 0)


def find_broken(worker: Worker, progress: Progress, meeting: Meeting) -> tuple[int, str] | None:
    """Return the first step since the last meeting whose loss is broken, and what is known of it; None without one."""
    broken = progress.state.first_broken(meeting.losses, worker.resolved.run.guard.spike)
    if broken is None:
        return None
    step = list(progress.unread)[broken]
    return step, describe_broken_loss(worker, step, meeting.losses[broken])


def go_back(worker: Worker, state: TrainState, bad_step: int, reason: str) -> Progress:
    """Return to the last checkpoint, from which the broken step is skipped."""
    earlier = rewind(worker.run_dir, worker.learner, worker.host, state, bad_step)
    if worker.evaluator is not None:
        worker.evaluator.discard_after(earlier.step)
    worker.prober.discard_after(earlier.step)
    text = f"{reason}; training continues from step {earlier.step} and skips step {bad_step + 1}"
    worker.host.send(Note(text))
    return Progress.starting(worker, earlier)


def record(worker: Worker, progress: Progress, meeting: Meeting) -> None:
    """Keep the losses, and send the metrics of a step that records."""
    resolved, host, state = worker.resolved, worker.host, progress.state
    optim, length, task = resolved.run.optim, resolved.length, worker.learner.task
    state.add_losses(meeting.losses)
    progress.unread = {}
    if not worker.triggers.records(state.step) or not state.losses:
        return
    values = {
        "train/loss": sum(state.losses) / len(state.losses),
        "train/lr": learning_rate(optim, length, state.step - 1),
        "train/images_per_second": progress.steps * optim.batch / progress.seconds,
        "train/data_wait_share": min(1.0, progress.batches.waited / progress.seconds),
        "train/grad_norm": meeting.grad_norm,
        "train/epoch": state.step / length.epoch,
        "data/corrupt": float(len(worker.train.corrupt)),
    }
    values |= {f"train/{name}": value for name, value in task.read_metrics(training=True).items()}
    host.send(state.recorded(state.step, values))
    if progress.saver and not progress.saver.is_prepared:  # now the optimizer has its tensors
        progress.saver.prepare(checkpoint_of(resolved.run, worker.learner, state, worker.share))
    saved = progress.saver and progress.saver.latest
    host.report(state.step, values, None if saved is None else checkpoints.folder_of(worker.run_dir, saved))
    host.sample(state.step)
    state.losses, progress.steps, progress.seconds, progress.batches.waited = [], 0, 0.0, 0.0


def evaluate(worker: Worker, progress: Progress) -> None:
    """Start the evaluation and the probes of a step that has them, and send the results that have come in."""
    evaluator, prober, host, state = worker.evaluator, worker.prober, worker.host, progress.state
    host.at(state.step - 1, "evaluation")
    if evaluator is None:
        return
    if worker.triggers.evaluates(state.step):
        evaluator.start(state.step)
        prober.start(state.step, worker.learner, is_last=state.step == worker.resolved.length.total)
    log_scores(evaluator.finished(), worker.resolved.run, state, host)
    log_probes(prober.finished(), worker.resolved.run, state, host)
    state.pending, state.pending_probes = evaluator.pending, prober.pending


def save(worker: Worker, progress: Progress, meeting: Meeting, notice: Notice | None) -> None:
    """Save a checkpoint if one is due, or if the workers may end."""
    state = progress.state
    worker.host.at(state.step - 1, "checkpoint")
    if notice is not None:
        worker.host.send(Note(f"a node is about to be preempted: step {state.step:,} is saved"))
    if progress.saver and (worker.triggers.saves(state.step) or meeting.is_interrupted or notice is not None):
        checkpoint = checkpoint_of(worker.resolved.run, worker.learner, state, worker.share)
        progress.saver.save(checkpoint, state.protected_steps)


def decide(worker: Worker, progress: Progress, meeting: Meeting, notice: Notice | None) -> Ending | None:
    """Return why training ends before its last step; None if it goes on."""
    step = progress.state.step
    if step == worker.resolved.length.total:
        return None
    if worker.evaluator is not None and worker.triggers.evaluates(step) and worker.host.should_stop(step):
        return "stopped early"
    if meeting.is_interrupted:
        return "interrupted"
    if notice is not None and notice.restarts:
        return "preempted"  # later steps would be lost, and the next workers can start while the node still runs
    return None


def finish(worker: Worker, progress: Progress, ending: Ending) -> WorkerResult:
    """Wait for the evaluations of a finished run and for the last checkpoint, and return the result."""
    run, host, total = worker.resolved.run, worker.host, worker.resolved.length.total
    evaluator, prober, state = worker.evaluator, worker.prober, progress.state
    host.at(state.step, "evaluation")
    if ending == "finished" and evaluator is not None:
        if evaluator.latest_step != total:  # interrupted before the last evaluation
            evaluator.start(total)
            if total not in prober.pending:
                prober.start(total, worker.learner, is_last=True)
        await_results(worker)
        log_scores(evaluator.finished(wait=True), run, state, host)
        log_probes(prober.finished(wait=True), run, state, host)
        if state.latest:
            host.send(evaluation_message(state.latest))
    progress.close()
    if worker.largest(int(worker.has_collapsed(state))) and ending != "stopped early":
        return WorkerResult("failed", state.step, f"stopped by guard.on_collapse: {state.collapse}")
    is_over = ending not in ("interrupted", "preempted")
    return WorkerResult(
        ending,
        state.step,
        seconds=state.seconds,
        workers=host.workers,
        precision=precision_on(host.device, run.compute.precision),
        val_top1=state.latest.top1 if state.latest else None,
        val_map=state.latest.map if state.latest else None,
        thresholds=state.latest.thresholds if state.latest else None,
        val_loss=state.latest.loss if state.latest else None,
        best_step=state.best_step,
        corrupt=list(worker.train.corrupt),
        skipped=state.skipped,
        costs=measure_costs(run, worker.learner.task.vit, host.device) if is_over else {},
    )


def await_results(worker: Worker) -> None:
    """Wait for rank 0's separate evaluations and probes.

    The workers repeat a short collective meanwhile, because a single one would exceed its time limit. The wait for
    probes has a limit, too.
    """
    assert worker.evaluator is not None
    while worker.largest(int(not worker.evaluator.is_ready(MEET_SECONDS))):
        continue
    since = time.monotonic()
    while worker.largest(int(not worker.prober.is_ready(MEET_SECONDS, time.monotonic() - since))):
        continue


def describe_broken_loss(worker: Worker, step: int, loss: float) -> str:
    """Return the step, counted from 1, learning rate and images of a broken loss, and the last checkpoint."""
    train, resolved = worker.train, worker.resolved
    epoch, within = divmod(step, train.steps)
    first = within * train.spec.batch
    rows = train.order(epoch).at(np.arange(first, first + train.spec.batch))[0]
    keys = [key for _, _, key in read_rows(rows[:8], train.rows).values()]
    saved = checkpoints.complete_steps(worker.run_dir)
    last = checkpoints.folder_of(worker.run_dir, saved[-1]) if saved else "none"
    lr = learning_rate(resolved.run.optim, resolved.length, step)
    images = f"{', '.join(keys)} and {len(rows) - len(keys)} more" if len(rows) > len(keys) else ", ".join(keys)
    where = f"loss {loss:.4g} at step {step + 1}, learning rate {lr:.3g}, images {images}"
    look = shlex.join(["vitray", "replay", worker.run_dir, "--step", str(step + 1)])
    return f"{where}; last good checkpoint: {last}; `{look}` shows its images"


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
