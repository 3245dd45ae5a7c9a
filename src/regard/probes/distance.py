"""How far away does a head look?"""

from __future__ import annotations

from torch import Tensor

from regard.glimpses import Glimpse, unordered

EACH = "row"
ABOUT = "mean distance, in tokens"
NEEDS = ("weights",)
CITE = "vig2019analyzing"
cannot = unordered


def distance(glimpse: Glimpse) -> Tensor:
    """Σ_k A_qk |q − k| / Σ_k A_qk: ``(example, head, row)``; NaN where queries and keys are not one sequence.

    NOTE[DIFF] Vig & Belinkov leave out attention to the first token, and add up all texts before they divide, so that
    long ones count more. Here all keys count, and each text counts alike; `first` tells how much lies on the first.
    """
    if glimpse.offset is None:
        return glimpse.undefined
    far = glimpse.offset.abs().to(glimpse.weights.dtype)  # row key
    return (glimpse.weights * far).sum(-1) / glimpse.weights.sum(-1)
