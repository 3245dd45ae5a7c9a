"""How much does a head look one token ahead?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.attention import Trace
from regard.glimpses import Glimpse, apart, unordered

EACH = "row"
ABOUT = "share on the token after"
NEEDS = ("weights",)
CITE = "clark2019does"


def cannot(subject: Any, trace: Trace) -> str | None:
    """Distances need an order, and queries among the keys."""
    return unordered(subject, trace) or apart(subject, trace)


def following(glimpse: Glimpse) -> Tensor:
    """A_q,q+1: ``(example, head, row)``; NaN in the last row, and where queries and keys are not one sequence.

    A decoder cannot look ahead: there it is 0.
    """
    return glimpse.at(1)
