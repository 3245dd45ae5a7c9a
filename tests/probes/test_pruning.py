"""The pruning curve, against attention written out; and a model in which one head alone is read."""

from __future__ import annotations

import numpy as np
import pytest
from taken import LIVE, TEXTS, bert, labelled, one_head, run, twin_of

import regard
from regard.errors import NotServed, RegardError
from regard.training import predict

from_methods = bert
from oracles import encoded  # noqa: E402

LABELS = ["LABEL_0", "LABEL_1", "LABEL_2"] * 4
SIX = {"by": ["importance"], "random": 0, "steps": 6}


@pytest.mark.parametrize("by", ["importance", "ablation", "integrated"])
def test_scores_are_those_of_the_other_half_without_these_heads(by, tokenizer):
    model = bert(tokenizer)
    subject = regard.text(model, tokenizer)
    labels = predict(subject, TEXTS)
    labels[::3] = LABELS[::3]  # mostly right
    (one,) = regard.heads(
        subject, labelled(TEXTS, labels), probes=[("pruning", SIX | {"by": [by]})], examples=None
    ).probed.values()
    judged = sorted(np.random.default_rng(0).permutation(12)[6:])
    twin, goes = twin_of(model), one.values["value"].to_numpy()
    curve = one.tables["curve"]
    assert curve["heads"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    for row in curve.itertuples():
        gone = [(at // 4, at % 4) for at in np.flatnonzero(goes <= row.share + 1e-9)]
        assert len(gone) == row.heads
        right = [
            int(run(twin, encoded(tokenizer, TEXTS[place]), how="zero", gone=gone).argmax()) == int(labels[place][-1])
            for place in judged
        ]
        assert row.score == pytest.approx(np.mean(right), abs=1e-12)


def test_a_head_that_alone_is_read_goes_last_and_the_others_cost_nothing(tokenizer):
    subject = regard.text(one_head(tokenizer), tokenizer)
    data = labelled(TEXTS, predict(subject, TEXTS))
    options = {"by": ["importance", "ablation"], "random": 2, "steps": 12}
    (one,) = regard.heads(subject, data, probes=[("pruning", options)], examples=None).probed.values()
    last = one.values.loc[one.values["value"].idxmax()]
    assert (last["layer"], last["head"]) == LIVE
    curve = one.tables["curve"]
    known = curve[(curve["order"] != "random") & (curve["heads"] < 12)]
    assert (known["score"] == 1).all()
    assert set(curve["order"]) == {"importance", "ablation", "random"}
    assert "half" in one.sentence or "others" in one.sentence
    assert one.plot("curve") is not None


def test_without_labels_it_is_agreement_and_of_a_language_model_minus_the_loss(tokenizer):
    from oracles import llama

    (one,) = regard.heads(regard.text(bert(tokenizer), tokenizer), TEXTS, probes=[("pruning", SIX)]).probed.values()
    assert one.tables["curve"]["score"].iloc[0] == 1
    subject = regard.causal(llama(tokenizer), tokenizer)
    (two,) = regard.heads(subject, TEXTS[4:6] * 4, probes=[("pruning", SIX)]).probed.values()
    assert two.tables["curve"]["score"].iloc[0] < 0


@pytest.mark.parametrize("options", [{"by": ["loudness"]}, {"steps": 0}, {"random": -1}, {"cost": -1.0}])
def test_what_cannot_be_done_is_said(options, tokenizer):
    with pytest.raises(RegardError, match=next(iter(options))):
        regard.heads(regard.text(bert(tokenizer), tokenizer), TEXTS, probes=[("pruning", options)])


def test_too_few_examples(tokenizer):
    with pytest.raises(NotServed, match="half"):
        regard.heads(regard.text(bert(tokenizer), tokenizer), TEXTS[:3], probes=["pruning"])
