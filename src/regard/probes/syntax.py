"""Does a head follow the syntax?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from regard.aligning import pieces_of, unaligned
from regard.attention import Site, Trace
from regard.data import Example, Word
from regard.errors import NotServed, at_least_one, true_or_false
from regard.glimpses import Array, Survey, copies, glimpses, halves
from regard.halving import ends, looks_back, over_text, shares, traces, wordless
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "how much more often a head finds its best relation than the best fixed offset does"
NEEDS = ("weights", "words")
CITE = "clark2019does"
DIRECTIONS = ("dependent → head", "head → dependent")
FAR = 10  # words: offsets that are tried, before and after
LEAST = 0.1  # Voita et al.: how far above the offset a syntactic head is
cannot = wordless


def syntax(survey: Survey, *, least: int = 20, subtypes: bool = True) -> Probed:
    """For each relation of CoNLL-U the head that finds it best, and for each head the relation that it finds best.

    Â_ij, from word i to word j: the mean over the tokens of i of the sum over the tokens of j; special tokens and i = j
    are left out (Clark et al. 2019). An arc between a dependent d and its head g is found

        dependent → head   if argmax_j Â_dj = g: the dependent looks at its head
        head → dependent   if argmax_i Â_id = g: of all words the head looks most at the dependent

    so that each arc counts once in each direction, however many dependents a word has. It is Clark et al.'s rule;
    NOTE[DIFF] Voita et al. ask in the second direction whether argmax_j Â_gj is a dependent of g.

    The baseline is the best fixed offset: g = d + δ, |δ| ≤ 10. Heads and offsets are chosen on one half of the
    sentences, and scored on the other. So the number of heads that were tried needs no correction; the number of
    relations does: intervals of differences hold for all of them at a time. They come from drawing sentences again.

    A head has its relation for a name if it is 10 points above the offset there (Voita et al. 2019) and an interval
    that holds for all heads at a time is above 0. "all" are all arcs but those of punctuation. NOTE[DIFF] Clark et al.
    choose and score on the same sentences, count the root's arc as missed, and ask the "'s" instead of its noun.

    Args:
        survey: the model, and sentences of CoNLL-U.
        least: arcs that a relation must have in each half.
        subtypes: whether "nmod:poss" is a relation of its own, or a "nmod".
    """
    at_least_one("least", least)
    true_or_false("subtypes", subtypes)
    choose, score = halves(survey)
    names = ["all", *sorted({_name(word, subtypes) for one in survey.examples for word in _words(one)} - {"root"})]
    tally = _Tally(names, subtypes)
    hits, arcs, offsets = 0.0, 0.0, 0.0  # direction relation head; direction relation; direction relation offset
    for _, examples, seen in traces(survey, choose, "choosing heads"):
        found = tally.count(examples, seen)
        hits, arcs, offsets = hits + found.hits.sum(0), arcs + found.arcs.sum(0), offsets + found.offsets.sum(0)
    chosen = _chosen(np.asarray(hits), np.asarray(arcs), np.asarray(offsets), least)
    total: Any = 0.0  # of arcs, found by the best head, by the best offset: part draw direction relation
    own: Any = 0.0  # found by each head, of its own relation: draw head
    for places, examples, seen in traces(survey, score, "scoring heads"):
        found, lots = tally.count(examples, seen), copies(places, survey.draws, survey.seed)
        parts = np.stack([found.arcs, _take(found.hits, chosen.head), _take(found.offsets, chosen.offset)])
        total = total + np.einsum("ex,pedr->pxdr", lots, parts)
        own = own + lots.T @ found.hits.reshape(len(examples), -1, len(survey.index))[
            :, chosen.own, np.arange(len(survey.index))
        ]  # fmt: skip
    kept = chosen.enough & (total[0, 0] >= least)
    warnings = (*tally.warnings(), *_refused(names, np.minimum(np.asarray(arcs), total[0, 0]), kept, least))
    table = _table(survey, names, chosen, total, kept)
    values, drawn = _of_heads(survey, names, chosen, total, own, kept)
    return Probed(
        "syntax", "", values, _sentence(table), {"relations": table, "compared": _compared(table)}, CHARTS,
        warnings=warnings, drawn=drawn,
    )  # fmt: skip


CHARTS = {
    "relations": {
        "kind": "column_bars", "table": "compared",
        "caption": "How much more often the best head of a relation, in its better direction, is right than the best "
        "fixed offset: chosen on one half of the sentences and scored on the other. Intervals hold for all at a time.",
    }
}  # fmt: skip


@dataclass
class _Found:
    """Of each sentence how many arcs there are, and how many are found.

    Args:
        arcs: ``(example, direction, relation)``.
        hits: by each head, ``(example, direction, relation, head)``; NaN at sites that do not look at words.
        offsets: by each offset, ``(example, direction, relation, offset)``.
    """

    arcs: Array
    hits: Array
    offsets: Array


@dataclass
class _Chosen:
    """What is best on one half: the head and the offset of each relation, and the relation of each head."""

    head: NDArray[np.int64]  # direction relation
    offset: NDArray[np.int64]  # direction relation
    own: NDArray[np.int64]  # head: direction × relation
    enough: NDArray[np.bool_]  # direction relation


class _Tally:
    """Counts arcs, batch by batch. Arguments as in `syntax`."""

    def __init__(self, names: list[str], subtypes: bool) -> None:
        self.number = {name: place for place, name in enumerate(names)}
        self.subtypes = subtypes
        self.missing = self.words = self.unseen = self.arcs = 0

    def count(self, examples: Sequence[Example], seen: Trace) -> _Found:
        """Those of a batch."""
        of_words = [_words(one) for one in examples]
        spans = [[(word.start, word.end) for word in words] for words in of_words]
        pieces = pieces_of(seen.batch, [str(one.input) for one in examples], spans)  # example word row
        known = pieces.any(-1)
        self.words += sum(map(len, of_words))
        self.missing += sum(map(len, of_words)) - int(known.sum())
        head, kind = self._arcs(of_words, known.shape[1])
        place = torch.arange(known.shape[1])
        there = (head >= 0) & known & known.gather(1, head.clamp_min(0))
        self.arcs += 2 * int(there.sum())
        arc = torch.stack([there, there], 1)  # example direction word
        if looks_back(seen):
            arc &= torch.stack([head < place, head > place], 1)
        self.unseen += 2 * int(there.sum()) - int(arc.sum())
        kind, arc = kind.double(), arc.double()
        apart = one_hot((head - place).clamp(-FAR - 1, FAR + 1) + FAR + 1, 2 * FAR + 3)[..., 1:-1].double()
        pieces, own = pieces.to(seen.batch.real.device), head[:, None, None]
        hits = []
        sites = {site.index for site in over_text(seen)}
        for site in seen.sites:
            if site.index not in sites:
                hits.append(torch.full((*arc.shape[:2], kind.shape[-1], site.heads), torch.nan, dtype=torch.float64))
                continue
            hit = (_argmax(seen, site, pieces) == own).double() * arc[:, :, None]  # example direction head word
            hits.append(torch.einsum("edhw,ewr->edrh", hit, kind))
        return _Found(
            torch.einsum("edw,ewr->edr", arc, kind).numpy(), torch.cat(hits, -1).numpy(),
            torch.einsum("edw,ewr,ewo->edro", arc, kind, apart).numpy(),
        )  # fmt: skip

    def warnings(self) -> tuple[str, ...]:
        """What was left out."""
        back = (
            f"The model looks back only: {self.unseen:,} of {self.arcs:,} arcs, each in two directions, are not seen."
        )
        return (*unaligned(self.missing, self.words, "words"), *((back,) if self.unseen else ()))

    def _arcs(self, of_words: Sequence[Sequence[Word]], size: int) -> tuple[Tensor, Tensor]:
        """``(example, word)`` heads, -1: none; ``(example, word, relation)``, 1 at that of a word, and at "all"."""
        head = torch.full((len(of_words), size), -1)
        kind = torch.zeros(len(of_words), size, len(self.number))
        for at, words in enumerate(of_words):
            for place, word in enumerate(words):
                if word.head >= 0 and (name := _name(word, self.subtypes)) in self.number:
                    head[at, place] = word.head
                    kind[at, place, self.number[name]] = 1
                    kind[at, place, 0] = name.partition(":")[0] != "punct"
        return head, kind


def _argmax(seen: Trace, site: Site, pieces: Tensor) -> Tensor:
    """``(example, direction, head, word)``: at which other word each looks most, and which looks most at it.

    -1 where there is none: the head looks at special tokens and the word itself alone.
    """
    pieces = pieces.to(site.dtype)
    mean = pieces / pieces.sum(-1, keepdim=True).clamp_min(1)
    words = pieces.new_zeros(len(pieces), site.heads, pieces.shape[1], pieces.shape[1])  # example head from to
    for glimpse in glimpses(seen, site):
        to = glimpse.weights @ pieces.mT[:, None]  # example head row to
        words += mean[:, None, :, glimpse.rows] @ to
    words.diagonal(dim1=-2, dim2=-1).fill_(-1.0)
    best = [words.max(-1), words.max(-2)]
    return torch.stack([one.indices.where(one.values > 0, -1) for one in best], 1).cpu()


def _words(example: Example) -> Sequence[Word]:
    words: Sequence[Word] = example.marks.get("words", ())
    return words


def _name(word: Word, subtypes: bool) -> str:
    return word.relation if subtypes else word.relation.partition(":")[0]


def _take(counts: Array, which: NDArray[np.int64]) -> Array:
    """``(example, direction, relation)`` of ``(…, which)``."""
    return np.asarray(np.take_along_axis(counts, which[None, ..., None], -1)[..., 0])


def _chosen(hits: Array, arcs: Array, offsets: Array, least: int) -> _Chosen:
    """The best of each. Of a head's relations few arcs are no evidence: two standard errors are taken off."""
    enough = arcs >= least
    count = np.maximum(arcs, 1)[..., None]
    rate = hits / count
    sure = rate - 2 * np.sqrt(rate * (1 - rate) / count) - offsets.max(-1, keepdims=True) / count
    sure = np.where(enough[..., None] & np.isfinite(sure), sure, -np.inf).reshape(-1, hits.shape[-1])
    return _Chosen(np.nan_to_num(hits, nan=-1.0).argmax(-1), offsets.argmax(-1), sure.argmax(0), enough)


