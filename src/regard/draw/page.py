"""A self-contained page: no script, no network, everything escaped."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
from jinja2 import Environment
from markupsafe import Markup

from regard.draw.charts import chart_svg

TEMPLATE = Environment(autoescape=True).from_string("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.6 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1.5rem 0; overflow-x: auto; }
figure svg { background: #fff; border-radius: 4px; }
.w { padding: .15em .25em; border-radius: .2em; }
.note { opacity: .75; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="note">{{ note }}</p>
{% for heading, text, chart in parts %}
<section>
<h2>{{ heading }}</h2>
<p>{{ text }}</p>
<figure>{{ chart }}</figure>
</section>
{% endfor %}
</body>
</html>
""")


def page(title: str, note: str, parts: Sequence[tuple[str, Markup, alt.LayerChart]]) -> str:
    """A page of sections, each with a heading, a line of shaded text and a chart."""
    drawn = [(heading, text, Markup(chart_svg(chart))) for heading, text, chart in parts]
    return TEMPLATE.render(title=title, note=note, parts=drawn)
