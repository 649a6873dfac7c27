"""What the workers tell, passed on to MLflow and to the screen by a thread of the driver."""

import json
import platform
import threading
import time
from collections import deque
from statistics import median
from typing import Any, assert_never

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vitray import storage
from vitray.config import Run
from vitray.config.pretraining import Masked, Tokenizer
from vitray.config.training import Finetune, Supervised
from vitray.data.augment.decode import decode_image
from vitray.data.shards.manifest import Dataset
from vitray.data.stream.decoding import read_rows, rows_of
from vitray.data.stream.preview import sample_sheet
from vitray.runs.console import Display, clock
from vitray.runs.driver import ENDED, Layout, Member, Outcome
from vitray.runs.mailbox import Desk
from vitray.runs.plan import Plan
from vitray.tracking import Tracker, redact_uri, system_info, tracking_uri
from vitray.tracking.mlflow_client import BASE, BASE_IDENTITY
from vitray.weights import Saved
from vitray.weights.freezing import audit_table
from vitray.weights.pretrained import Start

# Multiply-adds per second of a device times two, dense, by the makers' data sheets: fp32 with TF32 products, and bf16.
PEAK_FLOPS = {
    "A100": {"fp32": 156e12, "bf16": 312e12},
    "H100": {"fp32": 494e12, "bf16": 989e12},
    "H200": {"fp32": 494e12, "bf16": 989e12},
    "L4": {"fp32": 60e12, "bf16": 121e12},
    "A10G": {"fp32": 35e12, "bf16": 70e12},
}
# The last of what befell a run, kept with it: a tag holds 8000 characters.
NOTES = 20


