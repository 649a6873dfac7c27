"""Progress on stderr: `Console` prints lines, `RunConsole` prints a training run."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from vitray.training.resolved import ResolvedRun

# Seconds between two status lines: on a terminal, where the line is rewritten, and in a file or a pipe.
TERMINAL_INTERVAL, FILE_INTERVAL = 0.2, 10.0


class Console:
    """A line printer with one status line, which a terminal rewrites in place."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.stream, self.quiet = stream or sys.stderr, quiet
        self.is_terminal = self.stream.isatty()
        self._printed = 0.0

    def line(self, text: str) -> None:
        """Print a permanent line above the status line."""
        self._print(f"\r\x1b[K{text}" if self.is_terminal else text)

    def block(self, facts: Mapping[str, str]) -> None:
        """Print names and values as a block."""
        self.line("\n" + "\n".join(f"  {name:<10} {text}" for name, text in facts.items()) + "\n")

    def status(self, text: str) -> None:
        """Replace the status line, at most once per interval."""
        now = time.monotonic()
        if now - self._printed < (TERMINAL_INTERVAL if self.is_terminal else FILE_INTERVAL):
            return
        self._printed = now
        self._print(f"\r\x1b[K{text}" if self.is_terminal else text, end="" if self.is_terminal else "\n")

    def _print(self, text: str, end: str = "\n") -> None:
        if not self.quiet:
            print(text, end=end, file=self.stream, flush=True)


class RunConsole:
    """Progress of a training run."""

    def __init__(self, resolved: ResolvedRun, console: Console) -> None:
        self._resolved, self._console = resolved, console
        self._started: tuple[float, int] | None = None
        self._values: dict[str, float] = {}

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Remember the newest metrics and print an evaluation."""
        self._values |= values
        if "val/top1" in values:
            names = {"top-1": "val/top1", "top-5": "val/top5", "averaged": "val/top1_ema", "best": "best/val_top1"}
            if len(self._resolved.dataset.classes) <= 5:
                del names["top-5"]
            scores = ", ".join(f"{name} {values[key]:.2%}" for name, key in names.items() if key in values)
            self._console.line(f"  {self._step_text(step)}  val {scores}")
        elif "val/map" in values:
            names = {"mAP": "val/map", "averaged": "val/map_ema", "best": "best/val_map"}
            scores = ", ".join(f"{name} {values[key]:.2%}" for name, key in names.items() if key in values)
            self._console.line(f"  {self._step_text(step)}  val {scores}")
        elif "val/loss" in values:
            self._console.line(f"  {self._step_text(step)}  val loss {values['val/loss']:.4f}")

    def progress(self, step: int) -> None:
        """Update the status line: step, loss, speed and remaining time."""
        now = time.monotonic()
        if self._started is None:
            self._started = now, step
        start, first = self._started
        rate = (step - first) / (now - start) if step > first else 0.0
        left = clock((self._resolved.length.total - step) / rate) if rate else "-"
        loss = f"loss {self._values['train/loss']:.4f}  " if "train/loss" in self._values else ""
        wait = f"  wait {self._values['train/data_wait_share']:.0%}" if "train/data_wait_share" in self._values else ""
        speed = f"{rate * self._resolved.run.optim.batch:,.0f} images/s" if rate else ""
        self._console.status(f"  {self._step_text(step)}  {loss}{speed}{wait}  {left} left")

    def resume(self, step: int, workers: int) -> None:
        """Print the checkpoint that the run resumes from and restart the speed measurement."""
        self._started = None
        self._console.line(f"  resumed at step {step:,}, saved by {workers} worker{'s' * (workers != 1)}")

    def _step_text(self, step: int) -> str:
        length = self._resolved.length
        epoch, epochs = step / length.epoch, length.total / length.epoch
        return f"epoch {epoch:.3g}/{epochs:.3g}  step {step:,}/{length.total:,}"


def clock(seconds: float) -> str:
    """Return h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
