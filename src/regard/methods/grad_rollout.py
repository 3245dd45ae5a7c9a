"""Gradient-weighted attention, added up through the layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.attention import Part, Site, Trace
from regard.attention.paths import Strand, co_layers, ends, from_start, no_path, rolled
from regard.attention.sites import Weigh
from regard.errors import NotServed
from regard.memory import must_fit
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights", "gradients")
CITE = "chefer2021generic"
FORMULA = "R ← R + ĀR, Ā = mean_h((∇A ⊙ A)⁺)"
PASSES = "1 forward, 1 backward"
OF = "logit"
cannot = no_path
Relevance = dict[tuple[Strand, Strand], Tensor]


def grad_rollout(trace: Trace, *, start_layer: int = 0, matrix: bool = False) -> Scores:
    """Generic attention explainability (Chefer et al., ICCV 2021): ``(example, row)``.

    One sequence: R = I, then R ← R + ĀR in order of layers, that is (I + Ā_L) ··· (I + Ā_1); the readout's row of it is
    multiplied from the left, in linear memory. Two sequences: the paper's rules 6–11, with matrices.

    The gradient is that of the explained scalar, a logit by default, not of a loss. NOTE[DIFF] a row of R − I that is
    all zero stays zero in rule 8, where the authors' code divides by zero; R[cls, cls] is not set to 0; no layer is
    left out unless ``start_layer`` says so.

    Args:
        trace: what was traced, with gradients.
        start_layer: the first layer that takes part.
        matrix: for all rows, not only the readout: ``(query, row)``; for models with one sequence.
    """
    sites = from_start(trace, start_layer)
    if trace.batch.source is None:
        return rolled(trace, positive, sites, keep=1.0, take=1.0, matrix=matrix, together=False)
    if matrix:
        raise NotServed("matrix=True: relevance in a model with two sequences is four matrices.")
    by_rows, by_source = _two_sequences(trace, sites)
    readout = trace.readout.to(by_rows)[:, None]  # example 1 query
    return Scores((readout @ by_rows)[:, 0], (readout @ by_source)[:, 0])


def positive(site: Site) -> Weigh:
    """(∇A ⊙ A)⁺, of which the mean over heads is taken (rule 5)."""

    def weigh(tile: Tensor, part: Part) -> Tensor:
        return tile.mul_(site.gradient(part, tile.shape[-1])).clamp_min_(0)

    return weigh


def _two_sequences(trace: Trace, sites: Sequence[Site]) -> tuple[Tensor, Tensor]:
    """R of the rows by the rows, and of the rows by the source."""
    assert trace.batch.source is not None
    real: dict[Strand, Tensor] = {"rows": trace.real, "source": trace.batch.source.real}
    must_fit("the relevance between two sequences", (len(trace.batch), sum(trace.batch.lengths) ** 2))
    dtype, device = sites[-1].dtype, trace.real.device
    sizes = {name: one.shape[1] for name, one in real.items()}
    relevance: Relevance = {
        (a, b): torch.zeros(len(trace.batch), sizes[a], sizes[b], dtype=dtype, device=device)
        for a in real
        for b in real
    }
    for a in real:
        relevance[a, a] = torch.diag_embed(real[a].to(dtype))
    for layer in co_layers(trace, sites):
        added = [_added(relevance, site.matrix(weigh=positive(site)).to(device), *ends(trace, site)) for site in layer]
        for terms in added:  # all of one layer are computed before any is applied
            for where, term in terms.items():
                relevance[where] = relevance[where] + term
    return relevance["rows", "rows"], relevance["rows", "source"]


def _added(relevance: Relevance, attention: Tensor, queries: Strand, keys: Strand) -> Relevance:
    """What one site adds to the relevances; s are its queries' sequence, q the other (as in the paper)."""
    s: Strand = queries
    if queries == keys:
        q: Strand = "source" if s == "rows" else "rows"
        return {
            (s, s): attention @ relevance[s, s],  # rule 6
            (s, q): attention @ relevance[s, q],  # rule 7
        }
    q = keys
    return {
        (s, q): _normalised(relevance[s, s]).mT @ attention @ _normalised(relevance[q, q]),  # rule 10
        (s, s): attention @ relevance[q, s],  # rule 11
    }


def _normalised(relevance: Tensor) -> Tensor:
    """R − I with rows divided by their sums, + I (rules 8 and 9)."""
    identity = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    rest = relevance - identity
    total = rest.sum(-1, keepdim=True)
    return (rest / total).where(total != 0, 0) + identity
