"""Gradients by attention, integrated from no attention at a site to all of it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from regard.attention import edits
from regard.attention.intervening import Rerun
from regard.attention.sites import Site
from regard.attention.tracing import Trace
from regard.errors import OptionError, choose, whole_numbers

Rule = Literal["midpoint", "left", "right"]
OFFSETS = {"midpoint": 0.5, "left": 0.0, "right": 1.0}


def integral(trace: Trace, rerun: Rerun, site: Site, steps: int, rule: Rule) -> tuple[Tensor, Tensor]:
    """∫₀¹ ∂F(αA)/∂out dα ``(example, head, query, channel)``, and F(A) − F(0·A) ``(example,)``.

    All heads of the site are scaled together. Since out = A·V, the integral of ∂F/∂A is this, times Vᵀ: no matrix is
    kept for a step.

    Args:
        trace: what was traced, with a target: F is its score.
        rerun: the same inputs.
        site: one of the trace's.
        steps: of the integral.
        rule: "midpoint", "left" or "right".
    """
    choose("rule", rule, tuple(OFFSETS))
    (steps,) = whole_numbers("steps", steps)
    if steps < 1:
        raise OptionError(f"steps={steps} must be 1 or more.")
    alphas = (torch.arange(steps) + OFFSETS[rule]) / steps

    def score(output: Tensor) -> Tensor:
        return trace.subject.score(output, trace.target, trace.of).values

    total, _ = rerun.gradient(edits.scale(alphas, sites=site.index), steps, site.index, score)
    nothing = score(rerun(edits.scale(0.0, sites=site.index)))
    assert trace.score is not None
    return total / steps, trace.score.values - nothing
