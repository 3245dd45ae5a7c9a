"""A control: every token alike."""

from __future__ import annotations

from regard.attention import Trace
from regard.attention.paths import on_tokens
from regard.types import Scores

FAMILY = "control"
NEEDS = ()
CITE = ""
FORMULA = "1/n"
PASSES = "0"
OF = "logit"


def uniform(trace: Trace) -> Scores:
    """The same share for every token, special ones and those of a source included: ``(example, row)``."""
    return on_tokens(trace, lambda _, features: [1 / len(features.tokens)] * len(features.tokens))
