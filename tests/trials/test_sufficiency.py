"""Words are kept in the order of an explanation: against texts that are cut by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from polar import KINDS, LONG, Literal, bert, examples, of_kind, toy

import regard
from regard import errors
from regard.rationales import ranked

SHARES = (0.2, 0.5)


def test_supported_where_attention_is_the_decision():
    found = regard.trial(toy("decisive"), examples(), "sufficiency")
    assert found.supported is True
    assert found.margin.low > 0.05
    assert found.statistic < found.reference["random"].value, "less is better"
    assert found.criterion == ""


def test_not_supported_where_attention_is_irrelevant():
    found = regard.trial(toy("irrelevant"), examples(), "sufficiency")
    assert found.supported is False
    assert found.margin.high < 0


def test_a_random_explanation_is_no_better_than_the_control():
    many = [regard.trial(toy("decisive"), examples(), "sufficiency", method="random", seed=i) for i in range(8)]
    assert sum(found.supported is True for found in many) <= 1
    assert abs(np.mean([found.margin.value for found in many])) < 0.01


def test_against_texts_that_are_cut_by_hand(tokenizer):
    model = bert(tokenizer)
    data = examples(8, more=LONG)
    found = regard.trial(regard.text(model, tokenizer), data, "sufficiency", bins=SHARES, repeats=2, batch_size=3)
    for one, row in zip(data, found.values.to_dict(orient="records"), strict=True):
        literal = Literal(model, tokenizer, one.input)
        order = ranked(literal.raw(), one.id, 0)
        for share in SHARES:
            others = order[math.ceil(share * len(order)) :]
            expected = literal.before[literal.said] - literal.without(others)[literal.said]
            assert row[f"method {share}"] == pytest.approx(expected, abs=1e-9)
    assert found.statistic == pytest.approx(found.values[["method 0.2", "method 0.5"]].mean(axis=1).mean())
    assert found.margin.value == pytest.approx((found.values["random"] - found.values["method"]).mean())
    assert found.values["method"].abs().max() > 0.01, "it says something"


def test_all_words_suffice_and_no_word_is_comprehensive_twice(tokenizer):
    subject = regard.text(bert(tokenizer), tokenizer)
    found = regard.trial(subject, examples(6), "sufficiency", bins=[1.0])
    np.testing.assert_allclose(found.values[["method", "random"]], 0, atol=1e-12)
    assert found.supported is None, "nothing was taken away"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_subject_in_any_batches(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer)
    found, again = (
        regard.trial(subject, data, "sufficiency", bins=SHARES, repeats=1, batch_size=size) for size in (12, 5)
    )
    numbers = [one.values.drop(columns=["example", "predicted"]).to_numpy() for one in (found, again)]
    np.testing.assert_allclose(*numbers, atol=1e-5)
    assert np.ptp(numbers[0]) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bins": [0]}, "bins=0 must be a number above 0, and at most 1"),
        ({"repeats": -1}, "repeats=-1 must be 1 or more"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(errors.OptionError, match=said):
        regard.trial(toy("decisive"), examples(8), "sufficiency", **options)
