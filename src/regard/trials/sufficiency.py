"""With nothing but the words that the explanation points at, is the model still as sure?"""

from __future__ import annotations

from collections.abc import Sequence

from regard.cases import Case
from regard.erasing import BINS
from regard.finding import Finding
from regard.removals import against_random

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
    return against_random(case, "sufficiency", bins, repeats, removed=False)
