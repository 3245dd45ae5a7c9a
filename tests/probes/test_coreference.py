"""A head that is wired to whom a pronoun means is found; rules and refusals are as they are said."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.data import Dataset, Example
from regard.errors import NotServed
from regard.glimpses import halves

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
    assert found.sentence.startswith("Layer 0, head 0 looks more at the name that is meant in 100%")
    assert found.tables["rules"]["difference_low"][1:].min() > 0
    assert found.values["value"][2:].tolist() == [0.5, 0.5]  # heads that look at all alike: ties
    assert found.tables["rules"]["accuracy"][3] == 0.5  # names of one token are equally long


def test_an_untrained_model_has_none():
    found = regard.heads(untrained(), texts(60, seed=1), probes=["coreference"])["coreference"]
    assert set(found.values["label"]) == {""}


@pytest.mark.parametrize("model", ["minilm", "smollm"])
def test_the_numbers_are_those_of_the_definition(model, request):
    subject = request.getfixturevalue(model)
    data = texts(24, seed=2, names_first=model == "smollm")
    (found,) = regard.heads(subject, data, probes=[("coreference", {"least": 2})], draws=10).probed.values()
    right, rules = [], []
    choose, score = halves(type("S", (), {"seed": 0, "examples": tuple(data)}))
    for example in data:
        trace = regard.trace(subject, example.input)
        (features,) = trace.batch.features
        at, text = example.marks["mentions"], example.input
        rows = {name: [r for r, (a, b), w in zip(features.rows, features.spans, features.word, strict=True)
                       if w is not None and text[a:b].strip() and start <= a + (text[a:b][:1] == " ") < end]
                for name, (start, end) in at.items()}  # fmt: skip
        weights = np.concatenate([site.weights()[0].double().numpy() for site in trace.sites])
        looks = {name: np.array([np.mean([sum(one[q, k] for k in rows[name]) for q in rows["pronoun"]])
                                 for one in weights]) for name in "AB"}  # fmt: skip
        true, other = ("A", "B") if example.label == "A" else ("B", "A")
        right.append(looks[true] > looks[other])
        inner = [min(at[name][1], at["pronoun"][1]) for name in "AB"], [max(at[n][0], at["pronoun"][0]) for n in "AB"]
        far = dict(zip("AB", np.subtract(inner[1], inner[0]), strict=True))
        long = {name: len(rows[name]) for name in "AB"}
        rules.append([
            (far[true] < far[other]) + (far[true] == far[other]) / 2, at[true] < at[other],
            (long[true] > long[other]) + (long[true] == long[other]) / 2,
        ])  # fmt: skip
    right, rules = np.array(right, float), np.array(rules, float)
    table = found.tables["rules"]
    assert found.values["value"].to_numpy() == pytest.approx(right[score].mean(0), abs=1e-12)
    assert table["accuracy"][1:].to_numpy() == pytest.approx(rules[score].mean(0), abs=1e-12)
    named = found.values.iloc[int(right[choose].mean(0).argmax())]
    assert table["who"][0] == f"layer {named['layer']}, head {named['head']}"


def test_a_decoder_is_asked_where_both_names_are_before(smollm):
    some = [*texts(10, seed=3, names_first=True), *texts(3, seed=5)]
    before = sum(max(one.marks["mentions"][n][1] for n in "AB") <= one.marks["mentions"]["pronoun"][0] for one in some)
    assert before < 13
    (found,) = regard.heads(
        smollm, Dataset.of(some), probes=[("coreference", {"least": 2})], draws=5
    ).probed.values()  # fmt: skip
    assert any(f"{before} of 13 texts have both names before" in one for one in found.warnings)
    assert found.settings["chosen on"] + found.settings["scored on"] == before


def test_texts_that_mean_neither_do_not_count():
    with pytest.raises(NotServed, match="0 of 10 texts"):
        regard.heads(wired(), texts(10, label="neither"), probes=["coreference"])
    with pytest.raises(
        NotServed, match="30 of 30 texts .*15 to choose a head on and 15 to score it on, where least=20"
    ):
        regard.heads(wired(), texts(30), probes=["coreference"])
