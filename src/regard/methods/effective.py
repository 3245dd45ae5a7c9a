"""Attention without the part that has no effect."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attention import Part, Site, Trace
from regard.attention.paths import Layers, from_layers, no_layers, read_sites
from regard.attention.sites import Weigh
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights", "values")
CITE = "brunner2020identifiability"
FORMULA = "A·U₁U₁ᵀ, T = VW_O = U₁ΣVᵀ"
PASSES = "1 forward"
OF = "logit"
cannot = no_layers
NUMBERS_AT_ONCE = 1 << 24


def effective(
    trace: Trace,
    *,
    layers: Layers = "last",
    per_layer: bool = False,
    per_head: bool = False,
    matrix: bool = False,
) -> Scores:
    """Effective attention (Brunner et al. 2020): A without its part in the left null space of T: ``(example, key)``.

    T = V·W_O are the projected values of a head. Whatever lies in {a : aᵀT = 0} does not reach the output, so A is not
    identifiable where that space is more than {0}: when a row sees more keys than a head has channels. Scores may be
    negative and need not sum to 1.

    The null space is taken for each row over the keys that the row can see. NOTE[DIFF] with causal attention that is
    another one for each row; the paper treats encoders. The rank counts singular values above
    max(keys, channels) · ε · the largest, with the ε of float32, or of float64 for models in that.

    ``facts``: "null_space", its dimension for the readout (example, layer, head); 0: the head is identifiable at this
    length, and effective attention is attention. "identifiable": whether all heads are.

    Args:
        trace: what was traced, with its output projections where there are any.
        layers: "last", the number of a site, "mean", or "rollout".
        per_layer: all layers: ``(layer, key)``.
        per_head: all heads: ``(head, key)``.
        matrix: all queries: ``(query, key)``.
    """

    def weigh_at(site: Site) -> Weigh:
        transformed, epsilon = _transformed(site), torch.finfo(site.dtype).eps

        def weigh(tile: Tensor, part: Part) -> Tensor:
            t = transformed[part.examples, part.heads, : tile.shape[-1]]
            allowed = site.allowed(part, tile.shape[-1]).expand_as(tile)
            if (allowed == allowed[:, :, :1]).all():  # all rows see the same keys
                return _project(tile.double(), _basis(t, allowed[:, :, 0], epsilon)[0]).to(tile) * allowed
            at_once = max(1, NUMBERS_AT_ONCE // t.numel())
            rows = [
                _project(some[..., None, :].double(), _basis(t[:, :, None], seen, epsilon)[0])[..., 0, :]
                for some, seen in zip(tile.split(at_once, 2), allowed.split(at_once, 2), strict=True)
            ]
            return torch.cat(rows, 2).to(tile) * allowed

        return weigh

    found = from_layers(trace, weigh_at, layers=layers, per_layer=per_layer, per_head=per_head, matrix=matrix)
    null = torch.stack([_null_space(site, trace).to(trace.readout.device) for site in read_sites(trace)], 1)
    facts = {"null_space": null, "identifiable": (null == 0).flatten(1).all(1)}
    return Scores(found.rows, found.source, found.axes, facts)


def _transformed(site: Site) -> Tensor:
    """T up to an orthogonal map of its columns, ``(example, head, key, channel)``, in float64.

    T = VW with W = QΣPᵀ (channel, output): VQΣ is a thin matrix with the same left singular vectors.
    """
    values = site.values.double() * site.real_keys[:, None, :, None]
    if site.onward is None:  # nothing is known of a projection: V itself
        return values
    directions, sizes, _ = torch.linalg.svd(site.onward.projection.double(), full_matrices=False)
    thin: Tensor = values @ (directions * sizes[:, None])
    return thin


def _basis(t: Tensor, allowed: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """U₁ ``(…, key, channel)``, columns of zero singular values set to 0, and the rank ``(…)``."""
    u, sizes, _ = torch.linalg.svd(t * allowed[..., None], full_matrices=False)
    tolerance = max(t.shape[-2:]) * epsilon * sizes[..., :1]
    counts = sizes > tolerance
    return u * counts[..., None, :], counts.sum(-1)


def _project(rows: Tensor, basis: Tensor) -> Tensor:
    return (rows @ basis) @ basis.mT


def _null_space(site: Site, trace: Trace) -> Tensor:
    """``(example, head)``: its dimension, for the row of the readout that sees most keys: no other has a larger one."""
    readout = site.on_queries(trace.readout)
    transformed, epsilon = _transformed(site), torch.finfo(site.dtype).eps
    result = []
    for example in range(len(readout)):
        part = Part(slice(example, example + 1), slice(0, site.heads), readout[example].nonzero().squeeze(-1))
        allowed = site.allowed(part, site.shape[3]).expand(1, site.heads, -1, -1)
        allowed = allowed[:, :, int(allowed.sum((0, 1, 3)).argmax())]
        result.append(allowed.sum(-1) - _basis(transformed[part.examples], allowed, epsilon)[1])
    return torch.cat(result)
