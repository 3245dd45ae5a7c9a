"""From raw input to tensors, features, a readout and a scalar: what a model is, seen from outside."""

from regard.subjects.causal import causal
from regard.subjects.module import module
from regard.subjects.pooled import pooled
from regard.subjects.text import text

__all__ = ["causal", "module", "pooled", "text"]
