"""How much does a head look at the row itself?"""

from __future__ import annotations

from torch import Tensor

from regard.glimpses import Glimpse, apart

EACH = "row"
ABOUT = "share on the token itself"
NEEDS = ("weights",)
CITE = "clark2019does"
cannot = apart


def own(glimpse: Glimpse) -> Tensor:
    """A_qq: ``(example, head, row)``; NaN where queries and keys are not one sequence."""
    return glimpse.at(0)
