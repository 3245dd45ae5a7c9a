"""How much does a head look at special tokens?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.attention import Trace
from regard.glimpses import Glimpse

EACH = "row"
ABOUT = "share on special tokens"
NEEDS = ("weights",)
CITE = "clark2019does"


def cannot(subject: Any, trace: Trace) -> str | None:
    """Inputs without special tokens have no share on them."""
    every = [*trace.features, *(trace.source.features if trace.source else ())]
    return None if any(any(one.special) for one in every) else "what the model reads has no special tokens."


def special(glimpse: Glimpse) -> Tensor:
    """Σ_k A_qk over special tokens, [CLS], [SEP] and the like: ``(example, head, row)``; in tables over [CLS].

    NaN where it is not known what the keys are.
    """
    return glimpse.on(glimpse.keys.special)
