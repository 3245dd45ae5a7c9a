"""Does the explanation rank words as gradients and leaving words out do?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from regard import measures
from regard.attention.running import batch_of, undisturbed
from regard.cases import Array, Case, Part
from regard.errors import InputError, NoGradient, NotServed, true_or_false, within
from regard.excerpts import REPEATS, others
from regard.finding import Finding, above, level, said
from regard.measures import bootstrap
from regard.measures.ranks import spearman_drawn
from regard.training import inputs_of
from regard.types import JOIN

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
# Of tables, whose columns have an order over all examples, too.
OF_TABLES = PAIRS | {
    "permutation": ("method", "permutation"), "integrated_gradients": ("method", "integrated_gradients"),
    "random_permutation": ("random", "permutation"), "permutation_leave_one_out": ("permutation", "leave_one_out"),
}  # fmt: skip
SIGNIFICANT = 0.05
DRAWS = 500  # of examples, for rankings of all of them together
_COLUMNS: dict[str, dict[str, Any]] = {
    "columns, overall": {
        "kind": "column_bars", "table": "columns",
        "caption": "Mean size over examples, with its interval. Only the order is meaningful.",
    },
    "columns, by method": {
        "kind": "column_ranks", "table": "columns", "caption": "Ranks over all examples: 1 is the most important.",
    },
}  # fmt: skip


def agreement(case: Case, *, through_attention: bool = False, of_ceiling: float = 0.5) -> Finding:
    """Kendall's τ of the sizes of scores with those of gradient and leave_one_out, beside the τ of these two.

    NOTE[DIFF] Jain & Wallace let an undefined τ make the mean undefined; here it is counted and left out.

    Of tables the table "columns" has the columns' mean sizes over all examples, by the explanation and by gradient,
    leave_one_out, integrated_gradients and random permutation (how far the output moves when a cell is that of another
    row; where examples look at each other, in all of a batch at once), and "global" Spearman's ρ of these rankings,
    with intervals over examples. Only ranks are meaningful. `regard.importance.over_seeds` takes the tables "global" of
    several trained models.

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
        if case.kind == "table":
            names = [features.words for features in part.features]
            sizes |= _of_tables(part)
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
    charts: dict[str, dict[str, Any]] = {
        "τ by class": {
            "kind": "densities", "by": "predicted",
            "x": {name: "tau", "references with each other": "ceiling", "random numbers": "random"},
            "caption": "How many examples have which τ. Further to the right is more alike.",
        },
    }  # fmt: skip
    together = ""
    if case.kind == "table":
        means = _means([*values.pop("sizes")], case.seed)
        tables |= {"columns": _columns(means, name), "global": _global(means, name, len(values))}
        charts = _COLUMNS | charts
        rho = tables["global"].set_index("pair").loc[f"{name} – permutation"]
        if not np.isnan(rho["spearman"]):
            together = (
                " Over all examples together it ranks the columns as permuting them does with Spearman's ρ "
                f"{rho['spearman']:.3f} [{rho['low']:.3f}, {rho['high']:.3f}]; only ranks are meaningful."
            )
    sentence = (
        f"{name} ranks words as {' and '.join(judged)} with Kendall's τ {said(interval)}, mean of {interval.n} examples"
        + "; with itself it is not compared" * (len(judged) < 2)
        + f". These references agree with each other by {said(ceiling)}, {of_ceiling:.0%} of which is asked for, and "
        f"with random numbers by {said(random)}."
        + (not yardstick) * " They agree with each other no better than with those, so there is no yardstick."
        + together
    )
    return Finding(
        "agreement", "Kendall's τ", interval, margin, supported, sentence, values,
        reference={"ceiling": ceiling, "asked for": level(asked), "random": random}, failed=failed,
        tables=tables, charts=charts, settings={**values.attrs["notes"]}, settles=yardstick,
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


def _of_tables(part: Part) -> dict[str, list[Array]]:
    """Of each example what more references give its columns."""
    found = {"permutation": _permuted(part)}
    try:
        same = part.case.ask("leave_one_out").of  # a logit may rise with all others: it would rank otherwise
        asked = part.scores({"ig": replace(part.case.ask("integrated_gradients"), of=same)})
        found["integrated_gradients"] = [np.abs(one) for one in asked["ig"]]
    except (NotServed, NoGradient) as problem:
        part.notes["no integrated_gradients"] = str(problem)
    return found


def _permuted(part: Part) -> list[Array]:
    """Of each example how far the output moves when the cell of a column is that of another row; mean over repeats."""
    case = part.case
    rows = inputs_of([case.examples[place] for place in part.places])
    groups = [[word] if word in rows else word.split(JOIN) for word in part.features[0].words]
    outputs = []
    with torch.no_grad(), undisturbed(case.subject.model):
        for places in others(part.ids, len(case.examples), case.seed).T.tolist():
            instead = inputs_of([case.examples[place] for place in places])
            for columns in groups:
                mixed = rows.assign(**{one: instead[one] for one in columns})
                outputs.append(case.subject.forward(batch_of(case.subject, mixed)))
    moved = part.moved(torch.stack(outputs)).reshape(REPEATS, len(groups), -1)
    return [*moved.mean(0).T]


def _means(sizes: Sequence[Mapping[str, Mapping[str, float]]], seed: int) -> dict[str, pd.DataFrame]:
    """Mean sizes by column: of all examples, and then of examples that are drawn again."""
    count = len(sizes)
    # How often each example is there: once, and as often as it is drawn. (draw, example) @ (example, column)
    times = np.vstack([np.ones(count), np.random.default_rng(seed).multinomial(count, [1 / count] * count, DRAWS)])
    every = [who for who in sizes[0] if all(who in one for one in sizes)]
    given = {who: pd.DataFrame([one[who] for one in sizes]) for who in every}
    return {who: pd.DataFrame(times @ one.to_numpy() / count, columns=one.columns) for who, one in given.items()}


def _columns(means: Mapping[str, pd.DataFrame], name: str) -> pd.DataFrame:
    """A row for each column and who ranks it: the mean size with its interval, and the rank."""
    rows = []
    for who, drawn in means.items():
        if who == "random" or (who == name and "method" in means):
            continue
        ends = drawn[1:].quantile([0.025, 0.975])
        table = pd.DataFrame({"value": drawn.iloc[0], "low": ends.iloc[0], "high": ends.iloc[1]})
        table = table.assign(rank=table["value"].rank(ascending=False, method="min")).rename_axis("column")
        table.insert(0, "by", name if who == "method" else who)
        rows.append(table.reset_index().sort_values("rank", kind="stable"))
    return pd.concat(rows, ignore_index=True)


def _global(means: Mapping[str, pd.DataFrame], name: str, count: int) -> pd.DataFrame:
    """Spearman's ρ of the columns' mean sizes; intervals are over the examples, drawn again."""
    rows: dict[str, dict[str, Any]] = {}
    for both in OF_TABLES.values():
        title = [name if one == "method" else one for one in both]
        if title[0] != title[1] and {*both} <= {*means}:
            found = spearman_drawn(*(means[who].to_numpy() for who in both))
            rows.setdefault(" – ".join(title), {**found, "n": count})
    return pd.DataFrame([{"pair": pair, **row} for pair, row in rows.items()])
