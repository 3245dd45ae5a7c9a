"""What an audit would run, and roughly what it takes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from regard.auditing import Bench
from regard.jobs.plan import EXHIBIT
from regard.lessons import Planned
from regard.memory import peak
from regard.progress import Counter
from regard.trying import trains

PROBED = 8  # examples of a probe


@dataclass(frozen=True, eq=False)
class Foresight:
    """What an audit would run, and roughly what it takes. Made by `foresee`.

    Args:
        jobs: a row for each trial and explanation: "trial", "method", "units", "examples", "seconds".
        refused: what cannot run: "trial", "method" and "why".
        seconds: of all of it.
        memory: bytes of this process at its peak, and of each worker.
        disk: bytes of what is kept.
        steps: seconds of a step, by the part of the audit that it belongs to.
    """

    jobs: pd.DataFrame
    refused: pd.DataFrame
    seconds: float
    memory: int
    disk: int
    steps: dict[str, float]


def foresee(bench: Bench) -> Foresight:
    """Try a few examples of each trial, and reckon what all of them take.

    Examples of middle length are tried, in one batch; time goes with their number.
    """
    drawn = bench.drawn
    middle = sorted(drawn.examples, key=lambda one: len(str(one.input)))[len(drawn.examples) // 2 :][:PROBED]
    some = replace(drawn, examples=tuple(middle), target=None if isinstance(drawn.target, list) else drawn.target)
    small = replace(bench, drawn=some, batch_size=PROBED, shown=min(1, bench.shown), shelf={})
    times = len(drawn.examples) / len(middle)
    rows: list[dict[str, Any]] = []
    disk = 0.0
    refused = small.called[1]
    with Counter("a probe of each trial", len(small.units)) as counter:
        for unit in small.units:
            began = time.monotonic()
            record, arrays = small(unit)
            share = bench.shown if unit.task == EXHIBIT else times
            disk += share * (len(json.dumps(record)) + sum(one.nbytes for one in arrays.values()))
            rows.append(
                {
                    "part": unit.part,
                    "trial": unit.task,
                    "method": unit.method,
                    "seconds": share * (time.monotonic() - began),
                }
            )
            counter.advance()
    for row in rows:
        row["units"] = sum((unit.task, unit.method) == (row["trial"], row["method"]) for unit in bench.units)
        row["examples"] = bench.shown if row["trial"] == EXHIBIT else len(drawn.examples)
    rows += _trainings(bench)
    steps = {row["part"]: row["seconds"] / max(1, row["units"]) for row in rows}
    jobs = pd.DataFrame(rows)[["trial", "method", "units", "examples", "seconds"]]
    return Foresight(
        jobs, pd.DataFrame(refused), jobs["seconds"].sum() / (bench.runner.workers or 1), peak(), int(disk), steps
    )


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
