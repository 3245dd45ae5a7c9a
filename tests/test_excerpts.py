"""A unit sees an excerpt of the data, and finds what it would find with all of it."""

import json
import sys
from pathlib import Path

import pytest

import regard
from regard.auditing import prepared
from regard.data.planted import plant
from regard.excerpts import REPEATS
from regard.models import toys

sys.path.insert(0, str(Path(__file__).parent / "trials"))
from polar import of_kind

pickle = pytest.importorskip("cloudpickle", reason="what Ray sends is pickled by cloudpickle, which is not installed")

TEXTS = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad", "good and bad so so"] * 5
TRIALS = {
    "text": ["agreement", "comprehensiveness", "permutation", "fresh", "uniform", "stability", "erasure"],
    "table": ["agreement", "stability", "fresh", "uniform"],
    "regression": ["comprehensiveness", "permutation", "uniform"],
}


@pytest.mark.parametrize("kind", [*TRIALS])
def test_findings_are_those_of_trials_that_see_all_examples(kind, tokenizer):
    if kind == "text":
        subject = regard.pooled(toys.decisive())
        data = regard.data.Dataset.of(
            [regard.data.Example(text, label=place % 2 if place > 9 else None) for place, text in enumerate(TEXTS)]
        )
    else:
        subject, data = of_kind(kind, tokenizer, 20)
    asked = {"batch_size": 8, "seed": 3}
    audit = regard.audit(subject, data, methods=["raw"], trials=TRIALS[kind], shown=1, threads=1, probes=(), **asked)
    assert not audit.refused
    for title, found in audit.findings:
        alone = regard.trial(subject, data, found.trial, method=title, examples=None, threads=1, **asked)
        assert json.dumps(found.to_dict()) == json.dumps(alone.to_dict()), found.trial


@pytest.mark.parametrize("kind", [*TRIALS])
def test_what_is_sent_does_not_grow_with_the_data_and_does_the_same(kind, tokenizer):
    sizes = []
    for count in (16, 64):
        subject, data = (regard.pooled(toys.decisive()), (TEXTS * 3)[:count])
        if kind != "text":
            subject, data = of_kind(kind, tokenizer, count)
        bench = prepared(subject, data, methods=["raw"], trials=TRIALS[kind], shown=1, batch_size=8, threads=1)
        bench.look()
        work = pickle.dumps(bench)
        parcels = [(unit, pickle.dumps(bench.packed([unit]))) for unit in bench.units if unit.task != "heads"]
        sizes.append(len(work))
        for unit, sent in parcels:
            (parcel,) = pickle.loads(sent)
            assert len(parcel.examples.held) <= (1 + REPEATS) * 8
            if unit.task != "exhibit" or count == 16:
                here, there = bench(unit), pickle.loads(work)(parcel)
                assert json.dumps(here[0]["found"]) == json.dumps(there[0]["found"]), unit
    assert sizes[1] < 1.02 * sizes[0]


def test_targets_of_each_example_go_with_it():
    subject = regard.pooled(toys.decisive())
    targets = [place % 2 for place in range(len(TEXTS))]
    bench = prepared(subject, TEXTS, methods=["raw"], trials=["comprehensiveness"], target=targets, batch_size=8)
    units = [unit for unit in bench.units if unit.task == "comprehensiveness"]
    for unit in units:
        (parcel,) = pickle.loads(pickle.dumps(bench.packed([unit])))
        assert parcel.target == {place: targets[place] for place in unit.places}
        assert pickle.loads(pickle.dumps(bench))(parcel)[0]["found"] == bench(unit)[0]["found"]


def test_names_that_are_there_twice_keep_their_numbers():
    data = regard.data.Dataset.of([regard.data.Example(text, id="twin") for text in TEXTS])
    bench = prepared(regard.pooled(toys.decisive()), data, trials=["permutation"], batch_size=8)
    unit = bench.units[2]
    rows = bench(unit)[0]["found"]["rows"]
    assert [row["example"] for row in rows] == [f"twin ({place})" for place in unit.places]


def test_a_planted_cause_is_known_where_the_unit_runs():
    made = plant("keyword", train=60, test=20)
    subject, _ = regard.training.fit_planted("keyword", seed=0)
    bench = prepared(subject, made, methods=["raw"], trials=["planted"], batch_size=8, shown=0, probes=())
    units, sent = bench.units, pickle.dumps(bench)
    for unit in units:
        assert pickle.loads(sent)(*bench.packed([unit]))[0]["found"] == bench(unit)[0]["found"]
        assert "rows" in bench(unit)[0]["found"]


def test_heads_are_looked_at_with_so_many_examples_at_most(monkeypatch):
    monkeypatch.setattr(regard.auditing, "MOST_PROBED", 12)
    asked = {"methods": ["raw"], "trials": ["permutation"], "shown": 0, "probes": ["entropy"]}
    bench = prepared(regard.pooled(toys.decisive()), TEXTS, **asked)
    (unit,) = [unit for unit in bench.units if unit.task == "heads"]
    assert len(unit.places) == 12
    assert unit.places != (*range(12),), "they are drawn by lot"
    assert bench(unit)[0]["found"]["settings"]["examples"] == 12


def test_a_spread_that_cannot_be_measured_is_said_where_it_is_needed(tokenizer, monkeypatch):
    subject, data = of_kind("regression", tokenizer, 20)
    monkeypatch.setattr(regard.cases.Case, "scale", property(lambda case: case.once("scale", _breaks)))
    audit = regard.audit(subject, data, methods=["raw"], trials=["permutation"], shown=0, probes=())
    assert [one["why"] for one in audit.refused] == ["no spread"]


def _breaks():
    raise regard.errors.TrialFailed("no spread")
