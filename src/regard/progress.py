"""A progress bar for what takes longer than two seconds: on stderr, and only where somebody can see it."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import Progress

PATIENCE = 2.0  # seconds


class Counter:
    """Counts steps; the bar appears once it has taken longer than two seconds, unless another is there already."""

    shown: Counter | None = None

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total, self.done = what, total, 0
        self.began = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> Counter:
        return self

    def advance(self, steps: int = 1) -> None:
        """So many more are done."""
        self.done += steps
        waited = Counter.shown is None and sys.stderr.isatty() and time.monotonic() - self.began > PATIENCE
        if self.bar is None and waited:
            Counter.shown = self
            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.bar.start()
            self.bar.add_task(self.what, total=self.total)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)

    def __exit__(self, *problem: object) -> None:
        if self.bar is not None:
            self.bar.stop()
            Counter.shown = None
