"""Prefix matching: where it must be found, against attention that is written out, and the text that it is asked on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from letters import Wired, llama, served

import regard
from regard import errors
from regard.circuits import random_text
from regard.models import toys

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import attend


def induction(subject, data, **options):
    return regard.heads(subject, data, probes=[("induction", options)], draws=50).probed.popitem()[1]


def test_both_heads_of_the_wired_model_are_found():
    subject, data = served(toys.induction(), tokens=16, rows=48)
    found = regard.heads(subject, data, probes=[("induction", {"tokens": 12}), "previous", "positional"])
    matched = found["induction"].values
    assert matched["label"].tolist() == ["", "", "induction", ""]
    # the first row has none before it and looks at itself, so its token is also found there: 1/2, 2/3, 3/4 are right
    expected = (11 + np.mean([1 / 2, 2 / 3, 3 / 4])) / 12
    assert matched["value"][2] == pytest.approx(expected, abs=1e-6)
    assert matched["value"][0] == pytest.approx(0, abs=1e-6)
    rows = range(12, 48)  # heads that look at all alike have what their share of the keys is
    alike = np.mean([(row // 12) / (row + 1) for row in rows])
    assert matched["value"][[1, 3]].tolist() == pytest.approx([alike] * 2, abs=1e-6)
    assert found["positional"].values["label"].tolist()[0] == "previous"
    assert found["previous"].values["value"][0] == pytest.approx(1, abs=1e-6)
    assert found["previous"].values["value"][1:].max() < 0.2


@pytest.mark.parametrize("looks", ["previous", "the same"])
def test_heads_that_look_elsewhere_are_none(looks):
    subject, data = served(Wired(looks))
    found = induction(subject, data, tokens=6)
    assert found.values["label"].tolist() == ["", ""]
    assert found.values["value"][0] == pytest.approx(0, abs=1e-6)


def test_against_attention_that_is_written_out():
    model, subject, data = llama()
    found = induction(subject, data, tokens=8, repeats=3, sequences=4)
    ids = random_text(subject, tokens=8, repeats=3, sequences=4, seed=0)
    every = []
    for text in ids.tolist():
        layers = attend(model, {"input_ids": torch.tensor([text])}, lambda output: output.logits.sum()).weights
        scores = []
        for weights in layers:
            rows = [
                sum(weights[:, row, before + 1] for before in range(row) if text[before] == token)
                for row, token in enumerate(text)
                if token in text[:row]
            ]
            scores.append(torch.stack(rows).mean(0))
        every.append(torch.cat(scores))
    expected = torch.stack(every).mean(0).tolist()
    assert found.values["value"].tolist() == pytest.approx(expected, abs=1e-9)
    assert (found.values["low"] <= found.values["value"]).all()
    assert (found.values["value"] <= found.values["high"]).all()
    assert found.values["high"].max() > found.values["low"].max()


def test_a_real_model_has_induction_heads_and_most_heads_are_none(smollm):
    found = induction(smollm, ["so"], sequences=2).values
    assert found["value"].max() > 0.8
    assert found["value"].median() < 0.05
    assert 5 <= (found["label"] == "induction").sum() <= 25


# --- the text -------------------------------------------------------------------------------------------------------


def test_the_text_is_of_common_tokens_and_begins_as_texts_do(smollm):
    ids = random_text(smollm, tokens=25, repeats=4, sequences=10, seed=0)
    tokenizer = smollm.tokenizer
    assert ids.shape == (10, 101)
    assert set(ids[:, 0].tolist()) == {tokenizer.bos_token_id}
    assert not set(ids[:, 1:].flatten().tolist()) & {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    assert ids[:, 1:].min() > 0.04 * 49000
    assert ids[:, 1:].max() < 0.961 * len(tokenizer)
    for text in ids[:, 1:]:
        assert torch.equal(text[:75], text[25:])
        assert len(set(text.tolist())) == 25
    assert len({tuple(text) for text in ids.tolist()}) == 10
    assert torch.equal(ids, random_text(smollm, tokens=25, repeats=4, sequences=10, seed=0))
    assert not torch.equal(ids, random_text(smollm, tokens=25, repeats=4, sequences=10, seed=1))


def test_ids_are_run_as_the_text_that_they_spell(smollm):
    text = "The capital of France is"
    batch = smollm.encode(text)
    other = smollm.of_ids(batch.inputs["input_ids"])
    assert torch.equal(smollm.forward(batch), smollm.forward(other))
    assert other.features[0].tokens == batch.features[0].tokens


@pytest.mark.parametrize(
    ("options", "why"),
    [({"repeats": 1}, "repeats=1"), ({"repeats": 0}, "repeats=0"), ({"tokens": 41}, "40 different"), ({"tokens": 0}, "tokens=0"),
     ({"sequences": 0}, "sequences=0"), ({"sequences": 1.5}, "sequences=1.5")],
)  # fmt: skip
def test_texts_that_cannot_be_made(options, why):
    with pytest.raises(errors.OptionError, match=why):
        induction(*served(Wired("previous")), **options)


def test_a_text_longer_than_the_model_takes(smollm):
    with pytest.raises(errors.InputError, match="takes"):
        induction(smollm, ["so"], tokens=4000)
    with pytest.raises(errors.InputError, match="24 features"):
        induction(*served(Wired("previous")), tokens=5)


def test_models_without_a_vocabulary_are_refused(classifier, tokenizer):
    with pytest.raises(errors.NotServed, match="decoder"):
        induction(regard.text(classifier, tokenizer), ["so so"])
