"""Does a head raise the logits of the tokens that it looks at?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.attention import Trace
from regard.circuits import must_end, on_text, random_text, summed_up
from regard.glimpses import Glimpse, Survey
from regard.probed import Probed

EACH = "case"
ABOUT = "share of raised logits on what is looked at, from −1 to 1"
NEEDS = ("weights", "projections", "tokens")
CITE = "olsson2022context"


def cannot(subject: object, seen: Trace) -> str | None:
    """It needs output projections."""
    return None if any(site.onward for site in seen.sites) else "no output projection was seen."


def direct_copying(survey: Survey, *, tokens: int = 25, sequences: int = 10) -> Probed:
    """2s − 1, s the mean over rows q of Σ_t a_qt r_qt / Σ_t r_qt, over the tokens t of random text without repeats.

    r_qt = ReLU(ℓ_qt − mean over the vocabulary), ℓ_q = W_U W_O (A·V)_q: what the head adds to the logits of each token
    by the direct path, the last norm's weight folded in (what it divides by cancels); a_qt is how much of its attention
    row q has on token t. 1: all that is raised is what is looked at; −1: nothing of it. By chance it is 2 / tokens − 1,
    and so it is where a head looks at all alike: whether it would copy whatever it looks at is what `copying` says.

    NOTE[DIFF] Olsson et al. 2022 is known here by notes, in which the ratio is in [0, ½] and rescaled to [−1, 1]; here
    it reaches 1. Attention to the token that texts begin with, a sink that stands for nothing, is left out of a, which
    sums to 1 over the random tokens. Rows that raise none of these are left out.
    """
    _, unembed = must_end(survey)
    ids = random_text(survey.subject, tokens=tokens, repeats=1, sequences=sequences, seed=survey.seed)
    first = ids.shape[1] - tokens
    values = on_text(survey, ids, partial(copied, unembed=unembed - unembed.mean(0), first=first), onward=True)
    done = summed_up(survey, 2 * values - 1)
    silent = int(done.values["value"].isna().sum())
    note = f"{silent} heads raise the logit of none of these tokens, or their output projection is not known."
    return replace(done, warnings=(note,) if silent else (), settings={"chance": 2 / tokens - 1})


def copied(glimpse: Glimpse, ids: Tensor, *, unembed: Tensor, first: int) -> Tensor:
    """``(example, head, row)``: s; NaN at rows that raise nothing."""
    site, weights = glimpse.site, glimpse.weights
    if site.onward is None:
        return glimpse.undefined
    written = torch.einsum("ehkc,hco->ehko", site.values.to(weights), site.onward.projection.to(weights))
    of_keys = torch.einsum("ehko,eto->ehkt", written, unembed[ids[:, first:]].to(weights))
    raised = (weights @ of_keys).relu()  # example head row token
    looked = weights[..., first:]
    share = (looked * raised).sum(-1) / looked.sum(-1) / raised.sum(-1)  # 0 / 0: not defined
    return share.where(glimpse.rows >= first, torch.nan)
