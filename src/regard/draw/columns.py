"""Columns of a table: bars with intervals, ranks by method, and what each head of each layer looks at."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from regard.draw.charts import interval_rows
from regard.draw.picture import HALF_WAY, INK, ON_LIGHT, POSITIVE, Picture, finite, keys, one_each, table
from regard.draw.plots import DASHES, PALETTE
from regard.errors import OptionError

MOST = 30  # columns that are drawn
CELL, ROW, BAND = 64, 24, 90  # pixels: how wide a cell of a map is, how high a row, and a band of lines


def interval_bars(
    names: Sequence[str], values: ArrayLike, low: ArrayLike, high: ArrayLike, *, title: str, caption: str
) -> Picture:
    """A bar with its interval for each name, in the order given.

    Args:
        names: what is compared; each once.
        values: a finite number for each.
        low: the lower ends of the intervals.
        high: the upper ends.
        title: what is shown.
        caption: how to read it.
    """
    array, rows = interval_rows(names, values, low, high)
    shown = [row["name"] for row in rows]
    base = table(rows).encode(
        y=alt.Y("name:O", sort=shown, axis=alt.Axis(title=None, labelLimit=260)), description="said:N"
    )
    axis = alt.Axis(title=None, format=".3~g", tickCount=5)
    bars = base.mark_bar(color=POSITIVE).encode(x=alt.X("value:Q", axis=axis))
    ends = base.mark_rule(color=INK, strokeWidth=1.5, aria=False).encode(x=alt.X("low:Q", axis=axis), x2="high:Q")
    ticks = [
        base.mark_tick(color=INK, thickness=1.5, size=8, aria=False).encode(x=alt.X(f"{end}:Q", axis=axis))
        for end in ("low", "high")
    ]
    chart: alt.LayerChart = alt.LayerChart(layer=[bars, ends, *ticks]).configure_view(stroke=None)
    return Picture(chart.properties(width=360, height=ROW * len(rows)), array, title, caption)


def column_bars(data: pd.DataFrame, *, title: str, caption: str) -> Picture:
    """The columns by whoever is first in a table with "column", "by", "value", "low" and "high".

    Args:
        data: a row for each column and who ranks it, the most important first.
        title: what is shown.
        caption: how to read it.
    """
    some = data[data["by"] == data["by"].iloc[0]]
    ends = [some[end][:MOST].to_numpy() for end in ("value", "low", "high")]
    return interval_bars(some["column"][:MOST].tolist(), *ends, title=title, caption=caption + _left_out(len(some)))


def column_ranks(data: pd.DataFrame, *, title: str, caption: str) -> Picture:
    """Columns × who ranks them, of a table with "column", "by" and "rank"; in the order of the first.

    Args:
        data: a row for each column and who ranks it, the most important first.
        title: what is shown.
        caption: how to read it.
    """
    who, every = data["by"].unique().tolist(), data["column"].unique().tolist()
    ranks = data.pivot(index="column", columns="by", values="rank").loc[every[:MOST], who]
    return rank_map(ranks.to_numpy(), every[:MOST], who, title=title, caption=caption + _left_out(len(every)))


def _left_out(count: int) -> str:
    return f" The first {MOST} of {count}." if count > MOST else ""


def rank_map(ranks: ArrayLike, rows: Sequence[str], columns: Sequence[str], *, title: str, caption: str) -> Picture:
    """Ranks of features (rows) by methods (columns): the darker, the nearer to the first; "–" where there is none.

    Args:
        ranks: ``(feature, method)``: 1 for the first; NaN where a method says nothing.
        rows: the features; each once.
        columns: the methods; each once.
        title: what is shown.
        caption: how to read it.
    """
    array = np.array(ranks, dtype=float)
    known = np.isfinite(array)
    if array.ndim != 2 or not known.any():
        raise OptionError(f"ranks must be numbers (feature, method), but has shape {array.shape} or holds none.")
    below, across = one_each("rows", rows, len(array)), one_each("columns", columns, array.shape[1])
    worst = max(float(array[known].max()), 2.0)
    dark = known & (array < 1 + HALF_WAY * (worst - 1))
    inks = np.where(dark, "#fff", np.where(known, ON_LIGHT, INK))
    cells = [
        {"row": below[row], "column": across[column], "value": value if known[row, column] else None}
        | {"word": f"{value:.3g}" if known[row, column] else "–"}
        | {"ink": str(inks[row, column])}
        | {"said": f"{below[row]} by {across[column]}: " + (f"{value:.3g}" if known[row, column] else "absent")}
        for (row, column), value in np.ndenumerate(array)
    ]
    base = table(cells).encode(
        x=alt.X("column:O", sort=across, axis=alt.Axis(orient="top", labelAngle=-30, title=None, labelLimit=200)),
        y=alt.Y("row:O", sort=below, axis=alt.Axis(title=None, labelLimit=260)),
        description="said:N",
    )
    scale = alt.Scale(range=["#0b3d91", "#e8f0fb"], domain=[1, worst], interpolate="lab")
    legend = alt.Legend(values=sorted({1, round(worst)}), format="d")
    shaded = base.mark_rect(invalid="filter").encode(
        color=alt.Color("value:Q", title="rank", scale=scale, legend=legend)
    )
    written = base.mark_text(fontSize=11, aria=False).encode(text="word:N", fill=alt.Fill("ink:N", scale=None))
    chart: alt.LayerChart = alt.LayerChart(layer=[shaded, written])
    return Picture(chart.properties(width=CELL * len(across), height=ROW * len(below)), array, title, caption)


def head_lines(
    values: ArrayLike, tokens: Sequence[str], *, title: str, caption: str, layers: Sequence[str] | None = None,
    heads: Sequence[str] | None = None,
) -> Picture:  # fmt: skip
    """What each head of each layer gives to each token: a band for each layer, a line for each head.

    Args:
        values: ``(layer, head, token)``: finite numbers in any unit.
        tokens: what is looked at, in order.
        title: what is shown.
        caption: how to read it.
        layers: their names; None: by number.
        heads: the same.
    """
    array = finite("values", values, "layer", "head", "token")
    below = one_each("layers", layers or [f"layer {number}" for number in range(len(array))], len(array))
    across = one_each("heads", heads or [f"head {number}" for number in range(array.shape[1])], array.shape[1])
    named = keys(one_each("tokens", tokens, array.shape[2]))
    low, high = min(0.0, float(array.min())), float(array.max())
    step = (high - low) or 1.0
    rows = [
        {
            "token": named[token],
            "y": -layer + 0.9 * (value - low) / step,
            "head": across[head],
            "line": f"{layer} {head}",
        }
        | {"said": f"{below[layer]}, {across[head]}, {named[token]}: {value:.4g}"}
        for (layer, head, token), value in np.ndenumerate(array)
    ]
    floors = [{"y": -layer - 0.9 * low / step, "word": below[layer]} for layer in range(len(array))]
    legend = alt.Legend(title=None, orient="right", symbolSize=120)
    up = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[1 - len(array), 1], nice=False))
    along = alt.X("token:O", sort=named, axis=alt.Axis(title=None, labelAngle=-45, labelLimit=140))
    base = table(rows).encode(x=along, y=up)
    colours, dashes = ([some[place // many % len(some)] for place in range(len(across))] for some, many in (
        (PALETTE, 1), (DASHES, len(PALETTE)),
    ))  # fmt: skip
    lines = base.mark_line(aria=False).encode(
        detail="line:N",
        stroke=alt.Stroke("head:N", sort=across, scale=alt.Scale(domain=across, range=colours), legend=legend),
        strokeDash=alt.StrokeDash("head:N", sort=across, scale=alt.Scale(domain=across, range=dashes), legend=legend),
    )
    dots = base.mark_circle(size=16, opacity=0.7).encode(
        fill=alt.Fill("head:N", sort=across, scale=alt.Scale(domain=across, range=colours), legend=None),
        description="said:N",
    )
    ground = table(floors).mark_rule(color="#bbb", aria=False).encode(y=up)
    words = table(floors).mark_text(align="left", baseline="top", dx=4, dy=-BAND + 16, fontWeight="bold", aria=False)
    words = words.encode(x=alt.value(0), y=up, text="word:N")
    chart: alt.LayerChart = alt.LayerChart(layer=[ground, lines, dots, words]).configure_view(stroke=None)
    size = {"width": min(1200, max(320, 40 * len(named))), "height": BAND * len(array)}
    how = f"{caption} Each band is a layer, from {low:.3g} to {high:.3g}."
    return Picture(chart.properties(**size), array, title, how.lstrip())
