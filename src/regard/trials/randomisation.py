"""Draw the model's weights anew: is the explanation another one?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from regard.attention.lookalikes import Layer, layers, lookalike, redrawn
from regard.cases import Case, Part
from regard.errors import NotServed, at_least_one, within
from regard.finding import Finding, below, holds, level, said
from regard.likeness import alike, chance, must_be_defined, sizes
from regard.measures import bootstrap

CLAIM = "The explanation depends on what the model has learned: with random weights it is another one."
REFERENCE = "The random control beside itself under another seed."
CITE = "adebayo2018sanity"
CRITERION = ""
NEEDS = ("explanation",)


def randomisation(case: Case, *, most: float = 0.5, draws: int = 3, depths: int = 13) -> Finding:
    """Kendall's τ between explanations by the model and by copies of it in which layers are random.

    "cascading": all layers from the top down to this one are random; "independent": this one alone. A layer is what
    runs between two attention sites. Random weights are normal, with mean and standard deviation of the tensor. The
    copies share all other tensors with the model, which is not written to. What is explained stays the same class.

    NOTE[DIFF] Adebayo et al. initialise layers anew as before training; how is not known of a model that is given. They
    compare the pixels of pictures, by Spearman's ρ, SSIM and HOG; here words, by τ of the scores' sizes.

    Args:
        case: what is on trial.
        most: the mean τ below which explanations count as different.
        draws: how often all weights are drawn, each in memory at once; the statistic is a mean over them.
        depths: how many layers there are at most; in deeper models neighbours are randomised together.
    """
    within("most", most, -1, 1, ends="(]")
    at_least_one("draws", draws)
    at_least_one("depths", depths)
    prepared = ("randomisation", draws, depths)  # layers, the top first; and by name the models, partly random

    def work(part: Part) -> dict[str, Sequence[Any]]:
        trace = case.job.trace(part.batch, part.target)
        if prepared not in case.shelf:
            top_first = layers(case.subject, part.batch, depths)[::-1]
            case.shelf[prepared] = top_first, _twins(case, top_first, draws)
        cut, twins = case.shelf[prepared]
        part.notes["layers"] = [one.name for one in cut]
        before = sizes(part, case.job, trace)
        columns = chance(case, part, trace)
        for name, twin in twins.items():
            other = case.job.trace(part.batch, trace.target, subject=twin, verified=trace.check.readout)
            if name == f"cascading {len(cut)}" and other.output.equal(trace.output):
                raise NotServed("randomisation: the subject calls its model in a way that a copy of it cannot replace.")
            columns |= alike(name, before, sizes(part, case.job, other))
        return columns

    values, failed = case.each("randomising", work)
    names = values.attrs["notes"]["layers"]
    full = [f"cascading {len(names)}", *(f"draw {number}" for number in range(2, draws + 1))]
    for measure in ("top_k", "tau"):
        values.insert(2, measure, values[[f"{name} {measure}" for name in full]].mean(axis=1))
    must_be_defined(case, values["tau"])
    interval, random = (bootstrap(values[name], seed=case.seed) for name in ("tau", "random tau"))
    margin = below(interval, most)
    sentence = (
        f"With all weights drawn anew ({draws} times), the ranking by {case.job.method.name} has Kendall's τ "
        f"{said(interval)} with that for the model itself, mean over {interval.n} examples; less than {most:g} counts "
        f"as another explanation. Two random explanations have {said(random)}."
    )
    tables = {how: _table(case, values, how, names) for how in ("cascading", "independent")}
    chart = {"kind": "lines", "x": "layers from the top", "y": "tau", "level": most}
    return Finding(
        "randomisation", "Kendall's τ with all weights random", interval, margin, holds(margin), sentence, values,
        reference={"random": random, "counts as another": level(most)}, failed=failed, tables=tables,
        charts={how: {**chart, "table": how} for how in tables},
        settings={"layers": names, "weights": "normal, with the mean and deviation of each tensor"},
    )  # fmt: skip


def _twins(case: Case, cut: Sequence[Layer], draws: int) -> dict[str, Any]:
    """By name the subjects whose models are partly random."""
    drawn = redrawn(case.subject, (case.seed, 1))
    chosen: dict[str, Any] = {}
    twins: dict[str, Any] = {}
    for number, one in enumerate(cut, 1):
        alone = {name: drawn[name] for name in one.parameters}
        chosen |= alone
        twins[f"cascading {number}"] = lookalike(case.subject, chosen)
        twins[f"independent {number}"] = lookalike(case.subject, alone)
    for number in range(2, draws + 1):
        twins[f"draw {number}"] = lookalike(case.subject, redrawn(case.subject, (case.seed, number)))
    return twins


def _table(case: Case, values: pd.DataFrame, how: str, names: Sequence[str]) -> pd.DataFrame:
    rows = []
    for number, modules in enumerate(names, 1):
        tau, top_k = (bootstrap(values[f"{how} {number} {name}"], seed=case.seed) for name in ("tau", "top_k"))
        rows.append({
            "layers from the top": number, "modules": modules, **tau.cells("tau"), "top_k": top_k.value, "n": tau.n,
            "undefined": tau.undefined,
        })  # fmt: skip
    return pd.DataFrame(rows)
