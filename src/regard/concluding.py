"""From what units of an audit found to its findings: everything here reads the store, and no model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from regard.audited import SUITE, cited
from regard.cases import Part, Result
from regard.errors import InputError, RegardError, WorkerDied, WorkerDiffers
from regard.exhibits import redacted
from regard.finding import Finding
from regard.jobs.plan import EXHIBIT, HEADS, Unit
from regard.jobs.store import Store
from regard.progress import Counter
from regard.training import threaded
from regard.trying import trains

MOST_VALUES, SOME_VALUES = 5_000, 2_000  # examples whose values are kept with a finding; and if there are more
log = logging.getLogger("regard")


def concluded(bench: Any, store: Store, failed: Mapping[str, str]) -> dict[str, Any]:
    """From the records of all units to findings, by the same code that a single trial runs."""
    ready, refused = bench.called
    units: dict[Any, Unit] = {(unit.task, unit.method, unit.places): unit for unit in bench.units}
    findings: list[dict[str, Any]] = []
    refused = list(refused)
    trained = _trained(bench, refused)
    with Counter("judging", len(ready)) as counter:
        for (name, title), one in ready.items():

            def hand(part: Part, _: object, name: str = name, title: str | None = title) -> Result:
                wanted = units[name, title, tuple(part.places)].id
                if wanted in failed:
                    raise InputError(failed[wanted])
                result: Result = store.record(wanted)["found"]
                if "refused" in result:
                    raise InputError(result["refused"])
                return result

            try:
                if name == "adversarial" and ("seeds", None) in trained:
                    one = one.calibrated(trained["seeds", None])
                if not trains(name):
                    findings.append({"method": title, "finding": _short(one.finding(hand), bench.seed).to_dict()})
                elif (name, title) in trained:
                    findings.append({"method": title, "finding": trained[name, title].to_dict()})
            except RegardError as problem:
                refused.append({"trial": name, "method": title, "why": str(problem)})
            counter.advance()
    others = [unit for unit in bench.units if unit.task in (EXHIBIT, HEADS)]
    refused += [{"trial": unit.task, "method": None, "why": failed[unit.id]} for unit in others if unit.id in failed]
    exhibits, probed = (
        [store.record(unit.id)["found"] for unit in others if unit.task == task and unit.id not in failed]
        for task in (EXHIBIT, HEADS)
    )
    refused += [{"trial": HEADS, "method": None, **one} for one in probed if "why" in one]
    heads = next((one for one in probed if "probed" in one), None)
    asked = heads["probed"] if heads else {}
    papers = cited({one["finding"]["cite"] for one in findings} | {one["cite"] for one in asked.values()})
    about = {**bench.identity, "references": papers, "kind": bench.drawn.kind}
    methods = bench.identity["options"]["methods"]
    kept = {"suite": SUITE, "about": about, "methods": methods, "findings": findings, "refused": refused,
            "exhibits": exhibits, "heads": heads}  # fmt: skip
    return kept if not bench.redact else {**kept, "findings": redacted(findings, table=bench.drawn.kind == "table")}


def _short(finding: Finding, seed: int) -> Finding:
    """The same; of very many examples with the raw values of some. Those of all are in the records of the run."""
    count = len(finding.values)
    if count <= MOST_VALUES:
        return finding
    some = np.sort(np.random.default_rng(seed).permutation(count)[:SOME_VALUES])
    note = f"values holds {SOME_VALUES:,} of {count:,} examples, drawn by lot; all numbers are of all of them."
    return replace(finding, values=finding.values.iloc[some], warnings=(*finding.warnings, note))


def _trained(bench: Any, refused: list[dict[str, Any]]) -> dict[tuple[str, str | None], Finding]:
    """The findings of trials that train models; each model is trained once, and kept beside the run."""
    made: dict[tuple[str, str | None], Finding] = {}
    for (name, title), one in bench.called[0].items():
        if trains(name):
            try:
                with threaded(bench.threads):
                    made[name, title] = one.finding()
            except (WorkerDied, WorkerDiffers):  # nobody is left to train the others
                raise
            except Exception as problem:  # whatever it is: the other trials go on
                log.debug("%s", name, exc_info=True)
                kind = "" if isinstance(problem, RegardError) else f"{type(problem).__name__}: "
                refused.append({"trial": name, "method": title, "why": f"{kind}{problem}"})
    return made
