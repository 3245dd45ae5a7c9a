"""How far away does a head look?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.attention import Trace
from regard.glimpses import Glimpse, apart, unordered

EACH = "row"
ABOUT = "mean distance, in tokens"
NEEDS = ("weights",)
CITE = "vig2019analyzing"


def cannot(subject: Any, trace: Trace) -> str | None:
    """Distances need an order, and queries among the keys."""
    return unordered(subject, trace) or apart(subject, trace)


def distance(glimpse: Glimpse) -> Tensor:
    """Σ_k A_qk |q − k| / Σ_k A_qk: ``(example, head, row)``; NaN where queries and keys are not one sequence.

    NOTE[DIFF] Vig & Belinkov leave out attention to the first token, and add up all texts before they divide, so that
    long ones count more. Here all keys count, and each text counts alike; `first` tells how much lies on the first.
    """
    if glimpse.offset is None:
        return glimpse.undefined
    far = glimpse.offset.abs().to(glimpse.weights.dtype)  # row key
    return (glimpse.weights * far).sum(-1) / glimpse.weights.sum(-1)
