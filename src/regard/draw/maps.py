"""Maps over pictures: one translucent block for each patch."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import altair as alt
import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.draw.picture import Picture, finite, plain, table
from regard.errors import OptionError


def image_map(
    picture: ArrayLike, values: ArrayLike, *, title: str, legend: str, caption: str = "", alpha: float = 0.6
) -> Picture:
    """A picture under a translucent map of its patches. Each patch has one colour; nothing is smoothed.

    The picture is drawn in grey, so that all colour is the map's and can be read off the legend.

    Args:
        picture: ``(height, width, 3)`` uint8, as the model sees it.
        values: ``(row, column)``: a finite number for each patch, in any unit.
        title: what is shown; a heat map never stands alone.
        legend: what the colour means.
        caption: how to read it.
        alpha: how much the map covers the picture: from just above 0 to 1.

    Example:
        >>> import numpy as np
        >>> picture = np.zeros((32, 32, 3), np.uint8)
        >>> drawn = image_map(picture, np.eye(4), title="Where the readout looks", legend="attention")
        >>> drawn.values[3, 3]
        np.float64(1.0)
    """
    pixels = np.asarray(picture)
    array = finite("values", values, "row", "column")
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise OptionError(f"picture must be uint8 (height, width, 3), but is {pixels.dtype} {pixels.shape}.")
    (height, width, _), (rows, columns) = pixels.shape, array.shape
    if height % rows or width % columns:
        raise OptionError(
            f"values is {rows}×{columns}, but a picture of {height}×{width} pixels cannot be cut into so many patches. "
            "Pass one number for each patch, (row, column), and the picture as the model sees it: "
            "subject.picture(…)[0]."
        )
    if not 0 < alpha <= 1:
        raise OptionError(f"alpha={alpha!r} must be above 0 (the map could not be seen) and at most 1.")
    zoom = max(1, round(448 / max(height, width)))  # whole, so that patches end at pixels
    shown = {"width": width * zoom, "height": height * zoom}
    grey = (pixels @ [0.299, 0.587, 0.114]).round().astype(np.uint8)
    under = table([{"url": _data_url(grey)}]).encode(url="url:N")
    low, high = float(array.min()), float(array.max())
    blocks = [
        {"row": row, "column": column, "value": float(value), "said": f"patch {row},{column}: {value:.6g}"}
        for (row, column), value in np.ndenumerate(array)
    ]
    # cividis reads the same with and without colour vision, and in grey
    scale = alt.Scale(scheme="cividis", domain=[low, high])
    ticks = alt.Legend(values=[low, (low + high) / 2, high], format=".3~g")
    over = table(blocks).encode(
        x=alt.X("column:O", axis=None),
        y=alt.Y("row:O", axis=None),
        color=alt.Color("value:Q", title=plain(legend), scale=scale, legend=ticks),
        description="said:N",
    )
    layers = [
        under.mark_image(x=0, y=0, align="left", baseline="top", aspect=False, smooth=False, aria=False, **shown),
        over.mark_rect(opacity=alpha),
    ]
    chart: alt.LayerChart = alt.LayerChart(layer=layers)
    return Picture(chart.properties(**shown), array, title, caption)


def _data_url(grey: NDArray[np.uint8]) -> str:
    """A ``(height, width)`` picture as a URL that holds the whole PNG file."""
    height, width = grey.shape
    lines = np.insert(grey, 0, 0, axis=1)  # each line begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits, one channel
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return "data:image/png;base64," + b64encode(file).decode()
