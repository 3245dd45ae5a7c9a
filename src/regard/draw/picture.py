"""A picture that can be shown in a notebook, put into a page, or saved; and what all drawings share."""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import altair as alt
import numpy as np
import vl_convert
from jinja2 import Environment
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from regard.errors import OptionError, choose

# A blue and an orange that people with any colour vision tell apart; black text stays readable on both.
POSITIVE, NEGATIVE, INK = "#56a0eb", "#f09a3e", "#1a1a1a"
HALF_WAY, ON_LIGHT = 0.33, "#05070f"  # up to there white is read on the shade, then this: both with a contrast of 4.5

TEMPLATES = Environment(autoescape=True, trim_blocks=True)
DOCUMENT = TEMPLATES.from_string("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.6 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
.note { opacity: .75; }
</style>
</head>
<body>
{{ body }}
</body>
</html>
""")
# Notebooks drop style sheets and choose their own colours, so every colour is said here: a light card on any page.
FIGURE = TEMPLATES.from_string("""\
<figure style="margin:1em 0;padding:.8em 1em;box-sizing:border-box;width:fit-content;max-width:100%;overflow-x:auto;\
color-scheme:only light;background:#fff;color:{{ ink }};border-radius:6px">
<div style="font-weight:600;margin-bottom:.4em">{{ title }}</div>
{{ body }}
{% if caption %}
<figcaption style="margin-top:.4em;font-size:.875em;color:#555;max-width:60em">{{ caption }}</figcaption>
{% endif %}
</figure>""")


@dataclass(frozen=True, eq=False)
class Picture:
    """A drawing with its title, its caption and the raw values it shows. Shows itself in notebooks.

    Args:
        chart: the drawing, as an Altair specification without a title.
        values: the numbers as they were given; nothing is normalised or smoothed.
        title: what is shown; a heat map never stands alone.
        caption: how to read it.
        body: HTML to show in place of the chart, where there is something better for a page.
    """

    chart: alt.LayerChart = field(repr=False)
    values: NDArray[np.float64] = field(repr=False)
    title: str
    caption: str = ""
    body: Markup | None = field(default=None, repr=False)

    def svg(self) -> str:
        """The drawing with title and caption as SVG; its parts say their values when the mouse rests on them."""
        columns = max(60, self.chart.width // 7)  # as many characters as fit over the drawing
        title, caption = (textwrap.wrap(plain(text), columns) for text in (self.title, self.caption))
        heading = alt.TitleParams(title, subtitle=caption or alt.Undefined, anchor="start", frame="bounds", offset=12)
        return _svg(self.chart.properties(title=heading))

    def bare(self) -> str:
        """The drawing alone as SVG, for a page that says title and caption itself."""
        return _svg(self.chart)

    def html(self) -> str:
        """A figure to stand inside a page: no script, no style sheet, nothing from the network."""
        body = Markup(_svg(self.chart)) if self.body is None else self.body
        return FIGURE.render(title=plain(self.title), caption=plain(self.caption), body=body, ink=INK)

    def save(self, path: str | Path) -> Path:
        """Write the picture to .html (self-contained, without scripts), .svg or .png; folders are made."""
        path = Path(path)
        suffix = choose("suffix of path", path.suffix.lower(), (".html", ".svg", ".png"))
        if suffix == ".png":
            data = vl_convert.svg_to_png(self.svg(), scale=2)
        else:
            data = (document(self.title, self.html()) if suffix == ".html" else self.svg()).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def _repr_html_(self) -> str:
        return self.html()


def document(title: str, body: str) -> str:
    """A whole page around HTML that is already escaped."""
    return DOCUMENT.render(title=plain(title), body=Markup(body))


def plain(text: object) -> str:
    """The text with what no file or screen can hold (control characters, half surrogates) spelled out as escapes."""
    odd = ("Cc", "Cs", "Cn", "Zl", "Zp")
    return "".join(ascii(sign)[1:-1] if unicodedata.category(sign) in odd else sign for sign in str(text))


def one_each(name: str, words: Sequence[object], size: int) -> list[str]:
    """Words as they are shown, one for each of ``size`` values; what would be invisible is drawn as ␣."""
    if len(words) != size:
        raise OptionError(f"{name} has {len(words)} entries, but values has {size}: pass one for each value.")
    return [plain(word) if str(word).strip() else "␣" for word in words]


def keys(words: Sequence[str]) -> list[str]:
    """Words with their positions, so that repeated ones stay apart."""
    return [f"{position}: {word}" for position, word in enumerate(words)]


def finite(name: str, values: ArrayLike, *axes: str) -> NDArray[np.float64]:
    """A copy of the values, with the named axes, none of them empty, and without NaN and Inf."""
    try:
        array = np.array(values.numpy(force=True) if hasattr(values, "numpy") else values, dtype=float)  # tensors, too
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name} must be numbers ({', '.join(axes)}): {error}.") from None
    if array.ndim != len(axes) or 0 in array.shape or not np.isfinite(array).all():
        raise OptionError(
            f"{name} must be finite and ({', '.join(axes)}), but has shape {array.shape} or holds NaN or Inf."
        )
    return array


def table(rows: Sequence[Mapping[str, object]]) -> alt.Chart:
    """A chart of these rows. As text: Altair takes seconds to check long lists and refuses data frames over 5,000."""
    return alt.Chart(alt.InlineData(values=json.dumps(rows), format=alt.JsonDataFormat(type="json")))


def shade(array: NDArray[np.float64], legend: str) -> alt.Color:
    """From 0 up where no value is negative; otherwise orange and blue on the two sides of 0."""
    top = float(np.abs(array).max()) or 1.0
    if array.min() >= 0:  # cividis reads the same with and without colour vision, and in grey
        scale, ticks = alt.Scale(scheme="cividis", domain=[0, top]), [0, top / 2, top]
    else:
        scale = alt.Scale(domain=[-top, 0, top], range=[NEGATIVE, "#fff", POSITIVE], interpolate="rgb")
        ticks = [-top, 0, top]
    title = textwrap.wrap(plain(legend), 28) or ""  # Vega cuts off what is longer
    return alt.Color("value:Q", title=title, scale=scale, legend=alt.Legend(values=ticks, format=".3~g"))


@lru_cache(maxsize=128)  # pages show some charts more than once, and each takes a tenth of a second
def _vega(specification: str) -> str:
    return str(vl_convert.vegalite_to_svg(specification))


def _svg(chart: alt.LayerChart) -> str:
    """The chart as SVG that can stand beside others: identifiers are its own, descriptions are shown on hover."""
    specification = chart.to_json(indent=None, validate=False)
    own, numbers = "regard-" + sha256(specification.encode()).hexdigest()[:12], dict[str, int]()

    def renamed(match: re.Match[str]) -> str:
        return f"{match[1]}{own}-{numbers.setdefault(match[2], len(numbers))}"

    drawn = _vega(specification)
    # Vega escapes <, > and, inside tags, quotes: so no text of a user's looks like a tag or an attribute.
    drawn = re.sub(r'(<[^<>]* (?:id="|(?:clip-path|fill|stroke)="url\(#))([\w-]+)', renamed, drawn)
    # Vega describes marks in aria-label, for screen readers; what browsers show, too, is a title element.
    described = r'<(path|line) aria-label="([^"]*)" role="graphics-symbol" aria-roledescription="[^"]*"([^>]*)/>'
    drawn = re.sub(described, r"<\1\3><title>\2</title></\1>", drawn)
    drawn = drawn.replace("<text ", '<text pointer-events="none" ')  # words on a mark do not hide what it says
    return drawn.replace("<svg ", '<svg style="display:block" ', 1)
