"""Chunks in several processes of this machine: each goes to whoever is free."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from regard.jobs.running import Runner, run


@dataclass
class Waiting:
    """Units that leave a mark when they are done; some wait for the marks of others.

    Args:
        folder: where the marks are.
        waits: by unit, for which others.
        here: the process that asks.
    """

    folder: Path
    waits: dict[int, list[int]]
    here: int

    def __call__(self, unit: int):
        until = time.monotonic() + 60
        while not all((self.folder / str(other)).exists() for other in self.waits.get(unit, ())):
            assert time.monotonic() < until, f"{unit} waits for ever"
            time.sleep(0.01)
        (self.folder / str(unit)).touch()
        return {"value": unit**2, "here": os.getpid() == self.here}, {}


def ran(work, units):
    return {unit: result[0] for unit, result in run(work, [[unit] for unit in units], runner=Runner(workers=2))}


def test_others_get_their_next_chunk_while_this_process_is_busy(tmp_path):
    found = ran(Waiting(tmp_path, {0: [*range(1, 9)]}, os.getpid()), range(9))
    assert {unit: one["value"] for unit, one in found.items()} == {unit: unit**2 for unit in range(9)}
    assert [unit for unit, one in found.items() if one["here"]] == [0], "the first is done here, and takes longest"


def test_no_chunk_waits_behind_a_long_one(tmp_path):
    found = ran(Waiting(tmp_path, {1: [0, *range(2, 9)]}, os.getpid()), range(9))
    assert {unit: one["value"] for unit, one in found.items()} == {unit: unit**2 for unit in range(9)}
    assert [unit for unit, one in found.items() if not one["here"]] == [1]


class Unpackable(Waiting):
    """Chunks that cannot be sent."""

    def packed(self, chunk):
        raise KeyError(chunk[0])


def test_what_cannot_be_sent_is_raised(tmp_path):
    with pytest.raises(KeyError):
        ran(Unpackable(tmp_path, {}, os.getpid()), range(4))
