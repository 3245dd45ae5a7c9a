"""From an audit to what the templates show: plain words and numbers, nothing escaped yet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from regard.audited import Audit
from regard.draw.picture import plain
from regard.finding import MOST_ROWS, Finding, of_columns, readable
from regard.judging import CANNOT_TELL
from regard.probed import Probed, short
from regard.report.pictures import chart, gauge, probe_charts
from regard.report.wording import SHORT, number, sentence, setting, small, stated

SHADES = 10  # steps from nothing to the largest
ALIKE = "Spearman's ρ between probes, over heads"
ATTENTION = "attention"  # who is judged by trials that edit attention itself
RAW = 20_000  # letters that raw values may take among the downloads; all of them are in findings.json


def audited(audit: Audit) -> dict[str, Any]:
    """What was audited, for the head of the page."""
    model, data, asked = (audit.about.get(what, {}) for what in ("model", "data", "options"))
    said = sorted({str(label) for _, one in audit.findings for label in one.values.get("predicted", ())})
    return {
        "model": _short(model.get("name") or model.get("class")), "data": _short(data.get("source")),
        "examples": f"{asked.get('examples', 0):,}", "of": f"{data.get('of', 0):,}",
        "methods": [*map(plain, audit.methods)], "labels": [*map(plain, said)],
    }  # fmt: skip


def cards(audit: Audit) -> list[dict[str, Any]]:
    """A scorecard for each explanation."""
    made, drawn = [], dict[tuple[int, str], Any]()
    for title in audit.methods:
        verdict = audit.verdict(title)
        rows, untested = [], []
        for criterion in verdict.criteria:
            evidence = verdict.evidence(criterion)
            if not evidence:
                untested.append(criterion.name)
                continue
            outcome = verdict[criterion.name]
            rows.append({
                "name": criterion.name, "asks": criterion.asks, "rule": criterion.rule, "outcome": outcome,
                "sentence": _worded(audit, sentence(criterion, outcome, evidence)), "apart": not criterion.faithfulness,
                "gauges": [_gauge(one, title, drawn) for one in evidence],
            })  # fmt: skip
        others = [{"trial": one.trial, "outcome": one.outcome} for one in verdict.besides]
        made.append({"title": plain(title), "rows": rows, "untested": untested, "others": others})
    return made


def unit(audit: Audit) -> str:
    """What explanations give numbers to."""
    return "columns" if audit.about.get("kind") == "table" else "words"


def _worded(audit: Audit, text: str) -> str:
    return of_columns(text) if unit(audit) == "columns" else text


def limits(audit: Audit) -> list[str]:
    """What the audit cannot tell, and what to know before believing it."""
    notes: dict[str, list[str]] = {}
    for title in audit.methods:
        for line in audit.verdict(title).notes:
            notes.setdefault(plain(line), []).append(plain(title))
    every = [line for line, titles in notes.items() if len(titles) == len(audit.methods) or line in CANNOT_TELL]
    some = [f"{', '.join(titles)}: {line}" for line, titles in notes.items() if line not in every]
    return [*every, *some]


def trials(audit: Audit) -> list[dict[str, Any]]:
    """A section for each trial: what came of it for each explanation."""
    sections: dict[str, dict[str, Any]] = {}
    for at, (title, one) in enumerate(audit.findings):
        text = audit.about.get("references", {}).get(one.cite, one.cite)
        empty = {"name": one.trial, "claim": plain(one.claim), "cite": plain(text), "findings": []}
        sections.setdefault(one.trial, empty)["findings"].append(_finding(one, title, f"f{at}"))
    return [*sections.values()]


def matrix(audit: Audit) -> dict[str, Any] | None:
    """Explanations × references: how alike they rank words, from the trial that compares them."""
    cells: dict[tuple[str, str], str] = {}
    values: dict[tuple[str, str], float] = {}
    for title, one in audit.findings:
        pairs = one.tables.get("pairs")
        if one.trial != "agreement" or pairs is None or not {"pair", "measure", "value"} <= {*pairs.columns}:
            continue
        for row in pairs[pairs["measure"] == "tau"].to_dict(orient="records"):
            left, _, right = str(row["pair"]).partition(" – ")
            left = str(title) if left == one.settings.get("method") else left
            values[left, right] = float(row["value"])
            cells[left, right] = f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
    if not cells:
        return None
    found = [*dict.fromkeys(one for one, _ in cells)]
    down = sorted(found, key=lambda one: one not in audit.methods)
    across = [*dict.fromkeys(other for _, other in cells)]
    rows = [
        {"name": plain(one), "cells": [
            {"said": cells.get((one, other), "–"), "shade": _shade(values.get((one, other), 0.0), 1.0)}
            for other in across
        ]}
        for one in down
    ]  # fmt: skip
    return {"across": [*map(plain, across)], "rows": rows}


def heads(audit: Audit) -> list[dict[str, Any]]:
    """What each probe found out about heads and layers."""
    if audit.heads is None:
        return []
    papers = audit.about.get("references", {})
    return [
        {
            "name": plain(name), "about": plain(one.about), "sentence": plain(one.sentence),
            "cite": plain(papers.get(one.cite, one.cite)), "warnings": [*map(plain, one.warnings)],
            "charts": probe_charts(one),
            "tables": [_table(title, some, f"h{at}-{place}")
                       for place, (title, some) in enumerate(_probe_tables(one).items())],
        }
        for at, (name, one) in enumerate(audit.heads.probed.items())
    ]  # fmt: skip


def roles(audit: Audit) -> dict[str, Any] | None:
    """The heads that have a role."""
    found = None if audit.heads is None else audit.heads.by_role()
    return None if found is None or found.empty else _table("roles", found, "roles")


def alike(audit: Audit) -> dict[str, Any] | None:
    """How alike probes rank heads."""
    found = None if audit.heads is None else audit.heads.agreement()
    return None if found is None or found.empty else _table(ALIKE, found, "alike")


def _probe_tables(one: Probed) -> dict[str, pd.DataFrame]:
    """All numbers of a probe: of heads, and what else it found."""
    values = {} if one.values.empty else {"heads": one.values}
    return {**values, **{name: table for name, table in one.tables.items() if name != "parts"}}


def _said_of_heads(audit: Audit) -> dict[tuple[str, int], str]:
    """Of each head, by site and number, its roles and how important it is, in words."""
    if audit.heads is None:
        return {}
    said: dict[tuple[str, int], list[str]] = {}
    for row in audit.heads.roles().to_dict(orient="records"):
        said.setdefault((row["site"], row["head"]), []).append(f"{row['role']} ({row['value']:.2f})")
    importance = audit.heads.probed.get("importance")
    for row in () if importance is None else importance.values.to_dict(orient="records"):
        said.setdefault((row["site"], row["head"]), []).append(f"importance {row['value']:.2f}")
    return {head: plain(", ".join(some)) for head, some in said.items()}


def examples(audit: Audit, maps: Iterable[str]) -> list[dict[str, Any]]:
    """Texts to look at: shaded by each explanation, and the heads that looked at them."""
    known, said = {*maps}, _said_of_heads(audit)
    return [
        {
            "name": plain(one["example"]), "predicted": plain(one["predicted"]), "target": plain(one["target"]),
            "begins": plain(" ".join(_told(one)[:8])[:60]),
            "label": None if one.get("label") is None else plain(one["label"]),
            "value": None if one.get("value") is None else f"{one.get('of', 'probability')} {one['value']:.3f}",
            "refused": [(plain(title), plain(why)) for title, why in one.get("refused", {}).items()],
            "lines": [{"title": plain(title), "words": _shaded(_told(one), scores)}
                      for title, scores in one["scores"].items()],
            "panels": [_panel(panel, known, said) for panel in one.get("panels", ())],
        }
        for one in audit.exhibits
    ]  # fmt: skip


def appendix(audit: Audit) -> dict[str, Any]:
    """What is needed to do it again, and the tables as files."""
    times = {name: value for name, value in audit.times.items() if name != "command"}
    every = {name: audit.about.get(name, {}) for name in ("options", "model", "data", "versions")} | {"times": times}
    if "recipe" in audit.about:
        every["recipe"] = audit.about["recipe"]["recipe"]
    lists = [
        (heading, [(plain(name), setting(value)) for name, value in some.items()]) for heading, some in every.items()
    ]
    return {"command": plain(audit.times.get("command", "")), "lists": lists, "files": _files(audit)}


def _short(name: Any) -> str:
    """The last part of a path; other names as they are."""
    text = str(name or "?").rstrip("/")
    return plain(text if "(" in text else text.rsplit("/", 1)[-1] or "?")


def _gauge(one: Finding, title: str, drawn: dict[tuple[int, str], Any]) -> dict[str, Any]:
    """The statistic on its axis; what is about attention itself is the same for all explanations, and drawn once."""
    key = id(one), plain(title if "method" in one.settings else ATTENTION)
    if key not in drawn:
        drawn[key] = gauge(one, key[1])
    return {"trial": one.trial, "about": plain(one.about), "svg": drawn[key]}


def _finding(one: Finding, title: str | None, key: str) -> dict[str, Any]:
    drawn = (chart(one, which) for which in one.charts)
    held = {one.about: one.interval, **one.reference, "margin above what is asked for": one.margin}
    levels = [(plain(SHORT.get(name, name)), stated(level), level.n or "–") for name, level in held.items()]
    return {
        "key": key, "title": plain(title or ATTENTION), "outcome": one.outcome, "sentence": plain(one.sentence),
        "needed": one.needed, "levels": levels, "charts": [some for some in drawn if some],
        "tables": [_table(name, some, f"{key}-{at}") for at, (name, some) in enumerate(one.tables.items())],
        "settings": [(plain(name), setting(value)) for name, value in one.settings.items()],
        "warnings": [*map(plain, one.warnings)],
        "failed": [(plain(name), plain(why)) for name, why in one.failed.items()],
        "shown": [
            {
                "name": plain(some["example"]), "caption": plain(some["caption"]),
                "lines": [{"title": plain(of), "words": _shaded(some["words"], scores)}
                          for of, scores in some["maps"].items()],
            }
            for some in one.shown
        ],
    }  # fmt: skip


def _table(name: str, table: pd.DataFrame, key: str) -> dict[str, Any]:
    shown = readable(short(table.head(MOST_ROWS)))
    rows = [[number(cell) for cell in row] for row in shown.itertuples(index=False)]
    left_out = len(table) - len(shown)
    return {
        "name": plain(name),
        "key": key,
        "columns": [*map(plain, shown.columns)],
        "rows": rows,
        "left_out": left_out,
    }


def _shade(value: float, top: float) -> str:
    """A class of the style sheet: p0 to p10 for positive values, n1 to n10 for negative ones."""
    step = round(SHADES * min(abs(value) / top, 1.0)) if top and np.isfinite(value) else 0
    return f"{'n' if value < 0 and step else 'p'}{step}"


def _told(one: Mapping[str, Any]) -> list[str]:
    """The words of an example; of a table its columns with what they hold."""
    if "cells" not in one:
        return [*map(str, one["words"])]
    return [f"{name} = {cell}" for name, cell in zip(one["words"], one["cells"], strict=True)]


def _shaded(words: Sequence[str], scores: Sequence[float]) -> list[dict[str, str]]:
    numbers = [float("nan") if one is None else float(one) for one in scores]
    top = max((abs(one) for one in numbers if np.isfinite(one)), default=0.0)
    return [
        {"word": plain(word) if str(word).strip() else "␣", "said": small(one, top), "shade": _shade(one, top)}
        for word, one in zip(words, numbers, strict=True)
    ]


def _panel(panel: Mapping[str, Any], known: set[str], said: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """Its sites, the last first, and in each the heads, the one that moves the output most first, with their roles."""
    top = max((abs(one) for site in panel["effects"] for one in site), default=0.0)
    sites, first = [], 0
    for place, (name, effects) in enumerate(zip(panel["sites"], panel["effects"], strict=True)):
        heads = [
            {"head": at, "index": first + at, "said": small(one, top), "shade": _shade(one, top), "effect": one,
             "role": said.get((name, at), "")}
            for at, one in enumerate(effects)
        ]  # fmt: skip
        sites.append({"number": place, "name": plain(name), "heads": sorted(heads, key=lambda one: -one["effect"])})
        first += len(effects)
    return {
        "title": plain(panel["title"]), "sites": sites[::-1], "maps": panel["maps"] if panel["maps"] in known else "",
        "rows": [*map(plain, panel["rows"])], "keys": [*map(plain, panel["keys"])],
    }  # fmt: skip


def _files(audit: Audit) -> list[dict[str, str]]:
    """All tables as CSV in links of their own, and raw values, a row for each example, as far as there is room."""
    files, room = [], RAW
    for at, (probe, probed) in enumerate(audit.heads.probed.items() if audit.heads else ()):
        for place, (name, table) in enumerate(_probe_tables(probed).items()):
            files.append(_file(f"h{at}-{place}", ("heads", probe, name), table))
    if audit.heads and len(found := audit.heads.roles()):
        files.append(_file("roles", ("heads", "roles"), found))
    if audit.heads and len(found := audit.heads.agreement()):
        files.append(_file("alike", ("heads", "agreement"), found))
    for at, (title, one) in enumerate(audit.findings):
        for place, (name, table) in enumerate([*one.tables.items(), ("values", one.values)]):
            raw = table is one.values
            file = _file(f"f{at}-{place}", (one.trial, title, name), table)
            room -= len(file["link"]) if raw else 0
            files.append(file | ({"link": ""} if raw and room < 0 else {}))
    return files


def _file(key: str, parts: Iterable[str | None], table: pd.DataFrame) -> dict[str, str]:
    """A table as CSV in a link of its own."""
    named = [str(part) for part in parts if part]
    file = "-".join(re.sub(r"\W+", "_", part).strip("_") for part in named)
    link = "data:text/csv;charset=utf-8," + quote(_csv(table), safe=" ,;:/()[]{}=+*'!|$@?")
    return {"key": key, "file": f"{plain(file)}.csv", "link": link, "said": " · ".join(map(plain, named)),
            "rows": f"{len(table):,}"}  # fmt: skip


def _csv(table: pd.DataFrame) -> str:
    """Numbers to six digits. What a spreadsheet would take for a formula is quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_cell(name) for name in table.columns])
    writer.writerows([[_cell(cell) for cell in row] for row in table.itertuples(index=False)])
    return out.getvalue()


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}"
    text = plain(value)
    return f"'{text}" if isinstance(value, str) and text[:1] in ("=", "+", "-", "@") else text
