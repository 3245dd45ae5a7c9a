"""What is lost without a head, against attention written out; and a model in which one head alone is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from taken import DO, LIVE, TEXTS, bert, labelled, one_head, run, twin_of
from torch.nn import functional as F

import regard
from regard.errors import RegardError

sys_path_is_set_by = bert
from oracles import assert_close, encoded, llama  # noqa: E402

LABELS = ["LABEL_0", "LABEL_1", "LABEL_2"] * 4


def classified(twin, tokenizer, text, label, **do):
    logits = run(twin, encoded(tokenizer, text), **do)
    return F.cross_entropy(logits, torch.tensor([int(label[-1])])).item()


def continued(twin, tokenizer, text, label, **do):
    inputs = encoded(tokenizer, text, return_token_type_ids=False)
    logits = run(twin, inputs, **do)[0, :-1]
    return F.cross_entropy(logits, inputs["input_ids"][0, 1:]).item()


KINDS = {"bert": (bert, regard.text, classified), "llama": (llama, regard.causal, continued)}


def by_hand(kind, model, tokenizer, texts, labels, how):
    loss, twin = KINDS[kind][2], twin_of(model)
    seen = []
    before = []
    for text, label in zip(texts, labels, strict=True):
        before.append(loss(twin, tokenizer, text, label))
        seen.append(dict(DO["seen"]))
    means = {layer: torch.cat([one[layer] for one in seen], 1).mean(1) for layer in seen[0]}  # head channel
    heads = [(layer, head) for layer in range(3) for head in range(4)]
    return np.array([
        [loss(twin, tokenizer, text, label, how=how, gone=[one], means=means) - old for one in heads]
        for text, label, old in zip(texts, labels, before, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("how", ["zero", "mean", "uniform"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rise_is_that_of_the_model_written_out(kind, how, tokenizer):
    build, wrap, _ = KINDS[kind]
    model, texts = build(tokenizer), [TEXTS[1], TEXTS[4], TEXTS[5], TEXTS[11]]
    expected = by_hand(kind, model, tokenizer, texts, LABELS[:4], how)
    table = regard.heads(wrap(model, tokenizer), labelled(texts, LABELS[:4]), probes=[("ablation", {"how": how})])
    (one,) = table.probed.values()
    assert_close(one.values["value"].to_numpy(), expected.mean(0))


def test_its_agreement_with_the_gradient_is_spearmans(tokenizer):
    subject = regard.text(bert(tokenizer), tokenizer)
    data = labelled(TEXTS, LABELS)
    table = regard.heads(subject, data, probes=["ablation"])["ablation"]
    slopes = []
    for text, label in zip(TEXTS, LABELS, strict=True):
        seen = regard.trace(subject, text, gradients=True, target=label, of="logprob")
        slopes.append(torch.cat([site.gate_gradient[0] for site in seen.sites]).abs())
    expected = stats.spearmanr(table.values["value"], torch.stack(slopes).mean(0)).statistic
    found = table.tables["agreement"].iloc[0]
    assert found["spearman"] == pytest.approx(expected, abs=1e-9)
    assert found["low"] <= found["spearman"] <= found["high"]


def test_only_the_head_that_is_read_matters(tokenizer):
    model = one_head(tokenizer)
    subject = regard.text(model, tokenizer)
    said = regard.training.predict(subject, TEXTS) if hasattr(regard, "training") else LABELS
    values = regard.heads(subject, labelled(TEXTS, said), probes=["ablation"])["ablation"].values
    live = (values["layer"] == LIVE[0]) & (values["head"] == LIVE[1])
    assert values.loc[live, "value"].item() > 0.01
    assert values.loc[~live, "value"].abs().max() < 1e-12


def test_without_labels_what_was_predicted_stays_what_is_asked_for(tokenizer):
    """The loss without a head is that of the class that the whole model says, or it could never rise over log 3."""
    subject = regard.text(one_head(tokenizer), tokenizer)
    from regard.training import predict

    asked = regard.heads(subject, TEXTS, probes=["ablation"])["ablation"].values["value"]
    told = regard.heads(subject, labelled(TEXTS, predict(subject, TEXTS)), probes=["ablation"])["ablation"].values[
        "value"
    ]
    np.testing.assert_allclose(asked, told, atol=1e-12)


def test_what_cannot_be_done_is_said(tokenizer):
    with pytest.raises(RegardError, match="how"):
        regard.heads(regard.text(bert(tokenizer), tokenizer), TEXTS, probes=[("ablation", {"how": "half"})])
