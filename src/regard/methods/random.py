"""A control: numbers drawn by lot."""

from __future__ import annotations

import zlib

import numpy as np

from regard.attention import Trace
from regard.attention.paths import on_tokens
from regard.errors import OptionError, whole_numbers
from regard.types import Scores

FAMILY = "control"
NEEDS = ()
CITE = ""
FORMULA = "U(0, 1)"
PASSES = "0"
OF = "logit"


def random(trace: Trace, *, seed: int = 0) -> Scores:
    """Uniform numbers between 0 and 1, ``(example, row)``.

    They depend on the seed and on the tokens of the example, not on the batch that it is in.

    Args:
        trace: what was traced.
        seed: 0 or more.
    """
    (seed,) = whole_numbers("seed", seed)
    if seed < 0:
        raise OptionError(f"seed={seed} must be 0 or more.")

    def drawn(tokens: tuple[str, ...]) -> list[float]:
        words = zlib.crc32("\0".join(tokens).encode(errors="surrogatepass"))
        return [float(one) for one in np.random.default_rng([seed, words]).random(len(tokens))]

    return on_tokens(trace, drawn)
