"""With nothing but the words that the explanation points at, is the model still as sure?"""

from __future__ import annotations

from collections.abc import Sequence

from regard.cases import Case
from regard.erasing import BINS
from regard.finding import Finding, holds, said
from regard.measures import bootstrap, paired
from regard.removals import falls

CLAIM = "The words that the explanation ranks highest suffice: they alone cost less than as many random ones alone."
REFERENCE = "As many random words alone, of the same examples."
CITE = "deyoung2020eraser"
CRITERION = ""
NEEDS = ("explanation",)


def sufficiency(case: Case, *, bins: Sequence[float] = BINS, repeats: int = 5) -> Finding:
    """Sufficiency p(x) − p(the top words alone), mean over bins, against the random control: less is better.

    Args:
        case: what is on trial.
        bins: the shares of words that are kept.
        repeats: how often the random control is drawn.
    """
    values, shown = falls(case, False, bins, repeats)
    interval, random = (bootstrap(values[name], seed=case.seed) for name in ("method", "random"))
    margin = paired(values["random"], values["method"], seed=case.seed)
    falling = {"regression": "changes, in standard deviations,", "embedding": "falls"}.get(
        case.head, "(probability) falls"
    )
    sentence = (
        f"With nothing but the words that {case.job.method.name} ranks highest, what is explained {falling} by "
        f"{said(interval)}, mean over {len(bins)} shares of the words and {interval.n} examples; with as many random "
        f"words alone by {said(random)}. The difference is {said(margin)}."
    )
    return Finding(
        "sufficiency", "sufficiency", interval, margin, holds(margin), sentence, values,
        reference={"random": random, "below random": margin}, **shown,
    )  # fmt: skip