class Reporting:
    """The story of one run, told to MLflow and to the person who waits for it, from start to end."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        dataset: Dataset,
        name: str,
        home: str,
        uid: str,
        display: Display,
        layout: Layout,
        called: float,
        fork: str | None,
        start: Start | None,
        member: Member | None,
    ) -> None:
        self.run, self.plan, self.dataset, self.name, self.home = run, plan, dataset, name, home
        self.display, self.layout, self.called, self.start, self.member = display, layout, called, start, member
        self.stages: dict[str, float] = {"ray": time.monotonic() - called}
        self.history: dict[str, list[tuple[int, float]]] = {}
        self.notes: deque[str] = deque(maxlen=NOTES)
        self.device = "CPU"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.desk: Any = Desk.options(scheduling_strategy=here).remote()  # pyright: ignore[reportAttributeAccessIssue]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="reporting", daemon=True)
        tags = {"vitray.dataset": dataset.url, "vitray.home": home} | ({"vitray.forked_from": fork} if fork else {})
        if start:
            tags |= {BASE: start.url, BASE_IDENTITY: start.identity}
        self.tracker = Tracker.begin(
            uid=uid,
            name=name,
            experiment=run.tracking.experiment,
            params=run.dotted() | {f"plan.{key}": value for key, value in plan._asdict().items()},
            tags=tags | system_info.facts(),
            description=describe(run, plan, layout),
            parent=member.parent if member else None,
        )
        self.tracker.text("run.yaml", run.to_yaml())
        if start:
            self.tracker.text("audit.md", audit_table(start.audit))

    def __enter__(self) -> "Reporting":
        self.tracker.__enter__()
        self.display.start(start_block(self))
        if self.start:
            self.display.line("\n".join(f"  {line}" for line in audit_table(self.start.audit).splitlines()) + "\n")
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop()
        if isinstance(error[1], KeyboardInterrupt | SystemExit):
            self.display.line(f"  stopped; `vitray train --resume {self.name}` goes on from the last checkpoint")
        self.tracker.__exit__(*error)

    def finish(self, ended: dict[str, Any], saved: Saved | None) -> Outcome:
        """The last numbers and pictures, and the end block; a run that was stopped early has saved no model."""
        from vitray.tracking import figures  # Matplotlib takes a second, which a start must not

        self._stop()
        model = storage.join(self.home, "model") if saved else None
        seconds, devices = ended["seconds"], ended["workers"]
        images = ended["step"] * self.plan.global_batch
        # A multiply-add is two operations.
        flops = 2e9 * self.plan.gflops * passes(self.start) * images
        values = {"cost/device_seconds": seconds * devices, "cost/images": float(images), "cost/flops": flops}
        taken = {name: ended[name] for name in ("latency_ms", "peak_memory_bytes")}
        values |= {f"cost/{name}": value for name, value in taken.items()}
        # The first record holds the start.
        speeds = [speed for _, speed in self.history.get("train/images_per_second", [])[1:]]
        speed = median(speeds) if speeds else None
        if speed:
            values["cost/step_ms"] = 1000 * self.plan.global_batch / speed
        if saved:
            values |= {"model/bytes": float(saved.bytes), "model/share": saved.share}
        if peak := peak_flops(self.device, self.run.compute.precision):
            values["cost/mfu"] = flops / (seconds * devices) / peak
        self.tracker.metrics(ended["step"], values)
        self.tracker.figure("curves.png", figures.draw_curves(self.history))
        if model:
            self.tracker.model(model, register_as=self.run.tracking.register_as, top1=ended["val_top1"])
        if model:
            self.tracker.end("FINISHED")
        else:
            self.tracker.tag("vitray.stopped_early", f"at step {ended['step']}")
            self.tracker.end("KILLED", f"stopped early at step {ended['step']}, by the scheduler of its sweep")
        outcome = Outcome(
            name=self.name,
            home=self.home,
            state="finished" if saved else "stopped early",
            model=model,
            model_bytes=saved.bytes if saved else None,
            val_top1=ended["val_top1"],
            val_loss=ended["val_loss"],
            mlflow_run=self.tracker.run_id,
            steps=ended["step"],
            seconds=seconds,
            images_per_second=speed,
            start={stage: round(seconds, 2) for stage, seconds in self.stages.items()},
        )
        # Written last: a run that has it is over.
        content = outcome._asdict() | {"curves": self.history, "device_seconds": seconds * devices} | taken
        storage.write_bytes(storage.join(self.home, ENDED), json.dumps(content).encode())
        if saved:
            self.display.start(end_block(self, outcome, values, ended, saved))
        return outcome

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        sheet = sample_sheet(self.dataset, self.run.data.train, self.run.data.augment, self.run.model.image_shape)
        self.tracker.figure("augmented.png", sheet)
        while not self._ended.wait(0.25):
            self._fetch()
        self._fetch()

    def _stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _fetch(self) -> None:
        for record in ray.get(self.desk.take.remote()):
            self._hear(record)

    def _hear(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "workers":
                self.stages.setdefault("workers", time.monotonic() - self.called)  # not those that replace them
                self.device = record["device"]
                self.display.line(f"  {record['workers']} workers on {record['device']}")
            case "resumed":
                self.display.resume(record["step"], record["workers"])
            case "progress":
                self._begin(record["step"])
                self.display.progress(record["step"])
            case "metrics" | "metrics again":  # what has arrived already, tracking leaves out
                step, values = record["step"], record["values"]
                self.tracker.metrics(step, values)
                for key, value in values.items():
                    points = self.history.setdefault(key, [])
                    if not points or points[-1][0] < step:
                        points.append((step, value))
                if record["kind"] == "metrics":
                    self.display.metrics(values, step)
                if self.member and "val/loss" in values:
                    self.desk.decide.remote(step, self.member.is_enough(step, values))
            case "score":
                self._draw(record["confusion"], record["mistakes"])
            case "pictures":
                from vitray.tracking import figures

                pictures = figures.draw_pictures(record["pictures"], self.run.data.normalise)
                self.tracker.figure("reconstructed.png", pictures)
            case "note":
                self.display.line(f"  {record['text']}")
                self.notes.append(record["text"])
                self.tracker.tag("vitray.note", "\n".join(self.notes))
            case "saved":
                self.tracker.tag("vitray.checkpoint", str(record["step"]))
            case other:
                raise AssertionError(f"a worker said {other!r}, which nobody hears")

    def _begin(self, step: int) -> None:
        """The first step is done: what the start took."""
        if "first step" in self.stages:
            return
        self.stages["first step"] = time.monotonic() - self.called
        taken = {f"start/{stage.replace(' ', '_')}_seconds": seconds for stage, seconds in self.stages.items()}
        self.tracker.metrics(step, taken)

    def _draw(self, confusion: np.ndarray | None, mistakes: list[dict[str, Any]]) -> None:
        """The confusion matrix and the surest mistakes."""
        if confusion is None:
            return
        from vitray.tracking import figures

        classes = self.dataset.classes
        self.tracker.figure("confusion.png", figures.draw_confusion(confusion, classes))
        if not mistakes or self.run.data.evaluated is None:
            return
        found = read_rows(
            np.array([mistake["row"] for mistake in mistakes]), rows_of(self.dataset, self.run.data.evaluated)
        )
        shown_ones = []
        for mistake in mistakes:
            content, _, key = found[mistake["row"]]
            true, predicted = classes[mistake["label"]], classes[mistake["predicted"]]
            shown_ones.append(figures.Mistake(decode_image(content), true, predicted, mistake["probability"], key))
        self.tracker.figure("mistakes.png", figures.draw_mistakes(shown_ones))


def passes(start: Start | None) -> float:
    """The cost of a step in forward passes: the forward one, the way back, and the gradients of what trains."""
    if start is None:
        return 3.0
    is_head_alone = all(row.part == "head" for row in start.audit.rows if row.trained)
    return 1 + (start.audit.share if is_head_alone else 1) + start.audit.share


def peak_flops(device: str, precision: str) -> float | None:
    """The peak of a device by its name, where we know it."""
    return next((peak[precision] for name, peak in PEAK_FLOPS.items() if name in device), None)


# ---- words -----------------------------------------------------------------------------------------------------------


def start_block(story: Reporting) -> dict[str, str]:
    """What a person wants to know before waiting."""
    plan, layout, run = story.plan, story.layout, story.run
    lowest, highest = layout.workers
    workers = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
    local = plan.global_batch // highest
    passes = -(-local // (run.compute.local_batch or local))
    return {
        "run": story.name,
        "model": f"{plan.model}, {plan.params / 1e6:.2f} M parameters, {plan.gflops:.3g} GFLOPs an image",
        **({"start": f"{story.start.url}: {story.start.adapted}"} if story.start else {}),
        "data": f"{plan.dataset}: {plan.images:,} images, {plan.classes} classes; {plan.val_images:,} to validate on"
        + (f", {run.data.development:.0%} of train" if run.data.development else ""),
        "workers": f"{workers} on {'GPU' if layout.use_gpu else 'CPU'}, each with {layout.cpus:g} CPUs",
        "batch": f"{plan.global_batch} = {highest} workers x {-(-local // passes)} images x {passes} passes",
        "steps": f"{plan.steps:,}: {plan.steps_per_epoch:,} an epoch, {plan.warmup_steps:,} to warm up",
        "results": story.home,
        "tracking": redact_uri(tracking_uri()),
    }


def end_block(
    story: Reporting, outcome: Outcome, values: dict[str, float], ended: dict[str, Any], saved: Saved
) -> dict[str, str]:
    """How it went, what it cost, and what to type next."""
    images = f"{story.plan.val_images:,} images"
    match outcome.val_top1, outcome.val_loss:
        case None, None:
            scored = {"val": "not evaluated"}
        case None, loss:
            scored = {"val loss": f"{loss:.4f} of {images}"}
        case top1, _:
            scored = {"val top-1": f"{top1:.2%} of {images}"}
    cost = f"{clock(values['cost/device_seconds'])} of device time, {values['cost/flops']:.2e} FLOPs"
    facts = {
        **scored,
        "cost": cost + (f", MFU {values['cost/mfu']:.1%}" if "cost/mfu" in values else ""),
        "model": f"{outcome.model}"
        + ("" if saved.share == 1 else f", a delta: {saved.bytes / 1e6:.3g} MB, {saved.share:.1%} of the network"),
        "tracking": story.tracker.run_url(),
        "next": f"vitray ui        or: vitray model {outcome.model}",
    }
    if ended["corrupt"]:
        facts["corrupt"] = f"{len(ended['corrupt'])} images gave way to their neighbours: {', '.join(ended['corrupt'])}"
    if ended["skipped"]:
        facts["left out"] = f"steps {', '.join(map(str, ended['skipped']))}, which broke the run"
    return facts


def describe_loss(task: Supervised | Finetune | Masked | Tokenizer) -> str:
    """What a run learns by, in a few words."""
    match task:
        case Supervised() | Finetune():
            return f"{task.loss}, smoothing {task.smoothing:g}"
        case Masked(objective=objective, mask=mask):
            return f"{objective.kind} of {mask.ratio:.0%} of the patches, {mask.kind}"
        case Tokenizer():
            return f"pixels, from {task.codes} codes"
        case _:
            assert_never(task)


def _taken(run: Run, plan: Plan) -> dict[str, str]:
    """What comes from an earlier run."""
    if plan.weights is None:
        return {}
    if isinstance(run.task, Masked):
        return {"Codes": f"of `{plan.weights}`"}
    return {"Start": f"`{plan.weights}`, {plan.trainable_share:.1%} of it trained"}


def describe(run: Run, plan: Plan, layout: Layout) -> str:
    """The run in a few lines of Markdown."""
    data, optim = run.data, run.optim
    policy = f"{data.augment.crop.kind} crop, policy {data.augment.policy.kind}"
    mixing = f"mixup {data.mix.mixup:g}, cutmix {data.mix.cutmix:g}" if data.mix.is_mixing else "no mixing"
    rows = {
        "Network": f"`{plan.model}`, {plan.params / 1e6:.2f} M parameters, {plan.gflops:.3g} GFLOPs an image",
        "Data": f"`{plan.dataset}`, {plan.images:,} images of {plan.classes} classes, {plan.val_images:,} to validate",
        "Views": f"{policy}, {mixing}, at {' x '.join(map(str, run.model.image_shape))} px",
        **_taken(run, plan),
        "Loss": describe_loss(run.task),
        "Descent": f"{optim.rule.kind}, lr {optim.lr:g} {optim.schedule.kind}, weight decay {optim.weight_decay:g}",
        "Length": f"{optim.duration} = {plan.steps:,} steps of {plan.global_batch} images, warm-up {optim.warmup}",
        "Where": f"{layout.workers[1]} {'GPU' if layout.use_gpu else 'CPU'} workers, {run.compute.precision},"
        f" driver on {platform.node()}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])
