"""Where units run: here, or in several processes on this machine. Nothing else knows which."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from regard.errors import OptionError, WorkerDied

Result = tuple[dict[str, Any], dict[str, Any]]  # a record of plain values, and arrays by name
U = TypeVar("U")  # a unit, or whatever else is plain enough to be sent
AHEAD = 4  # chunks for each other process that are handed over before they are asked for: this one may be busy for long


def run(
    work: Callable[[U], Result], chunks: Sequence[Sequence[U]], *, workers: int = 1, beside: bool = True
) -> Iterator[tuple[U, Result]]:
    """Do the work on all units, and hand over each result as it comes.

    Args:
        work: from a unit to its result; with several processes it is sent to each of them once.
        chunks: units that share work, and so run in the same process one after the other.
        workers: how many processes, with this one.
        beside: this process works, too; otherwise it hands over what is done as soon as it is, and so many others work.
    """
    if workers == 1 or len(chunks) < 2:
        for chunk in chunks:
            for unit in chunk:
                yield unit, work(unit)
        return
    try:
        sent = pickle.dumps(work)  # between processes of one program; nothing of it is kept
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise OptionError(
            f"workers={workers!r}: this model cannot be sent to other processes ({problem}). Pass workers=1."
        ) from None
    # `spawn`: a process that is forked while torch has threads may hang.
    others = workers - beside
    pool = ProcessPoolExecutor(others, multiprocessing.get_context("spawn"), _begin, (sent,))
    try:
        yield from _spread(work if beside else None, pool, list(chunks), others)
    except BrokenProcessPool:
        raise WorkerDied(
            f"workers={workers!r}: one of the processes died, perhaps for want of memory, or because a script starts "
            'them without if __name__ == "__main__". What was finished is kept: go on with fewer workers (--resume).'
        ) from None
    except BaseException:  # stopped: a training would go on for minutes, and this process would wait for it
        for one in [*(pool._processes or {}).values()]:
            one.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _spread(
    work: Callable[[U], Result] | None, pool: ProcessPoolExecutor, waiting: list[Sequence[U]], others: int
) -> Iterator[tuple[U, Result]]:
    """Keep the other processes busy, without handing over everything at once, and work beside them, if asked to.

    This process has the model already; the others need seconds to begin.
    """
    running: dict[Future[list[Result]], Sequence[U]] = {}
    while waiting or running:
        while waiting and len(running) < (AHEAD if work else 1) * others:
            chunk = waiting.pop(0)
            running[pool.submit(_do, chunk)] = chunk
        if waiting and work:
            for unit in waiting.pop(0):
                yield unit, work(unit)
        done, _ = wait(running, timeout=0 if waiting and work else None, return_when=FIRST_COMPLETED)
        for one in done:
            yield from zip(running.pop(one), one.result(), strict=True)


_work: Callable[[Any], Result] | None = None  # of a process that works for another


def _begin(sent: bytes) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asks decides when to stop
    _work = pickle.loads(sent)  # from the process that started this one
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Without this a worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(chunk: Sequence[Any]) -> list[Result]:
    assert _work is not None
    return [_work(unit) for unit in chunk]
