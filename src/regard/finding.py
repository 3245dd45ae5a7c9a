"""What came of a trial: a statistic with its interval, what it is held against, and the raw values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from regard import draw
from regard.errors import InputError, OptionError, choose
from regard.measures import Interval

SUITE = "regard.finding/1"
MOST_ROWS = 50  # of a table on a page
SAID = {True: "supported", False: "not supported", None: "inconclusive"}


@dataclass(frozen=True, eq=False, repr=False)
class Finding:
    """The result of one trial. Made by `regard.trial`.

    Args:
        trial: its name.
        about: what the statistic is, in words.
        interval: the statistic, the ends of its 95 % interval, and over how many examples.
        margin: how far the statistic is above what the claim asks for, with its interval: above 0 the claim is
            supported, below 0 it is not, and around 0 the examples do not tell.
        supported: True, False, or None: inconclusive.
        sentence: what was done and what came of it.
        values: the raw values, a row for each example.
        reference: by name, what chance, a random explanation or a ceiling looks like.
        tables: what else was found, by name.
        charts: by name, how `plot` draws a table: its kind, the table, and which columns it shows.
        shown: examples to look at: their words, and by name the maps over them.
        settings: everything that was asked for, and which attention was edited.
        failed: by example, why it could not be tried.
        warnings: what to know before believing it.
        settles: more examples would settle an inconclusive claim; not where it is for another reason.
        claim: the sentence that was on trial.
        cite: a key of references.bib.
        criterion: the row of the verdict that it fills; "": none.
    """

    trial: str
    about: str
    interval: Interval
    margin: Interval
    supported: bool | None
    sentence: str
    values: pd.DataFrame
    reference: Mapping[str, Interval] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    charts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shown: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    settles: bool = True
    claim: str = ""
    cite: str = ""
    criterion: str = ""

    def __repr__(self) -> str:
        return f"Finding({self.trial}: {self.outcome}; {self.about} {said(self.interval)})"

    @property
    def statistic(self) -> float:
        """The number that stands for all examples."""
        return self.interval.value

    @property
    def outcome(self) -> str:
        """ "supported", "not supported" or "inconclusive"."""
        return SAID[self.supported]

    @property
    def needed(self) -> int | None:
        """How many examples would settle an inconclusive claim, if they are like these; None: no number would.

        The width of an interval goes with 1/√n: it must be narrower than the distance from 0.
        """
        if self.supported is not None or not self.settles or not self.margin.value or math.isnan(self.margin.value):
            return None
        half = (self.margin.high - self.margin.low) / 2
        wanted = math.ceil(self.margin.n * (half / abs(self.margin.value)) ** 2)
        return wanted if self.margin.n < wanted < 1e7 else None

    def plot(self, which: str | None = None) -> draw.Picture:
        """A picture: one of `charts` by name, or the statistic beside its references."""
        if which is None and self.charts:
            which = next(iter(self.charts))
        if which is None or (which == "levels" and "levels" not in self.charts):
            every = {self.about: self.interval, **self.reference}
            levels = {name: one for name, one in every.items() if not math.isnan(one.value)}
            ends = [[getattr(one, end) for one in levels.values()] for end in ("value", "low", "high")]
            if not levels:
                raise OptionError(f"there is nothing to draw: {self.sentence}")
            return draw.intervals([*levels], *ends, title=self.trial, caption=self.claim)
        choose("which", which, (*self.charts, "levels"))
        return charted(which, self.charts[which], self.tables, self.values)

    def of_columns(self) -> Finding:
        """The same, said of a table."""
        charts = {
            name: {**chart, "caption": of_columns(chart["caption"])} if "caption" in chart else chart
            for name, chart in self.charts.items()
        }
        return replace(self, claim=of_columns(self.claim), sentence=of_columns(self.sentence), charts=charts)

    def to_html(self, path: str | Path) -> Path:
        """Write a page of its own: the sentence, the pictures, the tables and examples."""
        path = Path(path)
        if path.suffix != ".html":
            raise OptionError(f"path={str(path)!r} must end in .html.")
        both = {self.about: self.interval, **self.reference}
        levels = [{"": name, "value [95 % interval]": said(one)} for name, one in both.items()]
        more = [f"About {self.needed} examples like these would settle it."] if self.needed else []
        parts: list[tuple[str, Any]] = [(self.outcome, [self.sentence, *more, pd.DataFrame(levels)])]
        parts += [("Pictures", [self.plot(name) for name in self.charts])] if self.charts else []
        parts += [(name, [readable(table.head(MOST_ROWS))]) for name, table in self.tables.items()]
        for one in self.shown:
            lines = [
                draw.text_line(one["words"], scores, title=name, caption=one["caption"])
                for name, scores in one["maps"].items()
            ]
            parts.append((f"Example {one['example']}", lines))
        if self.warnings or self.failed:
            troubles = [f"Example {name}: {why}" for name, why in self.failed.items()]
            parts.append(("Before you believe it", [*self.warnings, *troubles]))
        asked = [{"setting": name, "value": json.dumps(as_plain(one))} for name, one in self.settings.items()]
        parts.append(("Settings", [pd.DataFrame(asked)] if asked else []))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw.page(f"Trial: {self.trial}", self.claim, parts), "utf-8")
        return path

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is undefined is null."""
        plain = {one.name: as_plain(getattr(self, one.name)) for one in fields(self)}
        return {"suite": SUITE, "outcome": self.outcome, "needed": self.needed, **plain}

    def save(self, path: str | Path) -> Path:
        """Write everything into a .json file, which `load_finding` reads."""
        path = Path(path)
        if path.suffix != ".json":
            raise OptionError(f"path={str(path)!r} must end in .json.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), ensure_ascii=False), "utf-8")
        return path


def charted(
    title: str, chart: Mapping[str, Any], tables: Mapping[str, pd.DataFrame], values: pd.DataFrame
) -> draw.Picture:
    """What a record says how to draw: the kind of picture, the table that it shows, and which of its columns."""
    options = {"title": title, "caption": "", **chart}
    table = options.pop("table", None)
    picture: draw.Picture = getattr(draw, options.pop("kind"))(values if table is None else tables[table], **options)
    return picture


def load_finding(path: str | Path) -> Finding:
    """Read what `Finding.save` wrote."""
    try:
        saved = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(f"path={str(path)!r} holds no finding: {problem}.") from None
    if not isinstance(saved, dict) or saved.get("suite") != SUITE:
        raise InputError(f"path={str(path)!r} holds no finding of this version ({SUITE}). Run the trial again.")
    return finding_from(saved)


def finding_from(saved: Mapping[str, Any]) -> Finding:
    """The finding whose `to_dict` this is."""
    given = {one.name: saved[one.name] for one in fields(Finding)}
    for name in ("interval", "margin"):
        given[name] = _interval(given[name])
    given["reference"] = {name: _interval(one) for name, one in given["reference"].items()}
    given["values"] = as_frame(given["values"])
    given["tables"] = {name: as_frame(one) for name, one in given["tables"].items()}
    given |= {name: tuple(given[name]) for name in ("shown", "warnings")}
    return Finding(**given)


def of_columns(text: str) -> str:
    """A sentence about words, said of a table: columns are to a row what words are to a text."""
    return re.sub(r"\bword(s?)\b", r"column\1", text)


def said(interval: Interval) -> str:
    """A value with its interval, as it is read; a number that is no estimate has none."""
    if not interval.n and interval.low == interval.high:
        return f"{interval.value:.3g}"
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table with "value [low, high]" in one column, where it has three of them."""
    shown = table.copy()
    for name in [one for one in table.columns if {f"{one}_low", f"{one}_high"} <= {*table.columns}]:
        ends = table[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
        shown[name] = ["{:.3f} [{:.3f}, {:.3f}]".format(*row) if pd.notna(row[0]) else "–" for row in ends]
        shown = shown.drop(columns=[f"{name}_low", f"{name}_high"])
    return shown


def level(value: float) -> Interval:
    """A number that is no estimate, where an interval is asked for."""
    return Interval(float(value), float(value), float(value), 0, 0)


def above(interval: Interval, least: float) -> Interval:
    """How far an interval lies above a number."""
    ends = (interval.value - least, interval.low - least, interval.high - least)
    return Interval(*ends, interval.n, interval.undefined)


def below(interval: Interval, most: float) -> Interval:
    """How far an interval lies below a number."""
    ends = (most - interval.value, most - interval.high, most - interval.low)
    return Interval(*ends, interval.n, interval.undefined)


def holds(margin: Interval) -> bool | None:
    """Whether a margin is above 0, below 0, or neither."""
    return True if margin.low > 0 else False if margin.high < 0 else None


def as_plain(value: Any) -> Any:
    """Tables as columns and rows, intervals and numpy values as plain ones, NaN as null."""
    if isinstance(value, pd.DataFrame):
        rows = value.to_numpy(dtype=object).tolist()
        return {"columns": [*value.columns], "rows": as_plain(rows)}
    if isinstance(value, Interval):
        return as_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [as_plain(one) for one in value]
    if isinstance(value, np.generic):
        return as_plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _interval(saved: Mapping[str, Any]) -> Interval:
    value, low, high = (math.nan if saved[name] is None else saved[name] for name in ("value", "low", "high"))
    return Interval(value, low, high, saved["n"], saved["undefined"])


def as_frame(saved: Mapping[str, Any]) -> pd.DataFrame:
    """The table that `as_plain` made columns and rows of."""
    return pd.DataFrame(saved["rows"], columns=saved["columns"])
