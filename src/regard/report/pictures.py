"""Charts for the page: small, without colours of their own where the page chooses them, and with words for those who
cannot see them."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape

from regard import draw
from regard.draw.picture import plain
from regard.errors import OptionError
from regard.finding import Finding, said
from regard.probed import Probed
from regard.report.wording import SHORT, stated

TAG = re.compile(r"<[^<>]*>")  # Vega escapes < and > in texts and attributes
NUMBER = re.compile(r"(?<=[\s,(\"A-Za-z-])\d+\.\d{2,}(?:e-?\d+)?")
# What Vega writes and no browser needs: frames that are not seen, what is the default, what the page's style says.
UNSEEN = re.compile(r'<path d="[^"]*"(?: display="none")?/>|<rect width="[\d.]+" height="[\d.]+" fill="white"/>')
TEXT = re.compile(r'<text text-anchor="(\w+)" transform="translate\(([-\d.]+),([-\d.]+)\)"')
ANCHORS = {"start": "", "middle": ' class="m"', "end": ' class="e"'}
IDLE = re.compile(
    r' (?:pointer-events="none"|opacity="1"|aria-hidden="true"|font-family="sans-serif"|stroke-width="1"'
    r'|role="[\w-]+"|aria-roledescription="[^"]*"|aria-label="[^"]*"|xmlns:xlink="[^"]*"|version="1.1"|style="[^"]*"'
    r'|class="[^"]*"|[xy]2="0"|font-size="10px"|font-size="11px"(?= font-weight)'
    r'|transform="translate\(0,0\)"|stroke-miterlimit="10")'
)
LEADING = re.compile(r"(?<!\d)0\.")
COLOUR = re.compile(r'"rgb\((\d+), (\d+), (\d+)\)"')
EMPTY = re.compile(r"<g(?: [^<>]*)?></g>")
DOT = re.compile(r'<path transform="translate\(([-\d.]+),([-\d.]+)\)" d="(M[^"]*)"([^>]*)/>')
SIMPLE = re.compile(r"M-?[\d.]+,0A|M-([\d.]+),-\1h")  # a circle, a square
CURVE = re.compile(r'"M([-\d.]+,[-\d.]+(?:L[-\d.]+,[-\d.]+){8,})(Z?)"')
LINES = re.compile(r'(?:<line transform="translate\([-\d.]+,[-\d.]+\)"(?: [xy]2="[-\d.]+")?[^<>]*/>){3,}')
LINE = re.compile(r'<line transform="translate\(([-\d.]+),([-\d.]+)\)"(?: (x|y)2="([-\d.]+)")?([^<>]*)/>')
WIDE = 460  # pixels: beside another there is not enough room to read it
OTHER_UNITS = {("adversarial", "attention removed")}  # of an output, beside divergences of attention: no axis has both


def inline(picture: draw.Picture, alt: str) -> Markup:
    """The drawing as SVG to stand in the page: what it shows is said in `alt`, its colours are the page's."""
    drawn = TAG.sub(_shorter, picture.bare())
    while EMPTY.search(drawn):
        drawn = EMPTY.sub("", drawn)
    drawn = TEXT.sub(lambda one: f'<text{ANCHORS[one[1]]} x="{one[2]}" y="{one[3]}"', _flat(drawn))
    drawn = CURVE.sub(_relative, _dots(LINES.sub(_joined, drawn)))
    # Vega escapes what is text; nothing of a user's is in an attribute but descriptions, which are escaped, too.
    return Markup(drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(plain(alt))}" ', 1))


def gauge(finding: Finding, name: str) -> Markup:
    """The statistic with its interval and what it is held against, on one axis."""
    beside = {of: one for of, one in finding.reference.items() if (finding.trial, of) not in OTHER_UNITS}
    rows = {name: finding.interval} | {SHORT.get(of, of): one for of, one in beside.items()}
    known = {of: one for of, one in rows.items() if not math.isnan(one.value)}
    if not known:
        return Markup("")
    alt = f"{finding.about}. " + "; ".join(f"{of}: {said(one)}" for of, one in known.items())
    every = [*known.values()]
    value, low, high = ([getattr(one, end) for one in every] for end in ("value", "low", "high"))
    levels = [of for of, one in known.items() if not one.n]
    numbers = [said(one) for one in every]
    return inline(draw.gauge([*known], value, low, high, numbers, levels, title="", caption=""), alt)


