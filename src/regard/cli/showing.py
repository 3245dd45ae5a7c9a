"""What the commands print: tables and shaded lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard import draw
from regard.cli.consoles import shown
from regard.comparison import FOOTNOTE, MEASURES, Comparison
from regard.explanation import Explanation
from regard.finding import Finding, readable, said
from regard.probed import Heads, Probed, short

if TYPE_CHECKING:
    from regard.attention import Ignored
    from regard.diagnosis import Diagnosis

MOST_ROWS = 20  # of a table
MOST_HEADS = 8  # of a probe
LONG = 40  # letters of what is no number
WIDE = 130  # columns of a terminal that holds a league table; a narrower one gets less of it, on two lines each


def show_sites(model: str, rows: Sequence[Mapping[Any, Any]], ignored: Sequence[Ignored]) -> None:
    """The page of `regard trace`."""
    shown.print(f"{len(rows)} attention sites in {model}", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("site", overflow="fold")  # the only one that may be folded: numbers stay whole
    for column in ("kind", "heads", "shape", "entropy", "special", "error"):
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    for row in rows:
        shape = "×".join(map(str, row["shape"]))
        looks = ("–", "–") if row["entropy"] is None else (f"{row['entropy']:.2f}", f"{row['special_share']:.0%}")
        numbers = (*looks, f"{row['error']:.0e}")
        table.add_row(row["site"], row["kind"], str(row["heads"]), shape, *numbers)
    shown.print(table)
    shown.print(
        "shape: examples × heads × queries × keys. entropy (nats; 0: one key) and special (share on special tokens): "
        "as seen from the readout, mean over heads and texts (–: its rows are not the readout's). error: "
        "max |A·V − output| / max |output|.",
        style="dim",
    )
    for entry in ignored:
        shown.print(f"ignored {entry.name} {entry.shape}: {entry.reason}", style="dim", markup=False)


def show_explanation(why: Explanation, top: int) -> None:
    """A shaded line and a table of the words that count most; numbers by layer or head have a table only."""
    shown.print(Text(why.caption, style="dim"))
    if why.axes == ("token",):
        table_of = why.words()
        shown.print(draw.shaded_terminal(table_of["word"].tolist(), table_of["score"].tolist()))
    else:
        table_of = why.frame()
    ranked = table_of.reindex(table_of["score"].abs().sort_values(ascending=False, kind="stable").index).head(top)
    columns = [name for name in ranked.columns if name not in ("special", "word" if "token" in ranked else "")]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in ("word", "token", "part") else "right")
    for row in ranked[columns].itertuples(index=False):
        table.add_row(*(Text(f"{cell:.4g}" if isinstance(cell, float) else str(cell)) for cell in row))
    shown.print(table)
    for name, fact in why.facts.items():
        shown.print(Text(f"{name}: {np.array2string(np.asarray(fact), precision=4, threshold=20)}", style="dim"))


def show_methods(rows: Sequence[Mapping[Any, Any]]) -> None:
    """The page of `regard methods`."""
    for family in dict.fromkeys(row["family"] for row in rows):
        shown.print(f"{family} methods", style="bold", highlight=False)
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True)
        for row in rows:
            if row["family"] == family:
                paper = f" · {row['paper']}" if row["paper"] else ""
                about = Text(f"{row['passes']}{paper}", style="dim")
                table.add_row(row["name"], Text.assemble(row["formula"], "\n", about))
        shown.print(table)
    shown.print("What each needs, and its options: regard methods --json", style="dim", highlight=False)


def show_diagnosis(model: str, named: str, found: Diagnosis) -> None:
    """The page of `regard doctor`."""
    facts = found.model
    saved = facts["saved as"]
    kind = (
        facts["class"] if saved in (None, facts["class"]) else f"{facts['class']} (saved as {saved}: without its head)"
    )
    count = facts["parameters"]
    size = f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"
    lines = {
        "model": f"{kind}, {size} parameters, {facts['precision']}, on {facts['device']}; "
        f"attention: {facts['backend']}",
        "tried on": f"{named}: examples {found.examples[0]}, rows up to {found.examples[1]}; a forward pass takes "
        f"{1000 * found.seconds:.0f} ms",
        "readout": found.readout,
        "error": "–" if found.error is None else f"{found.error:.0e} between recomputed weights × values and the model",
    }
    shown.print(model, style="bold", markup=False, highlight=False, soft_wrap=True)
    facts_table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, line in lines.items():
        facts_table.add_row(Text(name, style="dim"), Text(line))
    shown.print(facts_table)
    shown.print("\nattention sites" if len(found.sites) else "\nattention sites: none", style="bold", highlight=False)
    for row in found.sites.to_dict(orient="records"):
        shape = "×".join(map(str, row["shape"]))
        line = f"{row['number']} {row['kind']}, {row['heads']} heads, {shape}, {row['weights']}: {row['names']}"
        shown.print(Padding(Text(line), (0, 0, 0, 2)))
    if len(found.sites):
        shown.print("  shape: examples × heads × queries × keys", style="dim", highlight=False)
    for entry in found.ignored:
        shown.print(Padding(Text(f"ignored: {entry.name} {entry.shape}: {entry.reason}", style="dim"), (0, 0, 0, 2)))
    shown.print("\nwhat it can serve", style="bold", highlight=False)
    abilities = Table(box=None, padding=(0, 0, 0, 2))
    abilities.add_column("", no_wrap=True)
    abilities.add_column("", no_wrap=True)
    abilities.add_column("passes", justify="right", no_wrap=True)
    abilities.add_column("needed by methods and trials such as", overflow="fold")
    abilities.add_column("measured", overflow="fold")
    for ability in found.abilities:
        mark = Text("yes", style="green") if ability.works else Text("no", style="red")
        cost = "" if ability.passes is None else f"{ability.passes:.1f}"
        abilities.add_row(ability.name, mark, cost, ability.serves, ability.said if ability.works else "see below")
    shown.print(abilities)
    shown.print("  passes: the cost, in plain forward passes on these examples", style="dim", highlight=False)
    refused = found.methods[~found.methods["works"].astype(bool)]
    for row in refused.to_dict(orient="records"):
        shown.print(Padding(Text.assemble((row["name"], "red"), f": {row['why']}"), (0, 0, 0, 2)))
    names = ", ".join(found.methods.loc[found.methods["works"].astype(bool), "name"])
    shown.print(Padding(Text(f"methods: {names or 'none'}"), (0, 0, 0, 2)))
    probes = found.probes[found.probes["works"].astype(bool)].to_dict(orient="records")
    names = ", ".join(f"{row['name']} ({row['data']})" if row["data"] else row["name"] for row in probes)
    shown.print(Padding(Text(f"probes of heads: {names or 'none'}"), (0, 0, 0, 2)))
    refused = found.probes[~found.probes["works"].astype(bool)]
    for why, some in refused.groupby("why", sort=False)["name"]:
        shown.print(Padding(Text(f"no {', '.join(some)}: {why}", style="dim"), (0, 0, 0, 2)))
    for line in found.advice:
        shown.print(Text("\n→ " + line))


def show_comparison(found: Comparison) -> None:
    """The page of `regard compare`: the league, how methods agree, and the example on which two disagree most."""
    shown.print(Text(found.note, style="dim"))
    shown.print("\nleague table", style="bold", highlight=False)
    show_league(found.table())
    shown.print(Text(FOOTNOTE, style="dim"))
    families = dict(zip(found.league["method"], found.league["family"], strict=True))
    references = [name for name in families if families[name] == "reference"]
    if references:
        shown.print("\nagreement with references: τ · top fifth · τ by score", style="bold", highlight=False)
        squares = [found.matrix(measure).to_dict() for measure in MEASURES]
        rows = [
            {"method": name} | {other: _cell(square[name][other] for square in squares) for other in references}
            for name in families
        ]
        print_frame(pd.DataFrame(rows))
        shown.print(Text(" · ".join(MEASURES.values()) + " –: undefined.", style="dim"))
    for one in found.disagreements[:1]:
        said = f"\nthe example on which two methods disagree most: {one['example']}, τ = {one['tau']:.2f}"
        shown.print(Text(said, style="bold"))
        for name in (one["method"], one["other"]):
            shown.print(Text(name, style="dim"))
            shown.print(draw.shaded_terminal(one["words"], one["scores"][name]))


def show_finding(found: Finding) -> None:
    """The page of `regard trial`: what was claimed, what came of it, beside what, and what to know first."""
    colour = {True: "green", False: "red", None: "yellow"}[found.supported]
    shown.print(Text(found.claim, style="bold"))
    shown.print(Text.assemble((found.outcome, colour), ". ", found.sentence))
    if found.needed is not None:
        shown.print(Text(f"About {found.needed} examples like these would settle it.", style=colour))
    levels = {found.about: found.interval, **found.reference}
    print_frame(
        pd.DataFrame([{"method": name, "value [95 % interval]": said(one)} for name, one in levels.items()]).rename(
            columns={"method": ""}
        )
    )
    for name, table in found.tables.items():
        shown.print(f"\n{name}", style="bold", highlight=False)
        _print_some(table)
    for line in found.warnings:
        shown.print(Text(f"! {line}", style="yellow"))


def show_trials(rows: Sequence[Mapping[Any, Any]]) -> None:
    """The page of `regard trials`."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for row in rows:
        about = [
            row["needs"] and f"needs {row['needs']}",
            row["criterion"] and f"criterion: {row['criterion']}",
            row["paper"],
        ]
        lines = [f"held against: {row['reference']}", " · ".join(one for one in about if one)]
        lines += [f"options: {row['options']}"] if row["options"] else []
        table.add_row(row["name"], Text.assemble(row["claim"], ("\n" + "\n".join(lines), "dim")))
    shown.print(table)


