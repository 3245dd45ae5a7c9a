"""A small BERT whose heads look where rules tell them to: of each row q and key k, in a text of n tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers as hf
from torch.nn import functional as F

import regard

sys.path.insert(0, str(Path(__file__).parents[1] / "methods"))
from oracles import bert

RULES = []  # of the model that runs: one for each head


def by_rule(module, query, key, value, attention_mask, **_):
    rows = torch.arange(query.shape[2])
    wanted = torch.stack([rule(rows[:, None], rows[None], len(rows)).expand(len(rows), -1) for rule in RULES])
    bias = torch.zeros(wanted.shape, dtype=value.dtype).masked_fill(~wanted, -40.0)  # next to nothing, and not hidden
    out = F.scaled_dot_product_attention(torch.zeros_like(query), key, value, attn_mask=bias[None])
    return out.transpose(1, 2).contiguous(), None


hf.AttentionInterface.register("by rule", by_rule)


def handmade(tokenizer, rules):
    """A subject with one layer; its texts must run one at a time: padding is not looked at."""
    RULES[:] = rules
    model = bert(tokenizer, num_hidden_layers=1, num_attention_heads=len(rules), hidden_size=8 * len(rules))
    model.set_attn_implementation("by rule")
    return regard.text(model, tokenizer)
