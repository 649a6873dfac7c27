"""Logging of a run: a driver thread passes the workers' messages on to MLflow and to the console."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Protocol, assert_never

import numpy as np

from vitray.cluster import local_ray
from vitray.config.training import Data
from vitray.data.augment.contact_sheets import Prediction, prediction_sheet
from vitray.data.augment.decode import decode_image
from vitray.data.stream.decoding import locate_rows, read_rows
from vitray.data.stream.preview import sample_sheet
from vitray.errors import cut_middle, one_line
from vitray.metrics.arrays import Examples
from vitray.runs.callback import Callback
from vitray.runs.console import Console, RunConsole
from vitray.runs.placement import Placement
from vitray.runs.resolve import plan_of
from vitray.runs.run_dir import OUTCOME, Outcome, RunFolder, resume_command
from vitray.runs.run_summary import (
    best_block,
    describe_run,
    end_block,
    evaluated_identity,
    incident_block,
    placement_block,
    run_datasets,
)
from vitray.runs.trial_hook import TrialHook
from vitray.system import host_facts, storage
from vitray.tracking.lineage import ModelScores
from vitray.tracking.model_registry import VersionScore
from vitray.tracking.tracker import TrackedRun, Tracker
from vitray.training import checkpoints, messages
from vitray.training.data import training_spec
from vitray.training.profiling import peak_flops
from vitray.training.resolved import ResolvedRun
from vitray.weights import SavedModel
from vitray.weights.addresses import BASE_IDENTITY_TAG, BASE_TAG
from vitray.weights.freezing import audit_table

# Share of the time above which the warning appears.
WARNING_SHARE = 0.05
# Notes kept in the run's tag, which holds 8000 characters.
MAX_NOTES = 20
LONGEST_NOTE = 400


class Best(NamedTuple):
    """A step and its scores."""

    step: int
    scores: Mapping[str, float]


class BestCheckpoint:
    """Pairs the best scores so far with the checkpoint of their step."""

    def __init__(self) -> None:
        self._saved: set[int] = set()
        self._best: Best | None = None
        self._best_value: float | None = None

    def evaluated(self, step: int, values: Mapping[str, float]) -> Best | None:
        """Note the metrics of a step; return its scores if they are the best and its checkpoint is complete."""
        score = next((name for name in ("top1", "map") if f"best/val_{name}" in values), "loss")
        best = values.get(f"best/val_{score}")
        # Those of the averaged weights count, if there are any.
        own = values.get(f"val/{score}_ema", values.get(f"val/{score}"))
        if best is None or own != best or best == self._best_value:
            return None
        scores = {name: value for name, value in values.items() if name.startswith("val/")}
        self._best, self._best_value = Best(step, scores), best
        return self._best if step in self._saved else None

    @property
    def without_checkpoint(self) -> Best | None:
        """The best scores so far, if no checkpoint has their weights."""
        return self._best if self._best and self._best.step not in self._saved else None

    def saved(self, step: int) -> Best | None:
        """Note a complete checkpoint; return its scores if they are the best."""
        self._saved.add(step)
        return self._best if self._best and self._best.step == step else None


class WaitWarning:
    """Whether to warn: once in a run, at its first large data-wait share."""

    def __init__(self, data: Data, has_gpu: bool, is_here: bool = False) -> None:
        self._remedy = best_remedy(data, has_gpu, is_here)
        self._is_warm, self._is_done = False, False

    def restart(self) -> None:
        """Ignore the next report: it includes the start of the tasks that decode."""
        self._is_warm = False

    def report(self, share: float) -> str | None:
        """Return the warning at the first share above 5 % that does not include a start, else None."""
        is_warm, self._is_warm = self._is_warm, True
        if not is_warm or self._is_done or share <= WARNING_SHARE:
            return None
        self._is_done = True
        return f"training waits for images {share:.0%} of the time: {self._remedy}; docs/faq.md#data-wait"


def best_remedy(data: Data, has_gpu: bool, is_here: bool = False) -> str:
    """Return the setting that lowers the CPU time of an image most, of those that change no pixel."""
    augment = data.augment
    is_costly = augment.policy.kind != "none" or augment.jitter > 0
    if has_gpu and is_costly and augment.resolved(has_gpu).on == "tasks":
        return "set data.augment.on=device"
    if data.cache == "none":
        place = "memory" if is_here else "Ray's object store"
        return f"set data.cache=decoded, if the pixels fit into {place}"
    return "train on Ray, which decodes on all CPUs of a cluster" if is_here else "add CPUs to the cluster"


class Inbox(Protocol):
    """The workers' messages, and the way back to them."""

    def take(self) -> list[messages.Message]:
        """Return all messages since the last call."""
        ...

    def decide(self, step: int, stop: bool) -> None:
        """Tell the workers whether training stops early after the evaluation of a step."""
        ...


