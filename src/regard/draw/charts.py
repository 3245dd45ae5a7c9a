"""Charts as Altair specifications."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from regard.errors import OptionError


def heads_grid(
    values: ArrayLike, labels: Sequence[Sequence[str]] | None = None, *, title: str, legend: str
) -> alt.LayerChart:
    """A grid of layers × heads: one shade, and optionally one short word, for each head.

    Args:
        values: ``(layer, head)`` between 0 and 1.
        labels: a word for each cell.
        title: what is shown; a heat map never stands alone.
        legend: what the shade means.
    """
    array = np.asarray(values, dtype=float)
    if array.ndim != 2 or not np.isfinite(array).all():
        raise OptionError(f"values must be finite and (layer, head), but has shape {array.shape}.")
    layer, head = np.indices(array.shape)
    frame = pd.DataFrame({"layer": layer.ravel(), "head": head.ravel(), "value": array.ravel()})
    frame["label"] = [word for row in labels for word in row] if labels is not None else ""
    base = alt.Chart(frame, title=title).encode(
        x=alt.X("head:O", axis=alt.Axis(labelAngle=0, orient="top", title="head")),
        y=alt.Y("layer:O", sort="descending", title="layer"),
    )
    # cividis reads the same with and without colour vision, and in grey
    shade = alt.Color("value:Q", scale=alt.Scale(scheme="cividis", domain=[0, 1]), title=legend)
    cells = base.mark_rect().encode(
        color=shade, tooltip=["layer", "head", alt.Tooltip("value:Q", format=".3f"), "label"]
    )
    words = base.mark_text(fontSize=10, limit=58).encode(
        text="label:N", color=alt.condition("datum.value > 0.55", alt.value("black"), alt.value("white"))
    )
    grid: alt.LayerChart = alt.LayerChart(layer=[cells, words])
    return grid.properties(width=60 * array.shape[1], height=30 * array.shape[0])


def save_chart(chart: alt.LayerChart, path: str | Path) -> Path:
    """Write a chart to .html (self-contained), .svg or .png."""
    path = Path(path)
    if path.suffix not in (".html", ".svg", ".png"):
        raise OptionError(f"path={str(path)!r}: charts are saved as .html, .svg or .png.")
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.save(str(path), **({"inline": True} if path.suffix == ".html" else {"scale_factor": 2}))
    return path


def chart_svg(chart: alt.LayerChart) -> str:
    """A chart as SVG markup, to stand inside a page."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(chart.to_json()))
