"""Does the explanation rank words as gradients and leaving words out do?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from regard import measures
from regard.cases import Case, Part
from regard.errors import InputError, true_or_false, within
from regard.finding import Finding, above, level, said
from regard.measures import bootstrap

CLAIM = "The explanation ranks words as references do: at least half as alike as two references rank them."
REFERENCE = "Half of how alike gradient and leave_one_out rank words, and how alike random numbers do."
CITE = "jain2019attention"
CRITERION = "consistent"
NEEDS = ("explanation",)
REFERENCES = ("gradient", "leave_one_out")
PAIRS = {
    "gradient": ("method", "gradient"), "leave_one_out": ("method", "leave_one_out"), "ceiling": REFERENCES,
    "random_gradient": ("random", "gradient"), "random_leave_one_out": ("random", "leave_one_out"),
}  # fmt: skip
SIGNIFICANT = 0.05
DRAWS = 500  # of examples, for rankings of all of them together


def agreement(case: Case, *, through_attention: bool = False, of_ceiling: float = 0.5) -> Finding:
    """Kendall's τ of the sizes of scores with those of gradient and leave_one_out, beside the τ of these two.

    NOTE[DIFF] Jain & Wallace let an undefined τ make the mean undefined; here it is counted and left out.

    Args:
        case: what is on trial.
        through_attention: False: attention is a constant for the gradient, as Jain & Wallace have it.
        of_ceiling: the part of the references' own agreement that is asked for.
    """
    within("of_ceiling", of_ceiling, 0, 1, ends="(]")
    true_or_false("through_attention", through_attention)
    name = case.job.method.name
    judged = [one for one in REFERENCES if one != name]  # with itself it would agree

    def work(part: Part) -> dict[str, Sequence[Any]]:
        part.notes["how"] = part.how
        jobs = {
            "method": case.job, "gradient": case.ask("gradient", through_attention=through_attention),
            "leave_one_out": case.ask("leave_one_out", how=part.how), "random": case.lots(1)["random 1"],
        }  # fmt: skip
        sizes = {who: [np.abs(one) for one in scores] for who, scores in part.scores(jobs).items()}
        columns: dict[str, Sequence[Any]] = {f"{who} varies": [*map(np.ptp, some)] for who, some in sizes.items()}
        for pair, (one, other) in PAIRS.items():
            found = [measures.agreement(x, y) for x, y in zip(sizes[one], sizes[other], strict=True)]
            columns |= {_column(measure, pair): [row[measure] for row in found] for measure in found[0]}
        if case.kind == "table":  # columns are the same in all examples, so that their means have an order, too
            names = [features.words for features in part.features]
            columns["sizes"] = [
                {who: dict(zip(of, some[at], strict=True)) for who, some in sizes.items()}
                for at, of in enumerate(names)
            ]
        return columns

    values, failed = case.each("ranking words", work)
    varies = {who: values.pop(f"{who} varies").any() for who in ("method", *REFERENCES, "random")}
    for who in ("method", *REFERENCES):
        if not varies[who]:
            label = name if who == "method" else who
            raise InputError(f"{label} gives all words of an example the same score, in every example: it ranks none.")
    values["tau"], values["random"] = (
        values[[f"{of}_{one}" for one in judged]].mean(axis=1, skipna=False) for of in ("tau", "random")
    )
    interval, ceiling, random = (bootstrap(values[one], seed=case.seed) for one in ("tau", "ceiling", "random"))
    asked = of_ceiling * ceiling.value
    margin = above(interval, asked)
    supported: bool | None = None
    yardstick = ceiling.low > random.high
    if yardstick and margin.low >= 0 and interval.low > random.high:
        supported = True
    elif yardstick and margin.high < 0:
        supported = False
    titles = {pair: " – ".join(name if one == "method" else one for one in both) for pair, both in PAIRS.items()}
    tables = {"pairs": _pairs(values, titles, case.seed), "by class": _by_class(values, titles)}
    if case.kind == "table":
        tables["global"] = _global([*values.pop("sizes")], titles, case.seed)
    sentence = (
        f"{name} ranks words as {' and '.join(judged)} with Kendall's τ {said(interval)}, mean of {interval.n} examples"
        + "; with itself it is not compared" * (len(judged) < 2)
        + f". These references agree with each other by {said(ceiling)}, {of_ceiling:.0%} of which is asked for, and "
        f"with random numbers by {said(random)}."
        + (not yardstick)
        * " They agree with each other no better than with those, so there is no yardstick."
    )
    return Finding(
        "agreement", "Kendall's τ", interval, margin, supported, sentence, values,
        reference={"ceiling": ceiling, "asked for": level(asked), "random": random}, failed=failed,
        tables=tables, charts={
            "τ by class": {
                "kind": "densities", "by": "predicted",
                "x": {name: "tau", "references with each other": "ceiling", "random numbers": "random"},
                "caption": "How many examples have which τ. Further to the right is more alike.",
            },
        },
        settings={**values.attrs["notes"]}, settles=yardstick,
    )  # fmt: skip


def _column(measure: str, pair: str) -> str:
    return pair if measure == "tau" and pair not in REFERENCES else f"{measure}_{pair}"


def _significant(p: pd.Series[float]) -> float:
    return float((p.dropna() <= SIGNIFICANT).mean())


def _pairs(values: pd.DataFrame, titles: Mapping[str, str], seed: int) -> pd.DataFrame:
    """A row for each pair and measure."""
    rows = []
    for pair, title in titles.items():
        for measure in ("tau", "top_k", "weighted"):
            row = {"pair": title, "measure": measure, **asdict(bootstrap(values[_column(measure, pair)], seed=seed))}
            rows.append(row | ({"significant": _significant(values[f"p_{pair}"])} if measure == "tau" else {}))
    return pd.DataFrame(rows)


def _by_class(values: pd.DataFrame, titles: Mapping[str, str]) -> pd.DataFrame:
    """Jain & Wallace's table: mean, standard deviation and share that is significant, by predicted class."""
    rows = []
    for label, some in values.groupby("predicted"):
        for pair, title in titles.items():
            tau = some[_column("tau", pair)]
            row = {"predicted": label, "pair": title, "tau": tau.mean(), "deviation": tau.std(ddof=0)}
            rows.append(row | {"significant": _significant(some[f"p_{pair}"]), "n": tau.count()})
    return pd.DataFrame(rows)


def _global(sizes: Sequence[Mapping[str, Mapping[str, float]]], titles: Mapping[str, str], seed: int) -> pd.DataFrame:
    """Spearman's ρ of the columns' mean sizes; intervals are over the examples, drawn again."""
    count = len(sizes)
    # How often each example is there: once, and as often as it is drawn. (draw, example) @ (example, column)
    times = np.vstack([np.ones(count), np.random.default_rng(seed).multinomial(count, [1 / count] * count, DRAWS)])
    ranks = {}
    for who in sizes[0]:
        means = times @ pd.DataFrame([one[who] for one in sizes]).fillna(0.0).to_numpy() / count
        ranks[who] = rankdata(means, axis=1) - (means.shape[1] + 1) / 2
    rows = []
    for pair, title in titles.items():
        x, y = (ranks[who] for who in PAIRS[pair])
        with np.errstate(invalid="ignore"):  # columns that are all alike have no order
            found = (x * y).sum(1) / np.sqrt((x**2).sum(1) * (y**2).sum(1))
        low, high = np.quantile(found[1:][~np.isnan(found[1:])], [0.025, 0.975])
        rows.append({"pair": title, "spearman": found[0], "low": low, "high": high, "n": count})
    return pd.DataFrame(rows)
