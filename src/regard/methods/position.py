"""A control: earlier is more important."""

from __future__ import annotations

from regard.attention import Trace
from regard.attention.paths import on_tokens
from regard.types import Scores

FAMILY = "control"
NEEDS = ()
CITE = ""
FORMULA = "2(n − i) / n(n + 1)"
PASSES = "0"
OF = "logit"


def position(trace: Trace) -> Scores:
    """A share that falls from the first token to the last, in equal steps, and sums to 1: ``(example, row)``."""

    def falling(count: int) -> list[float]:
        return [2 * (count - place) / (count * (count + 1)) for place in range(count)]

    return on_tokens(trace, lambda _, features: falling(len(features.tokens)))
