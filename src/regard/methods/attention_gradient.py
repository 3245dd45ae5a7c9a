"""Attention times its gradient."""

from __future__ import annotations

from torch import Tensor

from regard.attention import Part, Site, Trace
from regard.attention.paths import Layers, from_layers, no_layers
from regard.attention.sites import Weigh
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights", "gradients")
CITE = "serrano2019attention"
FORMULA = "r·mean_h(A_l ⊙ ∇A_l)"
PASSES = "1 forward, 1 backward"
OF = "probability"
cannot = no_layers


def attention_gradient(
    trace: Trace,
    *,
    layers: Layers = "last",
    absolute: bool = False,
    per_layer: bool = False,
    per_head: bool = False,
    matrix: bool = False,
) -> Scores:
    """A ⊙ ∂y/∂A at the readout's rows: ``(example, key)``. Differs from the paper nowhere.

    To first order it is what the target would lose without this weight.

    Args:
        trace: what was traced, with gradients.
        layers: "last", the number of a site, "mean", or "rollout" (½I + ½(A ⊙ ∇A), multiplied through the layers).
        absolute: |A ⊙ ∇A| of each head, before the mean over heads.
        per_layer: all layers: ``(layer, key)``.
        per_head: all heads: ``(head, key)``.
        matrix: all queries: ``(query, key)``.
    """

    def weigh_at(site: Site) -> Weigh:
        def weigh(tile: Tensor, part: Part) -> Tensor:
            product = tile * site.gradient(part, tile.shape[-1])
            return product.abs() if absolute else product

        return weigh

    return from_layers(trace, weigh_at, layers=layers, per_layer=per_layer, per_head=per_head, matrix=matrix)
