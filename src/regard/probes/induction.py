"""Does a head look for what came after the same token before?"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from regard.circuits import on_text, random_text, summed_up
from regard.errors import OptionError
from regard.glimpses import Glimpse, Survey
from regard.probed import Probed

EACH = "case"
ABOUT = "prefix matching on repeated random text"
NEEDS = ("weights", "tokens")
CITE = "olsson2022context"
LEAST = 0.4


def induction(survey: Survey, *, tokens: int = 25, repeats: int = 4, sequences: int = 10) -> Probed:
    """Prefix matching (Olsson et al. 2022): mean over q of Σ_k A_qk over all k with token k−1 = token q, k−1 < q.

    The text is random: so many different tokens, repeated, after the token that texts begin with; the data are not
    looked at. Rows are those whose token was there before. Intervals are over texts. A head is called an induction head
    from 0.4 on. NOTE[DIFF] The paper draws no line; of its models and of GPT-2 small nearly all heads are below 0.1,
    and induction heads well above a half.
    """
    if repeats < 2:
        raise OptionError(f"repeats={repeats!r}: a text must come at least twice.")
    ids = random_text(survey.subject, tokens=tokens, repeats=repeats, sequences=sequences, seed=survey.seed)
    return summed_up(survey, on_text(survey, ids, looked), "induction", LEAST)


def looked(glimpse: Glimpse, ids: Tensor) -> Tensor:
    """``(example, head, row)``: attention to the successors of earlier occurrences; NaN: there are none."""
    before = (ids[:, :, None] == ids[:, None, :]).tril(-1)  # example row key: the same token, earlier
    after = pad(before[..., :-1], (1, 0))[:, None, glimpse.rows]
    return (glimpse.weights * after).sum(-1).where(after.any(-1), float("nan"))
