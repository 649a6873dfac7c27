"""What a person sees of a run: a start block, a line that lives, an end block. All of it on stderr."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from vitray.runs.plan import Plan

# Between two printed lines where no line can be rewritten: `ray job logs`, a file, a pipe.
PAUSE = 10.0


class Display:
    """Prints a run as it goes; on a terminal the last line is rewritten."""

    def __init__(self, plan: Plan, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        """A quiet one says nothing: somebody else tells of the run."""
        self.plan, self.stream, self.quiet = plan, stream or sys.stderr, quiet
        self.live = self.stream.isatty()
        self._began: tuple[float, int] | None = None
        self._printed = 0.0
        self._values: dict[str, float] = {}

    def start(self, facts: Mapping[str, str]) -> None:
        """The start block."""
        self.line("")
        for name, fact in facts.items():
            self.line(f"  {name:<10} {fact}")
        self.line("")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Remember the newest numbers; an evaluation is told at once."""
        self._values |= values
        if "val/top1" not in values and "val/loss" in values:
            self.line(f"  {self._step_text(step)}  val loss {values['val/loss']:.4f}")
        if "val/top1" in values:
            shares = {"top-1": "val/top1", "top-5": "val/top5", "averaged": "val/top1_ema", "best": "best/val_top1"}
            told = ", ".join(f"{name} {values[key]:.2%}" for name, key in shares.items() if key in values)
            self.line(f"  {self._step_text(step)}  val {told}")

    def progress(self, step: int) -> None:
        """The living line: where the run is, and how long it will take."""
        now = time.monotonic()
        if self._began is None:
            self._began = now, step
        if self.quiet:
            return
        if now - self._printed < (0.2 if self.live else PAUSE):
            return
        self._printed = now
        began, first = self._began
        rate = (step - first) / (now - began) if step > first else 0.0
        left = clock((self.plan.steps - step) / rate) if rate else "-"
        loss = f"loss {self._values['train/loss']:.4f}  " if "train/loss" in self._values else ""
        wait = f"  wait {self._values['train/data_wait_share']:.0%}" if "train/data_wait_share" in self._values else ""
        speed = f"{rate * self.plan.global_batch:,.0f} images/s" if rate else ""
        text = f"  {self._step_text(step)}  {loss}{speed}{wait}  {left} left"
        if self.live:
            print(f"\r{text:<100}", end="", file=self.stream, flush=True)
        else:
            print(text, file=self.stream, flush=True)

    def resume(self, step: int, workers: int) -> None:
        """Say where the run goes on; how fast it goes is counted from here."""
        self._began = None
        self.line(f"  resumed at step {step:,}, saved by {workers} workers")

    def line(self, text: str) -> None:
        """A line that stays, above the living one."""
        if self.quiet:
            return
        start = f"\r{'':<100}\r" if self.live else ""
        print(f"{start}{text}", file=self.stream, flush=True)

    def _step_text(self, step: int) -> str:
        plan = self.plan
        epoch, epochs = step / plan.steps_per_epoch, plan.steps / plan.steps_per_epoch
        return f"epoch {epoch:.3g}/{epochs:.3g}  step {step:,}/{plan.steps:,}"


def clock(seconds: float) -> str:
    """h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
