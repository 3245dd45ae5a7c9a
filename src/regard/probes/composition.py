"""Which heads read what earlier heads wrote?"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from regard.attention import Site
from regard.circuits import reads, unknown, wired
from regard.errors import NotServed, at_least_one
from regard.glimpses import Survey
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "strongest composition with an earlier head, beyond chance"
NEEDS = ("projections",)
CITE = "elhage2021mathematical"
KINDS = {"V": ("value", "out"), "K": ("key", "query"), "Q": ("query", "key")}  # what reads, and what it goes on to
# which states the queries of a site are made of, and its results added to; which states its keys and values are made of
STREAMS = {"encoder": ("source", "source"), "cross": ("rows", "source"), "pool": ("pool", "rows"),
           "samples": ("samples", "samples")}  # fmt: skip
DRAWS = 32
cannot = unknown


def composition(survey: Survey, *, strongest: int = 50) -> Probed:
    """‖W₂ W_OV¹‖ / (‖W₂‖ ‖W_OV¹‖) of each two heads of different sites, minus that of random matrices (Elhage et al.).

    W_OV = W_O W_V. W₂ is what the later head reads with: W_OV² for its values (V), W_QK² = W_Qᵀ W_K for its keys (K),
    W_QKᵀ for its queries (Q). ‖·‖ is the Frobenius norm. Layer norms are folded in (see `regard.circuits`); what MLPs
    do in between is left out. Queries and keys that are rotated by their position have no W_QK that holds at all rows,
    so models with rotary positions have V alone. The number of a head is its strongest composition of any kind with an
    earlier one; those of the first site have none.
    """
    at_least_one("strongest", strongest)
    sites = wired(survey).sites
    written = {site.index: _factor(site, "value", "out") for site in sites}
    tables, warnings = {}, []
    for kind, (part, other) in KINDS.items():
        found = [_pairs(later, sites[: later.index], written, part, other) for later in sites]
        if all(table is None for table in found):
            why = {
                site.inward.why[one] for site in sites if site.inward for one in (part, other) if one in site.inward.why
            }
            warnings.append(
                f"No {kind}-composition: {'; '.join(sorted(why)) or 'no earlier head writes what it reads'}."
            )
            continue
        tables[kind] = pd.concat([table for table in found if table is not None]).assign(kind=kind)
    if not tables:
        raise NotServed(" ".join(warnings))
    every = pd.concat(tables.values())
    top = every.groupby(["layer", "head"])["value"].max().rename("value")
    values = survey.index.merge(top, "left", ["layer", "head"])["value"].to_numpy(np.float64)
    pairs = pd.concat([table.nlargest(strongest, "value") for table in tables.values()]).reset_index(drop=True)
    best = every.loc[every["value"].to_numpy() == every["value"].max()].iloc[0]
    sentence = (
        f"The strongest is {best.kind}-composition of {best.layer}.{best['head']} with {best.earlier_layer}."
        f"{best.earlier_head} (layer.head): {best.value:.2f} beyond chance, which is {best.chance:.2f}."
    )
    return Probed("", "", tabled(survey.index, values[None]), sentence, {"pairs": pairs}, warnings=tuple(warnings))


def _pairs(
    later: Site, before: tuple[Site, ...], written: dict[int, Tensor | None], part: str, other: str
) -> pd.DataFrame | None:
    """A row for each head of a site with each earlier one that writes into what it reads."""
    reader = _factor(later, other, part)
    stream = STREAMS.get(later.kind, ("rows", "rows"))[part != "query"]
    rows = []
    for site in before:
        writer = written[site.index]
        if reader is None or writer is None or STREAMS.get(site.kind, ("rows",))[0] != stream:
            continue
        if reader.shape[-1] == writer.shape[-1]:
            norms = (
                torch.einsum("lcd,ekd->leck", reader, writer).flatten(2).norm(dim=-1).double().cpu()
            )  # later earlier
            chance = by_chance(reader.shape[1], writer.shape[1], reader.shape[-1])
            heads, earlier = (axis.flatten() for axis in np.indices(norms.shape))
            rows.append(pd.DataFrame({
                "layer": later.index, "head": heads, "earlier_layer": site.index, "earlier_head": earlier,
                "value": norms.flatten().numpy() - chance, "chance": chance,
            }))  # fmt: skip
    return pd.concat(rows) if rows else None


def _factor(site: Site, outside: str, inside: str) -> Tensor | None:
    """``(head, channel, state)``: what stands for the product of two maps of a site; None: one is not known."""
    out = None if site.onward is None else site.onward.projection
    one, other = (out if part == "out" else reads(site, part) for part in (outside, inside))
    return None if one is None or other is None else through(one, other)


def through(outside: Tensor, inside: Tensor) -> Tensor:
    """F = R I with the thin Oᵀ = Q R, divided by its length, so that no matrix state × state is formed.

    ‖F X‖ = ‖Oᵀ I X‖ / ‖Oᵀ I‖, and ‖X Fᵀ‖ = ‖X Iᵀ O‖ / ‖Iᵀ O‖. All are ``(head, channel, state)``; zeros stay zeros.
    """
    factor: Tensor = torch.linalg.qr(outside.to(inside).mT).R @ inside
    length: Tensor = factor.norm(dim=(-2, -1), keepdim=True)
    return factor / length.clamp_min(torch.finfo(factor.dtype).tiny)


@lru_cache
def by_chance(reader: int, writer: int, width: int) -> float:
    """The mean for heads of so many channels whose maps are all drawn from a normal distribution."""
    lots = torch.Generator().manual_seed(0)
    one, other = (
        through(*torch.randn(2, DRAWS, channels, width, generator=lots).double()) for channels in (reader, writer)
    )
    return float((one @ other.mT).norm(dim=(-2, -1)).mean())
