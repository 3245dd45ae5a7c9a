"""A head that is wired to verbs is found, an even one is at the base rate, and the numbers are the definition's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.worded import halves

sys.path.insert(0, str(Path(__file__).parent))
from wired import SIZE, sentences, wired


def to_verbs():
    """Layer 0, head 0 looks at words in odd places: the verbs."""
    subject = wired()
    part = subject.model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        part.query.weight[:SIZE].zero_()
        part.query.bias[:SIZE] = 1.0
        part.key.weight[:SIZE, :SIZE] = torch.diag(torch.tensor([float(i % 2) for i in range(SIZE)])) * 8
    return subject


def test_a_head_on_verbs_is_found():
    found = regard.heads(to_verbs(), sentences(40), probes=["tags"])["tags"]
    verb = found.tables["tags"].set_index("tag").loc["VERB"]
    assert (verb["layer"], verb["head"]) == (0, 0)
    assert verb["share"] > 0.99
    assert verb["base"] == pytest.approx(0.5, abs=0.1)
    assert verb["difference_low"] > 0.3
    assert found.values["label"][0] == "VERB"


def test_heads_that_look_at_all_words_alike_are_at_the_base_rate():
    found = regard.heads(to_verbs(), sentences(40), probes=["tags"])["tags"]
    assert found.values["value"][2:].abs().max() < 1e-6
    assert found.values["label"][2:].tolist() == ["", ""]


def test_the_numbers_are_those_of_the_definition(minilm):
    data = sentences(10, seed=2, tags=("A", "B", "C"))
    found = regard.heads(minilm, data, probes=["tags"], draws=10)["tags"]
    scoring = halves(type("S", (), {"seed": 0, "examples": tuple(data)}))
    sums = {half: np.zeros((3, 72)) for half in (False, True)}
    count = {False: 0, True: 0}
    base = np.zeros(3)
    for place, example in enumerate(data):
        trace = regard.trace(minilm, example.input)
        (features,) = trace.batch.features
        words = example.marks["words"]
        rows = [[r for r, (a, b), w in zip(features.rows, features.spans, features.word, strict=True)
                 if w is not None and one.start <= a < one.end] for one in words]  # fmt: skip
        weights = np.concatenate([site.weights()[0].double().numpy() for site in trace.sites])
        half = bool(scoring[place])
        count[half] += len(words)
        for looks in rows:
            seen = np.array(
                [[np.mean([sum(matrix[q, k] for k in at) for q in looks]) for at in rows] for matrix in weights]
            )
            for tag in range(3):
                mine = [one.tag == "ABC"[tag] for one in words]
                sums[half][tag] += seen[:, mine].sum(-1) / seen.sum(-1) - np.mean(mine)
                base[tag] += np.mean(mine) if half else 0.0
    for one in found.tables["tags"].itertuples():
        tag, best = "ABC".index(one.tag), one.layer * 12 + one.head
        assert sums[False][tag][best] == pytest.approx(sums[False][tag].max(), abs=1e-5)
        assert one.difference == pytest.approx(sums[True][tag][best] / count[True], abs=1e-5)
        assert one.base == pytest.approx(base[tag] / count[True], abs=1e-12)


def test_a_decoder_sees_what_is_before(smollm):
    data = sentences(6, seed=4)
    found = regard.heads(smollm, data, probes=["tags"], draws=5)["tags"]
    scoring = halves(type("S", (), {"seed": 0, "examples": tuple(data)}))
    rates = [np.mean([one.tag == "VERB" for one in words[: i + 1]])
             for half, example in zip(scoring, data, strict=True) if half
             for words in [example.marks["words"]] for i in range(len(words))]  # fmt: skip
    assert found.tables["tags"].set_index("tag").loc["VERB", "base"] == pytest.approx(np.mean(rates), abs=1e-9)
