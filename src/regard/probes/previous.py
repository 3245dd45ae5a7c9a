"""How much does a head look one token back?"""

from __future__ import annotations

from torch import Tensor

from regard.glimpses import Glimpse, unordered

EACH = "row"
ABOUT = "share on the token before"
NEEDS = ("weights",)
CITE = "clark2019does"
cannot = unordered


def previous(glimpse: Glimpse) -> Tensor:
    """A_q,q−1: ``(example, head, row)``; NaN in the first row, and where queries and keys are not one sequence."""
    return glimpse.at(-1)
