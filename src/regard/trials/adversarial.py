"""Search for other attention that gives the same output: is there only one?"""

from __future__ import annotations

import math
from typing import Literal

from regard.cases import Case
from regard.errors import OptionError, at_least_one, choose, within
from regard.finding import Finding, below, holds, level, said
from regard.measures import bootstrap
from regard.searching import Search

CLAIM = "No very different attention gives the same output."
REFERENCE = (
    "How far attention differs between seeds, and how far the output moves when attention is removed altogether."
)
CITE = "jain2019attention"
CRITERION = "exclusive"
NEEDS = ()
# For the 95th percentile of the divergence between seeds, where it was not measured: what it is for a BiLSTM on SST,
# from GloVe's vectors (benchmarks/sst.py).
STAND_IN = 0.35
SHOWN = 5  # examples
MISSED = 0.05  # share of the examples without an adversary, above which the search has not done its work


def adversarial(
    case: Case, *, k: int = 5, steps: int = 500, epsilon: float = 0.05, epsilon_search: float = 0.01,
    penalty: float = 500.0, learning_rate: float = 0.01, spread: float = 3.0,
    heads: Literal["free", "shared"] = "free", between_seeds: float | None = None,
) -> Finding:  # fmt: skip
    """The largest Jensen–Shannon divergence from the observed attention, of k adversaries that keep the output.

    By Adam they minimise Σ_i [−JSD(α_i, α) + penalty · max(0, Δ_i − epsilon_search)] − 1/k² Σ_ij JSD(α_i, α_j), where Δ
    is the total variation of the output. Of those with Δ ≤ epsilon the farthest is taken; if none is left, α itself.

    NOTE[DIFF] The paper's Δ is that of one sigmoid output, which is the total variation; we take that of any output.
    With several heads JSD is that of their mean, with several readout rows Σ_q r_q · JSD_q, with several sites a mean.
    Special tokens keep their weight; the rest is divided by its sum, so that ln 2 stays the largest JSD there is.

    Args:
        case: what is on trial.
        k: adversaries of each example.
        steps: of the search.
        epsilon: the largest change of the output with which an adversary counts.
        epsilon_search: the change from which on the search is punished.
        penalty: by how much.
        learning_rate: of Adam.
        spread: standard deviation of the logits that they start from.
        heads: "free": each head has an adversary of its own; "shared": all have the same.
        between_seeds: 95th percentile of the divergence between models that differ in nothing but their seed.
    """
    at_least_one("k", k)
    at_least_one("steps", steps)
    within("epsilon", epsilon, 0, 1)
    if within("epsilon_search", epsilon_search, 0, 1, ends="[)") > epsilon:
        raise OptionError(
            f"epsilon_search={epsilon_search!r} must be 0 or more and at most epsilon={epsilon!r}, which is below 1: "
            "an adversary that the search is content with must count."
        )
    for name, value in (("penalty", penalty), ("learning_rate", learning_rate), ("spread", spread)):
        within(name, value, 0, math.inf)
    if between_seeds is not None:
        within("between_seeds", between_seeds, 0, math.log(2))
    choose("heads", heads, ("free", "shared"))

    search = Search(k, steps, epsilon, epsilon_search, penalty, learning_rate, spread, heads)
    values, failed = case.each("searching for adversaries", search)
    shown = dict(zip(values["example"], values.pop("shown"), strict=True))
    interval, unused = (bootstrap(values[name], seed=case.seed) for name in ("epsilon_max_jsd", "removed"))
    most = STAND_IN if between_seeds is None else between_seeds
    margin, idle, missed = below(interval, most), unused.high <= epsilon, float((values["found"] == 0).mean())
    # what the search has not found counts as 0, so that a search which has not done its work must not be taken for none
    supported = None if idle or (missed > MISSED and holds(margin)) else holds(margin)
    why = "a stand-in for what seeds make" if between_seeds is None else "95 % of models of another seed differ less"
    sentence = (
        f"Of {k} adversaries the farthest that moves the output by at most {epsilon:g} ({case.unit}) differs from "
        f"the observed attention by {said(interval)} (Jensen–Shannon divergence, at most 0.693; mean over {interval.n} "
        f"examples); more than {most:g} is very different ({why}). Without what attention hands on the output moves "
        f"by {said(unused)}." + " The site is unused: that other attention does as well says nothing." * idle
    )
    by_class = values.groupby("predicted", as_index=False)[["epsilon_max_jsd", "per_head_jsd", "moved", "found"]].mean()
    farthest = values.nlargest(SHOWN, "epsilon_max_jsd")["example"]
    return Finding(
        "adversarial", "mean ε-max JSD", interval, margin, supported, sentence, values,
        reference={"very different": level(most), "attention removed": unused}, failed=failed,
        tables={"means by class": by_class},
        charts={
            "the farthest that keeps the output":
                {"kind": "histogram", "x": "epsilon_max_jsd", "by": "predicted", "level": most},
            "how far it moves the output": {"kind": "points", "x": "epsilon_max_jsd", "y": "moved", "by": "predicted"},
        },
        shown=tuple({"example": name} | shown[name] for name in farthest if shown[name]["maps"]),
        settings={**values.attrs["notes"]}, settles=not idle and missed <= MISSED,
        warnings=(f"in {missed:.0%} of the examples the search found none; they count as 0. Try more steps.",)
        if missed > MISSED else (),
    )  # fmt: skip
