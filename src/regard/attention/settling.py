"""Which axis of what a model computes is examples, and which is heads?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from regard.attention.running import record
from regard.attention.sources import Fused
from regard.attention.tape import Reading, Record, Tape
from regard.errors import NotReproduced
from regard.types import Batch, Subject

# of each subject what its sites looked like the last time that they were in doubt, and how they were found to be read
_settled: WeakKeyDictionary[Any, tuple[tuple[Any, ...], list[tuple[Reading, ...]]]] = WeakKeyDictionary()


def settle(subject: Subject, batch: Batch, tape: Tape) -> None:
    """Which axis is examples, which is heads? In doubt, run the fullest example alone and see which reading agrees.

    It is the model's code that lays them out: a batch of the same shapes is read as the one before it.
    """
    if len(batch) == 1 or not any(map(_in_doubt, tape.records)):
        return
    shapes = tuple((entry.name, entry.readings, tuple(entry.proof.out.shape)) for entry in tape.records)
    before, known = _settled.get(subject, ((), []))
    if shapes == before:
        tape.records[:] = [replace(entry, readings=one) for entry, one in zip(tape.records, known, strict=True)]
        return
    example = int(batch.real.sum(-1).argmax())
    alone, _ = record(subject, batch.pick([example]))
    singles = dict(_counted(alone.records))
    mixed = any(entry.across for entry in tape.records)
    for index, (key, entry) in enumerate(_counted(tape.records)):
        if not _in_doubt(entry):
            continue
        # where examples look at one another, one alone is only nearest to itself
        far = torch.inf if mixed or (isinstance(entry.source, Fused) and "plain" in entry.readings) else 0.05
        possible = [replace(entry, readings=(reading,)) for reading in entry.readings]
        distances = [_distance(reading, singles.get(key), example) for reading in possible]
        if min(distances) > far:
            raise NotReproduced(
                f"site {index} ({entry.name}): its axes {entry.source.shape} cannot be told apart: no reading of them "
                "as examples and heads agrees with the example run alone. Trace one example at a time."
            )
        tape.records[index] = possible[distances.index(min(distances))]
    _settled[subject] = shapes, [entry.readings for entry in tape.records]


def _in_doubt(entry: Record) -> bool:
    """Whether shapes alone do not tell examples from heads; "swap" has one reading, which may be wrong."""
    return len(entry.readings) > 1 or entry.readings == ("swap",)


def _counted(records: list[Record]) -> Iterator[tuple[tuple[str, int], Record]]:
    """Records keyed by name and occurrence; attention across examples is not there when an example runs alone."""
    seen: Counter[str] = Counter()
    for entry in records:
        yield (entry.name, -1 if entry.across else seen[entry.name]), entry
        seen[entry.name] += not entry.across


def _distance(entry: Record, single: Record | None, example: int) -> float:
    """How far the weights of one example in the batch are from its weights alone."""
    if single is None or entry.source.shape[1:] != single.source.shape[1:]:
        return float("inf")
    _, heads, queries, _ = single.source.shape
    rows = torch.arange(min(queries, 8), device=single.source.values.device)
    one = single.source.tile(slice(0, heads), rows)
    many = entry.source.tile(slice(0, heads), rows)[example : example + 1]
    return float((many - one).abs().max())
