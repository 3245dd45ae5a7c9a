"""The attention of the first layer, read without a readout: what each feature receives."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from regard.attention import Part, Trace
from regard.attention.paths import ends, no_layers, over_features
from regard.errors import choose
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights",)
CITE = "borisov2022deep"
FORMULA = "Σ_q Ā_1[q, k], or Ā_1[k, k]"
PASSES = "1 forward"
OF = "logit"


def cannot(trace: Trace) -> str | None:
    """Where the first site computes only the row that is read, columns have no sum."""
    for first in over_features(trace.sites)[:1]:
        if first.rows is not None or first.kind == "pool":
            return "its first attention site does not compute a row for each feature."
        return None
    return no_layers(trace)


def first_layer(trace: Trace, *, reduce: Literal["column", "diagonal"] = "column", per_head: bool = False) -> Scores:
    """The column sums of the first layer's attention, or its diagonal: ``(example, key)``.

    Borisov et al. use it for tabular transformers (TabTransformer, SAINT), where a row of the first layer is a feature.

    Args:
        trace: what was traced.
        reduce: "column": what all real rows pay to a key, summed; "diagonal": what it pays to itself.
        per_head: all heads: ``(head, key)``.
    """
    choose("reduce", reduce, ("column", "diagonal"))
    site = over_features(trace.sites)[0]

    def diagonal(tile: Tensor, part: Part) -> Tensor:
        return tile * (part.rows[:, None] == torch.arange(tile.shape[-1], device=tile.device))

    # NOTE[DIFF] the authors sum over heads; the mean is that sum divided by the number of heads
    pulled = site.pull(site.real.float(), per_head=per_head, weigh=diagonal if reduce == "diagonal" else None)
    axes = ("head",) * per_head
    return Scores(None, pulled, axes) if ends(trace, site)[1] == "source" else Scores(pulled, None, axes)
