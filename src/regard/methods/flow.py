"""How much can flow from the readout to a token, if every weight is the width of a pipe?"""

from __future__ import annotations

import igraph
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.attention import Site, Trace
from regard.attention.paths import no_path, over_features
from regard.errors import OptionError
from regard.memory import must_fit
from regard.progress import Counter
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights",)
CITE = "abnar2020quantifying"
FORMULA = "max-flow from the readout to each input, capacities αI + (1−α)Ā"
PASSES = "1 forward; one max-flow a token"
OF = "logit"
BYTES_PER_EDGE = 150  # of igraph while it solves, measured


def cannot(trace: Trace) -> str | None:
    """Pipes lead from layer to layer over the same rows."""
    for site in over_features(trace.sites):
        if site.kind != "self":
            return f"site {site.index} ({site.name}, {site.kind}) does not lead from rows to the same rows."
    return no_path(trace)


def flow(trace: Trace, *, alpha: float = 0.5) -> Scores:
    """Attention flow (Abnar & Zuidema 2020): the maximum flow from the readout to each input token, ``(example, row)``.

    A node for each layer and row; from (l, q) to (l−1, k) leads an edge of capacity αI + (1−α)Ā_l. Each token is the
    sink of a flow of its own: the payoff of a set S of players (tokens) is the flow that reaches S when all of it may
    be used. A flow is at least the Shapley value of that game, and equal to it where tokens do not compete for pipes.

    NOTE[DIFF] the paper divides by the sum over tokens; scores here are the flows. Where the readout is several rows, a
    source above them feeds row q by an edge of capacity r_q; with one row this is the paper's.

    Args:
        trace: what was traced.
        alpha: the share of the residual connection, 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise OptionError(f"alpha={alpha!r} must be between 0 and 1.")
    rows, sites = trace.real.shape[1], over_features(trace.sites)
    must_fit("a graph of all attention", (len(sites), rows, rows), item=BYTES_PER_EDGE)
    result = torch.zeros(trace.real.shape, dtype=torch.float64)
    matrices = [_all_rows(site).double().numpy(force=True) for site in sites]  # example query key
    with Counter("max-flow", int(trace.real.sum())) as counter:
        for example, real in enumerate(trace.real.numpy(force=True)):
            places = real.nonzero()[0]
            some = [matrix[example][np.ix_(places, places)] for matrix in matrices]
            readout = trace.readout[example].double().numpy(force=True)[places]
            graph = graph_of(some, readout, alpha)
            for token, place in enumerate(places):
                # the source is the last node; inputs are the first
                result[example, place] = graph.maxflow_value(graph.vcount() - 1, token, "capacity")
                counter.advance()
    return Scores(result.to(trace.readout.device))


def _all_rows(site: Site) -> Tensor:
    """``(example, row, row)``; rows that a model does not compute, since they are not read, look nowhere."""
    if site.rows is None:
        return site.matrix()
    (example, _, _, key), some = site.shape, site.matrix()
    return some.new_zeros(example, key, key).scatter_(1, site.rows[..., None].expand(-1, -1, key), some)


def graph_of(matrices: list[NDArray[np.float64]], readout: NDArray[np.float64], alpha: float) -> igraph.Graph:
    """Nodes (layer, row), the inputs first, and the source last; edges from queries to keys."""
    rows = len(readout)
    edges, capacities = [], []
    for layer, matrix in enumerate(matrices):
        wide = alpha * np.eye(rows) + (1 - alpha) * matrix
        query, key = wide.nonzero()
        edges.append(np.stack([(layer + 1) * rows + query, layer * rows + key], 1))
        capacities.append(wide[query, key])
    source, top = (len(matrices) + 1) * rows, len(matrices) * rows
    (read,) = readout.nonzero()
    edges.append(np.stack([np.full_like(read, source), top + read], 1))
    capacities.append(readout[read])
    graph = igraph.Graph(n=source + 1, edges=np.concatenate(edges), directed=True)
    graph.es["capacity"] = np.concatenate(capacities)
    return graph
