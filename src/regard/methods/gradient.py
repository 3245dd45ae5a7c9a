"""How does the prediction change with the vector of a token?"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from regard.attention import Rerun, Trace, edits
from regard.attention.entrance import Entrance
from regard.attention.paths import must_have_score
from regard.attention.running import mixes, own_gradients
from regard.attention.sources import at_least_float
from regard.errors import NoGradient, choose
from regard.types import Scores

FAMILY = "reference"
NEEDS = ("gradients", "reruns")
CITE = "jain2019attention"
FORMULA = "|Σ_d ∂y/∂x_d · x_d|"
PASSES = "2 forward, 1 backward"
OF = "probability"


def gradient(trace: Trace, *, norm: Literal["dot", "l2"] = "dot", through_attention: bool = True) -> Scores:
    """Gradient × input of each token's embedding x, without positions: ``(example, row)``.

    NOTE[DIFF] scores are not divided by their sum. In models that embed no tokens (pictures, tables) x is the first
    state of the rows. Of tables it is counted from the state of a cell that is taken out (the mean, or "missing"): for
    a number that is the gradient by the standardised number times that number, while the state itself is mostly what
    tells its column from others.

    Args:
        trace: what was traced, with a target.
        norm: "dot": |Σ_d ∂y/∂x_d · x_d|; "l2": the norm of the gradient alone, ‖∂y/∂x‖.
        through_attention: False: attention weights are constants at every site, as Jain & Wallace have them.
    """
    choose("norm", norm, ("dot", "l2"))
    must_have_score(trace)
    entrance = Entrance(trace.subject, trace.batch)
    leaves = {strand: vectors.clone().requires_grad_() for strand, vectors in entrance.vectors.items()}
    rerun = None if through_attention else Rerun(trace.subject, trace.batch, gradients=True)
    with torch.enable_grad():
        output = entrance.run(leaves, None if rerun is None else lambda batch: rerun(edits.detach()))
        values = trace.subject.score(output, trace.target, trace.of).values
    if not values.requires_grad:
        raise NoGradient("the target does not depend differentiably on the input.")
    found = own_gradients(values, [*leaves.values()], apart=mixes(trace.subject, trace.batch))

    def size(x: Tensor, slope: Tensor | None) -> Tensor:
        if slope is None:
            return x.new_zeros(x.shape[:2])
        slope = at_least_float(slope)
        return (slope * x).sum(-1).abs() if norm == "dot" else slope.norm(dim=-1)

    inputs = {name: x.detach() for name, x in leaves.items()}
    if (origin := getattr(trace.subject, "origin", None)) is not None:
        inputs |= {name: inputs[name] - start for name, start in entrance.emptied(origin).items()}
    sizes = {name: size(x, slope) for (name, x), slope in zip(inputs.items(), found, strict=True)}
    return entrance.scores(sizes)
