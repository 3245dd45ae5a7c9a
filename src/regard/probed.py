"""What probes found: a number for each head of each site, with what else was found out about heads and layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regard import draw
from regard.errors import InputError, OptionError, choose, must_know
from regard.finding import MOST_ROWS, as_frame, as_plain, charted, readable
from regard.measures.ranks import spearman_drawn

SUITE = "regard.heads/1"
NO_ROLE = ("heterogeneous",)  # words that say of a head that it has none
HEAD = ["layer", "site", "kind", "head"]  # what a head is known by
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Probed:
    """What one probe found.

    Args:
        probe: its name.
        about: what the number is, in words.
        values: a row for each head: layer, site, kind, head, value, and where it is a mean low and high, the ends of
            its 95 % interval; "label" where a head has a word of its own. Empty where it is not about single heads.
        sentence: what came of it.
        tables: what else was found, by name.
        charts: by name, how `Heads.plot` draws a table: its kind, the table, and which columns it shows.
        settings: everything that was asked for.
        warnings: what to know before believing it.
        cite: a key of references.bib.
        drawn: ``(1 + draw, head)``: the numbers, and then those of examples that were drawn again; not kept in files.
    """

    probe: str
    about: str
    values: pd.DataFrame
    sentence: str = ""
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    charts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    cite: str = ""
    drawn: Array | None = None

    def __repr__(self) -> str:
        return f"Probed({self.probe}: {self.sentence or self.about})"

    @property
    def has_grid(self) -> bool:
        """Whether some head has a number."""
        return "value" in self.values and bool(self.values["value"].notna().any())

    def plot(self, which: str | None = None) -> draw.Picture:
        """A grid of layers × heads, or one of `charts` by name; without a name the grid, or else the first chart."""
        if which is None and self.has_grid:
            shown = self.values.rename(columns={"value": self.about})
            words = shown["label"].mask(shown["label"].isin(NO_ROLE), "") if "label" in shown else pd.Series(dtype=str)
            word = {"label": "label"} if words.any() else {}
            return draw.heads(
                shown.assign(label=words), layer="layer", head="head", value=self.about, title=self.probe,
                caption=self.sentence, **word,
            )  # fmt: skip
        if which is None and not self.charts:
            raise OptionError(
                f"{self.probe} has nothing to draw: {self.sentence or 'it is defined for no head of this model.'}"
            )
        which = which or next(iter(self.charts))
        choose("which", which, tuple(self.charts))
        return charted(which, self.charts[which], self.tables, self.values)


@dataclass(frozen=True, eq=False, repr=False)
class Heads:
    """What was found out about the heads and layers of a model. Made by `regard.heads`.

    Args:
        index: a row for each head: layer (the place of its site in the order of execution), site, kind, head.
        probed: by name what each probe found.
        refused: by name why a probe could not be served.
        settings: what was asked for, of which model and data.
        alike: what `agreement` says where draws are not kept: from a file.
    """

    index: pd.DataFrame
    probed: Mapping[str, Probed]
    refused: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    alike: pd.DataFrame | None = None

    def __repr__(self) -> str:
        refused = f"; not served: {', '.join(self.refused)}" if self.refused else ""
        sites = self.index["layer"].nunique()
        return f"Heads({len(self.index)} heads of {sites} sites by {', '.join(self.probed)}{refused})"

    def __getitem__(self, probe: str) -> Probed:
        must_know("probe", probe, self.probed)
        return self.probed[probe]

    def frame(self) -> pd.DataFrame:
        """A row for each head: layer, site, kind, head; of each probe its number, interval and word."""
        found = self.index.copy()
        for name, one in self.probed.items():
            columns = [column for column in ("value", "low", "high", "label") if column in one.values]
            if columns:
                names = {"value": name, "low": f"{name}_low", "high": f"{name}_high", "label": f"{name}_label"}
                found = found.merge(
                    one.values[["layer", "head", *columns]].rename(columns=names), "left", ["layer", "head"]
                )
        return found

    def roles(self) -> pd.DataFrame:
        """The heads that some probe has a word for: layer, site, head, probe, role, value."""
        some = [
            one.values[~one.values["label"].isin(["", *NO_ROLE])].assign(probe=name).rename(columns={"label": "role"})
            for name, one in self.probed.items() if "label" in one.values
        ]  # fmt: skip
        columns = ["layer", "site", "head", "probe", "role", "value"]
        every = pd.concat([one[columns] for one in some]) if some else pd.DataFrame(columns=columns)
        return every.sort_values(["layer", "head"], kind="stable").reset_index(drop=True)

    def by_role(self) -> pd.DataFrame:
        """The same to be read: a row for each role, and its heads as layer.head (number), the largest first."""
        every = self.roles().sort_values("value", ascending=False, kind="stable")
        rows = [
            {"role": role, "probe": probe, "heads": len(some), "layer.head (number)": ", ".join(
                f"{one.layer}.{one.head} ({one.value:.2f})" for one in some.itertuples()
            )}
            for (probe, role), some in every.groupby(["probe", "role"], sort=False)
        ]  # fmt: skip
        found = pd.DataFrame(rows, columns=["role", "probe", "heads", "layer.head (number)"])
        order = {name: place for place, name in enumerate(self.probed)}
        return found.sort_values("probe", key=lambda names: names.map(order), kind="stable", ignore_index=True)

    def agreement(self) -> pd.DataFrame:
        """Spearman's ρ over heads between each two probes that were drawn on the same examples, with its interval."""
        if self.alike is not None:
            return self.alike
        numbers = {name: one.drawn for name, one in self.probed.items() if one.drawn is not None}
        rows = []
        for one, other in combinations(numbers, 2):
            x, y = numbers[one], numbers[other]
            if x is None or y is None or len(x) != len(y):
                continue
            both = np.isfinite(x[0]) & np.isfinite(y[0])
            if both.sum() > 2 and np.ptp(x[0, both]) > 0 and np.ptp(y[0, both]) > 0:
                rows.append(
                    {"probe": one, "other": other, **spearman_drawn(x[:, both], y[:, both]), "heads": int(both.sum())}
                )
        return pd.DataFrame(rows, columns=["probe", "other", "spearman", "low", "high", "heads"])

    def plot(self, probe: str | None = None, which: str | None = None) -> draw.Picture:
        """The picture of a probe: layers × heads, or one of its charts by name. None: the first probe."""
        return self[next(iter(self.probed)) if probe is None else probe].plot(which)

    def to_html(self, path: str | Path) -> Path:
        """Write a page: what each probe found, its pictures and tables."""
        path = Path(path)
        if path.suffix != ".html":
            raise OptionError(f"path={str(path)!r} must end in .html.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw.page("Heads and layers", self.note, self.sections()), "utf-8")
        return path

    @property
    def note(self) -> str:
        """Which model and data."""
        said = {name: self.settings[name] for name in ("model", "data", "examples") if self.settings.get(name)}
        if isinstance(said.get("model"), Mapping):
            kind, name = said["model"].get("class", ""), said["model"].get("name", "")
            said["model"] = f"{name} ({kind})" if name else kind
        if self.settings.get("of", 0) > said.get("examples", 0):
            said["examples"] = f"{said['examples']:,} of {self.settings['of']:,}"
        return "; ".join(f"{name}: {value}" for name, value in said.items())

    def sections(self) -> list[tuple[str, list[Any]]]:
        """For a page: of each probe a heading, then texts, pictures and tables."""
        parts: list[tuple[str, list[Any]]] = []
        for name, one in self.probed.items():
            said = [text for text in (one.about, one.sentence, *one.warnings) if text]
            grid = [replace(one.plot(), caption="")] if one.has_grid else []  # the sentence stands above it
            charts = [one.plot(chart) for chart in one.charts]
            parts.append((name, [*said, *grid, *charts, *(_titled(*entry) for entry in one.tables.items())]))
        roles, alike = self.by_role(), self.agreement()
        parts += [("roles", [roles])] if len(roles) else []
        parts += [("agreement of probes", ["Spearman's ρ over heads.", alike])] if len(alike) else []
        parts += [("not served", [f"{name}: {why}" for name, why in self.refused.items()])] if self.refused else []
        return parts

    def _repr_html_(self) -> str:
        return draw.page("Heads and layers", self.note, self.sections())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is undefined is null."""
        kept = [one.name for one in fields(Probed) if one.name != "drawn"]
        probed = {
            name: {part: as_plain(getattr(one, part)) for part in kept} for name, one in self.probed.items()
        }  # fmt: skip
        rest = {name: as_plain(getattr(self, name)) for name in ("index", "refused", "settings")}
        return {"suite": SUITE, "probed": probed, **rest, "agreement": as_plain(self.agreement())}

    def save(self, path: str | Path) -> Path:
        """Write everything into a .json file, which `load_heads` reads."""
        path = Path(path)
        if path.suffix != ".json":
            raise OptionError(f"path={str(path)!r} must end in .json.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), ensure_ascii=False), "utf-8")
        return path


def short(table: pd.DataFrame) -> pd.DataFrame:
    """A table to be read: the number of a layer tells its site and kind."""
    return table.drop(columns=["site", "kind"], errors="ignore") if {"layer", "head"} <= {*table.columns} else table


def _titled(name: str, table: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The first rows of a table, and what it is called."""
    more = f" (the first {MOST_ROWS} of {len(table):,} rows; all are in the .json file)"
    return name + more * (len(table) > MOST_ROWS), readable(short(table.head(MOST_ROWS)))


def load_heads(path: str | Path) -> Heads:
    """Read what `Heads.save` wrote."""
    try:
        saved = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(f"path={str(path)!r} holds no table of heads: {problem}.") from None
    if not isinstance(saved, dict) or saved.get("suite") != SUITE:
        raise InputError(f"path={str(path)!r} holds no table of heads of this version ({SUITE}). Run the probes again.")
    return heads_from(saved)


def heads_from(saved: Mapping[str, Any]) -> Heads:
    """The record whose `to_dict` this is."""
    probed = {
        name: Probed(**{
            **one, "values": as_frame(one["values"]), "warnings": tuple(one["warnings"]),
            "tables": {title: as_frame(table) for title, table in one["tables"].items()},
        })
        for name, one in saved["probed"].items()
    }  # fmt: skip
    alike = as_frame(saved["agreement"]) if "agreement" in saved else None
    return Heads(as_frame(saved["index"]), probed, saved["refused"], saved["settings"], alike)


def tabled(index: pd.DataFrame, drawn: Array, labels: list[str] | None = None) -> pd.DataFrame:
    """`Probed.values` of numbers ``(1 + draw, head)``; without draws they have no interval."""
    values = index.assign(value=drawn[0])
    if len(drawn) > 1:
        ends = np.full((2, drawn.shape[1]), np.nan)
        there = np.isfinite(drawn).all(0)
        ends[:, there] = np.quantile(drawn[1:, there], [0.025, 0.975], axis=0)
        values = values.assign(low=ends[0], high=ends[1])
    return values if labels is None else values.assign(label=labels)
