"""From one matrix for each site to numbers on the input: the steps that methods share.

A site's matrix has queries as rows and keys as columns. Numbers travel from the readout down: r·M_L · … · M_1, as
vector × matrix, so that no matrix is formed. In models with two sequences they travel over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from regard.attention.sharding import WHOLE, Together, shards_of
from regard.attention.sites import Site, Weigh
from regard.attention.sites import Strand as Strand
from regard.attention.tracing import Trace
from regard.errors import NotServed, OptionError, choose
from regard.memory import must_fit
from regard.types import Features, Scores

Layers = Literal["last", "mean", "rollout"] | int
# For each site what is put in place of its weights; None: the weights.
WeighAt = Callable[[Site], Weigh | None]


def ends(trace: Trace, site: Site) -> tuple[Strand, Strand]:
    """The sequences that the queries and the keys of a site are rows of; "pool": the readout's own query."""
    _, _, query, key = site.shape
    source = None if trace.batch.source is None else trace.batch.source.real.shape[1]
    keys: Strand = "source" if key == source else "rows"
    if site.kind == "pool":
        return "pool", keys
    return (keys if site.rows is not None else "source" if query == source else "rows"), keys


def over_features(sites: Iterable[Site]) -> list[Site]:
    """Those that look at rows of the same example; attention over samples says nothing about its features."""
    return [site for site in sites if site.kind != "samples"]


def read_sites(trace: Trace) -> list[Site]:
    """The sites that have the rows of the readout among their queries."""
    return [site for site in over_features(trace.sites) if trace.reads(site)]


def no_projections(trace: Trace) -> str | None:
    """Why methods that look at what heads are projected to cannot be served, if they cannot."""
    shards = shards_of(trace.subject.model)
    if shards is None:
        return None
    return f"it needs the output projection, which is spread over {shards.size} processes. {WHOLE}"


def no_layers(trace: Trace) -> str | None:
    """Why methods that look at single layers cannot be served, if they cannot."""
    if not over_features(trace.sites):
        return "all attention of this model is over samples: none of it is over the features of one."
    return None if read_sites(trace) else "no attention site has the rows that the prediction is read from as queries."


def no_path(trace: Trace) -> str | None:
    """Why numbers cannot travel from the readout to the input, if they cannot."""
    lengths = trace.batch.lengths
    for site in over_features(trace.sites):
        _, _, query, key = site.shape
        if key not in lengths or (site.kind != "pool" and site.rows is None and query not in lengths):
            return f"the queries of site {site.index} ({site.name}) are not rows of the input."
    return no_layers(trace)


def co_layers(trace: Trace, sites: Sequence[Site]) -> list[list[Site]]:
    """Sites one by one, but for co-attention: cross sites of opposite directions, one after the other."""
    layers: list[list[Site]] = []
    for site in sites:
        before = layers[-1] if layers else []
        if site.kind == "cross" and len(before) == 1 and ends(trace, site) == ends(trace, before[0])[::-1]:
            before.append(site)
        else:
            layers.append([site])
    return layers


def from_start(trace: Trace, start_layer: int) -> Sequence[Site]:
    """The sites from one on; those before it are left out, on record."""
    if not 0 <= start_layer < len(trace.sites):
        raise OptionError(f"start_layer={start_layer} is not there: there are layers 0 to {len(trace.sites) - 1}.")
    if not (found := over_features(trace.sites[start_layer:])):
        raise OptionError(f"start_layer={start_layer}: from there on attention is over samples only.")
    return found


def from_layers(
    trace: Trace,
    weigh_at: WeighAt,
    *,
    layers: Layers,
    per_layer: bool = False,
    per_head: bool = False,
    matrix: bool = False,
    together: Together = False,
    keep: float = 0.5,
) -> Scores:
    """One matrix for each layer, to numbers: of the last layer, of one, their mean, or their product.

    Args:
        trace: what was traced.
        weigh_at: what is put in place of the weights of a site.
        layers: "last"; the number of a site; "mean" over sites; "rollout": r·Π(keep·I + (1 − keep)·M).
        per_layer: all layers, apart.
        per_head: all heads, apart.
        matrix: for every query, not only for the readout.
        together: ``weigh`` needs all heads at once; see `Site.pull`.
        keep: how much a rollout keeps where it is; 0 if the residual is in M already.
    """
    if not isinstance(layers, int):
        choose("layers", layers, ("last", "mean", "rollout"))

    def numbers(site: Site) -> Tensor:
        if matrix:
            found = site.matrix(per_head=per_head, weigh=weigh_at(site), together=together)
        else:
            found = site.pull(trace.readout, per_head=per_head, weigh=weigh_at(site), together=together)
        return found.to(trace.readout.device)  # layers may be on several

    if layers == "rollout" and not per_layer:
        if per_head:
            raise OptionError("per_head=True: a rollout multiplies the mean over heads. Use layers='last' or 'mean'.")
        sites = over_features(trace.sites)
        return rolled(trace, weigh_at, sites, keep=keep, take=1 - keep, matrix=matrix, together=together)
    sites = read_sites(trace)
    if isinstance(layers, int) and not per_layer:
        sites = [site_at(trace, layers)]
    elif layers == "last" and not per_layer:
        sites = sites[-1:]
    parts: dict[Strand, list[Tensor]] = {}
    for site in sites:
        parts.setdefault(ends(trace, site)[1], []).append(numbers(site))
    if per_layer and len({len(some) for some in parts.values()}) > 1:
        raise NotServed("per_layer=True: rows and source do not have as many layers each. Ask for one, layers=….")
    found = {
        part: torch.stack(some, 1) if per_layer else torch.stack(some).sum(0) / len(sites)
        for part, some in parts.items()
    }
    axes = ("layer",) * per_layer + ("head",) * per_head + ("query",) * matrix
    return Scores(found.get("rows"), found.get("source"), axes)


