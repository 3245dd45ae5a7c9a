"""Choose on one half of the examples and score on the other: what was best by luck on the one is not on the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy import stats

from regard.attention import Site, Trace, trace
from regard.attention.sites import Part
from regard.data import Example
from regard.glimpses import Array, Survey, batches
from regard.progress import Counter

LEVEL = 0.95


def traces(survey: Survey, places: list[int], what: str) -> Iterator[tuple[list[int], list[Example], Trace]]:
    """Some examples in batches: their places, they, and their trace."""
    with Counter(what, len(places)) as counter:
        for some, batch in batches(survey.subject, (survey.examples[place] for place in places), survey.batch_size):
            yield [places[at] for at, _ in some], [one for _, one in some], trace(survey.subject, batch)
            counter.advance(len(some))


def over_text(seen: Trace) -> list[Site]:
    """The sites where tokens of the text look at one another: those of an encoder, or of a decoder that reads it."""
    return [site for site in seen.sites if site.kind in ("self", "encoder") and site.rows is None]


def wordless(subject: Any, seen: Trace) -> str | None:
    """Why nothing can be said of words: for ``cannot`` of probes that are about them."""
    if hasattr(subject, "schema"):
        return "the columns of a table are no words."
    return None if over_text(seen) else "the model has no attention in which words look at one another."


def looks_back(seen: Trace) -> bool:
    """Whether no token sees one that comes after it."""
    for site in over_text(seen):
        rows = torch.arange(site.shape[2], device=site.real.device)
        ahead = site.allowed(Part(slice(None), slice(0, 1), rows), site.shape[3])[:, 0].triu(1)
        if (ahead & site.real[:, :, None] & site.real_keys[:, None]).any():
            return False
    return True


def shares(part: Array, whole: Array) -> Array:
    """Quotients of sums ``(1 + draw, …)``; a draw that holds nothing is all of them. NaN: there is nothing."""
    with np.errstate(all="ignore"):
        found = part / whole
    return np.where(np.isfinite(found), found, found[:1])


def ends(drawn: Array, tests: int = 1) -> tuple[Array, Array]:
    """The ends of 95 % intervals of ``(1 + draw, …)``, all of ``tests`` right at a time (Bonferroni).

    So far out draws do not reach: it is the value ∓ z · their standard deviation.
    """
    z = stats.norm.ppf(1 - (1 - LEVEL) / (2 * max(tests, 1)))
    spread = z * drawn[1:].std(0)
    return drawn[0] - spread, drawn[0] + spread
