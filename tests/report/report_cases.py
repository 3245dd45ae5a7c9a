"""Audits for the tests of the page: examples of a model with two kinds of attention, and texts of strangers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from regard.audited import Audit
from regard.report.packing import pack

TEXTS = [
    "so so good so film",
    "the plot is awful",
    "a dull film and so",
    "superb and moving film",
    "so bad the plot",
] * 2
WORDS = [["so", "good", "שלום", "film"], ["電影", "很", "好"], ["👩‍👩‍👧", "is", "مرحبا", "x" * 60]]
METHODS = {"raw": ("raw", {}), "gradient": ("gradient", {})}
ASKED = {
    "agreement": {},
    "comprehensiveness": {},
    "erasure": {},
    "permutation": {"n": 5},
    "uniform": {},
    "adversarial": {"steps": 3},
}


def exhibit(number: int, words: list[str]) -> tuple[dict, dict]:
    """An example with two panels, as an encoder–decoder has them; and its maps."""
    lots = np.random.default_rng(number)
    rows, keys = ["<s>", *words], [*words, "</s>"]
    panels, maps = [], {}
    for place, (title, down, across) in enumerate([("encoder", keys, keys), ("cross-attention", rows, keys)]):
        weights = lots.dirichlet([0.3] * len(across), size=(6, len(down)))
        maps[f"{number}/{place}"] = pack(weights)
        effects = lots.random((2, 3)) / 10
        sites = [f"{title}.layer.{at}" for at in range(2)]
        panels.append({"title": title, "rows": down, "keys": across, "sites": sites, "effects": effects.tolist(),
                       "maps": f"{number}/{place}"})  # fmt: skip
    scores = {title: (lots.random(len(words)) - 0.3).tolist() for title in METHODS}
    made = {"example": f"text-{number}", "predicted": "positive", "label": "negative", "value": 0.75, "target": "positive",
            "words": words, "scores": scores, "panels": panels}  # fmt: skip
    return made, maps


def with_texts(audit: Audit, texts: list[str]) -> Audit:
    """The audit with these texts wherever texts of others stand: names, labels, words, columns, captions, reasons."""
    some = iter(texts * 100)

    def table(old: pd.DataFrame) -> pd.DataFrame:
        names = {name: next(some) for name in old.columns[:2]}
        new = old.rename(columns=names)
        return new.assign(**{names[old.columns[0]]: [next(some) for _ in range(len(old))]}) if names else new

    methods = {f"{next(some)} {at}": one for at, one in enumerate(audit.methods.values())}
    titles = dict(zip(audit.methods, methods, strict=True))
    findings = []
    for title, one in audit.findings:
        classes = {label: next(some) for label in one.values["predicted"].unique()}
        new = replace(
            one, about=next(some), sentence=next(some), claim=next(some), warnings=(next(some),),
            failed={next(some): next(some)}, settings={**one.settings, next(some): next(some)},
            values=one.values.assign(predicted=one.values["predicted"].map(classes)),
            tables={name: table(old) if not any(c.get("table") == name for c in one.charts.values()) else old for name, old in one.tables.items()}
            | {next(some): pd.DataFrame({next(some): [next(some)]})},
            reference={**one.reference, next(some): one.interval},
            shown=tuple({**old, "words": [next(some) for _ in old["words"]], "caption": next(some), "example": next(some),
                         "maps": {next(some): numbers for numbers in old["maps"].values()}} for old in one.shown),
        )  # fmt: skip
        findings.append((title and titles[title], new))
    exhibits = [
        {**one, "example": next(some), "predicted": next(some), "label": next(some), "target": next(some),
         "words": [next(some) for _ in one["words"]],
         "scores": {titles[title]: scores for title, scores in one["scores"].items()},
         "panels": [{**panel, "title": next(some), "rows": [next(some) for _ in panel["rows"]],
                     "keys": [next(some) for _ in panel["keys"]], "sites": [next(some) for _ in panel["sites"]]}
                    for panel in one["panels"]]}
        for one in audit.exhibits
    ]  # fmt: skip
    scores = {title: [0.5] * len(texts) for title in methods}
    exhibits.append({**audit.exhibits[0], "words": texts, "scores": scores, "panels": []})
    about = {
        "model": {"class": next(some), "name": next(some), next(some): next(some)}, "data": {"source": next(some), "of": 20},
        "options": {"examples": 10, next(some): next(some)}, "versions": {next(some): next(some)},
        "references": {"jain2019attention": next(some)},
    }  # fmt: skip
    refused = ({"trial": next(some), "method": next(some), "why": next(some)},)
    return Audit(about, methods, tuple(findings), refused, tuple(exhibits), audit.maps, {"command": next(some)})
