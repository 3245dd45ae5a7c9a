"""What many examples look like: points, densities, curves with bands. Tables in, by the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regard.draw.charts import heads_grid
from regard.draw.picture import Picture, plain, table
from regard.errors import OptionError

PALETTE = ["#56a0eb", "#f09a3e", "#4daf7c", "#b06fc4", "#8c6d4f", "#d1495b", "#5a6b7b", "#c2b04a"]
MOST_POINTS, MOST_CLASSES, MOST_MARKED = 250, 6, 60
WIDE, HIGH = 380, 230
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]  # curves are told apart without colour, too
# What columns of findings are, in words; others are their own names.
WORDS = {
    "tau": "Kendall's τ", "noise tau": "Kendall's τ under noise", "dropout tau": "Kendall's τ under dropout",
    "largest": "largest attention weight", "moved": "change of the output", "site": "attention site, from the input up",
    "jsd": "divergence of attention from the base's (JSD, at most 0.693)", "mass": "attention mass",
    "epsilon_max_jsd": "divergence from the observed attention (JSD, at most 0.693)",
    "sooner": "share of features removed less than in random orders", "share": "share of the words",
    "delta_alpha": "how much larger the largest weight is than another",
    "delta_js": "how much more it moves the output", "fall": "fall of what is explained",
    "auprc": "area under the precision–recall curve", "predicted": "predicted as", "by": "",
    "removed": "share of the features that lost their weight", "flipped": "share of the examples",
}  # fmt: skip


def points(
    data: pd.DataFrame, *, x: str, y: str, title: str, caption: str, by: str | None = None, level: float | None = None
) -> Picture:
    """A point for each row; at most 250 of them, evenly taken.

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
    more = f" {len(some[::every])} of {len(some)} examples are shown." if every > 1 else ""
    base = _based(some[::every], [x, y], by).mark_point(size=28, opacity=0.6, filled=True, aria=False)
    base = base.encode(x=alt.X("x:Q", title=_said(x)), y=alt.Y("y:Q", title=_said(y)), shape=_shape(by))
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
        x=alt.X("x:Q", bin=alt.Bin(maxbins=20), title=_said(x)), y=alt.Y("count()", stack="zero", title="examples")
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
    ends = [y, *(one for one in (f"{y}_low", f"{y}_high") if one in data)]
    data = data.reset_index(drop=True)  # tables that were put together have numbers twice
    some = _clean(data, ends, by)
    some = some.assign(
        x=data.loc[some.index, x].map(lambda cell: cell if isinstance(cell, (int, float)) else plain(cell))
    )
    numbers = pd.api.types.is_numeric_dtype(some["x"])
    base = _rows(some, ["x", *ends], by, ("x", "y", "low", "high"))
    whole = alt.Axis(tickMinStep=1) if pd.api.types.is_integer_dtype(some["x"]) else alt.Axis()
    across = alt.X("x:Q" if numbers else "x:O", title=_said(x), sort=None, axis=whole if numbers else alt.Axis())
    up, colours = alt.Y("y:Q", title=_said(y)), alt.Scale(range=PALETTE)
    filled = base.encode(x=across, fill=alt.Fill("by:N", sort=None, scale=colours, legend=None))
    layers = [base.mark_line(aria=False).encode(x=across, y=up, **_strokes(by))]
    if len(some) <= MOST_MARKED:
        layers.append(filled.mark_circle(size=30, opacity=1).encode(y=up, description="said:N"))
    if len(ends) == 3:  # after the curves: a first layer without a legend may take theirs away
        layers.append(filled.mark_area(opacity=0.2, aria=False).encode(y=alt.Y("low:Q", title=_said(y)), y2="high:Q"))
    return _finished([*layers, *_line(level, "y")], some[ends], title, caption)


