"""Pictures: arrays and labels in; shaded text, charts, maps and pages out. Knows no torch."""

from regard.draw.charts import bars, gauge, heads_grid, intervals, token_map
from regard.draw.columns import column_bars, column_ranks, head_lines, interval_bars, rank_map
from regard.draw.maps import image_map
from regard.draw.page import page
from regard.draw.picture import Picture
from regard.draw.plots import cumulative, densities, heads, histogram, lines, points, tradeoff
from regard.draw.trees import tree, tree_edges
from regard.draw.words import shaded_html, shaded_terminal, text_line

__all__ = [
    "Picture",
    "bars",
    "column_bars",
    "column_ranks",
    "cumulative",
    "densities",
    "gauge",
    "head_lines",
    "heads",
    "heads_grid",
    "histogram",
    "image_map",
    "interval_bars",
    "intervals",
    "lines",
    "page",
    "points",
    "rank_map",
    "shaded_html",
    "shaded_terminal",
    "text_line",
    "token_map",
    "tradeoff",
    "tree",
    "tree_edges",
]
