"""How much of its attention a head gives to one key."""

from __future__ import annotations

from torch import Tensor

from regard.glimpses import Glimpse

EACH = "row"
ABOUT = "mean of the largest weight"
NEEDS = ("weights",)
CITE = "voita2019analyzing"


def confidence(glimpse: Glimpse) -> Tensor:
    """max_k A_qk. NOTE[DIFF] Voita et al. leave out the end-of-sentence token; here all keys count."""
    return glimpse.weights.amax(-1)
