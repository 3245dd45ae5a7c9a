"""What each head does alone."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attention import Rerun, edits
from regard.attention.editing import Spot
from regard.attention.edits import Place


def each_head(rerun: Rerun, spot: Spot) -> Tensor:
    """``(head + 1, example, class)``: the outputs when each head in turn looks at everything alike, and when all do.

    All variants of a site run in one go, so that what lies before it is run once.
    """
    outputs: Tensor = rerun(edits.custom(_in_turn, sites=spot.index), variants=spot.shape[1] + 1)
    return outputs


def _in_turn(weights: Tensor, place: Place) -> Tensor:
    """In each variant the head of its number looks at all keys alike; in the last one all heads."""
    chosen = torch.zeros(len(place.variants), len(place.heads), dtype=torch.bool, device=weights.device)
    for at, variant in enumerate(place.variants):
        chosen[at, place.heads[variant] if variant < len(place.heads) else slice(None)] = True
    flat = edits.uniform().change(weights, place)
    return torch.where(chosen[:, None, :, None, None], flat, weights)  # variant example head row key
