"""The readout's attention, averaged over layers and heads."""

from __future__ import annotations

from regard.attention import Trace
from regard.attention.paths import from_layers, no_layers
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights",)
CITE = "gorishniy2021revisiting"
FORMULA = "1/(L·H) Σ_l Σ_h r·A_l^h"
PASSES = "1 forward"
OF = "logit"
cannot = no_layers


def average(trace: Trace) -> Scores:
    """The attention that the readout pays, mean over all layers and heads: ``(example, key)``.

    Gorishniy et al. rank the features of an FT-Transformer by it, averaged over samples as well: `Explanation.mean`
    does that. They find the ranks meaningful, not the numbers. Differs from the paper nowhere.

    Args:
        trace: what was traced.
    """
    return from_layers(trace, lambda site: None, layers="mean")
