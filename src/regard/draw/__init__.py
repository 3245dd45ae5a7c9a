"""Pictures: arrays and labels in; shaded text, charts, maps and pages out. Knows no torch."""

from regard.draw.charts import heads_grid, save_chart
from regard.draw.maps import ImageMap, image_map
from regard.draw.page import page
from regard.draw.words import shaded_html, shaded_terminal

__all__ = ["ImageMap", "heads_grid", "image_map", "page", "save_chart", "shaded_html", "shaded_terminal"]
