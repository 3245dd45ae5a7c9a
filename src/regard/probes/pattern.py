"""Which of five patterns does a head's map of attention show?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention import Trace
from regard.glimpses import Glimpse, apart, unordered
from regard.probed import Array

EACH = "row"
ABOUT = "share of attention in the head's pattern, beyond chance"
NEEDS = ("weights",)
CITE = "kovaleva2019revealing"
PATTERNS = ("vertical", "diagonal", "vertical + diagonal", "block")
PARTS = (*PATTERNS, *(f"{one}, by chance" for one in PATTERNS))
MOST, SOME = 0.5, 0.25  # of what uniform attention leaves over: for a pattern, and for a share in one of two


def cannot(subject: Any, trace: Trace) -> str | None:
    """Distances need an order, and queries among the keys."""
    return unordered(subject, trace) or apart(subject, trace)


def pattern(glimpse: Glimpse) -> Tensor:
    """Σ_k A_qk over four kinds of keys, and what uniform attention would give them: ``(example, head, row, part)``.

    "vertical": the columns of special tokens, punctuation and the first token. "diagonal": |q − k| ≤ 1. "vertical +
    diagonal": either. "block": the query's own one of two texts; NaN where there is one. A head's name is a rule of its
    mean shares s and chances c, by what is beyond chance, (s − c) / (1 − c), so that short texts do not decide:

    - either ≥ ½: "vertical", "diagonal" or both, after those of the two that have ≥ ¼;
    - else block ≥ ½: "block";
    - else "heterogeneous".

    NOTE[DIFF] Kovaleva et al. trained a network on 400 maps that people had named; this is a rule, and a column of a
    word is none of its columns. Queries and keys that are not one sequence have no pattern: NaN.
    """
    example, head, row, _ = glimpse.weights.shape
    if glimpse.offset is None:
        return glimpse.undefined[..., None].expand(example, head, row, len(PARTS))
    keys, visible = glimpse.keys, glimpse.visible.to(glimpse.weights.dtype)
    columns = (keys.special | keys.punctuation | keys.first)[:, None].expand_as(glimpse.visible)  # example row key
    near = (glimpse.offset.abs() <= 1).expand_as(columns)
    same = keys.part[:, glimpse.rows, None] == keys.part[:, None]
    kinds = torch.stack([columns, near, columns | near, same], -1).to(glimpse.weights.dtype)  # example row key kind
    shares = torch.einsum("ehrk,erkp->ehrp", glimpse.weights, kinds)
    chance = torch.einsum("erk,erkp->erp", visible / visible.sum(-1, keepdim=True), kinds)
    found = torch.cat([shares, chance[:, None].expand_as(shares)], -1)
    start = (keys.part * keys.first).sum(-1, keepdim=True)
    one_text = ((keys.part == start) | ~keys.real).all(-1)[:, None, None, None]  # example
    return found.masked_fill(one_text & torch.tensor([name.startswith("block") for name in PARTS]), torch.nan)


def settle(means: Array, layer: Any) -> tuple[Array, list[str]]:
    """The share beyond chance of the pattern that a head shows, or is nearest to; and the name of that pattern."""
    shares, chances = means[:, : len(PATTERNS)], means[:, len(PATTERNS) :]
    with np.errstate(invalid="ignore", divide="ignore"):
        beyond = np.where(chances < 1, (shares - chances) / (1 - chances), np.nan)  # draw pattern head
    vertical, diagonal, either, block = np.nan_to_num(beyond[0], nan=-np.inf)
    pair = np.where(np.minimum(vertical, diagonal) >= SOME, 2, np.where(diagonal > vertical, 1, 0))
    shown = np.where(either >= MOST, pair, np.where(block > either, 3, 2))
    named = np.where(np.maximum(either, block) >= MOST, np.array(PATTERNS)[shown], "heterogeneous")
    labels = np.where(np.isfinite(either), named, "").tolist()
    return np.take_along_axis(beyond, shown[None, None], 1)[:, 0], labels
