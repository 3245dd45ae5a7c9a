"""Let attention look everywhere alike: is the output another?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from regard.attending import edited, removed
from regard.attention import edits
from regard.cases import Case, Part
from regard.errors import true_or_false, within
from regard.finding import Finding, above, holds, level, said
from regard.measures import Interval, bootstrap, paired
from regard.profiles import each_head

CLAIM = "The output depends on where attention looks: with uniform attention it is another."
REFERENCE = "ε, and how far the output moves when what attention hands on is removed altogether."
CITE = "wiegreffe2019attention"
CRITERION = ""
NEEDS = ()


def uniform(case: Case, *, epsilon: float = 0.05, profile: bool = True) -> Finding:
    """How far the output moves when every row looks alike at all keys that it may see: at all sites, each, each head.

    It is about the model as it is. Whether one that is trained with uniform attention would be as good it cannot tell,
    so it does not show that attention is necessary.

    Args:
        case: what is on trial; all sites, unless some are named.
        epsilon: the change of the output from which it counts.
        profile: also each head alone, which costs up to a forward pass for each.
    """
    within("epsilon", epsilon, 0, 1)
    true_or_false("profile", profile)
    case = replace(case, sites="all") if case.sites == "last" else case
    decides = case.head in ("softmax", "binary")
    labels = case.labels if decides and case.labelled else {}

    def work(part: Part) -> dict[str, Any]:
        rerun = part.rerun()
        spots = part.spots(rerun)
        both = zip(spots, edited(rerun, spots, "all"), strict=True)
        part.notes["edited"] = [{"number": spot.index, **one} for spot, one in both]
        outputs = [rerun.output, rerun(edits.uniform(sites=[spot.index for spot in spots]))]
        heads = []
        for spot in spots:
            if profile:
                alone = each_head(rerun, spot)
                heads.append(part.moved(alone[:-1]))
            outputs.append(alone[-1] if profile else rerun(edits.uniform(sites=spot.index)))
        stacked = torch.stack(outputs)  # as it is, uniform at all sites, at each: variant example class
        at = [f"_at_{spot.index}" for spot in spots]
        columns: dict[str, Any] = dict(zip([f"moved{one}" for one in ("", *at)], part.moved(stacked[1:]), strict=True))
        columns["removed"] = removed(part, rerun, spots, "all")
        if decides:
            decided = part.decisions(stacked)
            columns["changed"] = decided[1] != decided[0]
        if labels:
            true = np.array([labels[place] for place in part.places], dtype=float)  # NaN where there is none
            right = np.where(np.isnan(true), np.nan, decided == true)
            columns |= dict(zip([f"correct{one}" for one in ("_before", "_uniform", *at)], right, strict=True))
        return columns | ({"heads": np.concatenate(heads).T} if profile else {})

    values, failed = case.each("making attention uniform", work)
    what = values.attrs["notes"]["edited"]
    interval, unused = bootstrap(values["moved"], seed=case.seed), bootstrap(values["removed"], seed=case.seed)
    tables: dict[str, pd.DataFrame] = {}
    charts: dict[str, Any] = {}
    if profile:
        of = [{"site": one["number"], "head": head} for one in what for head in range(one["heads"])]
        tables["heads"] = pd.DataFrame(of).assign(moved=np.stack([*values.pop("heads")]).mean(0))
        charts["each head alone"] = {
            "kind": "heads", "table": "heads", "layer": "site", "head": "head", "value": "moved",
            "caption": "How far the output moves when this head alone looks at everything alike.",
        }  # fmt: skip
    rows = []
    for one in what:
        mean = bootstrap(values[f"moved_at_{one['number']}"], seed=case.seed)
        rows.append({"site": one["number"], "name": one["site"], **mean.cells("moved")})
        if labels:
            rows[-1] |= _lost(values, f"correct_at_{one['number']}", case.seed).cells("accuracy_lost")
    tables["sites"] = pd.DataFrame(rows)
    charts["each site alone"] = {
        "kind": "lines", "table": "sites", "x": "site", "y": "moved", "level": epsilon,
        "caption": "How far the output moves when this site alone looks at everything alike; dashed: what counts.",
    }  # fmt: skip
    sentence = (
        f"With uniform attention at {'all' if case.sites == 'all' else 'these'} sites ({len(what)}) the output moved "
        f"by {said(interval)} ({case.unit}, mean over {interval.n} examples); {epsilon:g} counts as a change. Without "
        f"what attention hands on it moves by {said(unused)}."
    )
    if decides:
        sentence += f" The decision changed in {values['changed'].mean():.1%} of the examples"
        sentence += f", and accuracy fell by {said(_lost(values, 'correct_uniform', case.seed))}." if labels else "."
    margin = above(interval, epsilon)
    return Finding(
        "uniform", f"change of the output ({case.unit})", interval, margin, holds(margin), sentence, values,
        reference={"counts as a change": level(epsilon), "attention removed": unused},
        tables=tables, charts=charts, settings={"sites": case.sites, "edited": what}, failed=failed,
    )  # fmt: skip


def _lost(values: pd.DataFrame, after: str, seed: int) -> Interval:
    return paired(values["correct_before"], values[after], seed=seed)
