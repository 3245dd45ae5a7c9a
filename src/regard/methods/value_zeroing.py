"""How much does a row change when it cannot use a token's value?"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from regard.attention import Part, Site, Trace
from regard.attention.blocks import Block, block_of, find_blocks, without_value
from regard.attention.paths import Layers, from_layers, no_layers
from regard.attention.sites import Weigh
from regard.memory import must_fit
from regard.progress import Counter
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights", "reruns")
CITE = "mohebbi2023quantifying"
FORMULA = "1 − cos(e_q, e_q without v_k), rows divided by their sums"
PASSES = "2 forward; a layer: one run of it a token"
OF = "logit"


def cannot(trace: Trace) -> str | None:
    """There must be layers, with a residual connection, around sites."""
    pools = [site for site in trace.sites if site.kind in ("pool", "samples")]
    if pools:
        return f"site {pools[0].index} ({pools[0].name}, {pools[0].kind}) is not in a layer that turns rows into rows."
    return no_layers(trace)


def value_zeroing(trace: Trace, *, layers: Layers = "last", per_layer: bool = False, matrix: bool = False) -> Scores:
    """Value zeroing (Mohebbi et al. 2023): ``(example, key)``.

    In one layer, the value vector of token k is set to zero for all heads, attention weights being as they are; the
    score is the cosine distance between the states of row q after that layer with and without it. Rows are divided by
    their sums. Differs from the paper nowhere; a rollout multiplies the matrices as they are, since the residual
    connection is part of the layer.

    Args:
        trace: what was traced.
        layers: "last", the number of a site, "mean", or "rollout".
        per_layer: all layers: ``(layer, key)``.
        matrix: all queries: ``(query, key)``.
    """
    blocks, _ = find_blocks(trace)
    keys = sum(site.shape[3] for site in trace.sites)
    with Counter("value zeroing", keys if per_layer or layers in ("mean", "rollout") else None) as counter:

        def weigh_at(site: Site) -> Weigh:
            distances = _distances(trace, blocks, site, counter)

            def weigh(tile: Tensor, part: Part) -> Tensor:
                return distances[part.examples][:, None, part.rows, : tile.shape[-1]]

            return weigh

        return from_layers(
            trace, weigh_at, layers=layers, per_layer=per_layer, matrix=matrix, together="same", keep=0.0
        )


def _distances(trace: Trace, blocks: dict[int, Block], site: Site, counter: Counter) -> Tensor:
    """``(example, query, key)``, rows on the simplex; 0 where nothing changes."""
    examples, _, queries, keys = site.shape
    must_fit(f"the distances at site {site.index}", (examples, queries, keys))
    block = block_of(trace, blocks, site)
    before = block.after.double()
    found = torch.zeros(examples, queries, keys, dtype=site.dtype, device=before.device)
    for key in site.real_keys.any(0).nonzero().squeeze(-1).tolist():
        after = without_value(trace, block, site, key).double()
        moved = (after != before).any(-1)  # rounding makes a distance of what has not moved
        found[..., key] = (1 - cosine_similarity(before, after, dim=-1)).clamp_min(0) * moved
        counter.advance()
    found *= site.real[:, :, None] * site.real_keys[:, None]
    return found / found.sum(-1, keepdim=True).clamp_min(torch.finfo(found.dtype).tiny)