def tradeoff(
    data: pd.DataFrame, *, x: str, y: str, by: str, line: str, label: str, title: str, caption: str,
    level: float | None = None,
) -> Picture:  # fmt: skip
    """Points of several kinds with their intervals in both directions; those of one kind are joined, in their order.

    Args:
        data: a row for each point; ``x_low`` and the like are ends of intervals.
        x: the column that goes to the right.
        y: the column that goes up.
        by: the column that says of which kind a point is.
        line: the kind whose points are joined, and named.
        label: the column with their names.
        title: what is shown.
        caption: how to read it.
        level: a dashed line upwards.
    """
    some = _clean(data, [x, y], by)
    ends = [f"{axis}_{end}" for axis in (x, y) for end in ("low", "high")]
    names = dict(zip(ends, ("x_low", "x_high", "y_low", "y_high"), strict=True)) | {x: "x", y: "y"}
    rows = [
        {short: float(row[long]) for long, short in names.items() if long in row and pd.notna(row[long])}
        | {"by": row[by], "name": plain(row[label]), "at": place}
        | {"said": f"{row[label]}: {_said(x)} {_short(float(row[x]))}, {_said(y)} {_short(float(row[y]))}"}
        for place, row in enumerate(some.to_dict(orient="records"))
    ]
    kinds = [*dict.fromkeys(some[by])]
    scale = alt.Scale(domain=kinds, range=[PALETTE[place % len(PALETTE)] for place in range(len(kinds))])
    base = table(rows).encode(color=alt.Color("by:N", sort=None, scale=scale, legend=_legend("")))
    across, up = alt.X("x:Q", title=_said(x)), alt.Y("y:Q", title=_said(y))
    joined = base.transform_filter(alt.FieldEqualPredicate(field="by", equal=plain(line)))
    shapes = alt.Shape("by:N", sort=None, scale=alt.Scale(domain=kinds), legend=_legend(""))
    layers = [
        joined.mark_line(aria=False).encode(x=across, y=up, order="at:Q"),
        base.mark_rule(opacity=0.45, aria=False).encode(x=alt.X("x_low:Q"), x2="x_high", y=up),
        base.mark_rule(opacity=0.45, aria=False).encode(x=across, y=alt.Y("y_low:Q"), y2="y_high"),
        base.mark_point(filled=True, size=55, opacity=0.9).encode(x=across, y=up, shape=shapes, description="said:N"),
        *(
            joined.transform_filter(f"datum.at % 2 == {odd}")  # above and below in turn: neighbours may be close
            .mark_text(align="left", dx=6, dy=dy, fontSize=10, aria=False)
            .encode(x=across, y=up, text="name:N")
            for odd, dy in ((0, -8), (1, 11))
        ),
    ]
    return _finished([*layers, *_line(level, "x")], some[[x, y]], title, caption)


def cumulative(data: pd.DataFrame, *, x: Mapping[str, str], title: str, caption: str) -> Picture:
    """For each name a curve: how many of all rows have at most this value, from 0 to 1; NaN is never reached.

    Args:
        data: a row for each example.
        x: by name, the column with its values.
        title: what is shown.
        caption: how to read it.
    """
    steps = np.linspace(0, 1, 41)
    rows = [
        {"removed": at, "flipped": float((data[column] <= at + 1e-9).mean()), "by": name}
        for name, column in x.items() for at in steps
    ]  # fmt: skip
    return lines(pd.DataFrame(rows), x="removed", y="flipped", by="by", title=title, caption=caption)


def densities(data: pd.DataFrame, *, x: Mapping[str, str], by: str, title: str, caption: str) -> Picture:
    """How the values are spread, for each class in a line of its own: the first name as an area, others as curves.

    Args:
        data: a row for each example.
        x: by name, the column with its values.
        by: the column with the class; at most six, the most frequent ones, are drawn.
        title: what is shown.
        caption: how to read it.
    """
    some = _clean(data, [next(iter(x.values()))], by)
    classes = some[by].value_counts().index[:MOST_CLASSES].sort_values()
    every = some[[*x.values()]].to_numpy(dtype=float)
    low, high = np.nanmin(every), np.nanmax(every)
    margin = 0.1 * (high - low) or 0.5
    at = np.linspace(low - margin, high + margin, 49)
    spread = {
        (place, name): _density(some.loc[some[by] == one, column].dropna().to_numpy(dtype=float), at)
        for place, one in enumerate(classes) for name, column in x.items()
    }  # fmt: skip
    tallest = max(one.max() for one in spread.values()) or 1.0
    rows = [
        {"x": value, "y": -place + 0.85 * one / tallest, "by": plain(name), "line": f"{place} {name}"}
        for (place, name), curve in spread.items() for value, one in zip(at.tolist(), curve.tolist(), strict=True)
    ]  # fmt: skip
    names = [{"x": at[0], "y": -place + 0.8, "word": f"{_said(by)} {one}"} for place, one in enumerate(classes)]
    across = alt.X("x:Q", title=_said(next(iter(x.values()))), scale=alt.Scale(domain=[at[0], at[-1]], nice=False))
    base = table(rows).encode(x=across)
    up: dict[str, Any] = {"axis": None, "scale": alt.Scale(domain=[1 - len(classes), 1], nice=False)}
    area = base.transform_filter(alt.FieldEqualPredicate(field="by", equal=rows[0]["by"]))
    layers = [
        area.mark_line(aria=False, fill=PALETTE[0], fillOpacity=0.35, strokeWidth=0)
        .encode(y=alt.Y("y:Q", **up), detail="line:N"),
        base.mark_line(aria=False).encode(y=alt.Y("y:Q", **up), detail="line:N", **_strokes("")),
        table(names).mark_text(align="left", dx=6, fontSize=11, fontWeight="bold", aria=False)
        .encode(x=alt.X("x:Q"), y=alt.Y("y:Q", **up), text="word:N"),
    ]  # fmt: skip
    picture = _finished(layers, some[[*x.values()]], title, caption)
    return replace(picture, chart=picture.chart.properties(height=80 * len(classes)))


