"""What is going on, on stderr: bars on a terminal; in a log, where the command line asks for it, a line at times."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

PATIENCE = 2.0  # seconds until a bar appears
EVERY = 25.0  # seconds between two lines in a log: it is never silent for 30
DUMB = 4.0  # … and on a terminal that cannot draw: it is never silent for 5


@dataclass
class Row:
    """A line of the display.

    Args:
        what: what is counted.
        total: how much there is to do; None: not known.
        done: how much of it is done.
        before: how much of that was done earlier, and tells nothing about speed.
    """

    what: str
    total: float | None
    done: float = 0.0
    before: float = 0.0

    def left(self, passed: float) -> float | None:
        """Seconds to go, if it goes on like this; None: nothing is known."""
        fresh = self.done - self.before
        return None if self.total is None or fresh <= 0 else passed * max(self.total - self.done, 0) / fresh


class Shown(ABC):
    """What is shown while a block runs: a `Counter` or a `Board`."""

    patience = PATIENCE

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        STAGE.enter(self)
        return self

    def __exit__(self, *problem: object) -> None:
        STAGE.leave(self)

    @property
    def passed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    @abstractmethod
    def rows(self) -> list[Row]:
        """What the display shows of it; the last one stands for all."""

    @abstractmethod
    def line(self) -> str:
        """What a log is told of it."""


class Counter(Shown):
    """Counts steps; the bar appears once it has taken longer than two seconds.

    Args:
        what: what is going on.
        total: how many steps there are; None: not known.
        patience: seconds until the bar appears; 0: at once, for what lets no other thread run.
    """

    def __init__(self, what: str, total: int | None, *, patience: float = PATIENCE) -> None:
        self.row, self.patience = Row(what, total), patience

    @property
    def done(self) -> int:
        """How many are done."""
        return int(self.row.done)

    def advance(self, steps: int = 1) -> None:
        """So many more are done."""
        self.row.done += steps

    def rows(self) -> list[Row]:
        """One."""
        return [self.row]

    def line(self) -> str:
        """How far it is."""
        total = "" if self.row.total is None else f" of {self.row.total:.0f}"
        return f"{self.row.what}: {f'{self.row.done:.0f}{total}, ' if self.row.done else ''}{times(self, self.row)}"


class Board(Shown):
    """A bar for each part of an audit, and one for all of it.

    Args:
        parts: by name, how many steps each has.
        done: by name, how many of these an earlier run has finished.
        seconds: by name, roughly what a step of it takes; all the same, if left out.

    Example:
        >>> with Board({"agreement · raw": 2, "erasure · raw": 1}) as board:
        ...     board.advance("agreement · raw")
        >>> board.line().partition(" after ")[0]
        '1 of 3 steps (33 %)'
    """

    patience = 0.0

    def __init__(
        self,
        parts: Mapping[str, int],
        *,
        done: Mapping[str, int] | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        ready = done or {}
        self.seconds = {name: (seconds or {}).get(name, 1.0) for name in parts}
        self.parts = {name: Row(name, total, ready.get(name, 0), ready.get(name, 0)) for name, total in parts.items()}

    def advance(self, part: str, steps: int = 1) -> None:
        """So many more steps of a part are done."""
        self.parts[part].done += steps

    @property
    def all(self) -> Row:
        """All parts together, in what they roughly take."""
        parts = [(self.seconds[name], row) for name, row in self.parts.items()]
        total, done, before = (
            sum(cost * (getattr(row, name) or 0) for cost, row in parts) for name in ("total", "done", "before")
        )
        return Row("all", total, done, before)

    def rows(self) -> list[Row]:
        """As many parts as the terminal has room for, those that are done last, and all together."""
        room = max(console_height() - 3, 1)
        parts = [*self.parts.values()]
        if len(parts) > room:
            parts = [row for row in parts if row.done < (row.total or 0)][:room]
        return [*parts, self.all]

    def line(self) -> str:
        """How far it is, and what is under way."""
        both = [(row.done, row.total or 0.0) for row in self.parts.values()]
        done, total = sum(one for one, _ in both), sum(one for _, one in both)
        under_way = [row for row in self.parts.values() if 0 < row.done < (row.total or 0)]
        at = ", ".join(f"{row.what} {row.done:.0f} of {row.total:.0f}" for row in under_way[:3])
        share = f"{self.all.done / self.all.total:.0%}".replace("%", " %") if self.all.total else "–"
        return f"{done:.0f} of {total:.0f} steps ({share}) after {times(self, self.all)}{f'; {at}' if at else ''}"


class Stage:
    """The one display for all that is shown: a terminal has one last line. It reads; nothing waits for it."""

    def __init__(self) -> None:
        self.logged = False  # the command line sets it: a library is quiet where nobody looks
        self.at_work: list[Shown] = []
        self.live: Any = None
        self.stop = threading.Event()
        self.lock = threading.Lock()

    def enter(self, one: Shown) -> None:
        """Something begins; the first one starts the clock."""
        import multiprocessing  # costs more than a command that only answers

        self.at_work.append(one)
        stream = sys.stderr
        draws = stream.isatty() and os.environ.get("TERM") != "dumb"
        if multiprocessing.parent_process() is not None or not (draws or self.logged):
            return
        if draws and not one.patience:
            self.draw(stream)
        if len(self.at_work) == 1:
            self.stop = threading.Event()
            watch = self.draw_late if draws else self.log
            threading.Thread(target=watch, args=(stream, self.stop), daemon=True, name="regard.progress").start()

    def leave(self, one: Shown) -> None:
        """Something is over."""
        self.at_work.remove(one)
        if not self.at_work:
            self.stop.set()
        with self.lock:
            if self.live is not None and not self.visible():
                self.live.stop()
                self.live = None

    def visible(self) -> list[Shown]:
        """A board alone, or all that have taken long enough."""
        working = tuple(self.at_work)
        boards: list[Shown] = [one for one in working if isinstance(one, Board)]
        return boards[-1:] or [one for one in working if one.passed >= one.patience]

    def draw(self, stream: Any) -> None:
        """Begin to draw, unless it has begun."""
        from rich.console import Console
        from rich.live import Live

        with self.lock:
            if self.live is None and self.visible():
                # The stream as it is now: whoever silences stderr for a while does not mean us.
                console = Console(file=getattr(stream, "rich_proxied_file", stream))
                self.live = Live(
                    get_renderable=self.render, console=console, refresh_per_second=5, transient=True,
                    redirect_stdout=sys.stdout.isatty(),  # results that go elsewhere stay results
                )  # fmt: skip
                self.live.start()

    def draw_late(self, stream: Any, stop: threading.Event) -> None:
        """Draw once something has taken long enough."""
        while not stop.wait(0.2):
            if self.live is None:
                self.draw(stream)

    def log(self, stream: Any, stop: threading.Event) -> None:
        """Write a line now and then."""
        while not stop.wait(DUMB if stream.isatty() else EVERY):
            for one in (self.visible() or self.at_work)[-1:]:
                stream.write(f"regard: {one.line()}\n")
                stream.flush()

    def render(self) -> Any:
        """What the display looks like now."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=36)
        table.add_column(no_wrap=True, min_width=6, width=20)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, overflow="ellipsis")
        for one in self.visible():
            rows = one.rows()
            for row in rows:
                last = row is rows[-1]
                share = (
                    ""
                    if not row.total
                    else f"{row.done / row.total:.0%}"
                    if last
                    else f"{row.done:.0f}/{row.total:.0f}"
                )
                bar = ProgressBar(row.total, row.done, width=20, pulse=row.total is None)
                table.add_row(Text(row.what), bar, Text(share), Text(times(one, row) if last else ""))
        return table


STAGE = Stage()


@contextmanager
def unlogged() -> Iterator[None]:
    """No warnings on stderr, for the length of a block."""
    logger = logging.getLogger("regard")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def console_height() -> int:
    """Lines of the terminal."""
    try:
        return os.get_terminal_size(sys.__stderr__.fileno() if sys.__stderr__ else 2).lines
    except (OSError, ValueError):
        return 24


def times(one: Shown, row: Row) -> str:
    """How long it has taken, and how long it may take."""
    left = row.left(one.passed)
    return clock(one.passed) + ("" if left is None or not row.total else f", about {clock(left)} left")


def clock(seconds: float) -> str:
    """As it is read on a clock.

    Example:
        >>> clock(75), clock(7265)
        ('1:15', '2:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
