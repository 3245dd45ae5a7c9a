"""What an audit found, as it is kept: findings, refusals and examples to look at. Knows no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regard.errors import InputError, OptionError
from regard.finding import Finding, finding_from
from regard.jobs.store import read_run
from regard.judging import UNTESTED, Verdict
from regard.measures import Interval
from regard.probed import Heads, heads_from

SUITE = "regard.audit/1"
NOWHERE = Interval(math.nan, math.nan, math.nan, 0, 0)


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """The result of `regard.audit`.

    Args:
        about: what was audited, and how: "model", "data", "kind", "options", "versions", with their fingerprints; and
            "references": by key of references.bib, the text of the citation.
        methods: the explanations on trial, by title, as (name, options); the first is the one that is judged first.
        findings: with the title of the explanation that was judged, or None: attention itself.
        refused: what could not run: "trial", "method" (a title, or None) and "why".
        exhibits: examples to look at; see docs/architecture.md.
        maps: packed attention of the exhibits.
        times: when it began, how long it took, and the command; not part of what is compared between runs.
        heads: what its heads and layers do; None: that was not asked, or could not be told.
    """

    about: Mapping[str, Any]
    methods: Mapping[str, tuple[str, Mapping[str, Any]]]
    findings: tuple[tuple[str | None, Finding], ...]
    refused: tuple[Mapping[str, Any], ...] = ()
    exhibits: tuple[Mapping[str, Any], ...] = ()
    maps: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    times: Mapping[str, Any] = field(default_factory=dict)
    heads: Heads | None = None

    def __repr__(self) -> str:
        return f"Audit({self.about['model']['name']}: {len(self.findings)} findings; {self.verdict()!r})"

    def verdict(self, method: str | None = None) -> Verdict:
        """The scorecard of an explanation: of its own trials and of those about attention itself."""
        title = next(iter(self.methods)) if method is None else method
        if title not in self.methods:
            raise OptionError(f"method={method!r} was not on trial. There are {', '.join(self.methods)}.")
        own = self.methods[title][0] == "raw"  # erasing weights tells about weights, not about what is made of them
        return Verdict({
            one.trial: one
            for by, one in self.findings
            if by == title or (by is None and (own or one.criterion != "causal"))
        })  # fmt: skip

    @property
    def frame(self) -> pd.DataFrame:
        """The scorecards of all explanations, one below the other."""
        cards = [self.verdict(title).frame.assign(method=title) for title in self.methods]
        whole = pd.concat(cards, ignore_index=True)
        return whole[["method", *(name for name in whole.columns if name != "method")]]

    def to_html(self, path: str | Path) -> Path:
        """Write the report: one page, self-contained."""
        from regard.report import page

        path = Path(path)
        if path.suffix != ".html":
            raise OptionError(f"path={str(path)!r} must end in .html.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(self), "utf-8")
        return path

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without the maps."""
        return {
            "suite": SUITE, "about": self.about,
            "methods": {title: [name, dict(options)] for title, (name, options) in self.methods.items()},
            "verdicts": {title: self.verdict(title).to_dict() for title in self.methods},
            "findings": [{"method": title, "finding": one.to_dict()} for title, one in self.findings],
            "refused": [*self.refused], "exhibits": [*self.exhibits],
            "heads": None if self.heads is None else self.heads.to_dict(),
        }  # fmt: skip

    @classmethod
    def from_dict(
        cls, saved: Mapping[str, Any], maps: Mapping[str, NDArray[np.uint8]], times: Mapping[str, Any]
    ) -> Audit:
        """The audit whose `to_dict` this is."""
        methods = {title: (name, options) for title, (name, options) in saved["methods"].items()}
        findings = tuple((one["method"], finding_from(one["finding"])) for one in saved["findings"])
        heads = None if saved.get("heads") is None else heads_from(saved["heads"])
        return cls(
            saved["about"], methods, findings, tuple(saved["refused"]), tuple(saved["exhibits"]), dict(maps), times,
            heads,
        )  # fmt: skip


