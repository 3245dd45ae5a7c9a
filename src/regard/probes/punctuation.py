"""How much does a head look at full stops, commas and the like?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.attention import Trace
from regard.glimpses import Glimpse

EACH = "row"
ABOUT = "share on punctuation"
NEEDS = ("weights",)
CITE = "clark2019does"


def cannot(subject: Any, trace: Trace) -> str | None:
    """It is about texts."""
    return "a table has no punctuation." if hasattr(subject, "schema") else None


def punctuation(glimpse: Glimpse) -> Tensor:
    """Σ_k A_qk over tokens without a letter or digit that are not special: ``(example, head, row)``.

    A text that has none of them counts as 0. NaN where it is not known what the keys are. NOTE[DIFF] Clark et al. count
    full stops and commas only.
    """
    return glimpse.on(glimpse.keys.punctuation)
