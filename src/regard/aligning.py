"""From places that people marked in a text to the rows of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import NotServed
from regard.types import Batch, Features

MOST = 0.5  # share of words without a token; with more, model and data are not of one language
Span = tuple[int, int]


def rows_of(features: Features, text: str, spans: Sequence[Span]) -> tuple[tuple[int, ...], ...]:
    """For each span ``(start, end)`` of letters the rows of its tokens; () where no token begins in it.

    A token belongs to the span in which it begins; white space that it begins with does not count. Spans may share
    letters, and then share the tokens. Where the tokenizer does not say which letters a token stands for, its words
    are looked for in the text, one after the other, and in them the tokens.
    """
    starts = _told(features, text) if features.spans else _looked_for(features, text)
    return tuple(tuple(row for row, at in starts if start <= at < end) for start, end in spans)


def pieces_of(batch: Batch, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> Tensor:
    """``(example, span, row)``: 1 where a row is a token of a span; of the source, where there is one."""
    sequence = batch.source or batch
    found = torch.zeros(len(texts), max(map(len, spans)), sequence.real.shape[1])
    for place, (one, text, some) in enumerate(zip(sequence.features, texts, spans, strict=True)):
        for at, rows in enumerate(rows_of(one, text, some)):
            found[place, at, list(rows)] = 1.0
    return found


def unaligned(missing: int, total: int, what: str) -> tuple[str, ...]:
    """What to warn of where some of what was marked has no token; an error where it is more than half."""
    if missing > MOST * total:
        raise NotServed(
            f"the tokenizer cannot align {missing:,} of {total:,} {what}: no token begins in them. Texts may have been "
            "cut (over_limit='truncate'), or the tokenizer rewrites them: use one that keeps their letters."
        )
    return (f"{missing:,} of {total:,} {what} have no token of their own, and are left out.",) if missing else ()


def _told(features: Features, text: str) -> list[tuple[int, int]]:
    """The row of each token, and the letter it begins with."""
    found = []
    for row, (start, end), word in zip(features.rows, features.spans, features.word, strict=True):
        inside = text[start:end]
        if word is not None and inside.strip():
            found.append((row, start + len(inside) - len(inside.lstrip())))
    return found


def _looked_for(features: Features, text: str) -> list[tuple[int, int]]:
    """The same, where only words and tokens are known; those that are not in the text are left out."""
    lower = text.lower() if len(text.lower()) == len(text) else text
    found, after = [], 0
    tokens = dict(zip(features.rows, features.tokens, strict=True))
    for word, rows in zip(features.words, features.rows_of_words, strict=True):
        start = text.find(word, after)
        start = lower.find(word.lower(), after) if start < 0 else start
        if start < 0:
            continue
        at = start
        after = start + len(word)
        for row in rows:
            piece = tokens[row].strip().removeprefix("##").lower()  # as WordPiece marks them
            here = lower.find(piece, at, after)
            found.append((row, max(here, at)))
            at = here + len(piece) if here >= 0 else at
    return found
