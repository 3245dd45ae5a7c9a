"""Which attention a trial edits, what it shows of the words, and what the output is without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention import Rerun
from regard.attention.editing import Spot
from regard.attention.edits import Rows, scale
from regard.cases import Array, Part
from regard.errors import NotServed
from regard.methods.raw import raw


def edited(rerun: Rerun, spots: Sequence[Spot], rows: str = "readout") -> list[dict[str, Any]]:
    """Which attention was edited, for the settings of a finding; where no row is the readout's, all are."""
    read = tuple(rerun.readout.shape)
    return [
        {"site": spot.name, "kind": spot.kind, "heads": spot.shape[1]}
        | {"rows": rows if spot.rows is not None or read == (spot.shape[0], spot.shape[2]) else "all"}
        for spot in spots
    ]


def looks(part: Part, spots: Sequence[Spot]) -> list[Array]:
    """Of each example the weights of its real tokens that are not special, as the readout sees them: head mean.

    With several sites their mean. Special tokens are left out and the rest is not normalised.
    """
    keys = (part.batch.source or part.batch).real.shape[1]
    for spot in spots:
        if spot.shape[3] != keys:
            raise NotServed(
                f"site {spot.index} ({spot.name}) has {spot.shape[3]} keys, which are not the {keys} rows of features."
            )
    maps = [raw(part.trace, layer=spot.index) for spot in spots]
    stacked = [one.rows if one.source is None else one.source for one in maps]
    return on_tokens(part, torch.stack([one for one in stacked if one is not None]).mean(0))


def on_tokens(part: Part, numbers: Tensor) -> list[Array]:
    """Of each example the numbers ``(example, row)`` of its tokens that are not special."""
    plain = numbers.double().numpy(force=True)
    return [
        one[[row for row, word in zip(on.rows, on.word, strict=True) if word is not None]]
        for one, on in zip(plain, part.features, strict=True)
    ]


def removed(part: Part, rerun: Rerun, spots: Sequence[Spot], rows: Rows = "readout") -> Array:
    """``(example,)``: how far the output moves without what the sites hand on to the rows that are read, or others."""
    nothing = scale(0.0, sites=[spot.index for spot in spots], rows=rows)
    return np.asarray(part.moved(rerun(nothing)[None])[0])
