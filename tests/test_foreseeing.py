"""What an audit would take: costs are found again, batches that were not tried are foretold, and nothing is left behind."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard import foreseeing
from regard.auditing import Bench, prepared
from regard.foreseeing import PROBES, START, Cost, foresee, wall
from regard.jobs.running import Runner
from regard.models import toys

TEXTS = [" ".join([["so", "good", "the", "plot", "is", "awful", "a", "dull", "film", "and", "so"][place % 11] for place in range(start, start + 3 + start % 9)])
         for start in range(48)]  # fmt: skip
ASKED = {"methods": ["raw", "random"], "trials": ["comprehensiveness", ("permutation", {"n": 5})], "shown": 2,
         "batch_size": 16, "probes": ["entropy"], "threads": 1}  # fmt: skip


@pytest.mark.parametrize(
    "law", [(0.1, 0.02, 0.002, 1e-5), (0.0, 0.0, 0.01, 0.0), (0.3, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 2e-5)]
)
def test_a_law_is_found_from_the_probes(law):
    truth = Cost(*law)
    tried = [[int(100 * share)] * count for count, share in PROBES]
    found = Cost.fitted([(lengths, truth.seconds(lengths)) for lengths in tried])
    unseen = [[130] * 32, [7] * 32, [55] * 5]
    np.testing.assert_allclose(
        [found.seconds(one) for one in unseen], [truth.seconds(one) for one in unseen], rtol=1e-6
    )
    assert found.seconds([55] * 320, 10) == pytest.approx(10 * truth.seconds([55] * 32))


@given(st.lists(st.floats(1e-4, 10), min_size=4, max_size=4))
def test_more_or_longer_examples_never_take_less(seconds):
    found = Cost.fitted(
        [([40] * 2, seconds[0]), ([40] * 8, seconds[1]), ([90] * 4, seconds[2]), ([20] * 4, seconds[3])]
    )
    sizes = [found.seconds(lengths) for lengths in ([10], [40] * 2, [40] * 8, [90] * 8, [90] * 32)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 0


def simulated(costs, workers, start, beside, driver):
    """By the clock: in steps, whoever is free takes the next chunk."""
    costs, busy = list(costs), [0.0 if beside and not number else start for number in range(workers)]
    end = 0.0
    while costs:
        first = min(range(workers), key=lambda number: busy[number])
        busy[first] += costs.pop(0)
        end = max(end, busy[first])
    return end + driver / workers if beside else max(end, start + driver)


@given(
    st.lists(st.floats(0, 9), min_size=1, max_size=40),
    st.integers(1, 5),
    st.floats(0, 9),
    st.booleans(),
    st.floats(0, 50),
)
def test_the_wall_clock(costs, workers, start, beside, driver):
    found = wall(costs, workers, start=start, beside=beside, driver=driver)
    assert found == pytest.approx(simulated(costs, workers, start, beside, driver))
    assert found >= sum(costs) / workers - 1e-9
    assert wall(costs, 1, start=0, beside=True) == pytest.approx(sum(costs)), "nobody else, nothing to wait for"


@pytest.fixture
def law(monkeypatch):
    """Units that take what a law says, by a clock of their own: by the batch, and by the square of lengths."""
    law, plain, now = Cost(0.05, 0.0, 0.0, 2e-6), Bench.__call__, [0.0]

    def call(self, unit):
        now[0] += law.seconds([len(TEXTS[place]) for place in unit.places])
        return plain(self, unit)

    monkeypatch.setattr(Bench, "__call__", call)
    monkeypatch.setattr(foreseeing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return law


def test_batches_that_were_not_tried_are_foretold(law):
    bench = prepared(regard.pooled(toys.decisive()), TEXTS, **(ASKED | {"probes": (), "shown": 0, "batch_size": 24}))
    lengths = [len(one) for one in TEXTS]
    truth = sum(law.seconds([lengths[place] for place in unit.places]) for unit in bench.units)
    naive = len(bench.units) * law.seconds(sorted(lengths)[20:28]) * 24 / 8  # eight of middle length, times three
    told = foresee(bench)
    assert told.jobs["seconds"].sum() == pytest.approx(truth, rel=1e-6)
    assert abs(naive - truth) > 0.3 * truth, "a plain multiple would not do"
    assert told.jobs.set_index("trial").loc["permutation", "units"] == 2


def test_workers_share_what_there_is_to_do():
    subject = regard.pooled(toys.decisive())
    one, two, far = (foresee(prepared(subject, TEXTS, **ASKED, runner=where))
                     for where in (Runner(), Runner(workers=2), Runner("ray", 64, address="127.0.0.1:1")))  # fmt: skip
    assert (one.workers, far.workers) == (1, 64)
    assert two.workers <= 2
    assert one.seconds == pytest.approx(one.jobs["seconds"].sum(), rel=0.5)
    assert far.seconds >= START["ray"], "nobody works before they are there"
    assert 0 < one.driver < 1


def test_probes_leave_nothing_behind(tmp_path):
    subject = regard.pooled(toys.decisive())
    regard.audit(subject, TEXTS, out=tmp_path / "plain", **ASKED)
    bench = prepared(subject, TEXTS, **ASKED)
    foresee(bench)
    assert {key[0] for key in bench.shelf} <= {"labelled", "scale", "widths", "planted", "names"}
    bench.audit(tmp_path / "foreseen", resume=False)
    both = [(tmp_path / name / "findings.json").read_bytes() for name in ("plain", "foreseen")]
    assert both[0] == both[1]


@pytest.mark.parametrize("count", [5, 9])
def test_few_examples(count):
    told = foresee(prepared(regard.pooled(toys.decisive()), TEXTS[:count], **ASKED))
    assert told.seconds > 0
    assert np.isfinite(told.jobs["seconds"]).all()
