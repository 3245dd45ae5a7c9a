"""A control: numbers drawn by lot."""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np
from torch import Tensor

from regard.attention import Trace
from regard.attention.paths import on_tokens
from regard.errors import OptionError, whole_numbers
from regard.types import Features, Scores

FAMILY = "control"
NEEDS = ()
CITE = ""
FORMULA = "U(0, 1)"
PASSES = "0"
OF = "logit"


def random(trace: Trace, *, seed: int = 0) -> Scores:
    """Uniform numbers between 0 and 1, ``(example, row)``: one for each word, which its pieces share evenly.

    Drawn for pieces, long and rare words would get more, and chance would know something about them. They depend on
    the seed and on the example (its tokens, the cells of a table, the numbers of a picture), not on its batch.

    Args:
        trace: what was traced.
        seed: 0 or more.
    """
    (seed,) = whole_numbers("seed", seed)
    if seed < 0:
        raise OptionError(f"seed={seed} must be 0 or more.")

    table = hasattr(trace.subject, "columns_of")  # its whole numbers are codes; those of texts are padded ids
    cells = [
        one
        for one in trace.batch.inputs.values()
        if isinstance(one, Tensor) and (table or one.is_floating_point()) and len(one) == len(trace.batch)
    ]

    def drawn(example: int, features: Features) -> list[float]:
        known = zlib.crc32("\0".join(features.tokens).encode(errors="surrogatepass"))
        for one in cells:
            known = zlib.crc32(one[example].float().numpy(force=True).tobytes(), known)
        lots = np.random.default_rng([seed, known]).random(len(features.tokens)).tolist()
        pieces, firsts = Counter(features.word), dict[int | None, float]()
        return [
            lot if word is None else firsts.setdefault(word, lot) / pieces[word]
            for lot, word in zip(lots, features.word, strict=True)
        ]

    return on_tokens(trace, drawn)
