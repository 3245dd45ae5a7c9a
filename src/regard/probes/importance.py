"""How much would the loss change if a head were turned down?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention import Site, Trace
from regard.errors import NoGradient
from regard.probed import Array

EACH = "head"
ABOUT = "gate gradient, of length 1 in each layer"
NEEDS = ("gradients",)
CITE = "michel2019sixteen"


def importance(trace: Trace, site: Site) -> Tensor:
    """I_h = E_x |∂L(x)/∂ξ_h|, ξ_h a factor on all that head h hands on (Michel et al. 2019): ``(example, head)``.

    ∂L/∂ξ_h = Σ_q ⟨out_q, ∂L/∂out_q⟩ at ξ = 1. L is the loss of one example: the cross-entropy of its label where it has
    one; see `regard.glimpses.loss_of`. Each layer is divided by its length, √(Σ_h I_h²), as in the paper. Heads that
    look from one example to others serve all of a batch at once: not defined there.
    """
    if site.kind == "samples":
        return torch.full((len(trace.batch), site.heads), torch.nan)
    if site.gate_gradient is None:
        raise NoGradient(f"site {site.index} ({site.name}) has no gradients: trace with gradients=True.")
    return site.gate_gradient.abs()


def settle(means: Array, layer: Any) -> tuple[Array, None]:
    """I_h / √(Σ_h I_h²) within each layer."""
    values = means[:, 0].copy()
    for one in np.unique(layer):
        length = np.sqrt((values[:, layer == one] ** 2).sum(1, keepdims=True))  # of NaN it is NaN
        values[:, layer == one] /= np.where(length > 0, length, 1.0)
    return values, None
