"""Does a head look at the same token, where it was before?"""

from __future__ import annotations

from torch import Tensor

from regard.circuits import on_text, random_text, summed_up
from regard.errors import OptionError
from regard.glimpses import Glimpse, Survey
from regard.probed import Probed

EACH = "case"
ABOUT = "attention to the same token before, on repeated random text"
NEEDS = ("weights", "tokens")
CITE = "olsson2022context"
LEAST = 0.4


def duplicate(survey: Survey, *, tokens: int = 25, repeats: int = 4, sequences: int = 10) -> Probed:
    """Mean over q of Σ_k A_qk over all k < q with token k = token q, on the text that `induction` is asked on.

    Rows are those whose token was there before. A head is called a duplicate-token head from 0.4 on.
    """
    if repeats < 2:
        raise OptionError(f"repeats={repeats!r}: a text must come at least twice.")
    ids = random_text(survey.subject, tokens=tokens, repeats=repeats, sequences=sequences, seed=survey.seed)
    return summed_up(survey, on_text(survey, ids, looked), "duplicate", LEAST)


def looked(glimpse: Glimpse, ids: Tensor) -> Tensor:
    """``(example, head, row)``: attention to earlier occurrences; NaN: there are none."""
    before = (ids[:, :, None] == ids[:, None, :]).tril(-1)[:, None, glimpse.rows]  # example 1 row key
    return (glimpse.weights * before).sum(-1).where(before.any(-1), float("nan"))
