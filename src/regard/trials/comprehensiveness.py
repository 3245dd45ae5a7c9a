"""Without the words that the explanation points at, is the model still as sure?"""

from __future__ import annotations

from collections.abc import Sequence

from regard.cases import Case
from regard.erasing import BINS
from regard.finding import Finding, holds, said
from regard.measures import bootstrap, paired
from regard.removals import falls

CLAIM = "The words that the explanation ranks highest are needed: removing them costs more than removing random ones."
REFERENCE = "As many random words removed from the same examples."
CITE = "deyoung2020eraser"
CRITERION = "causal"
NEEDS = ("explanation",)


def comprehensiveness(case: Case, *, bins: Sequence[float] = BINS, repeats: int = 5) -> Finding:
    """Comprehensiveness p(x) − p(x without the top words), mean over bins, against the random control.

    Args:
        case: what is on trial.
        bins: the shares of words that are removed.
        repeats: how often the random control is drawn.
    """
    values, shown = falls(case, True, bins, repeats)
    interval, random = (bootstrap(values[name], seed=case.seed) for name in ("method", "random"))
    margin = paired(values["method"], values["random"], seed=case.seed)
    falling = {"regression": "changes, in standard deviations,", "embedding": "falls"}.get(
        case.head, "(probability) falls"
    )
    sentence = (
        f"Without the words that {case.job.method.name} ranks highest, what is explained {falling} by "
        f"{said(interval)}, mean over {len(bins)} shares of the words and {interval.n} examples; without as many "
        f"random words by {said(random)}. The difference is {said(margin)}."
    )
    return Finding(
        "comprehensiveness", "comprehensiveness", interval, margin, holds(margin), sentence, values,
        reference={"random": random, "above random": margin}, **shown,
    )  # fmt: skip
