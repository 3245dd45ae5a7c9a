"""Examples to look at: what each explanation says of their words, and where each head looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.attention.sites import Site
from regard.cases import Case, Part
from regard.errors import RegardError
from regard.explaining import Job
from regard.profiles import each_head
from regard.report.packing import pack
from regard.types import Features

LONGEST = 256  # tokens; the maps of longer sequences are left out, and that is said
TITLES = {"self": "self-attention", "pool": "attention", "encoder": "encoder", "decoder": "decoder",
          "cross": "cross-attention"}  # fmt: skip
REDACTED = "▮"
TEXTS = ("words", "rows", "keys")  # where texts of examples stand; of tables these are names of columns
CELLS = "cells"


def exhibit(case: Case, jobs: Mapping[str, Job], number: int) -> tuple[dict[str, Any], dict[str, NDArray[np.uint8]]]:
    """An example to look at, and its packed maps by name.

    Args:
        case: what is on trial.
        jobs: by title, the explanations.
        number: which of its examples.
    """
    part = Part(case, [number])
    scores: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for title, job in jobs.items():
        try:
            scores[title] = part.scores({title: job})[title][0].tolist()
        except RegardError as problem:
            refused[title] = str(problem)
    label, score = case.examples[number].label, part.trace.score
    panels, maps = _panels(part, number)
    shown = {
        "example": part.ids[0], "predicted": part.predicted[0], "label": None if label is None else str(label),
        "value": None if score is None else float(score.values[0]), "of": part.trace.of,
        "target": "" if score is None else score.names[0], "words": [*part.features[0].words], "scores": scores,
        "refused": refused, "panels": panels,
    }  # fmt: skip
    given = case.examples[number].input
    if isinstance(given, Mapping):
        shown[CELLS] = [_cell(given.get(name)) for name in part.features[0].words]
    return shown, maps


def redacted(found: Any, *, table: bool = False) -> Any:
    """The same without words: all that is text of an example, wherever it stands; of a table without its cells."""
    if isinstance(found, Mapping):
        where = (CELLS,) if table else TEXTS
        hidden: dict[str, Any] = {
            name: [REDACTED] * len(one) if name in where and _texts(one) else redacted(one, table=table)
            for name, one in found.items()
        }
        if "failed" in hidden:  # messages may echo what they are about
            hidden["failed"] = {name: str(why).split(":")[0] for name, why in hidden["failed"].items()}
        return hidden
    return [redacted(one, table=table) for one in found] if isinstance(found, list) else found


def _cell(value: Any) -> str:
    """What a cell of a table holds, for people."""
    if value is None or value != value:
        return "missing"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _panels(part: Part, number: int) -> tuple[list[dict[str, Any]], dict[str, NDArray[np.uint8]]]:
    """Sites of one kind between the same tokens are a panel; with each head, how far the output moves without it."""
    groups: dict[tuple[str, int, int], list[Site]] = {}
    for site in part.trace.sites:
        if site.kind in TITLES:
            groups.setdefault((site.kind, *site.shape[2:]), []).append(site)
    rerun = part.rerun()
    panels: list[dict[str, Any]] = []
    maps: dict[str, NDArray[np.uint8]] = {}
    for (kind, rows, keys), sites in groups.items():
        over, under = (_features(part, site_rows) for site_rows in (keys, rows))
        if over is None or max(rows, keys) > LONGEST:
            continue
        queries = [*under.tokens] if under is not None else ["readout"] * rows
        places = [*under.rows] if under is not None else [*range(rows)]
        # site head query key, without padding
        weights = [site.weights()[0][:, places][:, :, [*over.rows]].double().numpy(force=True) for site in sites]
        effects = [part.moved(each_head(rerun, rerun.spots[site.index])[:-1])[:, 0].tolist() for site in sites]
        name = f"{number}/{len(panels)}"
        maps[name] = pack(np.concatenate(weights))
        title = TITLES[kind] + ", only the row that is read" * (kind == "self" and rows == 1 < keys)
        panels.append({
            "title": title, "rows": queries, "keys": [*over.tokens], "sites": [site.name for site in sites],
            "effects": effects, "maps": name,
        })  # fmt: skip
    return panels, maps


def _features(part: Part, rows: int) -> Features | None:
    """The tokens of the sequence that has so many rows."""
    found = part.batch.sequence_of(rows)
    return None if found is None else found.features[0]
