"""A self-contained page: no script, no network, everything escaped."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from markupsafe import Markup

from regard.draw.picture import TEMPLATES, Picture, document, plain

SECTIONS = TEMPLATES.from_string("""\
<h1>{{ title }}</h1>
<p class="note">{{ note }}</p>
{% for heading, pictures in parts %}
<section>
<h2>{{ heading }}</h2>
{{ pictures }}
</section>
{% endfor %}""")


TABLE = TEMPLATES.from_string("""\
<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:.85em;vertical-align:top">
<tr>{% for name in columns %}<th style="text-align:left;padding:.2em .8em .2em 0">{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td style="padding:.2em .8em .2em 0;border-top:1px solid #8884;vertical-align:top;\
{{ "white-space:nowrap" if cell|length < 45 else "min-width:16em" }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>""")


FOLDED = TEMPLATES.from_string("""\
<details{{ " open" if rows <= most }}><summary style="margin:.6em 0 .2em">{{ title }}</summary>
{{ table }}
</details>""")
MOST_OPEN = 12  # rows of a table with a title that is not folded
Part = Picture | pd.DataFrame | str | tuple[str, pd.DataFrame]


def page(title: str, note: str, parts: Sequence[tuple[str, Sequence[Part]]]) -> str:
    """A page of sections, each with a heading, pictures, texts and tables; one with a title is folded if it is long."""
    drawn = [(heading, Markup("\n").join(map(_drawn, some))) for heading, some in parts]
    return document(title, SECTIONS.render(title=title, note=note, parts=drawn))


def _drawn(part: Part) -> Markup:
    if isinstance(part, tuple):
        title, table = part
        return Markup(FOLDED.render(title=plain(title), table=_drawn(table), rows=len(table), most=MOST_OPEN))
    if isinstance(part, Picture):
        return Markup(part.html())
    if isinstance(part, str):
        return Markup('<p class="note">{}</p>').format(plain(part))
    rows = [[_written(cell) for cell in row] for row in part.itertuples(index=False)]
    return Markup(TABLE.render(columns=[plain(name) for name in part.columns], rows=rows))


def _written(cell: object) -> str:
    """A cell as it is read: numbers to four digits, nothing as a dash."""
    if cell is None or cell != cell:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else plain(str(cell))
