"""How widely a head looks."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.glimpses import Glimpse

EACH = "row"
ABOUT = "entropy of attention, in nats"
NEEDS = ("weights",)
CITE = "clark2019does"


def entropy(glimpse: Glimpse) -> Tensor:
    """−Σ_k A_qk log A_qk: 0 where a row looks at one key, log(keys) where it looks at all alike.

    NOTE[DIFF] Clark et al. smooth weights by 10⁻⁴ / n before; here 0 log 0 = 0.
    """
    entropy: Tensor = torch.special.entr(glimpse.weights).sum(-1)
    return entropy
