"""Attention multiplied through the layers."""

from __future__ import annotations

from typing import Literal

import torch

from regard.attention import Trace
from regard.attention.paths import from_start, no_path, rolled
from regard.errors import OptionError, choose
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights",)
CITE = "abnar2020quantifying"
FORMULA = "r·Π_l (αI + (1−α)Ā_l), α = ½"
PASSES = "1 forward"
OF = "logit"
cannot = no_path


def rollout(
    trace: Trace,
    *,
    alpha: float = 0.5,
    residual: Literal["mix", "add"] = "mix",
    start_layer: int = 0,
    per_layer: bool = False,
    matrix: bool = False,
) -> Scores:
    """Attention rollout: r·Â_L ··· Â_1 with Â_l = αI + (1−α)Ā_l, ``(example, row)``.

    With rows as queries the last layer stands on the left. It is multiplied from the left, too, as vector × matrix, so
    memory stays linear in tokens.

    NOTE[DIFF] the paper divides rows of Ā + I by their sum; rows of models with sink logits sum to less than 1, and
    what the sink took is not given back here. In models with two sequences, which the paper does not treat, cross
    attention takes (1−α) over to the source.

    Args:
        trace: what was traced.
        alpha: the share of the residual connection, 0 to 1.
        residual: "mix": αI + (1−α)Ā; "add": I + Ā, which for one sequence is 2^L times "mix" with α = ½.
        start_layer: the first layer that takes part; those before it are left out.
        per_layer: the rollout up to each layer: ``(layer, row)``.
        matrix: for all rows, not only the readout: ``(query, row)``.
    """
    choose("residual", residual, ("mix", "add"))
    if not 0 <= alpha <= 1:
        raise OptionError(f"alpha={alpha!r} must be between 0 and 1.")
    keep, take = (1.0, 1.0) if residual == "add" else (alpha, 1 - alpha)
    sites = from_start(trace, start_layer)
    if not per_layer:
        return rolled(trace, lambda site: None, sites, keep=keep, take=take, matrix=matrix, together=False)
    if trace.batch.source is not None:
        raise OptionError("per_layer=True: the layers of a model with two sequences are not one after the other.")
    parts = [
        rolled(trace, lambda site: None, sites[:end], keep=keep, take=take, matrix=matrix, together=False)
        for end in range(1, len(sites) + 1)
    ]
    return Scores(
        torch.stack([part.rows for part in parts if part.rows is not None], 1), None, ("layer", *parts[0].axes)
    )
