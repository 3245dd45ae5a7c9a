"""Without the words that the explanation points at, is the model still as sure?"""

from __future__ import annotations

from collections.abc import Sequence

from regard.cases import Case
from regard.erasing import BINS
from regard.finding import Finding
from regard.removals import against_random

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
    return against_random(case, "comprehensiveness", bins, repeats, removed=True)
