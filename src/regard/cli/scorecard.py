"""What `audit` and `diff` print: scorecards, what was refused, what would run, what changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.audited import Audit, refusals
from regard.cli.consoles import shown
from regard.cli.showing import print_frame
from regard.finding import Finding, said
from regard.jobs.plan import PARTS
from regard.judging import CRITERIA, UNTESTED, Verdict
from regard.measures import Interval
from regard.progress import clock

COLOURS = {"supported": "green", "not supported": "red", "inconclusive": "yellow", UNTESTED: "dim"}
if TYPE_CHECKING:  # the rest is for `regard diff`, too, which needs no torch
    from regard.foreseeing import Foresight

WORD = 15  # columns that an outcome takes, with room beside it
WIDE = 110  # columns of a terminal that holds values with their intervals in a line


def show_audit(found: Audit) -> None:
    """The scorecard of each explanation, then attention itself, and what was refused."""
    about, data = found.about, found.about["data"]
    shown.print(Text(f"{about['model']['name'] or about['model']['class']} on {data['source']}", style="bold"))
    seconds = found.times.get("seconds")
    took = "" if seconds is None else f", in {clock(seconds)}"
    shown.print(Text(f"{about['options']['examples']} of {data['of']} examples{took}", style="dim"))
    cards = {title: found.verdict(title) for title in found.methods}
    for title, card in cards.items():
        shown.print(Text(f"\n{title}", style="bold underline"))
        for criterion in card.criteria:
            evidence = card.evidence(criterion)
            if evidence:
                _show_outcome(criterion.name, card[criterion.name], evidence)
    untested = [one.name for one in CRITERIA if all(card[one.name] == UNTESTED for card in cards.values())]
    filled = {name for one in CRITERIA for name in one.trials}
    itself = [one for by, one in found.findings if by is None and one.trial not in filled]
    if itself:
        shown.print(Text("\nattention itself, whatever is made of it", style="bold underline"))
        for one in itself:
            _show_outcome(one.trial, one.outcome, [one])
    _show_refused(found.refused)
    if len(cards) > 1 and found.findings:
        _show_overview(cards)  # last, where a terminal has scrolled to
    if untested:
        shown.print(Text(f"not tested: {', '.join(untested)}", style="dim"))


def _show_overview(cards: Mapping[str, Verdict]) -> None:
    """A row for each explanation, a column for each criterion that was tested; the other way round if it is narrow."""
    names = [one.name for one in CRITERIA if any(card[one.name] != UNTESTED for card in cards.values())]
    turned = WORD * len(names) + max(map(len, cards)) > shown.width
    across, down = (cards, names) if turned else (names, cards)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", *across):
        table.add_column(name, overflow="fold")
    for row in down:
        cells = [cards[one][row] if turned else cards[row][one] for one in across]
        table.add_row(Text(row), *(Text(cell, style=COLOURS[cell]) for cell in cells))
    shown.print()
    shown.print(table)


def _show_outcome(name: str, outcome: str, evidence: Sequence[Finding]) -> None:
    """A criterion: its outcome; for each trial the statistic beside its references, and the sentence."""
    shown.print(Text.assemble("  ", (name, "bold"), ": ", (outcome, COLOURS[outcome])))
    for one in evidence:
        beside = ", ".join(f"{label} {level.value:.3g}" for label, level in one.reference.items())
        by = "" if one.trial == name or one.about.startswith(one.trial) else f"{one.trial}: "
        told = f"{by}{one.about} {said(one.interval)}{f' beside {beside}' if beside else ''}"
        shown.print(Padding(Text(told), (0, 0, 0, 4)))
        shown.print(Padding(Text(one.sentence, style="dim"), (0, 0, 0, 4)))
        if one.needed is not None:
            settled = Text(f"About {one.needed} examples like these would settle it.", style="yellow")
            shown.print(Padding(settled, (0, 0, 0, 4)))


def _show_refused(refused: Iterable[Mapping[Any, Any]]) -> None:
    for row in refusals(refused):
        what = row["trial"] + f" · {row['method']}" * bool(row["method"])
        shown.print(Text.assemble((f"refused {what}: ", "yellow"), row["why"]))


def foreseen(found: Foresight) -> str:
    """What will run, and roughly what it takes, in a line."""
    jobs = found.jobs[~found.jobs["trial"].isin([*PARTS])]
    methods = jobs["method"].dropna().nunique()
    about = _counted(jobs["trial"].nunique(), "trial") + (f" of {_counted(methods, 'explanation')}" if methods else "")
    refused = f"; {len(found.refused)} refused" if len(found.refused) else ""
    return (
        f"{about} on {jobs['examples'].max()} examples, {_counted(int(found.jobs['units'].sum()), 'job')}{refused}: "
        f"about {clock(found.seconds)} with {_counted(found.workers, 'worker')} as fast as this machine, "
        f"{_size(found.memory)} of memory each, {_size(found.disk)} on disk"
    )


def show_foresight(found: Foresight) -> None:
    """The page of ``--dry-run``."""
    jobs = found.jobs.assign(
        trial=found.jobs["trial"].replace(PARTS),
        method=found.jobs["method"].fillna("–"),
        work=[clock(one) for one in found.jobs["seconds"]],
    )
    print_frame(jobs.drop(columns="seconds").rename(columns={"units": "jobs"}))
    _show_refused(found.refused.to_dict(orient="records"))
    shown.print(Text(foreseen(found)))


def show_differences(table: pd.DataFrame, itself: Collection[str], before: Path, after: Path) -> None:
    """The page of `regard diff`; ``itself``: trials that judge no explanation, and are shown once."""
    shown.print(Text(f"before: {before}\nafter:  {after}", style="bold"))
    apart = table["trial"].isin([*itself]) & (table["criterion"] == "")
    table = table.assign(method=table["method"].mask(apart, "attention itself")).drop_duplicates()
    for title in dict.fromkeys([*table.loc[~apart.loc[table.index], "method"], *table["method"]]):
        shown.print(Text(f"\n{title}", style="bold"))
        grid = Table(box=None, padding=(0, 1, 0, 0))
        for name in ("criterion", "outcome", "before", "after", "difference"):
            grid.add_column(name, overflow="fold")
        for row in table[table["method"] == title].to_dict(orient="records"):
            grid.add_row(*_changed(row))
        shown.print(grid)
    shown.print(Text("* the 95 % interval of the difference excludes 0.", style="dim"))


def _changed(row: Mapping[Any, Any]) -> Iterable[Text]:
    trial = (f"\n{row['trial']}" if row["criterion"] else "", "dim")
    outcome = Text(row["after"], style=COLOURS[row["after"]])
    if row["before"] != row["after"]:
        outcome = Text.assemble((row["before"], COLOURS[row["before"]]), "\n→ ", outcome)
    cells = [_interval(row, name) for name in ("value_before", "value_after", "difference")]
    cells[-1] += " *" * (row["differs"] is True)
    narrow = shown.width < WIDE
    values = [Text(cell.replace(" [", "\n[") if narrow else cell, no_wrap=True) for cell in cells]
    return Text.assemble(row["criterion"] or row["trial"], trial), outcome, *values


def _interval(row: Mapping[Any, Any], name: str) -> str:
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return "–" if math.isnan(value) else said(Interval(value, low, high, 1, 0))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _size(count: int) -> str:
    return (
        f"{count / 1e9:.1f} GB"
        if count >= 1e9
        else f"{count / 1e6:.1f} MB"
        if count >= 1e6
        else f"{count / 1e3:.0f} kB"
    )
