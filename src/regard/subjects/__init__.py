"""From raw input to tensors, features, a readout and a scalar: what a model is, seen from outside."""

from __future__ import annotations

from pathlib import Path

from regard.errors import choose
from regard.subjects.causal import CausalSubject, causal
from regard.subjects.loading import task_of
from regard.subjects.module import module
from regard.subjects.pooled import pooled
from regard.subjects.text import TextSubject, text
from regard.subjects.tokens import OverLimit

__all__ = ["causal", "module", "open_subject", "pooled", "text"]


def open_subject(model: str | Path, *, over_limit: OverLimit = "error") -> CausalSubject | TextSubject:
    """`regard.causal` or `regard.text`, by what the checkpoint was saved for."""
    choose("over_limit", over_limit, ("error", "truncate", "allow"))
    make = causal if task_of(model) == "generate" else text
    return make(model, over_limit=over_limit)
