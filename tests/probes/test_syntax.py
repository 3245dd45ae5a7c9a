"""Wired heads are found, untrained ones are not, and the numbers are those of the definition."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.data import Dataset, Example, Word
from regard.errors import NotServed
from regard.glimpses import halves

sys.path.insert(0, str(Path(__file__).parent))
from wired import sentences, untrained, wired

TEXTS = [
    "The unbelievably overlong movie bored us", "We loved this heartbreaking documentary though",
    "A director misunderstands storytelling again", "Nobody expected such incomprehensible dialogue",
]  # fmt: skip


def english(count=24):
    lots, found = np.random.default_rng(3), []
    for number in range(count):
        forms = lots.permutation(TEXTS[number % 4].split()).tolist()
        words, at = [], 0
        for i, form in enumerate(forms):
            head = int(lots.choice([j for j in range(len(forms)) if j != i]))
            words.append(Word(form, at, at + len(form), "X", head, "one" if head > i else "two:x"))
            at += len(form) + 1
        found.append(Example(" ".join(forms), marks={"words": tuple(words)}))
    return Dataset.of(found)


def test_wired_heads_are_found_in_both_directions():
    table = regard.heads(wired(), sentences(80), probes=["syntax"])["syntax"]
    relations = table.tables["relations"].set_index(["relation", "direction"])
    for name in ("one", "two"):
        for direction, head in (("dependent → head", 0), ("head → dependent", 1)):
            one = relations.loc[name, direction]
            assert (one["layer"], one["head"], one["accuracy"]) == (0, head, 1.0)
            assert one["difference_low"] > 0.5
    labels = table.values["label"].tolist()
    assert all(labels[:2])
    assert labels[2:] == ["", ""]


def test_an_untrained_model_has_none():
    found = regard.heads(untrained(), sentences(80, seed=1), probes=["syntax"])["syntax"]
    table = found.tables["relations"]
    assert len(table) == 6  # with all arcs
    assert not (table["difference_low"] > 0).any()
    assert set(found.values["label"]) == {""}


def literal(subject, data, word_relation, way, scoring):
    """Right and all arcs of each head, by the definition, in float64; and by offset."""
    right, offsets = {False: 0, True: 0}, {False: [], True: []}
    for place, example in enumerate(data):
        trace = regard.trace(subject, example.input)
        (features,) = trace.batch.features
        words = example.marks["words"]
        rows = [[r for r, (a, b), w in zip(features.rows, features.spans, features.word, strict=True)
                 if w is not None and one.start <= a < one.end] for one in words]  # fmt: skip
        weights = np.concatenate([site.weights()[0].double().numpy() for site in trace.sites])
        half, hits = bool(scoring[place]), np.zeros(len(weights))
        for dependent, word in enumerate(words):
            if word_relation not in (word.relation, "all"):
                continue
            offsets[half].append(word.head - dependent)
            for number, matrix in enumerate(weights):
                scores = []
                for other in range(len(words)):
                    looks, at = (dependent, other) if way == "dependent → head" else (other, dependent)
                    scores.append(-1.0 if other == dependent else
                                  np.mean([sum(matrix[q, k] for k in rows[at]) for q in rows[looks]]))  # fmt: skip
                hits[number] += int(np.argmax(scores)) == word.head
        right[half] = right[half] + hits
    return right, offsets


def test_the_numbers_are_those_of_the_definition(minilm):
    data = english()
    found = regard.heads(minilm, data, probes=[("syntax", {"least": 5})], draws=20)
    (probed,) = found.probed.values()
    survey = type("S", (), {"seed": 0, "examples": tuple(data)})
    scoring = np.zeros(len(data), dtype=bool)
    scoring[halves(survey)[1]] = True
    assert 0 < scoring.sum() < len(scoring)
    for one in probed.tables["relations"].itertuples():
        right, offsets = literal(minilm, data, one.relation, one.direction, scoring)
        best = one.layer * 12 + one.head
        assert right[False][best] == right[False].max()
        assert one.arcs == len(offsets[True])
        assert one.accuracy == pytest.approx(right[True][best] / one.arcs, abs=1e-12)
        assert offsets[False].count(one.offset) == max(map(offsets[False].count, offsets[False]))
        assert one.baseline == pytest.approx(offsets[True].count(one.offset) / one.arcs, abs=1e-12)


def test_a_decoder_is_asked_of_what_it_can_see(smollm):
    data = english(12)
    (probed,) = regard.heads(smollm, data, probes=[("syntax", {"least": 5})], draws=10).probed.values()
    kinds = set(zip(probed.tables["relations"]["relation"], probed.tables["relations"]["direction"], strict=True))
    assert {one for one in kinds if one[0] != "all"} == {
        ("one", "head → dependent"),
        ("two:x", "dependent → head"),
    }  # "one" has its head later, "two:x" before
    assert any("looks back only" in one for one in probed.warnings)


def test_subtypes_may_be_cut(minilm):
    (probed,) = regard.heads(
        minilm, english(), probes=[("syntax", {"least": 5, "subtypes": False})], draws=10
    ).probed.values()  # fmt: skip
    assert set(probed.tables["relations"]["relation"]) == {"all", "one", "two"}


def test_too_few_arcs_are_said(minilm):
    with pytest.raises(NotServed, match=r"no relation has 20 arcs in each half of them: .*one \(\d+\)"):
        regard.heads(minilm, english(4), probes=["syntax"])
    some = sentences(80, relations=("one",) * 30 + ("rare",))
    found = regard.heads(wired(), some, probes=["syntax"], draws=10)["syntax"]
    assert set(found.tables["relations"]["relation"]) == {"all", "one"}
    assert any("rare (" in one for one in found.warnings)


def test_words_that_cannot_be_aligned_are_an_error(minilm):
    odd = [Example("a b c", marks={"words": (Word("a", 0, 1, "X", 1, "one"), Word("?", 50, 51, "X", 0, "one"),
                                             Word("?", 60, 61, "X", 0, "one"))})]  # fmt: skip
    with pytest.raises(NotServed, match="cannot align 20 of 30 words"):
        regard.heads(minilm, Dataset.of(odd * 10), probes=["syntax"])


def test_other_data_is_refused(minilm):
    with pytest.raises(NotServed, match="CoNLL-U"):
        regard.heads(minilm, ["a text", "another"], probes=["syntax"])
