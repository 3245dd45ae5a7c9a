"""The audit as one page: self-contained, readable without its script, and with no way out to the network.

`page` reads an `Audit` and imports no torch. Templates, style sheet and script lie in `templates/`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

from altair.utils.schemapi import debug_mode
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from regard.audited import Audit, refusals
from regard.draw.picture import plain
from regard.judging import CRITERIA
from regard.report.packing import MOST, SHARE
from regard.report.sections import (
    alike,
    appendix,
    audited,
    cards,
    examples,
    heads,
    limits,
    matrix,
    roles,
    trials,
    unit,
)
from regard.report.wording import MARKS

HERE = Path(__file__).parent / "templates"
TEMPLATES = Environment(
    loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
)
MAPS = 1_200_000  # letters that packed attention may take in the page; what comes later is left out, and said to be


def page(audit: Audit) -> str:
    """The report of an audit as HTML: one file, the same bytes for the same audit.

    Args:
        audit: what `regard.audit` or `regard.load_audit` returned.
    """
    style, script = (
        "\n".join(line.strip() for line in (HERE / name).read_text("utf-8").splitlines())
        for name in ("style.css", "script.js")
    )
    maps, left_out = _maps(audit)
    with debug_mode(False):  # our charts are checked by tests; to check each again takes as long as to draw it
        tried, judged, probed = trials(audit), cards(audit), heads(audit)
    unserved = audit.heads.refused.items() if audit.heads else ()
    every = [*audit.refused, *({"trial": name, "method": None, "why": why} for name, why in unserved)]
    refused = [{name: plain(text) for name, text in one.items()} for one in refusals(every)]
    packed = f"of each row the largest weights are kept until they make up {SHARE:.0%} of it, at most {MOST}"
    shortened = f" To keep the page small, {left_out} of {len(audit.maps)} maps are left out." if left_out else ""
    return TEMPLATES.get_template("page.html").render(
        policy=_policy(style, script), style=Markup(style), script=Markup(script), data=_embedded({"maps": maps}),
        about=audited(audit), cards=judged, rules=[(one.name, one.rule) for one in CRITERIA], limits=limits(audit),
        trials=tried, heads=probed, roles=roles(audit), alike=alike(audit), matrix=matrix(audit), refused=refused,
        examples=examples(audit, maps), marks=MARKS,
        adversarial=[shown for trial in tried for one in trial["findings"] for shown in one["shown"]],
        appendix=appendix(audit), unit=unit(audit), packed=f"{packed}, each rounded to 1/255.{shortened}",
    )  # fmt: skip


def _maps(audit: Audit) -> tuple[dict[str, str], int]:
    """Packed attention as text, as much of it as fits; and how many maps do not."""
    written = {name: b64encode(packed.tobytes()).decode() for name, packed in audit.maps.items()}
    kept, room = {}, MAPS
    for name, text in written.items():
        if len(text) <= room:
            kept[name], room = text, room - len(text)
    return kept, len(written) - len(kept)


def _embedded(value: Any) -> Markup:
    """JSON that can stand in a script element: nothing in it can end the element."""
    return Markup(json.dumps(value, sort_keys=True).replace("<", "\\u003c").replace("&", "\\u0026"))


def _policy(style: str, script: str) -> str:
    """What the browser may do: run this script, use this style, and nothing else, whatever else stands in the page."""
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; base-uri 'none'; "
        "form-action 'none'"
    )
