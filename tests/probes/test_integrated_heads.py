"""AttAttr's importance of heads, against its definition written out with autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from taken import DO, TEXTS, bert, run, twin_of

import regard
from regard.errors import RegardError

from_methods = bert
from oracles import assert_close, encoded  # noqa: E402

OFFSETS = {"midpoint": 0.5, "left": 0.0, "right": 1.0}


@pytest.mark.parametrize(("rule", "steps"), [("midpoint", 5), ("left", 4), ("right", 3)])
def test_it_is_the_largest_entry_of_the_integral(rule, steps, tokenizer):
    model, texts = bert(tokenizer), [TEXTS[1], TEXTS[2], TEXTS[11]]
    twin, expected = twin_of(model), np.zeros((len(texts), 12))
    for place, text in enumerate(texts):
        inputs = encoded(tokenizer, text)
        predicted = int(run(twin, inputs).argmax())
        for layer in range(3):
            total = 0.0
            for step in range(steps):
                logits = run(twin, inputs, scale=(layer, (step + OFFSETS[rule]) / steps))
                total = total + torch.autograd.grad(logits.softmax(-1)[0, predicted], DO["leaf"])[0]
            attribution = DO["weights"] * total / steps
            expected[place, 4 * layer : 4 * layer + 4] = attribution[0].amax((1, 2))
    subject = regard.text(model, tokenizer)
    table = regard.heads(subject, texts, probes=[("integrated", {"steps": steps, "rule": rule})])
    (one,) = table.probed.values()
    assert_close(one.values["value"].to_numpy(), expected.mean(0))
    assert (one.values["low"] <= one.values["value"]).all()
    assert (one.values["value"] <= one.values["high"]).all()


@pytest.mark.parametrize("options", [{"steps": 0}, {"rule": "upper"}])
def test_what_cannot_be_done_is_said(options, tokenizer):
    with pytest.raises(RegardError, match=next(iter(options))):
        regard.heads(regard.text(bert(tokenizer), tokenizer), TEXTS, probes=[("integrated", options)])
