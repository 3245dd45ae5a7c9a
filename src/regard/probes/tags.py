"""Does a head look at a part of speech?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.aligning import pieces_of, unaligned
from regard.attention import Site, Trace
from regard.data import Example
from regard.errors import NotServed, at_least_one
from regard.glimpses import Array, Survey, copies, glimpses, halves
from regard.halving import ends, over_text, shares, traces, wordless
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "share of attention on a head's own part of speech, above what an even look gives it"
NEEDS = ("weights", "words")
CITE = "vig2019analyzing"
LEAST = 0.1  # how far above an even look a head is called after its part of speech
cannot = wordless


def tags(survey: Survey, *, least: int = 20) -> Probed:
    """For each part of speech (UPOS) the head that looks most at it, and for each head the one it looks most at.

        share(t) = Σ_q r_q Σ_{k of t} A_qk / Σ_q r_q m_q        m_q = Σ_{k of words} A_qk
        base(t)  = Σ_q r_q m_q b_q(t) / Σ_q r_q m_q             b_q(t): the share of t among the tokens that q sees

    over tokens q and k of words, r_q = 1 / (tokens of q's word): words count alike. The base is what a head would give
    that spends as much on words but looks at all their tokens alike; such a head is at it exactly. Heads and tags are
    chosen on one half of the sentences and scored on the other; intervals of differences hold for all tags at a time.

    A head has its tag for a name if it is 10 points above the base there and an interval that holds for all heads at a
    time is above 0. NOTE[DIFF] Vig and Belinkov leave out the first token, which has no special one before it.

    Args:
        survey: the model, and sentences of CoNLL-U.
        least: words that a tag must have in each half.
    """
    at_least_one("least", least)
    names = sorted({word.tag for one in survey.examples for word in one.marks["words"]})
    tally = _Tally(names)
    (choose, count), (draws, scored) = (
        tally.total(survey, places, lots)
        for places, lots in zip(halves(survey), (0, survey.draws), strict=True)
    )  # fmt: skip
    kept = np.minimum(count, scored) >= least
    warnings = (
        *unaligned(tally.missing, tally.words, "words"),
        *_refused(names, np.minimum(count, scored), kept, least),
    )
    early = np.where(kept[:, None], _above(*choose)[0], np.nan)  # tag head
    late = _above(*draws)  # draw tag head
    best, own = np.nan_to_num(early, nan=-np.inf).argmax(1), np.nan_to_num(early, nan=-np.inf).argmax(0)
    drawn = np.take_along_axis(late, own[None, None], 1)[:, 0]
    low, _ = ends(drawn, int(np.isfinite(drawn[0]).sum()))
    labels = [names[at] if far else "" for at, far in zip(own, (drawn[0] >= LEAST) & (low > 0), strict=True)]
    table = _table(survey, names, best, draws, late, kept, scored)
    return Probed(
        "tags",
        "",
        tabled(survey.index, drawn, labels),
        _sentence(table),
        {"tags": table},
        warnings=warnings,
        drawn=drawn,
    )


@dataclass
class _Tally:
    """Adds up, batch by batch, where heads look."""

    names: list[str]
    missing: int = 0
    words: int = 0

    def total(self, survey: Survey, places: list[int], draws: int) -> tuple[tuple[Array, Array, Array], NDArray[Any]]:
        """Sums ``(1 + draw, tag, head)`` of given and even weight, ``(1 + draw, 1, head)`` of all; words by tag."""
        sums: list[Any] = [0.0, 0.0, 0.0]
        count: Any = 0
        for some, examples, seen in traces(survey, places, "looking at parts of speech"):
            rows, tagged = self._rows(examples, seen)
            count = count + np.array([sum(w.tag == name for one in examples for w in one.marks["words"])
                                      for name in self.names])  # fmt: skip
            lots = copies(some, draws, survey.seed)
            sites = {site.index for site in over_text(seen)}
            found = [
                _given(seen, site, rows, tagged) if site.index in sites
                else tuple(torch.full((len(some), size, site.heads), torch.nan) for size in (*tagged.shape[2:] * 2, 1))
                for site in seen.sites
            ]  # fmt: skip
            for at, parts in enumerate(zip(*found, strict=True)):
                sums[at] = sums[at] + np.tensordot(lots, torch.cat(parts, -1).double().numpy(force=True), (0, 0))
        return (sums[0], sums[1], sums[2]), count

    def _rows(self, examples: Sequence[Example], seen: Trace) -> tuple[Tensor, Tensor]:
        """``(example, row)``: r; ``(example, row, tag)``: 1 at the tag of its word; the first, where two share."""
        words = [one.marks["words"] for one in examples]
        spans = [[(word.start, word.end) for word in some] for some in words]
        pieces = pieces_of(seen.batch, [str(one.input) for one in examples], spans)  # example word row
        size = pieces.sum(-1, keepdim=True)
        self.words += sum(map(len, words))
        self.missing += sum(map(len, words)) - int((size > 0).sum())
        kind = torch.zeros(*pieces.shape[:2], len(self.names))
        for at, some in enumerate(words):
            kind[at, range(len(some)), [self.names.index(word.tag) for word in some]] = 1.0
        first = pieces * (pieces.cumsum(1) == 1)
        device = seen.batch.real.device
        return (pieces / size.clamp_min(1)).sum(1).to(device), (first.mT @ kind).to(device)


def _given(seen: Trace, site: Site, rows: Tensor, tagged: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(example, tag, head)``: weight on each tag; what an even look would give; on all ``(example, 1, head)``."""
    given, even = (torch.zeros(*tagged.shape[::2], site.heads, device=rows.device) for _ in range(2))
    for glimpse in glimpses(seen, site):
        on = torch.einsum("ehrk,ekt->ehrt", glimpse.weights, tagged.to(glimpse.weights))
        seen_of = glimpse.visible.to(tagged.dtype) @ tagged  # example row tag
        usual = seen_of / seen_of.sum(-1, keepdim=True).clamp_min(1)
        r = rows[:, glimpse.rows].to(on)
        given += torch.einsum("er,ehrt->eth", r, on)
        even += torch.einsum("er,ehr,ert->eth", r, on.sum(-1), usual.to(on))
    return given, even, given.sum(1, keepdim=True)


def _above(given: Array, even: Array, mass: Array) -> Array:
    return shares(given, mass) - shares(even, mass)


def _refused(names: list[str], count: NDArray[Any], kept: NDArray[np.bool_], least: int) -> tuple[str, ...]:
    """Which tags have too few words, and how many."""
    few = ", ".join(f"{name} ({number})" for name, number, one in zip(names, count, kept, strict=True) if not one)
    if not kept.any():
        raise NotServed(
            f"there are too few sentences: no part of speech has {least} words in each half of them: {few}. Pass more "
            "sentences (examples=None takes all), or a smaller least."
        )
    return (f"Parts of speech with fewer than {least} words in one half are left out: {few}.",) if few else ()


def _table(
    survey: Survey, names: list[str], best: NDArray[np.int64], sums: tuple[Array, Array, Array], above: Array,
    kept: NDArray[np.bool_], count: NDArray[Any],
) -> pd.DataFrame:  # fmt: skip
    """A row for each tag, the farthest above its base first."""
    at = np.arange(len(names))
    share, base = (shares(one, sums[2])[0, at, best] for one in sums[:2])
    low, high = ends(above[:, at, best], int(kept.sum()))
    heads = survey.index.iloc[best].reset_index(drop=True)
    table = pd.DataFrame({
        "tag": names, "layer": heads["layer"], "head": heads["head"], "share": share, "base": base,
        "difference": share - base, "difference_low": low, "difference_high": high, "words": count,
    })  # fmt: skip
    return table[kept].sort_values("difference", ascending=False, kind="stable", ignore_index=True)


def _sentence(table: pd.DataFrame) -> str:
    first = table.iloc[0]
    return (
        f"{int((table['difference_low'] > 0).sum())} of {len(table)} parts of speech have a head that looks at them "
        f"more than an even look would; most of all {first['tag']}: layer {first['layer']}, head {first['head']} gives "
        f"it {first['share']:.0%} of what it gives to words, an even look {first['base']:.0%}."
    )
