"""From raw input to tensors, features, a readout and a scalar: what a model is, seen from outside."""

from __future__ import annotations

from pathlib import Path

from regard.errors import choose
from regard.subjects.causal import causal
from regard.subjects.image import image
from regard.subjects.loading import task_of
from regard.subjects.module import module
from regard.subjects.pooled import pooled
from regard.subjects.seq2seq import seq2seq
from regard.subjects.tabular import tabular
from regard.subjects.text import text
from regard.subjects.tokens import OverLimit
from regard.types import Subject

__all__ = ["causal", "image", "module", "open_subject", "pooled", "seq2seq", "tabular", "text"]


def open_subject(model: str | Path, *, over_limit: OverLimit = "error", trust_remote_code: bool = False) -> Subject:
    """`regard.causal`, `seq2seq`, `image` or `text`, by what the checkpoint was saved for."""
    choose("over_limit", over_limit, ("error", "truncate", "allow"))
    task = task_of(model, trust_remote_code=trust_remote_code)
    if task in ("recognise", "see"):
        return image(model, trust_remote_code=trust_remote_code)
    make = causal if task == "generate" else seq2seq if task == "translate" else text
    return make(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
