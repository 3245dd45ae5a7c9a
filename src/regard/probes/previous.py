"""How much does a head look one token back?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.attention import Trace
from regard.glimpses import Glimpse, apart, unordered

EACH = "row"
ABOUT = "share on the token before"
NEEDS = ("weights",)
CITE = "clark2019does"


def cannot(subject: Any, trace: Trace) -> str | None:
    """Distances need an order, and queries among the keys."""
    return unordered(subject, trace) or apart(subject, trace)


def previous(glimpse: Glimpse) -> Tensor:
    """A_q,q−1: ``(example, head, row)``; NaN in the first row, and where queries and keys are not one sequence."""
    return glimpse.at(-1)
