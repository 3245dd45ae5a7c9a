"""Examples on disk are those in memory, and so is what comes of them."""

from __future__ import annotations

import pytest

import regard
from regard import cases, concluding
from regard.data import Dataset, Example, spooling

TEXTS = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad"]
MANY = [Example(f"{text} {number % 7}", "ab"[number % 2], id=f"no. {number}") for number, text in enumerate(TEXTS * 9)]


def test_they_come_back_as_they_were(monkeypatch):
    monkeypatch.setattr(spooling, "MOST_HELD", 10)
    found = spooling.held(iter(MANY))
    assert isinstance(found, spooling.Spooled)
    assert len(found) == 45
    assert [*found] == MANY
    assert [found[44], found[0], found[-1], found[7]] == [MANY[44], MANY[0], MANY[-1], MANY[7]]
    assert found[3:9:2] == MANY[3:9:2]
    with pytest.raises(IndexError):
        found[45]


@pytest.mark.parametrize("count", [0, 1, 10, 11])
def test_few_stay_in_memory(monkeypatch, count):
    monkeypatch.setattr(spooling, "MOST_HELD", 10)
    found = spooling.held(MANY[:count])
    assert isinstance(found, tuple) == (count <= 10)
    assert [*found] == MANY[:count]


def test_an_audit_of_many_is_that_of_few(monkeypatch, tmp_path):
    def audited(name):
        subject = regard.pooled(regard.models.toys.decisive())
        asked = {"trials": ["comprehensiveness", "permutation"], "methods": ["raw", "uniform"]}
        regard.audit(subject, Dataset.of(MANY), **asked, limit=40, batch_size=4, shown=2, out=tmp_path / name)
        return (tmp_path / name / "findings.json").read_bytes()

    plain = audited("held")
    monkeypatch.setattr(spooling, "MOST_HELD", 10)
    monkeypatch.setattr(cases, "ROWS", 8)  # values in blocks
    assert audited("spooled") == plain


def test_of_very_many_some_values_are_kept(monkeypatch):
    subject = regard.pooled(regard.models.toys.decisive())
    asked = {"trials": ["comprehensiveness"], "methods": ["raw"], "limit": 40, "shown": 0, "probes": ()}
    ((_, whole),) = regard.audit(subject, Dataset.of(MANY), **asked).findings
    monkeypatch.setattr(concluding, "MOST_VALUES", 30)
    monkeypatch.setattr(concluding, "SOME_VALUES", 12)
    ((_, some),) = regard.audit(subject, Dataset.of(MANY), **asked).findings
    assert len(whole.values) == 40
    assert len(some.values) == 12
    assert some.interval == whole.interval
    assert "values holds 12 of 40 examples, drawn by lot; all numbers are of all of them." in some.warnings
    merged = some.values.merge(whole.values)
    assert len(merged) == 12
