"""A line of text whose words are shaded by a number each."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape
from rich.text import Text

# From the page's own colour towards a blue that people with any colour vision tell from it; black text stays readable.
STRONG = (86, 160, 235)


def shaded_html(words: Sequence[str], shares: Sequence[float]) -> Markup:
    """Words as HTML, each shaded by its share of the largest and with its value on hover. Everything is escaped."""
    top = max(shares, default=0) or 1
    spans = [
        Markup('<span class="w" style="background:rgba({},{},{},{:.2f})" title="{:.4f}">{}</span>').format(
            *STRONG, max(share, 0) / top, share, escape(word)
        )
        for word, share in zip(words, shares, strict=True)
    ]
    return Markup(" ").join(spans)


def shaded_terminal(words: Sequence[str], shares: Sequence[float]) -> Text:
    """Words for a terminal: black on white to blue, by their share of the largest."""
    top = max(shares, default=0) or 1
    line = Text()
    for word, share in zip(words, shares, strict=True):
        depth = max(share, 0) / top
        red, green, blue = (round(255 + (channel - 255) * depth) for channel in STRONG)
        line.append(f" {word} ", style=f"#000000 on #{red:02x}{green:02x}{blue:02x}")
    return line
