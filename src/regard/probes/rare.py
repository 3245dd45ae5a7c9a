"""Does a head look at the rarest word?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention import Trace, trace
from regard.errors import InputError, OptionError
from regard.glimpses import Glimpse, Survey, row_means
from regard.probed import Probed, tabled
from regard.types import Batch

EACH = "case"
ABOUT = "share of rows whose largest weight is on the rarest word"
NEEDS = ("weights",)
CITE = "voita2019analyzing"
LEAST = 0.5  # of the rows that chance leaves over: from there on a head is named
TIES = "most tokens are of a rarest word, since many words are equally rare: pass counts= of a larger corpus."


def cannot(subject: Any, trace: Trace) -> str | None:
    """It is about texts."""
    return "the columns of a table are all there in every row: none is rare." if hasattr(subject, "schema") else None


def rare(survey: Survey, *, counts: Mapping[str, float] | str | Path | None = None) -> Probed:
    """argmax_k A_qk is a token of the word that is rarest among those which row q may see; special tokens left out.

    Words that are equally rare count alike; chance, in the table beside it, is their share of the tokens. A head is
    named where it does so in half of the rows that chance leaves over, (s − c) / (1 − c) ≥ ½, and its interval is above
    chance.

    NOTE[DIFF] Voita et al. count tokens in the corpus that the model was trained on, which nobody else has.

    Args:
        survey: the model and its examples.
        counts: how often words occur: a mapping, or a file with a word and its count in each line. What is not in it
            never occurs. None: as often as in these examples, without case; the fewer these are, the more words occur
            once, and the nearer is chance to 1.
    """
    known = _counted(survey) if counts is None else _given(counts)
    shares = np.full((len(survey.examples), 2, len(survey.index)), np.nan)
    met = False
    for places, batch in survey.batches("looking at rare words"):
        seen = trace(survey.subject, batch)
        met = met or any(word in known for word in _words(batch))
        found = [row_means(seen, site, {"": (lambda glimpse: _look(glimpse, known), 2)})[""] for site in seen.sites]
        shares[places] = torch.cat(found, -1).numpy()
    if not met:
        raise InputError("counts holds none of the words of the data. Pass counts of words in its language.")
    drawn, chance = survey.drawn(shares[:, 0]), survey.drawn(shares[:, 1])
    values = tabled(survey.index, drawn)
    with np.errstate(invalid="ignore", divide="ignore"):  # every word is a rarest one
        beyond = tabled(survey.index, (drawn - chance) / (1 - chance))
    named = (beyond["value"] >= LEAST) & (beyond["low"] > 0)
    table = values.rename(columns={"value": "share", "low": "share_low", "high": "share_high"}).assign(chance=chance[0])
    level = float(np.nanmean(chance[0]))
    return Probed(
        "rare", "", values.assign(label=np.where(named, "rare words", "")),
        f"{named.sum()} of {len(values)} heads look at the rarest word; by chance {level:.0%} of rows would.",
        tables={"chance": table},
        settings={"counts": f"{len(known):,} words" if isinstance(counts, Mapping) else counts and str(counts)},
        warnings=(TIES,) if level > LEAST else (), drawn=drawn,
    )  # fmt: skip


def _look(glimpse: Glimpse, known: Mapping[str, float]) -> Tensor:
    """Whether the largest weight is on a rarest word, and the chance of that: ``(example, head, row, 2)``."""
    if not glimpse.keys.features:
        return glimpse.undefined[..., None].expand(*glimpse.weights.shape[:3], 2)
    often = torch.full(glimpse.keys.real.shape, torch.inf, dtype=torch.float64)  # example key; special tokens: never
    for place, one in enumerate(glimpse.keys.features):
        for row, word in zip(one.rows, one.word, strict=True):
            if word is not None:
                often[place, row] = known.get(one.words[word].casefold(), 0.0)
    candidates = glimpse.visible & often.isfinite().to(glimpse.visible.device)[:, None]  # example row key
    seen = often.to(candidates.device)[:, None].expand(candidates.shape).where(candidates, torch.inf)
    rarest = candidates & (seen == seen.amin(-1, keepdim=True))
    best = glimpse.weights.masked_fill(~candidates[:, None], -1.0).argmax(-1, keepdim=True)  # example head row 1
    hit = rarest[:, None].expand(glimpse.weights.shape).gather(-1, best)
    chance = (rarest.sum(-1) / candidates.sum(-1))[:, None, :, None].expand_as(hit)  # 0 / 0: no word is seen
    return torch.cat([hit.to(chance.dtype).where(chance.isfinite(), torch.nan), chance], -1)


def _counted(survey: Survey) -> dict[str, float]:
    """How often each word occurs in the examples."""
    found: Counter[str] = Counter()
    for _, batch in survey.batches("counting words"):
        found.update(_words(batch))
    return dict(found)


def _words(batch: Batch) -> list[str]:
    """All words of a batch, and of its source, without case."""
    every = [*batch.features, *(batch.source.features if batch.source else ())]
    return [word.casefold() for one in every for word in one.words]


def _given(counts: Mapping[str, float] | str | Path) -> dict[str, float]:
    """Counts from a mapping, or from the lines of a file; those of words that differ in case are added up."""
    if not isinstance(counts, (Mapping, str, Path)):
        raise OptionError(
            f"counts={counts!r} must be counts by word, or a file with a word and its count in each line."
        )
    pairs: Any = counts.items() if isinstance(counts, Mapping) else _lines(Path(counts))
    found: Counter[str] = Counter()
    for word, count in pairs:
        found[word.casefold()] += count
    return dict(found)


def _lines(path: Path) -> Iterator[tuple[str, float]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"counts={str(path)!r} cannot be read: {problem}.") from None
    for number, line in enumerate(lines, 1):
        try:
            word, count = line.rsplit(None, 1)
            yield word, float(count)
        except ValueError:
            raise InputError(
                f"counts={str(path)!r}, line {number}: {line!r} is no word and its count, such as 'the 22038615'."
            ) from None
