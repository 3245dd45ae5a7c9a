"""How much does a head look at where the text begins?"""

from __future__ import annotations

from torch import Tensor

from regard.glimpses import Glimpse, unordered

EACH = "row"
ABOUT = "share on the first token"
NEEDS = ("weights",)
CITE = "vig2019analyzing"
cannot = unordered


def first(glimpse: Glimpse) -> Tensor:
    """A_q,k₀, k₀ the first key that is no padding: ``(example, head, row)``. Decoders put there what they need not.

    The first row of a decoder sees nothing else, and counts as 1. NaN where it is not known what the keys are.
    """
    return glimpse.on(glimpse.keys.first)