class RunLogger:
    """MLflow and console logging of one run, from start to end."""

    def __init__(
        self,
        resolved: ResolvedRun,
        folder: RunFolder,
        placement: Placement,
        inbox: Inbox,
        console: Console,
        called: float,
        callback: Callback | None = None,
        hook: TrialHook | None = None,
    ) -> None:
        """`called` is the time of the call of `train`, on the monotonic clock."""
        self._resolved, self._run, self._folder = resolved, resolved.run, folder
        self._placement, self._inbox = placement, inbox
        self.console, self._called, self.hook = console, called, hook
        self._callback = callback or Callback()
        self._progress = RunConsole(resolved, console)
        self._stages: dict[str, float] = {}
        if not placement.is_here:
            self.reached("ray")
        self._history: dict[str, list[tuple[int, float]]] = {}
        self._tagged: dict[str, float] = {}
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._device, self._precision = "CPU", "fp32"
        self._best = BestCheckpoint()
        is_here = placement.is_here and not (hook and hook.own_cpus)  # a trial on Ray Tune could cache pixels
        self._wait_warning = WaitWarning(resolved.run.data, placement.use_gpu, is_here)
        self._has_pictures = False
        self._datasets = run_datasets(resolved)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="run-logger", daemon=True)
        self._tracker = self._begin_tracking()

    def _begin_tracking(self) -> Tracker:
        resolved, run, folder = self._resolved, self._run, self._folder
        initial, teacher = resolved.initial, resolved.teacher
        tags = {"vitray.dataset": resolved.dataset.url, "vitray.home": folder.url}
        if folder.forked_from:
            tags["vitray.forked_from"] = folder.forked_from
        if initial:
            tags |= {BASE_TAG: initial.url, BASE_IDENTITY_TAG: initial.identity}
        if teacher:
            tags["vitray.teacher"] = teacher.url
        parent = self.hook.parent_uid if self.hook else None
        plan = {f"plan.{key}": value for key, value in plan_of(resolved).items() if value is not None}
        tracker = Tracker(
            TrackedRun(folder.uid, folder.name, run.tracking.experiment, parent, folder.starts),
            run.dotted() | plan,
            tags | host_facts.facts(),
            describe_run(resolved, self._placement),
        )
        tracker.datasets(self._datasets)
        tracker.text("run.yaml", run.to_yaml())
        if initial:
            tracker.text("audit.md", audit_table(initial.audit))
        return tracker

    def reached(self, stage: str) -> None:
        """Note the time of a stage of the start, the first time that it is reached."""
        self._stages.setdefault(stage, time.monotonic() - self._called)

    def __enter__(self) -> "RunLogger":
        self._tracker.__enter__()
        self.console.block(placement_block(self._resolved, self._placement))
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop_thread()
        if isinstance(error[1], KeyboardInterrupt | SystemExit):
            here = " --here" if self._placement.is_here else ""
            resume = f"{resume_command(self._folder.name, self._folder.url)}{here}"
            self.console.line(f"  stopped; `{resume}` continues from the last checkpoint")
        self._tracker.__exit__(*error)

    def finish(self, result: messages.WorkerResult, saved: SavedModel | None) -> Outcome:
        """Log the final numbers, curves and model, and write the outcome; `saved` is None after an early stop."""
        # Matplotlib takes a second to import.
        from vitray.runs.registered_figures import log_registered_figures
        from vitray.tracking import figures

        self._stop_thread()
        run, folder = self._run, self._folder
        model = storage.join(folder.url, "model") if saved else None
        complete = checkpoints.complete_steps(folder.url) if saved else []
        # The first record includes the start.
        speeds = [speed for _, speed in self._history.get("train/images_per_second", [])[1:]]
        speed = median(speeds) if speeds else None
        costs = self._costs(result, speed)
        if saved:
            costs |= {"model/bytes": float(saved.bytes), "model/share": saved.share}
        self._tracker.params(costs)
        self._tracker.figure("curves.png", figures.draw_curves(self._history))
        if model:
            moves_champion = run.tracking.promote is None  # else the driver compares the version first
            scored_on = evaluated_identity(run.data, self._resolved.dataset)
            score = VersionScore.of(result.val_top1, result.val_map)
            self._tracker.model(model, run.tracking.register_as, score, scored_on, moves_champion=moves_champion)
            if run.tracking.register_as and (fault := log_registered_figures(self._tracker, model)):
                self._log(messages.Note(fault))
            if scores := self._last_scores(result.step):
                self._tracker.scores(model, ModelScores(result.step, scores, self._datasets[-1]))
            best = self._best.without_checkpoint
            if best and best.step not in complete:  # saved before this start
                text = f"step {best.step:,} has the best scores and no checkpoint, so MLflow has no logged model of it"
                self._log(messages.Note(f"{text}; expected checkpoint.every in minutes, or as often as evaluate.every"))
            self._tracker.end("FINISHED")
        else:
            self._tracker.tag("vitray.stopped_early", f"at step {result.step}")
            self._tracker.end("KILLED", f"stopped early at step {result.step}, by the scheduler of its sweep")
        outcome = Outcome(
            name=folder.name,
            home=folder.url,
            state="finished" if saved else "stopped early",
            model=model,
            model_bytes=saved.bytes if saved else None,
            val_top1=result.val_top1,
            val_loss=result.val_loss,
            mlflow_run=self._tracker.run_id,
            steps=result.step,
            seconds=result.seconds,
            images_per_second=speed,
            start={stage: round(seconds, 2) for stage, seconds in self._stages.items()},
            best_step=result.best_step,
            val_map=result.val_map,
        )
        # Written last, because it marks the run as finished.
        content = outcome._asdict() | {"curves": self._history, "device_seconds": costs["cost/device_seconds"]}
        content |= {"val_images": self._resolved.val_images}
        storage.write_bytes(storage.join(folder.url, OUTCOME), json.dumps(content | dict(result.costs)).encode())
        if saved:
            facts = end_block(self._resolved.val_images, outcome, costs, saved)
            facts |= best_block(outcome, complete)
            facts["tracking"] = self._tracker.run_url()
            facts["next"] = f"vitray ui        or: vitray model {outcome.model}"
            self.console.block(facts | incident_block(result))
        return outcome

    def _last_scores(self, step: int) -> dict[str, float]:
        """Return the scores of the weights in the model folder, which are the averaged ones where there are some."""
        history = self._history.items()
        last = {key: points[-1][1] for key, points in history if key.startswith("val/") and points[-1][0] == step}
        return {key: value for key, value in last.items() if key.endswith("_ema")} or last

    def _costs(self, result: messages.WorkerResult, speed: float | None) -> dict[str, float]:
        teacher, batch = self._resolved.teacher, self._run.optim.batch
        images, device_seconds = result.step * batch, result.seconds * result.workers
        # A multiply-add is two operations.
        flops = 2e9 * self._resolved.costs.step_gflops * images
        costs = {"cost/device_seconds": device_seconds, "cost/images": float(images), "cost/flops": flops}
        if teacher:
            costs["cost/teacher_flops"] = 2e9 * teacher.gflops * images
        costs |= {f"cost/{name}": value for name, value in result.costs.items()}
        if speed:
            costs["cost/step_ms"] = 1000 * batch / speed
        if peak := peak_flops(self._device, self._precision):
            costs["cost/mfu"] = flops / device_seconds / peak
        return costs

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._guarded(self._draw_samples)
        is_last = False
        while not is_last:  # after the stop, the last messages are fetched
            is_last = self._stopped.wait(0.25)
            for message in self._inbox.take():
                self._guarded(partial(self._log, message))

    def _guarded(self, log: Callable[[], None]) -> None:
        """Call `log`; an error becomes a note, as training goes on and may wait for this thread's decisions."""
        try:
            log()
        except Exception as error:
            text = f"could not log to MLflow: {one_line(error)}"
            with suppress(Exception):
                self._log(messages.Note(cut_middle(text, LONGEST_NOTE)))

    def _draw_samples(self) -> None:
        spec = training_spec(self._resolved, "cpu")
        sheet = sample_sheet(self._resolved.dataset, spec.split, spec.kinds)
        self._tracker.figure("augmented.png", sheet)

    def _stop_thread(self) -> None:
        self._stopped.set()
        if self._thread.is_alive() and not local_ray.is_lost():  # the mailbox is lost with it
            self._thread.join()

    def _log(self, message: messages.Message) -> None:
        match message:
            case messages.WorkersStarted(device=device, workers=workers, precision=precision, compile=mode):
                self.reached("workers")
                self._device, self._precision = device, precision
                self._tracker.params({"plan.precision": precision, "plan.compile": mode or "none"})
                compiled = f", compiled ({mode})" if mode else ""
                self.console.line(f"  {workers} worker{'s' * (workers != 1)} on {device}, {precision}{compiled}")
            case messages.Resumed(step=step, workers=workers):
                self._progress.resume(step, workers)
                self._wait_warning.restart()
            case messages.StepDone(step=step):
                self._log_start()
                self._progress.progress(step)
            case messages.Metrics():
                self._log_metrics(message)
            case messages.Evaluation():
                self._draw(message)
            case messages.Pictures(step=step, pictures=pictures):
                from vitray.tracking import figures

                normalize = self._run.data.normalize
                png = figures.draw_pictures(pictures, normalize)
                self._tracker.figure("reconstructed.png", png)
                if self._is_first_picture(step):
                    self._tracker.image("examples/reconstructed", 0, figures.draw_pictures(pictures[:1], normalize))
                self._tracker.image("examples/reconstructed", step, png)
            case messages.ExamplePictures(step=step, examples=examples):
                self._draw_examples(step, examples)
            case messages.FigurePictures(step=step, pictures=pictures):
                for name, png in pictures.items():
                    self._tracker.image(f"figures/{name}", step, png)
            case messages.Note(text=text):
                self.console.line(f"  {text}")
                self._notes.append(text)
                self._tracker.tag("vitray.note", "\n".join(self._notes))
            case messages.CheckpointSaved(step=step):
                self._tracker.tag("vitray.checkpoint", str(step))
                self._tell(self._callback.on_checkpoint, step, checkpoints.folder_of(self._folder.url, step))
                self._log_best(self._best.saved(step))
            case _:
                assert_never(message)

    def _log_metrics(self, message: messages.Metrics) -> None:
        step, values = message.step, message.values
        if self.hook and "val/loss" in values:
            self._decide(self.hook, step, values)
        best = {key: value for key, value in values.items() if key.startswith("best/")}
        self._tracker.metrics(step, {key: value for key, value in values.items() if key not in best})  # once a step
        for key, value in best.items():
            if self._tagged.get(key) != value:
                self._tracker.tag(key, repr(value))
        self._tagged |= best
        for key, value in values.items():
            points = self._history.setdefault(key, [])
            if not points or points[-1][0] < step:
                points.append((step, value))
        if message.is_repeated:
            self._has_pictures |= "val/loss" in values  # they came with an earlier start
        else:
            self._progress.metrics(values, step)
            self._tell(self._callback.on_step if "train/loss" in values else None, step, values)
            self._tell(self._callback.on_evaluation if "val/loss" in values else None, step, values)
            share = values.get("train/data_wait_share")
            if share is not None and (warning := self._wait_warning.report(share)):
                self._log(messages.Note(warning))
        self._log_best(self._best.evaluated(step, values))

    def _tell(self, function: Callable[[int, Any], None] | None, step: int, what: Any) -> None:
        """Call a function of the caller; an error of it becomes a note."""
        try:
            if function:
                function(step, what)
        except Exception as error:
            self._log(messages.Note(cut_middle(f"a callback failed at step {step:,}: {one_line(error)}", LONGEST_NOTE)))

    def _decide(self, hook: TrialHook, step: int, values: dict[str, float]) -> None:
        """Send the sweep's decision; without one the run goes on."""
        stop = False
        try:
            stop = hook.should_stop(step, self._resolved.length.total, values)
        finally:
            self._inbox.decide(step, stop)

    def _log_best(self, best: Best | None) -> None:
        if best is None:
            return
        name = f"{self._run.model.name.replace('/', '-')}-best"
        folder = checkpoints.folder_of(self._folder.url, best.step)
        self._tracker.checkpoint(folder, name, ModelScores(best.step, best.scores, self._datasets[-1]))

    def _log_start(self) -> None:
        """Log the duration of the start, once after the first step."""
        if "first step" in self._stages:
            return
        self.reached("first step")
        for stage, seconds in self._stages.items():
            self._tracker.tag(f"start/{stage.replace(' ', '_')}_seconds", f"{seconds:.2f}")

    def _draw(self, evaluation: messages.Evaluation) -> None:
        confusion, mistakes = evaluation
        if confusion is None:
            return
        from vitray.tracking import figures

        dataset, split = self._resolved.dataset, self._run.data.evaluated
        classes = dataset.classes
        self._tracker.figure("confusion.png", figures.draw_confusion(confusion, classes))
        if not mistakes or split is None:
            return
        images = read_rows(np.array([row for _, row, _, _ in mistakes]), locate_rows(dataset, split))
        drawn = []
        for probability, row, label, predicted in mistakes:
            content, _, key = images[row]
            drawn.append(
                figures.MistakePicture(decode_image(content), classes[label], classes[predicted], probability, key)
            )
        self._tracker.figure("mistakes.png", figures.draw_mistakes(drawn))

    def _draw_examples(self, step: int, examples: Examples) -> None:
        classes = self._resolved.dataset.classes
        attention = [None] * len(examples.images) if examples.attention is None else examples.attention
        columns = (examples.images, examples.labels, examples.predicted, examples.probabilities, attention)
        if self._run.has_several_labels:

            def names(flags_K: np.ndarray) -> str:
                return ", ".join(classes[label] for label in np.flatnonzero(flags_K)) or "none"

            drawn = [
                Prediction(image, names(states == 1), names(predicted & (states >= 0)), None, attention)
                for image, states, predicted, _, attention in zip(*columns, strict=True)
            ]
        else:
            drawn = [
                Prediction(image, classes[label], classes[predicted], float(probability), attention)
                for image, label, predicted, probability, attention in zip(*columns, strict=True)
            ]
        if self._is_first_picture(step):
            known = [each._replace(predicted=None) for each in drawn]
            title = f"step 0: the images and their classes; the first predictions are of step {step:,}"
            self._tracker.image("examples/predictions", 0, prediction_sheet(known, title))
        below = "" if examples.attention is None else ", and below attention rollout"
        png = prediction_sheet(drawn, f"step {step:,}: predictions{below}")
        self._tracker.image("examples/predictions", step, png)

    def _is_first_picture(self, step: int) -> bool:
        """Whether step 0, at which MLflow opens its image grid, would stay without a picture."""
        is_first, self._has_pictures = not self._has_pictures and step > 0, True
        return is_first
