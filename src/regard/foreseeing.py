"""What an audit would run, and roughly what it takes: costs that are fitted to a few batches of each trial."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from regard.auditing import FACTS, Bench
from regard.jobs.plan import EXHIBIT, Unit
from regard.jobs.store import Store
from regard.lessons import Planned
from regard.memory import peak
from regard.progress import Counter, unlogged
from regard.training import length_of
from regard.trying import trains

# Batches that are tried: so many examples, and what share of all is shorter. Before them one that does not count, as
# what runs for the first time takes longer.
FIRST, PROBES = (4, 0.35), ((4, 0.2), (4, 0.5), (8, 0.5), (8, 0.9))
# Measured by benchmarks/cluster.py: seconds until others work, too; how much slower workers are that share a machine;
# and seconds of judging, for each example of a finding.
START = {"local": 5.0, "ray": 10.0}
CROWDED = 1.07
JUDGING = 8e-5
Key = tuple[str, str | None]  # a trial, or what else units do, and the title of an explanation


@dataclass(frozen=True)
class Cost:
    """What a unit takes: seconds = batch · batches + Σ over examples (example + letter · length + square · length²)."""

    batch: float
    example: float
    letter: float
    square: float

    @classmethod
    def fitted(cls, seen: Sequence[tuple[ArrayLike, float]]) -> Cost:
        """From the lengths of the examples of some batches and the seconds of each: least squares of relative errors.

        Nothing is negative: a unit takes no less for being longer.
        """
        rows = np.array([cls._terms(lengths, 1) / max(seconds, 1e-6) for lengths, seconds in seen])
        scale = rows.max(0) + 1e-300  # or the squares would drown the rest
        found, _ = nnls(rows / scale, np.ones(len(rows)))
        return cls(*(found / scale).tolist())

    def seconds(self, lengths: ArrayLike, batches: int = 1) -> float:
        """Of examples of these lengths, in so many batches."""
        return float(self._terms(lengths, batches) @ (self.batch, self.example, self.letter, self.square))

    @staticmethod
    def _terms(lengths: ArrayLike, batches: int) -> Any:
        some = np.asarray(lengths, dtype=np.float64)
        return np.array([batches, len(some), some.sum(), (some**2).sum()])


@dataclass(frozen=True, eq=False)
class Foresight:
    """What an audit would run, and roughly what it takes. Made by `foresee`.

    Args:
        jobs: a row for each trial and explanation: "trial", "method", "units", "examples", "seconds" (of one worker).
        refused: what cannot run: "trial", "method" and "why".
        seconds: of all of it, with so many workers.
        workers: how many of them work at the same time.
        driver: seconds of each unit that the process that asks takes: it hands over, and keeps what comes back.
        memory: bytes of this process at its peak, and of each worker.
        disk: bytes of what is kept.
        steps: seconds of a step, by the part of the audit that it belongs to.
    """

    jobs: pd.DataFrame
    refused: pd.DataFrame
    seconds: float
    workers: int
    driver: float
    memory: int
    disk: int
    steps: dict[str, float]


def foresee(bench: Bench) -> Foresight:
    """Try a few batches of each trial here, and reckon what all of them take, wherever they run."""
    lengths = np.array([length_of(one) for one in bench.drawn.examples])
    groups: dict[Key, list[Unit]] = {}
    for unit in bench.units:
        groups.setdefault((unit.task, unit.method), []).append(unit)
    tried = _tried(bench, lengths, [*groups])
    costs = {
        unit.id: tried.costs[key].seconds(lengths[[*unit.places]], -(-len(unit.places) // bench.batch_size))
        for key, units in groups.items()
        for unit in units
    }
    rows = [
        {"part": units[0].part, "trial": task, "method": title, "units": len(units),
         "examples": bench.shown if task == EXHIBIT else len(lengths), "seconds": sum(costs[one.id] for one in units)}
        for (task, title), units in groups.items()
    ]  # fmt: skip
    trained = _trainings(bench)
    steps = {row["part"]: row["seconds"] / max(1, row["units"]) for row in rows + trained}
    jobs = pd.DataFrame(rows + trained)[["trial", "method", "units", "examples", "seconds"]]
    there: Any = {"workers": _at_once(bench), "start": START[bench.runner.kind]}
    slower = CROWDED if there["workers"] > 1 and bench.runner.address is None else 1.0
    seconds = wall(
        [slower * sum(costs[unit.id] for unit in chunk) for chunk in bench.chunks(set())], **there,
        beside=bench.runner.kind == "local", driver=tried.driver * len(bench.units),
    )  # fmt: skip
    lessons = [slower * row["seconds"] / row["units"] for row in trained for _ in range(row["units"])]
    seconds += wall(lessons, **there, beside=False) + JUDGING * len(lengths) * len(bench.called[0])
    disk = sum(tried.sizes[unit.task, unit.method] * len(unit.places) for unit in bench.units)
    refused = pd.DataFrame(bench.called[1])
    return Foresight(jobs, refused, seconds, there["workers"], tried.driver, peak(), int(disk), steps)


def wall(costs: Iterable[float], workers: int, *, start: float, beside: bool, driver: float = 0.0) -> float:
    """Seconds until all chunks are done: each goes, in their order, to whoever is free first.

    Args:
        costs: seconds of each chunk.
        workers: how many work at the same time.
        start: seconds until those work that are not there yet.
        beside: this process works, too, and at once.
        driver: seconds that it takes for handing over and keeping; meanwhile others work, but it does not.

    Example:
        >>> wall([3, 1, 1, 1], 2, start=0, beside=True)
        3.0
        >>> wall([1] * 100, 64, start=10, beside=False, driver=60.0)  # it cannot keep what so many hand over
        70.0
    """
    free = [0.0 if beside and not number else start for number in range(workers)]
    end = 0.0
    for cost in costs:
        done = free[0] + cost
        end = max(end, done)
        heapreplace(free, done)
    if beside:  # what it takes for that is no more than a share of what all do
        return end + driver / workers
    return max(end, start + driver) if end else 0.0


@dataclass(frozen=True, eq=False)
class _Tried:
    """What was seen of a few batches, by trial and explanation."""

    costs: dict[Key, Cost]
    sizes: dict[Key, float]  # bytes of an example
    driver: float  # seconds of a unit


def _tried(bench: Bench, lengths: Any, keys: Sequence[Key]) -> _Tried:
    """Run the probes of each trial, in the order in which chunks run, so that explanations share what they share."""
    order = np.argsort(lengths, kind="stable")
    batches = [_among(order, count, share) for count, share in (FIRST, *PROBES)]
    seen: dict[Key, list[tuple[Any, float]]] = {}
    sizes: dict[Key, float] = {}
    kept: list[float] = []
    with (
        Counter("a probe of each trial", len(batches) * len(keys)) as counter,
        tempfile.TemporaryDirectory(prefix="regard-") as folder,
        Store.open(Path(folder), {"identity": {}}, resume=False) as store,
        unlogged(),  # what few examples are too few for, more may serve
    ):
        for task, some in groupby(keys, key=lambda key: key[0]):
            titles = [title for _, title in some]
            for number, places in enumerate(batches):
                for title in titles:
                    unit = bench.unit(task, title, places[:1] if task == EXHIBIT else places)
                    began = time.monotonic()
                    record, arrays = bench(unit)
                    if number:
                        seen.setdefault((task, title), []).append((lengths[[*unit.places]], time.monotonic() - began))
                        size = len(json.dumps(record)) + sum(one.nbytes for one in arrays.values())
                        sizes[task, title] = size / len(unit.places)
                        began = time.monotonic()
                        pickle.dumps(bench.packed([unit]))
                        store.add(f"{unit.id}-{number}", record, arrays)
                        kept.append(time.monotonic() - began)
                    counter.advance()
    for key in [key for key in bench.shelf if key[0] not in FACTS]:
        del bench.shelf[key]  # of the probes
    costs = {key: Cost.fitted(some) for key, some in seen.items()}
    return _Tried(costs, sizes, float(np.median(kept)) if kept else 0.0)


def _among(order: Any, count: int, share: float) -> tuple[int, ...]:
    """So many neighbours in an order, around a share of it."""
    start = min(max(0, round(share * len(order)) - count // 2), max(0, len(order) - count))
    return tuple(order[start : start + count].tolist())


def _at_once(bench: Bench) -> int:
    """How many workers work at the same time: no more than this machine has cores for; of another nothing is known."""
    asked = bench.runner.workers or 1
    return asked if bench.runner.address else min(asked, max(1, (os.cpu_count() or 1) // bench.threads))


def _trainings(bench: Bench) -> list[dict[str, Any]]:
    """Of each trial how many models it would train that no other has before; each takes as long as the base."""
    if bench.lab is None:
        return []
    base = bench.lab.results(bench.lab.plain(1), "training the base")[0]
    rows, seen = [], {base.lesson.id, *bench.lab.finished}
    for (name, title), one in bench.called[0].items():
        if trains(name):
            try:
                one.planned.finding()
            except Planned as planned:
                new = {*planned.lessons} - seen
                seen |= new
                rows.append({
                    "part": name, "trial": name, "method": title, "units": len(new),
                    "examples": len(bench.lab.data["test"]), "seconds": len(new) * base.record["seconds"],
                })  # fmt: skip
    return rows
