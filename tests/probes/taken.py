"""Attention written out, in which one head is taken out, or one layer is scaled; one text at a time, in float64."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import transformers as hf

from regard.data import Dataset, Example

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import bert

TEXTS = [
    "a moving film", "dull, and it never ends", "so so", "good", "the plot is awful and slow", "a superb, moving plot",
    "it ends", "never dull", "a film", "slow and awful", "and so it is", "the film is good, the plot is not",
]  # fmt: skip
DO = {"count": 0}  # what is done at which layer; and what was seen
LIVE = (2, 1)  # the layer and head that are left by `one_head`


def written_out(module, query, key, value, attention_mask, scaling=None, **_):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if getattr(module, "is_causal", False):
        allowed = allowed.tril()
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    layer = DO["count"]
    DO["count"] += 1
    if DO.get("scale") is not None and DO["scale"][0] == layer:
        DO["weights"] = weights.detach()
        weights = DO["leaf"] = (DO["scale"][1] * weights).detach().requires_grad_()
    gone = [head for at, head in DO.get("gone", ()) if at == layer]
    if DO.get("how") == "uniform" and gone:
        weights = weights.clone()
        weights[:, gone] = (allowed / allowed.sum(-1, keepdim=True)).to(weights)
    out = weights @ value
    DO.setdefault("seen", {})[layer] = out.detach()[0]
    if DO.get("how") in ("zero", "mean") and gone:
        out = out.clone()
        for head in gone:
            out[:, head] = 0.0 if DO["how"] == "zero" else DO["means"][layer][head]
    return out.transpose(1, 2).contiguous(), weights


hf.AttentionInterface.register("taken out", written_out)


def twin_of(model):
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("taken out")
    return twin


def run(twin, inputs, **do):
    DO.clear()
    DO.update(count=0, **do)
    return twin(**inputs).logits


def one_head(tokenizer):
    """A BERT of 3 × 4 heads; all but one hand on what nobody reads."""
    model = bert(tokenizer)
    for layer, block in enumerate(model.bert.encoder.layer):
        dense = block.attention.output.dense.weight.data  # output, channels of all heads
        for head in range(4):
            dense[:, 8 * head : 8 * head + 8] *= 12.0 if (layer, head) == LIVE else 0.0
    return model


def labelled(texts, labels):
    return Dataset.of([Example(text, label) for text, label in zip(texts, labels, strict=True)])
