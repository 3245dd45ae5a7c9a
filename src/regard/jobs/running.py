"""Where units run: here, in several processes on this machine, or on Ray. Nothing else knows which."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from regard.errors import OptionError, WorkerDied, at_least_one, choose, within

Result = tuple[dict[str, Any], dict[str, Any]]  # a record of plain values, and arrays by name
U = TypeVar("U")  # a unit, or whatever else is plain enough to be sent


@dataclass(frozen=True)
class Runner:
    """Where units shall run, as plain data. Made by `runner_of`.

    Args:
        kind: "local": processes of this machine; "ray": those of a cluster.
        workers: how many of them; None: as many as there is room for.
        address: of the cluster: "auto", "host:port" or "ray://host:port"; None: one is started here, and stopped again.
        gpus_per_worker: of a cluster: 1, or a part of one.
        timeout: seconds of one chunk, after which it hangs; None: an hour, and for a training a day.
    """

    kind: Literal["local", "ray"] = "local"
    workers: int | None = 1
    address: str | None = None
    gpus_per_worker: float = 0.0
    timeout: float | None = None

    def open(self, *, threads: int | None = None, size: int = 0) -> AbstractContextManager[Any]:
        """For the length of a block, one cluster for all that runs.

        Args:
            threads: of each worker.
            size: bytes of what is sent to all.
        """
        if self.kind == "local":
            return nullcontext()
        from regard.jobs.joining import connected

        return connected(self, threads=threads or 1, size=size)


@dataclass(frozen=True)
class Failed:
    """In place of a result: why a unit has none, however often it was tried. It may have one another day."""

    why: str


@dataclass(frozen=True, eq=False)
class Afar:
    """What work is on another machine.

    Args:
        work: what is sent there instead; it is the work itself once it is there.
        memory: bytes that a worker needs.
        threads: of each worker.
        patience: seconds of a chunk, unless the runner has a time-out.
    """

    work: Any
    memory: int = 0
    threads: int = 1
    patience: float = 3600.0


def runner_of(
    kind: str, *, workers: int | None, address: str | None = None, gpus_per_worker: float = 0.0,
    timeout: float | None = None,
) -> Runner:  # fmt: skip
    """Where units shall run; refused, where that makes no sense or is not installed."""
    choose("runner", kind, ("local", "ray"))
    if workers is not None:
        at_least_one("workers", workers)
    if within("gpus_per_worker", gpus_per_worker, 0, float("inf"), ends="[)") > 1:
        raise OptionError(
            f"gpus_per_worker={gpus_per_worker!r}: a worker holds the model on one GPU, or on a part of it. Pass 1 at "
            "most; for a model that does not fit one, device_map spreads it (docs/scale.md)."
        )
    if timeout is not None:
        within("timeout", timeout, 0, float("inf"), ends="()")
    if kind == "local":
        for name, value in (("address", address), ("gpus_per_worker", gpus_per_worker), ("timeout", timeout)):
            if value:
                raise OptionError(f"{name}={value!r} is of a cluster. Pass runner='ray' with it, or leave it out.")
        return Runner(workers=workers)
    from regard.jobs.joining import must_be_installed, reachable

    must_be_installed()
    if address is None:
        workers = workers or (None if gpus_per_worker else os.cpu_count())
    else:
        reachable(address)  # before anything is loaded or trained
    return Runner("ray", workers, address, gpus_per_worker, timeout)


def run(
    work: Callable[[U], Result], chunks: Sequence[Sequence[U]], *, runner: Runner | None = None, beside: bool = True,
    afar: Afar | None = None,
) -> Iterator[tuple[U, Result | Failed]]:  # fmt: skip
    """Do the work on all units, and hand over each result as it comes.

    Args:
        work: from a unit to its result; with several processes it is sent to each of them once. If it has a method
            ``packed``, that makes of a chunk what is sent: units with what they take of the data.
        chunks: units that share work, and so run in the same process one after the other.
        runner: where; None: here.
        beside: this process works, too; otherwise it hands over what is done as soon as it is, and so many others work.
        afar: how the work goes to other machines; None: as it is.
    """
    if runner is not None and runner.kind == "ray":
        from regard.jobs.ray import run_there

        yield from run_there(work, chunks, runner, afar or Afar(work))
        return
    workers = (runner and runner.workers) or 1
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
        yield from _spread(work, pool, deque(chunks), others, beside)
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
    work: Callable[[U], Result], pool: ProcessPoolExecutor, waiting: deque[Sequence[U]], others: int, beside: bool
) -> Iterator[tuple[U, Result]]:
    """Give the next chunk to whoever is free, and work beside the others, if asked to.

    This process has the model already; the others need seconds to begin. They get their next chunk from the pool's own
    thread, as this one may be busy for long; none is handed over before, as chunks differ.
    """
    left, pack = len(waiting), packing(work)
    done: SimpleQueue[tuple[Sequence[U], Future[list[Result]]]] = SimpleQueue()
    one_at_a_time = threading.Lock()

    def take() -> Sequence[U] | None:
        with one_at_a_time:
            return waiting.popleft() if waiting else None

    def hand_over() -> None:
        if (chunk := take()) is None:
            return
        try:
            sent = pool.submit(_do, pack(chunk))
        except Exception as problem:  # it is raised where results are waited for
            sent = Future()
            sent.set_exception(problem)
        sent.add_done_callback(partial(came_back, chunk))

    def came_back(chunk: Sequence[U], sent: Future[list[Result]]) -> None:
        done.put((chunk, sent))
        if not sent.cancelled() and sent.exception() is None:
            hand_over()

    own = take() if beside else None
    for _ in range(others):
        hand_over()
    try:
        while left:
            if own is not None:
                for unit in own:
                    yield unit, work(unit)
                left -= 1
            while left and (own is None or not done.empty()):
                chunk, sent = done.get()
                yield from zip(chunk, sent.result(), strict=True)
                left -= 1
            own = take() if beside else None
    finally:
        waiting.clear()  # whoever comes back now gets nothing more


def packing(work: Any) -> Callable[[Any], Any]:
    """What makes of a chunk what is sent."""
    return getattr(work, "packed", list)


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