def show_heads(found: Heads) -> None:
    """The page of `regard heads`: of each probe the heads with the largest numbers, and what else it found."""
    shown.print(Text(found.note, style="dim"))
    for name, one in found.probed.items():
        shown.print(Text.assemble(("\n" + name, "bold"), f": {one.about}"))
        if one.sentence:
            shown.print(Text(one.sentence))
        if one.has_grid:
            print_frame(_strongest(one))
        if (more := int(one.values["value"].notna().sum()) - MOST_HEADS if one.has_grid else 0) > 0:
            shown.print(f"… {more} more heads: --json, --save or --html", style="dim", highlight=False)
        drawn = {chart.get("table") for chart in one.charts.values()}
        for title, table in one.tables.items():
            if title in drawn and len(table) > MOST_ROWS:  # the first points of a curve tell nothing
                shown.print(f"{title}: {len(table)} rows, drawn by --html", style="dim", highlight=False)
            elif title != "parts":
                shown.print(title, style="bold", highlight=False)
                _print_some(short(table))
        for line in one.warnings:
            shown.print(Text(f"! {line}", style="yellow"))
    for title, table in (("roles", found.by_role()), ("agreement of probes over heads (Spearman)", found.agreement())):
        if len(table):
            shown.print(f"\n{title}", style="bold", highlight=False)
            _print_some(table)
    for name, why in found.refused.items():
        shown.print(Text.assemble((f"! {name}", "yellow"), f": {why}"))