def chart(finding: Finding, which: str) -> dict[str, Any] | None:
    """One of a finding's charts, with its title and caption; None where there is nothing to draw."""
    try:
        picture = finding.plot(which)
    except OptionError:
        return None
    alt = f"{picture.title}: {picture.caption} {finding.about}: {stated(finding.interval)}."
    return {"title": plain(which), "caption": plain(picture.caption), "svg": inline(picture, alt)}


def probe_charts(probed: Probed) -> list[dict[str, Any]]:
    """The grid of a probe, and its charts."""
    drawn = []
    for which in [*([None] if probed.has_grid else []), *probed.charts]:
        picture = probed.plot(which)
        alt = f"{picture.title}: {probed.about}. {picture.caption}"
        caption = picture.caption if which else ""
        title, wide = plain(which or "layers × heads"), picture.chart.width > WIDE
        drawn.append({"title": title, "caption": plain(caption), "svg": inline(picture, alt), "wide": wide})
    return drawn


def _shorter(match: re.Match[str]) -> str:
    """A tag with what is needed of it; numbers to a tenth of a pixel."""
    tag = UNSEEN.sub("", IDLE.sub("", match[0]))
    tag = tag.replace(' fill="#000"', "") if tag.startswith("<text") else tag
    tag = COLOUR.sub(lambda one: '"#' + "".join(f"{int(part):02x}" for part in one.groups()) + '"', tag)
    return NUMBER.sub(
        lambda number: f"{float(number[0]):.{1 if float(number[0]) >= 1 else 2}f}".removesuffix(".0"), tag
    )


def _flat(drawn: str) -> str:
    """Without groups that say nothing."""
    kept: list[bool] = []

    def tag(match: re.Match[str]) -> str:
        if match[0] != "</g>":
            kept.append(match[0] != "<g>")
        return match[0] if (kept.pop() if match[0] == "</g>" else kept[-1]) else ""

    return re.sub(r"<g(?: [^<>]*)?>|</g>", tag, drawn)


def _joined(match: re.Match[str]) -> str:
    """Lines of a grid as one path, where they differ in nothing but their place."""
    some = LINE.findall(match[0])
    if len({rest for *_, rest in some}) > 1:
        return match[0]
    steps = {"x": "h", "y": "v", "": "h"}
    path = "".join(f"M{x},{y}{steps[axis]}{far or 0}" for x, y, axis, far, _ in some)
    return f'<path d="{path}"{some[0][-1]}/>'


def _relative(match: re.Match[str]) -> str:
    """A long curve by its steps, which are shorter to write than places."""
    places = [[round(10 * float(one)) for one in pair.split(",")] for pair in match[1].split("L")]
    steps, level = "", 0  # how far it has gone on without going up or down
    for (x0, y0), (x, y) in pairwise(places):
        if y == y0:
            level += x - x0
        else:
            steps += f"h{level / 10:g}" * bool(level) + f"l{(x - x0) / 10:g},{(y - y0) / 10:g}"
            level = 0
    steps = LEADING.sub(".", steps + f"h{level / 10:g}" * bool(level)).replace(",-", "-")
    return f'"M{places[0][0] / 10:g},{places[0][1] / 10:g}{steps}{match[2]}"'


def _dots(drawn: str) -> str:
    """Points of one shape and colour as one path of strokes without length, whose ends are round or square."""

    def together(match: re.Match[str]) -> str:
        by_look: dict[tuple[str, str], list[str]] = {}
        others = ""
        for one in DOT.finditer(match[0]):
            x, y, shape, rest = one.groups()
            if SIMPLE.match(shape):
                at = f"M{float(x):.0f},{float(y):.0f}h0"  # to a pixel: a dot is several wide
                by_look.setdefault((shape, rest), []).append(at)
            else:
                others += one[0]
        strokes = (f'<path d="{"".join(some)}"{_stroked(*look)}/>' for look, some in by_look.items())
        return "".join(strokes) + others

    return re.sub(f"(?:{DOT.pattern}){{8,}}", together, drawn)


def _stroked(shape: str, rest: str) -> str:
    """What a filled shape looks like as the end of a stroke."""
    width = max(abs(float(one)) for one in re.findall(r"-?[\d.]+", shape)[:1]) or 2.6
    fill = re.search(r'fill="([^"]*)"', rest)
    ends = "round" if "A" in shape else "square"
    # A square end reaches beyond the stroke by half its width, and so does a round one: the width is that of the shape.
    look = f' stroke="{fill[1] if fill else "#888"}" stroke-width="{2 * width:g}" stroke-linecap="{ends}"'
    return re.sub(r' (?:fill|stroke|stroke-width)="[^"]*"', "", rest) + look