def load_audit(folder: str | Path) -> Audit:
    """Read a run that is done: the folder that was given as ``out``."""
    run = read_run(folder)
    if run.findings.get("suite") != SUITE:
        raise InputError(f"run={str(folder)!r} holds no audit of this version ({SUITE}). Run it again.")
    maps = {name: array for some in run.arrays.values() for name, array in some.items()}
    return Audit.from_dict(run.findings, maps, {**run.times, "command": run.manifest.get("command", "")})


def differences(one: Audit, other: Audit) -> pd.DataFrame:
    """What changed between two audits: a row for each explanation, criterion and trial that both, or one, have.

    Values have their intervals: "value_before", "value_before_low", "value_before_high". "difference" is after − before
    with an interval as for independent samples: half-widths add up as √(a² + b²). For the same examples it is wider
    than it need be. "differs" says whether it excludes 0; None: there is none.
    """
    rows = []
    for title in dict.fromkeys([*one.methods, *other.methods]):
        # What is about attention itself both may have, also where only one has tried this explanation.
        found = [{its.trial: its for by, its in audit.findings if by in (None, title)} for audit in (one, other)]
        criteria = one.verdict().criteria
        filled = {name for criterion in criteria for name in criterion.trials}
        every = dict.fromkeys([*found[0], *found[1]])
        pairs = [(criterion.name, name) for criterion in criteria for name in criterion.trials if name in every]
        for criterion, name in [*pairs, *(("", name) for name in every if name not in filled)]:
            both = [some.get(name) for some in found]
            outcomes = [UNTESTED if finding is None else finding.outcome for finding in both]
            values = [NOWHERE if finding is None else finding.interval for finding in both]
            moved = _moved(*values)
            rows.append({
                "method": title, "criterion": criterion, "trial": name, "before": outcomes[0], "after": outcomes[1],
                **values[0].cells("value_before"), **values[1].cells("value_after"), **moved.cells("difference"),
                "differs": None if math.isnan(moved.value) else moved.low > 0 or moved.high < 0,
            })  # fmt: skip
    return pd.DataFrame(rows)


def _moved(before: Interval, after: Interval) -> Interval:
    value = after.value - before.value
    half = math.hypot(*((one.high - one.low) / 2 for one in (before, after)))
    return Interval(value, value - half, value + half, min(before.n, after.n), 0)


def refusals(refused: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What could not run, and why; once, where the reason is the same for several trials or explanations."""
    of: dict[str, list[tuple[str, Any]]] = {}
    for one in refused:
        of.setdefault(one["why"], []).append((one["trial"], one["method"]))
    return [
        {"trial": ", ".join(dict.fromkeys(trial for trial, _ in some)), "why": why,
         "method": ", ".join(dict.fromkeys(method for _, method in some if isinstance(method, str)))}
        for why, some in of.items()
    ]  # fmt: skip


def title_of(name: str, options: Mapping[str, Any]) -> str:
    """What a method is called beside others: its name, and the options that were given."""
    return name + (f"({', '.join(f'{key}={value}' for key, value in options.items())})" if options else "")


def cited(keys: Collection[str]) -> dict[str, str]:
    """By key of references.bib: authors, year, title and where it appeared."""
    entries = re.findall(
        r"@\w+\{(\w+),(.*?)\n\}", files("regard").joinpath("references.bib").read_text("utf-8"), re.DOTALL
    )
    known = {key: dict(re.findall(r"(\w+)\s*=\s*\{(.*)\}", body)) for key, body in entries}
    return {key: _citation(known[key]) for key in sorted(keys) if key in known}


def _citation(entry: Mapping[str, str]) -> str:
    people = [name.split(",")[0].strip("{} ") for name in entry["author"].split(" and ")]
    who = people[0] + (f" & {people[1]}" if len(people) == 2 else " et al." if len(people) > 2 else "")
    where = next((entry[name] for name in ("booktitle", "journal", "publisher", "howpublished") if name in entry), "")
    return re.sub(r"[{}]", "", f"{who} ({entry['year']}). {entry['title']}. {where}".rstrip(". ") + ".")