def on_tokens(trace: Trace, numbers: Callable[[int, Features], list[float]]) -> Scores:
    """Numbers that follow from an example and its tokens alone, those of the source first; padding has 0."""
    sequences = [one for one in (trace.batch.source, trace.batch) if one is not None]
    results = [torch.zeros(one.real.shape, device=one.real.device) for one in sequences]
    for example in range(len(trace.batch)):
        features = reduce(Features.followed_by, (one.features[example] for one in sequences))
        drawn = torch.tensor(numbers(example, features))
        for one, result in zip(sequences, results, strict=True):
            rows = list(one.features[example].rows)
            result[example, rows], drawn = drawn[: len(rows)].to(result.device), drawn[len(rows) :]
    return Scores(results[-1], results[0] if len(results) > 1 else None)


def must_have_score(trace: Trace) -> None:
    """Refuse a trace without a scalar to explain, and say what to pass."""
    if trace.score is None:
        trace.subject.score(trace.output, None, trace.of)


def site_at(trace: Trace, layer: int) -> Site:
    """The site of that number, if the readout is among its queries."""
    site: Site = trace.sites[layer]
    if not trace.reads(site):
        there = ", ".join(str(other.index) for other in read_sites(trace))
        raise NotServed(
            f"layer {layer} ({site.name}) does not have the readout among its queries. Those have: {there}."
        )
    return site


def rolled(
    trace: Trace, weigh_at: WeighAt, sites: Sequence[Site], *, keep: float, take: float, matrix: bool,
    together: Together,
) -> Scores:  # fmt: skip
    """Π(keep·I + take·M_l), or the readout's row of it."""
    if not matrix:
        return _passed_down(trace, weigh_at, sites, keep=keep, take=take, together=together)
    if trace.batch.source is not None or any(site.kind == "pool" or site.rows is not None for site in sites):
        raise NotServed("matrix=True: a product of matrices needs sites whose queries and keys are the same rows.")
    must_fit("a matrix of rows by rows", (*trace.real.shape, trace.real.shape[1]))
    product = torch.diag_embed(trace.real.to(sites[-1].dtype))  # example query key
    for site in sites:
        product = keep * product + take * (site.matrix(weigh=weigh_at(site), together=together).to(product) @ product)
    return Scores(product, None, ("query",))


def _passed_down(
    trace: Trace, weigh_at: WeighAt, sites: Sequence[Site], *, keep: float, take: float, together: Together
) -> Scores:
    """r·Π(keep·I + take·M_l), from the last of the sites down to the first.

    Cross-attention keeps its share on the queries' own sequence and takes the other to the keys'. The two sites of a
    co-attention see the same state, so both pull before either is added.
    """
    start: Strand = "pool" if any(site.kind == "pool" for site in read_sites(trace)) else "rows"
    flow: dict[Strand, Tensor] = {start: trace.readout.to(sites[-1].dtype)}
    for layer in reversed(co_layers(trace, sites)):
        pulled = []
        for site in layer:
            queries, keys = ends(trace, site)
            if queries in flow:
                numbers = site.pull(flow[queries], weigh=weigh_at(site), together=together)
                pulled.append((queries, keys, numbers.to(trace.readout.device)))  # layers may be on several
        for queries, _, _ in pulled:
            flow[queries] = flow[queries] * keep
        for queries, keys, numbers in pulled:
            flow[keys] = flow.get(keys, torch.zeros_like(numbers)) + numbers * (1.0 if queries == "pool" else take)
    return Scores(flow.get("rows"), flow.get("source"))