def _strongest(one: Probed) -> pd.DataFrame:
    """The heads with the largest numbers."""
    table = one.values.dropna(subset=["value"]).nlargest(MOST_HEADS, "value")
    number = f"{{:.{_digits(table['value'])}f}}"
    rows: dict[str, Any] = {"layer": table["layer"], "head": table["head"], "value": table["value"].map(number.format)}
    if "low" in table:
        ends = zip(table["value"], table["low"], table["high"], strict=True)
        rows["value"] = [f"{number} [{number}, {number}]".format(*cells) for cells in ends]
    if "label" in table and table["label"].any():
        rows["role"] = table["label"]
    return pd.DataFrame(rows)


def _digits(numbers: pd.Series[Any] | pd.DataFrame) -> int:
    """How many behind the point tell numbers apart: three, and more where all are small."""
    top = float(np.nanmax(np.abs(numbers.to_numpy(np.float64)), initial=0.0))
    return 3 if not 0 < top < 0.1 else min(2 - math.floor(math.log10(top)), 9)


def _print_some(table: pd.DataFrame) -> None:
    """The first rows of a table and the columns that there is room for, and how many more there are."""
    some = readable(table.head(MOST_ROWS))
    some = some.map(_shortened(_digits(some.select_dtypes("float"))))
    fits = _fitting(some)
    print_frame(some[fits])
    more = [(len(table) - MOST_ROWS, "rows"), (len(some.columns) - len(fits), "columns")]
    left_out = " and ".join(f"{count} more {what}" for count, what in more if count > 0)
    if left_out:
        shown.print(f"… {left_out}: --json, --save or --html", style="dim", highlight=False)


def _fitting(table: pd.DataFrame) -> list[str]:
    """The first columns of a table, as many as stand side by side without breaking a number or a name."""
    room, kept = shown.width, list[str]()
    for name in table.columns:
        room -= 2 + max(len(word) for cell in (name, *table[name]) for word in (str(cell).split() or [""]))
        if kept and room < 0:
            break
        kept.append(name)
    return kept


def show_probes(rows: Sequence[Mapping[Any, Any]]) -> None:
    """The page of `regard probes`."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for row in rows:
        lines = [" · ".join(one for one in (f"needs {row['needs']}", row["paper"]) if one)]
        lines += [f"options: {row['options']}"] if row["options"] else []
        table.add_row(row["name"], Text.assemble(row["about"], ("\n" + "\n".join(lines), "dim")))
    shown.print(table)


def show_league(table: pd.DataFrame) -> None:
    """A row for each method; in a narrow terminal only what methods are judged by, intervals on a line of their own."""
    if shown.width < WIDE:
        table = table.drop(columns=["family", "stability", "forwards"]).replace(r" \[", "\n[", regex=True)
    print_frame(table)


def _shortened(digits: int) -> Callable[[Any], str]:
    def written(cell: Any) -> str:
        return "–" if cell is None or cell != cell else f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell)

    return written


def _cell(numbers: Iterable[float]) -> str:
    return " · ".join("–" if np.isnan(number) else f"{number:.2f}" for number in numbers)


def print_frame(frame: pd.DataFrame) -> None:
    """A table: numbers to the right, words to the left."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in frame.columns:
        words = frame[name].map(lambda cell: str(cell)[:1].isalpha() or len(str(cell)) > LONG).any()
        table.add_column(str(name), justify="left" if words else "right", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(Text(str(cell)) for cell in row))
    shown.print(table)
