"""The same inputs without some of their rows, at the level of ids: nothing is decoded and read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from regard.types import Batch, Features, Source


def shortened(
    batch: Batch, gone: Tensor, fill: Mapping[str, int], *, side: str = "right", needed: Tensor | None = None
) -> Batch:
    """Take rows out, and padding that is not needed any more; later rows move up.

    An input of which nothing would be left keeps one row, which can be seen, with padding in it.

    Args:
        batch: the rows are those of its source, where it has one.
        gone: ``(example, row)``: what is taken out.
        fill: the inputs that have these rows, and what they have at padding; ids come first, masks have 0.
        side: where shorter inputs are padded.
        needed: ``(example, row)``: one of these must be left; None: any.
    """
    sequence = batch.source or batch
    kept = sequence.real & ~gone
    needed = sequence.real if needed is None else needed
    empty = ~(kept & needed).any(-1)
    held = torch.zeros_like(kept)
    held[empty, needed[empty].long().argmax(-1)] = True
    kept |= held
    lengths = kept.sum(-1, keepdim=True)
    width = int(lengths.max())
    place = torch.arange(width, device=kept.device)
    if side == "left":
        order, there = kept.to(torch.int8).argsort(dim=-1, stable=True)[:, -width:], place >= width - lengths
    else:
        order, there = (~kept).to(torch.int8).argsort(dim=-1, stable=True)[:, :width], place < lengths
    ids, padding = next(iter(fill.items()))
    inputs = {**batch.inputs, ids: batch.inputs[ids].masked_fill(held, padding)}
    for name, padding in fill.items():
        if name in inputs:
            inputs[name] = inputs[name].gather(1, order).masked_fill(~there, padding)
    if "position_ids" in inputs:
        inputs["position_ids"] = (there.cumsum(-1) - 1).clamp_min(0)
    features = tuple(
        _at(one, rows[seen].tolist(), place[seen].tolist())
        for one, rows, seen in zip(sequence.features, order, there, strict=True)
    )
    if batch.source is None:
        return replace(batch, inputs=inputs, real=there, features=features)
    return replace(batch, inputs=inputs, source=Source(there, features))


def replaced(batch: Batch, gone: Tensor, name: str, token: int) -> Batch:
    """Put a token in the place of others; everything stays where it is."""
    return replace(batch, inputs={**batch.inputs, name: batch.inputs[name].masked_fill(gone, token)})


def _at(features: Features, rows: list[int], places: list[int]) -> Features:
    """The tokens of some rows, which are now in other places."""
    of = {row: (token, word) for row, token, word in zip(features.rows, features.tokens, features.word, strict=True)}
    kept = [(place, *of[row]) for place, row in zip(places, rows, strict=True) if row in of]
    now, tokens, word = zip(*kept, strict=True) if kept else ((), (), ())
    return Features(tokens, now, features.words, word, None)
