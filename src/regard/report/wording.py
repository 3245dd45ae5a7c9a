"""What the page says: one plain sentence for each criterion, and numbers as they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.draw.picture import plain
from regard.finding import Finding, said
from regard.judging import UNTESTED, Criterion
from regard.measures import Interval

MARKS = {"supported": "✓", "not supported": "✗", "inconclusive": "?", UNTESTED: "–"}
# For each criterion what it means that these examples speak for it, against it, and that they do not tell.
PLAIN = {
    "consistent": (
        "It ranks words much as gradients and leaving words out do.",
        "It ranks words otherwise than gradients and leaving words out do, and these agree better with each other.",
        "Whether it ranks words as gradients and leaving words out do cannot be told.",
    ),
    "exclusive": (
        "No very different attention was found that gives the same output.",
        "Very different attention gives the same output: what is shown is one of many stories.",
        "Whether very different attention would give the same output cannot be told.",
    ),
    "causal": (
        "Taking away what it ranks high matters more than taking away as much at random.",
        "Taking away what it ranks high matters less than taking away as much at random.",
        "Whether what it ranks high matters more than what is drawn at random cannot be told.",
    ),
    "necessary": (
        "The model is worse when it is trained without a choice where to look.",
        "The model does as well when it is trained without a choice where to look.",
        "Whether the model needs to choose where to look cannot be told.",
    ),
    "hard to manipulate": (
        "A model that is trained to look elsewhere pays for it.",
        "A model can be trained to look elsewhere, and pays nothing for it.",
        "Whether a model pays for looking elsewhere cannot be told.",
    ),
    "works out of context": (
        "Its weights help a model that sees no context.",
        "Its weights do not help a model that sees no context.",
        "Whether its weights help a model that sees no context cannot be told.",
    ),
    "plausible": (
        "It points at the words that people marked, more than chance would.",
        "It points at the words that people marked less than chance would.",
        "Whether it points at the words that people marked cannot be told.",
    ),
}
SHORT = {"ceiling": "the references", "random": "at random"}


def sentence(criterion: Criterion, outcome: str, evidence: Sequence[Finding]) -> str:
    """What came of a criterion, for somebody who has not read the papers."""
    lines = PLAIN.get(criterion.name, (f"It {criterion.asks}.", f"Not so: it {criterion.asks}.", "It cannot be told."))
    line = lines[("supported", "not supported").index(outcome) if outcome != "inconclusive" else 2]
    if outcome != "inconclusive":
        return line
    if {True, False} <= {one.supported for one in evidence}:
        return f"{line} Two trials contradict each other."
    needed = max((one.needed or 0 for one in evidence), default=0)
    if needed:
        return f"{line} About {needed:,} examples like these would settle it."
    unused = any("site is unused" in one.sentence for one in evidence)
    return f"{line} The output hardly depends on this attention at all." if unused else line


def number(value: Any) -> str:
    """A cell as it is read: numbers to four digits, nothing as a dash."""
    if value is None or value != value:
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else plain(value)


def stated(interval: Interval) -> str:
    """A value with its interval, if there is one."""
    return "not defined" if math.isnan(interval.value) else said(interval)


def small(value: float, top: float) -> str:
    """A number that fits under a word, as exact as the largest of its kind asks for."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.3f}".replace("0.", ".", 1) if 0.01 <= top < 10 else f"{value:.1e}" if value else "0"


def setting(value: Any) -> str:
    """A setting as it is read."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping) and all(isinstance(one, (str, int, float)) for one in value.values()):
        return plain(", ".join(f"{name}: {setting(one)}" for name, one in value.items()))
    if isinstance(value, (list, tuple)) and all(isinstance(one, (str, int, float)) for one in value):
        return plain(", ".join(setting(one) for one in value))
    return plain(json.dumps(value, ensure_ascii=False, default=str))
