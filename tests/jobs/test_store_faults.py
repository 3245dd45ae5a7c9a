"""A small part of ``make torture``: kills, crashes, refusals and damage, of the store alone."""

from __future__ import annotations

import errno
import random

import pytest
from faults import crash_everywhere, damage, damaged_start, extended_start, jobs_of, kill_store, refuse_everywhere


def test_kills_at_random_moments():
    figures = kill_store(36, random.Random(0))
    assert figures["kills"] == 36
    assert figures["kills between the first record and done"] > 12


@pytest.mark.parametrize("start", ["nothing", "damaged", "extended"])
def test_a_crash_at_every_file_operation(start):
    jobs = jobs_of(1, 4)
    starts = {"damaged": {"prepare": damaged_start(jobs)}, "extended": {"prepare": extended_start(jobs)}}
    figures = crash_everywhere(jobs, random.Random(0), **starts.get(start, {}))
    assert figures["crashes"] > 4 * figures["operations"] > 50


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_refusal_of_every_file_operation(error):
    assert refuse_everywhere(jobs_of(2, 4), error)["refusals"] > 25


def test_damage_is_never_another_number():
    figures = damage(150, random.Random(0))
    assert figures["of these refused when read"] == figures["to runs that were done"] > 40
    assert min(figures.values()) > 3
