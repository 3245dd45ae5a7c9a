"""Charts: features as bars, heads and pairs of tokens as grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import altair as alt
import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.draw.picture import (
    HALF_WAY,
    INK,
    NEGATIVE,
    ON_LIGHT,
    POSITIVE,
    Picture,
    finite,
    keys,
    one_each,
    plain,
    shade,
    table,
)
from regard.errors import OptionError

GAUGE, ROW, NAME = 105, 15, 118  # pixels: how wide a gauge is, how high each of its rows, how wide their names
MOST_CELLS = 256 * 256  # a file of 8 MB; far more is one that no browser opens


def bars(words: Sequence[str], values: ArrayLike, *, title: str, caption: str, top: int = 10) -> Picture:
    """The features with the largest absolute values, as bars; each with its position, so that none are merged.

    Args:
        words: the features, in order.
        values: a finite number for each feature; bars of negative ones are orange and go to the left.
        title: what is shown.
        caption: how to read it.
        top: how many features are drawn.

    Example:
        >>> drawn = bars(["so", "so", "good"], [0.1, -0.4, 0.3], title="Why 'positive'", caption="gradient × input")
        >>> drawn
        Picture(title="Why 'positive'", caption='gradient × input')
        >>> drawn.chart.to_dict()["layer"][0]["encoding"]["y"]["sort"]
        ['1: so', '2: good', '0: so']
    """
    array = finite("values", values, "feature")
    named = keys(one_each("words", words, len(array)))
    if top < 1:
        raise OptionError(f"top={top!r} must be at least 1: nothing would be drawn.")
    chosen = np.argsort(-np.abs(array), kind="stable")[:top]
    rows = [
        {"feature": named[i], "value": array[i], "shown": f"{array[i]:.3g}", "said": f"{named[i]}, {array[i]:.6g}"}
        for i in chosen
    ]
    low, high = min(0.0, array[chosen].min()), max(0.0, array[chosen].max())
    reach = alt.Scale(domain=[low, high if high > low else 1], padding=60 if low < 0 else 0, nice=False)
    base = table(rows).encode(
        x=alt.X("value:Q", scale=reach, axis=alt.Axis(title=None, format=".3~g", tickCount=5)),
        y=alt.Y("feature:O", sort=[named[i] for i in chosen], axis=alt.Axis(title=None, labelLimit=220)),
        description="said:N",
    )
    colour = alt.condition("datum.value < 0", alt.value(NEGATIVE), alt.value(POSITIVE))
    drawn = base.mark_bar().encode(color=colour)
    sides: list[tuple[str, Literal["left", "right"], int]] = [("<", "right", -4), (">=", "left", 4)]
    numbers = [
        base.transform_filter(f"datum.value {side} 0")
        .mark_text(align=align, dx=dx, color=INK, aria=False)
        .encode(text="shown:N")
        for side, align, dx in sides
    ]
    chart: alt.LayerChart = alt.LayerChart(layer=[drawn, *numbers]).configure_view(stroke=None)
    return Picture(chart.properties(width=480, height=24 * len(rows)), array, title, caption)


def interval_rows(
    names: Sequence[str], values: ArrayLike, low: ArrayLike, high: ArrayLike
) -> tuple[NDArray[np.float64], list[dict[str, Any]]]:
    """The values, and of each its name, value, interval, and all of it in words ("said")."""
    array, lows, highs = (finite(what, x, "name") for what, x in (("values", values), ("low", low), ("high", high)))
    shown = one_each("names", names, len(array))
    return array, [
        {"name": name, "value": value, "low": least, "high": most}
        | {"said": f"{name}: {value:.4g} [{least:.4g}, {most:.4g}]"}
        for name, value, least, most in zip(shown, array, lows, highs, strict=True)
    ]


def intervals(
    names: Sequence[str], values: ArrayLike, low: ArrayLike, high: ArrayLike, *, title: str, caption: str,
    level: float | None = None,
) -> Picture:  # fmt: skip
    """A value with its interval for each name, in the order given.

    Args:
        names: what is compared; each once.
        values: a number for each.
        low: the lower ends of the intervals.
        high: the upper ends.
        title: what is shown.
        caption: how to read it.
        level: a dashed line: what chance would reach.
    """
    array, rows = interval_rows(names, values, low, high)
    shown = [row["name"] for row in rows]
    reach = alt.Scale(zero=False, padding=12)
    axis = alt.Axis(title=None, labelLimit=260)
    base = table(rows).encode(y=alt.Y("name:O", sort=shown, axis=axis), description="said:N")
    bar = base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q", scale=reach, title=None), x2="high:Q")
    dot = base.mark_point(color=POSITIVE, filled=True, size=70, opacity=1).encode(x=alt.X("value:Q", scale=reach))
    line = [] if level is None else [table([{"at": level}]).mark_rule(strokeDash=[4, 3], color="#777").encode(x="at:Q")]
    caption = caption if level is None else f"{caption} Dashed: chance ({level:.3f})."
    chart: alt.LayerChart = alt.LayerChart(layer=[*line, bar, dot])
    return Picture(chart.properties(width=480, height=22 * len(rows)), array, title, caption)


def gauge(
    names: Sequence[str], values: ArrayLike, low: ArrayLike, high: ArrayLike, said: Sequence[str],
    levels: Sequence[str] = (), *, title: str, caption: str,
) -> Picture:  # fmt: skip
    """A value with its interval, and below it what it is held against, on one short axis with the numbers beside it.

    Args:
        names: the first is what is measured, the others are what it is held against; each once.
        values: a number for each.
        low: the lower ends of the intervals.
        high: the upper ends.
        said: each number, as it is written.
        levels: names of numbers that are no estimates; each is a dashed line across.
        title: what is shown.
        caption: how to read it.
    """
    array, lows, highs = (finite(what, x, "name") for what, x in (("values", values), ("low", low), ("high", high)))
    shown = one_each("names", names, len(array))
    rows = [
        {"name": name, "value": value, "low": least, "high": most, "said": text, "first": not at, "level": of in levels}
        for at, (of, name, value, least, most, text)
        in enumerate(zip(names, shown, array, lows, highs, said, strict=True))
    ]  # fmt: skip
    axis = alt.Axis(title=None, tickCount=4, labelFontSize=10, labelSeparation=6, format="~g")
    flat: dict[str, Any] = (
        {} if max(highs) > min(lows) else {"domain": [array[0] - 0.5, array[0] + 0.5]}
    )  # else all ticks are one
    across = alt.X("value:Q", scale=alt.Scale(zero=False, padding=8, nice=True, **flat), axis=axis)
    left = alt.Axis(
        title=None, labelLimit=NAME - 4, labelFontSize=11, ticks=False, domain=False, minExtent=NAME, maxExtent=NAME
    )
    down = alt.Y("name:O", sort=shown, axis=left)
    base = table(rows).encode(y=down)
    lines = base.transform_filter("datum.level").mark_rule(strokeDash=[4, 3], color="#777", aria=False).encode(x=across)
    lines = lines.encode(y=alt.value(0), y2=alt.value(ROW * len(rows)))
    colour = alt.condition("datum.first", alt.value(POSITIVE), alt.value("#777"))
    bars = base.mark_rule(strokeWidth=3, opacity=0.55, aria=False).encode(
        x=alt.X("low:Q", axis=axis), x2="high:Q", color=colour
    )
    dots = base.mark_point(filled=True, size=55, opacity=1, aria=False).encode(x=across, color=colour)
    text = base.mark_text(align="left", fontSize=11, aria=False).encode(x=alt.value(GAUGE + 8), text="said:N")
    chart: alt.LayerChart = alt.LayerChart(layer=[lines, bars, dots, text]).configure_view(stroke=None)
    return Picture(chart.properties(width=GAUGE, height=ROW * len(rows)), array, title, caption)


def heads_grid(
    values: ArrayLike, labels: Sequence[Sequence[str]] | None = None, *, title: str, legend: str, caption: str = ""
) -> Picture:
    """A grid of layers × heads: one shade, and optionally one short word, for each head.

    Args:
        values: ``(layer, head)``: finite numbers in any unit.
        labels: a word for each cell.
        title: what is shown; a heat map never stands alone.
        legend: what the shade means.
        caption: how to read it.
    """
    array = finite("values", values, "layer", "head")
    if labels is not None and [len(row) for row in labels] != [array.shape[1]] * len(array):
        raise OptionError(f"labels has rows of {[len(row) for row in labels]}, but values is {array.shape}.")
    words = [[""] * array.shape[1]] * len(array) if labels is None else labels
    light = array > HALF_WAY * array.max() if array.min() >= 0 else np.ones_like(array, bool)
    cells = [
        {"layer": layer, "head": head, "value": value, "word": word, "ink": ON_LIGHT if light[layer, head] else "#fff"}
        | {"said": f"layer {layer}, head {head}: {value:.6g} {word}".strip()}
        for (layer, head), value in np.ndenumerate(array)
        for word in [plain(words[layer][head])]
    ]
    base = table(cells).encode(
        x=alt.X("head:O", axis=alt.Axis(labelAngle=0, orient="top", title="head")),
        y=alt.Y("layer:O", sort="descending", title="layer"),
        description="said:N",
    )
    shaded = base.mark_rect().encode(color=shade(array, legend))
    written = base.mark_text(fontSize=10, limit=58, aria=False).encode(
        text="word:N", fill=alt.Fill("ink:N", scale=None)
    )
    chart: alt.LayerChart = alt.LayerChart(layer=[shaded, written])
    wide = 60 if labels is not None else 30
    return Picture(chart.properties(width=wide * array.shape[1], height=30 * len(array)), array, title, caption)


def token_map(
    values: ArrayLike, rows: Sequence[str], columns: Sequence[str], *, title: str, caption: str, legend: str,
    axes: tuple[str, str] = ("query", "key"),
) -> Picture:  # fmt: skip
    """How much each token (row) takes from each token (column), as a grid; repeated tokens stay apart.

    Args:
        values: ``(query, key)``: finite numbers in any unit.
        rows: the tokens that look.
        columns: the tokens that are looked at.
        title: what is shown.
        caption: how to read it.
        legend: what the shade means.
        axes: what rows and columns are.
    """
    array = finite("values", values, "query", "key")
    if array.size > MOST_CELLS:
        raise OptionError(f"values is {array.shape}: more than {MOST_CELLS} cells cannot be shown. Pass a part of it.")
    below, across = keys(one_each("rows", rows, len(array))), keys(one_each("columns", columns, array.shape[1]))
    cells = [
        {
            "query": below[row],
            "key": across[column],
            "value": value,
            "said": f"{below[row]} → {across[column]}, {value:.6g}",
        }
        for (row, column), value in np.ndenumerate(array)
    ]
    base = table(cells).encode(
        x=alt.X("key:O", sort=across, axis=_labels(across, orient="top", labelAngle=-90, title=axes[1])),
        y=alt.Y("query:O", sort=below, axis=_labels(below, title=axes[0])),
        color=shade(array, legend),
        description="said:N",
    )
    chart: alt.LayerChart = alt.LayerChart(layer=[base.mark_rect()])
    return Picture(chart.properties(width=_length(len(across)), height=_length(len(below))), array, title, caption)


def _labels(names: Sequence[str], **place: Any) -> alt.Axis:
    """An axis that writes at most 150 of the names, at even distances: more would overlap."""
    return alt.Axis(values=names[:: -(-len(names) // 150)], labelLimit=140, labelOverlap=False, **place)


def _length(count: int) -> int:
    """How many pixels so many cells take: 28 each for few, 10 each up to 150, where labels still fit, then less."""
    return round(min(28 * count, max(700, min(10 * count, 1500))))
