"""Attention times its gradient, integrated from no attention to all of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.attention import Part, Rerun, Site, Trace
from regard.attention.integrating import Rule, integral
from regard.attention.paths import Layers, from_layers, must_have_score, no_layers
from regard.attention.sites import Weigh
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights", "gradients", "reruns")
CITE = "hao2021self"
FORMULA = "Σ_h A^h ⊙ ∫₀¹ ∂F(αA)/∂A^h dα"
PASSES = "2 forward, 1 backward; a layer: `steps` forward, backward"
OF = "probability"


def cannot(trace: Trace) -> str | None:
    """Attention is scaled in all examples at once: what they see of each other would be scaled, too."""
    if any(site.kind == "samples" for site in trace.sites):
        return "its examples look at each other, so an output does not depend on attention within its own alone."
    return no_layers(trace)


def integrated(
    trace: Trace,
    *,
    steps: int = 20,
    rule: Rule = "midpoint",
    layers: Layers = "last",
    per_layer: bool = False,
    per_head: bool = False,
    matrix: bool = False,
) -> Scores:
    """AttAttr (Hao et al. 2021): all heads of a layer are scaled from 0 to 1, one layer at a time: ``(example, key)``.

    Heads are summed. Since out = A·V, the integral of ∂F/∂A is that of ∂F/∂out, times Vᵀ: no matrix is kept for a step.
    With ``per_layer=True, matrix=True`` the picture is the paper's attribution tree.

    NOTE[DIFF] the rule is the midpoint, which is nearer to the integral than the paper's sum; rule="right", steps=20 is
    the paper's, "left", 64 the authors' code.

    ``facts``, for each layer integrated: "change", F(A) − F(0·A); "completeness_error", how far the attributions of all
    heads, queries and keys are from summing to it.

    Args:
        trace: what was traced, with a target.
        steps: of the integral.
        rule: "midpoint", "left" or "right".
        layers: "last", the number of a site, "mean", or "rollout".
        per_layer: all layers: ``(layer, key)``.
        per_head: all heads: ``(head, key)``.
        matrix: all queries: ``(query, key)``.
    """
    must_have_score(trace)
    rerun = Rerun(trace.subject, trace.batch)
    changes, errors = [], []

    def weigh_at(site: Site) -> Weigh:
        gradient, change = integral(trace, rerun, site, steps, rule)
        along = replace(site, out_gradient=gradient)

        def product(tile: Tensor, part: Part) -> Tensor:
            return tile * along.gradient(part, tile.shape[-1])

        def summed(tile: Tensor, part: Part) -> Tensor:
            return product(tile, part).sum(1, keepdim=True)

        everything = along.pull(site.real.to(site.dtype), weigh=summed, together="sum").sum(-1)
        changes.append(change)
        errors.append((everything.to(change.device) - change).abs())
        return product if per_head else summed

    found = from_layers(
        trace, weigh_at, layers=layers, per_layer=per_layer, per_head=per_head, matrix=matrix, together="sum"
    )
    facts = {"change": torch.stack(changes, 1), "completeness_error": torch.stack(errors, 1)}
    return Scores(found.rows, found.source, found.axes, facts)
