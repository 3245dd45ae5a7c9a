"""The attribution tree of Hao et al. (2021): how information flows to a token, from layer to layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import ArrayLike

from regard.draw.picture import INK, POSITIVE, Picture, finite, keys, one_each, table
from regard.errors import OptionError


def tree_edges(values: ArrayLike, threshold: float = 0.4) -> list[tuple[int, int, int, float]]:
    """The edges of the attribution tree, as (layer, query, key, scaled value), from the last layer to the first.

    Each layer is divided by its largest value. The top of the tree is the token whose row takes most from others,
    summed over layers. Then, layer by layer from the last, a token joins the tree where a token of the tree takes
    more than ``threshold`` from it; each token joins once. The first row ([CLS]) is left out as a query.

    Args:
        values: ``(layer, query, key)``, summed over heads, layers in order of execution.
        threshold: the share of a layer's largest value above which an edge is drawn.

    Example:
        Token 2 takes from token 1 in the second layer; token 1 takes from token 0 in the first.

        >>> values = np.zeros((2, 3, 3))
        >>> values[1, 2, 1], values[0, 1, 0] = 4, 2
        >>> tree_edges(values)
        [(1, 2, 1, 1.0), (0, 1, 0, 1.0)]
    """
    array = finite("values", values, "layer", "query", "key")
    if array.shape[1] != array.shape[2] or array.shape[1] < 2:
        raise OptionError(f"values must be (layer, query, key) over the same two or more tokens, but is {array.shape}.")
    if not 0 <= threshold < 1:
        raise OptionError(f"threshold={threshold!r} must be from 0 to below 1: a share of each layer's largest value.")
    taken = array.sum(0).clip(min=0)
    np.fill_diagonal(taken, 0)
    if not taken[1:].any():  # then no token is the top
        return []
    inside, edges = [1 + int(taken[1:].sum(1).argmax())], []
    # NOTE[DIFF]: the authors' code begins at the last layer but one: in the last, only the row of [CLS] matters to
    # their models, and it is left out. For such models the last layer is 0 here, too; for other readouts it counts.
    for layer in reversed(range(len(array))):
        largest = abs(array[layer, 1:].max())
        scaled = array[layer] / (largest or 1.0)
        parents = [token for token in inside if token > 0]
        for key in sorted(set(range(array.shape[1])) - set(inside)):
            # NOTE[DIFF]: of several queries the authors' code takes the first, and lets a token that joined in this
            # layer take from others in this layer if it stands later than its query: both hang on the order of a loop.
            # Here the strongest query wins, and information moves one step in each layer.
            query = max(parents, key=lambda token: scaled[token, key])
            if scaled[query, key] > threshold:
                edges.append((layer, query, key, float(scaled[query, key])))
        inside += [key for at, _, key, _ in edges if at == layer]
    return edges


def tree(values: ArrayLike, tokens: Sequence[str], *, title: str, caption: str, threshold: float = 0.4) -> Picture:
    """The attribution tree: tokens from left to right, layers from the bottom up, an edge where a token takes much.

    Args:
        values: ``(layer, query, key)``, summed over heads, layers in order of execution.
        tokens: the tokens, in order.
        title: what is shown.
        caption: how to read it.
        threshold: the share of a layer's largest value above which an edge is drawn.
    """
    array = finite("values", values, "layer", "query", "key")
    named = keys(one_each("tokens", tokens, array.shape[2]))
    edges = tree_edges(array, threshold)
    if not edges:
        raise OptionError(f"threshold={threshold!r}: no token takes so much from another. Pass a lower one.")
    joined = {edges[0][1]: len(array)} | {key: layer for layer, _, key, _ in edges}
    lines = [
        {"query": named[query], "key": named[key], "from": layer + 1, "to": layer, "value": value}
        | {"said": f"layer {layer}: {named[query]} ← {named[key]}, {value:.3g} of the layer's largest"}
        for layer, query, key, value in edges
    ]
    nodes = [{"token": named[token], "level": level, "floor": 0} for token, level in joined.items()]
    step = min(70, max(16, 900 / len(named)))
    angle = -90 if max(map(len, named)) * 6.5 > step else 0
    tokens_axis = alt.Axis(
        title=None, labelAngle=angle, labelPadding=8, labelLimit=140, labelOverlap=False, ticks=False
    )
    # a layer lies between two levels, and so does its number
    between = [layer + 0.5 for layer in range(len(array))]
    layers_axis = alt.Axis(title="layer", values=between, labelExpr="floor(datum.value)", grid=False)
    x: dict[str, Any] = {"scale": alt.Scale(domain=named), "axis": tokens_axis}
    y: dict[str, Any] = {"scale": alt.Scale(domain=[0, len(array)], nice=False), "axis": layers_axis}
    flows = table(lines).encode(x=alt.X("query:O", **x), y=alt.Y("from:Q", **y))
    joins = table(nodes).encode(x=alt.X("token:O", **x), y=alt.Y("level:Q", **y))
    width, opacity = (alt.Scale(domain=[threshold, 1], range=ends) for ends in ([1, 4], [0.45, 1]))
    edge = flows.mark_rule(color=POSITIVE, strokeCap="round").encode(
        x2="key", y2="to", description="said:N",
        strokeWidth=alt.StrokeWidth("value:Q", scale=width, legend=None),
        opacity=alt.Opacity("value:Q", scale=opacity, legend=None),
    )  # fmt: skip
    stem = joins.mark_rule(color="#bbb", strokeDash=[2, 3], aria=False).encode(y2="floor")
    dots = [
        points.mark_circle(size=size, color=INK, opacity=1, aria=False) for points, size in ((joins, 60), (flows, 20))
    ]
    chart: alt.LayerChart = alt.LayerChart(layer=[stem, edge, *dots]).configure_view(stroke=None)
    size = {"width": round(step * len(named)), "height": max(120, min(60, 500 // len(array)) * len(array))}
    how = (
        f"{caption} Lines: more than {threshold:g} of the largest value in their layer; dotted: one and the same token."
    )
    return Picture(chart.properties(**size), array, title, how.lstrip())
