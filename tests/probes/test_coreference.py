"""A head that is wired to whom a pronoun means is found; rules and refusals are as they are said."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.data import Dataset, Example
from regard.errors import NotServed
from regard.worded import halves

sys.path.insert(0, str(Path(__file__).parent))
from wired import untrained, wired


def texts(count, seed=0, names_first=False, label=None):
    """The pronoun is the word that hangs on the name it means."""
    lots, found = np.random.default_rng(seed), []
    for _ in range(count):
        places = lots.choice(10, 3, replace=False)
        pronoun, a, b = (int(one) for one in (np.sort(places)[::-1] if names_first else places))
        says = label or str(lots.choice(["A", "B"]))
        means = {"A": a, "B": b, "neither": 0}[says]
        forms = [f"{i}_{means if i == pronoun else 0}" for i in range(10)]
        starts = [sum(len(one) + 1 for one in forms[:i]) for i in range(10)]
        spans = {name: (starts[i], starts[i] + len(forms[i])) for name, i in (("pronoun", pronoun), ("A", a), ("B", b))}
        found.append(Example(" ".join(forms), says, marks={"mentions": spans}))
    return Dataset.of(found)


def test_a_wired_head_is_found():
    found = regard.heads(wired(), texts(60), probes=["coreference"])["coreference"]
    assert found.values["value"][0] == 1.0
    assert found.values["label"].tolist() == ["coreference", "", "", ""]
    assert "layer 0 head 0" in found.sentence
    assert found.tables["rules"]["difference_low"][1:].min() > 0
    assert found.values["value"][2:].tolist() == [0.5, 0.5]  # heads that look at all alike: ties


def test_an_untrained_model_has_none():
    found = regard.heads(untrained(), texts(60, seed=1), probes=["coreference"])["coreference"]
    assert set(found.values["label"]) == {""}


def test_the_numbers_are_those_of_the_definition(minilm):
    data = texts(24, seed=2)
    found = regard.heads(minilm, data, probes=["coreference"], draws=10)["coreference"]
    scoring = halves(type("S", (), {"seed": 0, "examples": tuple(data)}))
    right, rules = [], []
    for half, example in zip(scoring, data, strict=True):
        if not half:
            continue
        trace = regard.trace(minilm, example.input)
        (features,) = trace.batch.features
        at = example.marks["mentions"]
        rows = {name: [r for r, (a, b), w in zip(features.rows, features.spans, features.word, strict=True)
                       if w is not None and start <= a < end] for name, (start, end) in at.items()}  # fmt: skip
        weights = np.concatenate([site.weights()[0].double().numpy() for site in trace.sites])
        looks = {name: np.array([np.mean([sum(one[q, k] for k in rows[name]) for q in rows["pronoun"]]) for one in weights])
                 for name in "AB"}  # fmt: skip
        other = "B" if example.label == "A" else "A"
        right.append(looks[example.label] > looks[other])
        far = {name: abs(at[name][0] - at["pronoun"][0]) for name in "AB"}
        rules.append((far[example.label] < far[other], at[example.label] < at[other]))
    assert found.values["value"].to_numpy() == pytest.approx(np.mean(right, 0), abs=1e-12)
    assert found.tables["rules"]["accuracy"][2] == pytest.approx(np.mean(rules, 0)[1])


def test_a_decoder_is_asked_where_both_names_are_before(smollm):
    some = [*texts(10, seed=3, names_first=True), *texts(1, seed=5)]
    before = sum(max(one.marks["mentions"][n][1] for n in "AB") <= one.marks["mentions"]["pronoun"][0] for one in some)
    found = regard.heads(smollm, Dataset.of(some), probes=["coreference"], draws=5)["coreference"]
    assert any(f"{before} of 11 texts have both names before" in one for one in found.warnings)
    assert found.settings["chosen on"] + found.settings["scored on"] == before


def test_texts_that_mean_neither_do_not_count():
    with pytest.raises(NotServed, match="0 of 10 texts"):
        regard.heads(wired(), texts(10, label="neither"), probes=["coreference"])