def _refused(names: list[str], arcs: Array, kept: NDArray[np.bool_], least: int) -> Iterable[str]:
    """Which relations have too few arcs, and how many."""
    few = [f"{name} ({arcs[:, at].max():.0f})" for at, name in enumerate(names) if not kept[:, at].any()]
    if not kept.any():
        raise NotServed(
            f"there are too few sentences: no relation has {least} arcs in each half of them: {', '.join(few)}. Pass "
            "more sentences (examples=None takes all), or a smaller least."
        )
    if few:
        yield f"Relations with fewer than {least} arcs in one half are left out: {', '.join(few)}."


def _table(survey: Survey, names: list[str], chosen: _Chosen, total: Array, kept: NDArray[np.bool_]) -> pd.DataFrame:
    """A row for each relation and direction."""
    arcs, best, fixed = total  # draw direction relation
    rate, base = shares(best, arcs), shares(fixed, arcs)
    low, high = ends(rate - base, int(kept.sum()))
    under, over = np.quantile(rate[1:], [0.025, 0.975], axis=0)
    rows = []
    for way, at in sorted(zip(*kept.nonzero(), strict=True), key=lambda one: (-arcs[0, 0, one[1]], one[1], one[0])):
        head = survey.index.iloc[chosen.head[way, at]]
        rows.append(
            {"relation": names[at], "direction": DIRECTIONS[way], "layer": head["layer"], "head": head["head"]}
            | {"accuracy": rate[0, way, at], "accuracy_low": under[way, at], "accuracy_high": over[way, at]}
            | {"offset": chosen.offset[way, at] - FAR, "baseline": base[0, way, at]}
            | {"difference": rate[0, way, at] - base[0, way, at]}
            | {"difference_low": low[way, at], "difference_high": high[way, at], "arcs": int(arcs[0, way, at])}
        )
    return pd.DataFrame(rows)


