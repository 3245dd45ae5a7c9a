"""Not the weights alone, but the size of what they let through."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from regard.attention import Part, Site, Trace
from regard.attention.paths import Layers, from_layers, read_sites
from regard.attention.sites import Weigh
from regard.attention.sources import at_least_float
from regard.errors import NotServed, choose
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights", "values")
CITE = "kobayashi2020attention"
FORMULA = "‖Σ_h α^h f^h(x)‖, f^h(x) = (xW_V^h + b_V^h) W_O^h"
PASSES = "1 forward"
OF = "logit"
KEYS_AT_ONCE = 512


def cannot(trace: Trace) -> str | None:
    """The output projection of every site that is read must be known."""
    for site in read_sites(trace):
        if site.onward is None:
            return f"no output projection was seen after site {site.index} ({site.name})."
    return None if read_sites(trace) else "no attention site has the readout among its queries."


def norm(
    trace: Trace,
    *,
    mix: Literal["attention", "residual", "residual_norm"] = "attention",
    layers: Layers = "last",
    per_layer: bool = False,
    per_head: bool = False,
    matrix: bool = False,
) -> Scores:
    """Norms of the transformed vectors that attention mixes (Kobayashi et al. 2020, 2021): ``(example, key)``.

    The output bias is left out, as the authors do. Norms of sums over heads come from one H × H Gram matrix for each
    key, so nothing of size T² × d is formed. In a rollout each row is divided by its sum.

    Args:
        trace: what was traced, with its output projections.
        mix: "attention": ‖Σ_h α^h f^h(x_k)‖; "residual": with x_q added where k = q (2021); "residual_norm": and
            through the layer norm after it, without its bias, for post-norm blocks.
        layers: "last", the number of a site, "mean", or "rollout".
        per_layer: all layers: ``(layer, key)``.
        per_head: ‖α^h f^h(x_k)‖ of each head: ``(head, key)``; for mix="attention".
        matrix: all queries: ``(query, key)``.
    """
    choose("mix", mix, ("attention", "residual", "residual_norm"))
    if per_head and mix != "attention":
        raise NotServed(f"per_head=True: with mix={mix!r} heads have no share of their own in the residual.")

    def weigh_at(site: Site) -> Weigh:
        gram, own, size, scale = _products(site, mix)

        def weigh(tile: Tensor, part: Part) -> Tensor:
            keys = tile.shape[-1]
            some = gram[part.examples, :keys]  # example key head head
            if per_head:
                return tile * some.diagonal(dim1=-2, dim2=-1).sqrt().mT[:, :, None]
            # ‖Σ_h α_h f_h‖² = αᵀ G α, a product for each key
            alpha = tile.permute(0, 3, 2, 1)  # example key row head
            squared = ((alpha @ some) * alpha).sum(-1).mT  # example row key
            if own is not None and size is not None:
                # ‖Σ_h α_h f_h + x‖² on the diagonal: 2 Σ_h α_h ⟨f_h, x⟩ + ‖x‖² more
                row = torch.arange(len(part.rows), device=tile.device)
                seen = part.rows < keys
                row, key = row[seen], part.rows[seen]
                cross = (tile[:, :, row, key] * own[part.examples][:, :, key]).sum(1)
                squared[:, row, key] += 2 * cross + size[part.examples][:, key]
            norms = squared.clamp_min(0).sqrt()
            if scale is not None:
                norms = norms * scale[part.examples][:, part.rows, None]
            if layers == "rollout":
                norms = norms / norms.sum(-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
            return norms[:, None]

        return weigh

    keep = 0.5 if mix == "attention" else 0.0  # otherwise the residual is in the norms already
    return from_layers(
        trace, weigh_at, layers=layers, per_layer=per_layer, per_head=per_head, matrix=matrix, together=True, keep=keep
    )


def _products(site: Site, mix: str) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """⟨f_h(x_k), f_g(x_k)⟩ ``(example, key, head, head)``; ⟨f_h(x_k), x_k⟩ ``(example, head, key)``; ‖x_k‖²; 1/s_q."""
    if site.onward is None:
        raise NotServed(f"no output projection was seen after site {site.index} ({site.name}).")
    projection, residual, scale = site.onward.projection, site.onward.residual, None
    if mix != "attention" and (residual is None or site.shape[2] != site.shape[3]):
        raise NotServed(f"mix={mix!r}: no residual connection was seen around site {site.index} ({site.name}).")
    if mix == "residual_norm":
        if site.onward.norm is None or site.onward.total is None:
            raise NotServed(
                f"mix='residual_norm' is defined for post-norm blocks, where the sum goes through a layer norm and "
                f"nowhere else; after site {site.index} ({site.name}) it does not. Use mix='residual'."
            )
        weight, epsilon = site.onward.norm
        assert residual is not None
        # LN(y) = (y − mean(y)) ⊙ γ / s, linear but for s, which is that of the whole sum
        projection, residual = ((x - x.mean(-1, keepdim=True)) * weight for x in (projection, residual))
        scale = 1 / (site.onward.total.var(-1, unbiased=False) + epsilon).sqrt()
    values = at_least_float(site.values)
    grams, owns = [], []
    for keys in torch.arange(values.shape[2], device=values.device).split(KEYS_AT_ONCE):
        f = torch.einsum("ehkc,hco->ekho", values[:, :, keys], projection)
        f = f * site.real_keys[:, keys, None, None]  # padding may hold anything
        grams.append(f @ f.mT)
        if residual is not None and mix != "attention":
            owns.append(torch.einsum("ekho,eko->ehk", f, residual[:, keys]))
    if mix == "attention" or residual is None:
        return torch.cat(grams, 1), None, None, scale
    return torch.cat(grams, 1), torch.cat(owns, 2), residual.square().sum(-1), scale
