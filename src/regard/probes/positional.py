"""Does a head look at a fixed distance?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention import Trace
from regard.glimpses import Glimpse, apart, unordered
from regard.probed import Array

EACH = "row"
ABOUT = "share of rows whose largest weight is at the head's own distance"
NEEDS = ("weights",)
CITE = "voita2019analyzing"
OFFSETS = (-2, -1, 0, 1, 2)
PARTS = ("2 before", "previous", "self", "next", "2 after")
LEAST = 0.9  # Voita et al.: a head is positional if that many of its rows look there


def cannot(subject: Any, trace: Trace) -> str | None:
    """Distances need an order, and queries among the keys."""
    return unordered(subject, trace) or apart(subject, trace)


def positional(glimpse: Glimpse) -> Tensor:
    """argmax_k A_qk = q + δ, for δ from −2 to 2: ``(example, head, row, δ)``; without special tokens.

    A head is called after the distance that it looks at in 90 % of its rows. Rows at the edges count where the key
    that they would look at is there.
    """
    if glimpse.offset is None:
        return glimpse.undefined[..., None].expand(*glimpse.weights.shape[:3], len(OFFSETS))
    plain = glimpse.keys.real & ~glimpse.keys.special
    best = glimpse.weights.masked_fill(~plain[:, None, None], -1.0).argmax(-1) - glimpse.rows  # example head row
    found = torch.stack([best == offset for offset in OFFSETS], -1).to(glimpse.weights.dtype)
    keys = glimpse.rows[:, None] + torch.tensor(OFFSETS, device=glimpse.rows.device)  # row δ
    inside = (keys >= 0) & (keys < plain.shape[1])
    there = plain[:, keys.clamp(0, plain.shape[1] - 1)] & inside & plain[:, glimpse.rows, None]  # example row δ
    return found.where(there[:, None], torch.nan)


def settle(means: Array, layer: Any) -> tuple[Array, list[str]]:
    """The distance that a head looks at most often, and its name where that is a rule."""
    best = np.nan_to_num(means[0], nan=-1.0).argmax(0)  # head
    values = np.take_along_axis(means, best[None, None], 1)[:, 0]
    return values, [PARTS[at] if value >= LEAST else "" for at, value in zip(best, values[0], strict=True)]
