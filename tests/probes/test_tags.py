"""A head that is wired to verbs is found, an even one is at the base rate, and the numbers are the definition's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.errors import NotServed
from regard.glimpses import halves

sys.path.insert(0, str(Path(__file__).parent))
from wired import SIZE, sentences, untrained, wired


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


def test_an_untrained_model_has_none():
    found = regard.heads(untrained(), sentences(60, seed=1), probes=["tags"])["tags"]
    assert set(found.values["label"]) == {""}


def literal(subject, data, names, causal):
    """By half and tag: what each head gives, what an even look gives, and all; token by token, in float64."""
    halved = halves(type("S", (), {"seed": 0, "examples": tuple(data)}))
    sums = {half: np.zeros((3, len(names), 0)) for half in (0, 1)}
    for half, places in enumerate(halved):
        for place in places:
            example = list(data)[place]
            trace = regard.trace(subject, example.input)
            (features,) = trace.batch.features
            words = example.marks["words"]
            word_of = {
                row: number for number, one in enumerate(words)
                for row, (a, b), w in zip(features.rows, features.spans, features.word, strict=True)
                if w is not None and example.input[a:b].strip()
                and one.start <= a + (example.input[a:b][:1] == " ") < one.end
            }  # fmt: skip
            weights = np.concatenate([site.weights()[0].double().numpy() for site in trace.sites])
            sums[half] = sums[half] if sums[half].shape[2] else np.zeros((3, len(names), len(weights)))
            for q, looks in word_of.items():
                r = 1 / sum(one == looks for one in word_of.values())
                sees = [k for k in word_of if not causal or k <= q]
                mass = weights[:, q, sees].sum(-1)
                for tag, name in enumerate(names):
                    mine = [k for k in sees if words[word_of[k]].tag == name]
                    sums[half][:, tag] += r * np.stack(
                        [weights[:, q, mine].sum(-1), mass * len(mine) / len(sees), mass]
                    )
    return sums


@pytest.mark.parametrize(("model", "causal"), [("minilm", False), ("smollm", True)])
def test_the_numbers_are_those_of_the_definition(model, causal, request):
    subject = request.getfixturevalue(model)
    data = sentences(8, seed=2, tags=("A", "B", "C"))
    (found,) = regard.heads(subject, data, probes=[("tags", {"least": 2})], draws=10).probed.values()
    sums = literal(subject, data, "ABC", causal)
    early, late = ((sums[half][0] - sums[half][1]) / sums[half][2] for half in (0, 1))
    heads = found.values.groupby("layer").size().iloc[0]
    for one in found.tables["tags"].itertuples():
        tag, best = "ABC".index(one.tag), one.layer * heads + one.head
        assert early[tag, best] == pytest.approx(early[tag].max(), abs=1e-5)
        assert one.difference == pytest.approx(late[tag, best], abs=1e-5)
        assert one.share == pytest.approx((sums[1][0] / sums[1][2])[tag, best], abs=1e-5)
    own = early.argmax(0)
    assert found.values["value"].to_numpy() == pytest.approx(late[own, np.arange(late.shape[1])], abs=1e-5)


def test_too_few_words_are_said(minilm):
    with pytest.raises(NotServed, match=r"no part of speech has 20 words in each half of them: NOUN \(\d+\), VERB"):
        regard.heads(minilm, sentences(4), probes=["tags"])
    found = regard.heads(wired(), sentences(60, tags=("A",) * 9 + ("B", "C")), probes=["tags"], draws=10)["tags"]
    assert "C" not in set(found.tables["tags"]["tag"])
    assert any("C (" in one for one in found.warnings)
