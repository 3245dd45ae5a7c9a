"""Shuffle where attention looks: does the output notice?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from regard.attending import edited, looks, on_tokens, removed
from regard.attention import edits
from regard.attention.editing import Spot
from regard.cases import Case, Part
from regard.errors import NotServed, at_least_one, true_or_false, within
from regard.finding import Finding, above, holds, level, said
from regard.measures import bootstrap

CLAIM = "Where attention looks matters: shuffled among the same words, it gives another output."
REFERENCE = "ε, and how far the output moves when what attention hands on is removed altogether."
CITE = "jain2019attention"
CRITERION = ""
NEEDS = ()
BINS = (0.0, 0.25, 0.5, 0.75, 1.0)


def permutation(case: Case, *, n: int = 100, shared: bool = False, epsilon: float = 0.05) -> Finding:
    """Median total variation over n permutations of the readout's attention, against the largest weight.

    Args:
        case: what is on trial.
        n: permutations of each example; each head has its own unless `shared`.
        shared: one permutation for all heads.
        epsilon: the change of the output from which it counts.
    """
    at_least_one("n", n)
    within("epsilon", epsilon, 0, 1)
    true_or_false("shared", shared)

    def work(part: Part) -> dict[str, Sequence[Any]]:
        rerun = part.rerun()
        spots = part.spots(rerun)
        part.notes["edited"] = edited(rerun, spots)
        shuffled = edits.permute(case.seed, shared=shared, sites=[spot.index for spot in spots])
        moved = part.moved(rerun(shuffled, variants=n))
        alone = np.array([len(weights) < 2 for weights in on_tokens(part, (part.batch.source or part.batch).real)])
        moved[:, alone] = np.nan  # a single word cannot be shuffled
        return {
            "moved": np.median(moved, 0), "most": moved.max(0), "removed": removed(part, rerun, spots),
            "largest": _largest(part, spots),
        }  # fmt: skip

    values, failed = case.each("permuting", work)
    interval, unused = bootstrap(values["moved"], seed=case.seed), bootstrap(values["removed"], seed=case.seed)
    names = [f"{low:g}–{high:g}" for low, high in pairwise(BINS)]
    values["bin"] = pd.cut(values["largest"], [*BINS[:-1], 1.01], right=False, labels=names).astype(str)
    binned = values.groupby(["predicted", "bin"], as_index=False)["moved"].agg(["median", "count"])
    chart = {"kind": "points", "x": "largest", "y": "moved", "by": "predicted"}
    margin = above(interval, epsilon)
    idle = max(unused.high, interval.high) <= epsilon
    sentence = (
        f"Shuffling attention {n} times moved the output by {said(interval)} ({case.unit}, median over shuffles, "
        f"mean over {interval.n} examples); {epsilon:g} counts as a change. Without what it hands on the output "
        f"moves by {said(unused)}." + " The site is unused: the output depends on other paths." * idle
    )
    return Finding(
        "permutation", f"median change of the output ({case.unit})", interval, margin, holds(margin), sentence, values,
        reference={"counts as a change": level(epsilon), "attention removed": unused}, failed=failed,
        tables={"by class and largest weight": binned},
        charts={"change by largest weight": chart} if values["largest"].notna().any() else {},
        settings={**values.attrs["notes"]},
    )  # fmt: skip


def _largest(part: Part, spots: Sequence[Spot]) -> list[float]:
    """Of each example the largest weight of the map; undefined where the sites do not look at the features."""
    try:
        return [weights.max(initial=0.0) for weights in looks(part, spots)]
    except NotServed:
        return [np.nan] * len(part.places)
