"""Let the input, or the model, tremble a little: as long as the decision stays, does the explanation?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from regard.attention import Trace
from regard.attention.entrance import Entrance
from regard.attention.lookalikes import Trembling, dropouts, dropping
from regard.attention.running import batch_of
from regard.cases import Case, Part
from regard.errors import InputError, NotServed, at_least_one, true_or_false, within
from regard.finding import Finding, above, holds, level, said
from regard.likeness import alike, chance, must_be_defined, sizes
from regard.measures import bootstrap
from regard.training import inputs_of
from regard.types import Batch

CLAIM = "The same decision gets the same explanation when the input, or the model, trembles."
REFERENCE = "The random control beside itself under another seed."
CITE = "alvarezmelis2018robustness"
CRITERION = ""
NEEDS = ("explanation",)
DECIMALS = 6  # of a column, at most
Runs = Iterable[tuple[AbstractContextManager[Any], Batch]]  # for each run what it happens in, and what it runs on


def stability(
    case: Case, *, noise: float = 0.05, dropout: bool = True, repeats: int = 10, least: float = 0.7
) -> Finding:
    """Kendall's τ between the explanation and those under noise that leaves the prediction as it is.

    Texts: Gaussian noise on the embedding of each word, the same wherever it stands. Tables: uniform noise within half
    of the last decimal place that a column's values use; columns of no more than two values are flags, and stay.
    Dropout: the model's dropout modules act, at their own rates, on the same channels of all tokens; those that drop
    attention weights, and dropout that is no module, do not. What is explained stays the class of the run without
    noise. The statistic is that of noise or of dropout, whichever is lower.

    NOTE[DIFF] Alvarez-Melis & Jaakkola seek the worst neighbour of an input, and divide distances of scores by those of
    inputs; here neighbours are drawn, and ranks are compared.

    Args:
        case: what is on trial.
        noise: standard deviation of the noise, in those of the entries of the embedding table; texts only.
        dropout: the model trembles, too, if it has dropout.
        repeats: runs of each kind; those with another prediction are not compared.
        least: the mean τ from which explanations count as the same.
    """
    at_least_one("repeats", repeats)
    within("noise", noise, 0, np.inf)
    within("least", least, -1, 1, ends="[)")
    true_or_false("dropout", dropout)
    widths: dict[str, float] = case.once("widths", lambda: _widths(case)) if case.kind == "table" else {}
    seeds = [(case.seed, number) for number in range(repeats)]

    def work(part: Part) -> dict[str, Sequence[Any]]:
        trace = case.job.trace(part.batch, part.target)
        tables = [] if widths else _tables(part)
        modules = dropouts(case.subject, part.batch) if dropout else {}
        part.notes["dropout modules"] = [*modules]
        shaken: Runs = (
            (nullcontext(), _within(part, widths, seed)) if widths else (Trembling(tables, noise, seed), part.batch)
            for seed in seeds
        )
        dropped: Runs = ((dropping(modules, seed), part.batch) for seed in seeds if modules)
        both = _runs("noise", part, trace, shaken) | _runs("dropout", part, trace, dropped)
        return chance(case, part, trace) | both

    values, failed = case.each("trembling", work)
    modules = values.attrs["notes"]["dropout modules"]
    kinds = ("noise", "dropout") if modules else ("noise",)
    found = {name: bootstrap(values[f"{name} tau"], seed=case.seed) for name in kinds}
    if not any(values[f"{name} stayed"].any() for name in found):
        raise InputError(f"noise={noise!r}: in no run did the prediction stay. Pass less noise.")
    must_be_defined(case, values[[f"{name} tau" for name in found]].mean(axis=1))
    which, interval = min(((name, one) for name, one in found.items() if one.n), key=lambda pair: pair[1].value)
    random, margin = bootstrap(values["random tau"], seed=case.seed), above(interval, least)
    size = "within the precision of its column" if widths else f"of {noise:g} standard deviations"
    decides = case.head not in ("regression", "embedding")
    moved = {name: values[f"{name} moved"].mean() for name in found}
    sentence = (
        f"Under noise {size} on the input, which moved the output by {moved['noise']:.2g} ({case.unit}), the ranking "
        f"by {case.job.method.name} has Kendall's τ {said(found['noise'])} with that without it"
        + (f"; under dropout, which moved it by {moved['dropout']:.2g}, {said(found['dropout'])}" if modules else "")
        + f"; mean over {repeats} runs{', where the prediction stays,' * decides} and {interval.n} examples. From "
        f"{least:g} on they count as the same. Two random explanations have {said(random)}."
    )  # fmt: skip
    still = [name for name, one in moved.items() if one == 0]
    return Finding(
        "stability", f"Kendall's τ under {which}", interval, margin, holds(margin), sentence, values, failed=failed,
        reference={**found, "random": random, "counts as the same": level(least)},
        charts={
            f"τ under {name}": {"kind": "histogram", "x": f"{name} tau", "level": least}
            for name, one in found.items() if one.n
        },
        settings={"dropout modules": modules} | ({"noise within ±": widths} if widths else {}),
        warnings=tuple(f"{name} moved no output at all: it says nothing." for name in still),
    )  # fmt: skip


def _runs(name: str, part: Part, trace: Trace, runs: Runs) -> dict[str, Any]:
    """Of each example the means over runs; those of likeness over runs in which the prediction stayed."""
    case, found = part.case, []
    before, before_said = sizes(part, case.job, trace), _said(case, trace.output)
    for block, batch in runs:
        with block:
            other = case.job.trace(batch, trace.target, verified=trace.check.readout)
            after = sizes(part, case.job, other)
        stayed = np.array(_said(case, other.output) == before_said).all(-1)
        like = {column: np.where(stayed, one, np.nan) for column, one in alike(name, before, after).items()}
        found.append({**like, f"{name} moved": part.moved(other.output[None])[0], f"{name} stayed": stayed})
    columns = {column: pd.DataFrame([one[column] for one in found]) for column in (found[0] if found else ())}
    counted = f"{name} stayed"
    return {column: (one.sum() if column == counted else one.mean()).to_numpy() for column, one in columns.items()}


def _said(case: Case, output: Tensor) -> NDArray[Any]:
    """``(example, …)``: what is predicted: the class, all labels, or nothing that could change."""
    if case.head in ("regression", "embedding"):
        return np.zeros((len(output), 1))
    logits = case.subject.head.columns(output.detach(), "logit")
    decided = logits > 0 if case.head == "sigmoid" else logits.argmax(-1, keepdim=True)
    return np.asarray(decided.numpy(force=True))


def _tables(part: Part) -> list[Any]:
    """What the model looks its words up in."""
    tables: list[Any] = Entrance(part.case.subject, part.batch).tables
    if not tables:
        raise NotServed("stability: the model looks up no embedding of its ids, so there is none to put noise on.")
    return tables


def _widths(case: Case) -> dict[str, float]:
    """Of each column of numbers half of the last decimal place that it uses."""
    widths = {}
    for name, column in inputs_of(case.examples).select_dtypes("number").items():
        numbers = column.dropna().unique().astype(float)
        if len(numbers) > 2:
            used = next((digits for digits in range(DECIMALS) if (numbers.round(digits) == numbers).all()), DECIMALS)
            widths[str(name)] = 0.5 * 10.0**-used
    if not widths:
        raise NotServed("stability: no column of the table has numbers of more than two values: none has a precision.")
    return widths


def _within(part: Part, widths: dict[str, float], seed: tuple[int, ...]) -> Batch:
    """The rows of a table, with noise on the columns that have a precision."""
    table, names = inputs_of(part.examples), [*widths]
    drawn = [np.random.default_rng([*seed, place]).uniform(-1, 1, len(names)) for place in part.places]
    return batch_of(part.case.subject, table.assign(**(table[names] + np.array(drawn) * [*widths.values()])))
