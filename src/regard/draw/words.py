"""A text whose words are shaded by a number each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from regard.draw.picture import INK, NEGATIVE, POSITIVE, Picture, finite, keys, one_each, table

# Dark words on white wherever the line stands; a dashed frame around what is no part of the text.
TEXT = Markup(
    f'<span style="display:inline-block;background:#fff;color:{INK};padding:.1em .3em;border-radius:6px;'
    'line-height:2.1;overflow-wrap:anywhere">{}</span>'
)
WORD = Markup('<span style="background:{};padding:.15em .25em;border-radius:.2em{}" title="{}">{}</span>')
SPECIAL = ";outline:1px dashed #777;outline-offset:-1px;font-style:italic;font-size:.85em"

LETTERS, LETTER, LINE = 100, 8.4, 30  # letters in a line; pixels of a letter of size 14, and of a line


def text_line(
    words: Sequence[str], values: ArrayLike, *, title: str, caption: str, special: Sequence[bool] | None = None
) -> Picture:
    """A text whose words are shaded: blue for positive values, orange for negative ones, by share of the largest.

    Args:
        words: the words, in order.
        values: a finite number for each word.
        title: what is shown.
        caption: how to read it.
        special: which words are no part of the input, as [CLS] is not; they are drawn in a dashed frame.

    Example:
        >>> drawn = text_line(["not", "bad"], [-0.2, 0.4], title="Why 'positive'", caption="Input × gradient.")
        >>> drawn.caption
        'Input × gradient. Blue: positive; orange: negative.'
        >>> "not</span>" in drawn.html()
        True
    """
    array = finite("values", values, "word")
    places: list[dict[str, Any]] = []
    column, line = 0.0, 0
    for word, said, colour, share, apart in _shaded(words, array, special):
        short = word if cell_len(word) <= LETTERS // 2 else set_cell_size(word, LETTERS // 2 - 1) + "…"
        wide = cell_len(short) + 1  # half a letter of margin on each side
        if column and column + wide > LETTERS:
            column, line = 0, line + 1
        left, top = column * LETTER, line * LINE
        places.append(
            {"word": short, "said": said, "colour": colour, "share": share, "frame": "#777" if apart else None}
            | {"left": left, "right": left + wide * LETTER, "middle": left + wide * LETTER / 2}
            | {"top": top, "bottom": top + LINE - 6, "centre": top + LINE / 2 - 3}
        )
        column += wide + 0.5
    width, height = round(max(place["right"] for place in places)), (line + 1) * LINE - 6
    x: dict[str, Any] = {"scale": alt.Scale(domain=[0, width], nice=False), "axis": None}
    y: dict[str, Any] = {"scale": alt.Scale(domain=[0, height], nice=False, reverse=True), "axis": None}
    base = table(places)
    shades = base.mark_rect(cornerRadius=3, strokeDash=[3, 2]).encode(
        x=alt.X("left:Q", **x), x2="right", y=alt.Y("top:Q", **y), y2="bottom",
        color=alt.Color("colour:N", scale=None), stroke=alt.Stroke("frame:N", scale=None),
        fillOpacity=alt.FillOpacity("share:Q", scale=None), description="said:N",
    )  # fmt: skip
    style = alt.ExprRef("datum.frame ? 'italic' : 'normal'")
    texts = base.mark_text(font="monospace", fontSize=14, color=INK, fontStyle=style, aria=False).encode(
        x=alt.X("middle:Q", **x), y=alt.Y("centre:Q", **y), text="word:N"
    )
    chart: alt.LayerChart = alt.LayerChart(layer=[shades, texts]).configure_view(stroke=None)
    caption = f"{caption} Blue: positive; orange: negative.".lstrip() if array.min() < 0 else caption
    return Picture(
        chart.properties(width=width, height=height), array, title, caption, shaded_html(words, array, special)
    )


def shaded_html(words: Sequence[str], values: ArrayLike, special: Sequence[bool] | None = None) -> Markup:
    """Words as HTML, each shaded by its share of the largest and with its value on hover. Everything is escaped."""
    spans = [
        WORD.format(f"{colour}{round(255 * share):02x}", Markup(SPECIAL if apart else ""), said, word)
        for word, said, colour, share, apart in _shaded(words, values, special)
    ]
    return TEXT.format(Markup(" ").join(spans))


def shaded_terminal(words: Sequence[str], values: ArrayLike) -> Text:
    """Words for a terminal: black on white to blue or, for negative values, to orange."""
    line = Text()
    for word, _, colour, share, _ in _shaded(words, values, None):
        red, green, blue = (round(255 + (channel - 255) * share) for channel in bytes.fromhex(colour[1:]))
        line.append(f" {word} ", style=f"#000000 on #{red:02x}{green:02x}{blue:02x}")
    return line


def _shaded(
    words: Sequence[str], values: ArrayLike, special: Sequence[bool] | None
) -> Iterator[tuple[str, str, str, float, bool]]:
    """Each word with what it says on hover, its colour, its share of the largest value, and whether it is special."""
    array = finite("values", values, "word")
    shown = one_each("words", words, len(array))
    apart = [False] * len(array) if special is None else special
    one_each("special", apart, len(array))
    top = np.abs(array).max() or 1.0
    for i, key in enumerate(keys(shown)):
        colour = NEGATIVE if array[i] < 0 else POSITIVE
        yield shown[i], f"{key}, {array[i]:.6g}", colour, float(abs(array[i]) / top), bool(apart[i])