def _of_heads(
    survey: Survey, names: list[str], chosen: _Chosen, total: Array, own: Array, kept: NDArray[np.bool_]
) -> tuple[pd.DataFrame, Array]:
    """How far each head is above the offset in its own relation, and the relation where that is far enough."""
    arcs, _, fixed = total.reshape(*total.shape[:2], -1)[:, :, chosen.own]  # draw head
    drawn = shares(own, arcs) - shares(fixed, arcs)
    drawn[:, ~kept.reshape(-1)[chosen.own]] = np.nan
    low, _ = ends(drawn, int(np.isfinite(drawn[0]).sum()))
    ways, relations = np.divmod(chosen.own, len(names))
    words = [
        f"{names[at]} → head" if way == 0 else f"head → {names[at]}" for way, at in zip(ways, relations, strict=True)
    ]
    labels = [word if far else "" for word, far in zip(words, (drawn[0] >= LEAST) & (low > 0), strict=True)]
    return tabled(survey.index, drawn, labels), drawn


def _compared(table: pd.DataFrame) -> pd.DataFrame:
    """For the chart: of each relation, in its better direction, how far the head is above the offset."""
    best = table.sort_values("difference", ascending=False, kind="stable").drop_duplicates("relation")
    names = {"relation": "column", "difference": "value", "difference_low": "low", "difference_high": "high"}
    return best.rename(columns=names)[[*names.values()]].assign(by="head − offset").reset_index(drop=True)


def _sentence(table: pd.DataFrame) -> str:
    above = table[table["difference_low"] > 0]
    said = f"{above['relation'].nunique()} of {table['relation'].nunique()} relations are found by a head more often "
    said += "than by the best fixed offset"
    if above.empty:
        return f"{said}."
    best = above.sort_values("difference").iloc[-1]
    return (
        f"{said}. The farthest above it is {best['relation']} ({best['direction']}): layer {best['layer']}, head "
        f"{best['head']} finds {best['accuracy']:.0%} of {best['arcs']:,}, the offset {best['offset']:+d} "
        f"{best['baseline']:.0%}."
    )