def heads(
    data: pd.DataFrame, *, layer: str, head: str, value: str, title: str, caption: str, label: str | None = None
) -> Picture:
    """A grid of layers × heads; what is not there is 0, and marked.

    Args:
        data: a row for each head.
        layer: the column with the number of its layer.
        head: the column with its number in the layer.
        value: the column that is the shade.
        title: what is shown.
        caption: how to read it.
        label: the column with a word for each head.
    """
    grid, words = (data.pivot(index=layer, columns=head, values=one) for one in (value, label or value))
    layers, places = range(int(grid.index.max()) + 1), range(int(grid.columns.max()) + 1)
    grid, words = (one.reindex(index=layers, columns=places) for one in (grid, words))
    written = words.fillna("") if label else words.map(lambda _: "")
    marks = written.mask(grid.isna(), "–").to_numpy().tolist() if label or grid.isna().any(axis=None) else None
    return heads_grid(grid.fillna(0.0).to_numpy(), marks, title=title, legend=_said(value), caption=caption)


def _clean(data: pd.DataFrame, columns: list[str], by: str | None) -> pd.DataFrame:
    """Rows in which all numbers are there."""
    some = data.dropna(subset=columns)
    if some.empty:
        raise OptionError(f"there is nothing to draw: no row has numbers in {', '.join(columns)}.")
    return some if by is None else some.assign(**{by: some[by].map(plain)})


def _short(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _said(column: str) -> str:
    return WORDS.get(column, column.replace("_", " "))


def _legend(by: str | None) -> alt.Legend | None:
    return None if by is None else alt.Legend(title=_said(by) or None, orient="top", labelLimit=240, symbolSize=120)


def _shape(by: str | None) -> alt.Shape:
    return alt.Shape("by:N", legend=_legend(by))


def _density(values: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gaussian kernels of Silverman's width, and no narrower than a step of the picture."""
    if not len(values):
        return np.zeros_like(at)
    width = max(0.9 * float(values.std()) * len(values) ** -0.2, float(at[1] - at[0]))
    return np.asarray(np.exp(-0.5 * ((at[:, None] - values) / width) ** 2).mean(1) / width)


def _rows(some: pd.DataFrame, columns: list[str], by: str | None, names: tuple[str, ...]) -> alt.Chart:
    rows = [
        (cells := dict(zip(names, row, strict=False)))
        | {"by": "" if by is None else one, "said": " ".join(_short(cell) for cell in (one, *[*cells.values()][:2]))}
        for row, one in zip(some[columns].itertuples(index=False), some[by] if by else [""] * len(some), strict=True)
    ]
    return table(rows)


def _based(some: pd.DataFrame, columns: list[str], by: str | None) -> alt.Chart:
    colour = alt.Color("by:N", scale=alt.Scale(range=PALETTE), legend=_legend(by))
    return _rows(some, columns, by, ("x", "y")).encode(color=colour)


def _strokes(by: str | None) -> dict[str, Any]:
    """Curves by colour and dashes, in the order in which they come."""
    legend = _legend(by)
    return {
        "stroke": alt.Stroke("by:N", sort=None, scale=alt.Scale(range=PALETTE), legend=legend),
        "strokeDash": alt.StrokeDash("by:N", sort=None, scale=alt.Scale(range=DASHES), legend=legend),
    }


def _line(level: float | None, axis: str) -> list[alt.Chart]:
    if level is None:
        return []
    return [table([{"at": level}]).mark_rule(strokeDash=[4, 3], color="#777").encode(**{axis: "at:Q"})]


def _finished(layers: list[Any], some: pd.DataFrame, title: str, caption: str) -> Picture:
    chart: alt.LayerChart = alt.LayerChart(layer=layers).configure_axisQuantitative(tickCount=5)
    return Picture(chart.properties(width=WIDE, height=HIGH), some.to_numpy(dtype=float), title, caption)
