"""What many examples look like: points, histograms, curves with bands. Tables in, by the names of their columns."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from regard.draw.charts import heads_grid
from regard.draw.picture import Picture, plain, table
from regard.errors import OptionError

PALETTE = ["#56a0eb", "#f09a3e", "#4daf7c", "#b06fc4", "#8c6d4f", "#d1495b", "#5a6b7b", "#c2b04a"]
MOST_POINTS = 2000


def points(
    data: pd.DataFrame, *, x: str, y: str, title: str, caption: str, by: str | None = None, level: float | None = None
) -> Picture:
    """A point for each row; at most 2,000 of them, evenly taken.

    Args:
        data: a row for each example.
        x: the column that goes to the right.
        y: the column that goes up.
        title: what is shown.
        caption: how to read it.
        by: the column that says which colour.
        level: a dashed line across.
    """
    some = _clean(data, [x, y], by)
    every = -(-len(some) // MOST_POINTS)
    more = f" Every {every}th of {len(some)} examples." if every > 1 else ""
    base = _based(some[::every], [x, y], by).mark_circle(size=28, opacity=0.6)
    base = base.encode(x=alt.X("x:Q", title=x), y=alt.Y("y:Q", title=y))
    return _finished([base, *_line(level, "y")], some[[x, y]], title, caption + more)


def histogram(
    data: pd.DataFrame, *, x: str, title: str, caption: str, by: str | None = None, level: float | None = None
) -> Picture:
    """How many rows have which value, in 20 steps.

    Args:
        data: a row for each example.
        x: the column that is counted.
        title: what is shown.
        caption: how to read it.
        by: the column that says which colour.
        level: a dashed line.
    """
    some = _clean(data, [x], by)
    base = _based(some, [x], by).mark_bar(binSpacing=0)
    base = base.encode(
        x=alt.X("x:Q", bin=alt.Bin(maxbins=20), title=x), y=alt.Y("count()", stack="zero", title="examples")
    )
    return _finished([base, *_line(level, "x")], some[[x]], title, caption)


def lines(
    data: pd.DataFrame, *, x: str, y: str, title: str, caption: str, by: str | None = None, level: float | None = None
) -> Picture:
    """A curve with its band for each name: columns ``y``, ``y_low`` and ``y_high`` against ``x``, in the order given.

    Args:
        data: a row for each point of each curve.
        x: the column that goes to the right; numbers or names.
        y: the column that goes up.
        title: what is shown.
        caption: how to read it.
        by: the column that says which curve.
        level: a dashed line across.
    """
    ends = [y, f"{y}_low", f"{y}_high"]
    some = _clean(data, ends, by)
    some = some.assign(
        x=data.loc[some.index, x].map(lambda cell: cell if isinstance(cell, (int, float)) else plain(cell))
    )
    kind = "Q" if pd.api.types.is_numeric_dtype(some["x"]) else "O"
    base = _based(some, ["x", *ends], by, names=("x", "y", "low", "high"))
    across = alt.X(f"x:{kind}", title=x, sort=None)
    band = base.mark_area(opacity=0.2).encode(x=across, y=alt.Y("low:Q", title=y), y2="high:Q")
    curve = base.mark_line(point=True).encode(x=across, y="y:Q")
    return _finished([band, curve, *_line(level, "y")], some[ends], title, caption)


def heads(data: pd.DataFrame, *, layer: str, head: str, value: str, title: str, caption: str) -> Picture:
    """A grid of layers × heads; what is not there is 0, and marked.

    Args:
        data: a row for each head.
        layer: the column with the number of its layer.
        head: the column with its number in the layer.
        value: the column that is the shade.
        title: what is shown.
        caption: how to read it.
    """
    grid = data.pivot(index=layer, columns=head, values=value)
    grid = grid.reindex(index=range(int(grid.index.max()) + 1), columns=range(int(grid.columns.max()) + 1))
    marks = grid.isna().replace({True: "–", False: ""}).to_numpy().tolist() if grid.isna().any(axis=None) else None
    return heads_grid(grid.fillna(0.0).to_numpy(), marks, title=title, legend=value, caption=caption)


def _clean(data: pd.DataFrame, columns: list[str], by: str | None) -> pd.DataFrame:
    """Rows in which all numbers are there."""
    some = data.dropna(subset=columns)
    if some.empty:
        raise OptionError(f"there is nothing to draw: no row has numbers in {', '.join(columns)}.")
    return some if by is None else some.assign(**{by: some[by].map(plain)})


def _based(some: pd.DataFrame, columns: list[str], by: str | None, names: tuple[str, ...] = ("x", "y")) -> alt.Chart:
    rows = [
        dict(zip(names, row, strict=False)) | {"by": "" if by is None else one}
        for row, one in zip(some[columns].itertuples(index=False), some[by] if by else [""] * len(some), strict=True)
    ]
    shown = None if by is None else alt.Legend(title=by)
    return table(rows).encode(color=alt.Color("by:N", scale=alt.Scale(range=PALETTE), legend=shown))


def _line(level: float | None, axis: str) -> list[alt.Chart]:
    if level is None:
        return []
    return [table([{"at": level}]).mark_rule(strokeDash=[4, 3], color="#777").encode(**{axis: "at:Q"})]


def _finished(layers: list[Any], some: pd.DataFrame, title: str, caption: str) -> Picture:
    chart: alt.LayerChart = alt.LayerChart(layer=layers).properties(width=480, height=280)
    return Picture(chart, some.to_numpy(dtype=float), title, caption)
