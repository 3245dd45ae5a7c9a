"""What came of a comparison: a league table, how methods agree, and where they do not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regard import draw
from regard.errors import OptionError, choose
from regard.finding import of_columns
from regard.measures import agreements, bootstrap, corrected, paired, permutation_p
from regard.progress import Counter
from regard.rationales import auprc_by_chance, auprc_by_lot

Array = NDArray[np.float64]
MEASURES = {
    "tau": "Kendall's τ-b over all words, mean over examples.",
    "top_k": "Overlap of the fifth of the words ranked highest, mean over examples.",
    "weighted": "Kendall's τ in which words count by their scores, mean over examples.",
}
FOOTNOTE = (
    "First the place: 1 + the number of methods whose interval lies wholly on the better side; where intervals "
    "overlap, nothing is said about which is better. [95 % interval]. *: better than random, paired, on these "
    "examples. forwards: examples run for each one that is explained."
)
BETTER = {"comprehensiveness": 1, "sufficiency": -1, "auprc": 1}  # the direction in which a method is better
SHOWN = 5  # examples on which methods disagree
CAPTIONS = {
    "comprehensiveness": "How far the explained class falls without the words ranked highest; higher is better.",
    "sufficiency": "How far it falls when only these words are left; lower is better.",
    "auprc": "How well the ranking finds the words that are the truth; higher is better.",
}


@dataclass
class Numbers:
    """Raw values, one for each example, by method."""

    ids: list[str] = field(default_factory=list)
    words: list[tuple[str, ...]] = field(default_factory=list)
    scores: dict[str, list[Array]] = field(default_factory=dict)
    truth: list[NDArray[np.bool_] | None] = field(default_factory=list)
    stability: dict[str, list[float]] = field(default_factory=dict)
    comprehensiveness: dict[str, list[list[float]]] = field(default_factory=dict)
    sufficiency: dict[str, list[list[float]]] = field(default_factory=dict)
    forwards: dict[str, int] = field(default_factory=dict)

    def add(
        self, name: str, words: tuple[str, ...], scores: Mapping[str, Array], truth: NDArray[np.bool_] | None
    ) -> None:
        """One more example."""
        self.ids.append(name)
        self.words.append(words)
        self.truth.append(truth)
        for label, some in scores.items():
            self.scores.setdefault(label, []).append(some)

    def extend(self, other: Numbers) -> None:
        """The next examples."""
        self.ids += other.ids
        self.words += other.words
        self.truth += other.truth
        for name in ("scores", "stability", "comprehensiveness", "sufficiency"):
            for label, values in getattr(other, name).items():
                getattr(self, name).setdefault(label, []).extend(values)
        for label, count in other.forwards.items():
            self.forwards[label] = self.forwards.get(label, 0) + count

    def drop(self, label: str) -> None:
        """Forget a method."""
        by_method: tuple[dict[str, Any], ...] = (
            self.scores, self.stability, self.comprehensiveness, self.sufficiency, self.forwards,
        )  # fmt: skip
        for values in by_method:
            values.pop(label, None)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Methods side by side. Made by `regard.compare`.

    Args:
        league: a row for each method: comprehensiveness, sufficiency, auprc (where there is a truth) and stability,
            each with ``_low`` and ``_high``; ``_place``: 1 + the number of methods whose interval lies wholly on the
            better side of this one's, so that methods which cannot be told apart share a place; ``_beats_random``:
            whether the paired difference to `random` excludes 0, and ``_p``: its permutation p-value, corrected for
            the number of methods (Holm); forwards: examples run for each that is explained.
        agreement: a row for each two methods and measure: "tau" (Kendall's τ-b over all words), "top_k" (overlap of the
            top fifth) and "weighted" (τ in which words count by their scores), with intervals, and how many examples
            left it undefined.
        curves: comprehensiveness and sufficiency of each method at each bin, with intervals.
        values: the raw values, a row for each example and method.
        disagreements: the examples on which two methods disagree most.
        refused: methods that the model cannot serve, and why.
        settings: what was asked for.
        chance: mean AUPRC of random orders of the same words, where there is a truth.
        numbers: the words of each example, and the scores that each method gave them.
        confirmation: of a planted task, what the model was seen to use.
    """

    league: pd.DataFrame
    agreement: pd.DataFrame
    curves: pd.DataFrame
    values: pd.DataFrame
    disagreements: list[dict[str, Any]]
    refused: Mapping[str, str]
    settings: Mapping[str, Any]
    chance: float | None
    numbers: Numbers
    confirmation: Any = None

    def __repr__(self) -> str:
        return f"Comparison({len(self.league)} methods on {self.settings['examples']} examples)"

    @property
    def metrics(self) -> list[str]:
        """The columns of the league that methods are judged by."""
        return [name for name in BETTER if name in self.league]

    def matrix(self, measure: str = "tau") -> pd.DataFrame:
        """Methods × methods: the mean agreement by one measure; NaN where no example defines it."""
        choose("measure", measure, (*MEASURES,))
        some = self.agreement[self.agreement["measure"] == measure]
        square = some.pivot(index="method", columns="other", values="value")
        names = self.league["method"].tolist()
        upper = square.reindex(index=names, columns=names).to_numpy(dtype=float, copy=True)
        both = np.where(np.isnan(upper), upper.T, upper)
        np.fill_diagonal(both, 1.0)
        return pd.DataFrame(both, index=names, columns=names)

    def plot(self, what: str = "comprehensiveness") -> draw.Picture:
        """A picture of a metric with its intervals, or of the matrix of an agreement: "tau", "top_k" or "weighted"."""
        choose("what", what, (*self.metrics, *MEASURES))
        if what in MEASURES:
            square = self.matrix(what)
            known = square.notna().sum() > 1
            names = list(square.columns[known])
            left_out = f" Left out, their scores being all alike: {', '.join(square.columns[~known])}."
            return draw.token_map(
                square.loc[names, names].fillna(0.0), names, names, title=f"Agreement of methods: {what}", legend=what,
                caption=self._said(MEASURES[what]) + (left_out if not known.all() else ""), axes=("method", "method"),
            )  # fmt: skip
        ordered = self.league.sort_values(what, ascending=BETTER[what] < 0)
        level = self.chance if what == "auprc" else None
        return draw.intervals(
            ordered["method"].tolist(), ordered[what], ordered[f"{what}_low"], ordered[f"{what}_high"],
            title=what, caption=self._said(CAPTIONS[what]), level=level,
        )  # fmt: skip

    def to_html(self, path: str | Path) -> Path:
        """Write a page of its own: tables, intervals, the matrix, and the examples on which methods disagree."""
        path = Path(path)
        if path.suffix != ".html":
            raise OptionError(f"path={str(path)!r} must end in .html.")
        parts: list[tuple[str, Sequence[Any]]] = [
            ("League table", [self.table(), FOOTNOTE, *map(self.plot, self.metrics)])
        ]
        parts.append(("Do they agree?", [self.plot(measure) for measure in MEASURES]))
        for number, one in enumerate(self.disagreements, 1):
            lines = [
                draw.text_line(one["words"], one["scores"][name], title=name, caption=f"Example {one['example']}")
                for name in (one["method"], one["other"])
            ]
            parts.append((f"Disagreement {number}: τ = {one['tau']:.2f}", lines))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw.page("Which explanation?", self.note, parts), encoding="utf-8")
        return path

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is undefined is null."""
        tables = {"league": self.league, "agreement": self.agreement, "curves": self.curves, "values": self.values}
        plain = {name: json.loads(one.to_json(orient="records")) for name, one in tables.items()}
        sure = None if self.confirmation is None else asdict(self.confirmation)
        return plain | {
            "disagreements": self.disagreements, "refused": dict(self.refused), "settings": dict(self.settings),
            "chance": self.chance, "confirmation": sure,
        }  # fmt: skip

    @property
    def note(self) -> str:
        """What was done, in words."""
        asked = self.settings
        said = [f"{asked['examples']} of {asked['of']} examples; words removed by {asked['how']!r}."]
        if self.confirmation is not None:
            said = [f"{asked['task']}: {asked['rule']} {self.confirmation.says}", *said]
        if self.chance is not None:
            said.append(f"Random orders of the words reach an AUPRC of {self.chance:.3f}.")
        if asked["skipped_rows"]:
            said.append(f"{asked['skipped_rows']} rows of the data could not be used.")
        if asked.get("left_out"):
            said.append(f"Left out: {asked['left_out']}.")
        said += [f"Not served: {why}" for why in self.refused.values()]
        return self._said(" ".join(said))

    def _said(self, text: str) -> str:
        """A sentence about words; of a table about columns."""
        return of_columns(text) if self.settings.get("kind") == "table" else text

    def table(self) -> pd.DataFrame:
        """The league as it is read: a value with its interval in each cell, best comprehensiveness first."""
        rows = []
        for row in self.league.sort_values("comprehensiveness", ascending=False).to_dict(orient="records"):
            cells = {"method": row["method"], "family": row["family"]}
            for name in self.metrics:
                mark = " *" if row[f"{name}_beats_random"] else ""
                place, low, high = (row[f"{name}_{part}"] for part in ("place", "low", "high"))
                cells[name] = f"{place}. {row[name]:.3f} [{low:.3f}, {high:.3f}]{mark}"
            cells |= {"stability": f"{row['stability']:.2f}", "forwards": f"{row['forwards']:.1f}"}
            rows.append(cells)
        return pd.DataFrame(rows)


def summarise(
    numbers: Numbers, *, families: Mapping[str, str], settings: Mapping[str, Any], refused: Mapping[str, str]
) -> Comparison:
    """Means and intervals of raw values. Intervals are bootstraps over examples, paired where methods are compared."""
    seed = settings["seed"]
    per_example = _per_example(numbers, seed)
    league: list[dict[str, Any]] = [{"method": label, "family": families[label]} for label in numbers.scores]
    for name in BETTER:
        if name in per_example:
            _judge(league, name, per_example[name], seed)
    for row in league:
        label = row["method"]
        row |= bootstrap(numbers.stability.get(label, [np.nan]), seed=seed).cells("stability")
        row["forwards"] = numbers.forwards.get(label, 0) / len(numbers.ids)
    values = pd.DataFrame([
        {"example": numbers.ids[place], "method": label, **{name: of[label][place] for name, of in per_example.items()}}
        for label in numbers.scores for place in range(len(numbers.ids))
    ])  # fmt: skip
    curves = [
        {"method": label, "share": share}
        | bootstrap(np.array(numbers.comprehensiveness[label])[:, place], seed=seed).cells("comprehensiveness")
        | bootstrap(np.array(numbers.sufficiency[label])[:, place], seed=seed).cells("sufficiency")
        for label in numbers.scores
        for place, share in enumerate(settings["bins"])
    ]
    agreed, disagreements = _agreements(numbers, {label for label in families if families[label] != "control"}, seed)
    chance = float(np.nanmean(auprc_by_chance(numbers.truth, seed))) if "auprc" in per_example else None
    return Comparison(
        pd.DataFrame(league), agreed, pd.DataFrame(curves), values, disagreements, refused, settings, chance, numbers
    )


def _per_example(numbers: Numbers, seed: int) -> dict[str, dict[str, Array]]:
    """For each metric and method a value for each example."""
    found = {
        "comprehensiveness": {label: np.mean(some, axis=1) for label, some in numbers.comprehensiveness.items()},
        "sufficiency": {label: np.mean(some, axis=1) for label, some in numbers.sufficiency.items()},
    }
    if any(mask is not None and mask.any() for mask in numbers.truth):
        found["auprc"] = {
            label: auprc_by_lot(some, numbers.truth, numbers.ids, seed) for label, some in numbers.scores.items()
        }
    return found


def _judge(league: list[dict[str, Any]], name: str, values: Mapping[str, Array], seed: int) -> None:
    """Put a metric into every row: its interval, its place, and whether it beats the lot."""
    sign = BETTER[name]
    bounds = {label: bootstrap(some, seed=seed) for label, some in values.items()}
    against = [permutation_p(values[row["method"]], values["random"], seed=seed) for row in league]
    by_chance = corrected([np.nan if row["method"] == "random" else p for row, p in zip(league, against, strict=True)])
    for row, p in zip(league, by_chance, strict=True):
        own = bounds[row["method"]]
        ahead = [one for one in bounds.values() if (one.low > own.high if sign > 0 else one.high < own.low)]
        apart = paired(sign * values[row["method"]], sign * values["random"], seed=seed)
        row |= own.cells(name)
        row |= {f"{name}_place": 1 + len(ahead), f"{name}_beats_random": bool(apart.low > 0), f"{name}_p": p}


def _agreements(numbers: Numbers, shown: set[str], seed: int) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Every two methods, by every measure; and the examples on which two of those shown disagree most."""
    rows, apart = [], []
    names = list(numbers.scores)
    each = [agreements(np.abs(np.stack(of_methods))) for of_methods in zip(*numbers.scores.values(), strict=True)]
    with Counter("comparing methods", len(names) * (len(names) - 1) // 2) as counter:
        for (a, one), (b, other) in combinations(enumerate(names), 2):
            for measure in MEASURES:
                found = [example[measure][a, b] for example in each]
                interval = bootstrap(found, seed=seed)
                rows.append({
                    "method": one, "other": other, "measure": measure, "value": interval.value, "low": interval.low,
                    "high": interval.high, "n": interval.n, "undefined": interval.undefined,
                })  # fmt: skip
                if measure == "tau" and one in shown and other in shown:
                    apart += [(tau, place, one, other) for place, tau in enumerate(found) if not math.isnan(tau)]
            counter.advance()
    worst: dict[int, tuple[float, str, str]] = {}
    for tau, place, one, other in sorted(apart, key=itemgetter(0)):
        worst.setdefault(place, (tau, one, other))
    listed = [
        {
            "example": numbers.ids[place], "tau": tau, "method": one, "other": other,
            "words": list(numbers.words[place]),
            "scores": {name: numbers.scores[name][place].tolist() for name in (one, other)},
        }
        for place, (tau, one, other) in list(worst.items())[:SHOWN]
    ]  # fmt: skip
    columns = ["method", "other", "measure", "value", "low", "high", "n", "undefined"]
    return pd.DataFrame(rows, columns=columns), listed
