"""Rationales alone, against texts that are cut by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from polar import KINDS, LONG, Literal, bert, examples, of_kind, toy

import regard
from regard import errors
from regard.data import Dataset, Example
from regard.rationales import ranked


def test_supported_where_attention_is_the_decision():
    found = regard.trial(toy("decisive"), examples(), "fresh")
    assert found.supported is True
    assert found.statistic == 1
    assert found.reference["random"].high < 0.9
    texts = found.tables["texts"].set_index(["measure", "text"])["value"]
    assert texts["correct", "rationale"] == texts["correct", "full"] == 1
    assert texts["correct", "random"] == pytest.approx(found.values["correct_random"].mean())


def test_not_supported_where_attention_is_irrelevant():
    found = regard.trial(toy("irrelevant"), examples(), "fresh")
    assert found.supported is False
    assert found.statistic < found.reference["random"].value


@pytest.mark.parametrize("contiguous", [False, True])
def test_against_texts_that_are_cut_by_hand(tokenizer, contiguous):
    model = bert(tokenizer)
    names = ["LABEL_0", "LABEL_1", "LABEL_2"]
    data = Dataset.of([
        Example(one.input, None if place == 2 else names[place % 3], id=one.id)
        for place, one in enumerate(examples(10, more=LONG))
    ])  # fmt: skip
    subject = regard.text(model, tokenizer)
    found = regard.trial(subject, data, "fresh", share=0.4, contiguous=contiguous, repeats=2, batch_size=4)

    def left(literal, scores, name):
        """The probabilities from the rationale alone."""
        count, words = math.ceil(0.4 * len(scores)), range(len(scores))
        if contiguous:
            start = max(words[: len(scores) - count + 1], key=lambda first: sum(scores[first : first + count]))
            kept = range(start, start + count)
        else:
            kept = ranked(scores, name, 0)[:count].tolist()
        return literal.without([word for word in words if word not in kept])

    for one, row in zip(data, found.values.to_dict(orient="records"), strict=True):
        literal = Literal(model, tokenizer, one.input)
        lots = [regard.explain(subject, one.input, method="random", seed=seed) for seed in (1, 2)]
        drawn = [left(literal, why.words().query("not special")["score"].to_numpy(), one.id) for why in lots]
        alone = left(literal, literal.raw(), one.id)
        assert row["kept_rationale"] == (alone.argmax() == literal.said)
        assert row["kept_random"] == np.mean([some.argmax() == literal.said for some in drawn])
        assert row["probability_full"] == pytest.approx(literal.before[literal.said])
        assert row["probability_rationale"] == pytest.approx(alone[literal.said])
        assert row["probability_random"] == pytest.approx(np.mean([some[literal.said] for some in drawn]))
        if one.label is None:
            assert np.isnan([row[f"correct_{text}"] for text in ("full", "rationale", "random")]).all()
        else:
            assert row["correct_rationale"] == (names[alone.argmax()] == one.label)
    assert 0 < found.statistic < 1, "some decisions are kept, and some are not"
    assert found.statistic == found.values["kept_rationale"].mean()
    assert found.margin.value == pytest.approx((found.values["kept_rationale"] - found.values["kept_random"]).mean())
    assert found.tables["texts"].query("measure == 'correct'")["undefined"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"regression"}))
def test_every_kind_of_subject_in_any_batches(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer)
    found, again = (regard.trial(subject, data, "fresh", repeats=2, batch_size=size) for size in (12, 5))
    numbers = [one.values.drop(columns=["example", "predicted"]).to_numpy() for one in (found, again)]
    np.testing.assert_allclose(*numbers, atol=1e-5)
    assert len(found.values) == 12
    assert "correct_full" not in found.values, "there are no labels"


def test_words_that_are_tied_are_drawn_by_lot():
    words = "so the film is and plot nice good moving superb"
    data = Dataset.of([Example(words, id=f"t{place}") for place in range(40)])
    for contiguous in (False, True):
        found = regard.trial(toy("decisive"), data, "fresh", method="uniform", contiguous=contiguous)
        assert found.values["probability_rationale"].nunique() > 5, "not always the first words"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share": 0}, "share=0 must be a number above 0, and below 1"), ({"share": 1.0}, "share=1.0 must be"),
        ({"contiguous": "yes"}, "contiguous='yes' must be True or False"), ({"repeats": 0}, "repeats=0"),
    ],
)  # fmt: skip
def test_bad_options(options, said):
    with pytest.raises(errors.OptionError, match=said):
        regard.trial(toy("decisive"), examples(8), "fresh", **options)


def test_what_decides_nothing_and_labels_that_are_no_class(tokenizer):
    with pytest.raises(errors.NotServed, match="no decision"):
        regard.trial(*of_kind("regression", tokenizer), "fresh")
    with pytest.raises(errors.InputError, match="8 labels are not classes of the model: 'brilliant'"):
        regard.trial(toy("decisive"), Dataset.of([Example("so good", "brilliant")] * 8), "fresh")
