"""Words are taken out in the order of an explanation: against texts that are cut by hand."""

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
    found = regard.trial(toy("decisive"), examples(), "comprehensiveness")
    assert found.supported is True
    assert found.margin.low > 0.05
    assert found.criterion == "causal"
    assert found.settings["how"] == "delete"
    assert f"{found.statistic:.3f}" in found.sentence


def test_not_supported_where_attention_is_irrelevant():
    found = regard.trial(toy("irrelevant"), examples(), "comprehensiveness")
    assert found.supported is False
    assert found.margin.high < 0
    assert "40 examples" in found.sentence


def test_a_random_explanation_is_no_better_than_the_control():
    many = [regard.trial(toy("decisive"), examples(), "comprehensiveness", method="random", seed=i) for i in range(8)]
    assert sum(found.supported is True for found in many) <= 1
    assert abs(np.mean([found.margin.value for found in many])) < 0.01
    assert all((found.values["method"] != found.values["random"]).any() for found in many), "it has seeds of its own"


def test_against_texts_that_are_cut_by_hand(tokenizer):
    model = bert(tokenizer)
    data = examples(8, more=LONG)
    subject = regard.text(model, tokenizer)
    found = regard.trial(subject, data, "comprehensiveness", bins=SHARES, repeats=2, batch_size=3)
    for one, row in zip(data, found.values.to_dict(orient="records"), strict=True):
        literal = Literal(model, tokenizer, one.input)

        def fall(scores, share, literal=literal, one=one):
            top = ranked(scores, one.id, 0)[: math.ceil(share * len(literal.pieces))]
            return literal.before[literal.said] - literal.without(top)[literal.said]

        lots = [regard.explain(subject, one.input, method="random", seed=seed) for seed in (1, 2)]
        drawn = [why.words().query("not special")["score"].to_numpy() for why in lots]
        for share in SHARES:
            assert row[f"method {share}"] == pytest.approx(fall(literal.raw(), share), abs=1e-9)
            assert row[f"random {share}"] == pytest.approx(np.mean([fall(one, share) for one in drawn]), abs=1e-9)
        assert row["method"] == pytest.approx(np.mean([row[f"method {share}"] for share in SHARES]))
    assert found.statistic == pytest.approx(found.values["method"].mean())
    assert found.margin.value == pytest.approx((found.values["method"] - found.values["random"]).mean())
    curve = found.tables["curve"].set_index(["share", "by"])["fall"]
    assert curve[0.5, "random"] == pytest.approx(found.values["random 0.5"].mean())
    assert found.values["method"].abs().max() > 0.01, "it says something"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_subject_in_any_batches(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer)
    found, again = (
        regard.trial(subject, data, "comprehensiveness", bins=SHARES, repeats=1, batch_size=size) for size in (12, 5)
    )
    numbers = [one.values.drop(columns=["example", "predicted"]).to_numpy() for one in (found, again)]
    np.testing.assert_allclose(*numbers, atol=1e-5)
    assert len(found.values) == 12
    assert np.ptp(numbers[0]) > 0
    assert found.settings["how"] == {"table": "mask", "regression": "attention"}.get(kind, "delete")


def test_a_regression_counts_by_size_in_standard_deviations(tokenizer):
    subject, data = of_kind("regression", tokenizer)
    found = regard.trial(subject, data, "comprehensiveness", bins=[0.5], repeats=1)
    said = [why.value for why in regard.explain(subject, data.frame(), method="raw")]
    signed = regard.compare(subject, data, methods=["raw"], bins=[0.5]).values.query("method == 'raw'")[
        "comprehensiveness"
    ]
    assert (signed < 0).any(), "it has no side to fall to"
    np.testing.assert_allclose(found.values["method"], signed.abs() / np.std(said), rtol=1e-6)
    assert "in standard deviations" in found.sentence


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bins": ()}, r"bins=\(\) must be shares"), ({"bins": (0.1, 1.2)}, "bins=1.2 must be a number above 0, and at most 1"),
        ({"repeats": 0}, "repeats=0 must be 1 or more"), ({"repeats": "many"}, "repeats='many'"),
        ({"how": "hide"}, "how='hide'"), ({"share": 0.2}, "share=0.2: comprehensiveness has no such option"),
    ],
)  # fmt: skip
def test_bad_options(options, said):
    with pytest.raises(errors.OptionError, match=said):
        regard.trial(toy("decisive"), examples(8), "comprehensiveness", **options)
