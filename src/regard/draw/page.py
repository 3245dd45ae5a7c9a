"""A self-contained page: no script, no network, everything escaped."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from regard.draw.picture import TEMPLATES, Picture, document

SECTIONS = TEMPLATES.from_string("""\
<h1>{{ title }}</h1>
<p class="note">{{ note }}</p>
{% for heading, pictures in parts %}
<section>
<h2>{{ heading }}</h2>
{{ pictures }}
</section>
{% endfor %}""")


def page(title: str, note: str, parts: Sequence[tuple[str, Sequence[Picture]]]) -> str:
    """A page of sections, each with a heading and pictures."""
    drawn = [(heading, Markup("\n").join(Markup(one.html()) for one in pictures)) for heading, pictures in parts]
    return document(title, SECTIONS.render(title=title, note=note, parts=drawn))
