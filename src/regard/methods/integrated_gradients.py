"""Gradient × input, integrated along the way from a baseline."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from regard.attention import Trace
from regard.attention.entrance import Entrance
from regard.attention.paths import Strand
from regard.attention.running import mixes
from regard.erasing import Values
from regard.errors import NoGradient, NotServed, OptionError, choose, whole_numbers
from regard.types import Scores

FAMILY = "reference"
NEEDS = ("gradients", "reruns")
CITE = "sundararajan2017axiomatic"
FORMULA = "Σ_d (x − x̄)_d ∫₀¹ ∂F(x̄ + α(x − x̄))/∂x_d dα"
PASSES = "2 forward; `steps` forward, backward"
OF = "logit"


def integrated_gradients(trace: Trace, *, baseline: Literal["pad", "mask", "zero"] = "pad", steps: int = 50) -> Scores:
    """Integrated gradients (Sundararajan et al. 2017) of the embeddings, by Captum: ``(example, row)``, signed.

    The sum over tokens is F(x) − F(x̄); ``facts["convergence_delta"]`` says how far it is from that.

    NOTE[DIFF] special tokens have no baseline: they stay, and score 0. Of models with two sequences what was produced
    stays, too, and has no scores, unless the baseline is "zero". Where examples look at each other, the integral is
    along the way of one of them, while the others stay.

    Args:
        trace: what was traced, with a target.
        baseline: what the integral starts from: the embedding of the "pad" or "mask" token, or "zero" vectors. Of
            tables the first two are the embeddings of means and of "missing": categories are interpolated there.
        steps: of the integral (Gauss–Legendre).
    """
    from captum.attr import IntegratedGradients  # takes 2 seconds

    choose("baseline", baseline, ("pad", "mask", "zero"))
    (steps,) = whole_numbers("steps", steps)
    if steps < 1:
        raise OptionError(f"steps={steps} must be 1 or more.")
    values, entrance = Values(trace), Entrance(trace.subject, trace.batch)
    starts = _baselines(entrance, baseline)
    every = [*range(len(trace.batch))]

    def integral(some: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Of some examples, while the others stay as they are."""

        def score(*vectors: Tensor) -> Tensor:
            times = len(vectors[0]) // len(some)
            given = {name: one if some == every else _among(entrance.vectors[name], some[0], one)
                     for name, one in zip(starts, vectors, strict=True)}  # fmt: skip
            output = entrance.run(given).unflatten(0, (times, len(every)))[:, some].flatten(0, 1)
            found = values.scores(output, some * times)
            if torch.is_grad_enabled() and not found.requires_grad:
                raise NoGradient("the target does not depend differentiably on the input.")
            return found

        found, delta = IntegratedGradients(score, multiply_by_inputs=True).attribute(
            tuple(entrance.vectors[name][some] for name in starts), tuple(one[some] for one in starts.values()),
            n_steps=steps, internal_batch_size=max(len(some), 32), return_convergence_delta=True,
        )  # fmt: skip
        return found, delta

    with torch.enable_grad():
        parts = [integral([one]) for one in every] if mixes(trace.subject, trace.batch) else [integral(every)]
    found = [torch.cat(some) for some in zip(*(found for found, _ in parts), strict=True)]
    sums = {name: numbers.detach().sum(-1) for name, numbers in zip(starts, found, strict=True)}
    return entrance.scores(sums, facts={"convergence_delta": torch.cat([delta for _, delta in parts])})


def _among(vectors: Tensor, example: int, variants: Tensor) -> Tensor:
    """``(variant × example, …)``: variants of one example, each among all others."""
    there = torch.arange(len(vectors), device=vectors.device) == example
    there = there.view(1, -1, *[1] * (vectors.dim() - 1))
    return torch.where(there, variants[:, None], vectors[None]).flatten(0, 1)


def _baselines(entrance: Entrance, kind: Literal["pad", "mask", "zero"]) -> dict[Strand, Tensor]:
    """Of each sequence that has one; special tokens and padding are their own."""
    try:
        found = entrance.zeroed() if kind == "zero" else entrance.emptied(kind)
    except NotServed:
        raise NotServed(f"baseline={kind!r}: this subject has none. Use another; there is always 'zero'.") from None
    if not found:
        raise NotServed(f"baseline={kind!r}: the source enters the model as no vectors. Use baseline='zero'.")
    return found
